"""Bugs that broke, or would break, a guarantee, planted one by one; the audit must catch every one."""

import copy
import math
from dataclasses import dataclass, replace
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import torch

import lightning_fedq as fedq
from lightning_fedq.functional.exact_error.decompose import Special
from lightning_fedq.functional.one_bit import coupled_coins
from lightning_fedq.functional.one_bit.coupled_coins import flip_threshold
from lightning_fedq.functional.one_bit.threshold_coin import WORD_BITS
from lightning_fedq.keys.randomness import ClientRandomness, Stream
from lightning_fedq.mechanisms import rotated_axes, rotated_coins
from lightning_fedq.mechanisms.bases.claims import independent_claims
from lightning_fedq.mechanisms.bases.one_bit import COINS
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.wire.coding import FixedLength
from tests.functional.one_bit.oracle import one_bit_quantize, one_bit_thresholds

# ---- the mechanisms of section 8 of the specification of useful privacy ----------------------------------


class TooFewFlips(fedq.PairedCoins):
    """The pair's secret is hidden half as well as the claim needs."""

    def encode(self, update, context, rand):
        with patch.object(coupled_coins, "flip_threshold", lambda coin: flip_threshold(coin) // 2):
            return super().encode(update, context, rand)


class AnyAxisIsAnOther(fedq.RotatedAxes):
    """Who does not send a preferred axis draws among all of them, the preferred ones too."""

    def encode(self, update, context, rand):
        drawn = Stream.uniform_below

        def below(stream, bound, count):
            choice = self.choice(context.dim)
            everything = 2 * choice.size
            if bound != everything - choice.num_top:
                return drawn(stream, bound, count)
            # the place among the others, or, for the last k, one of the preferred: moved on to a top axis
            place = drawn(stream, everything, count)
            if int(place[0]) < bound:
                return place
            raise _PreferredAfterAll(int(place[0]) - bound)

        any_of_all = patch.object(rotated_axes, "draw_preferred", _draw_any)
        with patch.object(Stream, "uniform_below", below), any_of_all:
            return super().encode(update, context, rand)


class _PreferredAfterAll(Exception):
    """The draw among all axes has met a preferred one; its place among them."""


def _draw_any(preferred, num_options, threshold, stream, draw=rotated_axes.draw_preferred):
    try:
        return draw(preferred, num_options, threshold, stream)
    except _PreferredAfterAll as met:
        return int(preferred[met.args[0]])


class NormIsNotClipped(fedq.RotatedCoins):
    """Only the range of every rotated coordinate is clipped, and no norm."""

    def encode(self, update, context, rand):
        with patch.object(rotated_coins, "unit_ball_factor", lambda row, bound: (1.0 / bound, False)):
            return super().encode(update, context, rand)


# ---- who knows what a pair shares: caught by the contract -------------------------------------------------
class _PublicPeers:
    def encode(self, update, context, rand):
        public = redirected(rand, peer=lambda group, purpose: rand.public(f"{purpose} {group}"))
        return super().encode(update, context, public)


class SecretFromThePublicStream(_PublicPeers, fedq.PairedCoins):
    """What the pair shares, everybody knows."""


class RoundingFromThePublicStream(_PublicPeers, fedq.RotatedCoins):
    """The words that a pair shares, everybody knows."""


class HalfOfTheSecretPublic(fedq.PairedCoins):
    """Every other byte of the secret is drawn from the public stream."""

    def encode(self, update, context, rand):
        class Mixed:
            def __init__(self, secret, public):
                self._both = secret, public

            def fill(self, out):
                other = np.empty_like(out)
                self._both[0].fill(out)
                self._both[1].fill(other)
                out[::2] = other[::2]

        def peer(group, purpose):
            return Mixed(rand.peer(group, purpose), rand.public(f"{purpose} {group}"))

        return super().encode(update, context, redirected(rand, peer=peer))


# ---- caught by layer B: mechanisms that claim more than they keep -------------------------------------
class AlphaOffByOne(fedq.LDPQ):
    """The coin of a larger epsilon than the claimed one."""

    def encode(self, update, context, rand):
        return fedq.LDPQ(1.31 * self.epsilon_per_coordinate).encode(update, context, rand)


class WrongClipping(fedq.LDPQ):
    """Inputs are clipped to twice the range that the probabilities are made for."""

    def encode(self, update, context, rand):
        coin = self.coin
        middle, reach = 2 ** (WORD_BITS - 1), coin.high - coin.low
        rows = update.reshape(len(rand.clients), context.dim)
        bits = []
        for row, client in zip(rows, rand.clients, strict=True):
            words = torch.from_numpy(rand.private(client, COINS).words(context.dim).astype(np.int64))
            thresholds = middle + (row.double().clamp(-2.0, 2.0) * 0.5 * reach).to(torch.int64)
            bits.append((words < thresholds).to(torch.uint8))
        message = super().encode(update, context, rand)
        return replace(message, symbols=torch.stack(bits))


class BitsReusedBetweenRounds(fedq.LDPQ):
    """The stream's address lacks the round."""

    def encode(self, update, context, rand):
        again = ClientRandomness.__new__(ClientRandomness)
        again.__dict__.update(rand.__dict__)
        again._address = b"the same in every round"
        return super().encode(update, context, again)


class LayerMissingInAddress(fedq.LDPQ):
    """Every layer starts its stream anew."""

    def encode(self, update, context, rand):
        rows = update.reshape(len(rand.clients), context.dim)
        message = super().encode(update, context, rand)
        parts, start = [], 0
        for size in context.segments:
            layer = replace(
                context, segments=(size,), center=torch.zeros(1).double(), radius=torch.ones(1).double()
            )
            parts.append(super().encode(rows[:, start : start + size], layer, rand).symbols)
            start += size
        return replace(message, symbols=torch.cat(parts, 1))


@dataclass(frozen=True)
class PairWithoutPrivateCoins(fedq.CorBin):
    """Shares every bit of the word and claims what independent coins give."""

    shared_bits: int | None = None

    def claims(self, context):
        return independent_claims(self.coin, context)


@dataclass(frozen=True)
class PrivateCoinsFromTheSharedStream(fedq.CorBin):
    """The low bits come from the pair's stream too."""

    shared_bits: int | None = 1

    def coupling(self, group, rand):
        return fedq.CorBin(self.epsilon_per_coordinate, None).coupling(group, rand)


class ResponseTwiceWithTheSameBits(fedq.LDPQ):
    """A second randomised response that reads the first one's words takes the first one back."""

    def encode(self, update, context, rand):
        message = super().encode(update, context, rand)
        rows = update.reshape(len(rand.clients), context.dim)
        first = [
            torch.from_numpy(rand.private(client, COINS).words(context.dim) < self.coin.high)
            for client in rand.clients
        ]
        truth = (rows > 0).to(torch.uint8)
        kept = torch.stack(first)
        once = torch.where(kept, truth, 1 - truth)
        return replace(message, symbols=torch.where(kept, once, 1 - once))


class LastCoordinateInTheClear(fedq.LDPQ):
    """The loop over coordinates ends one too early."""

    def encode(self, update, context, rand):
        message = super().encode(update, context, rand)
        rows = update.reshape(len(rand.clients), context.dim)
        message.symbols[:, -1] = (rows[:, -1] > 0).to(torch.uint8)
        return message


@dataclass(frozen=True)
class PartnersSwapped(fedq.CorBin):
    """Both of a pair take the first one's part, so that their errors add up."""

    shared_bits: int | None = 5

    def _streams(self, groups, rand):
        order, streams, places, couplings = super()._streams(groups, rand)
        places[:, 1] = 0  # ranks
        return order, streams, places, couplings


class PlannedCohortClaimed(fedq.LDPQ):
    """Claims the hiding of the 50 clients that were planned, whoever is there."""

    def claims(self, context):
        planned = replace(context, groups=tuple((client,) for client in range(50)))
        return independent_claims(self.coin, planned)


class PaddingInTheClear(fedq.LDPQ):
    """The bits that fill up the last byte are a copy of data that was not randomised."""

    def code(self, context):
        return _LeakyPadding(1)

    def encode(self, update, context, rand):
        message = super().encode(update, context, rand)
        last = update.reshape(len(rand.clients), -1)[:, -1] > 0
        _LeakyPadding.leaks = {
            row.numpy().tobytes(): bool(leak) for row, leak in zip(message.symbols, last, strict=True)
        }
        return message


class _LeakyPadding(FixedLength):
    leaks: ClassVar[dict[bytes, bool]] = {}
    """Each client's own, by its message."""

    def pack(self, symbols):
        stream = super().pack(symbols)
        return stream[:-1] + bytes([stream[-1] | int(self.leaks.get(symbols.numpy().tobytes(), False))])


# ---- quieter: a tenth to a fifth of the noise is missing, and all of it claimed --------------------------
class GaussianATenthQuieter(fedq.GaussianNoise):
    """Nine tenths of the standard deviation."""

    @property
    def _quiet(self):
        return fedq.GaussianNoise(self.clip_norm, 0.9 * self.multiplier)

    def encode(self, update, context, rand):
        return self._quiet.encode(update, context, rand)

    def decode(self, symbols, clients, context, rand):
        return self._quiet.decode(symbols, clients, context, rand)

    def code(self, context):
        return self._quiet.code(context)


class DiscreteGaussianAnEighthQuieter(fedq.DistributedDiscreteGaussian):
    """Seven eighths of the standard deviation."""

    def _client_noise(self, client, context, rand):
        quiet = fedq.DistributedDiscreteGaussian(**(vars(self) | {"local_sigma": 0.875 * self.local_sigma}))
        return quiet._client_noise(client, context, rand)


class CoinsAFifthLouder(fedq.RotatedCoins):
    """The coin of 1.2 times the claimed epsilon."""

    def encode(self, update, context, rand):
        loud = fedq.RotatedCoins(**(vars(self) | {"epsilon_per_bit": 1.2 * self.epsilon_per_bit}))
        return loud.encode(update, context, rand)


class AxesAThirdLouder(fedq.RotatedAxes):
    """The choice of 1.3 times the claimed epsilon."""

    def encode(self, update, context, rand):
        return fedq.RotatedAxes(1.3 * self.epsilon_per_message, self.clip_norm).encode(update, context, rand)


# ---- caught by layer B: claims about the released sum, and about whole vectors -----------------------------
class NoiseOfThePlannedCohort(fedq.LayeredGaussian):
    """Every client's share of the noise is made for 50 clients, of whom three are there."""

    def sigma(self, context):
        return 2.0 * self.noise_multiplier / 50 * math.sqrt(50 / len(context.cohort))


class MixtureWithoutShift(fedq.AggregateGaussian):
    """The random shift B is left out, so that the error is a scaled Irwin-Hall."""

    def special(self, context, rand):
        places, scale, shift = super().special(context, rand)
        return Special(places, scale, 0.0 * shift)


class SelectionIgnored(fedq.SIGM):
    """Every coordinate is sent, whatever the sampling probability that the claim counts on."""

    def selected(self, client, context, rand):
        return np.ones(context.dim, bool)


class NoiseSharedButClaimedWhole(fedq.DistributedDiscreteGaussian):
    """Each client adds its share of the noise only, and claims all of it for its own message."""

    @property
    def steps(self):
        return self.local_sigma / self.granularity / math.sqrt(3.0)

    def claims(self, context):
        return fedq.DistributedDiscreteGaussian(self.clip_norm, self.local_sigma, self.granularity).claims(
            context
        )


class ClippedInTheWrongNorm(fedq.GaussianNoise):
    """Every coordinate is clipped to what the whole vector may have: right for one, wrong for many."""

    def clipping_factors(self, rows, context):
        shape = len(rows), len(context.segments)
        return torch.full(shape, 1.0 / self.clip_norm, dtype=torch.float64), 0


class ClippedToTwiceTheNorm(fedq.GaussianNoise):
    """The factor 2 of substitution is forgotten."""

    @property
    def multiplier(self):
        return 0.5 * super().multiplier

    def claims(self, context):
        return fedq.GaussianNoise(self.clip_norm, self.noise_multiplier).claims(context)


class OddClientsReuseTheirBits(fedq.LDPQ):
    """A: the private stream's address lacks the round, for odd clients only."""

    def encode(self, update, context, rand):
        again = copy.copy(rand)
        again._address, again._prefixes = b"the same in every round", {}

        def private(client, purpose):
            streams = again if client % 2 else rand
            return ClientRandomness.private(streams, client, purpose)

        return super().encode(update, context, redirected(rand, private=private))


class SecondLayerOff(fedq.LDPQ):
    """C: in every layer but the first, the threshold is 2^-16 too high."""

    def encode(self, update, context, rand):
        message = super().encode(update, context, rand)
        rows = update.detach().reshape(len(rand.clients), context.dim).float()
        center, radius = context.expand(context.center), context.expand(context.radius)
        later = torch.arange(context.dim) >= context.segments[0]
        thresholds = one_bit_thresholds(rows, center, radius, self.coin) + later * 2 ** (WORD_BITS - 16)
        drawn = [rand.private(client, COINS).words(context.dim).astype(np.int64) for client in rand.clients]
        bits = (torch.from_numpy(np.stack(drawn)) < thresholds).to(torch.uint8)
        return replace(message, symbols=bits.reshape(update.shape))


def skip_the_grid(total, grid):
    """D: stands for `round_to_grid` and rounds nothing."""
    return total


SPREAD = [
    NoiseOfThePlannedCohort(1.0, 1 / 32, entropy_code="elias"),
    MixtureWithoutShift(1.0, 1 / 32, entropy_code="elias"),
    SelectionIgnored(1.0, 1.0, 0.5),
    NoiseSharedButClaimedWhole(1.0, 1 / 16, 0.01),
    ClippedInTheWrongNorm(1.0, 1.0),
]
CONCENTRATED = [ClippedToTwiceTheNorm(1.0, 1.0)]


# ---- caught by the audit of knowledge: right laws from streams that the adversary holds --------------------
def redirected(rand, **streams):
    """The same randomness, but some kinds of streams come from elsewhere."""
    other = copy.copy(rand)
    for kind, stream in streams.items():
        setattr(other, kind, stream)
    return other


def shared_for_private(rand):
    """What is private comes from what client and server share."""
    return redirected(rand, private=lambda client, purpose: rand.shared_with_server(client, purpose))


class _SharedForPrivate:
    def encode(self, update, context, rand):
        return super().encode(update, context, shared_for_private(rand))


class _SelectedInPublic:
    def selected(self, client, context, rand):
        return super().selected(client, context, redirected(rand, members=rand.public))


class NoiseSharedWithTheServer(_SharedForPrivate, fedq.GaussianNoise):
    """F: the noise comes from the stream that the server holds too."""


class PublicSelection(_SelectedInPublic, fedq.SIGM):
    """G: who is selected is drawn from the public stream, and amplification still claimed."""


class PublicSelectionOfCSGM(_SelectedInPublic, fedq.CSGM):
    """G again."""


class ModularNoiseSharedWithTheServer(_SharedForPrivate, fedq.DistributedDiscreteGaussian):
    """H: the discrete noise comes from the stream that the server holds too."""


class PublicMixture(fedq.AggregateGaussian):
    """I: scale and shift, A and B, are drawn from the public stream."""

    def special(self, context, rand):
        return super().special(context, redirected(rand, members=rand.public))


class PublicNoise(fedq.CSGM):
    """J: the noise of the mean is drawn from the public stream."""

    def noise_share(self, client, context, rand):
        def public(client, purpose):
            return rand.public(f"{purpose} {client}")

        return super().noise_share(client, context, redirected(rand, shared_with_server=public))


# ---- caught by layer A: too small to show at 32 bits -----------------------------------------------------
def tie_break(update, words, center, radius, coin):
    """`<=` for `<`."""
    return (words <= one_bit_thresholds(update, center, radius, coin)).to(torch.uint8)


def modulus_minus_one(update, words, center, radius, coin):
    """Words are drawn modulo 2^k - 1."""
    return one_bit_quantize(update, words % (2**coin.word_bits - 1), center, radius, coin)


def negative_instead_of_complement(words, shared, shift, mask, flip):
    """The partner uses 1 - U, in words 2^d - Z, where the complement 2^d - 1 - Z is meant."""
    cells = (mask >> shift) + 1
    high = (cells - shared) % cells if flip else shared
    words[:] = (words & ~np.uint32(mask)) | (high.astype(np.uint32) << np.uint32(shift))


# ---- caught in the engine, end to end --------------------------------------------------------------------
def restart_streams(state):
    """A resumed run begins its streams anew, and its ledger forgets that they were used."""
    ledger = {**state["ledger"], "streams": torch.full_like(state["ledger"]["streams"], -1)}
    return {**state, "round": 0, "attempt": 0, "ledger": ledger}


def restart_streams_only(state):
    """The same, but the ledger remembers."""
    return {**state, "round": 0, "attempt": 0}


class SkipsTheFailedRound(RoundEngine):
    """A round that was given up is not paid for, although its messages were sent."""

    def abandon(self):
        if self.plan is not None:
            self.ledger._get_charges(self.ledger._id)[1][list(self.plan.cohort)] -= 1
        super().abandon()


class NanPasses(RoundEngine):
    """Nobody asks whether an update is finite."""

    def _encode_and_add(self, clients, updates):
        with patch("lightning_fedq.rounds.client.sum_of_squares", lambda updates: 0.0):
            super()._encode_and_add(clients, updates)


class _ExactMean(RoundEngine):
    """Adds up the clients' exact updates beside the messages."""

    def start(self):
        self.leaked = 0.0
        return super().start()

    def _encode_and_add(self, clients, updates):
        self.leaked = self.leaked + updates.sum(0)
        super()._encode_and_add(clients, updates)


class RangeFromExactMean(_ExactMean):
    """E: the next range follows from the clients' exact mean, where it has to follow from the decoded one."""

    def finish(self):
        ranges, mean = self.ranges, self.leaked / self.planner.cohort_size
        record = super().finish()
        self.ranges = self.range_rule.following(ranges, self.weights, mean, None, self.segments)
        return record


class NormOfExactMean(_ExactMean):
    """E again: a number of the record is that of the exact mean."""

    def finish(self):
        record = super().finish()
        record.update_norm = float(self.leaked.norm())
        return record


EXACT_MEAN_LEAKS = [RangeFromExactMean, NormOfExactMean]


class ClipPassesNan(fedq.GaussianNoise):
    """Clips by min(1, C / norm), which a norm of NaN passes; harmless while the engine asks first."""

    def clipping_factors(self, rows, context):
        kept = nan_passes(self.clip_norm, rows.double().norm(dim=1)) / self.clip_norm
        return kept[:, None].expand(-1, len(context.segments)), 0


def nan_passes(limit, norms):
    """min(1, C / norm) with a norm of NaN is 1 in plain Python: such a sample is not clipped."""
    return torch.tensor([min(1.0, limit / max(norm, 1e-12)) for norm in norms.tolist()], dtype=norms.dtype)
