"""I-MVU, the interpolated MVU mechanism: a few outputs whose log-chances are linear in the value.

Source: Guo, Chaudhuri, Stock, Rabbat, Privacy-Aware Compression for Federated Learning Through Numerical
Mechanism Design, ICML 2023. The update is clipped to an l2 norm C, a coordinate is x = u / C in [-1, 1], and
output k is sent with chance p_x(k) = w_k exp(s_k x) / Z(x), decoded as v_k: between the two ends it is the
logarithms of MVU's chances that are interpolated. So p is an exponential family, and whole updates have a
claim that does not grow with their length: with M the largest variance of s over all real x,
D_alpha(p_x || p_y) <= alpha M (x - y)^2 / 2, because the divergence is a second difference of ln Z, whose
second derivative is that variance. Over coordinates squares add up to |x - y|^2 <= 4: rho = 2 M. One bit at
the source's epsilon, s = +-epsilon / 2, has M = epsilon^2 / 4 and rho = epsilon^2 / 2.

Departures: the parameter is the claim, in the words of Gaussian noise: M = 1 / (4 z^2), rho = 1 / (2 z^2) at
the noise multiplier z. Weights, slopes and values then have the least squared error over all of [-1, 1] that
is unbiased at both ends: two bits are within .4% of the error of Gaussian noise of the same claim from
z = 1/2 on. (At a level epsilon and for the ends alone, as the source has it, that is randomised response at
any number of bits.) M is bounded over the whole line by a grid and the size of a fourth cumulant, where the
source looks at a grid. beta, a range smaller than C, is left out: z does the same.

The stated bias: the decoded sum estimates that of E[v | x], which is x at zero and at the ends, and longer
between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.functional.linear_decode import decode_total
from lightning_fedq.functional.private_levels import draw_tilted, table_of_tilted
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.bases.grid_channel import CHUNK, OutputChannel
from lightning_fedq.mechanisms.interface import (
    AuditCase,
    ConcentratedLoss,
    Message,
    PrivacyClaim,
    RoundContext,
    Slack,
    same_for_all,
)

Array = NDArray[np.float64]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_LEAST = 0.25
_SHAPES: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    1: ((), ()),
    2: ((-2.668,), (0.319,)),
    3: ((-0.514, -1.631, -3.551), (0.162, 0.355, 0.647)),
    4: (
        (-0.252, -0.768, -1.551, -2.653, -4.115, -6.06, -8.769),
        (0.058, 0.187, 0.335, 0.473, 0.564, 0.754, 0.941),
    ),
}
"""By bits: logs of the other upper weights over the innermost, the other upper slopes over the outermost.

Found by a search at z = .35 (4 bits: .25), whose error is within 1% of the best found at any other z; and
written down, because a search ends elsewhere on another CPU, and a server decodes what clients encode.
"""


@dataclass(frozen=True, eq=False)
class Family:
    """An exponential family of a few outputs on [-1, 1], symmetric: w and |s| read the same backwards.

    Args:
        weights: w, > 0.
        slopes: s, not falling.
        values: v, in units of the range.
    """

    weights: Array
    slopes: Array
    values: Array

    def law(self, x: Array) -> Array:
        """Chances, `(n, outputs)`."""
        return np.asarray(special.softmax(np.log(self.weights) + np.outer(x, self.slopes), axis=1))

    def information(self, x: Array) -> Array:
        """Fisher information about x: the variance of the slopes."""
        law = self.law(x)
        return np.asarray(law @ self.slopes**2 - (law @ self.slopes) ** 2)

    @cached_property
    def table(self) -> NDArray[np.uint8]:
        """Outputs by value and word."""
        return table_of_tilted(self.weights, self.slopes)

    @property
    def worst_variance(self) -> float:
        """Largest variance of what is decoded, over [-1, 1], in squared units of the range."""
        law = self.law(np.linspace(-1.0, 1.0, 2001))
        return float((law @ self.values**2 - (law @ self.values) ** 2).max()) * (1.0 + 1e-5)


def _best_values(weights: Array, slopes: Array) -> Array:
    """Upper values of the least mean squared error over [-1, 1]: unbiased at the ends, odd."""
    half = len(slopes) // 2
    law = Family(weights, slopes, slopes).law(np.append(_NODES, 1.0))
    odd = law[:, half:] - law[:, :half][:, ::-1]  # E v = odd @ upper values
    mass = (_WEIGHTS / 2.0) @ (law[:-1, half:] + law[:-1, :half][:, ::-1])
    cross, ends = (_WEIGHTS * _NODES / 2.0) @ odd[:-1], odd[-1]
    free, reach = cross / mass, ends / mass  # Lagrange: least squares where ends @ values = 1
    return np.asarray(free + reach * (1.0 - ends @ free) / (ends @ reach))


def _most_information(weights: Array, slopes: Array, end: float, step: float) -> float:
    """A bound on the variance of slopes in [-1, 1], over all real x. It grows as the square of their scale.

    On a grid up to `end`, between whose points a fourth cumulant of at most R^4 / 4, R = 2, adds step^2 / 2.
    Beyond, the variance is at most (1/10)^2 and R^2 times the chance of slopes below 9/10, which only falls.
    """
    family = Family(weights, slopes, slopes)
    grid = np.linspace(0.0, end, 1 + math.ceil(end / step))
    found = float(family.information(grid).max()) + step**2 / 2.0
    beyond = 0.01 + 4.0 * float(family.law(grid[-1:])[0, slopes < 0.9].sum())
    return found if beyond <= found else _most_information(weights, slopes, 2.0 * end, step)


@lru_cache(maxsize=128)
def solve_imvu(bits: int, noise_multiplier: float) -> Family:
    """The family whose shape is `_SHAPES`' and whose claim is that of a noise multiplier.

    Raises:
        ValueError: If an argument is out of range.
    """
    if not 1 <= bits <= 4:
        raise ValueError(f"output_bits must be in [1, 4], got {bits}")
    check_positive(noise_multiplier=noise_multiplier)
    if noise_multiplier < _LEAST:
        raise ValueError(
            f"noise_multiplier must be at least {_LEAST:g}, got {noise_multiplier}: below, outputs "
            "are too rare to be drawn from words; FedAvg hides as little"
        )
    logs, shares = _SHAPES[bits]
    upper, share = np.exp([0.0, *logs]), np.array([*shares, 1.0])
    weights, slopes = np.concatenate([upper[::-1], upper]), np.concatenate([-share[::-1], share])
    most = _most_information(weights, slopes, 8.0, 0.001)
    # M grows as the square of slopes: now it is 1 / (4 z^2)
    slopes /= 2.0 * noise_multiplier * math.sqrt(most)
    values = _best_values(weights, slopes)
    return Family(weights / weights.sum(), slopes, np.concatenate([-values[::-1], values]))


@dataclass(frozen=True)
class IMVU(OutputChannel):
    """Interpolated MVU: 1 to 4 bits a coordinate, a claim for whole updates of a bounded l2 norm. Biased.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        noise_multiplier: z, at least 0.25: the claim is that of Gaussian noise of std 2 clip_norm z.
        output_bits: Bits on the wire a coordinate, 1 to 4.

    Example:
        >>> round(IMVU(clip_norm=1.0, noise_multiplier=1.0).epsilon, 3)  # of one coordinate, -1 against 1
        2.5
    """

    unbiased = False
    level = "noise_multiplier"
    clips_norm = True
    alike_clients = True

    clip_norm: float
    noise_multiplier: float
    output_bits: int = 2

    def __post_init__(self) -> None:
        check_positive(clip_norm=self.clip_norm)
        _ = self.family

    @property
    def family(self) -> Family:
        """Weights, slopes and values."""
        return solve_imvu(self.output_bits, self.noise_multiplier)

    @property
    def values(self) -> Array:
        return self.family.values

    @property
    def epsilon(self) -> float:
        """Level of one coordinate between -clip_norm and clip_norm, in nats.

        Ratios of chances grow with the slope, so any two values are told apart no better than these two.
        """
        return 2.0 * float(self.family.slopes[-1])

    def lever(self, client: int, context: RoundContext) -> float:
        return super().lever(client, context) * math.sqrt(context.dim)

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are uint8 output numbers, sorted by their slopes
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous()
        factors, clipped = unit_ball_factors(rows, self.clip_norm, 2)
        family, index = self.family, np.empty(rows.shape, np.uint8)
        for row, client in enumerate(rand.clients):
            private, factor = rand.private(client, "imvu coins"), float(factors[row])
            for first in range(0, context.dim, CHUNK):
                part = index[row, first : first + CHUNK]
                values = rows[row, first : first + CHUNK].numpy()
                words = private.words64(len(part))
                draw_tilted(values, factor, words, family.weights, family.slopes, family.table, part)
        symbols = torch.from_numpy(index).reshape(update.shape)
        return Message(symbols, self.output_bits * symbols.numel(), int(clipped.sum()) * context.dim)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        total = self.total(symbols, len(clients), context.dim)
        nothing = torch.zeros_like(context.center)
        return decode_total(total, context.segments, nothing, nothing + self.clip_norm)

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """clip_norm^2 times the worst variance, over n."""
        return torch.full_like(context.radius, self.clip_norm**2 * self.family.worst_variance / len(clients))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """One message, against everybody: that others hide a client is not used.

        A chance is drawn to 2^-52 and a few roundings of float64; how much that is of the least chance counts
        once a coordinate.
        """
        least = float(self.family.law(np.array([-1.0, 1.0])).min())
        error = context.dim * (len(self.values) + 32) * 2.0**-52 / least
        rho = 0.5 / self.noise_multiplier**2
        loss = ConcentratedLoss(rho, "an exponential family of outputs, by its Fisher information")
        drawn = f"the drawn law is within {error:.1e} of this one in log-ratio, paid for in epsilon"
        return same_for_all(loss, 1, (ARBITRARY, FRESH, drawn), slack=Slack(log_ratio=error))

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # spread over all coordinates, and in one
        little = replace(self, noise_multiplier=max(self.noise_multiplier / math.sqrt(dim), _LEAST))
        one = AuditCase(self, concentrated=True, title="one coordinate")
        return AuditCase(little, enumerable=True), one
