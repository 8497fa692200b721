"""Hegazy et al., figure 10: quantised Langevin dynamics against the analytic posterior.

The toy problem of appendix C: 20 clients with 50 points each in 50 dimensions, U_i = sum_j |theta - y_ij|^2
/ 2, y_ij ~ N(mu_i, I), mu_i ~ N(0, 25 I), so that the posterior is N(mean of y, I / 1000); step size 5e-4,
full batches. Compared are uncompressed Langevin (LSD), QLSD with unbiased rounding and all noise from the
server, and QLSD with the shifted layered quantiser and only the missing noise (QLSD-MS). The paper does not
say which bits it draws, and runs 30 chains after 450,000 steps of burn-in; here 10 chains start at the
posterior mean and run 2,000 steps, a thousand times the chain's memory.

Algorithm 6 centres gradients by their value at the posterior mode (a control variate). Both forms are run,
because the claim turns on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fedq.functional.exact_error.layered import WORDS_PER_COORDINATE
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.reports.runs import Row, fresh_folder
from reproductions.bench import Claim
from reproductions.exact.claims import finish
from reproductions.exact.langevin import missing_variance, rounding_round_trip, shifted_round_trip

CLIENTS, POINTS, DIM, STEP = 20, 50, 50, 5e-4


def client_means(seed: int) -> Tensor:
    """Mean of each client's data, `(20, 50)`; the posterior is N(mean of these, I / 1000)."""
    generator = torch.Generator().manual_seed(seed)
    centres = 5.0 * torch.randn(CLIENTS, DIM, generator=generator, dtype=torch.float64)
    noise = torch.randn(CLIENTS, POINTS, DIM, generator=generator, dtype=torch.float64).mean(1)
    return centres + noise


def run_chains(
    method: str, bits: int, centred: bool, means: Tensor, chains: int, steps: int, seed: int
) -> tuple[float, float]:
    """Run some chains from the posterior mean.

    Args:
        method: "lsd", "rounding" or "shifted".
        bits: Per coordinate; unused by "lsd".
        centred: Subtract each client's gradient at the posterior mode.
        means: `(20, 50)` from `client_means`.
        chains: Independent chains.
        steps: Steps of each.
        seed: Of noise and dithers.

    Returns:
        Variance of a coordinate about the posterior mean, and squared error of the chains' time averages,
        averaged over the chains.
    """
    mode, precision = means.mean(0), float(CLIENTS * POINTS)
    generator = torch.Generator().manual_seed(seed)
    stream = PublicRandomness(SeededKeys(seed), 0).public(f"{method} {bits} {centred}")
    theta, total = mode.repeat(chains, 1), torch.zeros(chains, DIM, dtype=torch.float64)
    squares = 0.0
    for _ in range(steps):
        if method == "lsd":
            gradient = precision * (theta - mode)
            variance = torch.zeros(chains, dtype=torch.float64)
        else:
            away = mode.expand_as(means) if centred else means
            parts = (POINTS * (theta[:, None] - away)).reshape(-1, DIM)
            if method == "shifted":
                words = stream.words64(WORDS_PER_COORDINATE * parts.numel())
                decoded, variances = shifted_round_trip(parts, bits, words)
                variance = variances.view(chains, CLIENTS).sum(1)
            else:
                decoded = rounding_round_trip(parts, bits, stream.words64(parts.numel()))
                variance = torch.zeros(chains, dtype=torch.float64)
            gradient = decoded.view(chains, CLIENTS, DIM).sum(1)
        noise = torch.randn(chains, DIM, generator=generator, dtype=torch.float64)
        theta = theta - STEP * gradient + missing_variance(STEP, variance).sqrt()[:, None] * noise
        total += theta
        squares += float((theta - mode).square().mean())
    error = float((total / steps - mode).square().sum(1).mean())
    return squares / steps, error


def exact_fig10(
    bits: Sequence[int] = (4, 6, 8),
    chains: int = 10,
    steps: int = 2000,
    seed: int = 0,
    out: str = "runs/exact-fig10",
) -> dict[str, Any]:
    """Exact-error paper, figure 10: quantised Langevin sampling against the analytic posterior.

    Args:
        bits: Bits per coordinate of the quantisers, 2 or more.
        chains: Independent chains per method; the paper has 30.
        steps: Steps per chain, 10 or more.
        seed: Of data, noise and dithers.
        out: Folder of table and picture.
    """
    if chains < 1 or steps < 10:
        raise ValueError(f"chains must be >= 1 and steps >= 10, got {chains} and {steps}")
    folder, means, rows = fresh_folder(Path(out)), client_means(seed), list[Row]()
    runs = [("lsd", 0, True)]
    runs += [(method, b, c) for c in (True, False) for method in ("rounding", "shifted") for b in bits]
    memory = 1.0 - STEP * CLIENTS * POINTS
    stationary = 2.0 * STEP / (1.0 - memory**2)
    averaged = DIM * 2.0 * STEP / ((1.0 - memory) ** 2 * steps)
    for number, (method, b, centred) in enumerate(runs):
        variance, error = run_chains(method, b, centred, means, chains, steps, seed + 1 + number)
        rows.append(
            {
                "method": float(("lsd", "rounding", "shifted").index(method)),
                "bits": b,
                "centred": float(centred),
                "variance": variance,
                "variance_ratio": variance / stationary,
                "squared_error": error,
                "error_ratio": error / averaged,
            }
        )
    settings = {
        "method": "0 LSD, 1 unbiased rounding, 2 shifted layered",
        "bits": list(bits),
        "chains": chains,
        "steps": steps,
        "paper_chains": 30,
        "posterior_variance": 1.0 / (CLIENTS * POINTS),
        "stationary_variance_of_lsd": stationary,
        "expected_squared_error_of_lsd": averaged,
        "seed": seed,
    }
    return finish(folder, settings, rows, _claims(rows, chains, steps), _draw(rows, bits))


def _chosen(rows: Sequence[Row], method: int, centred: bool) -> list[Row]:
    return [row for row in rows if row["method"] == method and row["centred"] == float(centred)]


def _listed(rows: Sequence[Row], column: str) -> str:
    return ", ".join(f"b = {row['bits']:g}: {row[column]:.3g}" for row in rows)


def _claims(rows: Sequence[Row], chains: int, steps: int) -> list[Claim]:
    # squared errors of time averages: chains x 50 squares of normals; variances: autocorrelation 0.5 a step
    error_spread = math.sqrt(2.0 / (chains * DIM))
    spread = math.sqrt(2.0 * 5.0 / 3.0 / (chains * DIM * steps))
    plain = rows[0]["variance_ratio"]
    claims = [
        Claim(
            "uncompressed Langevin has the variance of its discretised chain",
            f"{plain:.4f} times (standard error {spread:.4f})",
            abs(plain - 1.0) < 4.5 * spread,
            (72,),
        )
    ]
    for centred in (True, False):
        shifted, rounding = _chosen(rows, 2, centred), _chosen(rows, 1, centred)
        words = "with the control variate" if centred else "without it"
        exact = all(abs(row["variance_ratio"] - 1.0) < max(4.5 * spread, 0.01) for row in shifted)
        worst_shifted = max(row["variance_ratio"] for row in shifted)
        best_rounding = min(row["variance_ratio"] for row in rounding)
        wins = worst_shifted < best_rounding - 4.5 * spread
        claims += [
            Claim(
                f"{words}: QLSD-MS is as good as uncompressed Langevin at every number of bits",
                f"variance over LSD's: {_listed(shifted, 'variance_ratio')}; squared error of the mean over "
                f"LSD's expected one: {_listed(shifted, 'error_ratio')} (standard error {error_spread:.2f})",
                exact,
                (72, 73) if centred else (73,),
            ),
            Claim(
                f"{words}: every QLSD-MS beats every QLSD with unbiased rounding",
                f"rounding's variance: {_listed(rounding, 'variance_ratio')}; squared error: "
                f"{_listed(rounding, 'error_ratio')}; worst QLSD-MS {worst_shifted:.3g}, best rounding "
                f"{best_rounding:.3g}",
                wins,
                (73,),
            ),
        ]
    return claims


def _draw(rows: Sequence[Row], bits: Sequence[int]) -> Any:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, centred in zip(figure.subplots(1, 2), (True, False), strict=True):
        for method, name in ((1, "unbiased rounding"), (2, "shifted layered (QLSD-MS)")):
            chosen = _chosen(rows, method, centred)
            axes.plot(bits, [row["squared_error"] for row in chosen], "o-", label=name)
        axes.axhline(rows[0]["squared_error"], color="k", linestyle=":", label="no compression (LSD)")
        axes.set_yscale("log")
        title = "gradients centred at the mode" if centred else "gradients as they are"
        axes.set(xlabel="bits per coordinate", ylabel="squared error of the posterior mean", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure
