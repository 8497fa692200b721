"""Hegazy et al., figures 6, 8 and 9: distributed discrete Gaussian, aggregate Gaussian, shifted quantiser.

Vectors uniform on the sphere of radius 10 in 75 dimensions, delta 1e-5, zero-out of one client: the paper's
settings, with 8 runs instead of 30. Exact mechanisms take the smallest Gaussian noise (Balle and Wang 2018);
the discrete Gaussian is calibrated by its own Renyi accounting, as in its authors' code. Where the paper
counts Elias gamma bits of single messages, what secure aggregation really sends stands beside them: residues
are uniform, so no entropy code helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.functional.exact_error.decompose import decomposition
from lightning_fedq.functional.exact_error.dither import centred_dither
from lightning_fedq.functional.exact_error.irwin_hall import half_support
from lightning_fedq.functional.exact_error.layered import minimal_step
from lightning_fedq.functional.noise.grid_noise import analytic_gaussian_multiplier
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import AggregateGaussian, LayeredGaussian
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.reports.runs import Row, fresh_folder
from lightning_fedq.secagg import SecAgg
from lightning_fedq.wire.entropy_coding import Elias
from reproductions.bench import Claim
from reproductions.exact.claims import finish
from reproductions.exact.formulas import ddg_for_budget, draw_mixture

RADIUS, DIM, DELTA = 10.0, 75, 1e-5
_STACK = 100


def sphere(num_clients: int, seed: int) -> Tensor:
    """Inputs `(n, 75)`, uniform on the sphere of radius 10."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(num_clients, DIM, generator=generator, dtype=torch.float64)
    return normal * (RADIUS / normal.square().sum(1, keepdim=True).sqrt())


def exact_mechanism(kind: str, epsilon: float) -> AggregateGaussian | LayeredGaussian:
    """Aggregate ("aggregate") or individual shifted quantiser, calibrated for zero-out of one client.

    Zero-out has half the sensitivity that `noise_multiplier` refers to.
    """
    multiplier = analytic_gaussian_multiplier(epsilon, DELTA) / 2.0
    if kind == "aggregate":
        return AggregateGaussian(RADIUS, multiplier, entropy_code="elias")
    return LayeredGaussian(RADIUS, multiplier, entropy_code="elias", layering="shifted")


def round_context(num_clients: int, round: int) -> RoundContext:
    """A round of one segment, everybody on their own."""
    one = torch.ones(1, dtype=torch.float64)
    return RoundContext(round, tuple((c,) for c in range(num_clients)), (DIM,), 0.0 * one, RADIUS * one)


def run_once(mechanism: Mechanism, inputs: Tensor, round: int, seed: int) -> tuple[float, float]:
    """One mean estimation: squared error per coordinate, and bits per coordinate and client."""
    n, context, bits = len(inputs), round_context(len(inputs), round), 0
    keys, parts = SeededKeys(seed), []
    for start in range(0, n, _STACK):
        clients = list(range(start, min(start + _STACK, n)))
        message = mechanism.encode(inputs[clients], context, ClientRandomness(keys, clients, round))
        bits += message.num_bits
        parts.append(message.symbols)
    decoded = mechanism.decode(torch.cat(parts), range(n), context, PublicRandomness(keys, round))
    error = (decoded.double() / n - inputs.mean(0)).square().mean()
    return float(error), bits / (n * DIM)


def _step(num_clients: int, epsilon: float) -> float:
    """Step of the aggregate Gaussian at A = 1."""
    sigma = analytic_gaussian_multiplier(epsilon, DELTA) * RADIUS / num_clients
    return 2.0 * sigma * half_support(num_clients)


def aggregate_elias(num_clients: int, epsilon: float, seed: int, samples: int = 200_000) -> float:
    """Elias gamma bits per coordinate of a message of the aggregate Gaussian, over many draws of its scale A.

    A run of 75 coordinates draws A 75 times only, and one coordinate in 2 n costs dozens of bits: runs of
    the mechanism scatter around this by several tenths of a bit.

    Args:
        num_clients: n.
        epsilon: Budget.
        seed: Of inputs, scales and dithers.
        samples: Coordinates, a multiple of 75.
    """
    inputs = sphere(-(-samples // DIM), seed).numpy().reshape(-1)
    rand = PublicRandomness(SeededKeys(seed), 0)
    context = round_context(num_clients, 0)
    multiplier = analytic_gaussian_multiplier(epsilon, DELTA) / 2.0
    least = AggregateGaussian(RADIUS, multiplier).least_scale_bits(context)
    words = rand.members("aggregate").words64
    scale, _ = draw_mixture(decomposition(num_clients), inputs.size, words, least)
    steps = scale * _step(num_clients, epsilon)
    dither = centred_dither(rand.shared_with_server(0, "dither").words64(inputs.size))
    symbols = np.floor(inputs / steps + dither + 0.5).astype(np.int64)
    return Elias().num_bits(torch.from_numpy(symbols)) / inputs.size


def masked_bits(num_clients: int, epsilon: float, seed: int) -> float:
    """Bits per coordinate of a message of the aggregate Gaussian behind secure aggregation."""
    context, rand = round_context(num_clients, 0), PublicRandomness(SeededKeys(seed), 0)
    layout = SecAgg().layout(exact_mechanism("aggregate", epsilon), context, rand)
    return 8.0 * layout.num_bytes / DIM


def _errors(
    n: int, epsilon: float, ddg_bits: Sequence[int], kinds: Sequence[str], runs: int, seed: int
) -> Row:
    inputs, sigma = sphere(n, seed), analytic_gaussian_multiplier(epsilon, DELTA) * RADIUS / n
    row: Row = {"clients": n, "epsilon": epsilon, "gaussian_mse": sigma**2}
    for kind in kinds:
        results = [run_once(exact_mechanism(kind, epsilon), inputs, r, seed) for r in range(runs)]
        row[f"{kind}_mse"], row[f"{kind}_bits"] = (
            float(np.mean(part)) for part in zip(*results, strict=True)
        )
    for bits in ddg_bits:
        rival = ddg_for_budget(epsilon, DELTA, RADIUS, n, DIM, bits)
        row[f"ddg_{bits}_mse"] = float(np.mean([run_once(rival, inputs, r, seed)[0] for r in range(runs)]))
    return row


def _error_claims(
    rows: Sequence[Row], ddg_bits: Sequence[int], kinds: Sequence[str], runs: int
) -> list[Claim]:
    most = max(ddg_bits)
    spread = math.sqrt(2.0 / (DIM * runs * len(rows)))
    claims = []
    for kind in kinds:
        ratio = float(np.mean([row[f"{kind}_mse"] / row["gaussian_mse"] for row in rows]))
        claims.append(
            Claim(
                f"the {kind} mechanism errs as the Gaussian mechanism does",
                f"{ratio:.3f} times the Gaussian's squared error, on average (standard error {spread:.3f})",
                abs(ratio - 1.0) < 4.5 * spread,
                (66, 69),
            )
        )
    at_most = float(np.mean([row[f"ddg_{most}_mse"] / row["gaussian_mse"] for row in rows]))
    least = float(np.mean([row[f"ddg_{min(ddg_bits)}_mse"] / row["gaussian_mse"] for row in rows]))
    return [
        *claims,
        Claim(
            f"the aggregate Gaussian errs less than the distributed discrete Gaussian even at {most} bits",
            f"DDG: {at_most:.3f} times the Gaussian's error at {most} bits, {least:.3g} times at "
            f"{min(ddg_bits)}",
            at_most - 1.0 > 3.0 * spread * math.sqrt(2.0),
            (66, 69),
        ),
    ]


def _check_runs(runs: int) -> None:
    if runs < 1:
        raise ValueError(f"runs must be >= 1, got {runs}")


def exact_fig6(
    num_clients: int = 500,
    epsilons: Sequence[float] = (1.0, 2.0, 4.0, 6.0, 10.0),
    ddg_bits: Sequence[int] = (10, 14, 18),
    runs: int = 8,
    seed: int = 0,
    out: str = "runs/exact-fig6",
) -> dict[str, Any]:
    """Exact-error paper, figure 6: error and bits of DDG, aggregate Gaussian and shifted quantiser.

    Args:
        num_clients: n.
        epsilons: Budgets under zero-out of one client.
        ddg_bits: Bits of the discrete Gaussian's modulus.
        runs: Mean estimations per point; the paper has 30.
        seed: Of inputs and streams.
        out: Folder of table and picture.
    """
    _check_runs(runs)
    folder, kinds = fresh_folder(Path(out)), ("aggregate", "shifted")
    rows = [_errors(num_clients, epsilon, ddg_bits, kinds, runs, seed) for epsilon in epsilons]
    for row in rows:
        row["masked_bits"] = masked_bits(num_clients, row["epsilon"], seed)
        row["aggregate_elias"] = aggregate_elias(num_clients, row["epsilon"], seed)
    claims = _error_claims(rows, ddg_bits, kinds, runs)
    bits = [row["aggregate_elias"] for row in rows]
    each = ", ".join(f"{row['aggregate_elias']:.2f} at {row['epsilon']:g}" for row in rows)
    masked = [row["masked_bits"] for row in rows]
    excess = float(np.mean([row[f"ddg_{max(ddg_bits)}_mse"] / row["gaussian_mse"] for row in rows]))
    claims += [
        Claim(
            "figure 6: the aggregate Gaussian needs 2.5 bits or less on average (Elias gamma)",
            f"{sum(bits) / len(bits):.2f} bits on average over the budgets, for a message by itself; {each}",
            sum(bits) / len(bits) <= 2.5,
            (67,),
        ),
        Claim(
            "section 5.2: AINQ mechanisms need a much lower number of bits than DDG to realise the Gaussian",
            f"{max(bits):.2f} bits at most by itself, {max(masked):.1f} behind masks; DDG at {max(ddg_bits)} "
            f"bits still errs {excess:.3f} times as much",
            max(masked) < max(ddg_bits) and excess > 1.0,
            (128,),
        ),
        Claim(
            "and is compatible with secure aggregation (at that cost, as the figure pairs them)",
            f"a masked message takes {min(masked):.1f} to {max(masked):.1f} bits a coordinate",
            max(masked) <= 2.5,
            (67,),
        ),
    ]
    settings = _settings([num_clients], epsilons, ddg_bits, runs, 30, seed)
    return finish(folder, settings, rows, claims, _draw_errors(rows, ddg_bits, kinds, True))


def exact_fig8(
    num_clients: Sequence[int] = (100, 500, 1000),
    epsilons: Sequence[float] = (1.0, 4.0, 10.0),
    ddg_bits: Sequence[int] = (12, 18),
    runs: int = 8,
    seed: int = 0,
    out: str = "runs/exact-fig8",
) -> dict[str, Any]:
    """Exact-error paper, figure 8: error of DDG against the aggregate Gaussian, by cohort.

    Args:
        num_clients: Cohorts.
        epsilons: Budgets under zero-out of one client.
        ddg_bits: Bits of the discrete Gaussian's modulus.
        runs: Mean estimations per point; the paper has 50.
        seed: Of inputs and streams.
        out: Folder of table and picture.
    """
    _check_runs(runs)
    folder, kinds = fresh_folder(Path(out)), ("aggregate",)
    rows = [_errors(n, epsilon, ddg_bits, kinds, runs, seed) for n in num_clients for epsilon in epsilons]
    claims = _error_claims(rows, ddg_bits, kinds, runs)
    settings = _settings(num_clients, epsilons, ddg_bits, runs, 50, seed)
    return finish(folder, settings, rows, claims, _draw_errors(rows, ddg_bits, kinds, False))


def _settings(
    num_clients: Sequence[int],
    epsilons: Sequence[float],
    ddg_bits: Sequence[int],
    runs: int,
    paper_runs: int,
    seed: int,
) -> dict[str, Any]:
    return {
        "num_clients": list(num_clients),
        "dim": DIM,
        "radius": RADIUS,
        "delta": DELTA,
        "neighbours": "zero-out",
        "epsilons": list(epsilons),
        "ddg_bits": list(ddg_bits),
        "runs": runs,
        "paper_runs": paper_runs,
        "seed": seed,
    }


def exact_fig9(
    num_clients: Sequence[int] = (20, 100, 500, 2000, 5000),
    epsilons: Sequence[float] = (1.0, 2.0, 4.0, 6.0, 10.0),
    runs: int = 1,
    seed: int = 0,
    out: str = "runs/exact-fig9",
) -> dict[str, Any]:
    """Exact-error paper, figure 9: bits per client of the aggregate Gaussian and the shifted quantiser.

    Args:
        num_clients: Cohorts.
        epsilons: Budgets under zero-out of one client.
        runs: Rounds of the shifted quantiser per point; the aggregate one has 200,000 draws of its scale.
        seed: Of inputs and streams.
        out: Folder of table and picture.
    """
    _check_runs(runs)
    folder, rows = fresh_folder(Path(out)), list[Row]()
    for n in num_clients:
        inputs = sphere(n, seed)
        for epsilon in epsilons:
            sigma = analytic_gaussian_multiplier(epsilon, DELTA) * RADIUS / math.sqrt(n)
            row: Row = {"clients": n, "epsilon": epsilon}
            shifted = exact_mechanism("shifted", epsilon)
            row["shifted_bits"] = float(np.mean([run_once(shifted, inputs, r, seed)[1] for r in range(runs)]))
            row["aggregate_bits"] = aggregate_elias(n, epsilon, seed)
            row["shifted_fixed"] = math.log2(2.0 + 2.0 * RADIUS / minimal_step("gaussian", sigma))
            row["masked_bits"] = masked_bits(n, epsilon, seed)
            rows.append(row)
    fixed = [row["shifted_fixed"] - row["shifted_bits"] for row in rows]
    large = [row for row in rows if row["clients"] >= 500] or rows
    gap = [row["shifted_bits"] - row["aggregate_bits"] for row in large]
    claims = [
        Claim(
            "the aggregate Gaussian needs fewer bits (Elias gamma) than the shifted quantiser, n >= 500",
            f"in {sum(g > 0 for g in gap)} of {len(gap)} points, by {min(gap):.2f} to {max(gap):.2f} bits",
            min(gap) > 0.0,
            (70,),
        ),
        Claim(
            "a variable length is shorter than the shifted quantiser's fixed one",
            f"shorter in {sum(f > 0 for f in fixed)} of {len(fixed)} points, by {min(fixed):.2f} to "
            f"{max(fixed):.2f} bits",
            min(fixed) > 0.0,
            (70,),
        ),
    ]
    settings = _settings(num_clients, epsilons, (), runs, 50, seed)
    return finish(folder, settings, rows, claims, _draw_bits(rows, num_clients))


def _draw_errors(rows: Sequence[Row], ddg_bits: Sequence[int], kinds: Sequence[str], bits: bool) -> Any:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    cohorts = sorted({row["clients"] for row in rows})
    figure = Figure(figsize=(5.2 * (len(cohorts) + bits), 4.2), layout="constrained")
    panels = figure.subplots(1, len(cohorts) + bits, squeeze=False)[0]
    for axes, n in zip(panels, cohorts, strict=False):
        chosen = [row for row in rows if row["clients"] == n]
        x = [row["epsilon"] for row in chosen]
        axes.plot(x, [row["gaussian_mse"] for row in chosen], "k:", label="Gaussian, exact")
        for kind in kinds:
            axes.plot(x, [row[f"{kind}_mse"] for row in chosen], "o", label=kind)
        for b in ddg_bits:
            axes.plot(x, [row[f"ddg_{b}_mse"] for row in chosen], "x--", label=f"DDG, {b} bits")
        axes.set_yscale("log")
        axes.set(xlabel="epsilon", ylabel="squared error per coordinate", title=f"n = {n:g}, d = {DIM}")
    if bits:
        axes, x = panels[-1], [row["epsilon"] for row in rows]
        for kind in kinds:
            axes.plot(x, [row[f"{kind}_bits"] for row in rows], "o-", label=f"{kind}, Elias gamma")
        axes.plot(x, [row["masked_bits"] for row in rows], "k--", label="aggregate, masked")
        axes.set(xlabel="epsilon", ylabel="bits per coordinate and client")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def _draw_bits(rows: Sequence[Row], cohorts: Sequence[int]) -> Any:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(3.6 * len(cohorts), 3.8), layout="constrained")
    for axes, n in zip(figure.subplots(1, len(cohorts), squeeze=False)[0], cohorts, strict=True):
        chosen = [row for row in rows if row["clients"] == n]
        x = [row["epsilon"] for row in chosen]
        axes.plot(x, [row["aggregate_bits"] for row in chosen], "o-", label="aggregate, Elias gamma")
        axes.plot(x, [row["shifted_bits"] for row in chosen], "s-", label="shifted, Elias gamma")
        axes.plot(x, [row["shifted_fixed"] for row in chosen], "--", label="shifted, fixed length")
        axes.plot(x, [row["masked_bits"] for row in chosen], "k:", label="aggregate, masked")
        axes.set(xlabel="epsilon", ylabel="bits per coordinate and client", title=f"n = {n}")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure
