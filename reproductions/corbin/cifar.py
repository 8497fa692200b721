"""CorBin-FL, experiments 1 to 6 (figures 1 to 3b): CIFAR-10; `cifar_runs` says what is stated and what not.

The paper shows curves and prints no table; what is judged is what it says of them (`statements`): "held" or
"NOT held" where the differences over the seeds decide by two standard errors, "not settled" between. The seed
is shared, so differences are taken seed by seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_fedq.mechanisms import (
    LDPQ,
    AugCorBin,
    CorBin,
    CorrelatedQuantization,
    FedAvg,
    PerCoordinateGaussian,
    PerCoordinateLaplace,
)
from lightning_fedq.reports.runs import save_figure
from reproductions.bench import Claim, Row, curve_values
from reproductions.corbin import statements
from reproductions.corbin.cifar_runs import Case, Setting, Table, compare
from reproductions.corbin.exp8 import shared_bits_claim
from reproductions.corbin.statements import Statement
from reproductions.corbin.tuning import mean_test, spread

SHARED_BITS, UNPAIRED, DELTA, TEST_IMAGES = 5, 0.2, 1e-5, 12_000


def corbin_exp1(out: str = "runs/corbin-exp1", **options: Any) -> dict[str, Any]:
    """CorBin-FL figure 1: CIFAR-10, 50 clients, epsilon 5: seven mechanisms.

    Args:
        out: Folder of table and picture.
        options: See `Setting`.
    """
    cases = [
        Case("vanilla", FedAvg()),
        Case("correlated quantisation", CorrelatedQuantization()),
        *_private(5.0),
        Case("Laplace", PerCoordinateLaplace(5.0)),
        Case("Gaussian", PerCoordinateGaussian(5.0, DELTA)),
    ]
    return _finish(compare("corbin-exp1", Setting(**options), cases, out), statements.outperform())


def corbin_exp2(out: str = "runs/corbin-exp2", **options: Any) -> dict[str, Any]:
    """CorBin-FL figure 2a: CIFAR-10, 50 clients, epsilon 1: 3, 5 and 7 shared bits.

    Args:
        out: Folder of table and picture.
        options: See `Setting`.
    """
    names = {bits: f"{bits} shared bits" for bits in (3, 5, 7)}
    cases = [Case(name, CorBin(1.0, bits)) for bits, name in names.items()]
    table = compare("corbin-exp2", Setting(**options), cases, out)
    return _finish(table, statements.shared_bits(*names.values()), shared_bits_claim(1.0))


def corbin_exp3(out: str = "runs/corbin-exp3", **options: Any) -> dict[str, Any]:
    """CorBin-FL figure 2b: CIFAR-10, 50 clients, epsilon 1: each drops out with probability 0 to 0.5.

    Args:
        out: Folder of table and picture.
        options: See `Setting`.
    """
    names = {p: f"dropout {p:g}" for p in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)}
    cases = [Case(name, CorBin(1.0, SHARED_BITS), dropout=p) for p, name in names.items()]
    without, *others = names.values()
    table = compare("corbin-exp3", Setting(**options), cases, out)
    return _finish(table, statements.robust_to_dropouts(without, others))


def corbin_exp4(out: str = "runs/corbin-exp4", **options: Any) -> dict[str, Any]:
    """CorBin-FL figure 2c: CIFAR-10, epsilon 5, batches of 32: 50 to 500 clients.

    Args:
        out: Folder of table and picture.
        options: See `Setting`.
    """
    setting = Setting(**options)
    mechanisms = {"vanilla": FedAvg(), "CorBin-FL": CorBin(5.0, SHARED_BITS), "LDP-FL": LDPQ(5.0)}
    cases = [
        Case(f"{name}, {clients} clients", mechanism, clients)
        for clients in setting.client_grid
        for name, mechanism in mechanisms.items()
    ]
    pairs = [
        (f"CorBin-FL, {clients} clients", f"LDP-FL, {clients} clients") for clients in setting.client_grid
    ]
    table = compare("corbin-exp4", setting, cases, out, batch_size=32)
    return _finish(table, statements.any_number_of_clients(pairs))


def corbin_exp5(out: str = "runs/corbin-exp5", **options: Any) -> dict[str, Any]:
    """CorBin-FL figure 3a: CIFAR-10, lambda 1: CorBin-FL at epsilon 10, LDP-FL at 10 and 50, no privacy.

    Args:
        out: Folder of table and picture.
        options: See `Setting`.
    """
    ours, plain, weak = "CorBin-FL, epsilon 10", "correlated quantisation", "LDP-FL, epsilon 50"
    cases = [
        Case(plain, CorrelatedQuantization()),
        Case(ours, CorBin(10.0, SHARED_BITS)),
        Case("LDP-FL, epsilon 10", LDPQ(10.0)),
        Case(weak, LDPQ(50.0)),
    ]
    table = compare("corbin-exp5", Setting(**options), cases, out, smoothing=(1.0,))
    return _finish(table, statements.as_good_as_no_privacy(ours, [plain, weak]))


def corbin_exp6(out: str = "runs/corbin-exp6", **options: Any) -> dict[str, Any]:
    """CorBin-FL figure 3b: CIFAR-10, 50 clients, epsilon 1, 3 and 5: CorBin-FL, AugCorBin-FL, LDP-FL.

    Args:
        out: Folder of table and picture.
        options: See `Setting`.
    """
    budgets = (1.0, 3.0, 5.0)
    cases = [
        case._replace(method=f"{case.method}, epsilon {epsilon:g}")
        for epsilon in budgets
        for case in _private(epsilon)
    ]
    pairs = [
        (f"{better}, epsilon {epsilon:g}", f"LDP-FL, epsilon {epsilon:g}")
        for epsilon in budgets
        for better in statements.OURS
    ]
    table = compare("corbin-exp6", Setting(**options), cases, out)
    return _finish(table, statements.above_at_every_budget(pairs))


def _private(epsilon: float) -> list[Case]:
    return [
        Case("CorBin-FL", CorBin(epsilon, SHARED_BITS)),
        Case("AugCorBin-FL", AugCorBin(epsilon, SHARED_BITS, UNPAIRED)),
        Case("LDP-FL", LDPQ(epsilon)),
    ]


def _finish(table: Table, statement: Statement, *closed: Claim) -> dict[str, Any]:
    """The verdict on the paper's statement by each norm, the picture, the summary.

    Args:
        table: All trainings.
        statement: What the paper says of them.
        closed: Verdicts that need no training.
    """
    lines: list[str | Claim] = list(closed)
    for norm in dict.fromkeys(norm for norm, _ in table.chosen):
        chosen = {method: rows for (kind, method), rows in table.chosen.items() if kind == norm}
        order = sorted(chosen, key=lambda method: -mean_test(chosen[method]))
        words = ", ".join(f"{name} {spread(chosen[name])}" for name in order)
        lines.append(f"{norm} norm, test accuracy over {len(chosen[order[0]])} seed(s): {words}")
        lines.append(statement.verdict(chosen, TEST_IMAGES).at(f"{norm} norm"))
    _draw(table.chosen, table.rows.folder / "accuracy.png")
    return table.rows.finish(lines, "test accuracy, %, of the round with the best validation accuracy")


def _draw(chosen: dict[tuple[str, str], list[Row]], path: Path) -> None:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [f"{method}, {norm}" for norm, method in chosen]
    for place, (name, rows) in enumerate(zip(names, chosen.values(), strict=True)):
        values = curve_values(rows[0]["val_by_round"])
        left.plot(range(1, len(values) + 1), values, label=f"{name}, lambda {rows[0]['smoothing']:g}")
        right.plot([row["test"] for row in rows], [place] * len(rows), "o")
    right.set_yticks(range(len(names)), names, fontsize=7)
    right.invert_yaxis()
    left.set(xlabel="round", ylabel="validation accuracy, %", title="best lambda of each, first seed")
    right.set(xlabel="test accuracy, %", title="best lambda of each, every seed")
    left.legend(fontsize=6)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save_figure(figure, path)
