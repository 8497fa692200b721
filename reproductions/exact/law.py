"""Kolmogorov-Smirnov tests of every exact-error mechanism: is the error's law the one that was promised?

For each mechanism and cohort size, blocks of coordinates are quantised and decoded with the mechanism's own
quantisers and kernels, for three inputs of every client: 0, the edge of the clipping ball, and random. The
same quantisers serve all three, so that 1,000 clients take minutes and not hours. The release grid is left
out: it would only be smoothed over again.

Inputs are large on purpose: the edge is 3.7 standard deviations of one client's noise away from 0, so that
symbols are not all zeros. Independence is tested where inputs are random: correlations of the error with the
mean input, of its square with the mean input, of its size with the place of the mean input between multiples
of the noise, and a two-sample test between coordinates of small and of large mean input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats

from lightning_fedq.functional.exact_error.dither import dither_quantize_row
from lightning_fedq.functional.exact_error.irwin_hall import Array
from lightning_fedq.functional.exact_error.layered import WORDS_PER_COORDINATE, layer_row
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import SIGM, AggregateGaussian, IrwinHall, LayeredGaussian
from lightning_fedq.mechanisms.bases.exact_error import ExactError, Quantizer
from lightning_fedq.mechanisms.interface import RoundContext
from lightning_fedq.reports.runs import Row, fresh_folder, write_atomically
from reproductions.bench import Claim
from reproductions.exact.claims import finish
from reproductions.exact.formulas import irwin_hall_cdf, target_cdf

BLOCK = 10_000
EDGE = 3.7
FALSE_ALARM = 1e-3
"""Of the whole table, if everything is as it should be: half for the laws, half for independence."""
INPUTS = ("zero", "edge", "random")

Cdf = Callable[[Array], Array]
Mask = NDArray[np.bool_]


class Share(NamedTuple):
    """One client's quantisers for a block; `sent` is None where all coordinates are."""

    quantizer: Quantizer
    sent: Mask | None


class Block(NamedTuple):
    """What one block of coordinates hangs on.

    Args:
        shares: Of all clients, in order.
        spread: Std of the error of the sum, in units of one client's largest input.
        common: Are step and offset common, so that integers are summed before they are decoded?
        empty: Noise of the coordinates that nobody sent, 0 elsewhere.
    """

    shares: Iterator[Share]
    spread: float
    common: bool = False
    empty: Array | float = 0.0


def _context(num_clients: int, block: int) -> RoundContext:
    one = torch.ones(1, dtype=torch.float64)
    return RoundContext(block, tuple((i,) for i in range(num_clients)), (BLOCK,), 0.0 * one, one)


def _exact(
    make: Callable[[float], ExactError], n: int, context: RoundContext, rand: PublicRandomness
) -> Block:
    # the largest input is 1 / sqrt(dim) clipping norms, one client's noise has std 2 z / sqrt(n)
    mechanism, unit = make(math.sqrt(n / BLOCK) / (2.0 * EDGE)), math.sqrt(BLOCK)
    quantizer_of, sigma = mechanism.quantizers(context, rand), mechanism.sigma(context)

    def shares() -> Iterator[Share]:
        for client in context.cohort:
            dither, step, offset = quantizer_of(client)
            yield Share(Quantizer(dither, step * unit, offset * unit), None)

    return Block(shares(), n * sigma * unit, mechanism.homomorphic)


def _sigm(n: int, context: RoundContext, rand: PublicRandomness) -> Block:
    gamma = 0.5
    mechanism = SIGM(1.0, math.sqrt(gamma * n) / EDGE, gamma)
    quantizer_of, nobody = mechanism.quantizers(context, rand), mechanism.counts(context, rand) == 0
    noise = np.zeros(BLOCK)
    if nobody.any():
        for client in context.cohort:
            noise += mechanism.noise_share(client, context, rand)

    def shares() -> Iterator[Share]:
        for client in context.cohort:
            selected, quantizer = quantizer_of(client)
            yield Share(quantizer, selected)

    return Block(shares(), mechanism.noise_multiplier, empty=np.where(nobody, gamma * noise, 0.0))


def _laplace(layering: str, n: int, context: RoundContext, rand: PublicRandomness) -> Block:
    def shares() -> Iterator[Share]:
        for client in context.cohort:
            quantizer = Quantizer(*(np.empty(BLOCK) for _ in range(3)))
            words = rand.shared_with_server(client, "laplace").words64(WORDS_PER_COORDINATE * BLOCK)
            layer_row(words, 1.0 / EDGE, False, layering == "shifted", *quantizer)
            yield Share(quantizer, None)

    return Block(shares(), math.sqrt(n) / EDGE)


def _normal(n: int) -> Cdf:
    return lambda x: np.asarray(special.ndtr(x), np.float64)


def _double_exponential(n: int) -> Cdf:
    return lambda x: np.where(
        x < 0.0, 1.0 - target_cdf(np.abs(x), "laplace"), target_cdf(np.abs(x), "laplace")
    )


def _irwin_hall(n: int) -> Cdf:
    # interpolated: the second derivative is below 0.3, so the error is below 0.3 (4e-5)^2 / 8 = 6e-11
    grid = np.linspace(-10.0, 10.0, 500_001)
    table = irwin_hall_cdf(grid, n)
    return lambda x: np.interp(x, grid, table)


class Case(NamedTuple):
    """A row of the table.

    Args:
        make: Makes a block for n clients.
        cdf: Promised law of the error of the sum over its std, for n clients.
        most: Largest cohort that is run.
    """

    make: Callable[[int, RoundContext, PublicRandomness], Block]
    cdf: Callable[[int], Cdf]
    most: int = 1000


def _of(make: Callable[[float], ExactError], cdf: Callable[[int], Cdf]) -> Case:
    return Case(lambda n, context, rand: _exact(make, n, context, rand), cdf)


CASES: dict[str, Case] = {
    "LayeredGaussian, direct": _of(lambda z: LayeredGaussian(1.0, z), _normal),
    "LayeredGaussian, shifted": _of(lambda z: LayeredGaussian(1.0, z, layering="shifted"), _normal),
    "AggregateGaussian": _of(lambda z: AggregateGaussian(1.0, z), _normal),
    "AggregateGaussian, Laplace": _of(
        lambda z: AggregateGaussian(1.0, z, error_law="laplace"), _double_exponential
    ),
    "IrwinHall": _of(lambda z: IrwinHall(1.0, z), _irwin_hall),
    "SIGM, gamma 0.5": Case(_sigm, _normal, most=50),
    "layered Laplace, direct": Case(
        lambda n, context, rand: _laplace("direct", n, context, rand), _double_exponential, most=1
    ),
    "layered Laplace, shifted": Case(
        lambda n, context, rand: _laplace("shifted", n, context, rand), _double_exponential, most=1
    ),
}


def block_errors(case: Case, n: int, block: int, seed: int) -> tuple[Array, Array]:
    """Errors of the sum in one block.

    Args:
        case: The mechanism.
        n: Clients.
        block: Number of the block.
        seed: Of all streams.

    Returns:
        `(3, BLOCK)` errors over their std, one row for each of `INPUTS`, and the mean of the random inputs.
    """
    context, rand = _context(n, block), PublicRandomness(SeededKeys(seed), block)
    shares, spread, common, empty = case.make(n, context, rand)
    base = 2.0 * rand.public("inputs").uniforms(BLOCK) - 1.0
    total, wanted, dithers = np.zeros((3, BLOCK)), np.zeros((3, BLOCK)), np.zeros(BLOCK)
    symbols, summed = np.empty(BLOCK, np.int64), np.zeros((3, BLOCK), np.int64)
    fixed, mean, step, offset = (np.zeros(BLOCK), np.ones(BLOCK)), np.zeros(BLOCK), base, base
    for client, ((dither, step, offset), sent) in enumerate(shares):
        random = np.roll(base, 37 * client)
        mean += random / n
        dithers += dither
        for row, values in enumerate((*fixed, random)):
            if not dither_quantize_row(values, 1.0, dither, step, symbols) < 2.0**62 / n:
                raise ValueError(f"a symbol of client {client} is too large; lower EDGE")
            if common:
                summed[row] += symbols
                wanted[row] += values
            elif sent is None:
                total[row] += (symbols - dither) * step + offset
                wanted[row] += values
            else:
                total[row] += np.where(sent, (symbols - dither) * step + offset, 0.0)
                wanted[row] += np.where(sent, values, 0.0)
    if common:
        for row in range(len(INPUTS)):
            total[row] += (summed[row] - dithers) * step + n * offset
    return (total + empty - wanted) / spread, mean


def distance(errors: Array, cdf: Cdf) -> float:
    """Kolmogorov-Smirnov statistic of a sample, which is sorted in place."""
    errors.sort()
    count = len(errors)
    found, steps = cdf(errors), np.arange(count + 1, dtype=np.float64) / count
    return float(max((steps[1:] - found).max(), (found - steps[:-1]).max()))


def dependence(errors: Array, inputs: Array, period: float) -> float:
    """p-value of independence of errors and inputs, by four tests and Bonferroni.

    Args:
        errors: `(N,)`.
        inputs: `(N,)`.
        period: The inputs' place modulo this is compared with the errors' size.
    """
    place = inputs / period
    pairs = ((errors, inputs), (errors * errors, inputs), (np.abs(errors), place - np.floor(place)))
    scores = [abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(errors)) for a, b in pairs]
    small = inputs < np.median(inputs)
    two = stats.ks_2samp(errors[small], errors[~small], method="asymp").pvalue
    return min(1.0, 4.0 * min(float(two), *(math.erfc(score / math.sqrt(2.0)) for score in scores)))


def exact_law(
    samples: int = 10_000_000,
    num_clients: Sequence[int] = (1, 2, 3, 10, 50, 1000),
    mechanisms: Sequence[str] = tuple(CASES),
    seed: int = 0,
    out: str = "runs/exact-law",
) -> dict[str, Any]:
    """Exact-error paper: Kolmogorov-Smirnov tests of every mechanism's error, and of its independence.

    Args:
        samples: Errors per test, a multiple of 10,000.
        num_clients: Cohorts; SIGM is run up to 50, layered Laplace with one client.
        mechanisms: Names, as in the table.
        seed: Of all streams.
        out: Folder of table and picture; `table.md` has the names.
    """
    if samples < BLOCK or samples % BLOCK:
        raise ValueError(f"samples must be a multiple of {BLOCK:,}, got {samples}")
    if unknown := set(mechanisms) - set(CASES):
        raise ValueError(f"there is no mechanism {min(unknown)!r}; known: {'; '.join(CASES)}")
    folder, rows = fresh_folder(Path(out)), list[Row]()
    for name in mechanisms:
        for n in num_clients:
            if n <= CASES[name].most:
                rows += _tests(name, n, samples, seed)
                print(_line(rows[-1]), flush=True)
    laws, pairs = len(rows), sum("independence_p" in row for row in rows)
    threshold = float(special.kolmogi(FALSE_ALARM / 2.0 / laws)) / math.sqrt(samples)
    least = FALSE_ALARM / 2.0 / pairs
    settings = {
        "samples": samples,
        "num_clients": list(num_clients),
        "mechanisms": {list(CASES).index(name): name for name in mechanisms},
        "inputs": dict(enumerate(INPUTS)),
        "seed": seed,
        "false_alarm": FALSE_ALARM,
        "threshold": threshold,
        "least_independence_p": least,
    }
    write_atomically(folder / "table.md", _markdown(rows, threshold))
    return finish(folder, settings, rows, _claims(rows, threshold, least), _draw(rows, threshold))


def _tests(name: str, n: int, samples: int, seed: int) -> list[Row]:
    case, index = CASES[name], float(list(CASES).index(name))
    errors, inputs = np.empty((len(INPUTS), samples)), np.empty(samples)
    for block in range(samples // BLOCK):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        errors[:, part], inputs[part] = block_errors(case, n, block, seed)
    independent = dependence(errors[-1], inputs, 1.0 / EDGE)
    rows, cdf = list[Row](), case.cdf(n)
    for i, sample in enumerate(errors):
        found = distance(sample, cdf)
        row: Row = {"mechanism": index, "clients": float(n), "inputs": float(i), "statistic": found}
        row["p"] = float(special.kolmogorov(found * math.sqrt(samples)))
        if case.cdf is not _normal:
            row["statistic_if_gaussian"] = distance(sample, _normal(n))
        rows.append(row)
    rows[-1]["independence_p"] = independent
    return rows


def _name(row: Row) -> str:
    return list(CASES)[int(row["mechanism"])]


def _line(row: Row) -> str:
    return f"{_name(row)}, n = {row['clients']:.0f}: D = {row['statistic']:.2e}, p = {row['p']:.3f}"


def _markdown(rows: Sequence[Row], threshold: float) -> str:
    lines = [
        f"Statistic D in units of 1e-4 (threshold {1e4 * threshold:.2f}), p in brackets.",
        "",
        "| mechanism | n | zero | edge | random | independence, p |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for start in range(0, len(rows), len(INPUTS)):
        group = rows[start : start + len(INPUTS)]
        cells = [f"{1e4 * row['statistic']:.2f} ({row['p']:.2f})" for row in group]
        first = f"| {_name(group[0])} | {group[0]['clients']:,.0f} | "
        lines.append(first + " | ".join(cells) + f" | {group[-1]['independence_p']:.2f} |")
    return "\n".join(lines) + "\n"


def _claims(rows: Sequence[Row], threshold: float, least: float) -> list[Claim]:
    worst = max(rows, key=lambda row: row["statistic"])
    pairs = [row["independence_p"] for row in rows if "independence_p" in row]
    claims = [
        Claim(
            "the error has exactly the promised law, for every input",
            f"largest statistic of {len(rows)} tests {worst['statistic']:.2e} ({_line(worst)}), "
            f"threshold {threshold:.2e}",
            worst["statistic"] < threshold,
            (38, 41, 48, 49, 127),
        ),
        Claim(
            "the error is independent of the input",
            f"smallest of {len(pairs)} p-values {min(pairs):.2g}, threshold {least:.2g}",
            min(pairs) > least,
            (38, 41, 48, 49, 127),
        ),
    ]
    others = [row for row in rows if "statistic_if_gaussian" in row and row["clients"] <= 10]
    if others:
        weakest = min(others, key=lambda row: row["statistic_if_gaussian"])
        claims.append(
            Claim(
                "the test can fail: no other law passes for a Gaussian (up to 10 clients)",
                f"least statistic {weakest['statistic_if_gaussian']:.2e}, for {_name(weakest)} and "
                f"{weakest['clients']:.0f} clients",
                weakest["statistic_if_gaussian"] > threshold,
            )
        )
    return claims


def _draw(rows: Sequence[Row], threshold: float) -> Any:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.subplots()
    for index in sorted({row["mechanism"] for row in rows}):
        chosen = [row for row in rows if row["mechanism"] == index]
        axes.plot(
            [row["clients"] for row in chosen],
            [row["statistic"] for row in chosen],
            "o",
            alpha=0.7,
            label=_name(chosen[0]),
        )
    axes.axhline(threshold, color="k", linestyle="--", label=f"threshold, {FALSE_ALARM:g} for all")
    axes.set_xscale("log")
    axes.set(xlabel="clients", ylabel="Kolmogorov-Smirnov statistic", ylim=(0.0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
