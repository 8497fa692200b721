"""Hegazy et al., figure 4: bits per client of the aggregate Gaussian against the number of clients.

sigma = 1, inputs uniform on an interval of length t = 64 or 2048, n from 1 to 1,000. Beside the printed
bounds (theorems 1 and 2; equation 5 for individual quantisation, whose noise has std sqrt n) stand the exact
conditional entropies, measured bitstreams, and what a message takes behind secure aggregation, where residues
are uniform and no entropy code helps. The paper's settings; equation 5 bounds an entropy, so the comparison
of bounds gives it the 1 bit that a Huffman code may need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import integrate

from lightning_fedq.functional.exact_error.decompose import decomposition
from lightning_fedq.functional.exact_error.dither import centred_dither
from lightning_fedq.functional.exact_error.irwin_hall import half_support, irwin_hall_pdf
from lightning_fedq.functional.exact_error.layered import WORDS_PER_COORDINATE, layer_row
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.reports.runs import Row, fresh_folder
from reproductions.bench import Claim
from reproductions.exact.claims import Array, coded_bits, finish
from reproductions.exact.formulas import cell_entropy, conditional_entropy, draw_mixture, upper_bound


def theorem_2(n: int) -> float:
    """Bound on -h_M, what the random scale costs: (1 - lambda) [L f(0) + log(e L q(0) / (2 (1 - lambda)))].

    Args:
        n: Number of clients, >= 1.
    """
    core, length = decomposition(n).core, 2.0 * half_support(n)
    peak = float(irwin_hall_pdf(np.zeros(1), n)[0])
    rest = 1.0 / math.sqrt(2.0 * math.pi) - core * peak
    return (1.0 - core) * (length * peak + math.log2(math.e * length * rest / (2.0 * (1.0 - core))))


def theorem_1(interval: float, n: int, scale_cost: float, spread_ratio: float) -> float:
    """Bits of a fixed-length code given the randomness: scale_cost + log(t / w) + 3 w log e / t ratio + 1.

    Args:
        interval: t, in units of sigma.
        n: Number of clients.
        scale_cost: -h_M; 0 for Irwin-Hall noise.
        spread_ratio: E|Q| / E|P|; 1 for Irwin-Hall noise.
    """
    step = 2.0 * half_support(n)
    correction = 3.0 * step * math.log2(math.e) / interval * spread_ratio
    return scale_cost + math.log2(interval / step) + correction + 1.0


def mean_size(n: int) -> float:
    """E|Z| of the standardised Irwin-Hall law."""
    end = min(half_support(n), 9.9)
    points: Array = np.linspace(0.0, end, 20_001)
    return float(2.0 * integrate.simpson(points * irwin_hall_pdf(points, n), x=points))


def _row(interval: float, n: int, samples: int, rand: PublicRandomness) -> Row:
    step = 2.0 * half_support(n)
    scale, _ = draw_mixture(decomposition(n), samples, rand.members(f"mixture {n}").words64)
    steps = scale * step
    dither = centred_dither(rand.shared_with_server(0, f"dither {n} {interval:g}").words64(samples))
    values: Array = interval * rand.shared_with_server(0, f"input {n} {interval:g}").uniforms(samples)
    own = [np.empty(samples) for _ in range(3)]
    words = rand.shared_with_server(0, f"layer {n} {interval:g}").words64(WORDS_PER_COORDINATE * samples)
    layer_row(words, math.sqrt(n), True, False, *own)
    common = np.full(samples, step)
    return {
        "interval": interval,
        "clients": n,
        "aggregate_bound": theorem_1(interval, n, theorem_2(n), math.sqrt(2.0 / math.pi) / mean_size(n)),
        "irwin_hall_bound": theorem_1(interval, n, 0.0, 1.0),
        "individual_bound": upper_bound(interval, math.sqrt(n), "gaussian", "direct"),
        "aggregate_fixed": float(np.ceil(np.log2(2.0 * np.ceil(interval / (2.0 * steps)) + 1.0)).mean()),
        "aggregate_entropy": float(cell_entropy(interval / steps).mean()),
        "irwin_hall_entropy": float(cell_entropy(interval / step)),
        "individual_entropy": conditional_entropy(interval, math.sqrt(n), "gaussian", "direct"),
        "aggregate_measured": coded_bits(values, dither, steps, interval),
        "irwin_hall_measured": coded_bits(values, dither, common, interval),
        "individual_measured": coded_bits(values, own[0], own[1], interval),
        "masked": math.ceil(math.log2(2.0 * n * math.ceil(interval / (2.0 * step)) + 1.0)),
        "scale_cost": float(-np.log2(scale).mean()),
        "scale_bound": theorem_2(n),
    }


def exact_fig4(
    intervals: Sequence[float] = (64.0, 2048.0),
    num_clients: Sequence[int] = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000),
    samples: int = 200_000,
    seed: int = 0,
    out: str = "runs/exact-fig4",
) -> dict[str, Any]:
    """Exact-error paper, figure 4: bits per client of the aggregate Gaussian against the cohort's size.

    Args:
        intervals: Lengths t of the interval that inputs are uniform on, in units of sigma.
        num_clients: Cohorts.
        samples: Coordinates coded per point; A is drawn as often.
        seed: Of inputs, dithers and scales.
        out: Folder of table and picture.
    """
    if samples < 100:
        raise ValueError(f"samples must be >= 100, got {samples}")
    folder, rand = fresh_folder(Path(out)), PublicRandomness(SeededKeys(seed), 0)
    rows = [_row(interval, n, samples, rand) for interval in intervals for n in num_clients]
    settings = {
        "intervals": list(intervals),
        "num_clients": list(num_clients),
        "samples": samples,
        "seed": seed,
    }
    claims = [claim for t in intervals for claim in _claims([r for r in rows if r["interval"] == t], t)]
    return finish(folder, settings, rows, claims, _draw(rows, intervals))


def _from(rows: Sequence[Row], first: str, second: str, margin: float) -> float:
    """Smallest cohort from which on `first` < `second` + margin in every larger one; inf if none."""
    start = math.inf
    for row in reversed(rows):
        if row[first] >= row[second] + margin:
            break
        start = row["clients"]
    return start


def _claims(rows: Sequence[Row], t: float) -> list[Claim]:
    printed = _from(rows, "aggregate_bound", "individual_bound", 1.0)
    exact = _from(rows, "aggregate_entropy", "individual_entropy", 0.0)
    measured = _from(rows, "aggregate_measured", "individual_measured", 0.0)
    names = ("aggregate", "irwin_hall", "individual")
    apart = max(abs(row[f"{k}_measured"] - row[f"{k}_entropy"]) for row in rows for k in names)
    largest = max(rows, key=lambda row: row["clients"])
    cheaper = [row["aggregate_entropy"] - row["irwin_hall_entropy"] for row in rows]
    above = max(rows, key=lambda row: row["aggregate_fixed"] - row["aggregate_bound"])
    dearest = max(rows, key=lambda row: row["scale_cost"] / row["scale_bound"])
    return [
        Claim(
            f"t = {t:g}: theorem 1: the aggregate Gaussian's bits are at most the bound",
            f"a fixed length at most {above['aggregate_fixed']:.2f} of {above['aggregate_bound']:.2f} bits "
            f"(n = {above['clients']:g})",
            above["aggregate_fixed"] <= above["aggregate_bound"],
            (52,),
        ),
        Claim(
            f"t = {t:g}: theorem 2: what the random scale costs, -h_M, is at most the bound",
            f"{dearest['scale_cost']:.3f} of {dearest['scale_bound']:.3f} bits at n = "
            f"{dearest['clients']:g}, {largest['scale_cost']:.3f} of {largest['scale_bound']:.3f} at "
            f"{largest['clients']:g}",
            dearest["scale_cost"] <= dearest["scale_bound"],
            (53,),
        ),
        Claim(
            f"t = {t:g}: the aggregate Gaussian needs fewer bits than individual codes in large cohorts",
            f"by conditional entropy from n = {exact:g} on, by measured streams from n = {measured:g} on",
            exact < math.inf and measured < math.inf,
            (56,),
        ),
        Claim(
            f"t = {t:g}: though not as few as the Irwin-Hall mechanism",
            f"{min(cheaper):.3f} to {max(cheaper):.3f} bits more, by conditional entropy",
            min(cheaper) > 0.0,
            (57,),
        ),
        Claim(
            f"t = {t:g}: so do the printed bounds (theorems 1 and 2 against equation 5 and 1 bit)",
            f"from n = {printed:g} on" if printed < math.inf else "not at the largest cohort",
            printed < math.inf,
            (52,),
        ),
        Claim(
            f"t = {t:g}: the entropies are what streams cost",
            f"measured within {apart:.3f} bits of them",
            apart < 0.1,
            (56,),
        ),
        Claim(
            f"t = {t:g}: the aggregate Gaussian suits secure aggregation at this cost",
            f"n = {largest['clients']:g}: a masked residue takes {largest['masked']:g} bits, more where A is "
            f"small, a message by itself {largest['aggregate_measured']:.2f}",
            largest["masked"] <= largest["aggregate_measured"] + 1.0,
            (57,),
        ),
    ]


def _draw(rows: Sequence[Row], intervals: Sequence[float]) -> Any:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(6.2 * len(intervals), 4.6), layout="constrained")
    for axes, t in zip(figure.subplots(1, len(intervals), squeeze=False)[0], intervals, strict=True):
        chosen = [row for row in rows if row["interval"] == t]
        n = [row["clients"] for row in chosen]
        for colour, name in zip(("C0", "C1", "C2"), ("aggregate", "irwin_hall", "individual"), strict=True):
            label = name.replace("_", "-")
            axes.plot(n, [r[f"{name}_bound"] for r in chosen], colour + ":", label=f"{label}, bound")
            axes.plot(n, [r[f"{name}_entropy"] for r in chosen], colour, label=f"{label}, H(M | S)")
            axes.plot(n, [r[f"{name}_measured"] for r in chosen], colour + "o", label=f"{label}, measured")
        axes.plot(n, [r["masked"] for r in chosen], "k--", label="masked residue, A = 1")
        axes.set_xscale("log")
        axes.set(xlabel="clients n", ylabel="bits per coordinate and client", title=f"sigma = 1, t = {t:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure
