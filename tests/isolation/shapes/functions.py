"""Hooks, closures, partial functions and weak references."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.isolation.worlds import Shape


class _Remembers(Shape):
    """Keeps the mean of what it is told."""

    def begin(self) -> None:
        self.mean = 1.0
        self.attach()

    def attach(self) -> None:
        """Where a row says how it is told."""

    def tell(self, value: Tensor) -> None:
        self.mean = 0.5 * (self.mean + value.detach().abs().mean().item())

    def scaled(self, loss: Tensor) -> Tensor:
        return loss / self.mean


class ForwardHookOverSelf(_Remembers):
    def attach(self) -> None:
        self.net.register_forward_hook(lambda layer, args, output: self.tell(output))


class ForwardPreHook(_Remembers):
    def attach(self) -> None:
        self.net.register_forward_pre_hook(lambda layer, args: self.tell(args[0]))


class BackwardHook(_Remembers):
    def attach(self) -> None:
        self.net.register_full_backward_hook(lambda layer, before, after: self.tell(after[0]))


class GradientHook(_Remembers):
    """Of a parameter, over the module."""

    def attach(self) -> None:
        self.net.weight.register_hook(self.tell)


class AfterAccumulatingGradients(_Remembers):
    def attach(self) -> None:
        self.net.weight.register_post_accumulate_grad_hook(lambda weight: self.tell(weight.grad))


class PartialOverSelf(_Remembers):
    def attach(self) -> None:
        self.told = functools.partial(_Remembers.tell, self)

    def scaled(self, loss: Tensor) -> Tensor:
        self.told(loss)
        return loss / self.mean


class WeakReference(_Remembers):
    def attach(self) -> None:
        self.own = weakref.ref(self)

    def scaled(self, loss: Tensor) -> Tensor:
        module: Any = self.own()
        module.tell(loss)
        return loss / self.mean


class WeakDictionary(_Remembers):
    """Means by layer."""

    def attach(self) -> None:
        self.means: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary({self.net: 1.0})

    def scaled(self, loss: Tensor) -> Tensor:
        mean = self.means[self.net] = 0.5 * (self.means[self.net] + loss.item())
        return loss / mean


class Owner:
    """Knows its module."""

    def __init__(self, module: _Remembers) -> None:
        self.module = module


class BackReference(_Remembers):
    def attach(self) -> None:
        self.owner = Owner(self)

    def scaled(self, loss: Tensor) -> Tensor:
        self.owner.module.tell(loss)
        return loss / self.mean


class HookSetOnInstance(_Remembers):
    def attach(self) -> None:
        def on_train_batch_end(outputs: Any, batch: Any, batch_idx: int) -> None:
            self.tell(outputs["loss"])

        self.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]


class ForwardSetOnLayer(_Remembers):
    """A layer's `forward` is replaced on the instance, as adapters do."""

    def attach(self) -> None:
        forward = self.net.forward

        def looking(x: Tensor) -> Tensor:
            output: Tensor = forward(x)
            self.tell(output)
            return output

        self.net.forward = looking  # type: ignore[method-assign]


def _running_mean() -> Callable[[Tensor], Tensor]:
    mean = torch.ones(())

    def scale(loss: Tensor) -> Tensor:
        mean.mul_(0.5).add_(0.5 * loss.item())
        return loss / mean.clone()

    return scale


class ClosureOverTensor(Shape):
    def begin(self) -> None:
        self.scale = _running_mean()

    def scaled(self, loss: Tensor) -> Tensor:
        return self.scale(loss)


def _counting() -> Callable[[Tensor], Tensor]:
    mean = 1.0

    def scale(loss: Tensor) -> Tensor:
        nonlocal mean
        mean = 0.5 * (mean + loss.item())
        return loss / mean

    return scale


class ClosureOverNumber(Shape):
    def begin(self) -> None:
        self.scale = _counting()

    def scaled(self, loss: Tensor) -> Tensor:
        return self.scale(loss)


class DefaultArgumentOfInnerFunction(Shape):
    def begin(self) -> None:
        def scale(loss: Tensor, losses: list[float] = []) -> Tensor:  # noqa: B006
            losses.append(loss.item())
            return loss / sum(losses)

        self.scale = scale

    def scaled(self, loss: Tensor) -> Tensor:
        return self.scale(loss)


class AttributeOfInnerFunction(Shape):
    def begin(self) -> None:
        def scale(loss: Tensor) -> Tensor:
            scale.mean = 0.5 * (scale.mean + loss.item())  # type: ignore[attr-defined]
            return loss / scale.mean  # type: ignore[attr-defined]

        scale.mean = 1.0  # type: ignore[attr-defined]
        self.scale = scale

    def scaled(self, loss: Tensor) -> Tensor:
        return self.scale(loss)
