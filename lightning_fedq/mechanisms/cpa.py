"""CPA, compressed private aggregation: one bit for a block of L parameters, and its nested version.

Source: Lang, Shlezinger, D'Oliveira, El Rouayheb, CPA for scalable and robust FL over massive networks.
A block is quantised to a point of a finite lattice codebook; the bit is the sign that a random word,
known to the server, has at that point, after randomised response. Nested CPA sends one bit per stage.

Departures, each for a reason: the decoder is unbiased (the paper's is off by N / (N - 1), the authors' code
also leaves out 1 / tanh(epsilon / 2)); the dither that the paper's theorem needs is there and is
subtracted; nesting splits the fine point; the range is what can't be overloaded (`functional.blocks.design`),
and a block beyond it is shrunk to it and counted; one message composes all of its bits (the paper counts a
round as one); coins are integers from private streams. `decoder="paper"`, `decoder="authors_code"` and
`dither="none"` are there to reproduce published numbers.

Ours: a budget for a whole message. Thousands of bits that share it are noise, so that a message then holds
some blocks only, drawn for every client from public randomness and scaled by their rarity; how many is chosen
for the least noise (`functional.blocks.bit_budget`).

At equal range more points make CPA noisier: N = 2 on Z is the best one-bit choice, whatever the number of
clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    AuditCase,
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

_KNOWN = "codewords and dither may be known to the adversary"
_DRAWN = "which blocks are sent may be known to the adversary too; it is drawn without looking at the update"
_BEHIND = ("by post-processing: that others hide a client is not used",)
_SPECIAL = {
    Adversary.SECAGG_SERVER: (
        "messages can't be summed before decoding, so there is no secure aggregation: "
        "the claim is that of the server that sees every message",
    ),
    Adversary.CLIENT: _BEHIND,
    Adversary.OUTSIDER: _BEHIND,
}

_thresholds = lru_cache(maxsize=1 << 14)(coin_thresholds)


@dataclass(frozen=True)
class CPA(Mechanism):
    """Nested lattice code: one bit per block and stage, each sent through randomised response.

    The constructor has many arguments because the paper, its repair and the authors' code differ in each.

    Args:
        epsilon: Local budget, > 0, in nats, `math.inf` for none; of what, says `epsilon_scope`. A tuple gives
            client i its entry i.
        lattice: "Z" (L = 1), or "A2" (2), the hexagonal one.
        levels: Levels of the coarsest stage, >= 2, for Z only; 2 if None.
        codebook_radius: Norm of the outermost points of the coarsest stage at unit scale, for A2 only; 1 if
            None, which are 7 points.
        stages: Bits per block, >= 1.
        nesting: Every further stage splits a cell into nesting^L; 2 if None. Only with stages > 1.
        words: Family of random words; see `functional.blocks.codeword.sign_words`.
        dither: "subtractive" (error independent of the input), "plain" (unbiased, more noise) or "none"
            (biased, as in the authors' code).
        decoder: "unbiased"; "paper", without the correction for balanced words; "authors_code", also
            without the one for randomised response.
        decay_rounds: phi of a range that shrinks as phi / (phi + round), > 0; None keeps it.
        threshold: Set negative frequencies of the cohort's histogram to zero. Less noise, biased, and
            `decode` has to be given the whole cohort at once.
        epsilon_scope: What `epsilon` is spent on: "bit", one bit, of which a message composes `stages` for
            every block; "round", all bits of a message together, pure; "total", those of `rounds` messages.
            A repeated attempt at a round is another message, and charged on top.
        blocks_per_round: Blocks that a message holds, >= 1. If None, all of them, or with "round" and
            "total" as many as make the least noise.
        rounds: Rounds that "total" is for, >= 1; a later one is refused. Only with "total".

    Example:
        >>> CPA(epsilon=0.5).bits_per_coordinate, CPA(epsilon=0.5, lattice="A2").bits_per_coordinate
        (1.0, 0.5)
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
    epsilon_scope: EpsilonScope = "bit"
    blocks_per_round: int | None = None
    rounds: int | None = None

    def __post_init__(self) -> None:
        if self.epsilon == ():
            raise ValueError("epsilon must be a number or a tuple of them, one a client, got ()")
        if self.decay_rounds is not None and not self.decay_rounds > 0:
            raise ValueError(f"decay_rounds must be > 0, got {self.decay_rounds}")
        if self.threshold and self.decoder != "unbiased":
            raise ValueError("a thresholded histogram needs decoder='unbiased'")
        self._check_budget()
        _ = self._design

    def _check_budget(self) -> None:
        if (self.rounds is not None) != (self.epsilon_scope == "total"):
            raise ValueError(
                "rounds goes with epsilon_scope='total', which needs it, "
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
        if self.blocks_per_round is None and self.epsilon_scope == "bit":
            return
        if self.threshold or self.decoder != "unbiased":
            raise ValueError(
                "a message of some blocks only is scaled by their rarity, which needs decoder='unbiased' "
                "and no threshold; use epsilon_scope='bit' without blocks_per_round"
            )

    # ---- geometry -----------------------------------------------------------------------------------

    @property
    def _design(self) -> BlockDesign:
        return block_design(
            self.lattice,
            self.levels,
            self.codebook_radius,
            self.stages,
            self.nesting,
            self.words,
            self.dither != "none",
        )

    @property
    def joint(self) -> bool:
        return self.threshold

    @property
    def block_dim(self) -> int:
        """L, the parameters that share one bit per stage."""
        return lattice(self.lattice).dim

    @property
    def bits_per_coordinate(self) -> float:
        """stages / L, of a coordinate that is sent."""
        return self.stages / self.block_dim

    @property
    def anonymity_by_stage(self) -> tuple[tuple[int, int], ...]:
        """For each stage: points that its bit leaves possible without a coin, at least, and all of them."""
        return tuple((smallest_half(table), len(table.points)) for table in self._design.tables)

    @property
    def anonymity_set_size(self) -> int:
        """Codebook points of a block that its bits leave possible without a coin, at least: the paper's k.

        The product over stages, whose words are independent. No guarantee: it says nothing about odds,
        shrinks with every round that repeats the point, one stage's bit may name its point, updates in range
        may not reach every point (lattices), and a coin replaces it by odds of e^epsilon a bit.
        """
        return math.prod(left for left, _ in self.anonymity_by_stage)

    def blocks(self, context: RoundContext) -> int:
        """M = ceil(dim / L), the blocks of an update."""
        return -(-context.dim // self.block_dim)

    def blocks_sent(self, context: RoundContext) -> int:
        """Blocks that a message holds. Each is one bit per stage."""
        if self.blocks_per_round is not None:
            return min(self.blocks_per_round, self.blocks(context))
        if self.epsilon_scope == "bit":
            return self.blocks(context)
        return best_block_count(self._epsilons, self.stages, self.blocks(context))

    def ranges(self, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Centre and radius of every segment in this round, after the decay."""
        decay = 1.0 if self.decay_rounds is None else self.decay_rounds / (self.decay_rounds + context.round)
        return context.center, context.radius * decay

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        # every client has to have its epsilon
        self._check_entries(num_clients)
        return super().group_sizes(num_clients)

    def _check_entries(self, num_clients: int) -> None:
        if isinstance(self.epsilon, tuple) and len(self.epsilon) < num_clients:
            raise ValueError(
                f"epsilon has {len(self.epsilon)} entries for {num_clients} clients; give one for each"
            )

    # ---- randomness -----------------------------------------------------------------------------------

    @property
    def _epsilons(self) -> tuple[float, ...]:
        """Budgets of one message, or with "bit" of one bit, of every client (one for all, if they agree)."""
        epsilons = self.epsilon if isinstance(self.epsilon, tuple) else (self.epsilon,)
        rounds = self.rounds
        return epsilons if rounds is None else tuple(bit_epsilon(epsilon, rounds) for epsilon in epsilons)

    def coin(self, client: int, context: RoundContext) -> CoinThresholds:
        """The coin of one client's bits: a bit is flipped where its private word is below `low`.

        Raises:
            ValueError: If epsilon is a tuple without an entry for the client, or is too small to be shared.
        """
        return self._coins([client], context)[0]

    def _coins(self, clients: Sequence[int], context: RoundContext) -> list[CoinThresholds]:
        epsilons = self._epsilons
        bits = 1 if self.epsilon_scope == "bit" else self.stages * self.blocks_sent(context)
        if not isinstance(self.epsilon, tuple):
            return [_thresholds(bit_epsilon(epsilons[0], bits))] * len(clients)
        if unknown := [client for client in clients if not 0 <= client < len(epsilons)]:
            raise ValueError(f"epsilon has {len(epsilons)} entries, none for client {unknown[0]}; add them")
        return [_thresholds(bit_epsilon(epsilons[client], bits)) for client in clients]

    def _flips(self, clients: Sequence[int], context: RoundContext) -> NDArray[np.uint32]:
        """Flip thresholds of several clients."""
        return np.array([coin.low for coin in self._coins(clients, context)], np.uint32)

    def _keep(self, clients: Sequence[int], context: RoundContext) -> Floats:
        """tanh(epsilon / 2) of several clients' bits, as attained."""
        return 1.0 - 2.0 * self._flips(clients, context).astype(np.float64) / 2.0**32

    @staticmethod
    def _seed(rand: PublicRandomness) -> int:
        """Seed of the round's codewords, dithers and blocks. Public: nothing hangs on its secrecy."""
        return int(rand.public("cpa words and dither").words64(1)[0])

    def _keys(self, clients: Sequence[int], context: RoundContext, rand: PublicRandomness) -> Keys:
        """Keys of the codewords of every stage, and of the dither, `(stages + 1, len(clients))`."""
        seed, purposes = self._seed(rand), [(stage, CODEWORD_TAG) for stage in range(self.stages)]
        purposes.append((0, DITHER_TAG))
        return np.stack([prf_bases(seed, context.round, clients, *purpose) for purpose in purposes])

    def chosen_blocks(
        self, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> NDArray[np.int64] | None:
        """Which blocks every client sends, `(len(clients), blocks_sent)` ascending. None where it is all."""
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
                f"epsilon is for {self.rounds} rounds and this would be number {context.round + 1}; "
                "give it the rounds of the whole run"
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
            # these are in units of the radius
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
            raise ValueError("messages must hold bits, 0 or 1; drop the client that sent something else")
        bits = symbols.to(torch.uint8).reshape(len(clients), self.stages, sent).contiguous()
        chosen, keys = self.chosen_blocks(clients, context, rand), self._keys(clients, context, rand)
        keep, design = self._keep(clients, context), self._design
        dithered = self.dither == "subtractive"
        if chosen is None:
            total = sum_messages(design, bits, keys, dithered, keep, self.decoder, self.threshold)
        else:
            blocks = self.blocks(context)
            # `keep` is what the coin leaves of a bit; both ends know the dither
            ones = decode_messages(design, bits, keys, dithered, keep, self.decoder)
            total = torch.zeros(blocks, size, dtype=torch.float64)
            at = torch.from_numpy(chosen).flatten()
            # over the chance that a block is sent: unbiased
            total.index_add_(0, at, ones.flatten(0, 1), alpha=blocks / sent)
        center, radius = self.ranges(context)
        summed = total.reshape(-1)[: context.dim].double()
        return decode_total(summed, context.segments, len(clients) * center.double(), radius)

    def num_symbols(self, context: RoundContext) -> int:
        """One bit for every stage of every block that is sent."""
        return self.stages * self.blocks_sent(context)

    def code(self, context: RoundContext) -> FixedLength:
        """One bit a symbol."""
        return FixedLength(1)

    # ---- what is known about error and privacy ----------------------------------------------------------

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor | None:
        """Decoder's second moment plus the quantiser's error, less the least that the points take off.

        Where a message holds m of M blocks: M / m times a bound on the second moment of a decoded block.
        None for a thresholded histogram, whose error depends on the data.
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
    def covers_shorter(self) -> bool:
        # a budget shared out among blocks may compose worse in fewer
        return self.epsilon_scope == "bit"

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # also with an epsilon for every client
        each = tuple(epsilon for epsilon in self._epsilons[:1] * 2 for epsilon in (epsilon, epsilon / 2.0))
        several = replace(self, epsilon=each, epsilon_scope="bit", rounds=None)
        return AuditCase(self), AuditCase(several, title="an epsilon for each client")

    def without_noise(self, context: RoundContext) -> CPA:
        # a message holds as many blocks as before
        if self.epsilon_scope == "bit":
            return replace(self, epsilon=math.inf)
        return replace(self, epsilon=math.inf, blocks_per_round=self.blocks_sent(context))

    def advice(self, claim: PrivacyClaim) -> str:
        return "fewer blocks a round (blocks_per_round, or epsilon_scope='round'), or fewer rounds"

    def lever(self, client: int, context: RoundContext) -> float:
        """Longest pull of one client on a block of the sum over the largest norm of an honest block in range.

        The smaller epsilon and the rarer a block, the longer the lever. A dither that is subtracted counts.
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

    @classmethod
    def plan_settings(cls, params: int) -> dict[str, Mechanism]:
        """All blocks, or as many as an epsilon of the whole message pays for."""
        return {"CPA": cls(1.0), "CPA, some blocks": cls(1.0, epsilon_scope="round")}

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Randomised response on every bit of a message.

        With different epsilons the claim is that of the client with the least protection, whether it is in
        the cohort or not: another round draws another cohort.
        """
        clients = range(len(self.epsilon)) if isinstance(self.epsilon, tuple) else context.cohort
        return self._claims(min(self._coins(clients, context), key=lambda c: c.low), context)

    def claims_about(self, client: int, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # the claims of the client's own coin
        return self._claims(self.coin(client, context), context)

    def _claims(self, coin: CoinThresholds, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Claims for every value of word, dither and choice of blocks.

        The paper states epsilon for a round; it holds for a bit, and the bits of a message are functions of
        the same update, so they compose. Which blocks a message holds is drawn from public randomness, never
        from the update: it needs no privacy, buys no amplification, and only lowers the number of bits.
        """
        sent = self.blocks_sent(context)
        if not coin.low:
            return no_guarantee(
                "epsilon is infinite: a bit is a function of the update and of what the server knows; "
                f"an anonymity set of {self.anonymity_set_size} is no guarantee",
                self.stages * sent,
            )
        pair = randomized_response_pair(*coin.probabilities)
        drawn = (_DRAWN,) if sent < self.blocks(context) else ()
        claims = same_for_all(
            PmfPairs((pair,), "randomised response on one bit, all bits of a message"),
            self.stages * sent,
            (ARBITRARY, FRESH, _KNOWN, *drawn),
            unit_losses=self.stages,
            unit=Unit.COORDINATE if self.block_dim == 1 else Unit.BLOCK,
        )
        return tuple(
            replace(claim, assumptions=claim.assumptions + _SPECIAL.get(claim.adversary, ()))
            for claim in claims
        )
