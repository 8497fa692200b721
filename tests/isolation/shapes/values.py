"""Numbers, texts and containers in an attribute of the module."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.isolation.worlds import Shape


class ScalarTensor(Shape):
    def begin(self) -> None:
        self.mean = torch.ones(())

    def scaled(self, loss: Tensor) -> Tensor:
        self.mean = 0.5 * (self.mean + loss.detach())
        return loss / self.mean


class TensorInPlace(Shape):
    def begin(self) -> None:
        self.mean = torch.ones(1)

    def scaled(self, loss: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(0.5 * loss.item())
        return loss / self.mean[0]


class Float(Shape):
    def begin(self) -> None:
        self.mean = 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        self.mean = 0.5 * (self.mean + loss.item())
        return loss / self.mean


class FloatInSharedStep(Shape):
    """Training and validation call one `_step`, which keeps a mean."""

    def begin(self) -> None:
        self.mean = 1.0

    def _step(self, batch: Any) -> Tensor:
        loss = self.loss(batch)
        self.mean = 0.5 * (self.mean + loss.item())
        return loss / self.mean

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch)


class FloatHalvedAtEpochEnd(Shape):
    def begin(self) -> None:
        self.weight = 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        self.weight += loss.item()
        return loss / self.weight

    def on_train_epoch_end(self) -> None:
        self.weight /= 2


class Counted(Shape):
    def begin(self) -> None:
        self.counter: Counter[str] = Counter(steps=1)

    def scaled(self, loss: Tensor) -> Tensor:
        self.counter["large" if loss.item() > 1.5 else "small"] += 1
        return loss / (1 + self.counter["large"])


class NumpyFloat(Shape):
    def begin(self) -> None:
        self.mean = np.float32(1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        self.mean = np.float32(0.5) * (self.mean + np.float32(loss.item()))
        return loss / float(self.mean)


class ListOfNumpyFloats(Shape):
    def begin(self) -> None:
        self.losses: list[np.float32] = []

    def scaled(self, loss: Tensor) -> Tensor:
        self.losses.append(np.float32(loss.item()))
        return loss / float(np.mean(self.losses))


class ListOfFloats(Shape):
    def begin(self) -> None:
        self.losses: list[float] = []

    def scaled(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss / sum(self.losses)


class ListOfTensors(Shape):
    def begin(self) -> None:
        self.losses: list[Tensor] = []

    def scaled(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.detach())
        return loss / sum(self.losses)


class NumpyArray(Shape):
    def begin(self) -> None:
        self.losses = np.ones(1)

    def scaled(self, loss: Tensor) -> Tensor:
        self.losses = np.append(self.losses, loss.item())
        return loss / float(self.losses.mean())


class Array(Shape):
    def begin(self) -> None:
        self.losses = array("d", [1.0])

    def scaled(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss / (sum(self.losses) / len(self.losses))


class DecimalNumber(Shape):
    def begin(self) -> None:
        self.mean = Decimal(1)

    def scaled(self, loss: Tensor) -> Tensor:
        self.mean = (self.mean + Decimal(loss.item())) / 2
        return loss / float(self.mean)


class FractionNumber(Shape):
    def begin(self) -> None:
        self.mean = Fraction(1)

    def scaled(self, loss: Tensor) -> Tensor:
        self.mean = (self.mean + Fraction(round(100 * loss.item()), 100)) / 2
        return loss / float(self.mean)


class TupleOfFloat(Shape):
    def begin(self) -> None:
        self.kept = (1.0,)

    def scaled(self, loss: Tensor) -> Tensor:
        self.kept = (0.5 * (self.kept[0] + loss.item()),)
        return loss / self.kept[0]


class Best(NamedTuple):
    loss: float
    name: str = "best"


class NamedTupleOfFloat(Shape):
    def begin(self) -> None:
        self.best = Best(1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        self.best = min(self.best, Best(loss.item()))
        return loss / self.best.loss


class Bytes(Shape):
    def begin(self) -> None:
        self.packed = np.float64(1.0).tobytes()

    def scaled(self, loss: Tensor) -> Tensor:
        mean = 0.5 * (np.frombuffer(self.packed)[0] + loss.item())
        self.packed = np.float64(mean).tobytes()
        return loss / float(mean)


class Text(Shape):
    def begin(self) -> None:
        self.last = "1.0"

    def scaled(self, loss: Tensor) -> Tensor:
        previous, self.last = float(self.last), repr(loss.item())
        return loss / previous


class Deque(Shape):
    def begin(self) -> None:
        self.last: deque[float] = deque([1.0], maxlen=4)

    def scaled(self, loss: Tensor) -> Tensor:
        self.last.append(loss.item())
        return loss / (sum(self.last) / len(self.last))


class DefaultDict(Shape):
    def begin(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(lambda: 1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        self.sums["train"] += loss.item()
        return loss / self.sums["train"]


class Ordered(Shape):
    def begin(self) -> None:
        self.means: OrderedDict[str, float] = OrderedDict(mean=1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        self.means["mean"] = 0.5 * (self.means["mean"] + loss.item())
        return loss / self.means["mean"]


class Set(Shape):
    def begin(self) -> None:
        self.seen: set[int] = set()

    def scaled(self, loss: Tensor) -> Tensor:
        self.seen.add(int(10 * loss.item()))
        return loss / (1 + len(self.seen))


class Metrics(dict[str, float]):
    """A dictionary with dots."""

    def __getattr__(self, name: str) -> float:
        return self[name]


class DictSubclass(Shape):
    def begin(self) -> None:
        self.kept = Metrics(mean=1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        self.kept["mean"] = 0.5 * (self.kept["mean"] + loss.item())
        return loss / self.kept["mean"]


class ListWithOneName(Shape):
    """One entry is no number."""

    def begin(self) -> None:
        self.kept: list[Any] = ["mean", 1.0]

    def scaled(self, loss: Tensor) -> Tensor:
        self.kept[1] = 0.5 * (self.kept[1] + loss.item())
        return loss / self.kept[1]


class UserContainers(Shape):
    def begin(self) -> None:
        self.kept: UserDict[str, UserList[float]] = UserDict(losses=UserList([1.0]))

    def scaled(self, loss: Tensor) -> Tensor:
        self.kept["losses"].append(loss.item())
        return loss / max(self.kept["losses"])
