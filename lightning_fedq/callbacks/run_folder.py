"""Write the results of a run to a folder: rounds, model, summary, reports and figures.

`lightning_fedq.reports.runs` describes the files.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.callbacks.dpsgd import DPSGD
from lightning_fedq.callbacks.privacy_budget import PrivacyBudget
from lightning_fedq.callbacks.trainer_lookup import find_callback, find_federated
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.privacy.document import PAGE, document
from lightning_fedq.privacy.planning import fixed_bits
from lightning_fedq.privacy.report import Bits, PrivacyReport, check_stated
from lightning_fedq.privacy.report_file import to_json
from lightning_fedq.privacy.report_rows import summarise_privacy
from lightning_fedq.privacy.row import adversary_title
from lightning_fedq.reports.layouts import markdown
from lightning_fedq.reports.runs import (
    BITS_PER_MEGABYTE,
    Row,
    append_row,
    check_run_name,
    first_metric,
    fresh_folder,
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
from lightning_fedq.training.client_evaluation import none_if_nan
from lightning_fedq.training.client_metrics import find_mode
from lightning_fedq.training.user_messages import describe_timing, has_revealing_lengths, unprotected_outputs

MODEL, CLIENTS = "model.ckpt", "clients"
PICTURE = "accuracy.png"
RECORDED = {metric_name(field.name) for field in fields(RoundRecord)}
RECORDED |= {metric_name("num_non_finite"), "charged", "seconds"}
RECORDED |= {name.removeprefix("fed/") for name in FIGURES}
RECORDED |= {f"{sim}epsilon_{who.name.lower()}" for who in Adversary for sim in ("", "sim_")}
SIMULATION_ONLY = ("sim_", "leak/")
"""Prefixes of columns that are left out of the checkpoints of a private run."""


class RunFolder(pl.Callback):
    """Folder of a run with its rounds and global model, and at the end a summary, reports and figures.

    `metrics.csv` and `model.ckpt` are updated every round. `model.ckpt` is a Lightning checkpoint of the
    weights alone, for `trainer.test(..., ckpt_path=...)` or `fedq test runs/name`. To resume a run, use a
    full Lightning checkpoint. An existing folder is never overwritten: the next run gets the folder `name-2`.
    A resumed run continues in the folder that its checkpoint names, if that folder has the checkpoint's
    rounds, or if it is below `root` and has no rounds yet. Otherwise the resumed run starts a new folder.

    Metrics that stay with the clients (`Federated(client_metrics="local")`) are in `clients/`, one file per
    client, together with a table of each client's samples and labels. Only a simulation has these data. A
    real server would not have them.

    Args:
        name: Name of the run, and of its folder below `root`.
        root: Folder that contains the folders of all runs.
        monitor: Name of the metric for the figure and for the best round. None is `val_acc`, or else the
            first `val_*` metric.
        mode: Whether a larger ("max") or a smaller ("min") value of the metric is better. None takes the mode
            of a ModelCheckpoint, EarlyStopping or schedule that watches the metric. Without one, no round is
            called the best.
        show: Whether to print the summary when the training ends.
        baseline: Value of the metric to draw as a horizontal line, such as the accuracy of a central
            training. None draws no line.
        stated: What only you know about the run, for the privacy page: text by the keys `client` (what a
            client is), `responsible`, `purpose`, `data`, `tuning` and `earlier_runs`. What is left out is
            printed as "not stated" or "unknown".

    Attributes:
        path: Folder of the run, from the start of the training on.
        rows: Metrics of each round, as in `metrics.csv`.
        summary: Contents of `summary.json`.
        privacy: Privacy report of the run, or None before the end.

    Raises:
        ValueError: If `mode` or `name` is invalid.
        TypeError: If `show` or `baseline` has another type.

    Examples:
        >>> callbacks = [RunFolder("digits", "runs")]  # behind Federated(...), writes runs/digits
    """

    knows_clients = True

    def __init__(
        self,
        name: str = "run",
        root: str = "runs",
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
        show: bool = True,
        baseline: float | None = None,
        stated: dict[str, str] | None = None,
    ) -> None:
        if mode not in ("max", "min", None):
            raise ValueError(f"mode must be 'max' or 'min', got {mode!r}")
        if not isinstance(show, bool) or not isinstance(baseline, float | int | None):
            got = f"{show!r} and {baseline!r}"
            raise TypeError(f"show must be True or False and baseline a number, got {got}. Write no quotes.")
        check_run_name(name)
        self.stated = check_stated(stated)
        self.name, self.root, self.monitor, self.mode = name, Path(root), monitor, mode
        self.show, self.baseline = show, baseline
        self.path: Path | None = None
        self.rows: list[Row] = []
        self.summary: dict[str, Any] = {}
        self.privacy: PrivacyReport | None = None
        self.config: str | None = None
        """The resolved configuration as YAML, which the `fedq` command sets."""
        self._test_metrics: dict[str, float] = {}
        self._round_started, self._private, self._trains = 0.0, True, False
        self._lengths_tell, self._starts_at = True, 0
        self._ended, self._drawn = "", False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the folder: that of the resumed run, or a new one."""
        federated = find_federated(trainer, "RunFolder")
        engine = federated.started_engine
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
        self._private = not isinstance(engine.keys, SeededKeys)
        self._lengths_tell = has_revealing_lengths(engine)
        if self.config is not None and trainer.is_global_zero:
            write_atomically(self._folder() / "config.yaml", self.config)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the timer of the round."""
        self._round_started = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Append the round to `metrics.csv`, and save the clients' metrics and the model."""
        federated = find_federated(trainer, "RunFolder")
        if len(federated.records) == len(self.rows):
            return  # the round did not end
        record = federated.records[-1]
        logged = {key.removeprefix("fed/"): float(value) for key, value in trainer.callback_metrics.items()}
        seconds = time.monotonic() - self._round_started
        charged = {"charged": float(federated.ledger.max_charges)}
        if federated.planner.law.secret:  # charges and seconds could reveal the cohort
            charged, seconds = {}, math.nan
        self.rows.append({**logged, **record.metrics(), **charged, "seconds": seconds})
        if trainer.is_global_zero:
            append_row(self._folder() / "metrics.csv", self.rows)
        # append metrics that stay with the clients to each client's own file
        assert federated.client_log is not None
        client_metrics = federated.client_log.pop_metrics()  # collects from all ranks, so all call it
        for client, values in client_metrics.items() if trainer.is_global_zero else ():
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
        """Write the final model, summary and reports, and the figures last, because they are largest."""
        self._trains = False
        if not self.rows:
            return
        # save again, because a callback may have chosen another model at the end
        trainer.save_checkpoint(self._folder() / MODEL, weights_only=True)
        federated = find_federated(trainer, "RunFolder")
        engine = federated.started_engine
        self._drawn, self._ended = True, stopped(federated, trainer) or self._ended
        self._write(trainer)
        # write the table of each client's samples next to the clients' metrics
        counts = federated.fit.population.label_counts() if trainer.is_global_zero else None
        held = federated.fit.population.partitioned_data
        sizes, held_out = ([len(part) for part in parts] for parts in (held.client_indices, held.held_out))
        if trainer.is_global_zero and any(sizes):
            _write_holdings(self._folder() / CLIENTS, sizes, held_out, counts)
        if self.privacy is not None:  # on the first rank
            title = plot_title(self.name, engine.mechanism)
            cell = summarise_privacy(self.privacy)
            price = f"{title}\n{cell.label}, {adversary_title(cell.who)}"
            progress = plot_progress({self.name: self.rows}, self._metric(), price, self.baseline)
            save_figure(progress, self._folder() / PICTURE)
        if self.show and self.privacy is not None:
            print_summary(self.summary, self.privacy, self._folder())

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the results and the spent epsilon of an interrupted run.

        With several ranks nothing is written, because only some of them may have the exception.
        """
        trains, self._trains = self._trains, False
        if not trains or not self.rows or trainer.world_size > 1:
            return
        self._ended = f"by {type(exception).__name__} after round {len(self.rows)}"
        try:
            self._write(trainer)
        except OSError as error:  # a full disk may have ended the run
            rank_zero_info(f"No summary of the run was written: {error}")
            return
        rank_zero_info(f"Ended {self._ended}. The spent epsilon is in {self._folder() / 'privacy.md'}")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the test metrics to the summary if a run was trained before."""
        self._test_metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        if self.rows:
            self._write(trainer)

    def unprotected_outputs(self, trainer: pl.Trainer) -> str:
        """Describe the data about clients that this folder contains."""
        federated = find_federated(trainer, "RunFolder")
        why = "because this simulation partitions the data itself. Do not share this file."
        if federated.fit.population.label_counts() is not None:
            return f"Each client's number of samples of each label is in clients/holdings.csv, {why}"
        if any(len(part) for part in federated.client_indices):
            return f"Each client's number of samples is in clients/holdings.csv, {why}"
        return ""

    def _folder(self) -> Path:
        assert self.path is not None
        return self.path

    def _write(self, trainer: pl.Trainer) -> None:
        """Write the summary, the privacy report and the report page."""
        federated = find_federated(trainer, "RunFolder")
        engine = federated.started_engine
        privacy = self._report(trainer)
        self.summary = self._summarize(trainer, engine, privacy, federated.fit.vector.num_buffers)
        if federated.calibrated_target is not None:
            self.summary["privacy_target"] = federated.calibrated_target.statement
        noise = noise_over_signal(engine, self.rows, len(self.rows), federated.fit.lengths)
        self.summary["noise_over_signal"] = {**noise, "words": describe_noise(noise)}
        if not trainer.is_global_zero:
            return
        folder = self._folder()
        origin = replace(
            privacy.origin, config=_sha256(folder / "config.yaml"), model=_sha256(folder / MODEL)
        )
        self.privacy = privacy = replace(privacy, bits=self._bits(engine), origin=origin)
        write_summary(folder / "summary.json", self.summary)
        write_atomically(folder / "privacy.json", to_json(privacy))
        write_atomically(folder / "privacy.md", markdown(*document(privacy, PAGE)))
        page = report_markdown(self.summary, privacy, (PICTURE,) if self._drawn else ())
        write_atomically(folder / "report.md", page)

    def _report(self, trainer: pl.Trainer) -> PrivacyReport:
        """Return the privacy report of the run so far, without what depends on the summary and on files."""
        federated = find_federated(trainer, "RunFolder")
        report = make_report(federated, trainer, choose_delta(federated, trainer))
        columns = list(dict.fromkeys(k for row in self.rows for k, value in row.items() if value == value))
        charged = [
            (int(row["round"]), int(row.get("charged", row["round"])))
            for row in self.rows
            if "charged" in row or federated.planner.law.secret
        ]
        notes, num_buffers = list(report.notes), federated.fit.vector.num_buffers
        if num_buffers:
            notes.append(f"{num_buffers} of {report.dim} coordinates are buffers, charged like parameters")
        if report.rounds != len(self.rows):
            notes.append(
                f"{report.rounds} rounds were charged, and the table of this folder has {len(self.rows)}. "
                "Earlier trainings of the same federation, repeated rounds and an unfinished round are "
                "charged also."
            )
        budgets = [callback for callback in get_callbacks(trainer) if isinstance(callback, PrivacyBudget)]
        notes += [f"{budget.statement}." for budget in budgets if budget.statement]
        dpsgd = find_callback(trainer, DPSGD)
        return replace(
            report,
            leaves=tuple(unprotected_outputs(trainer, federated, columns)),
            times=describe_timing(trainer, federated),
            samples=report.samples if dpsgd is None else dpsgd.statement(),
            notes=tuple(notes),
            stated=self.stated,
            by_round=epsilon_by_round(federated, trainer, report, charged),
            ended=self._ended,
        )

    def _summarize(
        self, trainer: pl.Trainer, engine: RoundEngine, privacy: PrivacyReport, num_buffers: int
    ) -> dict[str, Any]:
        """Return the contents of `summary.json`."""
        cost = totals(self.rows)
        cost.pop("messages")
        known = totals([row for row in self.rows if not math.isnan(row["uplink_bits"])])
        coordinates = known["messages"] * engine.weights.numel()
        default = math.nan if engine.planner.law.own_draws else 0.0
        up, protocol = (
            known[name] * BITS_PER_MEGABYTE / coordinates if coordinates else default
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
            "modes": self._modes(trainer),
            **self._shown_rounds(trainer),
            "bits_per_parameter": up,
            "protocol_bits_per_parameter": protocol,
            **cost,
        }

    def _bits(self, engine: RoundEngine) -> Bits:
        """Return the measured bits per coordinate of a message, on the uplink and the downlink."""
        summary, dim = self.summary, engine.weights.numel()
        known = [row for row in self.rows if not math.isnan(row["downlink_bits"])]
        coordinates = sum(row["cohort_size"] for row in known) * dim
        up, keys = (summary[name] for name in ("bits_per_parameter", "protocol_bits_per_parameter"))
        return Bits(
            measured=True,
            update=none_if_nan(up - keys),
            unmasked=fixed_bits(engine.mechanism, engine.context(engine.next_plan())),
            keys=none_if_nan(keys),
            down=sum(row["downlink_bits"] for row in known) / coordinates if coordinates else None,
            megabytes_up=none_if_nan(summary["uplink_megabytes"] + summary["setup_megabytes"]),
            megabytes_down=none_if_nan(summary["downlink_megabytes"]),
            rounds=len(self.rows),
        )

    def _metric(self) -> str:
        """Return the name of the metric for the figure and the best round."""
        return self.monitor or first_metric(self.rows) or "val_acc"

    def _modes(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return the direction of each metric for which it is known, from `mode` or a watching callback."""
        names = {name for row in self.rows for name in row} | set(self._test_metrics)
        own = {self._metric(): self.mode} if self.mode is not None else {}
        return {name: mode for name in sorted(names) if (mode := own.get(name) or find_mode(trainer, name))}

    def _shown_rounds(self, trainer: pl.Trainer) -> dict[str, dict[str, Any]]:
        """Return the metric, its value and the round, for the last round and the best round.

        Both are {} if no round has the metric. The best round is {} if the direction is not known.
        """
        monitor = self._metric()
        rows = [row for row in self.rows if monitor in row]
        if not rows:
            if self.monitor is not None:
                known = ", ".join(sorted({key for row in self.rows for key in row} - RECORDED))
                rank_zero_warn(
                    f"No round has the metric {monitor}, so there is no curve. "
                    f"Set RunFolder(monitor=...) to one of {known}."
                )
            return {"best": {}, "last": {}}

        def describe(row: Row) -> dict[str, Any]:
            return {"monitor": monitor, "value": row[monitor], "round": row["round"]}

        mode = self._modes(trainer).get(monitor)
        defined = [row for row in rows if not math.isnan(row[monitor])]
        if mode is None or not defined:
            return {"best": {}, "last": describe(rows[-1])}
        choose = max if mode == "max" else min
        return {"best": describe(choose(defined, key=lambda row: row[monitor])), "last": describe(rows[-1])}

    def state_dict(self) -> dict[str, Any]:
        """Return the folder, the number of rounds in its table, and the last round, which identifies the run.

        For a private run, columns that only a simulation knows are left out. Message lengths are left out if
        they reveal something about updates.
        """
        last = dict(self.rows[-1]) if self.rows else {}
        if self._private:
            hidden = (*SIMULATION_ONLY, *(("uplink_bits",) if self._lengths_tell else ()))
            last = {key: last[key] for key in last if not key.startswith(hidden)}
        return {"path": str(self._folder()), "rounds": len(self.rows), "last": last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the folder of the checkpoint's run if its table has the checkpoint's rounds."""
        self.path, rounds, last = Path(state_dict["path"]), state_dict["rounds"], state_dict["last"]
        table = self.path / "metrics.csv"
        saved_rows = read_rows(table) if table.is_file() else []
        if len(saved_rows) >= rounds > 0 and _is_same(last, saved_rows[rounds - 1]):
            self.rows = saved_rows[:rounds]
            return
        if rounds:  # the folder belongs to another run
            rank_zero_warn(
                f"The checkpoint's run folder {self.path} does not have its rounds. The run continues in a "
                f"new folder below {self.root}, with the earlier rounds that the federation has recorded."
            )
        self.path, self._starts_at = None, rounds


def _is_same(row: Row, saved_row: Row) -> bool:
    """Return whether a row of a checkpoint agrees with a row of a table in all common columns."""
    return all(
        row[key] == saved_row[key] or (math.isnan(row[key]) and math.isnan(saved_row[key]))
        for key in row.keys() & saved_row.keys()
    )


def _write_holdings(
    folder: Path, sizes: Sequence[int], held_out: Sequence[int], counts: Tensor | None
) -> None:
    """Write `holdings.csv`, a table with the numbers of samples of each client.

    Args:
        folder: Folder for data that only a simulation has. It is created if it does not exist.
        sizes: Number of training samples of each client.
        held_out: Number of held-out samples of each client, or an empty sequence if there are none.
        counts: Number of samples of each label, `(clients, labels)`, or None if labels are unknown.
    """
    folder.mkdir(exist_ok=True)
    labels = [] if counts is None else [f"label_{label}" for label in range(counts.shape[1])]
    lines = [",".join(["client", "samples", *(["held_out"] if held_out else []), *labels])]
    for client, size in enumerate(sizes):
        of_labels = [] if counts is None else counts[client].tolist()
        lines.append(",".join(map(str, [client, size, *held_out[client : client + 1], *of_labels])))
    write_atomically(folder / "holdings.csv", "\n".join(lines) + "\n")


def _sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file, or "" if it does not exist."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def plot_title(name: str, mechanism: Mechanism) -> str:
    """Return the title of a run's figure. It is short, because the report has the settings."""
    return f"{name} ({type(mechanism).__name__})"
