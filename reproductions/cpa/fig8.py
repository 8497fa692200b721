"""CPA, figure 8: convergence, accuracy against rounds, linear model on MNIST, K = 1,000.

The paper shows a plot only; its claim is that CPA converges at the rate of federated learning without
quantisation or noise. Here: validation accuracy after every round, test accuracy after the last, and how many
rounds each method takes to come within a few points of where FedAvg ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fedq.mechanisms import FedAvg, SignRR
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.reports.runs import save_figure
from reproductions.bench import Rows, curve, curve_values
from reproductions.cpa.baselines import AuthorsLaplace
from reproductions.cpa.runs import GAMMA, Options, Run, authors_cpa, jopeq, unbiased_cpa

NEAR = 3.0
"""Points below FedAvg's last validation accuracy that count as near."""


def _mechanisms(epsilon: float) -> list[tuple[str, Mechanism, float]]:
    return [
        ("FedAvg", FedAvg(), 1.0),
        ("CPA, authors", *authors_cpa(epsilon)),
        ("CPA, unbiased", *unbiased_cpa(epsilon)),
        ("CPA without RR, unbiased", *unbiased_cpa(math.inf)),
        ("Laplace, authors", AuthorsLaplace(epsilon), 1.0),
        ("signSGD & RR, authors", SignRR(epsilon, "plain_mean", True), 1.0),
        ("JoPEQ, clipped", jopeq(epsilon), GAMMA),
    ]


def cpa_fig8(
    num_clients: int = 1000,
    learning_rates: Sequence[float] = (1.0, 0.1),
    epsilon: float = 0.5,
    rounds: int = 50,
    seed: int = 0,
    out: str = "runs/cpa-fig8",
    **options: Any,
) -> dict[str, Any]:
    """CPA figure 8: accuracy against rounds on MNIST, linear model, 1,000 clients.

    Args:
        num_clients: The paper's 1,000, 5 samples each.
        learning_rates: Of the one local step; not stated.
        epsilon: Per bit or coordinate.
        rounds: Not stated.
        seed: One seed.
        out: Folder of table and picture.
        options: See `Options`.
    """
    asked = Options(**options)
    task = asked.task(rounds, seed)
    rows = Rows(out, {"num_clients": num_clients, "epsilon": epsilon} | task.settings, asked.resume)
    for lr in learning_rates:
        for method, mechanism, radius in _mechanisms(epsilon):
            train = partial(task.run, mechanism, num_clients, lr, radius)
            rows.add({"method": method, "lr": lr}, partial(_columns, train))
    draw_curves(rows.rows, rows.folder / "convergence.png", ["method"])
    return rows.finish(_verdicts(rows.rows), "Figure 8")


def _columns(train: Callable[[], Run]) -> dict[str, Any]:
    run = train()
    return {
        "acc": 100 * run.last,
        "acc_best_val": 100 * run.best,
        "snr_db20": run.snr_db20,
        "cpu_seconds": run.cpu_seconds,
        "val_acc_by_round": curve([100 * value for value in run.accuracies]),
    }


def _verdicts(table: Sequence[dict[str, Any]]) -> list[str]:
    """How soon each method is near where FedAvg ends at the same rate."""
    lines = []
    for lr in dict.fromkeys(row["lr"] for row in table):
        curves = {r["method"]: curve_values(r["val_acc_by_round"]) for r in table if r["lr"] == lr}
        goal = curves["FedAvg"][-1] - NEAR
        words = []
        for method, values in curves.items():
            reached = next((str(n) for n, value in enumerate(values, 1) if value >= goal), "never")
            words.append(f"{method} {reached} (ends at {values[-1]:.1f})")
        lines.append(f"lr {lr:g}, rounds until {goal:.1f}% in validation: {', '.join(words)}")
    return lines


def draw_curves(table: Sequence[dict[str, Any]], path: Path, names: Sequence[str]) -> None:
    """Validation accuracy against rounds, a field for every learning rate.

    Args:
        table: Rows with `lr` and `val_acc_by_round`.
        path: Picture.
        names: Columns that name a curve.
    """
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    rates = list(dict.fromkeys(row["lr"] for row in table))
    figure = Figure(figsize=(5.5 * len(rates), 4.2), layout="constrained")
    for axes, lr in zip(figure.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        for row in table:
            if row["lr"] == lr:
                values = curve_values(row["val_acc_by_round"])
                axes.plot(range(1, len(values) + 1), values, label=", ".join(row[name] for name in names))
        axes.set(xlabel="round", ylabel="validation accuracy, %", title=f"lr {lr:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    save_figure(figure, path)
