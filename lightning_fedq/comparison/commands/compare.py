"""`fedq compare`: several runs in one table and one picture, or several mechanisms at one epsilon."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.box import SIMPLE
from rich.console import Console
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
    from lightning_fedq.mechanisms.interface import Adversary
    from lightning_fedq.privacy.report import PrivacyReport
    from lightning_fedq.privacy.target import PrivacyTarget

BASE = "digits_private"
"""What `--mechanisms` train where no configuration is named."""
COLUMNS = (
    "rounds",
    "final",
    "best",
    "epsilon",
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

    The curve of a run without quantisation and privacy (`FedAvg`) is dashed, as what to compare with.

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
        plain |= {label} if mechanism == "FedAvg" else set()
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
        return {"epsilon": "-", "verdict": "-", "view": "-", **columns}, ""
    found = shown(report, who)
    view = f"{found.who}, {found.asked}" if found.asked else found.who
    epsilon = found.printed if found.epsilon is None else found.epsilon
    return {"epsilon": epsilon, "verdict": found.verdict, "view": view, **columns}, found.label


def print_table(table: Sequence[Mapping[str, Any]], monitor: str) -> None:
    """Print rows as a table, numbers with four digits. Names are never cut."""
    shown = Table(title=monitor, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    of_runs = all("verdict" in row for row in table)  # other tables have columns of their own
    hidden = ("verdict", "view", "downlink_megabytes", "seconds") if of_runs else ()  # the files have them
    for column in [column for column in table[0] if column not in hidden]:
        shown.add_column(
            HEADS.get(column, column), no_wrap=True, justify="left" if column == "run" else "right"
        )
    for row in table:
        cells = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in row.items()}
        if of_runs and isinstance(row["epsilon"], float):
            cells["epsilon"] = f"{format_epsilon(row['epsilon'])} {row['verdict']}"
        if of_runs and isinstance(row["R"], float):
            cells["R"] = f"{row['R']:.2g}" if row["R"] > 1e-6 else "0"
        shown.add_row(*(cell for name, cell in cells.items() if name not in hidden))
    console = Console()
    console.width = max(
        console.width, console.measure(shown, options=console.options.update(width=500)).maximum
    )
    console.print(shown)
    if not of_runs:
        return
    from lightning_fedq.privacy.secret_row import title_of  # imports torch, and only needed here

    views = {row["run"]: str(row["view"]) for row in table}
    views = {run: view if view in ("", "-") else title_of(view) for run, view in views.items()}
    if len(set(views.values())) == 1:
        towards = next(iter(views.values()))
        console.print(f"epsilon: over the run, towards {towards}", highlight=False, soft_wrap=True)
        return
    console.print("epsilon: over the run, towards", highlight=False)
    for run, view in views.items():
        console.print(f"  {run}: {view}", highlight=False, soft_wrap=True)


def _trained(
    base: str, names: Sequence[str], target: PrivacyTarget, rounds: int | None, out: Path
) -> dict[str, Path]:
    """Train one configuration with several mechanisms at one target, and return run folders by name."""
    # both import Lightning, and are only needed here
    from lightning_fedq.commands.plan import same_target
    from lightning_fedq.commands.run import resolve, run_config

    folders = {}
    for name, (settings, reason) in same_target(base, names, target, rounds).items():
        config = resolve([str(find(base))])
        for key in ("privacy", "secure_aggregation"):
            change_setting(config, f"Federated.{key}", None)
        for key, value in settings.items():
            change_setting(config, f"Federated.{key}", value)
        if rounds is not None:
            change_setting(config, "trainer.max_epochs", rounds)
        if reason:
            print(f"{name} trains without a target: {reason}", file=sys.stderr)
        folders[name] = run_config(config, name, out)
    return folders


def main(
    runs: Annotated[Sequence[str], "RUN"] = (),
    *,
    mechanisms: Annotated[Sequence[str], "NAME"] = (),
    epsilon: float | None = None,
    delta: float = 1e-5,
    adversary: Annotated[str | None, "WHO"] = None,
    monitor: str | None = None,
    mode: Literal["max", "min"] | None = None,
    rounds: int | None = None,
    out: Path = Path("runs/compare"),
) -> None:
    """Train the given configurations (or read the given run folders) and put them into one table
    and one picture: a metric against rounds, and against megabytes. With --mechanisms, train one
    configuration with each of several mechanisms, all calibrated to one epsilon.

    Args:
        runs: Configuration (a file or a name) or folder of a run; with --mechanisms one
            configuration (default: digits_private).
        mechanisms: Mechanisms to train with, such as CorBin.
        epsilon: Target of the mechanisms over the run, for a client.
        delta: Delta of the target.
        adversary: Adversary towards whom epsilons are shown, and met by mechanisms: eavesdropper,
            server, server_and_partner, client, secagg_server or outsider (default: outsider for
            mechanisms, or whom each run was asked about).
        monitor: Metric to compare (default: val_acc, or the first val_* there is).
        mode: Direction in which the metric is better (default: by name).
        rounds: Rounds to train a configuration (default: its own).
        out: Folder of table and picture.
    """
    # import torch, which whoever lists commands need not wait for
    from lightning_fedq.privacy.target import PrivacyTarget, adversary_named

    check_rounds(rounds)
    if bool(mechanisms) != (epsilon is not None):
        raise ValueError(
            "--mechanisms and --epsilon go together: --mechanisms CorBin GaussianNoise --epsilon 8"
        )
    if not mechanisms and not runs:
        raise ValueError("name the runs, or --mechanisms and --epsilon")
    if mechanisms and len(runs) > 1:
        raise ValueError(f"--mechanisms take one configuration, got {len(runs)}")
    asked = None if adversary is None else adversary_named(adversary)
    out = fresh_folder(out)
    folders: dict[str, Path] = {}
    if epsilon is not None:
        asked = asked or adversary_named("outsider")
        target = PrivacyTarget(epsilon, delta, asked)
        folders = _trained(runs[0] if runs else BASE, mechanisms, target, rounds, out)
        runs = ()
    for run in runs:
        path = Path(run)
        name = path.stem if path.stem not in folders else f"{path.stem}-{len(folders) + 1}"
        folders[name] = path if path.is_dir() else _run(run, name, rounds, out)
    compare(folders, monitor, out, mode, asked)


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
