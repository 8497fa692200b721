"""`fedq privacy`: what a configuration would protect, or what a run or the run of a checkpoint has spent."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from rich.console import Console

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.clients.vector import num_coordinates
from lightning_fedq.commands.configs import SUFFIXES, find
from lightning_fedq.commands.mechanism_text import parse_call, parse_mechanism
from lightning_fedq.commands.options import check_rounds, parse_changes
from lightning_fedq.commands.together import cost_of_folder, page_of_runs
from lightning_fedq.dpsgd.statement import SampleStatement
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.registry import mechanism_class
from lightning_fedq.privacy.cohorts import Available, CohortLaw, Cyclic, DisjointOnce, FixedSize
from lightning_fedq.privacy.document import document, from_json, to_json
from lightning_fedq.privacy.journal import Journal
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.planning import bits_behind
from lightning_fedq.privacy.report import Bits, Origin, PrivacyReport, State, privacy_report
from lightning_fedq.privacy.run import ASSUMED, Run
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.reports.layouts import markdown, terminal
from lightning_fedq.reports.runs import read_rows, write_atomically
from lightning_fedq.rounds import Deadline, RoundPlanner
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.accounts import describe_run, planned_run
from lightning_fedq.training.checkpoints import count_other_runs, find_journal, journal_folders

_DELTA, _FLOAT_BITS = 1e-5, 32
_NOT_KNOWN = "Not known from a checkpoint: `privacy.md` in the folder of its run (`RunFolder`) lists it."


def report_of_config(
    config: str,
    rounds: int | None,
    delta: float | None,
    secagg: bool,
    *,
    params: int | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> PrivacyReport:
    """State what a configuration gives over its `trainer.max_epochs` rounds, or over `rounds`.

    Args:
        config: Path of the configuration.
        rounds: Rounds in place of its own.
        delta: Chance with which the guarantee may fail; None is the target's, or 1e-5.
        secagg: Whether to assume secure aggregation where it has none.
        params: Parameters in place of the model's.
        changes: Settings to change first, by dotted name as in `fedq fit --set`.

    Raises:
        ValueError: If it has no `Federated` callback or no number of rounds, there is no such setting, or its
            target has another delta.
    """
    from lightning_fedq.callbacks.trainer_lookup import find_federated
    from lightning_fedq.commands.run import FedqCLI  # imports Lightning's command line: only here

    check_rounds(rounds)
    cli = FedqCLI(["--config", config], run=False, changes=changes)
    federated = find_federated(cli.trainer, "fedq privacy")
    limit = cli.trainer.max_epochs if rounds is None else rounds
    if limit is None or limit < 1:
        raise ValueError(f"{config} has no trainer.max_epochs >= 1, got {limit}; say how many --rounds")
    dim = (
        num_coordinates(cli.model, federated.local.buffers, federated.local.patterns, federated.local.shared)
        if params is None
        else params
    )
    byzantine = count_byzantine(cli.trainer, federated.planner)
    mechanism = federated.calibrated(dim, limit, byzantine)
    run, target = planned_run(federated, mechanism, dim, limit, byzantine), federated.privacy_target
    delta = _choose_delta(config, target, delta, f", or --set Federated.privacy.delta={delta}")
    report = _report(run, delta, secagg, "planned", target)
    update, unmasked = bits_behind(mechanism, run.context, federated.server.secure_aggregation)
    origin = Origin(config=hashlib.sha256(Path(config).read_bytes()).hexdigest())
    down = float(federated.server.broadcast_bits or _FLOAT_BITS)
    return replace(
        report, bits=Bits(measured=False, update=update, unmasked=unmasked, down=down), origin=origin
    )


def report_of_checkpoint(
    path: Path, rounds: int | None, delta: float | None, secagg: bool, kind: type[Mechanism] | None = None
) -> PrivacyReport:
    """State what the run of a checkpoint has spent so far, or will have after `rounds`.

    Rounds to come average over who is drawn, on top of what each client was charged for.

    Args:
        rounds: Rounds of the whole run, once it has gone on; None is what it has spent.
        delta: Chance with which the guarantee may fail; None is the target's, or 1e-5.
        secagg: Whether to assume secure aggregation where it has none.
        kind: Class of its mechanism, where that is no installed one.

    Raises:
        ValueError: If the checkpoint holds no federation, or weights alone, or rounds that were charged on
            other terms than those that would be priced here, or more rounds.
    """
    check_rounds(rounds)
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if "callbacks" not in checkpoint:
        page = path.with_name("privacy.md")
        stated = f"{page} says it" if page.is_file() else "give one of Lightning's own checkpoints of the run"
        raise ValueError(
            f"{path} holds weights alone, as model.ckpt of a RunFolder does, and not what they cost; {stated}"
        )
    callbacks = checkpoint["callbacks"]
    if _state_with("cohorts", callbacks) is not None:
        raise ValueError(
            f"{path} is of a federation with secret cohorts, whose checkpoint holds no charges: they would "
            "tell who was drawn; the privacy.md of its RunFolder says what it cost"
        )
    state = _state_with("federation", callbacks)
    if state is None:
        raise ValueError(f"{path} holds no federation; it was not saved by a run with the Federated callback")
    federation, engine, target = state["federation"], state["engine"], _read_target(state)
    delta = _choose_delta(str(path), target, delta, "")
    planner = _make_planner(federation, (engine["ledger"].get("terms") or {}).get("clients") == "real")
    protocol = federation["secure_aggregation"]
    charged = Ledger(len(engine["ledger"]["charges"]), engine["ledger"]["mechanism"])
    charged.load_state_dict(engine["ledger"])
    _read_journal(path, charged, federation["seed"] != "None")  # those after the checkpoint, too
    past, charges = charged.rounds, charged.charges
    if rounds is not None and rounds < past:
        raise ValueError(
            f"{path} is of a run that was charged for {past} rounds, got --rounds {rounds}; leave it out for "
            f"what they cost, or ask for {past} and more"
        )
    masks = None if protocol == "None" else SecAgg(**parse_call(protocol)[1])
    known = (_state_with("byzantine", callbacks) or {"byzantine": ()})["byzantine"]
    byzantine = min(len(known), planner.cohort_size)
    terms = engine["ledger"].get("terms") or {}  # a Trainer that only tests has no ByzantineClients
    run_of = partial(
        describe_run,
        planner,
        parse_mechanism(federation["mechanism"], kind),
        max(engine["weights"].numel(), charged.dim),
        secure_sum=masks,
        plain_sum=federation["weighting"] == "uniform" and federation["aggregator"] == "None",
        num_byzantine=max(byzantine, int(terms.get("num_byzantine", "0"))),
        secure_keys=federation["seed"] == "None",
    )
    run = run_of(rounds=past, charges=charges)
    charged.set_terms(run.terms)
    report = _report(run, delta, secagg, "running", target)
    if rounds is not None:
        # cohorts that take turns, of which none was repeated, go on in turn
        dealt = run.max_rounds is not None and past == engine["round"]
        known = None if dealt else charges
        whole = run_of(rounds=rounds, charges=known, to_come=0 if dealt else rounds - past)
        report = _report(whole, delta, secagg, "planned", target)
    origin = Origin(model=hashlib.sha256(path.read_bytes()).hexdigest())
    report = replace(report, leaves=(_NOT_KNOWN,), origin=origin)
    private_sgd = _state_with("histories", callbacks)
    if private_sgd is None:
        return report
    return replace(report, samples=_samples(private_sgd, charged if rounds is None else None, delta))


def _choose_delta(source: str, target: PrivacyTarget | None, delta: float | None, more: str) -> float:
    """Delta of a target and of all figures beside it, or the one that is asked for, or the usual one."""
    wanted = None if target is None else target.delta
    if delta is not None and wanted not in (None, delta):
        raise ValueError(
            f"{source} asks for its epsilon at delta {wanted:g}, and so are all figures, got --delta "
            f"{delta:g}; leave it out{more}"
        )
    return next(one for one in (delta, wanted, _DELTA) if one is not None)


def _read_target(state: Mapping[str, Any]) -> PrivacyTarget | None:
    """The target of a federation's run, as its checkpoint holds it."""
    found = state.get("calibration")
    if found is None:
        return None
    text = re.sub(r"<Adversary\.(\w+):.*>", r"'\1'", found["target"])  # a member or its name
    return PrivacyTarget(**parse_call(text)[1])


def _make_planner(federation: Mapping[str, Any], may_be_silent: bool) -> RoundPlanner:
    """Plan of the rounds to come. Whom a rule names later is not known: as the worst, everybody each time."""
    clients, size = int(federation["num_clients"]), int(federation["clients_per_round"])
    laws: dict[str, type[Any]] = {law.word: law for law in (FixedSize, Cyclic, DisjointOnce)}
    law: CohortLaw = laws[federation.get("participation", "random")](size)
    if "available" in federation:
        law = Available(lambda round: range(clients), size)
    deadline = federation.get("deadline")
    limit = None if deadline is None else Deadline(**parse_call(deadline)[1])
    simulated = limit is not None and limit.durations is not None
    return RoundPlanner(
        clients,
        0,
        law,
        float(federation["dropout_probability"]),
        may_be_silent and not simulated,
        deadline=limit,
    )


def _state_with(key: str, callbacks: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The saved state of the callback that keeps `key`: "federation" is Federated's, "histories" DPSGD's,
    "byzantine" those of ByzantineClients."""
    return next((state for state in callbacks.values() if key in state), None)


def _samples(state: dict[str, Any], ledger: Ledger | None, delta: float) -> SampleStatement:
    """DP-SGD's spending inside the clients, as far as a checkpoint tells.

    No ledger: of other rounds.
    """
    histories = dict(state["histories"])
    remarks = [
        "Read from a checkpoint, which holds neither DPSGD's gradient norm, nor its seed, nor its delta,",
        "nor how many samples a client has: delta is the one asked for; it should be below 1 / samples.",
    ]
    if ledger is None:
        remarks.append("The steps are those of the checkpoint, not of the rounds asked for.")
    elif state["charges"]:  # at the checkpoint's price, as a resumed run counts them
        lost = [now - then for now, then in zip(ledger.charges.tolist(), state["charges"], strict=True)]
        for client, (noise, rate, steps) in enumerate(state["prices"]):
            later = [(noise, rate, int(steps) * lost[client])] * (lost[client] > 0)
            histories[str(client)] = [*histories.get(str(client), ()), *later]
    rows = state.get("rows_per_person", 1)  # of a checkpoint of 0.2: one
    return SampleStatement.from_histories(histories, delta, tuple(remarks), rows)


def _read_journal(path: Path, ledger: Ledger, repeatable: bool) -> None:
    """Take in what a ledger's journal says beyond the checkpoint, and those of other runs beside it."""
    recorded, position = ledger.recorded
    found = find_journal(recorded, path)
    if recorded and found is None:
        rank_zero_warn(
            f"the journal {recorded} of {path} is missing: what was sent later is not in this report"
        )
    if ledger.names_no_journal and not repeatable:
        rank_zero_warn(f"{path} names no journal: what was sent later is not in this report")
    if found is not None:
        ledger.keep(Journal(found, ledger.mechanism, ledger.num_clients, position), repeatable)
    if not repeatable:
        ledger.folders = journal_folders(ledger, path)
        count_other_runs(ledger)


def _report(
    run: Run, delta: float, assumed: bool, state: State, target: PrivacyTarget | None
) -> PrivacyReport:
    """Report of a run, with secure aggregation assumed where it has none and `assumed` asks for it."""
    if assumed and run.threat.secure_sum is None:
        run = replace(run, threat=replace(run.threat, secure_sum=ASSUMED))
    return privacy_report(run, delta, state, target)


def report_of_folder(folder: Path) -> PrivacyReport:
    """The report that `RunFolder` wrote when the run ended.

    Raises:
        ValueError: If there is none, or the run went on since.
    """
    figures, table = folder / "privacy.json", folder / "metrics.csv"
    if not figures.is_file():
        raise ValueError(
            f"{folder} holds no privacy.json, which RunFolder writes when a run ends; "
            "give a checkpoint of the run, or its configuration"
        )
    report = from_json(figures.read_text())
    if table.is_file() and len(read_rows(table)) > report.rounds:
        raise ValueError(
            f"{figures} is of {report.rounds} rounds, and the run went on to {len(read_rows(table))}; "
            "give its last checkpoint"
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
    """Say what a configuration would protect, or what a run has spent: from whom, how much, at
    which delta, under which assumptions. Of several runs with the same clients: what they cost
    together, whatever searched for settings; name every run, also those that failed.

    Args:
        sources: Configuration (a file or a name), checkpoint, or folder of a run that ended. Several are
            folders of runs that `fedq fit` began; one that has not ended counts with all its rounds.
        delta: Chance with which the guarantee may fail, below 1 / clients (default: the target's, or 1e-5).
        rounds: Rounds (default: trainer.max_epochs, or those in the checkpoint).
        secagg: Assume secure aggregation if the run has none.
        params: Parameters (default: those of the configuration's model).
        set_: Settings of a configuration to change first, as in `fedq fit` (LDPQ.epsilon=0.1).
        mechanism: Class path of a checkpoint's mechanism, where no installed package declares it.
        out: Folder to write privacy.md and privacy.json into, too.
    """
    source, *others = sources
    path, changes = Path(source), (mechanism, params, rounds) != (None, None, None) or secagg or bool(set_)
    if others:
        if changes:
            raise ValueError("several runs count as they are; only --delta and --out go with them")
        return _together(sources, delta or _DELTA, out)
    if path.is_dir():
        if changes or delta is not None:
            raise ValueError(f"the page of a run that ended has its own figures; ask {path}/config.yaml")
        return _print(report_of_folder(path), out)
    if path.suffix != ".ckpt":
        path = find(source)
    elif not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix in SUFFIXES:
        if mechanism is not None:
            raise ValueError("--mechanism is for checkpoints; a configuration names its class itself")
        report = report_of_config(
            str(path), rounds, delta, secagg, params=params, changes=parse_changes(set_)
        )
        return _print(report, out)
    if set_ or params is not None:
        raise ValueError("a checkpoint has its own settings; --set and --params are for configurations")
    kind = None if mechanism is None else mechanism_class(mechanism)
    return _print(report_of_checkpoint(path, rounds, delta, secagg, kind), out)


def _together(folders: Sequence[str], delta: float, out: Path | None) -> None:
    """Print what all runs cost together, and write it where asked."""
    costs = [cost_of_folder(Path(folder), delta) for folder in folders]
    page = page_of_runs(costs, delta, "Privacy of several runs together")
    print(page)
    if out is not None:
        write_atomically(out / "privacy.md", page)


def _print(report: PrivacyReport, out: Path | None) -> None:
    """Print a report, and write it where asked."""
    console = Console()
    terminal(Console(width=max(console.width, 80)), *document(report))
    if out is not None:
        write_atomically(out / "privacy.md", markdown(*document(report)))
        write_atomically(out / "privacy.json", to_json(report))
