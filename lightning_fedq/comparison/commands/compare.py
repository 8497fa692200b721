"""`fedq compare`: compare mechanisms at equal epsilon, or finished runs, in a table and a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_fedq.commands.configs import find
from lightning_fedq.commands.options import change_setting, check_rounds
from lightning_fedq.comparison.table import compare, print_cells
from lightning_fedq.reports.plot_style import picture_format
from lightning_fedq.reports.runs import fresh_folder, save_figure, write_rows

if TYPE_CHECKING:
    from lightning_fedq.comparison.cells import Cell
    from lightning_fedq.comparison.comparison import Comparison

OUT = Path("runs/compare")
_DELTA = 1e-5


class _RunProgress:
    """Progress of the runs: a bar on a terminal, and only lines in a file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: Any = None

    def start(self, asked: Comparison, runs: int, searches: int) -> None:
        """Print the mechanisms that are left out and the number of runs, and start the bar."""
        for line in _left_out(asked):
            self.print_line(line)
        search = f", {searches} of them to find ranges and learning rates" if searches else ""
        self.print_line(f"{runs} runs{search}" if runs else "all runs have finished")
        self._task = self.bar.add_task("runs", total=runs)

    def print_line(self, words: str) -> None:
        """Print a line above the bar."""
        self._console.print(words, highlight=False, markup=False)

    def advance(self, cell: Cell) -> None:
        """Advance the bar by one finished run."""
        description = f"{cell.row}, ε {cell.epsilon:g}, seed {cell.seed}"
        self.bar.update(self._task, advance=1, description=description)


def _left_out(asked: Comparison) -> list[str]:
    """Return a line for each mechanism that has no run, with the reason."""
    return [f"{name} is left out: {why}" for name, why in asked.without().items()]


def _compared(
    asked: Comparison, out: Path, jobs: int, logger: Any, picture: Path | None, drop_checkpoints: bool
) -> int:
    """Run mechanisms at equal epsilon, and write table and pictures. Return 1 if a row lacks runs."""
    console = Console(soft_wrap=True)
    progress = _RunProgress(console)
    with progress.bar:
        lines = asked.run(
            out,
            jobs=jobs,
            logger=logger,
            begins=partial(progress.start, asked),
            told=progress.print_line,
            ran=progress.advance,
            drop_checkpoints=drop_checkpoints,
        )
    heads, table = asked.table(lines)
    sizes, monitor = asked.sizes, next(line["monitor"] for line in lines if "monitor" in line)
    print_cells(
        heads,
        table,
        f"{asked.name}: {monitor}, against {asked.adversary.value}, {sizes['clients']:,} clients, "
        f"{sizes['params']:,} parameters, rounds: {sizes['rounds']}, seeds: {len(asked.seeds)}",
    )
    note = "Keys come from a seed, so the runs are not private. With secret keys they would spend this ε."
    if asked.secret:
        note = "Keys are secret, and all runs compose for the same clients (all_runs.md)."
    console.print(
        "A cell has the mean ± standard deviation over seeds, the uplink bits per parameter (message + keys "
        "and shares), and the noise-to-signal ratio R. down: downlink bits per parameter. "
        f"ε: epsilon of a client over the run, at delta {asked.delta:g}. {note}",
        highlight=False,
    )
    write_rows(out / "table.csv", lines)
    save_figure(asked.picture(lines), out / "compare.png", twin=True)
    if picture is not None:
        save_figure(asked.picture(lines, row=True), picture)
    missing = _left_out(asked)
    for line in missing:
        console.print(line, highlight=False, markup=False)
    files = [out / name for name in ("table.csv", "compare.png", *([logger] if logger else ()))]
    files += [picture] if picture else []
    console.print(*files, sep="\n", highlight=False)
    if words := asked.cost(out):
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
    picture: Annotated[Path | None, "FILE"] = None,
    drop_checkpoints: bool = False,
) -> int:
    """Compare mechanisms at equal epsilon over several epsilons and seeds, with FedAvg and with
    Gaussian and Laplace noise that Opacus calibrates. The score is shown against epsilon and bits.
    Or put finished runs and configurations into one table and one picture.

    Args:
        runs: Folder of a run, or configuration (a file or a name), in place of --mechanisms.
        mechanisms: Mechanisms by row, class or class path (default: all, if --epsilon is given).
        epsilon: Privacy bound: any set of outcomes is at most e^epsilon times as likely for one of two inputs
            as for the other, plus delta. These are the targets of a client over the run (default: 1 2 8).
        seeds: Number of runs per mechanism and epsilon.
        on: Task or configuration to train (default: digits). An unknown name lists the tasks.
        adversary: Adversary of the targets and of the shown epsilons: eavesdropper, server,
            server_and_partner, client, secagg_server or outsider (default: secagg_server, or the adversary
            of each run's target).
        delta: Additive slack in the bound of epsilon, below one divided by the number of protected units. It
            is that of the targets.
        bare: Omit the two baselines of Opacus.
        tune: Search for range and learning rate of a task even if they are known.
        logger: Logger that records every run. wandb is offline unless WANDB_MODE is set.
        jobs: Number of runs at a time, in processes of one thread (default: one per core, or 1 with a GPU).
        data: Folder with MNIST, for the tasks on images.
        monitor: Metric to compare (default: a test metric for mechanisms, val_acc or the first val_* metric
            for runs).
        mode: Direction in which the metric is better (default: the one that the runs' callbacks tell).
        rounds: Number of rounds to train (default: that of the task or configuration).
        out: Folder of table and picture. With --mechanisms, a comparison there continues (default:
            runs/compare).
        picture: File (.pdf, .svg or .png) of a picture for a paper, with all panels in one row.
        drop_checkpoints: Delete the checkpoints of each run when it has ended, for large models.

    Examples:
        fedq compare --mechanisms RotatedCoins GaussianNoise --epsilon 1 8 --seeds 3 --logger wandb
        fedq compare --mechanisms "RotatedCoins, share 1/8" --on mine.yaml --out runs/mine
        fedq compare runs/first runs/second --picture figure.pdf
    """
    # both import torch, which takes seconds
    from lightning_fedq.comparison.comparison import EPSILONS, Comparison
    from lightning_fedq.privacy.target import adversary_named

    check_rounds(rounds)
    if picture is not None:
        picture_format(picture)
    who = None if adversary is None else adversary_named(adversary)
    if bool(runs) == bool(mechanisms or epsilon):
        raise ValueError(
            "Give either finished runs or mechanisms (--mechanisms CorBin GaussianNoise --epsilon 1 8). Your "
            "own configuration needs --on CONFIG."
        )
    if not runs:
        if jobs is not None and jobs < 1:
            raise ValueError(f"--jobs must be >= 1, got {jobs}")
        asked = Comparison.from_names(
            on or "digits",
            mechanisms,
            who or adversary_named("secagg_server"),
            epsilon or EPSILONS,
            seeds,
            baselines=not bare,
            delta=delta,
            rounds=rounds,
            data=data,
            monitor=monitor,
            mode=mode,
            tune=tune,
        )
        return _compared(asked, out or OUT, jobs or _cores(), logger, picture, drop_checkpoints)
    idle = {"--on": on, "--data": data, "--logger": logger, "--jobs": jobs, "--bare": bare, "--tune": tune}
    idle |= {"--drop-checkpoints": drop_checkpoints, "--seeds": seeds != 3, "--delta": delta != _DELTA}
    idle["--rounds"] = rounds is not None and all(Path(run).is_dir() for run in runs)
    if unused := [name for name, value in idle.items() if value]:
        raise ValueError(
            f"{', '.join(unused)} can't be used with finished runs or configurations. Omit it, or give "
            "--mechanisms."
        )
    folder = fresh_folder(out or OUT)
    folders: dict[str, Path] = {}
    for run in runs:
        path = Path(run)
        name = path.stem if path.stem not in folders else f"{path.stem}-{len(folders) + 1}"
        folders[name] = path if path.is_dir() else _run(run, name, rounds, folder)
    compare(folders, monitor, folder, mode, who, picture)
    return 0


def _cores() -> int:
    """Return the number of cores that this process may use, or 1 with a GPU."""
    import torch  # takes seconds and is needed only here

    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def _run(config: str, name: str, rounds: int | None, out: Path) -> Path:
    """Train one configuration, and return its run folder."""
    from lightning_fedq.commands.run import resolve, run_config  # imports Lightning, needed only here

    try:
        settings = resolve([str(find(config))])
    except ValueError as error:
        raise ValueError(f"{config} is not the folder of a run. {error}") from error
    if rounds is not None:
        change_setting(settings, "trainer.max_epochs", rounds)
    return run_config(settings, name, out)
