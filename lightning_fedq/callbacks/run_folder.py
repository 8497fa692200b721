"""Write what a run did to a folder: rounds, summary, a page, pictures. See `lightning_fedq.reports.runs`."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.callbacks.dpsgd import DPSGD
from lightning_fedq.callbacks.privacy_budget import PrivacyBudget
from lightning_fedq.callbacks.trainer_lookup import find_engine, find_federated
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.privacy import secret_row
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.document import document, summarise_privacy, to_json
from lightning_fedq.privacy.planning import fixed_bits
from lightning_fedq.privacy.report import Bits, PrivacyReport
from lightning_fedq.reports.layouts import markdown
from lightning_fedq.reports.runs import (
    BITS_PER_MEGABYTE,
    Row,
    append_row,
    check_run_name,
    first_metric,
    fresh_folder,
    metric_mode,
    plot_progress,
    print_summary,
    read_rows,
    report_markdown,
    save_figure,
    totals,
    write_atomically,
    write_summary,
)
from lightning_fedq.rounds import RoundEngine, RoundRecord, metric_name
from lightning_fedq.training.accounts import (
    FIGURES,
    choose_delta,
    describe_noise,
    epsilon_by_round,
    make_report,
    noise_over_signal,
    stopped,
)
from lightning_fedq.training.user_messages import describe_timing, has_revealing_lengths, unprotected_outputs

MODEL, CLIENTS = "model.ckpt", "clients"
PICTURE = "accuracy.png"
RECORDED = {metric_name(field.name) for field in fields(RoundRecord)}
RECORDED |= {metric_name("num_non_finite"), "charged", "seconds"}
RECORDED |= {name.removeprefix("fed/") for name in FIGURES}
RECORDED |= {f"{sim}epsilon_{who.name.lower()}" for who in Adversary for sim in ("", "sim_")}
SIMULATION_ONLY = ("sim_", "leak/")
"""How columns begin that no checkpoint of a private run holds."""


class RunFolder(pl.Callback):
    """Folder of a run: its rounds and global model, at the end a summary, a report and pictures.

    `metrics.csv` and `model.ckpt` are kept up to date every round. `model.ckpt` is a Lightning checkpoint of
    the weights alone, for `trainer.test(..., ckpt_path=...)` or `fedq test runs/name`; to resume a run takes
    one of Lightning's own. A folder that is there is left alone: the next one is called `name-2`. A resumed
    run goes on in its own folder, as the checkpoint names it: one that holds these rounds, or none below
    `root`. Elsewhere it begins a new one. What clients log in training and what stays with them
    (`Federated(client_metrics="local")`) is in `clients/`, a file a client, and so is who holds which labels:
    it is part of the simulation, and nothing that a server would have.

    Args:
        name: Name of the run and of its folder below `root`.
        root: Folder of all runs.
        monitor: The metric of the pictures and of "best"; None is `val_acc`, or else the first `val_*` one.
        mode: Is a larger ("max") or a smaller ("min") value better? None goes by the metric's name: losses
            and errors are better small.
        delta: Chance with which the reported privacy guarantee may fail, in (0, 1 / num_clients); the fit
            refuses another at its start, and one that is not a `PrivacyBudget`'s. None is that, the privacy
            target's, or min(1e-5, 0.1 / num_clients). Loggers have it as `fed/delta`.
        show: Print the summary when the training ends.
        baseline: A value of the metric to draw as a line, such as that of a central training.

    Example:
        >>> callbacks = [RunFolder("digits", "runs")]  # behind Federated(...), writes runs/digits
    """

    knows_clients = True

    def __init__(
        self,
        name: str = "run",
        root: str = "runs",
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
        delta: float | None = None,
        show: bool = True,
        baseline: float | None = None,
    ) -> None:
        if mode not in ("max", "min", None):
            raise ValueError(f"mode must be 'max' or 'min', got {mode!r}")
        if not isinstance(show, bool) or not isinstance(baseline, float | int | None):
            got = f"{show!r} and {baseline!r}"
            raise TypeError(f"show must be True or False and baseline a number, got {got}; write no quotes")
        check_run_name(name)
        self.name, self.root, self.monitor, self.mode = name, Path(root), monitor, mode
        self.delta, self.show, self.baseline = delta, show, baseline
        self.clients_delta = delta
        self.path: Path | None = None
        self.rows: list[Row] = []
        self.summary: dict[str, Any] = {}
        self.privacy: PrivacyReport | None = None
        self.config: str | None = None
        """The resolved configuration as YAML; the `fedq` command sets it."""
        self._test_metrics: dict[str, float] = {}
        self._round_started, self._private, self._trains = 0.0, True, False
        self._lengths_tell, self._starts_at = True, 0
        self._ended, self._drawn = "", False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a delta that the report at the end could not use."""
        if stage != "fit":
            return
        federated = find_federated(trainer, "RunFolder")
        try:
            check_delta(choose_delta(federated, trainer), federated.clients.num_clients, "clients")
        except ValueError as error:
            raise ValueError(f"RunFolder(delta={self.delta!r}): {error}") from None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the folder: the one of the run that goes on, or a new one."""
        federated, engine = find_federated(trainer, "RunFolder"), find_engine(trainer, "RunFolder")
        records, client_log = federated.records, federated.client_log
        if self._starts_at and self._starts_at == len(records):
            self.rows = [{**record.metrics(), "seconds": math.nan} for record in records]
        self._starts_at = 0
        if len(self.rows) != len(records):
            self.path, self.rows = None, []
        if self.path is None:
            new = fresh_folder(self.root / self.name) if trainer.is_global_zero else None
            self.path = trainer.strategy.broadcast(new)
        assert client_log is not None
        client_log.keep, self._trains, self._ended = True, True, ""
        self._private, self._lengths_tell = (
            not isinstance(engine.keys, SeededKeys),
            has_revealing_lengths(engine),
        )
        if self.config is not None and trainer.is_global_zero:
            write_atomically(self._folder() / "config.yaml", self.config)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._round_started = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the round's row."""
        federated = find_federated(trainer, "RunFolder")
        if len(federated.records) == len(self.rows):
            return  # the round was stopped on the way
        record = federated.records[-1]
        logged = {key.removeprefix("fed/"): float(value) for key, value in trainer.callback_metrics.items()}
        seconds = time.monotonic() - self._round_started
        charged = {"charged": float(federated.ledger.max_charges)}
        if federated.planner.law.secret:  # both would tell of who was drawn
            charged, seconds = {}, math.nan
        self.rows.append({**logged, **record.metrics(), **charged, "seconds": seconds})
        if trainer.is_global_zero:
            append_row(self._folder() / "metrics.csv", self.rows)
        # add a line to the file of every client that has logged something which stays with it
        assert federated.client_log is not None
        taken = federated.client_log.pop_metrics()  # of all ranks, so all of them ask
        for client, values in taken.items() if trainer.is_global_zero else ():
            path = self._folder() / CLIENTS / f"{client}.jsonl"
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps({"round": int(record.round) + 1, **values}) + "\n")
        measured = federated.client_evaluations[-1:]
        if measured and measured[0].round == record.round:
            (self._folder() / CLIENTS).mkdir(exist_ok=True)
            with (self._folder() / CLIENTS / "evaluation.jsonl").open("a") as file:
                file.write(json.dumps(measured[0].plain()) + "\n")
        trainer.save_checkpoint(self._folder() / MODEL, weights_only=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the final model, summary and report, and pictures last, which are the largest."""
        self._trains = False
        if not self.rows:
            return
        # once more: a callback may have chosen another model at the end
        trainer.save_checkpoint(self._folder() / MODEL, weights_only=True)
        self._drawn, self._ended = True, stopped(trainer) or self._ended
        self._write(trainer)
        # write who holds what beside what stays with the clients
        federated, engine = find_federated(trainer, "RunFolder"), find_engine(trainer, "RunFolder")
        counts = federated.fit.population.label_counts() if trainer.is_global_zero else None
        held = federated.fit.population.partitioned_data
        sizes, held_out = ([len(part) for part in parts] for parts in (held.client_indices, held.held_out))
        if trainer.is_global_zero and any(sizes):
            _write_holdings(self._folder() / CLIENTS, sizes, held_out, counts)
        if self.privacy is not None:  # on the first rank
            title = plot_title(self.name, engine.mechanism)
            cell = summarise_privacy(self.privacy)
            price = f"{title}\n{cell.label}, {secret_row.adversary_title(cell.who)}"
            progress = plot_progress({self.name: self.rows}, self._metric(), price, self.baseline)
            save_figure(progress, self._folder() / PICTURE)
        if self.show and self.privacy is not None:
            print_summary(self.summary, self.privacy, self._folder())

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write what an interrupted run has reached and spent. Of several ranks only some may know of it."""
        trains, self._trains = self._trains, False
        if not trains or not self.rows or trainer.world_size > 1:
            return
        self._ended = f"by {type(exception).__name__} after round {len(self.rows)}"
        try:
            self._write(trainer)
        except OSError as error:  # a full disk may be what has ended the run
            rank_zero_info(f"no summary of the run was written: {error}")
            return
        rank_zero_info(f"ended {self._ended}; what was spent until then: {self._folder() / 'privacy.md'}")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the test metrics, where a run was trained before."""
        self._test_metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        if self.rows:
            self._write(trainer)

    def unprotected_outputs(self, trainer: pl.Trainer) -> str:
        """Notice of what this folder shows of clients."""
        federated = find_federated(trainer, "RunFolder")
        why = "because this is a simulation that deals out the data; do not hand it on."
        if federated.fit.population.label_counts() is not None:
            return f"Who holds how many samples of which label: clients/holdings.csv, {why}"
        if any(len(part) for part in federated.client_indices):
            return f"How many samples every client holds: clients/holdings.csv, {why}"
        return ""

    def _is_free(self, path: Path) -> bool:
        """Is there a run of nobody else? Before the first round a folder has a configuration at most."""
        below = self.root.resolve() in path.resolve().parents
        return below and not (path.is_dir() and {each.name for each in path.iterdir()} - {"config.yaml"})

    def _folder(self) -> Path:
        assert self.path is not None
        return self.path

    def _write(self, trainer: pl.Trainer) -> None:
        federated, engine = find_federated(trainer, "RunFolder"), find_engine(trainer, "RunFolder")
        privacy = make_report(federated, trainer, choose_delta(federated, trainer))
        columns = list(dict.fromkeys(k for row in self.rows for k, value in row.items() if value == value))
        privacy = replace(
            privacy,
            leaves=tuple(unprotected_outputs(trainer, federated, columns)),
            times=describe_timing(trainer, federated),
        )
        for callback in get_callbacks(trainer):
            if isinstance(callback, DPSGD):
                privacy = replace(privacy, samples=callback.statement())
        num_buffers = federated.fit.vector.num_buffers
        if num_buffers:
            shared = f"{num_buffers} of {privacy.dim} coordinates are buffers, charged like parameters"
            privacy = replace(privacy, notes=(*privacy.notes, shared))
        noise = noise_over_signal(engine, self.rows, len(self.rows))
        noise["words"] = describe_noise(noise)
        promises = self._promises(trainer, privacy.rounds)
        privacy = replace(privacy, notes=(*privacy.notes, *promises, *_describe_noise_cost(noise)))
        self.summary = self._summarize(engine, privacy, num_buffers)
        if federated.calibrated_target is not None:
            self.summary["privacy_target"] = federated.calibrated_target.statement
        charged_by = [
            (int(row["round"]), int(row.get("charged", row["round"])))
            for row in self.rows
            if "charged" in row or federated.planner.law.secret
        ]
        spent = epsilon_by_round(federated, trainer, privacy, charged_by)
        self.summary["noise_over_signal"] = noise
        if not trainer.is_global_zero:
            return
        folder = self._folder()
        origin = replace(
            privacy.origin, config=_sha256(folder / "config.yaml"), model=_sha256(folder / MODEL)
        )
        privacy = replace(privacy, by_round=spent, ended=self._ended, bits=self._bits(engine), origin=origin)
        self.privacy = privacy
        write_summary(folder / "summary.json", self.summary)
        write_atomically(folder / "privacy.json", to_json(privacy))
        write_atomically(folder / "privacy.md", markdown(*document(privacy)))
        page = report_markdown(self.summary, privacy, (PICTURE,) if self._drawn else ())
        write_atomically(folder / "report.md", page)

    def _promises(self, trainer: pl.Trainer, charged: int) -> Iterator[str]:
        """Target and budgets that the run was held to, and rounds that its table does not show."""
        if charged != len(self.rows):
            yield (
                f"{charged} rounds were charged, and the table of this folder has {len(self.rows)}: earlier "
                "trainings of the same federation, repeated rounds and one that did not end count, too."
            )
        for callback in get_callbacks(trainer):
            if isinstance(callback, PrivacyBudget) and callback.statement:
                yield f"{callback.statement}."

    def _summarize(self, engine: RoundEngine, privacy: PrivacyReport, num_buffers: int) -> dict[str, Any]:
        cost = totals(self.rows)
        cost.pop("messages")
        known = totals([row for row in self.rows if not math.isnan(row["uplink_bits"])])
        coordinates = known["messages"] * engine.weights.numel()
        nothing = math.nan if engine.planner.law.own_draws else 0.0
        up, protocol = (
            known[name] * BITS_PER_MEGABYTE / coordinates if coordinates else nothing
            for name in ("uplink_megabytes", "protocol_megabytes")
        )
        metrics = {key: value for key, value in self.rows[-1].items() if key not in RECORDED}
        seeded = isinstance(engine.keys, SeededKeys)
        return {
            "name": self.name,
            "mechanism": repr(engine.mechanism),
            "target": engine.target,
            "num_clients": engine.planner.num_clients,
            "rounds": len(self.rows),
            "rounds_charged": privacy.rounds,
            "num_parameters": engine.weights.numel() - num_buffers,
            "num_buffers": num_buffers,
            "keys": "from a seed: reproducible, not private" if seeded else "from the operating system",
            "masks": privacy.masks,
            "aborted_rounds": int(sum(row["aborted"] for row in self.rows)),
            "metrics": {**metrics, **self._test_metrics},
            "best": self._best(),
            "bits_per_parameter": up,
            "protocol_bits_per_parameter": protocol,
            **cost,
        }

    def _bits(self, engine: RoundEngine) -> Bits:
        """Bits of a message, up and down, as they were counted."""
        summary, dim = self.summary, engine.weights.numel()
        known = [row for row in self.rows if not math.isnan(row["downlink_bits"])]
        asked = sum(row["cohort_size"] for row in known) * dim
        up, keys = (summary[name] for name in ("bits_per_parameter", "protocol_bits_per_parameter"))
        plain = fixed_bits(engine.mechanism, engine.context(engine.next_plan()))

        def known_or_none(value: float) -> float | None:
            return None if math.isnan(value) else value

        return Bits(
            measured=True,
            update=known_or_none(up - keys),
            unmasked=plain,
            keys=known_or_none(keys),
            down=sum(row["downlink_bits"] for row in known) / asked if asked else None,
            megabytes_up=known_or_none(summary["uplink_megabytes"] + summary["setup_megabytes"]),
            megabytes_down=known_or_none(summary["downlink_megabytes"]),
            rounds=len(self.rows),
        )

    def _metric(self) -> str:
        """The metric of the pictures."""
        return self.monitor or first_metric(self.rows) or "val_acc"

    def _best(self) -> dict[str, Any]:
        monitor = self._metric()
        rows = [row for row in self.rows if monitor in row]
        if not rows:
            if self.monitor is not None:
                known = ", ".join(sorted({key for row in self.rows for key in row} - RECORDED))
                rank_zero_warn(
                    f"no round has a metric {monitor}, so there is no best one and no curve; "
                    f"RunFolder(monitor=...) takes one of {known}"
                )
            return {}
        choose = max if (self.mode or metric_mode(monitor)) == "max" else min
        row = choose(rows, key=lambda row: row[monitor])
        return {"monitor": monitor, "value": row[monitor], "round": row["round"]}

    def state_dict(self) -> dict[str, Any]:
        """The folder, how many rounds its table has, and the last of them, by which it is known again.

        Of a private run, without the columns that only a simulation knows, and without lengths of messages
        where they tell of updates.
        """
        last = dict(self.rows[-1]) if self.rows else {}
        if self._private:
            hidden = (*SIMULATION_ONLY, *(("uplink_bits",) if self._lengths_tell else ()))
            last = {key: last[key] for key in last if not key.startswith(hidden)}
        return {"path": str(self._folder()), "rounds": len(self.rows), "last": last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the folder of the checkpoint's run, whose table has the rounds before."""
        rows = state_dict.get("rows", [])  # of a checkpoint of 0.2, which had all of them
        rounds = state_dict.get("rounds", len(rows))
        self.path, last = Path(state_dict["path"]), state_dict.get("last", rows[-1] if rows else {})
        table = self.path / "metrics.csv"
        whole = read_rows(table) if table.is_file() else []
        if len(whole) >= rounds > 0 and _is_same(last, whole[rounds - 1]):
            self.rows = whole[:rounds]
        elif rounds or whole or not self._is_free(self.path):  # whatever it is, this run does not write there
            rank_zero_warn(
                f"the checkpoint names {self.path} as its run's folder, which does not hold its rounds; this "
                f"run goes on in a new folder below {self.root}, whose table has of the rounds before what "
                "the federation has recorded"
            )
            self.path, self._starts_at = None, rounds


def _is_same(row: Row, saved_row: Row) -> bool:
    """Is a row of a table that of a checkpoint, seconds included?"""
    return all(
        row[key] == saved_row[key] or (math.isnan(row[key]) and math.isnan(saved_row[key]))
        for key in row.keys() & saved_row.keys()
    )


def _write_holdings(
    folder: Path, sizes: Sequence[int], held_out: Sequence[int], counts: Tensor | None
) -> None:
    """Write who holds what: a table with a row for each client.

    Args:
        folder: The folder of what only a simulation has; it is made if need be.
        sizes: Samples that each client trains on.
        held_out: Samples that each client keeps out of it; empty if nobody does.
        counts: `(clients, labels)` samples of each label; None where labels are not at hand.
    """
    folder.mkdir(exist_ok=True)
    labels = [] if counts is None else [f"label_{label}" for label in range(counts.shape[1])]
    lines = [",".join(["client", "samples", *(["held_out"] if held_out else []), *labels])]
    for client, size in enumerate(sizes):
        of_labels = [] if counts is None else counts[client].tolist()
        lines.append(",".join(map(str, [client, size, *held_out[client : client + 1], *of_labels])))
    write_atomically(folder / "holdings.csv", "\n".join(lines) + "\n")


def _sha256(path: Path) -> str:
    """Hash of a file. "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def plot_title(name: str, mechanism: Mechanism) -> str:
    """Title of a run's pictures: short, as its settings stand in the report."""
    return f"{name} ({type(mechanism).__name__})"


def _describe_noise_cost(noise: dict[str, Any]) -> Iterator[str]:
    """Cost of the guarantee for the model, which no epsilon says."""
    if words := noise["words"]:
        yield (
            f"Noise over signal of the whole run: {words}. R is the squared error of the decoded mean over "
            "the squared mean update, divided by the number of rounds; up to 0.1 no loss was seen in "
            "trainings, above 4 hardly anything is learnt. Planned: with 0.3 of the updates' energy common "
            "to all clients. As seen: known to a simulation only, with what clipping cuts off."
        )
