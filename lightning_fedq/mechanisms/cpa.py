"""CPA, compressed private aggregation: one bit for a block of L parameters, and its nested version.

Source: Lang, Shlezinger, D'Oliveira, El Rouayheb, CPA for scalable and robust FL over massive networks. A
block of the update is quantised to a point of a finite lattice codebook. A random codeword, which the server
knows, assigns a sign to every point. The client sends the sign of its point as one bit, after randomised
response. Nested CPA sends one bit per stage, and each stage refines the point.

Departures from the paper:

* The decoder is unbiased. The paper's decoder is off by N / (N - 1), and the authors' code also leaves out
  1 / tanh(epsilon / 2).
* The dither that the paper's theorem needs is added and subtracted.
* Nesting splits the fine point.
* No input inside the range overloads the codebook (`functional.blocks.design`). A block beyond the range is
  shrunk to it and counted.
* A message composes all of its bits, while the paper counts a round as one bit.
* Randomised bits compare integers from private streams.
* `decoder="paper"`, `decoder="authors_code"` and `dither="none"` reproduce published numbers.
* `epsilon_scope` gives a budget to a whole message. If thousands of bits shared it, they would be noise.
  A message therefore contains some blocks only. Public randomness draws them for every client, and the
  decoder divides by the probability of a block. Their number minimises the noise
  (`functional.blocks.bit_budget`).

At equal range, more points make CPA noisier. N = 2 on Z is the best one-bit choice for any number of clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.blocks.bit_budget import best_block_count, bit_epsilon
from lightning_fedq.functional.blocks.block_messages import decode_messages, encode_updates, sum_messages
from lightning_fedq.functional.blocks.codeword import (
    BLOCKS_TAG,
    CODEWORD_TAG,
    DITHER_TAG,
    Words,
    prf_bases,
    smallest_half,
)
from lightning_fedq.functional.blocks.design import BlockDesign, block_design
from lightning_fedq.functional.blocks.error import (
    Decoder,
    Dither,
    longest_pull,
    worst_second_moment,
    worst_variance,
)
from lightning_fedq.functional.blocks.lattice import LatticeName, lattice
from lightning_fedq.functional.blocks.lattice_loops import gather_blocks
from lightning_fedq.functional.blocks.scalar_loops import Floats, Keys, choose_blocks
from lightning_fedq.functional.divergences import randomized_response_pair
from lightning_fedq.functional.linear_decode import decode_total
from lightning_fedq.functional.one_bit.threshold_coin import CoinThresholds, coin_thresholds
from lightning_fedq.functional.segments import segment_lines
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.interface import (
    Adversary,
    Mechanism,
    Message,
    PmfPairs,
    PrivacyClaim,
    RoundContext,
    Unit,
    no_guarantee,
    same_for_all,
)
from lightning_fedq.wire.coding import FixedLength

EpsilonScope = Literal["bit", "round", "total"]

_KNOWN = kind.VIEW("codewords and dither may be known to the adversary")
_DRAWN = kind.VIEW(
    "the chosen blocks may also be known to the adversary, and are drawn independently of the update"
)
_BEHIND = (kind.VIEW("by post-processing: that others hide a client is not used"),)
_NO_SUM = kind.VIEW(
    "messages can't be summed before decoding, so there is no secure aggregation: "
    "the claim is that of the server that sees every message"
)
_SPECIAL = {Adversary.SECAGG_SERVER: (_NO_SUM,), Adversary.CLIENT: _BEHIND, Adversary.OUTSIDER: _BEHIND}

_thresholds = lru_cache(maxsize=1 << 14)(coin_thresholds)


@dataclass(frozen=True)
class CPA(Mechanism):
    """Nested lattice code: one bit per block and stage, each sent through randomised response.

    Take it for local differential privacy with less than one bit per parameter, without secure aggregation.
    The constructor has many arguments, because the paper, its corrections and the authors' code differ in
    each.

    Args:
        epsilon: Local budget, > 0, in nats, or `math.inf` for none. `epsilon_scope` says what it covers. A
            tuple gives client i its entry i.
        lattice: "Z" (L = 1), or "A2" (L = 2), the hexagonal lattice.
        levels: Number of levels of the coarsest stage, >= 2, for Z only. None takes 2.
        codebook_radius: Norm of the outermost points of the coarsest stage at unit scale, for A2 only. None
            takes 1, which gives 7 points.
        stages: Number of bits per block, >= 1.
        nesting: Every further stage splits a cell into nesting^L cells. None takes 2. Only with stages > 1.
        words: Family of random codewords, see `functional.blocks.codeword.sign_words`.
        dither: "subtractive" (error independent of the input), "plain" (unbiased, more noise) or "none"
            (biased, as in the authors' code).
        decoder: "unbiased", "paper" (without the correction for balanced codewords) or "authors_code" (also
            without the correction for randomised response).
        decay_rounds: Constant phi of a range that shrinks as phi / (phi + round), > 0. None keeps the range.
        threshold: Whether to set negative frequencies of the cohort's histogram to zero. This gives less
            noise but is biased, and `decode` then needs the whole cohort at once.
        epsilon_scope: Unit of `epsilon`. With "bit" it is one of the `stages` bits of every block. With
            "round" it is all bits of a message together, and with "total" the messages of all `rounds`. A
            repeated attempt at a round is another message and is charged again.
        blocks_per_round: Number of blocks in a message, >= 1. None takes all, or with "round" and "total" the
            number with the least noise.
        rounds: Number of rounds that "total" covers, >= 1. A later round is refused. Only with "total".

    The claim is pure LDP by randomised response on every bit, with the budget of `epsilon_scope`. It holds
    against every adversary, even if codewords and dithers are known. Messages can't be summed before
    decoding, so there is no secure aggregation.

    A message has `stages` bits for every block that it contains.

    References:
        Lang, Shlezinger, D'Oliveira, El Rouayheb, CPA for scalable and robust FL over massive networks

    Examples:
        >>> CPA(epsilon=0.5, epsilon_scope="bit").bits_per_coordinate
        1.0
        >>> CPA(epsilon=0.5, lattice="A2", epsilon_scope="bit").bits_per_coordinate
        0.5
    """

    homomorphic = False
    level = "epsilon"

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
    epsilon_scope: EpsilonScope = field(kw_only=True)
    blocks_per_round: int | None = None
    rounds: int | None = None

    def __post_init__(self) -> None:
        if self.epsilon == ():
            raise ValueError("epsilon must be a number, or a tuple with one number per client, got ()")
        if self.decay_rounds is not None and not self.decay_rounds > 0:
            raise ValueError(f"decay_rounds must be > 0, got {self.decay_rounds}")
        if self.threshold and self.decoder != "unbiased":
            raise ValueError("threshold=True needs decoder='unbiased'")
        if (self.rounds is not None) != (self.epsilon_scope == "total"):
            raise ValueError(
                "set rounds and epsilon_scope='total' together or not at all, "
                f"got rounds={self.rounds} and epsilon_scope={self.epsilon_scope!r}"
            )
        for name, count in (("rounds", self.rounds), ("blocks_per_round", self.blocks_per_round)):
            if count is not None and count < 1:
                raise ValueError(f"{name} must be >= 1 or None, got {count}")
        for epsilon in self._epsilons:
            if not epsilon > 0:
                raise ValueError(f"epsilon must be > 0, got {epsilon}")
            if self.epsilon_scope == "bit":
                _thresholds(epsilon)
        sends_some = self.blocks_per_round is not None or self.epsilon_scope != "bit"
        if sends_some and (self.threshold or self.decoder != "unbiased"):
            raise ValueError(
                "a message of some blocks needs decoder='unbiased' and no threshold. "
                "Otherwise use epsilon_scope='bit' without blocks_per_round."
            )
        _ = self._design

    # ---- geometry -----------------------------------------------------------------------------------

    @property
    def _design(self) -> BlockDesign:
        points = self.lattice, self.levels, self.codebook_radius, self.stages, self.nesting
        return block_design(*points, self.words, self.dither != "none")

    @property
    def joint(self) -> bool:
        return self.threshold

    @property
    def block_dim(self) -> int:
        """L, the number of parameters that share one bit per stage."""
        return lattice(self.lattice).dim

    @property
    def bits_per_coordinate(self) -> float:
        """Number of bits per coordinate that is sent, stages / L."""
        return self.stages / self.block_dim

    @property
    def anonymity_by_stage(self) -> tuple[tuple[int, int], ...]:
        """For each stage, the fewest points that its bit, before randomising, leaves possible, and all."""
        return tuple((smallest_half(table), len(table.points)) for table in self._design.tables)

    @property
    def anonymity_set_size(self) -> int:
        """Fewest codebook points that a block's bits, before randomising, leave possible (the paper's k).

        It is the product over stages, whose codewords are independent. It is no privacy guarantee: it does
        not bound odds, and every round that repeats the point makes it smaller. One stage's bit may identify
        its point, and updates in range may not reach every point of a lattice. Randomised response bounds
        odds by e^epsilon a bit.
        """
        return math.prod(consistent for consistent, _ in self.anonymity_by_stage)

    def blocks(self, context: RoundContext) -> int:
        """Return M = ceil(dim / L), the number of blocks of an update."""
        return -(-context.dim // self.block_dim)

    def blocks_sent(self, context: RoundContext) -> int:
        """Return the number of blocks in a message. Each block is one bit per stage."""
        if self.blocks_per_round is not None:
            return min(self.blocks_per_round, self.blocks(context))
        if self.epsilon_scope == "bit":
            return self.blocks(context)
        return best_block_count(self._epsilons, self.stages, self.blocks(context))

    def ranges(self, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return centre and radius of every segment in this round, after the decay."""
        decay = 1.0 if self.decay_rounds is None else self.decay_rounds / (self.decay_rounds + context.round)
        return context.center, context.radius * decay

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        # a tuple of epsilons needs an entry for every client
        self._check_entries(num_clients)
        return super().group_sizes(num_clients)

    def _check_entries(self, num_clients: int) -> None:
        if isinstance(self.epsilon, tuple) and len(self.epsilon) < num_clients:
            raise ValueError(
                f"epsilon has {len(self.epsilon)} entries for {num_clients} clients. Give one per client."
            )

    # ---- randomness -----------------------------------------------------------------------------------

    @property
    def _epsilons(self) -> tuple[float, ...]:
        """Budgets of one message (one bit, with "bit") of every client, or one entry if all are equal."""
        epsilons = self.epsilon if isinstance(self.epsilon, tuple) else (self.epsilon,)
        rounds = self.rounds
        return epsilons if rounds is None else tuple(bit_epsilon(epsilon, rounds) for epsilon in epsilons)

    def coin(self, client: int, context: RoundContext) -> CoinThresholds:
        """Return one client's randomised response, which flips a bit if its private word is below `low`.

        Raises:
            ValueError: If epsilon is a tuple without an entry for the client, or is too small for its bits.
        """
        return self._coins([client], context)[0]

    def _coins(self, clients: Sequence[int], context: RoundContext) -> list[CoinThresholds]:
        epsilons = self._epsilons
        bits = 1 if self.epsilon_scope == "bit" else self.stages * self.blocks_sent(context)
        if not isinstance(self.epsilon, tuple):
            return [_thresholds(bit_epsilon(epsilons[0], bits))] * len(clients)
        if unknown := [client for client in clients if not 0 <= client < len(epsilons)]:
            raise ValueError(f"epsilon has {len(epsilons)} entries, none for client {unknown[0]}. Add them.")
        return [_thresholds(bit_epsilon(epsilons[client], bits)) for client in clients]

    def _flips(self, clients: Sequence[int], context: RoundContext) -> NDArray[np.uint32]:
        """Return the flip thresholds of several clients."""
        return np.array([coin.low for coin in self._coins(clients, context)], np.uint32)

    def _keep(self, clients: Sequence[int], context: RoundContext) -> Floats:
        """Return the shrinkage of a bit by randomised response, tanh(epsilon / 2), of several clients."""
        return 1.0 - 2.0 * self._flips(clients, context).astype(np.float64) / 2.0**32

    @staticmethod
    def _seed(rand: PublicRandomness) -> int:
        """Return the public seed of the round's codewords, dithers and blocks."""
        return int(rand.public("cpa words and dither").words64(1)[0])

    def _keys(self, clients: Sequence[int], context: RoundContext, rand: PublicRandomness) -> Keys:
        """Return the keys of every stage's codewords and of the dither, `(stages + 1, len(clients))`."""
        seed, purposes = self._seed(rand), [(stage, CODEWORD_TAG) for stage in range(self.stages)]
        purposes.append((0, DITHER_TAG))
        return np.stack([prf_bases(seed, context.round, clients, *purpose) for purpose in purposes])

    def chosen_blocks(
        self, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> NDArray[np.int64] | None:
        """Return the blocks that clients send, `(len(clients), blocks_sent)`, ascending. None: all."""
        blocks, sent = self.blocks(context), self.blocks_sent(context)
        if sent == blocks:
            return None
        chosen = np.empty((len(clients), sent), np.int64)
        for row, key in enumerate(prf_bases(self._seed(rand), context.round, clients, 0, BLOCKS_TAG)):
            choose_blocks(key, blocks, chosen[row])
        return chosen

    # ---- encoding -------------------------------------------------------------------------------------

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are uint8 bits, all blocks of the coarsest stage first
        if self.rounds is not None and context.round >= self.rounds:
            raise ValueError(
                f"epsilon covers {self.rounds} rounds, but this is round number {context.round + 1}. "
                "Set rounds to the rounds of the whole run."
            )
        clients, design = rand.clients, self._design
        rows = update.detach().reshape(len(clients), context.dim).float()
        chosen, keys = self.chosen_blocks(clients, context, rand), self._keys(clients, context, rand)
        coins = [rand.private(client, "cpa coins").fill for client in clients]
        flips = self._flips(clients, context)  # randomised response of each codeword bit
        center, radius = self.ranges(context)
        ranges = segment_lines(context.segments, center, 1.0 / radius)
        values, blocks = rows.contiguous().numpy(), self.blocks(context)
        outside = 0
        if chosen is not None:
            gathered = np.empty((*chosen.shape, self.block_dim))
            outside = gather_blocks(values, ranges, design.limit, chosen, gathered)
            # gathered blocks are in units of the radius already
            values, blocks = gathered.reshape(len(clients), -1), chosen.shape[1]
            ranges = np.array([[values.shape[1]], [0.0], [1.0]])
        bits, clipped_here = encode_updates(design, values, ranges, blocks, keys, coins, flips)
        outside = clipped_here if chosen is None else outside
        clipped = min(outside * self.block_dim, update.numel())
        return Message(bits.reshape(*update.shape[:-1], -1), bits.numel(), clipped)

    # ---- decoding -------------------------------------------------------------------------------------

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        sent, size = self.blocks_sent(context), self.block_dim
        expected = (len(clients), self.stages * sent)
        if tuple(symbols.shape) != expected:
            raise ValueError(f"messages must have shape {expected}, got {tuple(symbols.shape)}")
        if symbols.is_floating_point() or (symbols.numel() and not 0 <= symbols.min() <= symbols.max() <= 1):
            raise ValueError("messages must contain bits, 0 or 1. Drop the client that sent something else.")
        bits = symbols.to(torch.uint8).reshape(len(clients), self.stages, sent).contiguous()
        chosen, keys = self.chosen_blocks(clients, context, rand), self._keys(clients, context, rand)
        keep, design = self._keep(clients, context), self._design
        dithered = self.dither == "subtractive"
        if chosen is None:
            total = sum_messages(design, bits, keys, dithered, keep, self.decoder, self.threshold)
        else:
            blocks = self.blocks(context)
            # dividing by `keep` undoes randomised response
            ones = decode_messages(design, bits, keys, dithered, keep, self.decoder)
            total = torch.zeros(blocks, size, dtype=torch.float64)
            at = torch.from_numpy(chosen).flatten()
            # dividing by the probability that a block is sent keeps the sum unbiased
            total.index_add_(0, at, ones.flatten(0, 1), alpha=blocks / sent)
        center, radius = self.ranges(context)
        summed = total.reshape(-1)[: context.dim].double()
        return decode_total(summed, context.segments, len(clients) * center.double(), radius)

    def num_symbols(self, context: RoundContext) -> int:
        """Return one bit for every stage of every block that is sent."""
        return self.stages * self.blocks_sent(context)

    def code(self, context: RoundContext) -> FixedLength:
        """Return one bit per symbol."""
        return FixedLength(1)

    # ---- error and privacy ------------------------------------------------------------------------------

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor | None:
        """Bound the decoder's second moment plus the quantiser's error, less the smallest squared input.

        If a message contains m of M blocks, the bound is M / m times that of the second moment of a decoded
        block. None for a thresholded histogram, whose error depends on the data.
        """
        if self.threshold:
            return None
        rarity = self.blocks(context) / self.blocks_sent(context)
        total = 0.0
        for keep, count in Counter(self._keep(clients, context).tolist()).items():
            if rarity == 1.0:
                total += count * worst_variance(self._design, self.dither, self.decoder, keep)
            else:
                total += count * rarity * worst_second_moment(self._design, self.dither, keep)
        return self.ranges(context)[1] ** 2 * total / len(clients) ** 2

    @property
    def price_grows_with_dim(self) -> bool:
        # a budget that is divided among fewer blocks may compose worse
        return self.epsilon_scope == "bit"

    def without_noise(self, context: RoundContext) -> CPA:
        # a message keeps its number of blocks
        if self.epsilon_scope == "bit":
            return replace(self, epsilon=math.inf)
        return replace(self, epsilon=math.inf, blocks_per_round=self.blocks_sent(context))

    def advice(self, claim: PrivacyClaim) -> str:
        return "fewer blocks a round (blocks_per_round, or epsilon_scope='round'), or fewer rounds"

    def influence(self, client: int, context: RoundContext) -> float:
        """Return the largest pull of one client on a block of the sum, over the largest honest block.

        A smaller epsilon and a smaller share of blocks increase it. A subtracted dither adds to it.
        """
        keep = float(self._keep([client], context)[0])
        pull = longest_pull(self._design, self.decoder, keep)
        if self.dither == "subtractive":
            pull += lattice(self._design.name).covering_radius * self._design.step
        return pull * self.blocks(context) / self.blocks_sent(context) / self._design.limit

    def protection_groups(self, num_clients: int) -> tuple[tuple[int, ...], ...]:
        if not isinstance(self.epsilon, tuple):
            return super().protection_groups(num_clients)
        self._check_entries(num_clients)
        groups: dict[float, list[int]] = {}
        for client, epsilon in enumerate(self.epsilon[:num_clients]):
            groups.setdefault(epsilon, []).append(client)
        return tuple(map(tuple, groups.values()))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return the claims of randomised response on every bit of a message.

        With different epsilons the claim is that of the client with the least protection, even if it is not
        in this cohort, because another round draws another cohort.
        """
        clients = range(len(self.epsilon)) if isinstance(self.epsilon, tuple) else context.cohort
        return self._claims(min(self._coins(clients, context), key=lambda c: c.low), context)

    def claims_about(self, client: int, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # the claim follows from the client's own epsilon
        return self._claims(self.coin(client, context), context)

    def _claims(self, coin: CoinThresholds, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return claims that hold for any codeword, dither and choice of blocks.

        The paper states epsilon for a round, but it holds for a bit. The bits of a message are functions of
        the same update, so they compose. Public randomness chooses the blocks of a message, independently of
        the update. The choice therefore costs no privacy and gives no amplification, it only lowers the
        number of bits.
        """
        sent = self.blocks_sent(context)
        if not coin.low:
            return no_guarantee(
                "epsilon is infinite: the update and the server's randomness determine every bit, and an "
                f"anonymity set of {self.anonymity_set_size} is no guarantee",
                self.stages * sent,
            )
        pair = randomized_response_pair(*coin.probabilities)
        drawn = (_DRAWN,) if sent < self.blocks(context) else ()
        loss = PmfPairs((pair,), "randomised response on one bit, all bits of a message")
        unit = Unit.COORDINATE if self.block_dim == 1 else Unit.BLOCK
        stated = ARBITRARY, FRESH, _KNOWN, *drawn
        claims = same_for_all(loss, self.stages * sent, stated, unit_losses=self.stages, unit=unit)
        return tuple(
            replace(claim, assumptions=claim.assumptions + _SPECIAL.get(claim.adversary, ()))
            for claim in claims
        )
