"""Hegazy et al., appendix D: randomised smoothing whose perturbation is the broadcast's compression error.

f(x) = mean_i |a_i x - b_i|, 200 rows of which each is a client, 20 columns, 10% outliers; the minimum comes
from a linear programme. The paper's text has no figure for this; compared are the accelerated method with
compressed broadcasts, the same with sampled Gaussians sent as 32-bit floats, averaged SGD at a fixed s, and
the plain subgradient method, which sends 32-bit floats and needs no smoothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import optimize, special
from torch import Tensor

from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.reports.runs import Row, fresh_folder
from lightning_fedq.wire.entropy_coding import Elias
from reproductions.bench import Claim
from reproductions.exact.accelerated_smoothing import accelerated_smoothing, compressed_copies
from reproductions.exact.claims import finish


class AbsoluteRegression:
    """f(x) = mean_i |a_i x - b_i| and its Gaussian smoothing in closed form.

    Args:
        rows: Equations, one per client.
        dim: Unknowns.
        seed: Of the data.
    """

    def __init__(self, rows: int, dim: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        double = torch.float64
        self.matrix = torch.randn(rows, dim, generator=generator, dtype=double)
        truth = torch.randn(dim, generator=generator, dtype=double)
        noise = torch.randn(rows, generator=generator, dtype=double)
        outlier = torch.rand(rows, generator=generator, dtype=double) < 0.1
        self.target = self.matrix @ truth + torch.where(outlier, 10.0 * noise, 0.5 * noise)
        self.norms = self.matrix.square().sum(1).sqrt()

    def value(self, point: Tensor) -> float:
        """f."""
        return float((self.matrix @ point - self.target).abs().mean())

    def subgradient(self, points: Tensor) -> Tensor:
        """A subgradient of f at each row of `points`, averaged over the rows."""
        signs = (points @ self.matrix.T - self.target).sign()
        mean: Tensor = (signs @ self.matrix / len(self.target)).mean(0)
        return mean

    def smoothed(self, point: Tensor, sigma: float) -> float:
        """f_s: |r + q Z| has mean q sqrt(2 / pi) exp(-r^2 / 2 q^2) + r (2 Phi(r / q) - 1), q = s |a_i|."""
        residual = (self.matrix @ point - self.target).numpy()
        spread = sigma * self.norms.numpy()
        ratio = residual / spread
        peak = spread * math.sqrt(2.0 / math.pi) * np.exp(-0.5 * ratio**2)
        return float((peak + residual * (2.0 * special.ndtr(ratio) - 1.0)).mean())

    def smoothed_gradient(self, point: Tensor, sigma: float) -> Tensor:
        """Gradient of f_s."""
        ratio = (self.matrix @ point - self.target).numpy() / (sigma * self.norms.numpy())
        weights = torch.from_numpy(2.0 * special.ndtr(ratio) - 1.0)
        gradient: Tensor = weights @ self.matrix / len(self.target)
        return gradient

    def minimum(self) -> float:
        """min f, by linear programming."""
        rows, dim = self.matrix.shape
        cost = np.concatenate([np.zeros(dim), np.full(rows, 1.0 / rows)])
        a, eye, b = self.matrix.numpy(), np.eye(rows), self.target.numpy()
        sides = np.block([[a, -eye], [-a, -eye]])
        limits = [(None, None)] * dim + [(0, None)] * rows
        return float(optimize.linprog(cost, sides, np.concatenate([b, -b]), bounds=limits).fun)


def _averaged_descent(
    gradient: Callable[[Tensor], Tensor], dim: int, radius: float, lipschitz: float, steps: int
) -> Tensor:
    """Subgradient descent with steps R / (L sqrt k), averaged over its second half."""
    point, total = torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
    for k in range(1, steps + 1):
        point = point - radius / (lipschitz * math.sqrt(k)) * gradient(point)
        total += point if 2 * k > steps else 0.0
    return total / (steps - steps // 2)


def exact_smoothing(
    sigmas: Sequence[float] = (0.05, 0.5),
    schedules: Sequence[tuple[int, int]] = ((200, 5), (500, 10), (2000, 20)),
    steps: int = 2000,
    seed: int = 0,
    out: str = "runs/exact-smoothing",
) -> dict[str, Any]:
    """Exact-error paper, appendix D: randomised smoothing by compression on l1 regression.

    Args:
        sigmas: Fixed smoothings of the averaged method.
        schedules: Iterations and copies of the accelerated method.
        steps: Iterations of the averaged methods, 2 or more.
        seed: Of data, dithers and noise.
        out: Folder of table and picture.
    """
    if steps < 2:
        raise ValueError(f"steps must be >= 2, got {steps}")
    folder, problem, rows = fresh_folder(Path(out)), AbsoluteRegression(200, 20, seed), list[Row]()
    best, dim = problem.minimum(), problem.matrix.shape[1]
    start = torch.zeros(dim, dtype=torch.float64)
    lipschitz = math.sqrt(float(torch.linalg.eigvalsh(problem.matrix.T @ problem.matrix)[-1]) / 200)
    radius = math.sqrt(dim)
    stream = PublicRandomness(SeededKeys(seed), 0).public("broadcast")
    generator = torch.Generator().manual_seed(seed + 1)
    sent: list[float] = []

    def compressed(point: Tensor, sigma: float, copies: int) -> Tensor:
        perturbed = compressed_copies(point, sigma, copies, stream.words64)
        sent.append(Elias().num_bits(torch.from_numpy(perturbed.symbols)) / perturbed.symbols.size)
        return problem.subgradient(perturbed.points)

    def sampled(point: Tensor, sigma: float, copies: int) -> Tensor:
        noise = torch.randn(copies, dim, generator=generator, dtype=torch.float64)
        return problem.subgradient(point + sigma * noise)

    for iterations, copies in schedules:
        for kind, draw in (("compressed", compressed), ("sampled", sampled)):
            sent.clear()

            def gradient(
                point: Tensor,
                sigma: float,
                draw: Callable[[Tensor, float, int], Tensor] = draw,
                copies: int = copies,
            ) -> Tensor:
                return draw(point, sigma, copies)

            found = accelerated_smoothing(gradient, start, radius, lipschitz, copies, iterations)
            bits = float(np.mean(sent)) if sent else 32.0
            rows.append(_result(0.0 if kind == "compressed" else 1.0, 0.0, iterations, copies, bits))
            rows[-1]["gap"] = problem.value(found) - best
    for sigma in sigmas:
        sent.clear()
        point = _averaged_descent(lambda x, s=sigma: compressed(x, s, 1), dim, radius, lipschitz, steps)  # type: ignore[misc]
        rows.append(_result(2.0, sigma, steps, 1, float(np.mean(sent))))
        rows[-1]["gap"] = problem.value(point) - best
    plain = _averaged_descent(lambda x: problem.subgradient(x[None]), dim, radius, lipschitz, steps)
    rows.append({**_result(3.0, 0.0, steps, 1, 32.0), "gap": problem.value(plain) - best})
    check = _unbiased(problem, stream.words64, max(sigmas))
    settings = {
        "method": "0 accelerated, compressed; 1 accelerated, sampled; 2 averaged, compressed; 3 subgradient",
        "minimum": best,
        "sigmas": list(sigmas),
        "schedules": [list(pair) for pair in schedules],
        "steps": steps,
        "seed": seed,
    }
    return finish(folder, settings, rows, [check, *_claims(rows)], _draw(rows))


def _result(method: float, sigma: float, iterations: int, copies: int, bits: float) -> Row:
    return {
        "method": method,
        "sigma": sigma,
        "iterations": iterations,
        "copies": copies,
        "bits_per_coordinate": bits,
    }


def _unbiased(problem: AbsoluteRegression, words: Any, sigma: float) -> Claim:
    """20,000 compressed copies of one point against the closed forms of f_s and its gradient."""
    point = torch.full((problem.matrix.shape[1],), 0.3, dtype=torch.float64)
    points = compressed_copies(point, sigma, 20_000, words).points
    values = (points @ problem.matrix.T - problem.target).abs().mean(1)
    wanted = problem.smoothed(point, sigma)
    off = (problem.subgradient(points) - problem.smoothed_gradient(point, sigma)).abs().max().item()
    score = abs(values.mean().item() - wanted) / (values.std().item() / math.sqrt(len(values)))
    return Claim(
        "subgradients at compressed points are unbiased gradients of the smoothed function",
        f"f_s by 20,000 compressed points {values.mean().item():.5f}, closed form {wanted:.5f} ({score:.1f} "
        f"standard errors); largest error of a gradient's coordinate {off:.1e}",
        score < 4.5 and off < 0.01,
        (74,),
    )


def _claims(rows: Sequence[Row]) -> list[Claim]:
    compressed, sampled = ([row for row in rows if row["method"] == m] for m in (0.0, 1.0))
    pairs = [(a["gap"], b["gap"]) for a, b in zip(compressed, sampled, strict=True)]
    bits = [row["bits_per_coordinate"] for row in compressed]
    all_copies = [row["bits_per_coordinate"] * row["copies"] for row in compressed]
    fixed, plain = [row for row in rows if row["method"] == 2.0], rows[-1]["gap"]
    gaps = ", ".join(f"s = {row['sigma']:g}: {row['gap']:.1e}" for row in fixed)
    return [
        Claim(
            "compression serves as the perturbation of accelerated randomised smoothing",
            "distance to the minimum, compressed and sampled Gaussians: "
            + ", ".join(f"{a:.1e} and {b:.1e}" for a, b in pairs)
            + f", at {min(bits):.1f} to {max(bits):.1f} bits a coordinate and copy (Elias gamma)",
            all(a < 2.0 * b + 1e-3 for a, b in pairs),
            (74,),
        ),
        Claim(
            "more iterations and copies bring it to the minimum",
            f"distance {pairs[0][0]:.1e} falls to {pairs[-1][0]:.1e}",
            pairs[-1][0] <= pairs[0][0],
        ),
        Claim(
            "and it saves communication",
            f"all copies together take {min(all_copies):.0f} to {max(all_copies):.0f} bits a coordinate and "
            "iteration; one float and a shared seed for the noise would take 32",
            max(all_copies) < 32.0,
            (74,),
        ),
        Claim(
            "compression at a fixed s costs no accuracy",
            f"averaged SGD ends at {gaps}; the plain subgradient method at {plain:.1e}",
            all(row["gap"] <= plain + 1e-3 for row in fixed),
        ),
    ]


def _draw(rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for method, name in ((0.0, "accelerated, compressed"), (1.0, "accelerated, sampled Gaussians")):
        chosen = [row for row in rows if row["method"] == method]
        axes.plot([row["iterations"] for row in chosen], [row["gap"] for row in chosen], "o-", label=name)
    for row in rows:
        if row["method"] >= 2.0:
            name = f"averaged, compressed, s = {row['sigma']:g}" if row["method"] == 2.0 else "subgradient"
            axes.plot(row["iterations"], row["gap"], "x", label=name)
    axes.set(xscale="log", yscale="log", xlabel="iterations", ylabel="f - min f")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
