"""Huffman codes on the conditional law of each coordinate: what the paper's table counts, not for speed."""

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lightning_fedq.wire.coding import Code


def huffman_lengths(probabilities):
    """Code word lengths of a Huffman code; a single symbol still takes one bit.

    Raises:
        ValueError: If there is no symbol, or a probability is not > 0.
    """
    if not probabilities or min(probabilities) <= 0:
        raise ValueError("huffman_lengths needs probabilities > 0; leave impossible symbols out")
    if len(probabilities) == 1:
        return [1]
    lengths = [0] * len(probabilities)
    heap = [(p, i, [i]) for i, p in enumerate(probabilities)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (p, _, first), (q, tie, second) = heapq.heappop(heap), heapq.heappop(heap)
        for leaf in first + second:
            lengths[leaf] += 1
        heapq.heappush(heap, (p + q, tie, first + second))
    return lengths


def canonical_words(lengths):
    """Canonical code words, as strings of 0 and 1, of a complete set of lengths."""
    words, value, last = [""] * len(lengths), 0, 0
    for length, symbol in sorted((length, i) for i, length in enumerate(lengths)):
        value <<= length - last
        words[symbol], last = format(value, f"0{length}b"), length
        value += 1
    return words


@dataclass(frozen=True)
class ConditionalHuffman(Code):
    """One Huffman tree per coordinate, on its own conditional law: for validation, not for speed.

    Args:
        smallest: `(m,)` smallest possible symbol of each coordinate.
        laws: One list of probabilities > 0 per coordinate, for smallest, smallest + 1, ...
    """

    smallest: tuple[int, ...]
    laws: tuple[tuple[float, ...], ...]

    @cached_property
    def _words(self):
        return [canonical_words(huffman_lengths(list(law))) for law in self.laws]

    def _strings(self, symbols):
        picked = []
        for symbol, low, words in zip(symbols.tolist(), self.smallest, self._words, strict=True):
            if not 0 <= symbol - low < len(words):
                raise ValueError(
                    f"symbol {symbol} is impossible in its law on [{low}, {low + len(words) - 1}]"
                )
            picked.append(words[symbol - low])
        return picked

    def pack(self, symbols):
        """See `Code.pack`.

        Raises:
            ValueError: If a symbol has no code word.
        """
        bits = "".join(self._strings(symbols))
        return np.packbits(np.frombuffer(bits.encode(), np.uint8) - ord("0")).tobytes()

    def unpack(self, stream, count):
        """See `Code.unpack`."""
        bits = "".join(format(byte, "08b") for byte in stream)
        place, symbols = 0, []
        for low, words in zip(self.smallest[:count], self._words, strict=False):
            end, table = place + 1, {word: i for i, word in enumerate(words)}
            while bits[place:end] not in table and end < len(bits):
                end += 1
            if bits[place:end] not in table:
                raise ValueError(
                    f"{len(stream)} bytes do not hold {count} Huffman codes; the message is truncated"
                )
            symbols.append(low + table[bits[place:end]])
            place = end
        if (place + 7) // 8 != len(stream):
            raise ValueError(
                f"{count} symbols end after {place} bits, got {8 * len(stream)}; wrong count or model"
            )
        return torch.tensor(symbols)

    def num_bits(self, symbols):
        """See `Code.num_bits`."""
        rows = symbols.reshape(-1, len(self.smallest))
        return sum(len(word) for row in rows for word in self._strings(row))
