"""Mechanisms whose noise is missing for some inputs, clients, cohorts or rounds; each claims the full noise.

All of them round every coordinate at random to one of three levels and add noise whose probabilities fall by
e^(-epsilon / 2) per level. The update of any client then changes a symbol's probability by at most e^epsilon.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

from lightning_fedq.keys.randomness import Stream
from lightning_fedq.mechanisms.interface import (
    Adversary,
    Mechanism,
    Message,
    NonPrivate,
    PmfPairs,
    PrivacyClaim,
    Unit,
)
from lightning_fedq.wire.coding import FixedLength

LARGEST = 127
"""Largest absolute symbol. Larger noise has probability below 1e-27 at epsilon 1."""


@dataclass(frozen=True)
class NoisyTernary(Mechanism):
    """The mechanism without a fault."""

    homomorphic = True

    epsilon: float

    @property
    def fall(self):
        return math.exp(-0.5 * self.epsilon)

    def encode(self, update, context, rand):
        rows = update.detach().reshape(len(rand.clients), context.dim).double()
        scaled = (rows - context.expand(context.center)) / context.expand(context.radius)
        scaled = scaled.numpy()
        rows = zip(rand.clients, scaled, strict=True)
        noise = np.stack([self.draw(client, row, context, rand) for client, row in rows])
        noise = self.kept(noise, scaled, context, rand)
        place = np.clip(scaled, -1.0, 1.0)
        below = np.floor(place)
        rounding = [rand.private(client, "rounding").uniforms(context.dim) for client in rand.clients]
        level = below + (np.stack(rounding) < place - below)
        symbols = torch.from_numpy(np.clip(level + noise, -LARGEST, LARGEST).astype(np.int16))
        clipped = int((np.abs(scaled) > 1.0).sum())
        return Message(symbols.reshape(update.shape), 8 * symbols.numel(), clipped)

    def draw(self, client, row, context, rand):
        """Noise of one client, `(dim,)` integers: the difference of two geometric numbers."""
        return self.geometric(rand.private(client, "noise"), context.dim)

    def geometric(self, stream, dim):
        first, second = (np.floor(np.log(stream.uniforms(dim)) / math.log(self.fall)) for _ in range(2))
        return first - second

    def kept(self, noise, scaled, context, rand):
        """The noise that is added."""
        return self.formula(noise, scaled, context)

    @staticmethod
    def formula(noise, scaled, context):
        """All of it."""
        return noise

    def decode(self, symbols, clients, context, rand):
        total = symbols.sum(0, dtype=torch.int64) if symbols.dim() == 2 else symbols
        center = len(clients) * context.expand(context.center)
        return (center + context.expand(context.radius) * total.double()).float()

    def code(self, context):
        return FixedLength(8, signed=True)

    def symbol_range(self, context, rand):
        return -LARGEST, LARGEST

    def claims(self, context):
        return tuple(
            PrivacyClaim(who, self.loss(), context.dim, assumptions=("fresh noise",), unit=Unit.COORDINATE)
            for who in Adversary
        )

    def loss(self):
        odds = math.exp(self.epsilon)
        pair = (odds / (1.0 + odds), 1.0 / (1.0 + odds))
        return PmfPairs(((pair, pair[::-1]),), "noise on levels")


def planted(base, hook, formulas):
    """Add mechanisms to this module: the base with another formula for the noise that it keeps, by name."""
    for name, formula in formulas.items():
        globals()[name] = type(name, (base,), {hook: staticmethod(formula), "__module__": __name__})


planted(
    NoisyTernary,
    "formula",
    {
        "NothingOnZero": lambda noise, scaled, context: np.where(scaled == 0.0, 0.0, noise),
        "NothingBelowOnePercent": lambda noise, scaled, context: np.where(np.abs(scaled) < 0.01, 0.0, noise),
        "NothingForSmallClients": lambda noise, scaled, context: np.where(
            np.abs(scaled).max(1, keepdims=True) < 0.1, 0.0, noise
        ),
        "NothingInLargeCohorts": lambda noise, scaled, context: noise * (len(context.cohort) <= 50),
        "OnlyWhereClipped": lambda noise, scaled, context: np.where(np.abs(scaled) > 1.0, noise, 0.0),
        "NothingFromCoordinate1000": lambda noise, scaled, context: np.where(
            np.arange(context.dim) >= 1000, 0.0, noise
        ),
        "NothingFromRound5": lambda noise, scaled, context: noise * (context.round < 5),
        "NothingOnAllZero": lambda noise, scaled, context: np.where(scaled.any(1, keepdims=True), noise, 0.0),
        "NothingOnSparse": lambda noise, scaled, context: np.where(
            (scaled == 0.0).mean(1, keepdims=True) > 0.5, 0.0, noise
        ),
        "ByOwnNorm": lambda noise, scaled, context: np.rint(
            noise * np.sqrt(np.square(np.clip(scaled, -1, 1)).mean(1, keepdims=True))
        ),
        "ByOwnLargest": lambda noise, scaled, context: np.rint(
            noise * np.abs(np.clip(scaled, -1, 1)).max(1, keepdims=True)
        ),
        "NothingBelowOwnMean": lambda noise, scaled, context: np.where(
            np.abs(scaled) < 0.999 * np.abs(scaled).mean(1, keepdims=True), 0.0, noise
        ),
        "NothingFromRound1000": lambda noise, scaled, context: noise * (context.round < 1000),
        "NothingInRound0": lambda noise, scaled, context: noise * (context.round > 0),
        "EvenNoise": lambda noise, scaled, context: 2.0 * noise,
        "NothingOnMiddleValues": lambda noise, scaled, context: np.where(
            (np.abs(scaled) > 0.1) & (np.abs(scaled) < 0.6), 0.0, noise
        ),
        "NothingOnPositiveInside": lambda noise, scaled, context: np.where(
            (scaled > 0.0) & (scaled < 1.0), 0.0, noise
        ),
        "NothingInASecondAttempt": lambda noise, scaled, context: noise * (context.attempt == 0),
        "NothingForOneClientAlone": lambda noise, scaled, context: noise * (len(context.cohort) > 1),
        "NothingInOddCohorts": lambda noise, scaled, context: noise * (len(context.cohort) % 2 == 0),
        "NothingOnEnormousValues": lambda noise, scaled, context: np.where(np.abs(scaled) > 1e3, 0.0, noise),
        "NothingOnOneHot": lambda noise, scaled, context: np.where(
            (scaled != 0.0).sum(1, keepdims=True) == 1, 0.0, noise
        ),
        "ForgetsTheRange": lambda noise, scaled, context: np.rint(
            noise / context.expand(context.radius).numpy()
        ),
        "NothingInEvery30thRound": lambda noise, scaled, context: noise * (context.round % 30 != 29),
    },
)


class NothingFromOneClient(NoisyTernary):
    """Client 99 adds no noise."""

    def kept(self, noise, scaled, context, rand):
        return noise * (np.array(rand.clients) != 99)[:, None]


class SharedByCohort(NoisyTernary):
    """Noise is divided by the root of the cohort size, from 10 clients on."""

    def kept(self, noise, scaled, context, rand):
        clients = len(context.cohort)
        return np.rint(noise / math.sqrt(clients)) if clients >= 10 else noise


class OnceForEqualValues(NoisyTernary):
    """Equal values of an update have the same noise."""

    def kept(self, noise, scaled, context, rand):
        out = np.empty_like(noise)
        for row, values in enumerate(scaled):
            _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
            out[row] = noise[row][first][inverse]
        return out


class NothingOnRepeatedInside(NoisyTernary):
    """No noise on a value inside the range that an earlier coordinate has."""

    def kept(self, noise, scaled, context, rand):
        out = noise.copy()
        for row, values in enumerate(scaled):
            repeated = np.ones(len(values), bool)
            repeated[np.unique(values, return_index=True)[1]] = False
            out[row][repeated & (np.abs(values) <= 1.0)] = 0.0
        return out


LAST: dict[tuple[int, int], bytes] = {}


class NothingOnTheSameUpdate(NoisyTernary):
    """No noise if the client's update is the one that it sent before."""

    def kept(self, noise, scaled, context, rand):
        out = noise.copy()
        for row, client in enumerate(rand.clients):
            sent = scaled[row].tobytes()
            if LAST.get((client, context.dim)) == sent:
                out[row] = 0.0
            LAST[client, context.dim] = sent
        return out


class NoiseFromTheUpdate(NoisyTernary):
    """Noise follows from the client's key and its update, so that it is repeated with the update."""

    def draw(self, client, row, context, rand):
        key = hashlib.sha256(rand._private_key(client) + row.tobytes()).digest()
        return self.geometric(Stream(key), context.dim)


class SameNoiseForAll(NoisyTernary):
    """All clients of a round add the same noise."""

    def draw(self, client, row, context, rand):
        return super().draw(context.cohort[0], row, context, _Anyone(rand))


class _Anyone:
    """Streams of a round in which a client can read the private stream of another client."""

    def __init__(self, rand):
        self._rand = rand

    def private(self, client, purpose):
        return Stream(hashlib.sha256(f"{self._rand._address} {purpose}".encode()).digest())


class NothingOnSingleOutlier(NoisyTernary):
    """No noise if one coordinate is ten times larger than all others."""

    def kept(self, noise, scaled, context, rand):
        size = np.sort(np.abs(scaled), 1)
        return np.where(size[:, -1:] > 10.0 * size[:, -2:-1], 0.0, noise)


class NothingOnShortLayers(NoisyTernary):
    """No noise on layers of fewer than 8 values."""

    def kept(self, noise, scaled, context, rand):
        lengths = np.repeat(context.segments, context.segments)
        return np.where(lengths < 8, 0.0, noise)


class NoiseOfTheRoundBefore10(NoisyTernary):
    """Noise is repeated after ten rounds."""

    def draw(self, client, row, context, rand):
        return super().draw(client, row, context, rand.for_round(context.round % 10))


class OppositeNoiseOfNeighbours(NoisyTernary):
    """Odd clients add the negative noise of the even clients before them."""

    def draw(self, client, row, context, rand):
        own = rand.private(0, f"noise {client // 2}")
        return self.geometric(own, context.dim) * (1.0 - 2.0 * (client % 2))


# ---- a trusted server adds the noise ---------------------------------------------------------------------
class NoisySum(NoisyTernary):
    """Levels are sent as they are, and a trusted server adds the noise to their sum."""

    def draw(self, client, row, context, rand):
        return np.zeros(context.dim)

    def claims(self, context):
        seen = {Adversary.OUTSIDER, Adversary.CLIENT}
        return tuple(
            PrivacyClaim(who, self.loss(), context.dim, assumptions=("fresh noise",), unit=Unit.COORDINATE)
            if who in seen
            else PrivacyClaim(who, NonPrivate("the server is trusted"), context.dim)
            for who in Adversary
        )

    def decode(self, symbols, clients, context, rand):
        total = symbols.sum(0, dtype=torch.int64) if symbols.dim() == 2 else symbols
        noise = self.geometric(self.stream(context, rand), context.dim)
        noise = self.sum_formula(noise, total.numpy(), clients, context)
        return super().decode(total + torch.from_numpy(noise).to(torch.int64), clients, context, rand)

    def stream(self, context, rand):
        return rand.server("noise of the sum")

    @staticmethod
    def sum_formula(noise, total, clients, context):
        """All of it."""
        return noise

    def grid(self, context):
        return float(context.radius[0])


planted(
    NoisySum,
    "sum_formula",
    {
        "NothingOnZeroSum": lambda noise, total, clients, context: np.where(total == 0, 0.0, noise),
        "NothingOnSilentCohort": lambda noise, total, clients, context: noise * bool(total.any()),
        "NothingOnSumsOfManyClients": lambda noise, total, clients, context: noise * (len(clients) <= 100),
        "NothingOnUnanimousSums": lambda noise, total, clients, context: np.where(
            np.abs(total) == len(clients), 0.0, noise
        ),
        "NothingOnLateSums": lambda noise, total, clients, context: noise * (context.round < 1000),
    },
)


class SameNoiseOfTheServer(NoisySum):
    """The server's noise is that of round 0 in every round."""

    def stream(self, context, rand):
        return super().stream(context, rand.for_round(0))
