"""CorBin-FL, experiment 8 (its figure 4): squared error of a pair over all inputs, CorBinQ against LDPQ.

Two clients hold w1 and w2 in [-0.5, 0.5], c = 0, r = 0.5; the surface is E(Q1 + Q2 - w1 - w2)^2. The paper
gives neither epsilon nor the number of shared bits for its figure; here they are options, 1.0 and 5 by
default. Each point is measured with the shipped mechanism, through `encode` and `decode`, and compared
with the closed forms: the exact law of a pair, not Theorem 1's bound, which is 32 times loose.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fedq.functional.one_bit.threshold_coin import pair_mse, worst_pair_mse
from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys
from lightning_fedq.mechanism import RoundContext
from lightning_fedq.mechanisms import LDPQ, CorBin
from lightning_fedq.mechanisms.bases.one_bit import OneBitMechanism
from lightning_fedq.reports.runs import fresh_folder, save_figure, write_rows, write_summary

RADIUS, CENTER = 0.5, 0.0
Surface = NDArray[np.float64]


def measured_surface(
    mechanism: OneBitMechanism, inputs: Surface, samples: int, seed: int
) -> tuple[Surface, Surface]:
    """Monte Carlo of a pair's squared error on the grid `inputs` x `inputs`.

    All points are coordinates of one vector, so one message of each client covers the grid once.

    Args:
        mechanism: LDPQ, or CorBin with its pair in one group.
        inputs: `(k,)` values in [-0.5, 0.5].
        samples: Per point, >= 2.
        seed: Of the keys.

    Returns:
        Two `(k, k)` arrays: the mean squared error and the standard error of that mean.
    """
    first, second = np.meshgrid(inputs, inputs, indexing="ij")
    pair = torch.tensor(np.stack([first.ravel(), second.ravel()]), dtype=torch.float32)
    one = torch.ones(1, dtype=torch.float64)
    total, squares = np.zeros(first.size), np.zeros(first.size)
    groups = tuple(tuple(range(2))[s:e] for s, e in _spans(mechanism.group_sizes(2)))
    for repetition in range(samples):
        context = RoundContext(repetition, groups, (first.size,), CENTER * one, RADIUS * one)
        rand = ClientRandomness(SeededKeys(seed), [0, 1], repetition)
        symbols = mechanism.encode(pair, context, rand).symbols
        decoded = mechanism.decode(symbols.to(torch.int32).sum(0), [0, 1], context, rand)
        error = (decoded.double() - pair.double().sum(0)).square().numpy()
        total += error
        squares += error**2
    mean = total / samples
    spread = np.sqrt(np.maximum(squares / samples - mean**2, 0.0) / (samples - 1))
    return mean.reshape(first.shape), spread.reshape(first.shape)


def _spans(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = np.cumsum(sizes).tolist()
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def closed_surface(inputs: Surface, epsilon: float, shared_bits: int | None) -> Surface:
    """The same by the closed form; `shared_bits=0` is LDPQ."""
    values = [[pair_mse(a, b, CENTER, RADIUS, epsilon, shared_bits) for b in inputs] for a in inputs]
    return np.array(values)


def corbin_exp8(
    epsilon: float = 1.0,
    shared_bits: int | None = 5,
    points: int = 21,
    samples: int = 4000,
    seed: int = 0,
    out: str = "runs/corbin-exp8",
) -> dict[str, Any]:
    """CorBin-FL figure 4: squared error of a CorBinQ and an LDPQ pair, Monte Carlo against closed forms.

    Args:
        epsilon: Local budget per coordinate, > 0; the paper does not say which.
        shared_bits: Random bits that the pair shares, null is unlimited; the paper does not say how many.
        points: Grid points per axis over [-0.5, 0.5].
        samples: Monte Carlo samples per point.
        seed: Of the coins.
        out: Folder of table and picture.
    """
    if points < 2 or samples < 2:
        raise ValueError(f"points and samples must be >= 2, got {points} and {samples}")
    folder, inputs = fresh_folder(Path(out)), np.linspace(-RADIUS, RADIUS, points)
    mechanisms: dict[str, OneBitMechanism] = {"CorBinQ": CorBin(epsilon, shared_bits), "LDPQ": LDPQ(epsilon)}
    rows, surfaces, summary = [], {}, {}
    for name, mechanism in mechanisms.items():
        measured, spread = measured_surface(mechanism, inputs, samples, seed)
        closed = closed_surface(inputs, epsilon, shared_bits if name == "CorBinQ" else 0)
        surfaces[name] = measured, closed
        scores = np.abs(measured - closed) / np.maximum(spread, 1e-12)
        bits = shared_bits if name == "CorBinQ" else 0
        scale = 1.0 / math.tanh(epsilon / 2.0)
        summary[name] = {
            "mean_measured": float(measured.mean()),
            "mean_closed_form": float(closed.mean()),
            "largest_measured": float(measured.max()),
            "largest_closed_form": float(closed.max()),
            "largest_over_the_box": RADIUS**2 * worst_pair_mse(scale, bits),
            "largest_deviation_in_standard_errors": float(scores[spread > 0].max()),
        }
        for i, first in enumerate(inputs):
            for j, second in enumerate(inputs):
                key = {"w1": float(first), "w2": float(second), "corbin": float(name == "CorBinQ")}
                numbers = (measured[i, j], spread[i, j], closed[i, j])
                names = ("measured", "standard_error", "closed_form")
                rows.append({**key, **{k: float(v) for k, v in zip(names, numbers, strict=True)}})
    write_rows(folder / "surface.csv", rows)
    settings = {
        "epsilon": epsilon,
        "shared_bits": shared_bits,
        "points": points,
        "samples": samples,
        "seed": seed,
    }
    write_summary(folder / "summary.json", {"settings": {**settings, "seed": seed}, **summary})
    _draw(surfaces, inputs, epsilon, shared_bits, folder / "surface.png")
    for name, values in summary.items():
        print(name)
        for what, value in values.items():
            print(f"  {what.replace('_', ' ')}: {value:.5g}")
    print("published: figure 4 of the paper, which does not say at which epsilon and how many shared bits")
    print(f"{folder / 'surface.csv'}\n{folder / 'surface.png'}")
    return summary


def _draw(
    surfaces: dict[str, tuple[Surface, Surface]],
    inputs: Surface,
    epsilon: float,
    shared_bits: int | None,
    path: Path,
) -> None:
    from matplotlib.figure import Figure  # half a second to import, and only needed here
    from mpl_toolkits.mplot3d import Axes3D  # type: ignore[import-untyped]

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    first, second = np.meshgrid(inputs, inputs, indexing="ij")
    top = max(measured.max() for measured, _ in surfaces.values())
    for number, (name, (measured, closed)) in enumerate(surfaces.items(), 1):
        axes = figure.add_subplot(1, 2, number, projection="3d")
        assert isinstance(axes, Axes3D)
        axes.plot_surface(first, second, closed, alpha=0.5, cmap="viridis", vmin=0, vmax=top)
        axes.scatter(first.ravel(), second.ravel(), measured.ravel(), s=4, color="black")
        bits = "unlimited" if shared_bits is None else str(shared_bits)
        extra = f", {bits} shared bits" if name == "CorBinQ" else ""
        axes.set(xlabel="w1", ylabel="w2", zlabel="squared error of the sum", zlim=(0, top))
        axes.set_title(f"{name}, epsilon = {epsilon:g}{extra}\nsurface: closed form, dots: measured")
    save_figure(figure, path)
