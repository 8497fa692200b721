"""Beyond the CPA paper: CPA, CorBin, the aggregate Gaussian and the distributed discrete Gaussian on MNIST.

Two pictures: accuracy against the bits that all clients have sent, and accuracy against the epsilon that one
*client* really spends over the whole run at delta (`privacy_report`), not the one of a bit. The noise of
every mechanism is solved for the same targets, against the view "outsider" (whoever sees all released
models), the only one in which the aggregate Gaussian claims anything; CPA's claim is the same against the
server, and the distributed discrete Gaussian's against a server behind secure aggregation (see the table).
CorBin's pairs carry no finite epsilon against anybody who sees sums or both of a pair: it is solved for the
one view in which it has a claim, an eavesdropper on single messages, and drawn dashed. The table says who.

MNIST, linear model, K = 1,000 clients with 5 samples each, all in every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_fedq.core import Adversary, Mechanism, RoundContext
from lightning_fedq.experiments.cpa_runs import GAMMA, Run, Task, finish
from lightning_fedq.experiments.runs import ImageData
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.mechanisms import CPA, AggregateGaussian, CorBin, DistributedDiscreteGaussian, FedAvg
from lightning_fedq.privacy.report import PrivacyReport, privacy_report
from lightning_fedq.reports import fresh_folder, save_figure

Knob = Callable[[float], Mechanism]
DIM, MODULUS_BITS, _SPREAD = 7850, 16, 5.0


def client_report(mechanism: Mechanism, num_clients: int, rounds: int, delta: float) -> PrivacyReport:
    """The privacy statement of a run of the linear model with everybody in every round."""
    groups, start = [], 0
    for size in mechanism.group_sizes(num_clients):
        groups.append(tuple(range(start, start + size)))
        start += size
    one = torch.ones(1, dtype=torch.float64)
    context = RoundContext(0, tuple(groups), (DIM,), 0.0 * one, GAMMA / 2 * one)
    return privacy_report(
        mechanism, context, rounds=rounds, delta=delta, secure_aggregation=mechanism.homomorphic
    )


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


def _knobs(clip_norm: float, num_clients: int) -> dict[str, tuple[Knob, float, float, Adversary]]:
    """By method: a knob that spends more when it grows, its span, and the view of its claim."""

    size = padded_size(DIM)

    def discrete(level: float) -> Mechanism:
        """Noise clip_norm / level at each client, on a grid where sums stay below 5 standard deviations."""
        variance = num_clients**2 / size + num_clients / level**2
        grid = 2.0 * _SPREAD * math.sqrt(variance / (4.0**MODULUS_BITS - _SPREAD**2 * num_clients))
        return DistributedDiscreteGaussian(clip_norm, 1.0 / level, grid, MODULUS_BITS)

    return {
        "CPA": (CPA, 1e-6, 20.0, Adversary.OUTSIDER),
        "CorBin": (CorBin, 1e-6, 20.0, Adversary.EAVESDROPPER),
        "aggregate Gaussian": (
            lambda level: AggregateGaussian(clip_norm, noise_multiplier=1.0 / level),
            1e-3,
            1e3,
            Adversary.OUTSIDER,
        ),
        "DDG": (discrete, 1e-3, 1e4, Adversary.OUTSIDER),
    }


def cpa_beyond(
    data: ImageData = ImageData(),  # noqa: B008 (frozen)
    num_clients: int = 1000,
    targets: Sequence[float] = (2.0, 8.0, 64.0, 512.0),
    bits_target: float = 8.0,
    delta: float = 1e-5,
    lr: float = 0.1,
    clip_norm: float = 0.5,
    radius: float = GAMMA / 2,
    rounds: int = 30,
    momentum: float = 0.5,
    val_samples: int = 10_000,
    seed: int = 0,
    out: str = "runs/cpa-beyond",
) -> dict[str, Any]:
    """CPA, CorBin, aggregate Gaussian and DDG on MNIST: accuracy against bits and against real epsilon.

    Args:
        data: Where MNIST is.
        num_clients: 5 samples each.
        targets: Epsilon of one client over the run.
        bits_target: Which of them the picture against bits shows.
        delta: Of the run, below 1 / num_clients.
        lr: Of the one local step.
        clip_norm: l2 norm of an update, for the two Gaussian mechanisms.
        radius: Range of the one-bit mechanisms, in units of the update.
        rounds: Rounds.
        momentum: Of each client, kept across rounds.
        val_samples: Held out.
        seed: One seed; the claims are those of the same run with secure keys.
        out: Folder of table and pictures.
    """
    if bits_target not in targets:
        raise ValueError(f"bits_target must be one of targets = {list(targets)}, got {bits_target}")
    folder, table = fresh_folder(Path(out)), list[dict[str, Any]]()
    task = Task(data.root, data.download, rounds, val_samples, seed, momentum)
    plain = task.run(FedAvg(), num_clients, lr, radius)
    curves: dict[str, Run] = {"FedAvg, no privacy": plain}
    for method, (knob, low, high, view) in _knobs(clip_norm, num_clients).items():
        for target in targets:

            def spent(mechanism: Mechanism, view: Adversary = view) -> float:
                return client_report(mechanism, num_clients, rounds, delta).row(view).epsilon_run

            mechanism = solve(knob, target, spent, low, high)
            report = client_report(mechanism, num_clients, rounds, delta)
            run = task.run(mechanism, num_clients, lr, radius)
            if target == bits_target:
                curves[method] = run
            table.append(
                {
                    "method": method,
                    "target_epsilon": target,
                    "claim_against": view.name,
                    "epsilon_run": report.row(view).epsilon_run,
                    "epsilon_outsider": report.row(Adversary.OUTSIDER).epsilon_run,
                    "epsilon_server": report.row(Adversary.SERVER).epsilon_run,
                    "epsilon_secagg_server": report.row(Adversary.SECAGG_SERVER).epsilon_run,
                    "bits_per_parameter": run.bits[-1] / (rounds * num_clients * DIM),
                    "acc": 100 * run.last,
                    "acc_best_val": 100 * run.best,
                    "snr_db10": run.snr_db10,
                    "cpu_seconds": run.cpu_seconds,
                    "mechanism": repr(mechanism),
                }
            )
            print(f"{method}, epsilon {target:g}: {100 * run.last:.2f}", flush=True)
    budget = min(run.bits[-1] for run in curves.values())
    equal_bits = [
        {"method": name, "bits": budget, "val_acc": 100 * _at(run, budget)} for name, run in curves.items()
    ]
    verdicts = [_verdict(table, target) for target in targets]
    words = ", ".join(f"{row['method']} {row['val_acc']:.1f}" for row in equal_bits)
    verdicts.append(f"at {budget / 8e6:.1f} megabytes of all clients and epsilon {bits_target:g}: {words}")
    verdicts.append(
        "CorBin's epsilon is an eavesdropper's on single messages; against outsiders its pairs have none"
    )
    settings = {
        "num_clients": num_clients,
        "delta": delta,
        "lr": lr,
        "clip_norm": clip_norm,
        "radius": radius,
        "rounds": rounds,
        "momentum": momentum,
        "seed": seed,
        "fedavg_acc": 100 * plain.last,
        "equal_bits": equal_bits,
    }
    _draw(table, curves, bits_target, 100 * plain.last, folder)
    return finish(folder, table, settings, verdicts, "equal claims, MNIST, linear model")


def _at(run: Run, bits: int) -> float:
    """Validation accuracy of the last round that the budget pays for; 0 if it pays for none."""
    paid = [a for a, sent in zip(run.accuracies, run.bits, strict=True) if sent <= bits]
    return paid[-1] if paid else 0.0


def _verdict(table: Sequence[dict[str, Any]], target: float) -> str:
    rows = sorted(
        (r for r in table if r["target_epsilon"] == target), key=lambda r: float(r["acc"]), reverse=True
    )
    words = ", ".join(f"{r['method']} {r['acc']:.1f} ({r['bits_per_parameter']:.2f} bits)" for r in rows)
    return f"epsilon {target:g} over the run: {words}"


def _draw(
    table: Sequence[dict[str, Any]], curves: dict[str, Run], target: float, plain: float, folder: Path
) -> None:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, run in curves.items():
        axes.plot([b / 8e6 for b in run.bits], [100 * a for a in run.accuracies], marker=".", label=name)
    axes.set(xscale="log", xlabel="megabytes sent by all clients", ylabel="validation accuracy, %")
    axes.set_title(f"epsilon {target:g} of a client over the run")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, folder / "bits.png")

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["method"] for row in table):
        rows = [row for row in table if row["method"] == name]
        label = f"{name}, against {rows[0]['claim_against'].lower()}"
        style = "-" if rows[0]["claim_against"] == "OUTSIDER" else "--"
        axes.plot([r["epsilon_run"] for r in rows], [r["acc"] for r in rows], style, marker=".", label=label)
    axes.axhline(plain, color="grey", linewidth=0.8, label="FedAvg, no privacy")
    axes.set(xscale="log", xlabel="epsilon of one client over the run", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, folder / "epsilon.png")
