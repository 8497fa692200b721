"""A row for a refusal: what is refused, and every cure that its words name.

`words` is a piece of the refusal as `tests.cures.words` reads it from the source, with {} where a value goes.
It finds the line that raises, or that calls what raises, and what is raised must match it. Every cure is run
after the refusal and must not raise.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.mechanisms import FedAvg
from tests.cures.words import Words
from tests.digits_run import Classifier, Digits, make_trainer

ROOT = Path(__file__).parents[2] / "lightning_fedq"
_VERBS = (
    "use|take|leave|give|add|set|say|pass|choose|raise|lower|call|name|make|let|put|drop|keep|return|go|run|"
    "move|start|see|subclass|train|allow|load|begin|abandon|replace|fix|find|freeze|log|ask|wrap|attack|protect"
)
_CURE = re.compile(rf"[;.:)] (?:or |and |so |in )?(?:{_VERBS})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One refusal, and what cures it."""

    words: str
    refused: Callable[[], Any]
    cures: tuple[Callable[[], Any], ...]
    error: type[Exception] = ValueError

    @property
    def pattern(self):
        """A regular expression for what is raised."""
        return re.escape(self.words).replace(r"\{\}", "(?s:.*)")


ROWS = []


def row(words, refused, *cures, **more):
    """Append a row, with its cures as arguments, a line each."""
    ROWS.append(Row(words, refused, cures, **more))


@functools.cache
def raised():
    """Every error of the package: `file:line` and the texts that it can have."""
    return tuple(
        (f"{path.relative_to(ROOT)}:{line}", texts)
        for path in sorted(ROOT.rglob("*.py"))
        for line, texts in Words(path.read_text(encoding="utf-8")).errors()
    )


def sites():
    """Where an error names a cure."""
    return ((where, texts) for where, texts in raised() if any(map(_CURE.search, texts)))


def says(texts, part):
    """Is this a piece of what an error can say?"""
    return any(part in text for text in texts)


def fed(mechanism=None, num_clients=4, **settings):
    """A small federation with a seed."""
    return Federated(mechanism or FedAvg(), num_clients, **{"seed": 1, "clients_per_step": 1, **settings})


def dpsgd(**settings):
    """DP-SGD with a seed."""
    return DPSGD(1.0, 1.0, **{"delta": 1e-4, "seed": 1, **settings})


def fit(*callbacks, module=None, data=None, ckpt_path=None, **trainer):
    """A fit of digits. Returns the Trainer."""
    made = make_trainer(*(callbacks or (fed(),)), **{"max_epochs": 1, **trainer})
    made.fit(module or Classifier(), datamodule=data or Digits(80), ckpt_path=ckpt_path)
    return made


def module_with(optimizer, backbone=None):
    """A classifier with an optimiser of its own."""
    return Classifier(backbone, optimizer)


def sgd(**settings):
    """A function of the parameters that returns this SGD."""
    return lambda params: torch.optim.SGD(params, **{"lr": 0.1, **settings})


class Tunable(Classifier):
    """What a search for a learning rate asks for."""

    lr = 0.1
