"""Callbacks and what they share with the module."""

from typing import Any

from torch import Tensor

from lightning_fedq._lightning import pl
from tests.isolation.shapes.objects import Meter
from tests.isolation.worlds import Shape


def _norm(module):
    return sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None) ** 0.5


class _ScalesByHelper(pl.Callback):
    def __init__(self) -> None:
        self.meter = Meter()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        mean = self.meter.update(_norm(pl_module))
        for parameter in pl_module.parameters():
            parameter.grad /= mean

    def state_dict(self):
        return {"sum": self.meter.sum}


class CallbackWithHelper(Shape):
    def callbacks(self):
        return (_ScalesByHelper(),)


class _MixesLast(pl.Callback):
    """Mixes the batch before into each batch."""

    last: Tensor | None = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        last, self.last = self.last, batch[0].clone()
        if last is not None:
            batch[0].mul_(0.5).add_(last, alpha=0.5)


class CallbackMixesBatches(Shape):
    def callbacks(self):
        return (_MixesLast(),)


class LambdaCallback(Shape):
    """Its functions close over a meter."""

    def callbacks(self):
        meter = Meter()

        def step(trainer, pl_module, optimizer):
            for parameter in pl_module.parameters():
                parameter.grad /= meter.update(_norm(pl_module))

        return (pl.callbacks.LambdaCallback(on_before_optimizer_step=step),)


class _Shares(pl.Callback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.meter.update(outputs["loss"].item())


class CallbackSharesObject(Shape):
    """Module and callback have one meter; a copy must not take them apart."""

    def begin(self):
        self.meter = Meter()

    def callbacks(self):
        return (_Shares(self.meter),)

    def scaled(self, loss):
        return loss / (self.meter.sum / self.meter.count)


class _KnowsModule(pl.Callback):
    def __init__(self, module: Any) -> None:
        self.module = module

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.module.meter.update(outputs["loss"].item())


class CallbackKnowsModule(CallbackSharesObject):
    """It was given the module when it was made."""

    def callbacks(self):
        return (_KnowsModule(self),)


class ConfiguredCallback(Shape):
    """The module brings its callback."""

    def configure_callbacks(self):
        return [_ScalesByHelper()]
