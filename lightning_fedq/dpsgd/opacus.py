"""Opacus's per-sample gradients with stricter checks, and an optimiser whose sums and noise are exact.

`GridDPOptimizer` departs from Opacus's `DPOptimizer` where floating point would break the guarantee. It
truncates every clipped per-sample gradient toward zero to integer steps of sigma / 2^14, so that its norm can
only shrink. Sums and noise are integers, and the noise is an exact discrete Gaussian from an AES stream. A
sample whose gradient is not finite counts as zero. The accountant treats the noise as continuous. At 2^14
steps per sigma the difference is below double precision.

References:
    Abadi et al., Deep Learning with Differential Privacy, 2016.
    Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, 2020.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fedq.dpsgd.layers import SampleGradientError, describe_layer, refuse_rows
from lightning_fedq.functional.noise.discrete_gaussian import discrete_gaussian
from lightning_fedq.imports import extra

with extra("opacus", "DP-SGD"):
    from opacus.grad_sample import GradSampleHooks
    from opacus.layers.dp_rnn import RNNLinear
    from opacus.optimizers import DPOptimizer
    from opacus.utils.module_utils import trainable_modules

STEPS_PER_SIGMA = 2.0**14
NoiseWords = Callable[[int], NDArray[np.uint64]]


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

    def capture_backprops_hook(self, module: torch.nn.Module, *args: Any, **settings: Any) -> None:
        """Record the output gradients of a pass in the backward pass of the training step.

        Raises:
            SampleGradientError: If `training_step` itself runs a backward pass through the layer.
        """
        if self.hooks_enabled and self.is_in_step:
            layer = describe_layer(self._module, module)
            raise SampleGradientError(
                f"training_step runs a backward pass of its own through {layer}, e.g. for input gradients. "
                "DPSGD reads one backward pass a step. Leave it out, or use a frozen copy."
            )
        super().capture_backprops_hook(module, *args, **settings)

    def rearrange_grad_samples(self, *, module: torch.nn.Module, **settings: Any) -> Any:
        """Return the activations and output gradients of one pass through a layer, `(batch, ...)` each.

        Raises:
            RuntimeError: If another pass had more rows, because Opacus would add this pass's rows to the
                first of those. Also if no pass was recorded, as in eval mode.
        """
        layer = describe_layer(self._module, module)
        if not getattr(module, "activations", None):
            if not module.training:
                raise RuntimeError(
                    f"{layer} has trained parameters but was in eval mode in a training "
                    "step. Freeze its parameters with requires_grad_(False), or leave it in train mode."
                )
            raise RuntimeError(
                f"{layer} got gradients of a pass that was not recorded in training_step. "
                "Leave out torch.func, torch.compile and a second backward pass for trained layers."
            )
        activations, backprops = super().rearrange_grad_samples(module=module, **settings)
        rows, max_rows = len(backprops), module.max_batch_len
        # packed sequences end one after the other, so passes of an RNN may have fewer rows
        if rows != max_rows and not isinstance(module, RNNLinear):
            raise RuntimeError(
                f"{layer} saw {rows} rows in one pass and {max_rows} in another. "
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
            refuse_rows(rows, self.batch_size)
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
