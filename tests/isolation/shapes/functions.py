"""Hooks, closures, partial functions and weak references."""

from __future__ import annotations

import functools
import weakref

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


class GradientHook(_Remembers):
    """Of a parameter, over the module."""

    def attach(self):
        self.net.weight.register_hook(self.tell)


class AfterAccumulatingGradients(_Remembers):
    def attach(self):
        self.net.weight.register_post_accumulate_grad_hook(lambda weight: self.tell(weight.grad))


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


class WeakSetOfLayers(_Remembers):
    def attach(self):
        self.layers = weakref.WeakSet([self.net])

    def scaled(self, loss):
        self.tell(loss)
        return len(self.layers) * loss / self.mean


class HookSetOnInstance(_Remembers):
    def attach(self):
        def on_train_batch_end(outputs, batch, batch_idx):
            self.tell(outputs["loss"])

        self.on_train_batch_end = on_train_batch_end


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
