"""Hooks, closures, partial functions and weak references."""

from __future__ import annotations

import functools
import weakref

import torch

from tests.isolation.worlds import Shape


class _Remembers(Shape):
    """Keeps the mean of what it is told."""

    def begin(self):
        self.mean = 1.0
        self.attach()

    def attach(self):
        """Where a row says how it is told."""

    def tell(self, value):
        self.mean = 0.5 * (self.mean + value.detach().abs().mean().item())

    def scaled(self, loss):
        return loss / self.mean


class ForwardHookOverSelf(_Remembers):
    def attach(self):
        self.net.register_forward_hook(lambda layer, args, output: self.tell(output))


class ForwardPreHook(_Remembers):
    def attach(self):
        self.net.register_forward_pre_hook(lambda layer, args: self.tell(args[0]))


class BackwardHook(_Remembers):
    def attach(self):
        self.net.register_full_backward_hook(lambda layer, before, after: self.tell(after[0]))


class GradientHook(_Remembers):
    """Of a parameter, over the module."""

    def attach(self):
        self.net.weight.register_hook(self.tell)


class AfterAccumulatingGradients(_Remembers):
    def attach(self):
        self.net.weight.register_post_accumulate_grad_hook(lambda weight: self.tell(weight.grad))


class PartialOverSelf(_Remembers):
    def attach(self):
        self.told = functools.partial(_Remembers.tell, self)

    def scaled(self, loss):
        self.told(loss)
        return loss / self.mean


class WeakReference(_Remembers):
    def attach(self):
        self.own = weakref.ref(self)

    def scaled(self, loss):
        module = self.own()
        module.tell(loss)
        return loss / self.mean


class WeakDictionary(_Remembers):
    """Means by layer."""

    def attach(self):
        self.means = weakref.WeakKeyDictionary({self.net: 1.0})

    def scaled(self, loss):
        mean = self.means[self.net] = 0.5 * (self.means[self.net] + loss.item())
        return loss / mean


class Owner:
    """Knows its module."""

    def __init__(self, module: _Remembers) -> None:
        self.module = module


class BackReference(_Remembers):
    def attach(self):
        self.owner = Owner(self)

    def scaled(self, loss):
        self.owner.module.tell(loss)
        return loss / self.mean


class HookSetOnInstance(_Remembers):
    def attach(self):
        def on_train_batch_end(outputs, batch, batch_idx):
            self.tell(outputs["loss"])

        self.on_train_batch_end = on_train_batch_end


class ForwardSetOnLayer(_Remembers):
    """A layer's `forward` is replaced on the instance, as adapters do."""

    def attach(self):
        forward = self.net.forward

        def looking(x):
            output = forward(x)
            self.tell(output)
            return output

        self.net.forward = looking


def _running_mean():
    mean = torch.ones(())

    def scale(loss):
        mean.mul_(0.5).add_(0.5 * loss.item())
        return loss / mean.clone()

    return scale


class ClosureOverTensor(Shape):
    def begin(self):
        self.scale = _running_mean()

    def scaled(self, loss):
        return self.scale(loss)


def _counting():
    mean = 1.0

    def scale(loss):
        nonlocal mean
        mean = 0.5 * (mean + loss.item())
        return loss / mean

    return scale


class ClosureOverNumber(Shape):
    def begin(self):
        self.scale = _counting()

    def scaled(self, loss):
        return self.scale(loss)


class DefaultArgumentOfInnerFunction(Shape):
    def begin(self):
        def scale(loss, losses=[]):  # noqa: B006
            losses.append(loss.item())
            return loss / sum(losses)

        self.scale = scale

    def scaled(self, loss):
        return self.scale(loss)


class AttributeOfAFunctionWithoutCells(Shape):
    def begin(self):
        def mean():
            """Where a number is kept."""

        mean.seen = 1.0
        self.mean = mean

    def scaled(self, loss):
        self.mean.seen = 0.5 * (self.mean.seen + loss.item())
        return loss / self.mean.seen


class CacheOfItsOwn(Shape):
    def begin(self):
        self.losses = functools.lru_cache(lambda _: [])

    def scaled(self, loss):
        self.losses(0).append(loss.item())
        return loss / sum(self.losses(0))


class AttributeOfInnerFunction(Shape):
    def begin(self):
        def scale(loss):
            scale.mean = 0.5 * (scale.mean + loss.item())
            return loss / scale.mean

        scale.mean = 1.0
        self.scale = scale

    def scaled(self, loss):
        return self.scale(loss)
