"""CPA, figure 7: accuracy against epsilon for CPA, JoPEQ and MVU with 10 and 50 clients.

MNIST, linear model. The paper shows a plot only and says neither the grid of epsilon nor the learning rate,
nor MVU's bits; here the rate is 0.1, JoPEQ has the stated rate of one bit (3 levels) as its authors' code has
it and clipped to a public range, MVU 2 bits in and out. Means over a few
seeds, because few clients scatter by 6 points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fedq.mechanisms import MVU
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.reports.runs import save_figure
from reproductions.bench import Claim, Rows
from reproductions.cpa.baselines import AuthorsJoPEQ
from reproductions.cpa.runs import GAMMA, Options, Run, authors_cpa, jopeq, unbiased_cpa


def _mechanisms(epsilon: float) -> list[tuple[str, Mechanism, float]]:
    return [
        ("CPA, authors", *authors_cpa(epsilon)),
        ("CPA, unbiased", *unbiased_cpa(epsilon)),
        ("JoPEQ, authors", AuthorsJoPEQ(epsilon), 1.0),
        ("JoPEQ", jopeq(epsilon), GAMMA),
        ("MVU", MVU(epsilon), GAMMA / 2),
    ]


def cpa_fig7(
    num_clients: Sequence[int] = (10, 50),
    epsilons: Sequence[float] = (0.5, 1.0, 2.0, 4.0),
    lr: float = 0.1,
    rounds: int = 30,
    seeds: Sequence[int] = (0, 1, 2),
    out: str = "runs/cpa-fig7",
    **options: Any,
) -> dict[str, Any]:
    """CPA figure 7: accuracy against epsilon for CPA, JoPEQ and MVU, 10 and 50 clients.

    Args:
        num_clients: 5 samples each.
        epsilons: Per bit or coordinate.
        lr: Of the one local step; not stated.
        rounds: Not stated; the authors' default.
        seeds: Three by default.
        out: Folder of table and picture.
        options: See `Options`.
    """
    asked = Options(**options)
    settings = {
        "lr": lr,
        "rounds": rounds,
        "gamma": GAMMA,
        "momentum": asked.momentum,
        "val_samples": asked.val_samples,
        "seeds": list(seeds),
    }
    rows = Rows(out, settings, asked.resume)
    tasks = [asked.task(rounds, seed) for seed in seeds]
    for clients in num_clients:
        for epsilon in epsilons:
            for method, mechanism, radius in _mechanisms(epsilon):
                rows.add(
                    {"clients": clients, "epsilon": epsilon, "method": method},
                    partial(_columns, [partial(task.run, mechanism, clients, lr, radius) for task in tasks]),
                )
    _draw(rows.rows, rows.folder / "accuracy.png")
    return rows.finish(_verdicts(rows.rows, num_clients, epsilons), "Figure 7", _claims(rows.rows))


def _columns(trainings: Sequence[Callable[[], Run]]) -> dict[str, float]:
    """Means over seeds."""
    runs = [train() for train in trainings]
    best = np.array([100 * run.best for run in runs])
    return {
        "acc_best_val": float(best.mean()),
        "acc_std_over_seeds": float(best.std(ddof=1)) if len(best) > 1 else float("nan"),
        "acc": float(np.mean([100 * run.last for run in runs])),
        "snr_db10": float(np.mean([run.snr_db10 for run in runs])),
        "cpu_seconds": sum(run.cpu_seconds for run in runs),
    }


def _verdicts(
    table: Sequence[dict[str, Any]], num_clients: Sequence[int], epsilons: Sequence[float]
) -> list[str]:
    verdicts = []
    for clients in num_clients:
        for epsilon in epsilons:
            rows = [r for r in table if (r["clients"], r["epsilon"]) == (clients, epsilon)]
            order = sorted(rows, key=lambda r: -float(r["acc_best_val"]))
            words = ", ".join(f"{r['method']} {r['acc_best_val']:.1f}" for r in order)
            first = "CPA is first" if order[0]["method"].startswith("CPA") else "CPA is not first"
            verdicts.append(f"K = {clients}, epsilon {epsilon:g}: {words}; {first}")
    return verdicts


def _claims(table: Sequence[dict[str, Any]]) -> list[Claim]:
    """CPA above each rival."""
    verdicts = list[Claim]()
    found = {(r["method"], r["clients"], r["epsilon"]): r["acc_best_val"] for r in table}
    for rival in ("JoPEQ, authors", "JoPEQ", "MVU"):
        leads = {(k, e): found["CPA, authors", k, e] - a for (m, k, e), a in found.items() if m == rival}
        worst = min(leads, key=lambda cell: leads[cell])
        words = (
            f"in {sum(lead > 0 for lead in leads.values())} of {len(leads)} cells, by "
            f"{max(leads.values()):.1f} points at most, {leads[worst]:+.1f} at K = {worst[0]}, "
            f"epsilon {worst[1]:g}"
        )
        says = f"figure 7: CPA is above {rival} at every K and epsilon"
        verdicts.append(Claim(says, words, min(leads.values()) > 0, (107,)))
    return verdicts


def _draw(table: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    counts, methods = sorted({r["clients"] for r in table}), list(dict.fromkeys(r["method"] for r in table))
    figure = Figure(figsize=(5.5 * len(counts), 4.0), layout="constrained")
    for axes, clients in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        for method in methods:
            rows = [r for r in table if (r["clients"], r["method"]) == (clients, method)]
            x, y = [r["epsilon"] for r in rows], [r["acc_best_val"] for r in rows]
            axes.errorbar(x, y, [r["acc_std_over_seeds"] for r in rows], capsize=2, marker=".", label=method)
        axes.set(xlabel="epsilon per bit or coordinate", ylabel="test accuracy, %", title=f"K = {clients}")
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, path)
