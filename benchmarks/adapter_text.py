"""A causal language model with LoRA at epsilon 8: `python benchmarks/adapter_text.py`.

A transformer of two blocks over characters is pretrained on Python's help texts; then 1,000 clients, with
four pieces of 48 characters of the standard library's source each, train a low-rank adapter of it, whose
blocks are recomputed in the backward pass. `--plain` trains the same adapter on all pieces together.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedq as fedq

WIDTH, LENGTH, PIECES = 32, 48, 4
ALPHABET = {character: number for number, character in enumerate("\n" + "".join(map(chr, range(32, 127))))}


def pieces(text: str) -> Tensor:
    """Characters of the alphabet, as numbers, `(pieces, LENGTH)`."""
    numbers = torch.tensor([ALPHABET[character] for character in text if character in ALPHABET])
    return numbers[: len(numbers) // LENGTH * LENGTH].view(-1, LENGTH)


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=base.in_features**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer plus twice the adapter."""
        return self.base(x) + 2.0 * self.up(self.down(x))


class Block(nn.Module):
    """Causal attention with two heads, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, length, WIDTH)` to the same shape."""
        normed, shape = self.norms[0](x), (*x.shape[:2], 2, WIDTH // 2)
        query, key, value = (layer(normed).view(shape).transpose(1, 2) for layer in self.layers[:3])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (query @ key.transpose(-1, -2) / 4.0).masked_fill(later, -1e9).softmax(-1)
        x = x + self.layers[3]((weights @ value).transpose(1, 2).reshape(x.shape))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class TextModel(pl.LightningModule):
    """The language model; its loss is in nats a character."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = lambda parameters: torch.optim.Adam(parameters, 3e-3)
        self.tokens, self.head = nn.Embedding(len(ALPHABET), WIDTH), nn.Linear(WIDTH, len(ALPHABET))
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)

    def adapt(self, rank: int) -> None:
        """Freeze all, and put an adapter beside each layer of attention."""
        self.requires_grad_(False)
        for block in self.blocks:
            block.layers = nn.ModuleList(Adapted(layer, rank) for layer in block.layers)

    def loss(self, text: Tensor) -> Tensor:
        """Cross-entropy of each next character."""
        x = self.tokens(text[:, :-1]) + self.place[: text.shape[1] - 1]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of a batch."""
        return self.loss(batch[0])

    def configure_optimizers(self) -> Any:
        """For what is trained."""
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


def fit(model: TextModel, text: Tensor, batch_size: int, epochs: int, *callbacks: pl.Callback) -> None:
    """Train on pieces."""
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(text), batch_size=batch_size, shuffle=not callbacks))


def main() -> None:
    """Print the loss on 500 pieces that nobody trains on, before and after."""
    parser = argparse.ArgumentParser()
    for name, default in (("clients", 1000), ("rounds", 5), ("rank", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--plain", action="store_true", help="the same adapter on all pieces together")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.manual_seed(asked.seed)
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))[:120]
    code = pieces("\n".join(path.read_text(errors="ignore") for path in sources))
    test, code = torch.split(
        code[torch.randperm(len(code))][: 500 + PIECES * asked.clients], [500, PIECES * asked.clients]
    )
    model = TextModel()
    fit(model, pieces("\n".join(topics.values())), 64, 4)
    with torch.no_grad():
        print(f"pretrained on help texts: {model.loss(test):.3f} nats a character of source")
    model.adapt(asked.rank)
    if asked.plain:
        fit(model, code, 64, asked.rounds)
    else:
        model.optimizer = lambda parameters: torch.optim.SGD(parameters, 0.5)
        federated = fedq.Federated(
            fedq.RotatedCoins(clip_norm=0.4, fraction=0.125),
            num_clients=asked.clients,
            server_optimizer=fedq.FedAvgM,
            privacy=fedq.PrivacyTarget(8.0, 1e-5, "secagg_server"),
            secure_aggregation=fedq.SecAgg(
                simulation="counted", degree="auto", max_colluding_fraction=0.02, max_dropped_fraction=0.02
            ),
        )
        fit(model, code, PIECES, asked.rounds, federated)
        last, sent = federated.records[-1], asked.clients * federated.engine.weights.numel()
        keys = last.protocol_bits / sent
        print(f"{last.uplink_bits / sent - keys:.2f} bits a trained parameter, {keys:.2f} of keys and shares")
    with torch.no_grad():
        print(f"after {asked.rounds} rounds: {model.loss(test):.3f}")


if __name__ == "__main__":
    main()
