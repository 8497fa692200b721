"""`fedq privacy`: the guarantee of a configuration, or the privacy that a run or checkpoint has spent."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from rich.console import Console

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.commands.configs import SUFFIXES, find
from lightning_fedq.commands.mechanism_text import parse_call, parse_mechanism
from lightning_fedq.commands.options import check_rounds, parse_changes
from lightning_fedq.commands.together import cost_of_folder, page_of_runs
from lightning_fedq.dpsgd.statement import SampleStatement
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.registry import mechanism_class
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.document import PAGE, document
from lightning_fedq.privacy.journal import Journal
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.planning import bits_behind
from lightning_fedq.privacy.recorded_laws import read_law
from lightning_fedq.privacy.report import Bits, Origin, PrivacyReport, State, privacy_report
from lightning_fedq.privacy.report_file import from_json, to_json
from lightning_fedq.privacy.run import ASSUMED, Run
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.reports.layouts import markdown, terminal
from lightning_fedq.reports.runs import describe_bits, read_rows, write_atomically
from lightning_fedq.rounds import Deadline, RoundPlanner
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.accounts import describe_run, planned_run
from lightning_fedq.training.checkpoints import count_other_runs, find_journal, journal_folders

_DELTA, _FLOAT_BITS = 1e-5, 32
_NOT_KNOWN = "A checkpoint does not list them. See `privacy.md` in the folder of its run (`RunFolder`)."


def report_of_config(
    config: str,
    rounds: int | None,
    delta: float | None,
    secagg: bool,
    *,
    params: int | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> PrivacyReport:
    """Report the guarantee of a configuration over its `trainer.max_epochs` rounds, or over `rounds`.

    Args:
        config: Path of the configuration.
        rounds: Number of rounds. None is the configuration's number.
        delta: Delta of the guarantee. None is the target's delta, or 1e-5.
        secagg: Whether to assume secure aggregation if the configuration has none.
        params: Number of trained parameters. None is the number of the model.
        changes: Settings to change first, by dotted name as in `fedq fit --set`.

    Raises:
        ValueError: If the configuration has no `Federated` callback or no number of rounds, there is no such
            setting, or its target has another delta.
    """
    from lightning_fedq.callbacks.trainer_lookup import find_federated
    from lightning_fedq.commands.run import FedqCLI  # imports Lightning's command line, needed only here

    check_rounds(rounds)
    cli = FedqCLI(["--config", config], run=False, changes=changes)
    federated = find_federated(cli.trainer, "fedq privacy")
    limit = federated.count_rounds(cli.trainer, cli.model) if rounds is None else rounds
    if limit is None or limit < 1:
        given = f"trainer.max_epochs={cli.trainer.max_epochs} and max_steps={cli.trainer.max_steps}"
        raise ValueError(f"{config} needs a known number of rounds, got {given}. Give --rounds.")
    dim = federated.local.num_coordinates(cli.model) if params is None else params
    byzantine = count_byzantine(cli.trainer, federated.planner)
    mechanism = federated.calibrated(dim, limit, byzantine)
    run, target = planned_run(federated, mechanism, dim, limit, byzantine), federated.privacy_target
    delta = _choose_delta(config, target, delta, f", or add --set Federated.privacy.delta={delta}")
    report = _report(run, delta, secagg, "planned", target)
    update, unmasked = bits_behind(mechanism, run.context, federated.server.secure_aggregation)
    down = float(federated.server.broadcast_bits or _FLOAT_BITS)
    bits = Bits(measured=False, update=update, unmasked=unmasked, down=down)
    origin = Origin(config=hashlib.sha256(Path(config).read_bytes()).hexdigest())
    return replace(report, bits=bits, origin=origin)


def report_of_checkpoint(
    path: Path, rounds: int | None, delta: float | None, secagg: bool, kind: type[Mechanism] | None = None
) -> PrivacyReport:
    """Report the privacy that the run of a checkpoint has spent, or will have spent after `rounds`.

    For future rounds, the report adds the expected charges of randomly drawn cohorts to each client's past
    charges.

    Args:
        path: Checkpoint of a run with `Federated`.
        rounds: Number of rounds of the whole run. None reports the rounds so far.
        delta: Delta of the guarantee. None is the target's delta, or 1e-5.
        secagg: Whether to assume secure aggregation if the run has none.
        kind: Class of the run's mechanism, if the class is not installed.

    Raises:
        ValueError: If the checkpoint holds no federation or only weights, its rounds were charged under other
            terms than this report would use, or it has more than `rounds` rounds.
    """
    check_rounds(rounds)
    callbacks = _load_callbacks(path)
    state = _state_with("federation", callbacks)
    if state is None:
        raise ValueError(f"{path} holds no federation, because its run had no Federated callback")
    federation, engine, target = state["federation"], state["engine"], _read_target(state)
    delta = _choose_delta(str(path), target, delta, "")
    charged = _read_ledger(path, engine["ledger"], repeatable=federation["seed"] != "None")
    past = charged.rounds
    if rounds is not None and rounds < past:
        raise ValueError(
            f"The run of {path} was charged for {past} rounds, got --rounds {rounds}. Omit --rounds, or "
            f"give at least {past}."
        )
    run_of = _recorded_run(federation, engine, charged.dim, callbacks, kind)
    run = run_of(rounds=past, charges=charged.charges)
    charged.set_terms(run.terms)
    if rounds is not None and run.max_rounds is not None and past == engine["round"]:
        # disjoint cohorts take turns and no round was repeated, so the charges of all rounds are known
        run = run_of(rounds=rounds, charges=None)
    elif rounds is not None:
        run = run_of(rounds=rounds, charges=charged.charges, to_come=rounds - past)
    report = _report(run, delta, secagg, "running" if rounds is None else "planned", target)
    samples = None
    if (private_sgd := _state_with("histories", callbacks)) is not None:
        samples = _samples(private_sgd, charged if rounds is None else None, delta)
    origin = Origin(model=hashlib.sha256(path.read_bytes()).hexdigest())
    return replace(report, leaves=(_NOT_KNOWN,), origin=origin, samples=samples)


def _load_callbacks(path: Path) -> dict[str, Any]:
    """Return the states of callbacks in a checkpoint.

    Raises:
        ValueError: If the checkpoint holds only weights, or is of a run with secret cohorts.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if "callbacks" not in checkpoint:
        page = path.with_name("privacy.md")
        stated = f"See {page}" if page.is_file() else "Give one of Lightning's own checkpoints of the run"
        raise ValueError(
            f"{path} holds only weights, as a RunFolder's model.ckpt, without their privacy cost. {stated}."
        )
    callbacks: dict[str, Any] = checkpoint["callbacks"]
    if _state_with("cohorts", callbacks) is not None:
        raise ValueError(
            f"{path} has secret cohorts and holds no charges, which would reveal the cohorts. The "
            "privacy.md of its RunFolder has the cost."
        )
    return callbacks


def _recorded_run(
    federation: Mapping[str, Any],
    engine: Mapping[str, Any],
    dim: int,
    callbacks: Mapping[str, dict[str, Any]],
    kind: type[Mechanism] | None,
) -> Callable[..., Run]:
    """Return a function that describes the run of a checkpoint, given `rounds`, `charges` and `to_come`.

    Args:
        federation: Settings of the federation.
        engine: State of the server.
        dim: Number of coordinates of the longest vector that was charged for.
        callbacks: States of all callbacks.
        kind: Class of the run's mechanism, if the class is not installed.
    """
    # a Trainer that only tests has no ByzantineClients callback, so their number is also in the terms
    terms = engine["ledger"].get("terms") or {}
    limit = federation.get("deadline")
    deadline = None if limit is None else Deadline(**parse_call(limit)[1])
    simulated = deadline is not None and deadline.durations is not None
    planner = RoundPlanner(
        int(federation["num_clients"]),
        0,
        read_law(federation),
        float(federation["dropout_probability"]),
        terms.get("clients") == "real" and not simulated,
        deadline=deadline,
    )
    listed = (_state_with("byzantine", callbacks) or {"byzantine": ()})["byzantine"]
    num_byzantine = max(min(len(listed), planner.cohort_size), int(terms.get("num_byzantine", "0")))
    protocol = federation["secure_aggregation"]
    return partial(
        describe_run,
        planner,
        parse_mechanism(federation["mechanism"], kind),
        max(engine["weights"].numel(), dim),
        secure_sum=None if protocol == "None" else SecAgg(**parse_call(protocol)[1]),
        plain_sum=federation["weighting"] == "uniform" and federation["aggregator"] == "None",
        num_byzantine=num_byzantine,
        secure_keys=federation["seed"] == "None",
    )


def _choose_delta(source: str, target: PrivacyTarget | None, delta: float | None, more: str) -> float:
    """Return the delta that is asked for, otherwise the target's delta, otherwise 1e-5.

    Args:
        source: Configuration or checkpoint, for the error.
        target: Target of the run, or None.
        delta: Delta that is asked for, or None.
        more: Further cure for the error.

    Raises:
        ValueError: If `delta` differs from the target's delta.
    """
    wanted = None if target is None else target.delta
    if delta is not None and wanted not in (None, delta):
        raise ValueError(
            f"The target of {source} has delta {wanted:g}, got --delta {delta:g}. Omit --delta{more}."
        )
    return next(value for value in (delta, wanted, _DELTA) if value is not None)


def _read_target(state: Mapping[str, Any]) -> PrivacyTarget | None:
    """Return the privacy target in the state of a federation, or None if the run had no target."""
    calibration = state.get("calibration")
    if calibration is None:
        return None
    # the text has the adversary as an enum member or as its name
    text = re.sub(r"<Adversary\.(\w+):.*>", r"'\1'", calibration["target"])
    return PrivacyTarget(**parse_call(text)[1])


def _state_with(key: str, callbacks: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the saved state of the callback that has `key`, or None.

    The key "federation" is of `Federated`, "histories" of `DPSGD`, and "byzantine" of `ByzantineClients`.
    """
    return next((state for state in callbacks.values() if key in state), None)


def _samples(state: dict[str, Any], ledger: Ledger | None, delta: float) -> SampleStatement:
    """Return the record-level privacy that DP-SGD has spent inside the clients, from a checkpoint.

    Args:
        state: State of the `DPSGD` callback.
        ledger: Ledger of the run, whose charges after the checkpoint count with the checkpoint's noise and
            sampling rate. None if the report is for another number of rounds.
        delta: Delta of the guarantee.
    """
    histories = dict(state["histories"])
    remarks = [
        "A checkpoint does not hold DPSGD's gradient norm, seed and delta, or the number of samples.",
        "The delta is that of this report. It should be below 1 / samples of a client.",
    ]
    if ledger is None:
        remarks.append("The steps are those of the checkpoint, not of the requested rounds.")
    elif state["charges"]:  # later rounds count as a resumed run counts them
        lost = [now - then for now, then in zip(ledger.charges.tolist(), state["charges"], strict=True)]
        for client, (noise, rate, steps) in enumerate(state["prices"]):
            later = [(noise, rate, int(steps) * lost[client])] * (lost[client] > 0)
            histories[str(client)] = [*histories.get(str(client), ()), *later]
    return SampleStatement.from_histories(histories, delta, tuple(remarks), state["rows_per_person"])


def _read_ledger(path: Path, state: dict[str, Any], repeatable: bool) -> Ledger:
    """Return the ledger of a checkpoint, with later charges of its journal and those of other runs.

    Args:
        path: Checkpoint.
        state: State of the ledger.
        repeatable: Whether the run has keys from a seed.
    """
    ledger = Ledger(len(state["charges"]), state["mechanism"])
    ledger.load_state_dict(state)
    recorded, position = ledger.recorded
    journal = find_journal(recorded, path)
    uncounted = "so this report does not count later rounds"
    if recorded and journal is None:
        rank_zero_warn(f"The journal {recorded} of {path} is missing, {uncounted}")
    if ledger.names_no_journal and not repeatable:
        rank_zero_warn(f"{path} names no journal, {uncounted}")
    if journal is not None:
        ledger.keep(Journal(journal, ledger.mechanism, ledger.num_clients, position), repeatable)
    if not repeatable:
        ledger.folders = journal_folders(ledger, path)
        count_other_runs(ledger)
    return ledger


def _report(
    run: Run, delta: float, assumed: bool, state: State, target: PrivacyTarget | None
) -> PrivacyReport:
    """Return the report of a run. `assumed` adds secure aggregation if the run has none."""
    if assumed and run.threat.secure_sum is None:
        run = replace(run, threat=replace(run.threat, secure_sum=ASSUMED))
    return privacy_report(run, delta, state, target)


def report_of_folder(folder: Path) -> PrivacyReport:
    """Return the report that `RunFolder` wrote when the run ended.

    Raises:
        ValueError: If there is no report, or the run continued after it was written.
    """
    figures, table = folder / "privacy.json", folder / "metrics.csv"
    if not figures.is_file():
        raise ValueError(
            f"{folder} holds no privacy.json, which RunFolder writes when a run ends. "
            "Give a checkpoint of the run, or its configuration."
        )
    report = from_json(figures.read_text())
    if table.is_file() and len(read_rows(table)) > report.rounds:
        raise ValueError(
            f"{figures} covers {report.rounds} rounds, but the run went on to {len(read_rows(table))}. "
            "Give its last checkpoint."
        )
    return report


def main(
    sources: Annotated[Sequence[str], "CONFIG|CKPT|RUN"],
    *,
    delta: float | None = None,
    rounds: int | None = None,
    secagg: bool = False,
    params: int | None = None,
    set_: Annotated[Sequence[str], "NAME=VALUE"] = (),
    mechanism: Annotated[str | None, "CLASS"] = None,
    out: Path | None = None,
) -> None:
    """Print the guarantee of a configuration, or the privacy that a run has spent: against whom,
    how much, at which delta, under which assumptions. For several runs with the same clients,
    print their joint epsilon. It covers any search for settings if every run is named, also
    failed ones.

    Args:
        sources: Configuration (a file or a name), checkpoint, or folder of a finished run. Several sources
            are folders of runs that `fedq fit` started. An unfinished run counts with all its rounds.
        delta: Additive slack in the bound of epsilon, below one divided by the number of protected units
            (default: the target's delta, or 1e-5).
        rounds: Number of rounds (default: trainer.max_epochs, or the rounds of the checkpoint).
        secagg: Assume secure aggregation if the run has none.
        params: Number of trained parameters (default: that of the configuration's model).
        set_: Settings of a configuration to change first, as in `fedq fit` (LDPQ.epsilon_per_coordinate=0.1).
        mechanism: Class path of a checkpoint's mechanism, if no installed package declares it.
        out: Folder that also gets privacy.md and privacy.json.
    """
    if delta is not None:
        check_delta(delta)
    source, *others = sources
    path = Path(source)
    sets_more = (mechanism, params, rounds) != (None, None, None) or secagg or bool(set_)
    if others:
        if sets_more:
            raise ValueError("Several runs have their own settings. Use no options except --delta and --out.")
        joint_delta = _DELTA if delta is None else delta
        costs = [cost_of_folder(Path(folder), joint_delta) for folder in sources]
        page = page_of_runs(costs, joint_delta, "Privacy of several runs together")
        print(page)
        if out is not None:
            write_atomically(out / "privacy.md", page)
        return None
    if path.is_dir():
        if sets_more or delta is not None:
            raise ValueError(f"A finished run has its own settings. Give {path}/config.yaml to change them.")
        return _print(report_of_folder(path), out)
    if path.suffix != ".ckpt":
        path = find(source)
    elif not path.is_file():
        raise ValueError(f"There is no file {path}")
    if path.suffix in SUFFIXES:
        if mechanism is not None:
            raise ValueError("--mechanism is for checkpoints. A configuration names its class itself.")
        changes = parse_changes(set_)
        report = report_of_config(str(path), rounds, delta, secagg, params=params, changes=changes)
        return _print(report, out)
    if set_ or params is not None:
        raise ValueError("A checkpoint has its own settings. Only configurations allow --set and --params.")
    kind = None if mechanism is None else mechanism_class(mechanism)
    return _print(report_of_checkpoint(path, rounds, delta, secagg, kind), out)


def _print(report: PrivacyReport, out: Path | None) -> None:
    """Print a report, and write it to `out` if given."""
    console = Console(width=max(Console().width, 80))
    terminal(console, *document(report))
    if sent := describe_bits(report):
        console.print(sent, highlight=False, markup=False)
    if out is not None:
        write_atomically(out / "privacy.md", markdown(*document(report, PAGE)))
        write_atomically(out / "privacy.json", to_json(report))
