"""Beyond the CPA paper: CPA, CorBin, the aggregate Gaussian and the distributed discrete Gaussian on MNIST.

CPA comes twice: all bits of an update share the budget, as in the paper, or a message holds only as many
blocks as make the least noise at its budget, drawn anew for every client and round ("some blocks").

Two pictures: accuracy against the bits that all clients have sent, and accuracy against the epsilon that one
*client* really spends over the whole run at delta (`privacy_report`), not the one of a bit. The noise of
every mechanism is solved for the same targets, against the view "outsider" (whoever sees all released
models), the only one in which the aggregate Gaussian claims anything; CPA's claim is the same against the
server, and the distributed discrete Gaussian's against a server behind secure aggregation (see the table).
CorBin's pairs carry no finite epsilon against anybody who sees sums or both of a pair: it is solved for the
one view in which it has a claim, an eavesdropper on single messages, and drawn dashed. The table says who.

The aggregate Gaussian's claim counts what float64 does to its law. A part of that is a distance, for which
(1 + e^epsilon) times as much of delta has to pay: beyond an epsilon of some 20 there is nothing left, the
report gives no finite epsilon, and the noise is solved for the exact law instead. The table says where.

MNIST, linear model, K = 1,000 clients with 5 samples each, all in every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.mechanisms import CPA, AggregateGaussian, CorBin, DistributedDiscreteGaussian, FedAvg
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext
from lightning_fedq.privacy import accounting
from lightning_fedq.privacy.report import PrivacyReport, privacy_report
from lightning_fedq.privacy.run import ASSUMED, Run
from lightning_fedq.reports.runs import BITS_PER_MEGABYTE, save_figure
from reproductions.bench import Row, Rows, curve, curve_values
from reproductions.cpa.runs import GAMMA, Options, Task

Knob = Callable[[float], Mechanism]
DIM, MODULUS_BITS, _SPREAD = 7850, 16, 5.0
PLAIN = "FedAvg, no privacy"


def _context(mechanism: Mechanism, num_clients: int) -> RoundContext:
    groups, start = [], 0
    for size in mechanism.group_sizes(num_clients):
        groups.append(tuple(range(start, start + size)))
        start += size
    one = torch.ones(1, dtype=torch.float64)
    return RoundContext(0, tuple(groups), (DIM,), 0.0 * one, GAMMA / 2 * one)


def client_report(mechanism: Mechanism, num_clients: int, rounds: int, delta: float) -> PrivacyReport:
    """The privacy statement of a run of the linear model with everybody in every round."""
    sums = ASSUMED if mechanism.homomorphic else None
    return privacy_report(Run.ideal(mechanism, _context(mechanism, num_clients), rounds, sums), delta)


def ideal_epsilon(mechanism: Mechanism, num_clients: int, rounds: int, delta: float) -> float:
    """Epsilon against an outsider of the law that the sampler approximates; not a claim of ours."""
    claims = mechanism.claims(_context(mechanism, num_clients))
    claim = next(claim for claim in claims if claim.adversary is Adversary.OUTSIDER)
    return accounting.spent(claim.loss, delta, compositions=claim.compositions, rounds=rounds).epsilon


def solve(
    knob: Knob, target: float, spent: Callable[[Mechanism], float], low: float, high: float
) -> Mechanism:
    """The mechanism whose knob, bisected on a log scale, spends at most `target`, within 1%.

    Args:
        knob: Makes the mechanism; more spends more.
        target: Epsilon of a client over the run.
        spent: Epsilon that a mechanism spends; infinite is too much.
        low: Smallest setting; it must spend less than the target.
        high: Largest.

    Raises:
        ValueError: If even `low` spends more than the target.
    """
    if spent(knob(low)) > target:
        raise ValueError(f"no setting >= {low} spends at most {target}; raise the target")
    if spent(knob(high)) <= target:
        return knob(high)
    for _ in range(40):
        middle = math.sqrt(low * high)
        used = spent(knob(middle))
        low, high = (middle, high) if used <= target else (low, middle)
        if 0.99 * target <= used <= target:
            break
    return knob(low)


class _Method(NamedTuple):
    """A knob that spends more when it grows, its span, and the view of the claim that it is solved for."""

    knob: Knob
    low: float
    high: float
    view: Adversary = Adversary.OUTSIDER
    ideal: bool = False


def _methods(clip_norm: float, num_clients: int) -> dict[str, _Method]:
    size = padded_size(DIM)

    def discrete(level: float) -> Mechanism:
        """Noise clip_norm / level at each client, on a grid where sums stay below 5 standard deviations."""
        variance = num_clients**2 / size + num_clients / level**2
        grid = 2.0 * _SPREAD * math.sqrt(variance / (4.0**MODULUS_BITS - _SPREAD**2 * num_clients))
        return DistributedDiscreteGaussian(clip_norm, 1.0 / level, grid, MODULUS_BITS)

    return {
        "CPA": _Method(partial(CPA, epsilon_scope="bit"), 1e-6, 20.0),
        "CPA, some blocks": _Method(lambda level: CPA(level, epsilon_scope="round"), 1e-3, 5_000.0),
        "CorBin": _Method(CorBin, 1e-6, 20.0, Adversary.EAVESDROPPER),
        "aggregate Gaussian": _Method(
            lambda level: AggregateGaussian(clip_norm, noise_multiplier=1.0 / level), 1e-3, 100.0, ideal=True
        ),
        "DDG": _Method(discrete, 1e-3, 1e4),
    }


def cpa_beyond(
    num_clients: int = 1000,
    targets: Sequence[float] = (2.0, 8.0, 64.0, 512.0),
    bits_target: float = 8.0,
    delta: float = 1e-5,
    lr: float = 0.1,
    clip_norm: float = 0.5,
    radius: float = GAMMA / 2,
    rounds: int = 30,
    seed: int = 0,
    out: str = "runs/cpa-beyond",
    **options: Any,
) -> dict[str, Any]:
    """CPA, CorBin, aggregate Gaussian and DDG on MNIST: accuracy against bits and against real epsilon.

    Args:
        num_clients: 5 samples each.
        targets: Epsilon of one client over the run.
        bits_target: Which of them the picture against bits shows.
        delta: Of the run, below 1 / num_clients.
        lr: Of the one local step.
        clip_norm: l2 norm of an update, for the two Gaussian mechanisms.
        radius: Range of the one-bit mechanisms, in units of the update.
        rounds: Rounds.
        seed: One seed; the claims are those of the same run with secure keys.
        out: Folder of table and pictures.
        options: See `Options`.
    """
    if bits_target not in targets:
        raise ValueError(f"bits_target must be one of targets = {list(targets)}, got {bits_target}")
    asked = Options(**options)
    task = asked.task(rounds, seed)
    own = {"num_clients": num_clients, "delta": delta, "lr": lr, "clip_norm": clip_norm, "radius": radius}
    rows = Rows(out, own | task.settings, asked.resume)
    setting = _Setting(task, num_clients, lr, radius, delta)
    plain = rows.add({"method": PLAIN, "target_epsilon": math.inf}, partial(setting.columns, FedAvg(), None))
    for name, method in _methods(clip_norm, num_clients).items():
        for target in targets:
            rows.add(
                {"method": name, "target_epsilon": target}, partial(setting.solved_columns, method, target)
            )
    private = [row for row in rows.rows if row is not plain]
    shown = [plain, *(row for row in private if row["target_epsilon"] == bits_target)]
    _draw_bits(shown, bits_target, rows.folder / "bits.png")
    _draw_epsilon(private, plain["acc"], rows.folder / "epsilon.png")
    verdicts = [_verdict(private, target) for target in targets]
    verdicts += [
        *_at_equal_bits(shown, bits_target),
        "CorBin's epsilon is an eavesdropper's on single messages; against outsiders its pairs have none",
        *(_ideal(row) for row in private if row["claim_against"].endswith("ideal law")),
    ]
    return rows.finish(verdicts, "equal claims, MNIST, linear model")


@dataclass(frozen=True)
class _Setting:
    """What all runs share."""

    task: Task
    num_clients: int
    lr: float
    radius: float
    delta: float

    def report(self, mechanism: Mechanism) -> PrivacyReport:
        return client_report(mechanism, self.num_clients, self.task.rounds, self.delta)

    def epsilon(self, mechanism: Mechanism, method: _Method) -> float:
        """What the target is compared with."""
        epsilon = self.report(mechanism).row(method.view).epsilon_run
        if method.ideal and math.isinf(epsilon):
            return ideal_epsilon(mechanism, self.num_clients, self.task.rounds, self.delta)
        return epsilon

    def solved_columns(self, method: _Method, target: float) -> dict[str, Any]:
        """Columns of the mechanism that spends the target."""
        spent = partial(self.epsilon, method=method)
        return self.columns(solve(method.knob, target, spent, method.low, method.high), method)

    def columns(self, mechanism: Mechanism, method: _Method | None) -> dict[str, Any]:
        """One row; without a method there is no claim."""
        report = self.report(mechanism)
        run = self.task.run(mechanism, self.num_clients, self.lr, self.radius)
        ideal = method is not None and method.ideal and math.isinf(report.row(method.view).epsilon_run)
        view = "nobody" if method is None else method.view.name + ", ideal law" * ideal
        rounds = self.task.rounds
        return {
            "claim_against": view,
            "epsilon_run": math.inf if method is None else self.epsilon(mechanism, method),
            "epsilon_outsider": report.row(Adversary.OUTSIDER).epsilon_run,
            "epsilon_server": report.row(Adversary.SERVER).epsilon_run,
            "epsilon_secagg_server": report.row(Adversary.SECAGG_SERVER).epsilon_run,
            "bits_per_parameter": run.bits / (rounds * self.num_clients * DIM),
            "megabytes": run.bits / BITS_PER_MEGABYTE,
            "acc": 100 * run.last,
            "acc_best_val": 100 * run.best,
            "snr_db10": run.snr_db10,
            "cpu_seconds": run.cpu_seconds,
            "mechanism": repr(mechanism),
            "val_acc_by_round": curve([100 * value for value in run.accuracies]),
        }


def _ideal(row: Row) -> str:
    real = row["epsilon_outsider"]
    return (
        f"{row['method']}: {row['epsilon_run']:.3g} is the epsilon of the exact law; of the sampler as it "
        f"runs, with its distance from that law paid for in delta, the report says {real:.3g}"
    )


def _at_equal_bits(shown: Sequence[Row], target: float) -> list[str]:
    """Validation accuracy of the last round that a budget pays for, at the whole traffic of each method."""
    lines = []
    for budget in sorted({row["megabytes"] for row in shown}):
        words = []
        for row in shown:
            values = curve_values(row["val_acc_by_round"])
            paid = min(len(values), math.floor(budget / row["megabytes"] * len(values) * (1 + 1e-12)))
            words.append(f"{row['method']} {f'{values[paid - 1]:.1f}' if paid else 'none'} ({paid} rounds)")
        lines.append(f"at {budget:.3g} megabytes of all clients and epsilon {target:g}: {', '.join(words)}")
    return lines


def _verdict(table: Sequence[Row], target: float) -> str:
    rows = sorted(
        (r for r in table if r["target_epsilon"] == target), key=lambda r: float(r["acc"]), reverse=True
    )
    words = ", ".join(f"{r['method']} {r['acc']:.1f} ({r['bits_per_parameter']:.3g} bits)" for r in rows)
    return f"epsilon {target:g} over the run: {words}"


def _draw_bits(shown: Sequence[Row], target: float, path: Path) -> None:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for row in shown:
        values = curve_values(row["val_acc_by_round"])
        x = [row["megabytes"] * number / len(values) for number in range(1, len(values) + 1)]
        axes.plot(x, values, marker=".", label=row["method"])
    axes.set(xscale="log", xlabel="megabytes sent by all clients", ylabel="validation accuracy, %")
    axes.set_title(f"epsilon {target:g} of a client over the run")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def _draw_epsilon(table: Sequence[Row], plain: float, path: Path) -> None:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["method"] for row in table):
        rows = [row for row in table if row["method"] == name]
        label = f"{name}, against {rows[0]['claim_against'].lower()}"
        style = "-" if rows[0]["claim_against"] == "OUTSIDER" else "--"
        axes.plot([r["epsilon_run"] for r in rows], [r["acc"] for r in rows], style, marker=".", label=label)
    axes.axhline(plain, color="grey", linewidth=0.8, label=PLAIN)
    axes.set(xscale="log", xlabel="epsilon of one client over the run", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)
