"""`fedq compare`: mechanisms at equal epsilon, or finished runs, in one table and one picture."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lightning_fedq.commands.configs import find
from lightning_fedq.commands.options import change_setting, check_rounds
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.runs import (
    Row,
    first_metric,
    fresh_folder,
    mode_of,
    plot_progress,
    read_rows,
    save_figure,
    totals,
    write_rows,
    write_summary,
)

if TYPE_CHECKING:
    from lightning_fedq.comparison.comparison import Comparison
    from lightning_fedq.mechanisms.interface import Adversary
    from lightning_fedq.privacy.report import PrivacyReport

OUT = Path("runs/compare")
_DELTA = 1e-5
COLUMNS = (
    "rounds",
    "final",
    "best",
    "epsilon",
    "delta",
    "verdict",
    "view",
    "R",
    "bits_per_parameter",
    "uplink_megabytes",
    "downlink_megabytes",
    "seconds",
)
HEADS = {"bits_per_parameter": "bits", "uplink_megabytes": "MB up"}


def read_run(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Read the rows and the summary of a run folder.

    Raises:
        FileNotFoundError: If it is not the folder of a finished run.
    """
    rows, summary = read_rows(folder / "metrics.csv"), folder / "summary.json"
    if not summary.is_file():
        raise FileNotFoundError(f"no {summary}; the run has not finished")
    return rows, json.loads(summary.read_text())


def compare(
    runs: Mapping[str, Path],
    monitor: str | None,
    out: Path,
    mode: str | None = None,
    adversary: Adversary | None = None,
) -> list[dict[str, Any]]:
    """Write table and pictures (`table.csv`, `table.json`, `compare.png`, `compare_dark.png`) of run folders.

    The table is printed and returned.

    The curve of a run without a finite epsilon, `FedAvg`'s say, is dashed and grey: no winner.

    Args:
        runs: Run folders by name.
        monitor: The metric to compare; None is `val_acc`, or else the first `val_*` metric of the runs.
        mode: Is a larger ("max") or a smaller ("min") value better? None goes by the metric's name.
        adversary: Towards whom every run's epsilon is shown; None is whom all of them were asked about, or
            an outsider, whom every run has, where they differ.

    Raises:
        ValueError: If a run never logged `monitor`.
    """
    # import torch, and are only needed here
    from lightning_fedq.privacy.document import common
    from lightning_fedq.privacy.secret_row import title_of

    found = {name: read_run(folder) for name, folder in runs.items()}
    reports = {name: read_report(folder) for name, folder in runs.items()}
    known = [report for report in reports.values() if report is not None]
    who = common(known) if adversary is None and known else None if adversary is None else adversary.name
    monitor = monitor or first_metric([row for rows, _ in found.values() for row in rows]) or "val_acc"
    mode = mode or mode_of(monitor)
    table, curves, plain = [], {}, set()
    for name, (rows, summary) in found.items():
        values = [row[monitor] for row in rows if monitor in row]
        if not values:
            raise ValueError(f"{runs[name]} never logged {monitor!r}; it has {sorted(rows[-1])}")
        mechanism = str(summary["mechanism"]).partition("(")[0]
        privacy, price = _privacy_of(reports[name], summary, who)
        said = ", ".join(part for part in ("" if mechanism == name else mechanism, price) if part)
        label = f"{name} ({said})" if said else name
        curves[label] = rows
        plain |= {label} if mechanism == "FedAvg" or privacy["epsilon"] == math.inf else set()
        cost = {**totals(rows), "bits_per_parameter": summary["bits_per_parameter"], "rounds": len(rows)}
        best = max(values) if mode == "max" else min(values)
        result = {"final": values[-1], "best": best, **privacy, **cost}
        table.append({"run": name, **{column: result[column] for column in COLUMNS}})
    write_rows(out / "table.csv", table)
    write_summary(out / "table.json", {"monitor": monitor, "runs": table})
    towards = "" if who is None else f"\nε: over the run, towards {title_of(who)}"
    figure = plot_progress(curves, monitor, f"{monitor}{towards}", dashed=plain)
    save_figure(figure, out / "compare.png", twin=True)
    print_table(table, monitor)
    deltas = sorted({row["delta"] for row in table if row["delta"] != "-"})
    if len(deltas) > 1:
        print(
            f"warning: the runs' epsilons are at different deltas ({', '.join(f'{d:g}' for d in deltas)}) "
            "and do not compare; train them with the same one",
            file=sys.stderr,
        )
    if len({row["rounds"] for row in table}) > 1:
        counts = ", ".join(str(row["rounds"]) for row in table)
        print(
            f"warning: the runs differ in their rounds ({counts}), so their final and best values do not "
            "compare; train them as long as each other (--rounds)",
            file=sys.stderr,
        )
    Console(soft_wrap=True).print(f"{out / 'table.csv'}\n{out / 'compare.png'}", highlight=False)
    return table


def read_report(folder: Path) -> PrivacyReport | None:
    """The report of a run folder. None, with a warning, where there is none that can be read."""
    from lightning_fedq.privacy.document import from_json  # imports torch, and only needed here

    try:
        return from_json((folder / "privacy.json").read_text())
    except (OSError, ValueError) as error:
        print(f"warning: {folder}: {error}", file=sys.stderr)
        return None


def _privacy_of(
    report: PrivacyReport | None, summary: Mapping[str, Any], who: str | None
) -> tuple[dict[str, Any], str]:
    """Columns of a run's privacy, "-" where it is not known, and what a legend says of it.

    R is the noise over the signal, as seen where that is known, or else as planned.
    """
    from lightning_fedq.privacy.document import shown  # imports torch, and only needed here

    noise = summary.get("noise_over_signal") or {}
    ratio = noise.get("planned") if noise.get("sim_seen") is None else noise["sim_seen"]
    columns = {"R": "-" if ratio is None else ratio}
    if report is None:
        return {"epsilon": "-", "delta": "-", "verdict": "-", "view": "-", **columns}, ""
    found = shown(report, who)
    view = f"{found.who}, {found.asked}" if found.asked else found.who
    epsilon = found.printed if found.epsilon is None else found.epsilon
    columns |= {"delta": report.delta, "verdict": found.verdict, "view": view}
    return {"epsilon": epsilon, **columns}, found.label


def print_table(table: Sequence[Mapping[str, Any]], monitor: str) -> None:
    """Print rows as a table, numbers with four digits. Names are never cut."""
    shown = Table(title=monitor, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    hidden = ("delta", "verdict", "view", "downlink_megabytes", "seconds")  # the files have them
    for column in [column for column in table[0] if column not in hidden]:
        shown.add_column(
            HEADS.get(column, column), no_wrap=True, justify="left" if column == "run" else "right"
        )
    for row in table:
        cells = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in row.items()}
        if isinstance(row["epsilon"], float):
            cells["epsilon"] = f"{format_epsilon(row['epsilon'])} {row['verdict']}"
        if isinstance(row["R"], float):
            cells["R"] = f"{row['R']:.2g}" if row["R"] > 1e-6 else "0"
        shown.add_row(*(cell for name, cell in cells.items() if name not in hidden))
    console = Console()
    console.width = max(
        console.width, console.measure(shown, options=console.options.update(width=500)).maximum
    )
    console.print(shown)
    from lightning_fedq.privacy.secret_row import title_of  # imports torch, and only needed here

    views = {row["run"]: str(row["view"]) for row in table}
    views = {run: view if view in ("", "-") else title_of(view) for run, view in views.items()}
    at = {row["run"]: "" if row["delta"] == "-" else f", at delta {row['delta']:g}" for row in table}
    views = {run: f"{view}{at[run]}" for run, view in views.items()}
    if len(set(views.values())) == 1:
        towards = next(iter(views.values()))
        console.print(f"epsilon: over the run, towards {towards}", highlight=False, soft_wrap=True)
        return
    console.print("epsilon: over the run, towards", highlight=False)
    for run, view in views.items():
        console.print(f"  {run}: {view}", highlight=False, soft_wrap=True)


class _Told:
    """A bar of the runs in a terminal, and the first line alone in a file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: Any = None

    def begins(self, words: str, runs: int) -> None:
        """Say how long it may take."""
        self._console.print(words, highlight=False)
        self._task = self.bar.add_task("runs", total=runs)

    def ran(self, row: Any) -> None:
        """Move the bar."""
        cell = row.cell
        self.bar.update(
            self._task, advance=1, description=f"{cell.mechanism}, ε {cell.epsilon:g}, seed {cell.seed}"
        )


def _compared(asked: Comparison, out: Path, processes: int, logger: Any, tune: bool) -> int:
    """Run mechanisms at equal epsilon, and write table and picture. 1 where something is left out."""
    console = Console(soft_wrap=True)
    told = _Told(console)
    with told.bar:
        rows = asked.run(out, processes=processes, logger=logger, tune=tune, begins=told.begins, ran=told.ran)
    task = asked.task
    heads, lines = asked.table(rows)
    title = (
        f"{task.name}: {task.unit}, towards {asked.adversary.value}; {task.clients:,} clients, "
        f"{task.dim:,} parameters, rounds: {task.rounds}, seeds: {len(asked.seeds)}"
    )
    shown = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for place, head in enumerate(heads):
        shown.add_column(head, overflow="fold", no_wrap=bool(place), justify="right" if place > 1 else "left")
    for line in lines:
        shown.add_row(*line, end_section=True)
    wide = Console()
    wide.width = max(wide.width, wide.measure(shown, options=wide.options.update(width=200)).maximum)
    wide.print(shown)
    console.print(
        "A cell: mean ± deviation over seeds; bits a parameter up, message + keys and shares; R, noise over "
        f"signal. down: bits a parameter down. ε: of a client over the run, at delta {task.delta:g}. "
        f"{task.note}",
        highlight=False,
    )
    write_rows(out / "table.csv", asked.lines(rows))
    save_figure(asked.picture(rows), out / "compare.png", twin=True)
    missing = asked.refused(rows)
    for name, why in missing.items():
        console.print(f"{name} is left out: {why}", highlight=False, markup=False)
    files = [out / name for name in ("table.csv", "compare.png", *([logger] if logger else ()))]
    console.print(*files, sep="\n", highlight=False)
    if words := task.cost(out, asked.adversary):
        console.print(words, highlight=False)
    return int(bool(missing))


def main(
    runs: Annotated[Sequence[str], "RUN"] = (),
    *,
    mechanisms: Annotated[Sequence[str], "NAME"] = (),
    epsilon: Annotated[Sequence[float], "EPSILON"] = (),
    seeds: int = 3,
    on: Annotated[str | None, "TASK|CONFIG"] = None,
    adversary: Annotated[str | None, "WHO"] = None,
    delta: float = _DELTA,
    bare: bool = False,
    tune: bool = False,
    logger: Literal["wandb", "csv", "tensorboard"] | None = None,
    jobs: Annotated[int | None, "N"] = None,
    data: Path | None = None,
    monitor: str | None = None,
    mode: Literal["max", "min"] | None = None,
    rounds: int | None = None,
    out: Path | None = None,
) -> int:
    """Compare mechanisms at equal epsilon: several epsilons and seeds, FedAvg above them, Gaussian
    and Laplace noise as Opacus calibrates it beside them; score against epsilon and bits. Or put
    finished runs, and configurations, into one table and one picture.

    Args:
        runs: Folder of a run, or configuration (a file or a name), in place of --mechanisms.
        mechanisms: Mechanisms by row, class or class path (default: all, where --epsilon is given).
        epsilon: Targets over the run, for a client (default: 1 2 8).
        seeds: Runs of a cell.
        on: Task or configuration to train (default: digits). A wrong one lists the tasks.
        adversary: Adversary that targets are against, and towards whom epsilons are shown: eavesdropper,
            server, server_and_partner, client, secagg_server or outsider (default: secagg_server, or
            whom each run was asked about).
        delta: Delta of the targets.
        bare: Leave the two baselines of Opacus out.
        tune: Search for range and rate also where the shipped results have them.
        logger: Logger that gets a run for every cell; wandb is offline unless WANDB_MODE says otherwise.
        jobs: Runs at a time, in a process of one thread each (default: one a core; 1 with a GPU).
        data: Folder with MNIST and cifar10, for the tasks on images.
        monitor: Metric to compare (default: of a configuration's cells the test's; of runs val_acc, or the
            first val_* there is).
        mode: Direction in which the metric is better (default: by name).
        rounds: Rounds to train (default: the task's or configuration's own).
        out: Folder of table and picture, with --mechanisms one that goes on (default: runs/compare).

    Examples:
        fedq compare --mechanisms RotatedCoins GaussianNoise --epsilon 1 8 --seeds 3 --logger wandb
        fedq compare --mechanisms "RotatedCoins, share 1/8" --on mine.yaml --out runs/mine
        fedq compare runs/first runs/second
    """
    # both import torch, which whoever lists commands need not wait for
    from lightning_fedq.comparison.comparison import EPSILONS, Comparison
    from lightning_fedq.privacy.target import adversary_named

    check_rounds(rounds)
    asked = None if adversary is None else adversary_named(adversary)
    if bool(runs) == bool(mechanisms or epsilon):
        raise ValueError(
            "name finished runs, or mechanisms: --mechanisms CorBin GaussianNoise --epsilon 1 8, and "
            "--on CONFIG for a configuration of your own"
        )
    if not runs:
        from lightning_fedq.comparison.configured import task_of

        if jobs is not None and jobs < 1:
            raise ValueError(f"--jobs must be >= 1, got {jobs}")
        task = task_of(on or "digits", data, rounds, delta, monitor, mode)
        if tune and task.rates == (None,):
            raise ValueError(f"--tune searches rates, and {task.name} has none to search; leave --tune out")
        asked = asked or adversary_named("secagg_server")
        compared = Comparison.of(task, mechanisms, asked, epsilon or EPSILONS, seeds, not bare)
        return _compared(compared, out or OUT, jobs or _cores(), logger, tune)
    idle = {"--on": on, "--data": data, "--logger": logger, "--jobs": jobs, "--bare": bare, "--tune": tune}
    idle |= {"--seeds": seeds != 3, "--delta": delta != _DELTA}
    idle["--rounds"] = rounds is not None and all(Path(run).is_dir() for run in runs)
    if given := [name for name, value in idle.items() if value]:
        raise ValueError(
            f"{', '.join(given)}: runs that have ended, and configurations, are compared as they are; leave "
            "it out, or name --mechanisms"
        )
    folder = fresh_folder(out or OUT)
    folders: dict[str, Path] = {}
    for run in runs:
        path = Path(run)
        name = path.stem if path.stem not in folders else f"{path.stem}-{len(folders) + 1}"
        folders[name] = path if path.is_dir() else _run(run, name, rounds, folder)
    compare(folders, monitor, folder, mode, asked)
    return 0


def _cores() -> int:
    """Cores that this process may use, and 1 with a GPU."""
    import torch  # seconds, and only needed here

    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def _run(config: str, name: str, rounds: int | None, out: Path) -> Path:
    """Train one configuration, and return its run folder."""
    from lightning_fedq.commands.run import resolve, run_config  # imports Lightning, and only needed here

    try:
        settings = resolve([str(find(config))])
    except ValueError as error:
        raise ValueError(f"{config} is not the folder of a run; {error}") from error
    if rounds is not None:
        change_setting(settings, "trainer.max_epochs", rounds)
    return run_config(settings, name, out)
