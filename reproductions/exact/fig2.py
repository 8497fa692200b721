"""Hegazy et al., figure 2: conditional entropy of the layered quantisers against the input's interval.

Inputs are uniform on (0, t). Theory is the exact H(M | S) by quadrature, its lower bound for any code with
this error law, and the fixed length of the shifted code; measured are real bitstreams with the exact law of
the symbol given the shared randomness, decoded again. The paper's settings, all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fedq.functional.exact_error.layered import (
    WORDS_PER_COORDINATE,
    Law,
    Layering,
    layer_row,
    minimal_step,
)
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.reports.runs import Row, fresh_folder
from reproductions.bench import Claim
from reproductions.exact.claims import Array, coded_bits, finish
from reproductions.exact.formulas import conditional_entropy, fixed_length_bits, lower_bound

LAWS: tuple[Law, ...] = ("gaussian", "laplace")
LAYERINGS: tuple[Layering, ...] = ("direct", "shifted")


def measured(
    interval: float, sigma: float, law: Law, layering: Layering, samples: int, rand: PublicRandomness
) -> tuple[float, int]:
    """Bits a symbol of inputs uniform on (0, t), and the largest number of symbols possible given S.

    Args:
        interval: t, > 0.
        sigma: Standard deviation of the error.
        law: Its law.
        layering: Direct or shifted.
        samples: Symbols, >= 1.
        rand: Its client 0's streams are used.
    """
    purpose = f"{law} {layering} {interval:g} {sigma:g}"
    quantizer = [np.empty(samples) for _ in range(3)]
    words = rand.shared_with_server(0, purpose).words64(WORDS_PER_COORDINATE * samples)
    layer_row(words, sigma, law == "gaussian", layering == "shifted", *quantizer)
    dither, step, _ = quantizer
    values: Array = interval * rand.shared_with_server(0, purpose + " input").uniforms(samples)
    most = np.floor(interval / step + dither + 0.5) - np.floor(dither + 0.5) + 1.0
    return coded_bits(values, dither, step, interval), int(most.max())


def exact_fig2(
    intervals: Sequence[float] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0),
    sigmas: Sequence[float] = (1.0, 3.0),
    samples: int = 50_000,
    seed: int = 0,
    out: str = "runs/exact-fig2",
) -> dict[str, Any]:
    """Exact-error paper, figure 2: bits of the direct and shifted layered quantisers against the interval.

    Args:
        intervals: Lengths t of the interval that inputs are uniform on.
        sigmas: Standard deviations of the error.
        samples: Symbols coded per point.
        seed: Of inputs, dithers and layers.
        out: Folder of table and picture.
    """
    if samples < 100:
        raise ValueError(f"samples must be >= 100, got {samples}")
    folder, rand, rows = fresh_folder(Path(out)), PublicRandomness(SeededKeys(seed), 0), list[Row]()
    for law in LAWS:
        for sigma in sigmas:
            for interval in intervals:
                row: Row = {"laplace": float(law == "laplace"), "sigma": sigma, "interval": interval}
                row["lower_bound"] = max(lower_bound(interval, sigma, law), 0.0)
                for layering in LAYERINGS:
                    entropy = conditional_entropy(interval, sigma, law, layering)
                    bits, most = measured(interval, sigma, law, layering, samples, rand)
                    row |= {f"{layering}_entropy": entropy, f"{layering}_measured": bits}
                row["fixed_length"] = fixed_length_bits(interval, law, sigma)
                row["most_symbols"], row["steps"] = most, interval / minimal_step(law, sigma)
                rows.append(row)
    settings = {"intervals": list(intervals), "sigmas": list(sigmas), "samples": samples, "seed": seed}
    return finish(folder, settings, rows, _claims(rows), _draw(rows, sigmas))


def _claims(rows: Sequence[Row]) -> list[Claim]:
    gaps = {law: 0.0 for law in LAWS}
    for row in rows:
        law = LAWS[int(row["laplace"])]
        gaps[law] = max(gaps[law], row["shifted_entropy"] - row["direct_entropy"])
    apart = max(abs(row[f"{kind}_measured"] - row[f"{kind}_entropy"]) for row in rows for kind in LAYERINGS)
    short = min(row["direct_measured"] - row["lower_bound"] for row in rows)
    spare = min(row["steps"] + 2.0 - row["most_symbols"] for row in rows)
    over = max(row["most_symbols"] for row in rows if row["most_symbols"] > 0)
    fits = all(row["most_symbols"] <= 2.0 ** row["fixed_length"] for row in rows)
    return [
        Claim(
            "proposition 1: the shifted quantiser costs at most 2 bits more than the direct one "
            "(its own proof gives 1)",
            f"largest gap {gaps['gaussian']:.3f} bits (Gaussian), {gaps['laplace']:.3f} (Laplace)",
            max(gaps.values()) <= 2.0,
            (43,),
        ),
        Claim(
            "figure 2: the gap between the two is below 1 bit at every value",
            f"largest gap {max(gaps.values()):.3f} bits",
            max(gaps.values()) < 1.0,
            (44,),
        ),
        Claim(
            "equation 4: no code needs less than log t + h(D)",
            f"the direct code's measured length is never below it (smallest distance {short:.4f} bits)",
            short > -0.02,
            (42,),
        ),
        Claim(
            "figure 2: H(M | S) is what the quantisers cost",
            f"bitstreams lie within {apart:.3f} bits of it at every point",
            apart < 0.03,
            (42,),
        ),
        Claim(
            "proposition 2: the shifted quantiser has at most 2 + t / eta symbols, given S",
            f"at most {over:.0f} symbols met, {spare:.2f} below the bound at the closest; a fixed length "
            f"{'suffices' if fits else 'does not suffice'}",
            spare >= 0.0 and fits,
            (45,),
        ),
    ]


def _draw(rows: Sequence[Row], sigmas: Sequence[float]) -> Any:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(5.4 * len(sigmas), 7.4), layout="constrained")
    panels = figure.subplots(2, len(sigmas), squeeze=False)
    for i, law in enumerate(LAWS):
        for j, sigma in enumerate(sigmas):
            axes, chosen = panels[i][j], [r for r in rows if r["laplace"] == i and r["sigma"] == sigma]
            t = [row["interval"] for row in chosen]
            for kind, colour in zip(LAYERINGS, ("C0", "C1"), strict=True):
                axes.plot(t, [r[f"{kind}_entropy"] for r in chosen], colour, label=f"{kind}, H(M | S)")
                axes.plot(t, [r[f"{kind}_measured"] for r in chosen], colour + "o", label=f"{kind}, measured")
            axes.plot(t, [r["lower_bound"] for r in chosen], "k:", label="lower bound (4)")
            axes.step(t, [r["fixed_length"] for r in chosen], "C2--", where="mid", label="shifted, fixed")
            axes.set_xscale("log", base=2)
            axes.set(xlabel="interval t", ylabel="bits per coordinate", title=f"{law}, sigma = {sigma:g}")
            axes.grid(alpha=0.3)
    panels[0][0].legend()
    return figure
