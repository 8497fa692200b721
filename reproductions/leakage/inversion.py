"""Attacks that turn a gradient back into the samples it came from.

DLG, iDLG and Inverting Gradients search inputs whose gradient looks like the observed one. `Analytic` needs
no search where the first layer is fully connected. `Matching`, which picks among candidates, is in the
library.

References:
    Zhu, Liu, Han, Deep Leakage from Gradients, NeurIPS 2019 (DLG).
    Zhao, Mopuri, Bilen, iDLG: Improved Deep Leakage from Gradients, 2020.
    Geiping et al., Inverting Gradients, NeurIPS 2020.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fedq.functional.flatten import unflatten
from lightning_fedq.leakage.gradients import differentiable_gradient, trainable
from lightning_fedq.leakage.matching import Attack, Problem
from reproductions.leakage.second_gradients import check_twice_differentiable

LARGEST_BATCH = 32
LARGEST_MODEL = 2_000_000
"""Samples and parameters beyond which a search of inputs is refused."""


def split_like(model: nn.Module, gradient: Tensor) -> list[Tensor]:
    """Cut a flat gradient `(dim,)` into the shapes of the model's parameters."""
    return unflatten(gradient, [parameter.shape for parameter in trainable(model)])


def explain(problem: Problem, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Message that some inputs would have sent, as a function of them.

    To be compared with `observed`.
    """
    if problem.shares is None:
        return differentiable_gradient(problem.model, problem.loss, inputs, labels, problem.steps)
    count = len(problem.shares)
    own = [
        differentiable_gradient(problem.model, problem.loss, *part, problem.steps)
        for part in zip(inputs.chunk(count), labels.chunk(count), strict=True)
    ]
    mean = [torch.stack(parts).mean(0) for parts in zip(*own, strict=True)]
    root = math.sqrt(problem.share_weight)
    return mean + [root * (a - b) for one in own for a, b in zip(one, mean, strict=True)]


def observed(problem: Problem) -> list[Tensor]:
    """The message as seen, in the parts that `explain` gives."""
    mean = split_like(problem.model, problem.gradient)
    if problem.shares is None:
        return mean
    away = math.sqrt(problem.share_weight) * (problem.shares - problem.shares.mean(0))
    return mean + [part for row in away for part in split_like(problem.model, row)]


def infer_labels(problem: Problem) -> Tensor:
    """Labels from the last layer: under cross entropy its gradient is negative for the true classes only.

    Args:
        problem: Its last parameter is the bias of the last layer, or the weight where there is no bias.

    Returns:
        `(batch,)` classes with the most negative gradients: exact for one sample, a guess for more.
    """
    seen = problem.gradient[None] if problem.shares is None else problem.shares
    found = []
    for row in seen:
        last = split_like(problem.model, row)[-1]
        last = last if last.dim() == 1 else last.sum(1)
        found.append(last.topk(min(problem.shape[0] // len(seen), len(last)), largest=False).indices)
    return torch.cat([labels.sort().values for labels in found])


def _labels(problem: Problem) -> Tensor:
    labels = infer_labels(problem) if problem.labels is None else problem.labels
    if len(labels) < problem.shape[0]:
        raise ValueError(
            f"a batch of {problem.shape[0]} has more samples than classes, so labels can't be inferred; "
            "give the attacker the labels"
        )
    return labels


@dataclass(frozen=True)
class Analytic(Attack):
    """Read the input off the gradient of a first fully connected layer with a bias.

    One sample: least squares over the rows, x = sum_c g_b[c] G_W[c] / |g_b|^2; exact without noise. More
    samples with distinct known labels and a model of one layer: x_y = G_W[y] / g_b[y], approximately.
    """

    def check(self, problem: Problem) -> None:
        parts = split_like(problem.model, problem.gradient)
        features = problem.candidates[0].numel()
        if len(parts) < 2 or parts[0].dim() != 2 or parts[0].shape[1] != features or parts[1].dim() != 1:
            raise ValueError(
                "the attack Analytic needs a model that starts with a fully connected layer with a bias, got "
                f"parameters of shapes {[tuple(part.shape) for part in parts[:2]]} for inputs of {features} "
                "values; use iDLG or InvertingGradients"
            )
        if problem.shape[0] > 1 and (len(parts) != 2 or problem.labels is None):
            raise ValueError(
                f"the attack Analytic needs a batch of 1 for a model with several layers, "
                f"got {problem.shape[0]}; use iDLG or InvertingGradients"
            )

    def invert(self, problem: Problem, generator: torch.Generator) -> Tensor:
        weight, bias = (part.double() for part in split_like(problem.model, problem.gradient)[:2])
        if problem.shape[0] == 1:
            found = (bias @ weight / bias.square().sum().clamp(min=1e-300))[None]
        else:
            labels = _labels(problem)
            found = weight[labels] / torch.where(bias[labels] == 0, 1e-300, bias[labels])[:, None]
        found = found.nan_to_num().clamp(problem.low, problem.high)
        return found.reshape(problem.shape).to(problem.candidates)


@dataclass(frozen=True)
class _Search(Attack):
    """Base of the searches: limits, and a start drawn from the box of inputs."""

    iterations: int

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations must be >= 1, got {self.iterations}")

    def check(self, problem: Problem) -> None:
        # says what one attempt costs
        batch, dim = problem.shape[0], sum(p.numel() for p in trainable(problem.model))
        dummy = problem.candidates[:1].expand(problem.shape).clone()
        labels = problem.candidate_labels[:1].expand(batch)
        start = time.perf_counter()
        check_twice_differentiable(problem.model, problem.loss, dummy[:1], labels[:1])
        seconds = (time.perf_counter() - start) * batch * self.iterations
        if batch > LARGEST_BATCH or dim > LARGEST_MODEL:
            raise ValueError(
                f"a batch of {batch} and a model of {dim:,} parameters are too large for "
                f"{type(self).__name__}, at most {LARGEST_BATCH} and {LARGEST_MODEL:,}; one attempt would "
                f"take some {seconds:.0f} s here. Attack smaller batches, or use Matching"
            )

    def _start(self, problem: Problem, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(problem.shape, generator=generator, dtype=problem.candidates.dtype)
        start = problem.low + (problem.high - problem.low) * uniform
        return start.to(problem.candidates.device).requires_grad_()


def _lbfgs(variables: list[Tensor], objective: _Objective, iterations: int) -> None:
    optimizer = torch.optim.LBFGS(variables, max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        value: Tensor = objective()
        for variable, part in zip(variables, torch.autograd.grad(value, variables), strict=True):
            variable.grad = part
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]


class _Objective:
    """Squared gradient distance over the candidates' mean squared gradient, as a function of the dummies.

    Not over the observed one: under much noise that would shrink the slopes below L-BFGS's tolerance.
    """

    def __init__(self, problem: Problem, inputs: Tensor, labels: Tensor, soft: bool) -> None:
        self.problem, self.inputs, self.labels, self.soft = problem, inputs, labels, soft
        self.target = observed(problem)
        self.scale = 1.0 / problem.candidate_gradients.square().sum(1).mean().clamp(min=1e-30)

    def __call__(self) -> Tensor:
        self.problem.check_time()
        labels = self.labels.softmax(1) if self.soft else self.labels
        pairs = zip(explain(self.problem, self.inputs, labels), self.target, strict=True)
        return self.scale * torch.stack([(a - b).square().sum() for a, b in pairs]).sum()


@dataclass(frozen=True)
class DLG(_Search):
    """Search inputs and soft labels by L-BFGS on the squared distance of the gradients.

    Args:
        iterations: Steps of L-BFGS, >= 1.
        num_classes: Classes of the soft labels, >= 2.
    """

    iterations: int = 100
    num_classes: int = 10

    def invert(self, problem: Problem, generator: torch.Generator) -> Tensor:
        inputs = self._start(problem, generator)
        logits = torch.randn(problem.shape[0], self.num_classes, generator=generator).to(inputs)
        logits.requires_grad_()
        with torch.enable_grad():
            _lbfgs([inputs, logits], _Objective(problem, inputs, logits, soft=True), self.iterations)
        return inputs.detach().nan_to_num().clamp(problem.low, problem.high)


@dataclass(frozen=True)
class iDLG(_Search):
    """DLG with labels that are known, or else inferred from the last layer.

    Args:
        iterations: Steps of L-BFGS, >= 1.
    """

    iterations: int = 100

    def invert(self, problem: Problem, generator: torch.Generator) -> Tensor:
        inputs = self._start(problem, generator)
        with torch.enable_grad():
            _lbfgs([inputs], _Objective(problem, inputs, _labels(problem), soft=False), self.iterations)
        return inputs.detach().nan_to_num().clamp(problem.low, problem.high)


@dataclass(frozen=True)
class InvertingGradients(_Search):
    """Search inputs in their box by signed Adam on 1 - cosine of the gradients, plus total variation.

    The direction of a gradient survives one-bit messages and clipping, where its length does not.

    Args:
        iterations: Steps of Adam, >= 1; the step size falls by 10 at 3/8, 5/8 and 7/8 of them.
        step_size: First step, as a share of the inputs' range, > 0.
        smoothness: Weight of the pictures' total variation, >= 0; ignored where inputs are no pictures.
    """

    iterations: int = 300
    step_size: float = 0.05
    smoothness: float = 1e-3

    def invert(self, problem: Problem, generator: torch.Generator) -> Tensor:
        inputs, labels = self._start(problem, generator), _labels(problem)
        target = observed(problem)
        length = torch.stack([part.square().sum() for part in target]).sum().sqrt().clamp(min=1e-30)
        optimizer = torch.optim.Adam([inputs], lr=self.step_size * (problem.high - problem.low))
        stones = [self.iterations * share // 8 for share in (3, 5, 7)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, stones, 0.1)
        for _ in range(self.iterations):
            problem.check_time()
            with torch.enable_grad():
                parts = explain(problem, inputs, labels)
                inner = torch.stack([(a * b).sum() for a, b in zip(parts, target, strict=True)]).sum()
                own = torch.stack([part.square().sum() for part in parts]).sum().clamp(min=1e-30).sqrt()
                value = 1.0 - inner / (own * length)
                if inputs.dim() == 4:
                    changes = inputs.diff(dim=2).abs().mean() + inputs.diff(dim=3).abs().mean()
                    value = value + self.smoothness * changes
                (slope,) = torch.autograd.grad(value, inputs)
            inputs.grad = slope.sign()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                inputs.clamp_(problem.low, problem.high)
        return inputs.detach().nan_to_num()
