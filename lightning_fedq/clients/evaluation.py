"""Setting of the evaluation by client: what is held out, when it is measured, and what of it is released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.functional.checks import check_fields
from lightning_fedq.functional.noise.discrete_gaussian import LARGEST_SIGMA
from lightning_fedq.mechanisms.ddg import DistributedDiscreteGaussian

_STEPS = 512
"""Steps of the grid over a metric's range, at least."""


@dataclass(frozen=True)
class NoisyMean:
    """Release the mean of a metric over all clients, with noise, and charge it.

    Every client clips its value to the range and adds discrete Gaussian noise; with secure aggregation the
    server sees nothing but the sum. Replacing a client moves the sum by the range at most. With noise of
    standard deviation s on the sum, in units of the range, E releases add E / (2 s^2) to the run's rho of
    zero-concentrated privacy towards whoever sees sums.

    Args:
        metric: Name under which `validation_step` logs it.
        std: Standard deviation of the released mean, > 0, in units of the metric, if every client answers.
        low: Smallest value of the metric; lower ones count as this.
        high: Largest value; larger ones count as this, and what is no number as the middle.
        max_dropped: Clients that may be missing before a release is given up, >= 0. Claims do not count on
            the noise of so many.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If a value is of another kind.

    References:
        Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
        Aggregation, ICML 2021.

    Example:
        >>> NoisyMean("val_acc", std=0.05)  # ClientEvaluation(0.2, release=this)
        NoisyMean(metric='val_acc', std=0.05, low=0.0, high=1.0, max_dropped=0)
    """

    metric: str
    std: float
    low: float = 0.0
    high: float = 1.0
    max_dropped: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < self.std < math.inf:
            raise ValueError(f"std must be > 0 and finite, got {self.std}")
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"low < high is needed, both finite, got low={self.low} and high={self.high}")
        if self.max_dropped < 0:
            raise ValueError(f"max_dropped must be >= 0, got {self.max_dropped}")

    def centred(self, values: Tensor) -> Tensor:
        """Clip values to the range, and return them around its middle, in units of half of it, as float32."""
        half = (self.high - self.low) / 2.0
        return ((values.double().clamp(self.low, self.high) - self.low - half) / half).float()

    def of_centred(self, mean: float) -> float:
        """A mean of `centred` values in units of the metric."""
        return self.low + (self.high - self.low) / 2.0 * (1.0 + mean)

    def mechanism(self, num_clients: int, max_dropped: int) -> DistributedDiscreteGaussian:
        """The mechanism of one value, centred in the range and in units of half of it.

        Args:
            num_clients: Clients, all of whom take part.
            max_dropped: Clients that may be missing before a release is given up.

        Raises:
            ValueError: If the noise is too small or too large for a sum of integers.
        """
        sigma = 2.0 * self.std / (self.high - self.low) * math.sqrt(num_clients)  # of half the range
        # noise of 4 steps at least, and no more of them than the sampler takes
        grid = max(min(2.0 / _STEPS, sigma / 4.0), sigma / LARGEST_SIGMA)
        # the sum's range and 12 standard deviations of its noise, on both sides of 0
        largest = 2.0 * (num_clients * (1.0 + grid) + 12.0 * sigma * math.sqrt(num_clients)) / grid
        bits = math.ceil(math.log2(largest))
        if bits > 31:
            raise ValueError(
                f"std={self.std:g} of a mean of {num_clients} clients takes sums of {bits} bits, and 31 are "
                f"the most; take std nearer to {self.high - self.low:g} / clients"
            )
        return DistributedDiscreteGaussian(1.0, sigma, grid, max(bits, 2), max_dropped)


@dataclass(frozen=True)
class ClientEvaluation:
    """Measure models on every client's own held-out samples, after a round.

    Args:
        held_out: Fraction in (0, 1) of every client's samples, which are not trained on; or for each client,
            in their order, a data set, batched as the training data are, or a loader.
        every_n_rounds: >= 1. The last round of `max_epochs` is measured, too.
        release: What of it leaves the clients, with noise and charged. None is nothing.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If `release` is of another kind.

    Example:
        >>> ClientEvaluation(held_out=0.2, every_n_rounds=5)  # Federated(..., evaluate_clients=this)
        ClientEvaluation(held_out=0.2, every_n_rounds=5, release=None)
    """

    held_out: float | Sequence[Dataset[Any] | DataLoader[Any]] = 0.2
    every_n_rounds: int = 1
    release: NoisyMean | None = None

    def __post_init__(self) -> None:
        if isinstance(self.held_out, int | float) and not 0.0 < self.held_out < 1.0:
            raise ValueError(f"held_out must be a fraction in (0, 1), got {self.held_out}")
        if self.every_n_rounds < 1:
            raise ValueError(f"every_n_rounds must be >= 1, got {self.every_n_rounds}")
        if not isinstance(self.release, NoisyMean | None):
            wanted = "NoisyMean('val_acc', std=0.01), or None"
            raise TypeError(f"release must be {wanted}; got {self.release!r}")

    def times(self, rounds: int) -> int:
        """Measurements of a fit of so many rounds, the last one's among them."""
        return -(-rounds // self.every_n_rounds)

    @property
    def fraction(self) -> float | None:
        """Fraction of every client's samples. None where clients have data sets to be measured on."""
        return float(self.held_out) if isinstance(self.held_out, int | float) else None

    def identity(self) -> dict[str, str]:
        """Samples that are not trained on, and what is released, in words."""
        held_out = {} if self.fraction is None else {"held_out": str(self.fraction)}
        if self.release is None:
            return held_out
        return {**held_out, "release": repr(self.release), "release_every": str(self.every_n_rounds)}

    def check(self, module: pl.LightningModule, num_clients: int, dropped: bool) -> None:
        """Refuse what can't be measured.

        Args:
            dropped: Is what clients measure dropped?

        Raises:
            ValueError: With the cure.
        """
        if not is_overridden("validation_step", module, pl.LightningModule):
            raise ValueError(
                "evaluate_clients runs validation_step on every client's held-out samples, and "
                f"{type(module).__name__} has none; write one that logs what is to be measured"
            )
        given = () if isinstance(self.held_out, int | float) else self.held_out
        if self.fraction is None and len(given) != num_clients:
            raise ValueError(f"held_out has data sets of {len(given)} clients, num_clients is {num_clients}")
        if lacking := [client for client, data in enumerate(given) if data is None]:
            raise ValueError(f"held_out has nothing of clients {lacking[:10]}; give every client a data set")
        if dropped:
            raise ValueError(
                "client_metrics='none' drops what clients measure, and evaluate_clients measures; use "
                "client_metrics='local', or leave evaluate_clients out"
            )
