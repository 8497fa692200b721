"""Coding of one of N points as one bit: random sign words, their public generator and the unbiased decoder.

A word v in {-1, +1}^N is drawn from randomness that sender and receiver share. The sender sends the bit b,
the entry of v at its point's index. The receiver adds b <v, q> = b W, where q are the points. The source is
Lang et al., CPA, section 3. Departures from it are:

* Balanced words make the paper's decoder biased by N / (N - 1). With c2 = E[v_l v_m] for l != m,
  E[b W | l] = (1 - c2) q_l + c2 S, where S is the sum of all points. `WordTable` solves this for q_l.
* "hadamard" words are v_l = (-1)^popcount(row AND l) for row = 1 .. N' - 1. They are exactly balanced, have
  the same second-order law as all balanced words, and cost O(1) per bit. N is padded to a power of two N'
  with indices that no input uses. No array of size blocks x N is made.
* Histograms are the frequencies (h - c2) / (1 - c2), which sum to 1. The paper's histogram sums to 0.

The generator is a counter-based SplitMix64. It computes any word of any block directly, with identical
results in Python, torch and compiled code. It needs no secrecy, because the randomised response that makes a
bit private takes its randomness from another stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, product
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = Literal["hadamard", "balanced", "near_balanced", "iid"]

CODEWORD_TAG, DITHER_TAG, BLOCKS_TAG = 0, 1, 2
GOLD, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MAX_SIGNS = 1 << 16
_MASK = (1 << 64) - 1


# ---- the public generator -------------------------------------------------------------------------------


def prf_mix(z: int) -> int:
    """Apply the SplitMix64 finaliser to a 64-bit integer. 0 stays 0."""
    z = (z ^ (z >> 30)) * MIX1 & _MASK
    z = (z ^ (z >> 27)) * MIX2 & _MASK
    return z ^ (z >> 31)


def prf_bases(seed: int, round: int, users: Sequence[int], stage: int, tag: int) -> NDArray[np.uint64]:
    """Return the keys of the public generator for several users, `(len(users),)` uint64.

    A key depends on seed, round, user, stage and tag (code words, dither or block choice).
    """
    first = np.array(prf_mix(seed + GOLD * (round + 1) & _MASK), np.uint64)
    z = np.broadcast_to(first, len(users))
    for word in (users, [stage], [tag]):  # arrays of unsigned integers wrap around
        z = z + np.uint64(GOLD) * (np.asarray(word, np.uint64) + np.uint64(1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX2)
        z = z ^ (z >> np.uint64(31))
    return z


# ---- words ------------------------------------------------------------------------------------------------


def hadamard_signs(rows: Tensor, index: Tensor) -> Tensor:
    """Return (-1)^popcount(row AND index) as int64, with broadcasting.

    Every row except 0 is balanced over a power of two.
    """
    parity = rows & index
    for shift in (32, 16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return 1 - 2 * (parity & 1)


def walsh_hadamard(x: Tensor) -> Tensor:
    """Transform the last axis, of a power-of-two length: out_r = sum_l (-1)^popcount(r AND l) x_l."""
    length, half = x.shape[-1], 1
    while half < length:
        pairs = x.reshape(*x.shape[:-1], length // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], -2).reshape(*x.shape[:-1], length)
        half *= 2
    return x


@lru_cache(maxsize=16)
def sign_words(size: int, words: Words) -> NDArray[np.int8]:
    """Return all words of a family, `(rows, size)`. One of them is drawn uniformly for every bit.

    Args:
        size: Number N of points.
        words: Family of words. "hadamard" are the rows of a Hadamard matrix. "balanced" are all words with as
            many +1 as -1. "near_balanced" are all words with one more +1, as in the authors' code. "iid" are
            all 2^N words.

    Raises:
        ValueError: If the family is not known, N has the wrong parity for it, or its table would have
            more than 65,536 signs.
    """
    if words not in get_args(Words):
        raise ValueError(f"words must be one of {', '.join(get_args(Words))}, got {words!r}")
    if words == "balanced" and size % 2:
        raise ValueError(
            f"balanced words need an even number of points, got {size}. "
            "Choose words='hadamard', which pads, or 'near_balanced'."
        )
    if words == "near_balanced" and size % 2 == 0:
        raise ValueError(f"near_balanced words need an odd number of points, got {size}. Choose 'balanced'.")
    choices = math.comb(size, size // 2)
    padded = 1 << (size - 1).bit_length()
    count = {"hadamard": padded - 1, "balanced": choices, "near_balanced": choices, "iid": 2**size}[words]
    if count * size > MAX_SIGNS:
        raise ValueError(
            f"{words} words of {size} points need a table of {count * size} signs, at most {MAX_SIGNS}. "
            "Choose fewer points, or words='hadamard' in `word_table`, which needs no table."
        )
    if words == "hadamard":
        rows = torch.arange(1, padded)[:, None]
        return hadamard_signs(rows, torch.arange(size)).numpy().astype(np.int8)
    if words == "iid":
        return np.array(list(product((-1, 1), repeat=size)), np.int8)
    table = -np.ones((count, size), np.int8)
    for row, ones in enumerate(combinations(range(size), (size + 1) // 2)):
        table[row, list(ones)] = 1
    return table


def word_correlation(size: int, words: Words) -> float:
    """Return c2 = E[v_l v_m] for l != m, which is (s^2 - N) / (N (N - 1)) for words with sum s."""
    padded = 1 << (size - 1).bit_length()
    return {
        "hadamard": -1.0 / (padded - 1),
        "balanced": -1.0 / (size - 1),
        "near_balanced": -1.0 / size,
        "iid": 0.0,
    }[words]


@dataclass(frozen=True, eq=False)
class WordTable:
    """Words and decoder constants for coding one index of a codebook as one bit.

    Let a bit b in {-1, +1} survive randomised response with probability (1 + c) / 2. Its unbiased decoder is
    offset + gain b weights[row] / c.

    Args:
        num_rows: Number of words in the family.
        signs: Words, `(num_rows, N)` int8. Hadamard words need no table, and signs are `(0, N)`. Their word i
            is row i + 1 of the Hadamard matrix.
        weights: W = sum_l v_l q_l of every word, `(num_rows, L)` float64.
        gain: 1 / (1 - c2).
        offset: -c2 S gain, `(L,)` float64.
        points: Points of the codebook, `(N, L)` float64.
    """

    num_rows: int
    signs: NDArray[np.int8] = field(repr=False)
    weights: NDArray[np.float64] = field(repr=False)
    gain: float
    offset: NDArray[np.float64]
    points: NDArray[np.float64] = field(repr=False)

    @property
    def second_moment(self) -> NDArray[np.float64]:
        """E (gain W_j)^2 for every coordinate j, `(L,)`.

        Divided by c^2, it is the second moment of the decoder's random part.
        """
        moments: NDArray[np.float64] = self.gain**2 * np.square(self.weights).mean(0)
        return moments


def word_table(points: NDArray[np.float64], words: Words) -> WordTable:
    """Tabulate a family of words over a codebook.

    Args:
        points: Points of the codebook, `(N, L)` float64.
        words: Family of words, as in `sign_words`.

    Raises:
        ValueError: If there are fewer than two points, or the family does not fit them (`sign_words`).
    """
    size = len(points)
    if size < 2:
        raise ValueError(f"a codebook needs at least 2 points, got {size}")
    padded = 1 << (size - 1).bit_length()
    if words == "hadamard":
        full = np.zeros((padded, points.shape[1]))
        full[:size] = points
        weights = walsh_hadamard(torch.from_numpy(full.T.copy())).T[1:].contiguous().numpy()
        signs = np.zeros((0, size), np.int8)
    else:
        signs = sign_words(size, words)
        weights = signs.astype(np.float64) @ points
    gain = 1.0 / (1.0 - word_correlation(size, words))
    return WordTable(len(weights), signs, weights, gain, (1.0 - gain) * points.sum(0), points)


def frequencies(votes: Tensor, table: WordTable) -> Tensor:
    """Turn debiased votes per word into unbiased frequencies of the points.

    With balanced words the frequencies sum to 1.

    Args:
        votes: Mean over senders of b / c, added at the row of each sender's word, `(blocks, num_rows)`
            float64.
        table: Words of the codebook.

    Returns:
        `(blocks, N)` float64. Single frequencies may be negative.
    """
    if len(table.signs):
        counts = votes @ torch.from_numpy(table.signs).to(votes)
    else:
        counts = walsh_hadamard(torch.nn.functional.pad(votes, (1, 0)))[:, : len(table.points)]
    return table.gain * counts + (1.0 - table.gain)


def threshold_frequencies(values: Tensor) -> Tensor:
    """Set negative frequencies to zero and rescale every row to sum 1. This reduces noise and adds bias.

    A row in which no frequency is positive becomes uniform.
    """
    positive = values.clamp(min=0.0)
    total = positive.sum(-1, keepdim=True)
    return torch.where(total > 0, positive / total.clamp(min=1e-300), 1.0 / values.shape[-1])


def smallest_half(table: WordTable) -> int:
    """Return the smallest number of points to which a bit without randomised response narrows the input.

    It is the smallest nonzero number of +1 or of -1 in any word.
    """
    size = len(table.points)
    if len(table.signs):
        ones = (table.signs > 0).sum(1)
    else:  # the sums of the words are the transform of the indicator of points that are not padding
        padding = np.zeros(table.num_rows + 1)
        padding[:size] = 1.0
        sums = walsh_hadamard(torch.from_numpy(padding))[1:].numpy()
        ones = ((size + sums) / 2).round().astype(np.int64)
    halves = np.concatenate([ones, size - ones])
    return int(halves[halves > 0].min())
