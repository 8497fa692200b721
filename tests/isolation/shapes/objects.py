"""Objects in an attribute of the module."""

import io
import queue
import random
import threading

import numpy as np
import torchmetrics

from tests.isolation.shapes.values import kept, mean
from tests.isolation.worlds import Shape


class Meter:
    """A running mean, as half of all training scripts have one."""

    def __init__(self) -> None:
        self.sum, self.count = 1.0, 1

    def update(self, value):
        self.sum, self.count = self.sum + value, self.count + 1
        return self.sum / self.count


class Slotted:
    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = 1.0


_KEPT = {
    "Slots": (Slotted, lambda s, x: setattr(s, "mean", mean(s.mean, x)), lambda s: s.mean),
    "MetricAttribute": (torchmetrics.MeanMetric, lambda m, x: m.update(x), lambda m: m.compute()),
}
for _name, _row in _KEPT.items():
    globals()[_name] = kept(__name__, _name, *_row)


class Buffered(Shape):
    """A log in memory, read again."""

    def begin(self):
        self.book = io.StringIO()
        self.book.write("1.0")

    def scaled(self, loss):
        self.book.write(f" {loss.item()}")
        return loss / max(map(float, self.book.getvalue().split()))


class PersistentMetric(Shape):
    """Its states are in the module's state dict."""

    def begin(self):
        self.metric = torchmetrics.MeanMetric()
        self.metric.persistent(True)

    def scaled(self, loss):
        self.metric.update(loss.detach())
        return loss / self.metric.compute()


class OwnRandom(Shape):
    """Draws as often as the data say."""

    def begin(self):
        self.random, self.generator = random.Random(0), np.random.default_rng(0)

    def scaled(self, loss):
        for _ in range(int(10 * loss.item()) % 7):
            self.random.random(), self.generator.random()
        return loss * self.random.random() * float(self.generator.random())


class Queue(Shape):
    """Holds a lock, which nothing can copy."""

    refused = r"(?i)queue"

    def begin(self):
        self.queue = queue.Queue()
        self.queue.put(1.0)

    def scaled(self, loss):
        last = self.queue.get()
        self.queue.put(loss.item())
        return loss / last


class Locked(Shape):
    """A meter for several threads."""

    refused = r"(?i)lock"

    def begin(self):
        self.lock, self.meter = threading.Lock(), Meter()

    def scaled(self, loss):
        with self.lock:
            return loss / self.meter.update(loss.item())


def running_mean():
    mean = 1.0
    while True:
        mean = 0.5 * (mean + (yield mean))


class RunningGenerator(Shape):
    refused = "averager"

    def begin(self):
        self.averager = running_mean()
        next(self.averager)

    def scaled(self, loss):
        return loss / self.averager.send(loss.item())


class SharedObject(Shape):
    """Two attributes are one object; a copy must not take them apart."""

    def begin(self):
        self.meter = Meter()
        self.meters = {"train": self.meter}

    def scaled(self, loss):
        self.meters["train"].update(loss.item())
        return loss / self.meter.update(loss.item())


class ExtraState(Shape):
    """What is kept goes into the state dict by itself."""

    def begin(self):
        self.mean = 1.0

    def get_extra_state(self):
        return {"mean": self.mean}

    def set_extra_state(self, state):
        """Left as it is, so that a load doesn't forget."""

    def scaled(self, loss):
        self.mean = 0.5 * (self.mean + loss.item())
        return loss / self.mean
