"""`leakage-tradeoff`: what configurations leak to an attack against how well they learn, on one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from lightning_fedq.commands.configs import find
from lightning_fedq.commands.options import change_setting
from lightning_fedq.comparison.table import read_run
from lightning_fedq.leakage.matching import Matching
from lightning_fedq.leakage.study import Study
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.target import adversary_named
from lightning_fedq.privacy.verdict import NO_GUARANTEE, format_epsilon
from lightning_fedq.reports.runs import fresh_folder, save_figure, write_atomically, write_rows, write_summary
from reproductions.bench import Claim
from reproductions.leakage.attack import configured, print_rows
from reproductions.leakage.comparison import TradeOff, plot_trade_off, to_markdown, trade_off


def measure(config: str, adversary: Adversary, attempts: int, candidates: int, seed: int) -> TradeOff:
    """Attack the first round of a configuration: its model at the start, its data, its mechanism.

    Raises:
        ValueError: If it has no `Federated` callback, or can't be attacked.
    """
    model, inputs, labels, rate, mechanism = configured(config, candidates)
    if mechanism is None:
        raise ValueError(
            f"the trade-off compares federations, and {config} has no Federated callback; add one"
        )
    study = Study(model, nn.functional.cross_entropy, inputs, labels, rate, Matching())
    generator = torch.Generator().manual_seed(seed)
    return trade_off(Path(config).stem, study, mechanism, adversary, generator, attempts)


def epsilon_label(config: str, adversary: Adversary, rounds: int | None, delta: float) -> str:
    """The proven epsilon over the run against the same adversary, in words."""
    from lightning_fedq.commands.privacy import report_of_config

    report = report_of_config(config, rounds, delta, False)
    row = next(r for r in report.with_secure_keys or report.rows if r.adversary == adversary.name)
    if row.verdict == NO_GUARANTEE:
        return "no DP guarantee"
    return f"eps {format_epsilon(row.epsilon)} ({row.verdict})"


def leakage_tradeoff(
    configurations: Sequence[str],
    adversary: str = "eavesdropper",
    monitor: str = "val_acc",
    rounds: int | None = None,
    attempts: int = 200,
    candidates: int = 100,
    delta: float = 1e-5,
    seed: int = 0,
    out: str = "runs/leakage-tradeoff",
) -> dict[str, Any]:
    """Measured leakage against accuracy of configurations, with the paper's bounds, sound or not.

    The first round of each is attacked, then it is trained. Proven epsilons are the picture's labels.

    Args:
        configurations: Files or names.
        adversary: Adversary that attacks: eavesdropper, server, server_and_partner, client,
            secagg_server or outsider.
        monitor: Metric to compare.
        rounds: Rounds to train (default: as configured).
        attempts: Attempts of each attack.
        candidates: Length of the attacker's list.
        delta: Delta of the proven epsilon.
        seed: Seed of the attacks (default: 0).
        out: Folder of table, bounds and picture.
    """
    found, who = [str(find(config)) for config in configurations], adversary_named(adversary)
    folder, console = fresh_folder(Path(out)), Console(soft_wrap=True)
    results = [measure(config, who, attempts, candidates, seed) for config in found]
    rows = [
        {
            **_trained(config, result, monitor, rounds, folder),
            "epsilon": epsilon_label(config, who, rounds, delta),
            "unsound_bounds_refuted": len(result.counter_examples),
            "sound_bounds_violated": len(result.violations),
        }
        for config, result in zip(found, results, strict=True)
    ]
    print_rows(rows, f"leakage to {who.value}, {monitor} after training")
    write_rows(folder / "table.csv", rows)
    write_summary(folder / "table.json", {"adversary": who.name, "rows": rows})
    write_atomically(folder / "bounds.md", to_markdown(results))
    save_figure(plot_trade_off(rows, monitor), folder / "tradeoff.png")
    for result in results:
        for check in result.counter_examples:
            against = f"{check.measured:.3g} against {check.bound.value:.3g}"
            console.print(f"{result.name} refutes: {check.bound.name}: {against}", highlight=False)
    files = "\n".join(str(folder / name) for name in ("table.csv", "bounds.md", "tradeoff.png"))
    console.print(
        f"Measured by one attack, hence lower bounds; not differential privacy.\n{files}", highlight=False
    )
    claims = _claims(results)
    for claim in claims:
        console.print(claim.line, highlight=False, markup=False)
    settings = {"adversary": who.name, "attempts": attempts, "candidates": candidates, "seed": seed}
    return {"settings": settings, "claims": [claim.plain for claim in claims], "table": rows}


def _claims(results: Sequence[TradeOff]) -> list[Claim]:
    """The paper's bounds as printed, and those with other constants that can be proven."""
    refuted = {check.bound.name for result in results for check in result.counter_examples}
    broken = {check.bound.name for result in results for check in result.violations}
    says = "theorems 6.1 and 6.12, lemmas on leakage: the bounds as printed"
    words = f"{len(refuted)} of them refuted by a measurement: {'; '.join(sorted(refuted)) or 'none'}"
    sound = "the same bounds with constants that can be proven"
    return [
        Claim(says, words, not refuted, (121,)),
        Claim(sound, f"{len(broken)} broken in {len(results)} federations", not broken, (121,)),
    ]


def _trained(config: str, result: TradeOff, monitor: str, rounds: int | None, out: Path) -> dict[str, Any]:
    """Leakage of a configuration, and its metric after training."""
    from lightning_fedq.commands.run import resolve, run_config

    settings = resolve([config])
    if rounds is not None:
        change_setting(settings, "trainer.max_epochs", rounds)
    rows, _ = read_run(run_config(settings, result.name, out))
    values = [row[monitor] for row in rows if monitor in row]
    if not values:
        raise ValueError(f"{config} never logged {monitor!r}; it has {sorted(rows[-1])}")
    low, high = result.protected.leakage_limits
    return {
        "name": result.name,
        "leakage": result.protected.leakage,
        "leakage_low": low,
        "leakage_high": high,
        "utility_loss": result.utility_loss,
        monitor: values[-1],
    }
