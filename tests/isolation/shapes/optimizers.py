"""Gradients, optimisers and schedules."""

from typing import Any

import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from tests.isolation.shapes.objects import Meter
from tests.isolation.worlds import Shape


class LeftoverGradient(Shape):
    """Accumulation by hand over an odd number of batches."""

    def begin(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


class AdamMoments(Shape):
    def configure_optimizers(self):
        return Adam(self.parameters(), lr=0.05)


class StrategyOptimizersReplaced(Shape):
    """Adam first, then SGD with momentum."""

    def on_train_epoch_start(self):
        if not isinstance(self.trainer.optimizers[0], SGD):
            optimizers = [SGD(self.parameters(), lr=0.05, momentum=0.9)]
            self.trainer.strategy.optimizers = optimizers

    def configure_optimizers(self):
        return Adam(self.parameters(), lr=0.05)


class RateByLoss(Shape):
    def scaled(self, loss):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.5 * (group["lr"] + 0.05 / (1 + loss.item()))
        return loss


class PlateauAtEpochEnd(Shape):
    """Stepped by hand with a stored loss: its `best` is a client's exact loss."""

    def begin(self):
        self.last = 0.0

    def scaled(self, loss):
        self.last = loss.item()
        return loss

    def on_train_epoch_end(self):
        schedule = self.lr_schedulers()
        schedule.step(self.last)

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.05)
        schedule = ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", "frequency": 1000},
        }


class ScheduleOverMeter(Shape):
    """A schedule's function closes over what the module keeps."""

    def begin(self):
        self.meter = Meter()

    def scaled(self, loss):
        self.meter.update(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.05)
        schedule = LambdaLR(optimizer, lambda step: self.meter.count / self.meter.sum)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class _Cautious(SGD):
    """Steps by the mean of gradients' norms, which it keeps outside of its state."""

    mean = 1.0

    def step(self, closure=None):
        loss = closure()
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.mean = 0.5 * (self.mean + sum(float(grad.norm()) for grad in grads))
        for grad in grads:
            grad /= self.mean
        super().step()
        return loss


class OptimizerWithNumber(Shape):
    def configure_optimizers(self):
        return _Cautious(self.parameters(), lr=0.05)


class _Nested(Optimizer):
    """Holds another optimiser, as SAM does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)

    def step(self, closure=None):
        loss = closure()
        self.inner.step()
        return loss


class NestedOptimizer(Shape):
    def configure_optimizers(self):
        return _Nested(self.parameters(), lr=0.05)


class OptimizerOfItsOwn(Shape):
    """Lightning does not know it."""

    def begin(self):
        self.automatic_optimization = False
        self.own = SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def training_step(self, batch, batch_idx):
        self.own.zero_grad()
        self.manual_backward(self.loss(batch))
        self.own.step()


class OptimizerHook(Shape):
    """After each step, over the module."""

    def begin(self):
        self.norm = 1.0

    def scaled(self, loss):
        return loss / self.norm

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.05)

        def look(optimizer, args, kwargs):
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.norm = 0.5 * (self.norm + float(torch.cat([g.flatten() for g in grads]).norm()))

        optimizer.register_step_post_hook(look)
        return optimizer
