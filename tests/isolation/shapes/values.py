"""Numbers, texts and containers in an attribute of the module: a table, and what is more than one line."""

from collections import Counter, UserDict, UserList, defaultdict, deque
from decimal import Decimal
from typing import NamedTuple

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


class Best(NamedTuple):
    loss: float
    name: str = "best"


class Metrics(dict[str, float]):
    """A dictionary with dots."""

    def __getattr__(self, name):
        return self[name]


_NEW = {
    "ScalarTensor": (lambda: torch.ones(()), mean, float),
    "Float": (lambda: 1.0, mean, float),
    "NumpyArray": (lambda: np.ones(1), np.append, lambda a: float(a.mean())),
    "DecimalNumber": (lambda: Decimal(1), lambda d, x: (d + Decimal(x)) / 2, float),
    "NamedTupleOfFloat": (lambda: Best(1.0), lambda b, x: min(b, Best(x)), lambda b: b.loss),
    "Bytes": (lambda: b"1.0", lambda b, x: f"{mean(float(b), x)}".encode(), float),
    "Text": (lambda: "1.0", lambda t, x: f"{mean(float(t), x)}", float),
}
_CHANGED = {
    "TensorInPlace": (lambda: torch.ones(1), lambda t, x: t.mul_(0.5).add_(0.5 * x), lambda t: t[0].clone()),
    "Counted": (lambda: Counter(n=1), lambda c, x: c.update(n=x > 1.5), lambda c: c["n"]),
    "ListOfFloats": (list, lambda a, x: a.append(x), sum),
    "ListOfTensors": (list, lambda a, x: a.append(torch.tensor(x)), sum),
    "Deque": (lambda: deque([1.0], maxlen=4), lambda d, x: d.append(x), sum),
    "DefaultDict": (lambda: defaultdict(lambda: 1.0), lambda d, x: d.update(a=d["a"] + x), lambda d: d["a"]),
    "Set": (set, lambda s, x: s.add(int(10 * x)), lambda s: 1 + len(s)),
    "DictSubclass": (
        lambda: Metrics(mean=1.0),
        lambda d, x: d.update(mean=mean(d.mean, x)),
        lambda d: d.mean,
    ),
    "UserContainers": (
        lambda: UserDict(losses=UserList([1.0])),
        lambda d, x: d["losses"].append(x),
        lambda d: max(d["losses"]),
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


class FloatHalvedAtEpochEnd(Shape):
    def begin(self):
        self.weight = 1.0

    def scaled(self, loss):
        self.weight += loss.item()
        return loss / self.weight

    def on_train_epoch_end(self):
        self.weight /= 2
