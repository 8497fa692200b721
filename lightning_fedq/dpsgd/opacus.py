"""Differentially private SGD: its accountant, in Opacus's own terms, and an optimiser step that is exact.

`SampledGaussianAccountant` is registered with Opacus as "fedq": `PrivacyEngine(accountant="fedq")` takes it.
It composes the two privacy loss distributions of the Poisson-sampled Gaussian, one sample added or removed,
on loss grids: tighter than Opacus's RDP, and thousands of steps in milliseconds. A person may stand in
several samples: then the number of them that a batch has is binomial, and the step a mixture of Gaussians.

`GridDPOptimizer` departs from Opacus's `DPOptimizer` where floating point would break the guarantee: every
sample's clipped gradient is cut toward zero to integer steps of sigma / 2^14 (its norm can only shrink), sums
and noise are integers, and the noise is an exact discrete Gaussian from an AES stream. A sample whose
gradient is not finite counts as zero. The accountant treats the noise as continuous; at 2^14 steps per sigma
the two differ by less than double precision can show.

References:
    Abadi et al., Deep Learning with Differential Privacy, 2016.
    Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, 2020.
    Ganesh, Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians, 2024.
"""

import math
from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats

from lightning_fedq.functional.noise.discrete_gaussian import discrete_gaussian
from lightning_fedq.imports import extra
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.grid import POINTS_PER_STD, LossGrid, added_up, atoms_on

with extra("opacus", "DP-SGD"):
    from opacus.accountants import IAccountant, register_accountant
    from opacus.grad_sample import GradSampleHooks
    from opacus.layers.dp_rnn import RNNLinear
    from opacus.optimizers import DPOptimizer
    from opacus.utils.module_utils import trainable_modules

STEPS_PER_SIGMA = 2.0**14
_MOST_STEPS = 1 << 24
_MOST_POINTS = 1 << 18
_LARGEST_LOSS = 600.0
"""Losses above count as infinite; e^700 is more than a float holds."""
Array = NDArray[np.float64]
History = tuple[tuple[float, float, int], ...]
NoiseWords = Callable[[int], NDArray[np.uint64]]


def _privacy_loss(x: float, s: float, q: float) -> float:
    """ln(1 - q + q e^((2x - 1) / (2 s^2))), the loss of a sample's presence at the output x."""
    exponent = (2.0 * x - 1.0) / (2.0 * s * s)
    if exponent > 600.0:
        return exponent + math.log(q)  # 1 - q is beyond a float's last bit there
    return math.log1p(q * math.expm1(exponent)) if q < 1.0 else exponent


def _cell_masses(edges: Array, mean: float, s: float) -> Array:
    """N(mean, s^2) of the cells between ascending edges, accurate in both tails."""
    z = (edges - mean) / s
    lower, upper = np.diff(special.ndtr(z)), -np.diff(special.ndtr(-z))
    masses: Array = np.where(z[1:] < 0.0, lower, upper)  # near 1 differences of ndtr cancel
    return masses


@lru_cache(maxsize=64)
def sampled_gaussian_grid(
    noise_multiplier: float, sample_rate: float, removal: bool, tail: float, rows: int = 1
) -> LossGrid:
    """A loss that dominates one step: P = (1 - q) N(0, s^2) + q N(1, s^2) against Q = N(0, s^2).

    The loss grows with the output x, so the cells of the grid are intervals of x. Each cell's masses under P
    and Q are split between its ends so that both stay (connecting the dots).

    Args:
        noise_multiplier: s > 0.
        sample_rate: q in (0, 1].
        removal: True for P against Q, a sample removed; False for Q against P, one added.
        tail: Mass of large losses that may count as infinite.
        rows: Samples of one person, who is removed or added with all of them: `mixture_grid`.
    """
    s, q = noise_multiplier, sample_rate
    if rows > 1:
        return mixture_grid(s, q, rows, removal, tail)
    width = s * (math.sqrt(-2.0 * math.log(tail)) + 0.5)
    ends = sorted(
        _privacy_loss(x, s, q) if q == 1.0 or x > 0 else math.log1p(-q) for x in (-width, 1.0 + width)
    )
    ends = [min(max(end, -_LARGEST_LOSS), _LARGEST_LOSS) for end in ends]
    step = max(_std(s, q, removal) / POINTS_PER_STD, (ends[1] - ends[0]) / _MOST_POINTS)
    first, last = math.floor(ends[0] / step), math.ceil(ends[1] / step)
    signed = step * np.arange(first, last + 1, dtype=np.float64)
    with np.errstate(divide="ignore"):
        inside = np.log(np.maximum(np.expm1(signed) + q, 0.0) / q)  # (x - 1/2) / s^2 at each point
    edges = np.concatenate([[-np.inf], s * s * inside + 0.5, [np.inf]])
    without, with_sample = _cell_masses(edges, 0.0, s), _cell_masses(edges, 1.0, s)
    mixture = (1.0 - q) * without + q * with_sample
    p, other = (mixture, without) if removal else (without[::-1], mixture[::-1])
    losses = signed if removal else -signed[::-1]
    # within a cell: b up and p - b down, so that p and p e^-loss stay; outside: all up, or infinite
    inner = np.clip((p[1:-1] - other[1:-1] * np.exp(losses[:-1])) / -math.expm1(-step), 0.0, p[1:-1])
    masses = np.zeros(len(losses))
    masses[0] = p[0]  # all below the first point goes up to it
    masses[:-1] += p[1:-1] - inner
    masses[1:] += inner
    return LossGrid(step, first if removal else -last, masses, float(p[-1]))  # above the last point: infinite


def mixture_grid(s: float, q: float, rows: int, removal: bool, tail: float) -> LossGrid:
    """A loss that dominates one step for a person in several rows, who is removed or added with all of them.

    As many of the rows are in the batch as successes in `rows` trials of chance q, and each moves the sum by
    at most 1: P = sum_j Binom(j; rows, q) N(j, s^2) against Q = N(0, s^2) is worst for vectors and for
    queries that follow from earlier answers, too (Ganesh 2024). The loss grows with the output, as for one.

    Args:
        s: Noise multiplier, > 0.
        q: Sampling rate in (0, 1].
        rows: Rows of the person, >= 1.
        removal: True for P against Q; False for Q against P.
        tail: Mass of large losses that may count as infinite.
    """
    chances = {j: float(stats.binom.logpmf(j, rows, q)) for j in range(rows + 1)}
    chances = {j: chance for j, chance in chances.items() if chance > -_LARGEST_LOSS}

    def privacy_losses(x: Array) -> Array:
        parts = (chance + (2.0 * j * x - j * j) / (2.0 * s * s) for j, chance in chances.items())
        return reduce(np.logaddexp, parts)

    width = s * (math.sqrt(-2.0 * math.log(tail)) + 0.5)
    x = np.linspace(-width, rows + width, _MOST_POINTS // 16)
    losses = privacy_losses(x)
    x, losses = (column[np.abs(losses) <= _LARGEST_LOSS] for column in (x, losses))
    density = np.exp(-0.5 * (x / s) ** 2 + (losses if removal else 0.0))
    if len(x) < 2 or not density.any():  # hardly any noise
        return LossGrid(1.0, 0, np.zeros(1), 1.0)
    std = math.sqrt(float((density * losses**2).sum() / density.sum()))
    step = max(std / POINTS_PER_STD, (losses[-1] - losses[0]) / _MOST_POINTS)
    # outputs at which the loss has grown by about a step, and the exact losses there
    points = np.linspace(losses[0], losses[-1], math.ceil((losses[-1] - losses[0]) / step) + 1)
    x = np.interp(points, losses, x)
    losses, edges = privacy_losses(x), np.concatenate([[-np.inf], x, [np.inf]])
    without = _cell_masses(edges, 0.0, s)
    parts = (math.exp(chance) * _cell_masses(edges, j, s) for j, chance in chances.items())
    mixture = reduce(np.add, parts)
    p, other = (mixture, without) if removal else (without[::-1], mixture[::-1])
    losses = losses if removal else -losses[::-1]
    # as above, a cell's masses are split between its ends so that both stay
    inner = (p[1:-1] - other[1:-1] * np.exp(losses[:-1])) / -np.expm1(losses[:-1] - losses[1:])
    inner = np.clip(inner, 0.0, p[1:-1])
    masses = np.append(p[0], inner)
    masses[:-1] += p[1:-1] - inner
    return atoms_on(step, losses, masses, float(p[-1]))


def _std(s: float, q: float, removal: bool) -> float:
    """Root mean square of the loss, roughly."""
    x = np.linspace(-9.0 * s, 1.0 + 9.0 * s, 4001)
    losses = np.clip([_privacy_loss(value, s, q) for value in x.tolist()], -_LARGEST_LOSS, _LARGEST_LOSS)
    density = np.exp(-0.5 * (x / s) ** 2)
    if removal:
        density = (1.0 - q) * density + q * np.exp(-0.5 * ((x - 1.0) / s) ** 2)
    return math.sqrt(float((density * losses**2).sum() / density.sum()))


class SampledGaussianAccountant(IAccountant):  # type: ignore[misc]
    """Accounts for steps of Poisson-sampled Gaussian noise. Neighbours differ by one person's samples.

    `history` holds `(noise_multiplier, sample_rate, steps)`, as Opacus's accountants do.

    Args:
        rows: Samples of one person, at most, which are all added or all removed.
    """

    def __init__(self, rows: int = 1) -> None:
        self.history: list[tuple[float, float, int]] = []
        self.rows = rows

    @classmethod
    def mechanism(cls) -> str:
        """Name under which Opacus knows it."""
        return "fedq"

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Account for one optimiser step.

        Raises:
            ValueError: If a number is out of range.
        """
        if not noise_multiplier > 0.0:
            raise ValueError(f"noise_multiplier must be > 0 for any privacy, got {noise_multiplier}")
        if not 0.0 < sample_rate <= 1.0:
            raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
        steps = 0
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            steps = self.history.pop()[2]
        self.history.append((noise_multiplier, sample_rate, steps + 1))

    def get_epsilon(self, delta: float, **kwargs: Any) -> float:
        """Epsilon spent so far at `delta`.

        Raises:
            TypeError: For options, of which there are none.
        """
        if kwargs:
            raise TypeError(f"get_epsilon takes delta only, got {sorted(kwargs)}")
        history = tuple((nm, rate, steps) for nm, rate, steps in self.history)
        return _epsilon(history, check_delta(delta), self.rows)

    def __len__(self) -> int:
        """Steps so far."""
        return sum(steps for _, _, steps in self.history)


register_accountant("fedq", SampledGaussianAccountant, force=True)


@lru_cache(maxsize=1024)
def _epsilon(history: History, delta: float, rows: int = 1) -> float:
    """Epsilon of a history: the larger of both orders, once each is composed."""
    return max(_composed(history, delta, removal, rows).epsilon(delta) for removal in (True, False))


def _composed(history: History, delta: float, removal: bool, rows: int) -> LossGrid:
    if not history:
        return LossGrid(1.0, 0, np.ones(1), 0.0)
    share = 1e-3 * delta / len(history)
    grids = [
        # powers of ten, rounded down, so that grids are found in the cache
        sampled_gaussian_grid(nm, rate, removal, 10.0 ** math.floor(math.log10(share / steps)), rows)
        for nm, rate, steps in history
    ]
    for grid in grids:
        if not grid.masses.any():  # hardly any noise: one step gives everything away
            return grid
    return added_up([grid.composed(steps, share) for grid, (_, _, steps) in zip(grids, history, strict=True)])


@lru_cache(maxsize=1024)
def _steps_within(
    history: History, epsilon: float, delta: float, step: tuple[float, float], rows: int
) -> int:
    """Further steps of this noise multiplier and rate that stay within `epsilon`, at most 2^24."""

    def fit(steps: int) -> bool:
        return _epsilon((*history, (*step, steps)), delta, rows) <= epsilon

    low, high = 0, 1
    while high < _MOST_STEPS and fit(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low


class Account:
    """Spending of the steps on one data set: its own, or one client's of a federation.

    Args:
        noise_multiplier: Noise multiplier of every step to come, > 0.
        sample_rate: Probability in (0, 1] with which a sample is in a batch to come.
        rows: Samples of one person, at most.

    Attributes:
        accountant: What was spent.
        step_limit: Steps after which no more are paid for; None is no limit.
    """

    def __init__(self, noise_multiplier: float, sample_rate: float, rows: int = 1) -> None:
        self.noise_multiplier, self.sample_rate = noise_multiplier, sample_rate
        self.accountant = SampledGaussianAccountant(rows)
        self.step_limit: int | None = None

    @property
    def steps(self) -> int:
        """Steps paid for."""
        return len(self.accountant)

    def epsilon(self, delta: float) -> float:
        """Epsilon spent at `delta`."""
        return self.accountant.get_epsilon(delta)

    def steps_within(self, epsilon: float, delta: float) -> int:
        """All steps, past and to come, that stay within `epsilon` at `delta`."""
        step = (self.noise_multiplier, self.sample_rate)
        spent, rows = tuple(self.accountant.history), self.accountant.rows
        return self.steps + _steps_within(spent, epsilon, check_delta(delta), step, rows)

    def fits(self, steps: int) -> bool:
        """Does the limit allow so many more steps?"""
        return self.step_limit is None or self.steps + steps <= self.step_limit

    def charge(self) -> int:
        """Pay for one step, before its noise is drawn, and return its number.

        Raises:
            RuntimeError: If the limit is reached.
        """
        step = self.steps
        if not self.fits(1):
            raise RuntimeError(
                f"the privacy budget allows {self.step_limit} steps and all are taken; "
                "raise the budget, or stop the training here"
            )
        self.accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate)
        return step


def _of_bags(
    layer: torch.nn.EmbeddingBag, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[torch.Tensor, torch.Tensor]:
    """Gradients of samples `(batch, words, dim)`: Opacus's own counts a word once, however often it is there.

    Raises:
        RuntimeError: If a sample is no row of words, or bags are not sums or means with equal weights.
    """
    words = activations[0]
    if words.dim() != 2 or len(activations) > 1 or layer.mode == "max":
        raise RuntimeError(
            "an EmbeddingBag has no gradients of each sample but for one row of words a sample, summed or "
            "averaged with equal weights; call it on (batch, words) alone, with padding_idx where texts are "
            "shorter, or take a mean over an Embedding"
        )
    weights = torch.ones_like(words, dtype=backprops.dtype)
    if layer.padding_idx is not None:
        weights = (words != layer.padding_idx).to(weights)
    if layer.mode == "mean":
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1.0)
    each = weights.unsqueeze(-1) * backprops.unsqueeze(1)
    found = backprops.new_zeros(len(words), *layer.weight.shape)
    return {layer.weight: found.scatter_add_(1, words.unsqueeze(-1).expand_as(each), each)}


def _of_pruned(sampler: Callable[..., Any]) -> Callable[..., dict[torch.Tensor, torch.Tensor]]:
    """Gradients of the parameter behind each weight that torch's `prune` makes of it and a mask."""

    def found(layer: torch.nn.Module, *passed: Any) -> dict[torch.Tensor, torch.Tensor]:
        gradients: dict[torch.Tensor, torch.Tensor] = sampler(layer, *passed)
        for mask in _masks(layer):
            made = getattr(layer, mask.removesuffix("_mask"))
            if made in gradients:
                own = getattr(layer, mask.replace("_mask", "_orig"))
                gradients[own] = gradients.pop(made) * getattr(layer, mask)
        return gradients

    return found


def _masks(layer: torch.nn.Module) -> list[str]:
    """Names of a layer's own masks of `torch.nn.utils.prune`, which training leaves as they are."""
    names = [name for name, _ in layer.named_buffers(recurse=False) if name.endswith("_mask")]
    return [name for name in names if hasattr(layer, name.replace("_mask", "_orig"))]


class SampleGradientHooks(GradSampleHooks):  # type: ignore[misc]
    """Per-sample gradients of Opacus, of passes in which each row of a layer is the same sample's."""

    GRAD_SAMPLERS: ClassVar = {
        kind: _of_pruned(sampler)
        for kind, sampler in {**GradSampleHooks.GRAD_SAMPLERS, torch.nn.EmbeddingBag: _of_bags}.items()
    }

    @classmethod
    def validate(cls, module: torch.nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Refuse trained layers with buffers, as Opacus does, but for masks of pruned weights.

        Raises:
            NotImplementedError: If there are some, and `strict`.
        """
        masks = {id(layer.get_buffer(name)) for layer in module.modules() for name in _masks(layer)}
        layers = [layer for _, layer in trainable_modules(module) if any(True for _ in layer.buffers())]
        errors = zip(super().validate(module), layers, strict=True)
        found = [error for error, layer in errors if any(id(b) not in masks for b in layer.buffers())]
        if found and strict:
            raise NotImplementedError(found)
        return found

    def rearrange_grad_samples(self, *, module: torch.nn.Module, **settings: Any) -> Any:
        """Hand over one pass through a layer.

        Raises:
            RuntimeError: If another pass had more rows: Opacus would add these to the first of them. Or if
                the layer was in eval mode, in which Opacus records nothing.
        """
        if not getattr(module, "activations", None):
            raise RuntimeError(
                f"a {type(module).__name__} with trained parameters was in eval mode in a training step, "
                "where no sample's own gradient is recorded; freeze its parameters (requires_grad_(False)), "
                "or leave it in train mode"
            )
        activations, backprops = super().rearrange_grad_samples(module=module, **settings)
        rows, most = len(backprops), module.max_batch_len
        if rows != most and not isinstance(module, RNNLinear):  # packed sequences end one after the other
            raise RuntimeError(
                f"a {type(module).__name__} saw {rows} rows in one pass and {most} in another, and the "
                "gradients of some samples would count, and be clipped, as those of others; let every pass "
                "have all samples of the batch, and mask what comes out"
            )
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:  # Opacus knows none
            backprops = backprops.masked_fill((activations[0] == module.padding_idx).unsqueeze(-1), 0.0)
        return activations, backprops


class GridDPOptimizer(DPOptimizer):  # type: ignore[misc]
    """Clips every sample, sums integers, adds an exact discrete Gaussian, and steps the user's optimiser.

    Args:
        noise_multiplier: sigma / max_grad_norm, > 0.
        max_grad_norm: Clipping norm of one sample's gradient, > 0.
        expected_batch_size: Divides the noisy sum; the caller changes it where clients take turns.
        words: Called once a step, returns the source of the noise's words.
        loss_reduction: How the user's loss is reduced; the noisy sum is divided where it is a mean.

    Attributes:
        batch_is_empty: Is nobody in the present batch? Then all that is there counts as zero.
        batch_size: Samples in the present batch, which every layer must have seen one row of; None is any.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        words: Callable[[], NoiseWords],
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
        )
        self._words = words
        self.grid = noise_multiplier * max_grad_norm / STEPS_PER_SIGMA
        self.num_non_finite = 0
        self.batch_is_empty = False
        self.batch_size: int | None = None

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool | None:
        """Clip, add noise and average, after every parameter was found to have gradients.

        Raises:
            RuntimeError: If a parameter has none.
        """
        without = sum(getattr(p, "grad_sample", None) is None for p in self.params)
        if without:
            raise RuntimeError(
                f"{without} of {len(self.params)} parameters have no gradient of this batch, and a step is "
                "charged for all of them; return a loss for every batch, and freeze what it does not use"
            )
        done: bool | None = super().pre_step(closure)
        return done

    def clip_and_accumulate(self) -> None:
        """Sum what is left of every sample's gradient, in integer steps of the grid.

        Raises:
            RuntimeError: If there were several backward passes, each of which would count up to the norm, or
                if layers saw other rows than `batch_size` samples, each of which would.
        """
        if any(isinstance(p.grad_sample, list) for p in self.params):
            raise RuntimeError(
                "there were several backward passes in one step, and a sample could add max_grad_norm in "
                "each of them; add the losses up in training_step and leave backward to Lightning"
            )
        samples = [self._get_flat_grad_sample(p).double() for p in self.params]
        rows = {len(g) for g in samples}
        if self.batch_size is not None and not self.batch_is_empty and rows != {self.batch_size}:
            raise RuntimeError(
                f"layers saw {', '.join(map(str, sorted(rows)))} rows of a batch of {self.batch_size} "
                "samples, and every row could add max_grad_norm: clipping does not bound what a sample adds; "
                "give every layer the batch with its samples along axis 0 (a Linear takes (batch, time, "
                "features) as it is, positions need a row for every sample)"
            )
        squares = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in samples])
        norms = squares.sum(0).sqrt()
        finite = torch.isfinite(norms)
        if self.batch_is_empty:
            finite = torch.zeros_like(finite)
        else:
            self.num_non_finite += int((~finite).sum())
        # a margin far above the rounding of a float64 norm
        factors = (self.max_grad_norm * (1.0 - 1e-9) / norms.clamp(min=1e-300)).clamp(max=1.0)
        factors = torch.where(finite, factors, 0.0) / self.grid
        for p, g in zip(self.params, samples, strict=True):
            g = torch.where(finite.reshape(-1, *[1] * (g.dim() - 1)), g, 0.0)  # 0 times infinity is no number
            # toward 0: the nearest step could lengthen it
            steps = (g * factors.reshape(-1, *[1] * (g.dim() - 1))).trunc()
            p.summed_grad = steps.to(torch.int64).sum(0)  # integers: the sum is the same in any order

    def add_noise(self) -> None:
        """Add the noise, in integers, and leave the grid."""
        words = self._words()  # one source a step, which all parameters draw on from
        for p in self.params:
            noise = discrete_gaussian(STEPS_PER_SIGMA, p.numel(), words)
            noisy = p.summed_grad + torch.from_numpy(noise).reshape(p.shape).to(p.device)
            # behind the noise, so rounding is post-processing
            p.grad = (noisy.double() * self.grid).to(p.dtype)
