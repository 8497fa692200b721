"""What the reproductions of the exact-error paper share: a folder of results with verdicts, and a code.

`pack_uniform` is a real code for dithered symbols of an input that is uniform on an interval, with the exact
law of the symbol given dither and step: a range coder first says which cells are cut by an end of the
interval, then which whole cell it is. Its length is what the paper's conditional entropies are about.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import constriction
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.reports.runs import Row, save_figure, write_rows, write_summary
from reproductions.bench import Claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Symbols = NDArray[np.int64]


def finish(
    folder: Path, settings: dict[str, Any], rows: Sequence[Row], claims: Sequence[Claim], figure: Figure
) -> dict[str, Any]:
    """Write `table.csv`, `picture.png` and `summary.json`, print the verdicts.

    Args:
        folder: Of this run.
        settings: Everything that the figures hang on.
        rows: The table.
        claims: The verdicts.
        figure: The picture.

    Returns:
        The summary.
    """
    write_rows(folder / "table.csv", rows)
    save_figure(figure, folder / "picture.png")
    summary = {"settings": settings, "claims": [claim.plain for claim in claims]}
    write_summary(folder / "summary.json", summary)
    for claim in claims:
        print(claim.line)
    print(f"{folder / 'table.csv'}\n{folder / 'picture.png'}")
    return {**summary, "rows": list(rows), "folder": folder}


def _cells(dither: Array, step: Array, interval: float) -> tuple[Symbols, Symbols, Array]:
    """First and last possible symbol of inputs in (0, t), and the probabilities of first, inner and last."""
    first = np.floor(dither + 0.5).astype(np.int64)
    last = np.floor(interval / step + dither + 0.5).astype(np.int64)
    left = np.minimum((first + 0.5 - dither) * step / interval, 1.0)
    right = np.where(last > first, 1.0 - (last - 0.5 - dither) * step / interval, 0.0)
    laws = np.stack([left, np.maximum(1.0 - left - right, 0.0), np.maximum(right, 0.0)], 1)
    laws = np.maximum(laws, 1e-9)
    return first, last, laws / laws.sum(1, keepdims=True)


def _uniform() -> constriction.stream.model.Uniform:
    return constriction.stream.model.Uniform()


def _digits(sizes: Symbols) -> list[tuple[Symbols, Symbols]]:
    """Split values below `sizes` into a high part and binary digits of 16 bits: (place, number of values).

    The coder's probabilities have 24 bits, and steps of the aggregate Gaussian can be tiny.
    """
    spare = np.maximum(np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64) - 15, 0)
    digits = [(spare, ((sizes - 1) >> spare) + 1)]
    while bool((spare > 0).any()):
        width = np.minimum(spare, 16)
        spare = spare - width
        digits.append((spare, np.int64(1) << width))
    return digits


def pack_uniform(symbols: Symbols, dither: Array, step: Array, interval: float) -> NDArray[np.uint32]:
    """Code dithered symbols of inputs uniform on (0, t); 32-bit words.

    Args:
        symbols: `(m,)`, floor(x / w + U + 1/2).
        dither: `(m,)`, U.
        step: `(m,)`, w, > 0.
        interval: t, > 0.

    Raises:
        ValueError: If the interval is not > 0, or a symbol is impossible.
    """
    check_positive(interval=interval)
    first, last, laws = _cells(dither, step, interval)
    if bool(((symbols < first) | (symbols > last)).any()):
        raise ValueError(f"a symbol is impossible for inputs in (0, {interval:g}); the input was outside")
    kind = np.where(symbols == first, 0, np.where(symbols == last, 2, 1)).astype(np.int32)
    coder = constriction.stream.queue.RangeEncoder()
    coder.encode(kind, constriction.stream.model.Categorical(perfect=False), laws)
    inner = kind == 1
    sizes = (last - first - 1)[inner]
    wide = sizes > 1
    values = (symbols - first - 1)[inner][wide]
    for place, count in _digits(sizes[wide]):
        digit = (values >> place) % np.maximum(count, 1)
        some = count > 1
        coder.encode(digit[some].astype(np.int32), _uniform(), count[some].astype(np.int32))
    words: NDArray[np.uint32] = coder.get_compressed()
    return words


def unpack_uniform(words: NDArray[np.uint32], dither: Array, step: Array, interval: float) -> Symbols:
    """Inverse of `pack_uniform`; it holds dither and step, as the server does."""
    check_positive(interval=interval)
    first, last, laws = _cells(dither, step, interval)
    decoder = constriction.stream.queue.RangeDecoder(words)
    kind = decoder.decode(constriction.stream.model.Categorical(perfect=False), laws)
    symbols = np.where(kind == 0, first, last)
    inner = kind == 1
    symbols[inner] = first[inner] + 1
    wide = inner & (last - first - 1 > 1)
    values = np.zeros(int(wide.sum()), np.int64)
    for place, count in _digits((last - first - 1)[wide]):
        some = count > 1
        digit = decoder.decode(_uniform(), count[some].astype(np.int32))
        values[some] += digit.astype(np.int64) << place[some]
    symbols[wide] += values
    return symbols


def coded_bits(values: Array, dither: Array, step: Array, interval: float) -> float:
    """Bits a symbol that inputs in (0, t) take on the wire; the stream is decoded again, and compared.

    Raises:
        RuntimeError: If the stream does not give the same symbols back.
    """
    symbols = np.floor(values / step + dither + 0.5).astype(np.int64)
    words = pack_uniform(symbols, dither, step, interval)
    if not np.array_equal(unpack_uniform(words, dither, step, interval), symbols):
        raise RuntimeError("the stream does not decode to what was encoded; the two models differ")
    return 32.0 * len(words) / len(symbols)
