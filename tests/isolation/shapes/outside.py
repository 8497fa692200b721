"""What no copy of a module holds: classes, globals, caches, files, generators of the process.

A copy can't isolate the first ones; they are found before the first client sends anything, and refused.
"""

import os
import random
import tempfile
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from tests.isolation.worlds import Shape

_FOUND = r"(?i)client"


class ClassAttribute(Shape):
    refused = _FOUND
    history: ClassVar[list[float]] = []

    @classmethod
    def forget(cls):
        cls.history.clear()

    def scaled(self, loss):
        self.history.append(loss.item())
        return loss / sum(self.history)


_MEAN = torch.ones(())


class GlobalTensor(Shape):
    refused = _FOUND

    @classmethod
    def forget(cls):
        _MEAN.fill_(1.0)

    def scaled(self, loss):
        _MEAN.mul_(0.5).add_(0.5 * loss.item())
        return loss / _MEAN.clone()


class FileOnDisk(Shape):
    refused = _FOUND
    path: ClassVar[Path] = Path(tempfile.gettempdir()) / f"losses-{os.getpid()}.txt"

    @classmethod
    def forget(cls):
        cls.path.unlink(missing_ok=True)

    def scaled(self, loss):
        with self.path.open("a") as file:
            file.write(f"{loss.item()}\n")
        return loss / max(map(float, self.path.read_text().split()))


class OpenFile(Shape):
    """An open file can't be copied."""

    refused = "book"

    def begin(self):
        self.book = tempfile.TemporaryFile("w+")  # noqa: SIM115
        weakref.finalize(self, self.book.close)

    def scaled(self, loss):
        self.book.write(f"{loss.item()}\n")
        self.book.seek(0)
        return loss / max(map(float, self.book.read().split()))


class GeneratorsOfTheProcess(Shape):
    """Draws as often as the data say, from torch, NumPy and Python."""

    @classmethod
    def forget(cls):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)  # noqa: NPY002

    def scaled(self, loss):
        for _ in range(int(10 * loss.item()) % 7):
            torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
        return loss * float(torch.rand(1)) * np.random.rand() * random.random()  # noqa: NPY002


class OwnTorchGenerator(Shape):
    """A generator in an attribute, which draws as often as the data say."""

    def begin(self):
        self.generator = torch.Generator().manual_seed(0)

    def scaled(self, loss):
        draws = 1 + int(10 * loss.item()) % 7
        return loss * float(torch.rand(draws, generator=self.generator)[-1])
