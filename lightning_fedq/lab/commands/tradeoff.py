"""`fedq tradeoff`: what configurations leak to an attack against how well they learn, on one picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from lightning_fedq.commands.configs import find
from lightning_fedq.commands.options import ShowDefaults, change_setting
from lightning_fedq.lab.commands.attack import configured, print_rows
from lightning_fedq.lab.commands.compare import read_run
from lightning_fedq.lab.leakage.comparison import TradeOff, plot_trade_off, to_markdown, trade_off
from lightning_fedq.lab.leakage.inversion import Matching
from lightning_fedq.lab.leakage.study import Study
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.page import epsilon_of
from lightning_fedq.privacy.verdict import NO_GUARANTEE
from lightning_fedq.reports.runs import fresh_folder, save_figure, write_atomically, write_rows, write_summary


def measure(config: str, adversary: Adversary, options: argparse.Namespace) -> TradeOff:
    """Attack the first round of a configuration: its model at the start, its data, its mechanism.

    Raises:
        ValueError: If it has no `Federated` callback, or can't be attacked.
    """
    model, inputs, labels, rate, mechanism = configured(config, options.candidates)
    if mechanism is None:
        raise ValueError(
            f"fedq tradeoff compares federations, and {config} has no Federated callback; add one"
        )
    study = Study(model, nn.functional.cross_entropy, inputs, labels, rate, Matching())
    generator = torch.Generator().manual_seed(options.seed)
    return trade_off(Path(config).stem, study, mechanism, adversary, generator, options.attempts)


def epsilon_label(config: str, adversary: Adversary, options: argparse.Namespace) -> str:
    """The proven epsilon over the run against the same adversary, in words."""
    from lightning_fedq.commands.privacy import report_of_config

    report = report_of_config(config, options.rounds, options.delta, False)
    row = next(r for r in report.with_secure_keys or report.rows if r.adversary == adversary.name)
    if row.verdict == NO_GUARANTEE:
        return "no DP guarantee"
    return f"eps {epsilon_of(row)} ({row.verdict})"


def main(argv: Sequence[str]) -> int:
    """Attack and train every configuration. Print the table, write it, the bounds and the picture."""
    parser = argparse.ArgumentParser(
        prog="fedq tradeoff",
        formatter_class=ShowDefaults,
        description="Attack the first round of each configuration, train it, and put measured leakage "
        "against accuracy on one picture, proven epsilons as labels, with the paper's bounds, sound or not.",
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="configurations, files or names")
    parser.add_argument(
        "--adversary", choices=[who.name for who in Adversary], default="EAVESDROPPER", help="who attacks"
    )
    parser.add_argument("--monitor", default="val_acc", help="the metric to compare (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="rounds to train (default: as configured)")
    parser.add_argument("--attempts", type=int, default=200, help="attempts of each attack")
    parser.add_argument("--candidates", type=int, default=100, help="length of the attacker's list")
    parser.add_argument("--delta", type=float, default=1e-5, help="of the proven epsilon")
    parser.add_argument("--seed", type=int, default=0, help="of the attacks")
    parser.add_argument("--out", default="runs/tradeoff", help="folder of table, bounds and picture")
    options = parser.parse_args(argv)
    try:
        options.configs = [str(find(config)) for config in options.configs]
    except ValueError as error:
        parser.error(str(error))
    out, console, adversary = (
        fresh_folder(Path(options.out)),
        Console(soft_wrap=True),
        Adversary[options.adversary],
    )
    try:
        results = [measure(config, adversary, options) for config in options.configs]
        rows = [
            _row(config, result, adversary, out, options)
            for config, result in zip(options.configs, results, strict=True)
        ]
    except ValueError as error:
        parser.error(str(error))
    print_rows(rows, f"leakage to {adversary.value}, {options.monitor} after training")
    write_rows(out / "table.csv", rows)
    write_summary(out / "table.json", {"adversary": adversary.name, "rows": rows})
    write_atomically(out / "bounds.md", to_markdown(results))
    save_figure(plot_trade_off(rows, options.monitor), out / "tradeoff.png")
    for result in results:
        for check in result.counter_examples:
            found = f"{check.measured:.3g} against {check.bound.value:.3g}"
            console.print(f"{result.name} refutes: {check.bound.name}: {found}", highlight=False)
    files = "\n".join(str(out / name) for name in ("table.csv", "bounds.md", "tradeoff.png"))
    console.print(
        f"Measured by one attack, hence lower bounds; not differential privacy.\n{files}", highlight=False
    )
    return 0


def _row(
    config: str, result: TradeOff, adversary: Adversary, out: Path, options: argparse.Namespace
) -> dict[str, Any]:
    from lightning_fedq.commands.run import resolve, run_config

    settings = resolve([config])
    if options.rounds is not None:
        change_setting(settings, "trainer.max_epochs", options.rounds)
    rows, _ = read_run(run_config(settings, result.name, out))
    values = [row[options.monitor] for row in rows if options.monitor in row]
    if not values:
        raise ValueError(f"{config} never logged {options.monitor!r}; it has {sorted(rows[-1])}")
    low, high = result.protected.leakage_limits
    return {
        "name": result.name,
        "leakage": result.protected.leakage,
        "leakage_low": low,
        "leakage_high": high,
        "utility_loss": result.utility_loss,
        options.monitor: values[-1],
        "epsilon": epsilon_label(config, adversary, options),
        "unsound_bounds_refuted": len(result.counter_examples),
        "sound_bounds_violated": len(result.violations),
    }
