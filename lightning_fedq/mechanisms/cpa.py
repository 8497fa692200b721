"""CPA, compressed private aggregation: one bit for a block of L parameters, and its nested version.

Source: Lang, Shlezinger, D'Oliveira, El Rouayheb, CPA for scalable and robust FL over massive networks.
A block is quantised to a point of a finite lattice codebook; the bit is the sign that a random word,
known to the server, has at that point, after randomised response. Nested CPA sends one bit per stage.

Departures, each for a reason: the decoder is unbiased (the paper's is off by N / (N - 1), the authors' code
also leaves out 1 / tanh(epsilon / 2)); the dither that the paper's theorem needs is there and is
subtracted; nesting splits the fine point; the range is what can't be overloaded, and a block beyond it is
shrunk to it and counted; the level is per bit and one message composes all of its bits (the paper counts a
round as one); coins are integers from private streams. `decoder="paper"`, `decoder="authors_code"` and
`dither="none"` are there to reproduce published numbers.

The range of a block x (in units of the radius, zero-padded to L) is |x| <= 1 for Z, where N levels are
spread over [-1, 1], and ||x|| <= sqrt(L), which holds the cube, for the others. At equal range more points
make CPA noisier: N = 2 on Z is the best one-bit choice, whatever the number of clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.coding import FixedLength
from lightning_fedq.core import (
    Adversary,
    Mechanism,
    Message,
    NonPrivate,
    PmfPairs,
    PrivacyClaim,
    RoundContext,
)
from lightning_fedq.functional.block_code import (
    add_decoded,
    add_votes,
    encode_bits,
    normalize_row,
    quantize_lattice,
    quantize_scalar,
    subtract_dither,
)
from lightning_fedq.functional.codeword import (
    CODEWORD_TAG,
    DITHER_TAG,
    Words,
    WordTable,
    frequencies,
    prf_base,
    prf_rows,
    prf_uniforms,
    prf_words,
    threshold_frequencies,
    walsh_hadamard,
    word_table,
)
from lightning_fedq.functional.lattice import (
    LatticeName,
    lattice,
    nearest_point,
    nested_split,
    scalar_digits,
    scalar_index,
    scalar_levels,
    voronoi_dither,
)
from lightning_fedq.functional.lattice_codebook import (
    Codebook,
    finite_codebook,
    safe_radius,
    voronoi_codebook,
)
from lightning_fedq.functional.one_bit import CoinThresholds, coin_thresholds
from lightning_fedq.functional.one_bit_privacy import randomized_response_pair
from lightning_fedq.mechanisms.claims import ARBITRARY, FRESH
from lightning_fedq.randomness import ClientRandomness, PublicRandomness

Dither = Literal["subtractive", "plain", "none"]
Decoder = Literal["unbiased", "paper", "authors_code"]

_CHUNK = 1 << 13
_DEFAULT_RADIUS = {"A2": 1.0, "D4": 2.0, "E8": 2.0}


_thresholds = lru_cache(maxsize=1024)(coin_thresholds)


@dataclass(frozen=True, eq=False)
class _Design:
    """What follows from a mechanism's geometry alone, in units of the radius.

    Args:
        tables: Words of every stage, coarsest first.
        counts: Points of every stage.
        step: Scale of the finest lattice.
        limit: Largest norm of a block in range.
        top: Codebook of the coarsest stage; None for Z.
        inner: Codebook of the finer stages; `top` if there are none.
    """

    tables: tuple[WordTable, ...]
    counts: tuple[int, ...]
    step: float
    limit: float
    top: Codebook | None
    inner: Codebook | None


@lru_cache(maxsize=64)
def _design(
    name: LatticeName, levels: int, radius: float, stages: int, nesting: int, words: Words, dithered: bool
) -> _Design:
    if name == "Z":
        counts = (levels,) + (nesting,) * (stages - 1)
        total = math.prod(counts)
        step, points = 2.0 / (total - 1) if total > 1 else 1.0, []
        for stage, count in enumerate(counts):
            width = step * math.prod(counts[stage + 1 :])
            points.append(scalar_levels(count, width * count / 2)[:, None].numpy())
        return _Design(tuple(word_table(p, words) for p in points), counts, step, 1.0, None, None)
    top = finite_codebook(name, radius)
    inner = voronoi_codebook(name, nesting) if stages > 1 else top
    growth = float(nesting) ** (stages - 1)
    cells = (1.0 if dithered else 0.0) + sum(float(nesting) ** k for k in range(stages))
    safe = safe_radius(name, radius, cells / growth) * (1 - 1e-9)
    if safe == 0.0:
        raise ValueError(
            f"every block of {name} can be overloaded with codebook_radius {radius}; choose a larger one"
        )
    coarse = math.sqrt(lattice(name).dim) / safe
    widths = [coarse, *(coarse / float(nesting) ** k for k in range(1, stages))]
    books = [top] + [inner] * (stages - 1)
    tables = tuple(word_table(w * b.points, words) for w, b in zip(widths, books, strict=True))
    limit = math.sqrt(lattice(name).dim)
    return _Design(tables, tuple(len(b) for b in books), coarse / growth, limit, top, inner)


@dataclass(frozen=True)
class CPA(Mechanism):
    """One bit per block of L parameters and stage.

    The constructor has many arguments because the paper, its repair and the authors' code differ in each.

    Args:
        epsilon: Local budget of *one bit*, > 0, in nats, `math.inf` for none; a tuple gives client i its
            entry i. A message composes `stages` ceil(dim / L) bits of the same data.
        lattice: "Z" (L = 1), "A2" (2), "D4" (4) or "E8" (8).
        levels: Levels of the coarsest stage, >= 2, for Z only; 2 if None.
        codebook_radius: Norm of the outermost points of the coarsest stage at unit scale, for the other
            lattices only; if None 1 for A2 (7 points), 2 for D4 (49) and E8 (2401).
        stages: Bits per block, >= 1.
        nesting: Every further stage splits a cell into nesting^L; 2 if None. Only with stages > 1.
        words: Family of random words; see `functional.codeword.sign_words`.
        dither: "subtractive" (error independent of the input), "plain" (unbiased, more noise) or "none"
            (biased, as in the authors' code).
        decoder: "unbiased"; "paper", without the correction for balanced words; "authors_code", also
            without the one for randomised response.
        decay_rounds: phi of a range that shrinks as phi / (phi + round), > 0; None keeps it.
        threshold: Set negative frequencies of the cohort's histogram to zero. Less noise, biased, and
            `decode` has to be given the whole cohort at once.

    Example:
        >>> CPA(epsilon=0.5).bits_per_coordinate, CPA(epsilon=0.5, lattice="D4", stages=2).bits_per_coordinate
        (1.0, 0.5)
    """

    homomorphic = False

    epsilon: float | tuple[float, ...]
    lattice: LatticeName = "Z"
    levels: int | None = None
    codebook_radius: float | None = None
    stages: int = 1
    nesting: int | None = None
    words: Words = "hadamard"
    dither: Dither = "subtractive"
    decoder: Decoder = "unbiased"
    decay_rounds: float | None = None
    threshold: bool = False

    def __post_init__(self) -> None:
        for epsilon in self.epsilon if isinstance(self.epsilon, tuple) else (self.epsilon,):
            _thresholds(epsilon)
        lattice(self.lattice)
        if self.stages < 1:
            raise ValueError(f"stages must be >= 1, got {self.stages}")
        if self.lattice == "Z" and self.codebook_radius is not None:
            raise ValueError(f"Z takes levels, not codebook_radius, got {self.codebook_radius}")
        if self.lattice != "Z" and self.levels is not None:
            raise ValueError(f"{self.lattice} takes codebook_radius, not levels, got {self.levels}")
        if self.stages == 1 and self.nesting is not None:
            raise ValueError(f"nesting = {self.nesting} does nothing with one stage; choose stages >= 2")
        if self.dither not in get_args(Dither):
            raise ValueError(f"dither must be one of {', '.join(get_args(Dither))}, got {self.dither!r}")
        if self.decoder not in get_args(Decoder):
            raise ValueError(f"decoder must be one of {', '.join(get_args(Decoder))}, got {self.decoder!r}")
        if self.decay_rounds is not None and not self.decay_rounds > 0:
            raise ValueError(f"decay_rounds must be > 0, got {self.decay_rounds}")
        if self.threshold and self.decoder != "unbiased":
            raise ValueError("a thresholded histogram needs decoder='unbiased'")
        _ = self._design

    # ---- geometry -----------------------------------------------------------------------------------

    @property
    def _design(self) -> _Design:
        radius = self.codebook_radius or _DEFAULT_RADIUS.get(self.lattice, 0.0)
        levels, nesting = (2 if n is None else n for n in (self.levels, self.nesting))
        return _design(self.lattice, levels, radius, self.stages, nesting, self.words, self.dither != "none")

    @property
    def joint(self) -> bool:
        """Must `decode` see the whole cohort at once, rather than part by part?"""
        return self.threshold

    @property
    def block_dim(self) -> int:
        """L, the parameters that share one bit per stage."""
        return lattice(self.lattice).dim

    @property
    def bits_per_coordinate(self) -> float:
        """stages / L."""
        return self.stages / self.block_dim

    @property
    def anonymity_set_size(self) -> int:
        """Fewest points of any stage that one bit without a coin leaves possible.

        A figure of the paper ("k-anonymity"), not a guarantee: it says nothing about odds, shrinks with
        every round that repeats the point, and a coin replaces it by odds of e^epsilon.
        """
        sizes = []
        for table in self._design.tables:
            size = len(table.points)
            if len(table.signs):
                ones = (table.signs > 0).sum(1)
            else:  # the words' sums are a transform of the points that are not padding
                padding = np.zeros(table.num_rows + 1)
                padding[:size] = 1.0
                sums = walsh_hadamard(torch.from_numpy(padding))[1:].numpy()
                ones = ((size + sums) / 2).round().astype(np.int64)
            sizes.append(int(np.minimum(ones, size - ones).min()))
        return min(sizes)

    def blocks(self, context: RoundContext) -> int:
        """M = ceil(dim / L), the bits per stage."""
        return -(-context.dim // self.block_dim)

    def ranges(self, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Centre and radius of every segment in this round, after the decay."""
        decay = 1.0 if self.decay_rounds is None else self.decay_rounds / (self.decay_rounds + context.round)
        return context.center, context.radius * decay

    # ---- randomness -----------------------------------------------------------------------------------

    def coin(self, client: int) -> CoinThresholds:
        """The coin of one client's bits: a bit is flipped where its private word is below `low`.

        Raises:
            ValueError: If epsilon is a tuple without an entry for the client.
        """
        if not isinstance(self.epsilon, tuple):
            return _thresholds(self.epsilon)
        if not 0 <= client < len(self.epsilon):
            raise ValueError(f"epsilon has {len(self.epsilon)} entries, none for client {client}; add them")
        return _thresholds(self.epsilon[client])

    @staticmethod
    def _seed(rand: PublicRandomness) -> int:
        """Seed of the round's codewords and dithers; public, because nothing hangs on its secrecy."""
        return int(rand.public("cpa words and dither").words64(1)[0])

    def _bases(self, seed: int, client: int, context: RoundContext) -> tuple[list[int], int]:
        """Keys of the codewords of every stage, and of the dither."""
        words = [prf_base(seed, context.round, client, stage, CODEWORD_TAG) for stage in range(self.stages)]
        return words, prf_base(seed, context.round, client, 0, DITHER_TAG)

    # ---- encoding -------------------------------------------------------------------------------------

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `Mechanism.encode`; symbols are uint8 bits, all blocks of the coarsest stage first."""
        rows = update.reshape(len(rand.clients), context.dim)
        encode = self._encode_on_cpu if rows.device.type == "cpu" else self._encode_on_device
        bits, clipped = encode(rows, context, rand)
        return Message(bits.reshape(*update.shape[:-1], -1), bits.numel(), min(clipped, update.numel()))

    def _encode_on_cpu(
        self, rows: Tensor, context: RoundContext, rand: ClientRandomness
    ) -> tuple[Tensor, int]:
        values, size, blocks = (
            rows.detach().float().contiguous().numpy(),
            self.block_dim,
            self.blocks(context),
        )
        centers, radii = (t.tolist() for t in self.ranges(context))
        bits, clipped = np.empty((len(rows), self.stages, blocks), np.uint8), 0
        seed, scaled, chunk = self._seed(rand), np.zeros(blocks * size), min(_CHUNK, blocks)
        index, coins = np.empty((self.stages, chunk), np.int32), np.empty(chunk, np.uint32)
        for row, client in enumerate(rand.clients):
            start = 0
            for length, center, radius in zip(context.segments, centers, radii, strict=True):
                part = slice(start, start + length)
                normalize_row(values[row, part], center, 1.0 / radius, scaled[part])
                start += length
            bases, dither = self._bases(seed, client, context)
            private, flips = rand.private(client, "cpa coins"), self.coin(client).low
            for first in range(0, blocks, chunk):
                last = min(first + chunk, blocks)
                found = index[:, : last - first]
                clipped += self._quantize(scaled[first * size : last * size], dither, first, found) * size
                for stage, table in enumerate(self._design.tables):
                    private.fill(coins[: last - first])
                    encode_bits(
                        found[stage],
                        table.signs,
                        table.num_rows,
                        np.uint64(bases[stage]),
                        first,
                        flips,
                        coins[: last - first],
                        bits[row, stage, first:last],
                    )
        return torch.from_numpy(bits), clipped

    def _quantize(self, x: NDArray[np.float64], base: int, first: int, out: NDArray[np.int32]) -> int:
        design, dithered = self._design, self.dither != "none"
        if design.top is None or design.inner is None:
            counts = np.array(design.counts)
            clipped: int = quantize_scalar(x, counts, dithered, np.uint64(base), first, out)
            return clipped
        return quantize_lattice(
            x,
            design.top,
            design.inner,
            self.nesting or 2,
            design.limit,
            1.0 / design.step,
            (dithered, base, first),
            out,
        )

    def _encode_on_device(
        self, rows: Tensor, context: RoundContext, rand: ClientRandomness
    ) -> tuple[Tensor, int]:
        """The same bits as on the CPU, in tensor code."""
        center, radius = (context.expand(t.to(rows.device)) for t in self.ranges(context))
        blocks, size, clipped = self.blocks(context), self.block_dim, 0
        scaled = (rows.float().double() - center) * (1.0 / radius)
        scaled = torch.nn.functional.pad(scaled, (0, blocks * size - context.dim))
        bits = torch.empty(len(rows), self.stages, blocks, dtype=torch.uint8, device=rows.device)
        seed, chunk = self._seed(rand), min(_CHUNK, blocks)
        for row, client in enumerate(rand.clients):
            bases, dither = self._bases(seed, client, context)
            index, outside = self._quantize_tensor(scaled[row].reshape(blocks, size), dither)
            clipped += outside * size
            private, coins = rand.private(client, "cpa coins"), np.empty((self.stages, blocks), np.uint32)
            for first in range(0, blocks, chunk):
                for stage in range(self.stages):
                    private.fill(coins[stage, first : first + chunk])
            flips = torch.from_numpy(coins.astype(np.int64)).to(rows.device) < self.coin(client).low
            for stage, table in enumerate(self._design.tables):
                drawn = prf_rows(prf_words(bases[stage], 0, blocks, rows.device), table.num_rows)
                bits[row, stage] = (table.signs_at(drawn, index[stage]) > 0) ^ flips[stage]
        return bits, clipped

    def _quantize_tensor(self, x: Tensor, base: int) -> tuple[list[Tensor], int]:
        """Indices of every stage for blocks `(blocks, L)`, and how many blocks were shrunk."""
        design, name = self._design, self.lattice
        u = self._dither_tensor(base, len(x), x.device) if self.dither != "none" else torch.zeros_like(x)
        if design.top is None or design.inner is None:
            outside = x.abs() > 1.0
            total = math.prod(design.counts)
            shifted = x.clamp(-1.0, 1.0) * (0.5 * (total - 1)) + u
            digits = scalar_digits(scalar_index(shifted[:, 0], total, total / 2), design.counts)
            return list(digits), int(outside.sum())
        norm = x.square().sum(1, keepdim=True)
        outside = norm > design.limit**2 * (1.0 + 1e-12)
        scale = 1.0 / design.step
        point = x * torch.where(outside, scale * design.limit / norm.clamp(min=1e-300).sqrt(), scale) + u
        fine, indices = nearest_point(point, name), []
        for _ in range(self.stages - 1):
            coarse, rest = nested_split(fine, name, self.nesting or 2)
            indices.append(design.inner.index(rest))
            fine = coarse / (self.nesting or 2)
        return [design.top.index(fine), *reversed(indices)], int(outside.sum())

    def _dither_tensor(self, base: int, blocks: int, device: torch.device) -> Tensor:
        uniforms = prf_uniforms(prf_words(base, 0, blocks * self.block_dim, device))
        return voronoi_dither(uniforms.reshape(blocks, self.block_dim), self.lattice)

    # ---- decoding -------------------------------------------------------------------------------------

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """See `Mechanism.decode`.

        Raises:
            ValueError: If a message has the wrong length or holds anything but bits.
        """
        blocks = self.blocks(context)
        expected = (len(clients), self.stages * blocks)
        if tuple(symbols.shape) != expected:
            raise ValueError(f"messages must have shape {expected}, got {tuple(symbols.shape)}")
        if not bool(((symbols == 0) | (symbols == 1)).all()):
            raise ValueError("messages must hold bits, 0 or 1; drop the client that sent something else")
        bits = symbols.to(torch.uint8).reshape(len(clients), self.stages, blocks)
        if bits.device.type == "cpu":
            total = self._decode_on_cpu(bits, clients, context, rand)
        else:
            total = self._decode_on_device(bits, clients, context, rand)
        center, radius = (context.expand(t.to(bits.device)) for t in self.ranges(context))
        return (len(clients) * center + radius * total[: context.dim]).float()

    def _lift(self, table: WordTable, client: int) -> tuple[float, NDArray[np.float64]]:
        """Scale of b W and the constant that goes with it."""
        keep = 1.0 - 2.0 * self.coin(client).low / 2.0**32
        if self.decoder == "unbiased":
            return table.gain / keep, table.offset
        return (1.0 / keep if self.decoder == "paper" else 1.0), np.zeros_like(table.offset)

    def _decode_on_cpu(
        self, bits: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        blocks, tables, seed = bits.shape[2], self._design.tables, self._seed(rand)
        total, rows = np.zeros(blocks * self.block_dim), bits.numpy()
        votes = [np.zeros((blocks, table.num_rows)) for table in tables] if self.threshold else []
        for row, client in enumerate(clients):
            bases, dither = self._bases(seed, client, context)
            for stage, table in enumerate(tables):
                scale, offset = self._lift(table, client)
                key = np.uint64(bases[stage])
                if self.threshold:
                    add_votes(rows[row, stage], key, scale / (table.gain * len(clients)), votes[stage])
                else:
                    add_decoded(rows[row, stage], table.weights, key, scale, offset, total)
            if self.dither == "subtractive":
                subtract_dither(self.lattice, dither, self._design.step, total)
        decoded = torch.from_numpy(total)
        for count, table in zip(votes, tables, strict=False):
            decoded += len(clients) * self._from_histogram(torch.from_numpy(count), table)
        return decoded

    @staticmethod
    def _from_histogram(votes: Tensor, table: WordTable) -> Tensor:
        """Mean point of every block, flat, from the thresholded histogram."""
        kept = threshold_frequencies(frequencies(votes, table))
        return (kept @ torch.from_numpy(table.points).to(kept)).reshape(-1)

    def _decode_on_device(
        self, bits: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        blocks, tables, device = bits.shape[2], self._design.tables, bits.device
        seed = self._seed(rand)
        total = torch.zeros(blocks, self.block_dim, dtype=torch.float64, device=device)
        votes = [total.new_zeros(blocks, table.num_rows) for table in tables] if self.threshold else []
        for row, client in enumerate(clients):
            bases, dither = self._bases(seed, client, context)
            for stage, table in enumerate(tables):
                scale, offset = self._lift(table, client)
                drawn = prf_rows(prf_words(bases[stage], 0, blocks, device), table.num_rows)
                signed = (2.0 * bits[row, stage].double() - 1.0)[:, None]
                if self.threshold:
                    weight = scale / (table.gain * len(clients))
                    votes[stage].scatter_add_(1, drawn[:, None], weight * signed)
                else:
                    weights, constant = (torch.from_numpy(a).to(device) for a in (table.weights, offset))
                    total += constant + scale * signed * weights[drawn]
            if self.dither == "subtractive":
                total -= self._design.step * self._dither_tensor(dither, blocks, device)
        decoded = total.reshape(-1)
        for count, table in zip(votes, tables, strict=False):
            decoded += len(clients) * self._from_histogram(count, table)
        return decoded

    def code(self, context: RoundContext) -> FixedLength:
        """One bit a symbol."""
        return FixedLength(1)

    # ---- what is known about error and privacy ----------------------------------------------------------

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor | None:
        """Decoder's second moment plus the quantiser's error, less the least that the points take off.

        None for a thresholded histogram, whose error depends on the data.
        """
        if self.threshold:
            return None
        design, cell = self._design, lattice(self.lattice)
        quantizer = {
            "subtractive": cell.second_moment / cell.dim,
            "plain": 0.25 if self.lattice == "Z" else (2.0 * cell.covering_radius) ** 2,
            "none": 0.0,
        }[self.dither] * design.step**2
        total = 0.0
        for client in clients:
            total += quantizer
            for table in design.tables:
                scale, offset = self._lift(table, client)
                moments = scale**2 * np.square(table.weights).mean(0)
                if self.decoder == "unbiased":
                    moments = moments - np.square(table.points - offset).min(0)
                total += float(moments.max())
        return self.ranges(context)[1] ** 2 * total / len(clients) ** 2

    def lever(self, client: int) -> float:
        """Largest possible norm of one decoded block over the largest norm of an honest one in range.

        How far a client that chooses its bits freely can pull, as against one that sends its honest
        extreme, in units of the radius; the smaller epsilon, the longer the lever.
        """
        reach = self._design.step * lattice(self.lattice).covering_radius * (self.dither == "subtractive")
        for table in self._design.tables:
            scale, offset = self._lift(table, client)
            reach += float(np.linalg.norm(offset) + scale * np.linalg.norm(table.weights, axis=1).max())
        return reach / self._design.limit

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Randomised response on every bit, for every value of word and dither, so for every adversary.

        With different epsilons the claim is that of the client with the least protection.
        """
        bits = self.stages * self.blocks(context)
        coin = min((self.coin(client) for client in context.cohort), key=lambda c: c.low)
        if not coin.low:
            reason = NonPrivate(
                "epsilon is infinite: a bit is a function of the update and of what the server knows; "
                f"an anonymity set of {self.anonymity_set_size} is no guarantee"
            )
            return tuple(PrivacyClaim(adversary, reason, bits) for adversary in Adversary)
        loss = PmfPairs(
            (randomized_response_pair(*coin.probabilities),),
            "randomised response on one bit, all bits of a message",
        )
        everywhere = (ARBITRARY, FRESH, "codewords and dither may be known to the adversary")
        special = {
            Adversary.SECAGG_SERVER: (
                "messages can't be summed before decoding, so there is no secure aggregation: "
                "the claim is that of the server that sees every message",
            ),
            Adversary.CLIENT: ("by post-processing: that others hide a client is not used",),
            Adversary.OUTSIDER: ("by post-processing: that others hide a client is not used",),
        }
        return tuple(
            PrivacyClaim(who, loss, bits, assumptions=(*everywhere, *special.get(who, ())))
            for who in Adversary
        )
