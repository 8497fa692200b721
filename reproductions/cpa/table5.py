"""CPA, table V: accuracy and SNR of 1-bit and nested CPA with 10, 100 and 1,000 clients, and of JoPEQ.

MNIST, linear model, 30 rounds, epsilon = 0.5 per bit, R = 1 (3 levels in the authors' code), gamma = 0.05.
Nested CPA has Rc = 1 and Rn = 3 in the paper, 2 x 8 points; the authors' code runs 3 x 3, and both are here.
The table gives no learning rate, and its rows fit two different ones, so every row is run at 1 and at 0.1;
and once as the authors' code computes and once repaired (unbiased, dithered, 2 or 2 x 8 levels). JoPEQ, at
the rate 2 of this table, here clips
to the public range where the authors' code sends each user's mean and deviation in the clear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.reports.runs import save_figure
from reproductions.bench import Rows
from reproductions.cpa.runs import GAMMA, Options, Run, authors_cpa, jopeq, stated_nested_cpa, unbiased_cpa

PUBLISHED = {
    "CPA": {10: (49, -17.57), 100: (81, -0.07), 1000: (85, 0.09)},
    "nested CPA": {10: (59, -6.16), 100: (83, 0.08), 1000: (86, 0.17)},
    "JoPEQ": {10: (46, -31.45), 100: (64, -19.35), 1000: (70, -4.45)},
    "CPA without RR": {10: (60, -5.09), 100: (84, 10.10), 1000: (87, 15.51)},
    "nested CPA without RR": {10: (63, 3.23), 100: (85, 12.92), 1000: (87, 24.18)},
}
"""Accuracy in percent and SNR as 20 log10, by method and number of clients."""


def _mechanisms(epsilon: float) -> list[tuple[str, str, Mechanism, float]]:
    """Method, variant, mechanism, radius."""
    rows: list[tuple[str, str, Mechanism, float]] = [("FedAvg", "-", FedAvg(), 1.0)]
    for name, level in (("CPA", epsilon), ("CPA without RR", math.inf)):
        for nested in (False, True):
            label = f"nested {name}" if nested else name
            rows.append((label, "authors", *authors_cpa(level, nested)))
            rows.append((label, "unbiased", *unbiased_cpa(level, nested)))
            if nested:
                rows.append((label, "stated rates", *stated_nested_cpa(level)))
    return [*rows, ("JoPEQ", "clipped", jopeq(epsilon, rate=2), GAMMA)]


def cpa_table5(
    num_clients: Sequence[int] = (10, 100, 1000),
    methods: Sequence[str] = ("FedAvg", *PUBLISHED),
    learning_rates: Sequence[float] = (1.0, 0.1),
    epsilon: float = 0.5,
    rounds: int = 30,
    seed: int = 0,
    out: str = "runs/cpa-table5",
    **options: Any,
) -> dict[str, Any]:
    """CPA table V: MNIST, 10 to 1,000 clients, 1-bit and nested, with and without randomised response.

    Args:
        num_clients: Clients, 5 samples each.
        methods: Which rows of the table.
        learning_rates: Of the one local step; not stated.
        epsilon: Per bit; the paper's is 0.5.
        rounds: The authors' default is 30.
        seed: One seed; at 10 clients seeds differ by 6 points either way.
        out: Folder of table and picture.
        options: See `Options`.
    """
    asked = Options(**options)
    task = asked.task(rounds, seed)
    rows = Rows(out, {"epsilon_per_bit": epsilon, "gamma": GAMMA} | task.settings, asked.resume)
    for clients in num_clients:
        for lr in learning_rates:
            for method, variant, mechanism, radius in _mechanisms(epsilon):
                if method not in methods:
                    continue
                rows.add(
                    {"method": method, "variant": variant, "clients": clients, "lr": lr},
                    partial(_columns, method, clients, partial(task.run, mechanism, clients, lr, radius)),
                )
    table = rows.rows
    asked_for = [method for method in PUBLISHED if method in methods]
    verdicts = [line for method in asked_for for c in num_clients for line in _verdict(table, method, c)]
    _draw(table, rows.folder / "accuracy.png")
    more = _repaired(table) if {"FedAvg", "CPA"} <= set(methods) else []
    return rows.finish([*verdicts, *more], "Table V")


def _columns(method: str, clients: int, train: Callable[[], Run]) -> dict[str, float]:
    run = train()
    accuracy, snr = PUBLISHED.get(method, {}).get(clients, (math.nan, math.nan))
    return {
        "published_acc": accuracy,
        "acc": 100 * run.last,
        "acc_best_val": 100 * run.best,
        "published_snr_db20": snr,
        "snr_db20": run.snr_db20,
        "snr_db10": run.snr_db10,
        "clip_rate": run.clip_rate,
        "cpu_seconds": run.cpu_seconds,
    }


def _verdict(table: Sequence[dict[str, Any]], method: str, clients: int) -> list[str]:
    """Published beside ours as the authors compute it, at every learning rate."""
    if clients not in PUBLISHED[method]:
        return []
    accuracy, snr = PUBLISHED[method][clients]
    spread = 6.0 if clients < 50 else 2.0
    words, gaps = [], {}
    for row in table:
        if (row["method"], row["clients"]) != (method, clients) or row["variant"] == "unbiased":
            continue
        near = abs(max((row["acc"], row["acc_best_val"]), key=lambda a: -abs(a - accuracy)) - accuracy)
        fits = near <= spread and abs(row["snr_db20"] - snr) <= 2.0
        word = "fits" if fits else "does not fit"
        words.append(f"{row['variant']}, lr {row['lr']:g} {row['acc']:.1f} / {row['snr_db20']:.2f} ({word})")
        gaps[row["lr"]] = abs(row["snr_db20"] - snr)
    nearest = min(gaps, key=lambda lr: gaps[lr])
    return [
        f"{method}, K = {clients}: published {accuracy} / {snr}; ours {'; '.join(words)}; "
        f"SNR nearest at lr {nearest:g}"
    ]


def _repaired(table: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for clients in sorted({row["clients"] for row in table}):
        for lr in sorted({row["lr"] for row in table}):
            rows = {
                (r["method"], r["variant"]): r for r in table if r["clients"] == clients and r["lr"] == lr
            }
            theirs, ours = rows["CPA", "authors"], rows["CPA", "unbiased"]
            lines.append(
                f"repaired 1-bit CPA, K = {clients}, lr {lr:g}: {ours['acc']:.1f}, "
                f"as the authors compute it {theirs['acc']:.1f}, FedAvg {rows['FedAvg', '-']['acc']:.1f}"
            )
    return lines


def _draw(table: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    rates, methods = sorted({row["lr"] for row in table}), list(PUBLISHED)
    figure = Figure(figsize=(5.5 * len(rates), 4.2), layout="constrained")
    for axes, lr in zip(figure.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        for color, method in enumerate(methods):
            styles = {"authors": "-", "clipped": "-", "stated rates": ":", "unbiased": "--"}
            for variant, style in styles.items():
                rows = [r for r in table if (r["method"], r["variant"], r["lr"]) == (method, variant, lr)]
                if rows:
                    x, y = [r["clients"] for r in rows], [r["acc"] for r in rows]
                    axes.plot(x, y, style, color=f"C{color}", label=f"{method}, {variant}", marker=".")
            x = list(PUBLISHED[method])
            y = [PUBLISHED[method][c][0] for c in x]
            axes.plot(x, y, "x", color=f"C{color}")
        axes.set(xscale="log", xlabel="clients", ylabel="test accuracy, %", title=f"lr {lr:g}; x: published")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    save_figure(figure, path)
