"""Numbers, texts and containers in an attribute of the module: a table, and what is more than one line."""

from collections import defaultdict

import numpy as np
import torch

from tests.isolation.worlds import Shape


def kept(module, name, make, put, read, new=False):
    """A row whose module keeps what `make` returns.

    Args:
        module: Where the row is.
        name: The row's.
        make: Without arguments.
        put: Takes what is kept and the loss as a number, and changes it, or returns what is kept instead.
        read: Of what is kept, a number, by which the loss is divided.
        new: Does `put` return it?
    """

    def begin(self):
        self.kept = make()

    def scaled(self, loss):
        found = put(self.kept, loss.item())
        if new:
            self.kept = found
        return loss / read(self.kept)

    return type(name, (Shape,), {"begin": begin, "scaled": scaled, "__module__": module})


def mean(kept, loss):
    return 0.5 * (kept + loss)


class Metrics(dict[str, float]):
    """A dictionary with dots."""

    def __getattr__(self, name):
        return self[name]


_NEW = {
    "ScalarTensor": (lambda: torch.ones(()), mean, float),
    "Float": (lambda: 1.0, mean, float),
    "NumpyArray": (lambda: np.ones(1), np.append, lambda a: float(a.mean())),
}
_CHANGED = {
    "TensorInPlace": (lambda: torch.ones(1), lambda t, x: t.mul_(0.5).add_(0.5 * x), lambda t: t[0].clone()),
    "ListOfFloats": (list, lambda a, x: a.append(x), sum),
    "DefaultDict": (lambda: defaultdict(lambda: 1.0), lambda d, x: d.update(a=d["a"] + x), lambda d: d["a"]),
    "DictSubclass": (
        lambda: Metrics(mean=1.0),
        lambda d, x: d.update(mean=mean(d.mean, x)),
        lambda d: d.mean,
    ),
}
for _name, _row in _NEW.items():
    globals()[_name] = kept(__name__, _name, *_row, new=True)
for _name, _row in _CHANGED.items():
    globals()[_name] = kept(__name__, _name, *_row)


class FloatInSharedStep(Shape):
    """Training and validation call one `_step`, which keeps a mean."""

    def begin(self):
        self.mean = 1.0

    def _step(self, batch):
        loss = self.loss(batch)
        self.mean = 0.5 * (self.mean + loss.item())
        return loss / self.mean

    def training_step(self, batch, batch_idx):
        return self._step(batch)

    def validation_step(self, batch, batch_idx):
        self._step(batch)
