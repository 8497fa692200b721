"""Memory that moves no update at once: it reaches checkpoints, loggers or validation, or the first fills it.

What pickling can carry is isolated; the rest is found by the trial in forks, and refused by its name.
"""

import mmap
import threading
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_fedq._lightning import pl
from tests.isolation.worlds import Samples, Shape

_FOUND = r"Data of client \d+ changed results"


class _Kept(Shape):
    """Keeps losses somewhere, and shows their sum in checkpoints."""

    refused = _FOUND

    def keep(self, loss):
        raise NotImplementedError

    def kept(self):
        raise NotImplementedError

    def scaled(self, loss):
        self.keep(loss.item())
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["kept"] = self.kept()


# ---- methods of builtins: isolated with what they belong to ---------------------------------------------
class BoundAppend(_Kept):
    refused = ""

    def begin(self):
        self.losses = []
        self.put = self.losses.append

    def keep(self, loss):
        self.put(loss)

    def kept(self):
        return float(sum(self.losses))


class GradientsIntoList(Shape):
    """A hook that is a method of a list: exact gradients in a checkpoint."""

    def begin(self):
        self.grads = []
        self.net.weight.register_hook(self.grads.append)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["grads"] = [one.clone() for one in self.grads]


# ---- outside of every world: seen by the trial ----------------------------------------------------------
class _Meter:
    losses: ClassVar[list[float]] = []


class OfAClass(_Kept):
    @classmethod
    def forget(cls):
        _Meter.losses.clear()

    def keep(self, loss):
        _Meter.losses.append(loss)

    def kept(self):
        return sum(_Meter.losses)


class SumInValidation(OfAClass):
    def on_save_checkpoint(self, checkpoint):
        """Nothing."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("kept", self.kept())


class ToTheLogger(OfAClass):
    def on_save_checkpoint(self, checkpoint):
        """Nothing."""

    def on_validation_end(self):
        self.logger.log_metrics({"kept": self.kept()})


class FirstOfAll(OfAClass):
    """Whoever comes first, the rehearsal's client say, decides for all."""

    def keep(self, loss):
        if not _Meter.losses:
            _Meter.losses.append(loss)

    def scaled(self, loss):
        return super().scaled(loss) / _Meter.losses[0]


class OnTheStrategy(_Kept):
    def keep(self, loss):
        accelerator = self.trainer.strategy.accelerator
        accelerator.seen = getattr(accelerator, "seen", 0.0) + loss

    def kept(self):
        return float(getattr(self.trainer.strategy.accelerator, "seen", 0.0))


class ThreadLocal(_Kept):
    place = threading.local()

    @classmethod
    def forget(cls):
        cls.place.seen = 0.0

    def keep(self, loss):
        self.place.seen += loss

    def kept(self):
        return self.place.seen


_OUTPUTS = []


class HookOfAllModules(_Kept):
    handle: ClassVar[Any] = None

    @classmethod
    def forget(cls):
        _OUTPUTS.clear()
        if cls.handle is not None:
            cls.handle.remove()

    def begin(self):
        type(self).handle = nn.modules.module.register_module_forward_hook(self.note)

    @staticmethod
    def note(module, inputs, output):
        if isinstance(module, nn.Linear) and module.training:
            _OUTPUTS.append(float(output.sum()))

    def keep(self, loss):
        """What the hook has seen is kept."""

    def kept(self):
        return sum(_OUTPUTS)


# ---- shared memory --------------------------------------------------------------------------------------
class FirstInAMap(_Kept):
    """The first client's loss, for all, in anonymous memory that a fork does not drop."""

    memory: ClassVar[Any] = mmap.mmap(-1, 8)

    @classmethod
    def forget(cls):
        np.frombuffer(cls.memory, np.float64)[0] = 0.0

    def keep(self, loss):
        if not self.kept():
            np.frombuffer(self.memory, np.float64)[0] = loss

    def kept(self):
        return float(np.frombuffer(self.memory, np.float64)[0])


# ---- data -------------------------------------------------------------------------------------------------
class _Rows(Dataset[Any]):
    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets, self.scale, self.seen = inputs, targets, None, list[float]()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class _ByFirst(_Rows):
    def __getitem__(self, index):
        if self.scale is None:
            self.scale = self.targets[index].abs() + 1
        return self.inputs[index], self.targets[index] / self.scale


class NormalisedByTheFirstSample(Shape):
    refused = _FOUND

    class data(Samples):
        def train_set(self):
            return _ByFirst(self.inputs, self.targets)


class StateOfTheDataModule(Shape):
    refused = ""

    class data(Samples):
        def begin(self):
            self.total = 0.0

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.total += float(batch[1].sum()) if self.trainer.training else 0.0
            return batch

        def state_dict(self):
            return {"total": self.total}


class BigTable(Shape):
    """A data module's table, which counts as data."""

    refused = _FOUND

    class data(Samples):
        def begin(self):
            self.table = torch.zeros(1 << 19)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            if self.trainer.training:
                self.table[0] += batch[1].sum()
            return batch

        def state_dict(self):
            return {"first": float(self.table[0])}


# ---- lengths and counts -----------------------------------------------------------------------------------
class BufferOfOutliers(Shape):
    """Which buffers change follows from the data."""

    refused = _FOUND

    def begin(self):
        self.register_buffer("spikes", torch.zeros(8))

    def scaled(self, loss):
        if loss.item() > 1.5:
            self.spikes += 1
        return loss


class CountsByData(Shape):
    """A second pass where the loss is high: `num_batches_tracked` tells."""

    refused = _FOUND

    def begin(self):
        self.norm = nn.BatchNorm1d(3)

    def loss(self, batch):
        loss = nn.functional.mse_loss(self.net(self.norm(batch[0])), batch[1])
        if self.training and loss.item() > 1.5:
            self.norm(batch[0])
        return loss


class _InCallback(pl.Callback):
    losses: ClassVar[list[float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.losses.append(float(outputs["loss"]))

    def state_dict(self):
        return {"losses": list(self.losses)}


class StateOfACallback(Shape):
    refused = _FOUND

    @classmethod
    def forget(cls):
        _InCallback.losses.clear()

    def callbacks(self):
        return [_InCallback()]
