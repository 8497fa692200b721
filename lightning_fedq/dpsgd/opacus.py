"""Differentially private SGD with Opacus: an accountant, and an optimiser whose sums and noise are exact.

`SampledGaussianAccountant` is registered with Opacus as "fedq": `PrivacyEngine(accountant="fedq")` takes it.
It composes the privacy loss distributions of the Poisson-sampled Gaussian on loss grids, for a sample that is
added and for one that is removed. The result is tighter than Opacus's RDP accountant, and thousands of steps
take milliseconds. If a person is in several samples, the number of them in a batch is binomial, and a step is
a mixture of Gaussians.

`GridDPOptimizer` departs from Opacus's `DPOptimizer` where floating point would break the guarantee. It
truncates every clipped per-sample gradient toward zero to integer steps of sigma / 2^14, so that its norm can
only shrink. Sums and noise are integers, and the noise is an exact discrete Gaussian from an AES stream. A
sample whose gradient is not finite counts as zero. The accountant treats the noise as continuous. At 2^14
steps per sigma the difference is below double precision.

References:
    Abadi et al., Deep Learning with Differential Privacy, 2016.
    Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, 2020.
    Ganesh, Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians, 2024.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
"""Privacy losses above this value count as infinite, because e^710 overflows a float."""
Array = NDArray[np.float64]
History = tuple[tuple[float, float, int], ...]
NoiseWords = Callable[[int], NDArray[np.uint64]]


def _privacy_loss(x: float, s: float, q: float) -> float:
    """Return a sample's privacy loss at the output x: ln(1 - q + q e^((2x - 1) / (2 s^2)))."""
    exponent = (2.0 * x - 1.0) / (2.0 * s * s)
    if exponent > 600.0:
        return exponent + math.log(q)  # 1 - q is below the rounding error here
    return math.log1p(q * math.expm1(exponent)) if q < 1.0 else exponent


def _cell_masses(edges: Array, mean: float, s: float) -> Array:
    """Return the mass of N(mean, s^2) in each cell between ascending edges, accurate in both tails."""
    z = (edges - mean) / s
    lower, upper = np.diff(special.ndtr(z)), -np.diff(special.ndtr(-z))
    masses: Array = np.where(z[1:] < 0.0, lower, upper)  # differences of ndtr cancel near 1
    return masses


@lru_cache(maxsize=64)
def sampled_gaussian_grid(
    noise_multiplier: float, sample_rate: float, removal: bool, tail: float, rows: int = 1
) -> LossGrid:
    """Return a privacy loss distribution, on a grid, that dominates one Poisson-sampled Gaussian step.

    The step compares P = (1 - q) N(0, s^2) + q N(1, s^2), with the sample, to Q = N(0, s^2), without it. The
    loss grows with the output x, so the cells of the grid are intervals of x. Each cell's mass is split
    between its two ends so that the masses under P and under Q both stay (connecting the dots).

    Args:
        noise_multiplier: Noise multiplier s > 0.
        sample_rate: Sampling rate q in (0, 1].
        removal: True for the loss of P against Q (a sample is removed), False for Q against P (added).
        tail: Probability of large losses that may count as infinite.
        rows: Samples of one person, all removed or all added. If > 1, `mixture_grid` is used.
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
        inside = np.log(np.maximum(np.expm1(signed) + q, 0.0) / q)  # (x - 1/2) / s^2 at each grid point
    edges = np.concatenate([[-np.inf], s * s * inside + 0.5, [np.inf]])
    without, with_sample = _cell_masses(edges, 0.0, s), _cell_masses(edges, 1.0, s)
    mixture = (1.0 - q) * without + q * with_sample
    p, other = (mixture, without) if removal else (without[::-1], mixture[::-1])
    losses = signed if removal else -signed[::-1]
    # `inner` moves to a cell's upper end and the rest to its lower end, so that p and p e^-loss stay.
    # Below the first point all mass moves up to it. Above the last point it counts as infinite loss.
    inner = np.clip((p[1:-1] - other[1:-1] * np.exp(losses[:-1])) / -math.expm1(-step), 0.0, p[1:-1])
    masses = np.zeros(len(losses))
    masses[0] = p[0]
    masses[:-1] += p[1:-1] - inner
    masses[1:] += inner
    return LossGrid(step, first if removal else -last, masses, float(p[-1]))


def mixture_grid(s: float, q: float, rows: int, removal: bool, tail: float) -> LossGrid:
    """Return a privacy loss distribution, on a grid, that dominates one step for a person in several rows.

    The number j of the person's rows in a batch is binomial, and each row moves the sum by at most 1. The
    worst case compares P = sum_j Binom(j; rows, q) N(j, s^2) to Q = N(0, s^2), also for vectors and adaptive
    queries (Ganesh 2024). The loss grows with the output, as for a single row.

    Args:
        s: Noise multiplier, > 0.
        q: Sampling rate in (0, 1].
        rows: Rows of the person, >= 1, all removed or all added.
        removal: True for the loss of P against Q (removed), False for Q against P (added).
        tail: Probability of large losses that may count as infinite.
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
    if len(x) < 2 or not density.any():  # with hardly any noise all losses are infinite
        return LossGrid(1.0, 0, np.zeros(1), 1.0)
    std = math.sqrt(float((density * losses**2).sum() / density.sum()))
    step = max(std / POINTS_PER_STD, (losses[-1] - losses[0]) / _MOST_POINTS)
    # choose outputs whose losses are about one step apart, and compute the exact losses there
    points = np.linspace(losses[0], losses[-1], math.ceil((losses[-1] - losses[0]) / step) + 1)
    x = np.interp(points, losses, x)
    losses, edges = privacy_losses(x), np.concatenate([[-np.inf], x, [np.inf]])
    without = _cell_masses(edges, 0.0, s)
    parts = (math.exp(chance) * _cell_masses(edges, j, s) for j, chance in chances.items())
    mixture = reduce(np.add, parts)
    p, other = (mixture, without) if removal else (without[::-1], mixture[::-1])
    losses = losses if removal else -losses[::-1]
    # as in `sampled_gaussian_grid`, split each cell's mass between its ends so that p and p e^-loss stay
    inner = (p[1:-1] - other[1:-1] * np.exp(losses[:-1])) / -np.expm1(losses[:-1] - losses[1:])
    inner = np.clip(inner, 0.0, p[1:-1])
    masses = np.append(p[0], inner)
    masses[:-1] += p[1:-1] - inner
    return atoms_on(step, losses, masses, float(p[-1]))


def _std(s: float, q: float, removal: bool) -> float:
    """Return the approximate root mean square of the privacy loss of one step, which sets the grid's step."""
    x = np.linspace(-9.0 * s, 1.0 + 9.0 * s, 4001)
    losses = np.clip([_privacy_loss(value, s, q) for value in x.tolist()], -_LARGEST_LOSS, _LARGEST_LOSS)
    density = np.exp(-0.5 * (x / s) ** 2)
    if removal:
        density = (1.0 - q) * density + q * np.exp(-0.5 * ((x - 1.0) / s) ** 2)
    return math.sqrt(float((density * losses**2).sum() / density.sum()))


class SampledGaussianAccountant(IAccountant):  # type: ignore[misc]
    """Accountant of Poisson-sampled Gaussian steps, where neighbours differ by all samples of one person.

    As in Opacus's accountants, `history` is a list of `(noise_multiplier, sample_rate, steps)`.

    Args:
        rows: Largest number of samples of one person, >= 1. They are all added or all removed.
    """

    def __init__(self, rows: int = 1) -> None:
        self.history: list[tuple[float, float, int]] = []
        self.rows = rows

    @classmethod
    def mechanism(cls) -> str:
        """Return the name under which Opacus registers the accountant."""
        return "fedq"

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Account for one optimiser step.

        Args:
            noise_multiplier: Standard deviation of the noise divided by the clipping norm, > 0.
            sample_rate: Probability in (0, 1] with which the step drew each sample.

        Raises:
            ValueError: If a value is out of its range.
        """
        if not noise_multiplier > 0.0:
            raise ValueError(f"noise_multiplier must be > 0, got {noise_multiplier}")
        if not 0.0 < sample_rate <= 1.0:
            raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
        steps = 0
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            steps = self.history.pop()[2]
        self.history.append((noise_multiplier, sample_rate, steps + 1))

    def get_epsilon(self, delta: float, **kwargs: Any) -> float:
        """Return the epsilon spent so far at `delta`.

        Raises:
            TypeError: If further options are given, because this accountant has none.
        """
        if kwargs:
            raise TypeError(f"get_epsilon takes delta only, got {sorted(kwargs)}")
        history = tuple((nm, rate, steps) for nm, rate, steps in self.history)
        return _epsilon(history, check_delta(delta), self.rows)

    def __len__(self) -> int:
        """Return the number of steps so far."""
        return sum(steps for _, _, steps in self.history)


register_accountant("fedq", SampledGaussianAccountant, force=True)


@lru_cache(maxsize=1024)
def _epsilon(history: History, delta: float, rows: int = 1) -> float:
    """Return the epsilon of a history: the larger of the epsilons for removal and for addition."""
    return max(_composed(history, delta, removal, rows).epsilon(delta) for removal in (True, False))


def _composed(history: History, delta: float, removal: bool, rows: int) -> LossGrid:
    """Return the composed privacy loss distribution of a history, for removal or for addition."""
    if not history:
        return LossGrid(1.0, 0, np.ones(1), 0.0)
    share = 1e-3 * delta / len(history)
    grids = [
        # round the tail down to a power of ten, so that the cache finds equal grids
        sampled_gaussian_grid(nm, rate, removal, 10.0 ** math.floor(math.log10(share / steps)), rows)
        for nm, rate, steps in history
    ]
    for grid in grids:
        if not grid.masses.any():  # all losses are infinite, because there is hardly any noise
            return grid
    return added_up([grid.composed(steps, share) for grid, (_, _, steps) in zip(grids, history, strict=True)])


@lru_cache(maxsize=1024)
def _steps_within(
    history: History, epsilon: float, delta: float, step: tuple[float, float], rows: int
) -> int:
    """Return how many further steps stay within `epsilon`, at most 2^24, found by bisection.

    Args:
        history: Steps that are charged already.
        epsilon: Budget at `delta`, > 0.
        delta: Delta of the guarantee, in (0, 1).
        step: Noise multiplier and sampling rate of the further steps.
        rows: Largest number of samples of one person, >= 1.
    """

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
    """Privacy account of the DP-SGD steps on one data set: that of one client, or of a run without clients.

    Args:
        noise_multiplier: Noise multiplier of every coming step, > 0.
        sample_rate: Probability in (0, 1] with which a coming step draws each sample.
        rows: Largest number of samples of one person, >= 1.

    Attributes:
        accountant: Accountant with the history of charged steps.
        step_limit: Largest number of steps that may be charged; None is no limit.
    """

    def __init__(self, noise_multiplier: float, sample_rate: float, rows: int = 1) -> None:
        self.noise_multiplier, self.sample_rate = noise_multiplier, sample_rate
        self.accountant = SampledGaussianAccountant(rows)
        self.step_limit: int | None = None

    @property
    def steps(self) -> int:
        """Number of charged steps."""
        return len(self.accountant)

    def epsilon(self, delta: float) -> float:
        """Return the epsilon spent at `delta`."""
        return self.accountant.get_epsilon(delta)

    def steps_within(self, epsilon: float, delta: float) -> int:
        """Return how many steps in total, past ones included, stay within `epsilon` at `delta`."""
        step = (self.noise_multiplier, self.sample_rate)
        spent, rows = tuple(self.accountant.history), self.accountant.rows
        return self.steps + _steps_within(spent, epsilon, check_delta(delta), step, rows)

    def fits(self, steps: int) -> bool:
        """Return whether the limit allows this many further steps."""
        return self.step_limit is None or self.steps + steps <= self.step_limit

    def charge(self) -> int:
        """Charge one step, before its noise is drawn, and return its number.

        Raises:
            RuntimeError: If the limit is reached.
        """
        step = self.steps
        if not self.fits(1):
            raise RuntimeError(
                f"The privacy budget allows {self.step_limit} steps, and all are taken. "
                "Raise the budget, or stop the training here."
            )
        self.accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate)
        return step


def _of_bags(
    layer: torch.nn.EmbeddingBag, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[torch.Tensor, torch.Tensor]:
    """Return the per-sample gradients of an `EmbeddingBag`.

    Opacus's own function counts a word once, however often it is in the sample.

    Args:
        layer: The layer, in mode "sum" or "mean".
        activations: Its input: one int tensor `(batch, words)`, without offsets or weights.
        backprops: Gradient of the loss with respect to its output, `(batch, dim)`.

    Returns:
        For the layer's weight, `(batch, num_embeddings, dim)`.

    Raises:
        RuntimeError: If a sample is not one row of words, or the bag is not a sum or mean with equal weights.
    """
    words = activations[0]
    if words.dim() != 2 or len(activations) > 1 or layer.mode == "max":
        raise RuntimeError(
            "DPSGD needs an EmbeddingBag that sums or averages one row of words per sample. Call it on "
            "(batch, words) alone, with padding_idx for shorter texts, or average an Embedding."
        )
    weights = torch.ones_like(words, dtype=backprops.dtype)
    if layer.padding_idx is not None:
        weights = (words != layer.padding_idx).to(weights)
    if layer.mode == "mean":
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1.0)
    by_word = weights.unsqueeze(-1) * backprops.unsqueeze(1)
    gradients = backprops.new_zeros(len(words), *layer.weight.shape)
    return {layer.weight: gradients.scatter_add_(1, words.unsqueeze(-1).expand_as(by_word), by_word)}


def _of_pruned(sampler: Callable[..., Any]) -> Callable[..., dict[torch.Tensor, torch.Tensor]]:
    """Wrap a gradient function of Opacus for layers whose weights torch's `prune` has masked.

    A pruned weight is the product of a parameter (`weight_orig`) and a mask. Opacus returns the gradient of
    the product. The wrapper multiplies it by the mask and returns it as the gradient of the parameter.
    """

    def compute(layer: torch.nn.Module, *passed: Any) -> dict[torch.Tensor, torch.Tensor]:
        gradients: dict[torch.Tensor, torch.Tensor] = sampler(layer, *passed)
        for mask in _masks(layer):
            product = getattr(layer, mask.removesuffix("_mask"))
            if product in gradients:
                parameter = getattr(layer, mask.replace("_mask", "_orig"))
                gradients[parameter] = gradients.pop(product) * getattr(layer, mask)
        return gradients

    return compute


def _masks(layer: torch.nn.Module) -> list[str]:
    """Return the names of a layer's `torch.nn.utils.prune` masks, which training does not change."""
    names = [name for name, _ in layer.named_buffers(recurse=False) if name.endswith("_mask")]
    return [name for name in names if hasattr(layer, name.replace("_mask", "_orig"))]


class SampleGradientHooks(GradSampleHooks):  # type: ignore[misc]
    """Opacus's per-sample gradient hooks, with stricter checks.

    Every pass through a layer must have one row for each sample of the batch, and the layer must be in train
    mode. Pruned weights, `EmbeddingBag` and `padding_idx` are supported.
    """

    GRAD_SAMPLERS: ClassVar = {
        kind: _of_pruned(sampler)
        for kind, sampler in {**GradSampleHooks.GRAD_SAMPLERS, torch.nn.EmbeddingBag: _of_bags}.items()
    }

    @classmethod
    def validate(cls, module: torch.nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Return Opacus's errors for trained layers with buffers, except for masks of pruned weights.

        Args:
            module: Module to validate.
            strict: Whether to raise the errors rather than return them.

        Raises:
            NotImplementedError: If there are such layers and `strict` is set.
        """
        masks = {id(layer.get_buffer(name)) for layer in module.modules() for name in _masks(layer)}
        layers = [layer for _, layer in trainable_modules(module) if any(True for _ in layer.buffers())]
        errors = zip(super().validate(module), layers, strict=True)
        kept_errors = [error for error, layer in errors if any(id(b) not in masks for b in layer.buffers())]
        if kept_errors and strict:
            raise NotImplementedError(kept_errors)
        return kept_errors

    is_in_step = False

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Record passes within the context. Its own backward pass follows, until the hooks are disabled."""
        self.enable_hooks()
        self.is_in_step = True
        try:
            yield
        finally:
            self.is_in_step = False

    def _describe(self, module: torch.nn.Module) -> str:
        """Return the name and the class of a layer."""
        names = (name for name, layer in self._module.named_modules() if layer is module)
        return f"{next(names, '')} ({type(module).__name__})"

    def capture_backprops_hook(self, module: torch.nn.Module, *args: Any, **settings: Any) -> None:
        """Record the output gradients of a pass in the backward pass of the training step.

        Raises:
            RuntimeError: If `training_step` itself runs a backward pass through the layer.
        """
        if self.hooks_enabled and self.is_in_step:
            raise RuntimeError(
                f"training_step runs a backward pass of its own through {self._describe(module)}, e.g. for "
                "input gradients. DPSGD reads one backward pass a step. Leave it out, or use a frozen copy."
            )
        super().capture_backprops_hook(module, *args, **settings)

    def rearrange_grad_samples(self, *, module: torch.nn.Module, **settings: Any) -> Any:
        """Return the activations and output gradients of one pass through a layer, `(batch, ...)` each.

        Raises:
            RuntimeError: If another pass had more rows, because Opacus would add this pass's rows to the
                first of those. Also if no pass was recorded, as in eval mode.
        """
        if not getattr(module, "activations", None):
            if not module.training:
                raise RuntimeError(
                    f"{self._describe(module)} has trained parameters but was in eval mode in a training "
                    "step. Freeze its parameters with requires_grad_(False), or leave it in train mode."
                )
            raise RuntimeError(
                f"{self._describe(module)} got gradients of a pass that was not recorded in training_step. "
                "Leave out torch.func, torch.compile and a second backward pass for trained layers."
            )
        activations, backprops = super().rearrange_grad_samples(module=module, **settings)
        rows, max_rows = len(backprops), module.max_batch_len
        # packed sequences end one after the other, so passes of an RNN may have fewer rows
        if rows != max_rows and not isinstance(module, RNNLinear):
            raise RuntimeError(
                f"{self._describe(module)} saw {rows} rows in one pass and {max_rows} in another. "
                "Pass all samples of the batch through it every time, and mask its outputs."
            )
        # Opacus ignores padding_idx
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            backprops = backprops.masked_fill((activations[0] == module.padding_idx).unsqueeze(-1), 0.0)
        return activations, backprops


class GridDPOptimizer(DPOptimizer):  # type: ignore[misc]
    """DP-SGD optimiser that clips per-sample gradients, sums integers and adds exact discrete Gaussian noise.

    It wraps the user's optimiser, which then steps with the noisy gradients.

    Args:
        optimizer: The user's optimiser.
        noise_multiplier: Standard deviation of the noise divided by `max_grad_norm`, > 0.
        max_grad_norm: L2 norm to which each per-sample gradient is clipped, > 0.
        expected_batch_size: Expected number of samples in a batch, the divisor of the noisy sum. The caller
            changes it when clients take turns.
        words: Called once a step, returns the source of random 64-bit words for the noise.
        loss_reduction: Reduction of the user's loss over a batch. The noisy sum is divided for "mean" only.

    Attributes:
        batch_is_empty: Whether the present batch has no sample. Its placeholder row then counts as zero.
        batch_size: Number of samples in the present batch. Every layer must have seen as many rows. None
            skips this check.
        num_non_finite: Number of samples so far whose gradient was not finite and counted as zero.
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
        """Clip, add noise and average, after a check that every parameter has per-sample gradients.

        Raises:
            RuntimeError: If a parameter has no gradient.
        """
        without = sum(getattr(p, "grad_sample", None) is None for p in self.params)
        if without:
            raise RuntimeError(
                f"{without} of {len(self.params)} parameters have no gradient of this batch. "
                "Return a loss for every batch, and freeze parameters that it does not use."
            )
        is_done: bool | None = super().pre_step(closure)
        return is_done

    def clip_and_accumulate(self) -> None:
        """Clip every per-sample gradient and sum the clipped gradients in integer steps of the grid.

        Raises:
            RuntimeError: If there were several backward passes, or if layers saw another number of rows than
                `batch_size`. A sample could then add `max_grad_norm` in each pass or row.
        """
        if any(isinstance(p.grad_sample, list) for p in self.params):
            raise RuntimeError(
                "There were several backward passes in one step. "
                "Add the losses in training_step, and leave backward to Lightning."
            )
        samples = [self._get_flat_grad_sample(p).double() for p in self.params]
        rows = {len(g) for g in samples}
        if self.batch_size is not None and not self.batch_is_empty and rows != {self.batch_size}:
            raise RuntimeError(
                f"Layers saw {', '.join(map(str, sorted(rows)))} rows for a batch of {self.batch_size} "
                "samples. Give every layer the samples along axis 0 (Linear takes (batch, time, features)), "
                "and positions one row per sample."
            )
        squares = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in samples])
        norms = squares.sum(0).sqrt()
        finite = torch.isfinite(norms)
        if self.batch_is_empty:
            finite = torch.zeros_like(finite)
        else:
            self.num_non_finite += int((~finite).sum())
        # the margin of 1e-9 is far above the rounding error of a float64 norm
        factors = (self.max_grad_norm * (1.0 - 1e-9) / norms.clamp(min=1e-300)).clamp(max=1.0)
        factors = torch.where(finite, factors, 0.0) / self.grid
        for p, g in zip(self.params, samples, strict=True):
            g = torch.where(finite.reshape(-1, *[1] * (g.dim() - 1)), g, 0.0)  # 0 times infinity is NaN
            # truncate toward 0, because rounding to the nearest step could lengthen the gradient
            steps = (g * factors.reshape(-1, *[1] * (g.dim() - 1))).trunc()
            p.summed_grad = steps.to(torch.int64).sum(0)  # integer sums do not depend on the order

    def add_noise(self) -> None:
        """Add integer noise to the sums, and convert them to floating-point gradients."""
        words = self._words()  # one source for the whole step: parameters draw from it one after the other
        for p in self.params:
            noise = discrete_gaussian(STEPS_PER_SIGMA, p.numel(), words)
            noisy = p.summed_grad + torch.from_numpy(noise).reshape(p.shape).to(p.device)
            # rounding comes after the noise, so it is post-processing
            p.grad = (noisy.double() * self.grid).to(p.dtype)
