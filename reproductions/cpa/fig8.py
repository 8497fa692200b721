"""CPA, figure 8: convergence, accuracy against rounds, linear model on MNIST, K = 1,000.

The paper shows a plot only; its claim is that CPA converges at the rate of federated learning without
quantisation or noise. Here: validation accuracy after every round, test accuracy after the last, and how many
rounds each method takes to come within a few points of where FedAvg ends. JoPEQ comes with 3 levels, which
are the authors' R = 1 and 1.58 bits, and with 2, which are one bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fedq.mechanisms import FedAvg, JoPEQ, SignRR
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.reports.runs import save_figure
from reproductions.bench import Claim, Rows, curve, curve_values
from reproductions.cpa.baselines import AuthorsJoPEQ, AuthorsLaplace
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
        ("JoPEQ, authors", AuthorsJoPEQ(epsilon), 1.0),
        ("JoPEQ, clipped", jopeq(epsilon), GAMMA),
        ("JoPEQ, authors, 2 levels", AuthorsJoPEQ(epsilon, 2), 1.0),
        ("JoPEQ, clipped, 2 levels", JoPEQ(epsilon, 2), GAMMA),
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
    return rows.finish(*_verdicts(rows.rows))


def _columns(train: Callable[[], Run]) -> dict[str, Any]:
    run = train()
    return {
        "acc": 100 * run.last,
        "acc_best_val": 100 * run.best,
        "snr_db20": run.snr_db20,
        "cpu_seconds": run.cpu_seconds,
        "val_acc_by_round": curve([100 * value for value in run.accuracies]),
    }


def _verdicts(table: Sequence[dict[str, Any]]) -> tuple[list[str], str, list[Claim]]:
    """How soon each method is near where FedAvg ends at the same rate, the title, and who ends above whom."""
    lines, claims = list[str](), list[Claim]()
    for lr in dict.fromkeys(row["lr"] for row in table):
        curves = {r["method"]: curve_values(r["val_acc_by_round"]) for r in table if r["lr"] == lr}
        goal = curves["FedAvg"][-1] - NEAR
        reached = {
            method: next((n for n, value in enumerate(values, 1) if value >= goal), None)
            for method, values in curves.items()
        }
        words = ", ".join(f"{m} {reached[m] or 'never'} (ends at {v[-1]:.1f})" for m, v in curves.items())
        lines.append(f"lr {lr:g}, rounds until {goal:.1f}% in validation: {words}")
        ends, where = {row["method"]: row["acc"] for row in table if row["lr"] == lr}, f"lr {lr:g}"
        ours, plain, last = reached["CPA, authors"], reached["FedAvg"], ends["CPA, authors"]
        assert plain is not None
        near = ours is not None and ours <= 1.5 * plain and last >= ends["FedAvg"] - NEAR
        words = f"within {NEAR:g} points of its end after {ours or 'never'} and {plain} rounds; "
        words += f"ends at {last:.1f} and {ends['FedAvg']:.1f} in test"
        claims.append(Claim("figure 8: CPA converges as vanilla FL does", words, near, (108,), where))
        for rival in (method for method in ends if method.startswith("JoPEQ")):
            words = f"CPA ends at {last:.1f}, {rival} at {ends[rival]:.1f}"
            says = "figure 8: CPA is above JoPEQ at one bit"
            claims.append(Claim(says, words, bool(last > ends[rival]), (134,), where))
    return lines, "Figure 8", claims


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
