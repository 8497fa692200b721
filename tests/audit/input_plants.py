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
from lightning_fedq.mechanisms.interface import Mechanism, Message, PmfPairs, PrivacyClaim, Unit
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
        """The noise that is added: all of it."""
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
        odds = math.exp(self.epsilon)
        pair = (odds / (1.0 + odds), 1.0 / (1.0 + odds))
        loss = PmfPairs(((pair, pair[::-1]),), "noise on levels")
        return tuple(
            PrivacyClaim(who, loss, context.dim, assumptions=("fresh noise",), unit=Unit.COORDINATE)
            for who in self.adversaries()
        )

    def adversaries(self):
        from lightning_fedq.mechanisms.interface import Adversary

        return tuple(Adversary)


class NothingOnZero(NoisyTernary):
    """A value of exactly zero is sent without noise."""

    def kept(self, noise, scaled, context, rand):
        return np.where(scaled == 0.0, 0.0, noise)


class NothingBelowOnePercent(NoisyTernary):
    """A value below 1% of the range is sent without noise."""

    def kept(self, noise, scaled, context, rand):
        return np.where(np.abs(scaled) < 0.01, 0.0, noise)


class NothingForSmallClients(NoisyTernary):
    """A client whose largest coordinate is below a tenth of the range adds no noise."""

    def kept(self, noise, scaled, context, rand):
        return np.where(np.abs(scaled).max(1, keepdims=True) < 0.1, 0.0, noise)


class NothingInLargeCohorts(NoisyTernary):
    """No noise in cohorts above 50."""

    def kept(self, noise, scaled, context, rand):
        return noise * (len(context.cohort) <= 50)


class OnlyWhereClipped(NoisyTernary):
    """Noise only where the value was clipped."""

    def kept(self, noise, scaled, context, rand):
        return np.where(np.abs(scaled) > 1.0, noise, 0.0)


class NothingFromCoordinate1000(NoisyTernary):
    """No noise from coordinate 1,000 on."""

    def kept(self, noise, scaled, context, rand):
        return np.where(np.arange(context.dim) >= 1000, 0.0, noise)


class NothingFromRound5(NoisyTernary):
    """No noise from round 5 on."""

    def kept(self, noise, scaled, context, rand):
        return noise * (context.round < 5)


class NothingOnAllZero(NoisyTernary):
    """No noise on an update of zeros only, such as one that replaced NaN."""

    def kept(self, noise, scaled, context, rand):
        return np.where(scaled.any(1, keepdims=True), noise, 0.0)


class NothingOnSparse(NoisyTernary):
    """No noise on an update of mostly zeros."""

    def kept(self, noise, scaled, context, rand):
        return np.where((scaled == 0.0).mean(1, keepdims=True) > 0.5, 0.0, noise)


class ByOwnNorm(NoisyTernary):
    """Noise is scaled by the client's own root mean square."""

    def kept(self, noise, scaled, context, rand):
        return np.rint(noise * np.sqrt(np.square(np.clip(scaled, -1, 1)).mean(1, keepdims=True)))


class ByOwnLargest(NoisyTernary):
    """Noise is scaled by the client's largest coordinate."""

    def kept(self, noise, scaled, context, rand):
        return np.rint(noise * np.abs(np.clip(scaled, -1, 1)).max(1, keepdims=True))


class NothingBelowOwnMean(NoisyTernary):
    """No noise on coordinates below the client's mean absolute value."""

    def kept(self, noise, scaled, context, rand):
        size = np.abs(scaled)
        return np.where(size < 0.999 * size.mean(1, keepdims=True), 0.0, noise)


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


class NothingFromRound1000(NoisyTernary):
    """No noise from round 1,000 on."""

    def kept(self, noise, scaled, context, rand):
        return noise * (context.round < 1000)


class NothingInRound0(NoisyTernary):
    """No noise in the first round."""

    def kept(self, noise, scaled, context, rand):
        return noise * (context.round > 0)


class NothingFromOneClient(NoisyTernary):
    """Client 99 adds no noise."""

    def kept(self, noise, scaled, context, rand):
        return noise * (np.array(rand.clients) != 99)[:, None]


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


class EvenNoise(NoisyTernary):
    """Noise has even values only, so that a symbol's last bit is that of the level."""

    def kept(self, noise, scaled, context, rand):
        return 2.0 * noise


class NothingOnMiddleValues(NoisyTernary):
    """No noise on values between a tenth and half of the range, the last ones to be looked at."""

    def kept(self, noise, scaled, context, rand):
        return np.where((np.abs(scaled) > 0.1) & (np.abs(scaled) < 0.6), 0.0, noise)


class NothingOnSingleOutlier(NoisyTernary):
    """No noise if one coordinate is ten times larger than all others."""

    def kept(self, noise, scaled, context, rand):
        size = np.sort(np.abs(scaled), 1)
        return np.where(size[:, -1:] > 10.0 * size[:, -2:-1], 0.0, noise)


class NothingOnPositiveInside(NoisyTernary):
    """No noise on positive values that are not clipped."""

    def kept(self, noise, scaled, context, rand):
        return np.where((scaled > 0.0) & (scaled < 1.0), 0.0, noise)
