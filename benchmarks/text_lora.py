"""A small language model and its adapter, as a module and data of a configuration (`text_lora.yaml`).

The text comes with Python: help texts, on which the model is pretrained, and the sources of the standard
library, which the clients have, upper and lower case exchanged; they learn to guess letters. So figures of
`text-lora` are those of one version of Python.
"""

from __future__ import annotations

import argparse
import copy
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from lightning_fedq.data.datasets.tensors import TensorDataModule
from lightning_fedq.data.models.initial import seeded

_CONTEXT, _CHARACTERS, _WIDTH, _RANK = 16, 128, 16, 8


class TextDataModule(TensorDataModule):
    """Letters of the standard library's source with the 16 characters before each.

    Args:
        batch_size: Samples of a client.
        num_train: Samples of all clients.
        seed: Seed of the split.
    """

    def __init__(self, batch_size: int = 16, num_train: int | None = None, seed: int = 0) -> None:
        super().__init__(batch_size, pooled=False, num_train=num_train, num_val=5000, seed=seed)

    def load(self) -> tuple[Tensor, Tensor, int]:
        files = sorted(Path(argparse.__file__).parent.glob("*.py"))
        text = "\n".join(path.read_text(errors="ignore") for path in files)
        inputs, labels = _characters(text.swapcase())
        letters = torch.tensor([chr(code).isalpha() for code in range(_CHARACTERS)])[labels]
        return inputs[letters], labels[letters], 10_000


def _characters(text: str) -> tuple[Tensor, Tensor]:
    """Each 17th character of a text, and the 16 before it."""
    codes = torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8).long()
    pieces = codes.unfold(0, _CONTEXT + 1, _CONTEXT + 1)
    return pieces[:, :-1], pieces[:, -1]


class _Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base
        self.down = nn.Linear(base.in_features, _RANK, bias=False)
        self.up = nn.Linear(_RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer plus the adapter."""
        correction: Tensor = self.base(x) + self.up(self.down(x))
        return correction


@lru_cache(maxsize=1)
def _pretrained() -> nn.Sequential:
    """Scores of the next character by the 16 before it, learnt from help texts (Bengio et al., 2003)."""
    characters = nn.Embedding(_CHARACTERS, _WIDTH)
    layers = nn.Linear(_CONTEXT * _WIDTH, 128), nn.GELU(), nn.Linear(128, _CHARACTERS)
    model = nn.Sequential(characters, nn.Flatten(), *layers)
    generator = torch.Generator().manual_seed(0)
    nn.init.normal_(characters.weight, generator=generator)
    seeded(model, 0)
    inputs, labels = _characters("\n".join(text[first:] for text in topics.values() for first in range(8)))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for batch in torch.split(torch.randperm(len(labels), generator=generator), 512):
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.requires_grad_(False)


def adapted(seed: int = 0) -> nn.Module:
    """The pretrained model with a fresh adapter of rank 8 at both of its layers."""
    model = copy.deepcopy(_pretrained())
    for place in (2, 4):
        layer = _Adapted(model[place])
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(layer.down.weight, std=layer.down.in_features**-0.5, generator=generator)
        nn.init.zeros_(layer.up.weight)
        model[place] = layer
    return model
