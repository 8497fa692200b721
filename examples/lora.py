"""LoRA, federated and private: `python examples/lora.py --data FOLDER_WITH_MNIST`.

A small transformer reads MNIST two rows at a time. It is pretrained on 10,000 public images; then clients of
8 images each, which hold theirs upside down, train a low-rank adapter of it (`peft`). A client's epsilon is 8
against a server behind masks. Clients and rank are chosen before anybody trains, by noise over signal, as
`fedq plan` does.
"""

import argparse
import os

import pytorch_lightning as pl
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedq as fedq
from lightning_fedq.data.datasets import MNISTDataModule
from lightning_fedq.privacy.planning import Problem, plan

WIDTH, HEADS, ROUNDS, SAMPLES = 32, 2, 40, 8
LAYERS = ["query", "key", "value", "out"]
TARGET = fedq.PrivacyTarget(epsilon=8.0, delta=1e-5, adversary="secagg_server")
MASKS = fedq.SecAgg(degree="auto", max_colluding_fraction=0.02, max_dropped_fraction=0.02)
MECHANISM = fedq.RotatedCoins(clip_norm=0.4, fraction=0.125)


class Block(nn.Module):
    """One layer of a transformer, in linear layers that an adapter can find by name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens):
        normed, shape = self.norm1(tokens), (*tokens.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (
            f(normed).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        tokens = tokens + self.out((weights @ value).transpose(1, 2).reshape(tokens.shape))
        return tokens + self.down(nn.functional.gelu(self.up(self.norm2(tokens))))


class RowReader(pl.LightningModule):
    """A transformer over the 14 pairs of rows of an image."""

    def __init__(self, lr: float, momentum: float = 0.0) -> None:
        super().__init__()
        self.lr, self.momentum = lr, momentum
        self.embed, self.head = nn.Linear(56, WIDTH), nn.Linear(WIDTH, 10)
        self.body = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.position = nn.Parameter(0.02 * torch.randn(14, WIDTH))

    def forward(self, images):
        return self.head(self.body(self.embed(images.reshape(-1, 14, 56)) + self.position).mean(1))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.momentum:
            return torch.optim.AdamW(trained, lr=self.lr)
        return torch.optim.SGD(trained, lr=self.lr)


def trained_parameters(rank: int, factors: int = 2) -> int:
    """Numbers that an adapter of this rank trains, in both blocks, of both factors or of B alone."""
    return 2 * len(LAYERS) * rank * factors * WIDTH


def choose(factors: int = 2) -> tuple[int, int]:
    """The fewest clients, and then the largest rank, within a fifth of the least noise over signal."""
    ratios = {}
    for clients in (1250, 2500, 5000):
        for rank in (2, 4, 8):
            params = trained_parameters(rank, factors)
            (option,) = plan(Problem(clients, params, ROUNDS, TARGET, MASKS), {"RotatedCoins": MECHANISM})
            ratios[clients, -rank] = option.ratio
            about = f"{params} parameters, {option.bits:.2f} bits each"
            print(f"{clients} clients, rank {rank}: {about}, noise over signal {option.ratio:.3f}")
    clients, rank = min(key for key, ratio in ratios.items() if ratio <= 1.2 * min(ratios.values()))
    return clients, -rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data",
        default=os.environ.get("FEDQ_DATA") or "data",
        help="folder with MNIST/raw (default: %(default)s)",
    )
    parser.add_argument("--download", action="store_true", help="fetch MNIST if it is not there")
    parser.add_argument("--freeze-a", action="store_true", help="train B alone, whose mean is exact")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches, not of keys")
    arguments = parser.parse_args()
    pl.seed_everything(arguments.seed, verbose=False)

    images, labels, num_test = MNISTDataModule(arguments.data, arguments.download).load()
    images = images[:, 0]
    factors = 2 - arguments.freeze_a
    clients, rank = choose(factors)
    public, private = slice(0, 10_000), slice(10_000, 10_000 + SAMPLES * clients)
    test = DataLoader(TensorDataset(images[-num_test:].flip(1), labels[-num_test:]), batch_size=1000)
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}

    model = RowReader(1e-3, momentum=0.9)
    loader = DataLoader(TensorDataset(images[public], labels[public]), batch_size=64, shuffle=True)
    pl.Trainer(max_epochs=3, **quiet).fit(model, loader)
    before = pl.Trainer(**quiet).validate(model, test, verbose=False)[0]["val_acc"]

    model.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=4 * rank, target_modules=LAYERS, lora_dropout=0.0)
    model.body = get_peft_model(model.body, config)
    for name, parameter in model.named_parameters():
        if arguments.freeze_a and "lora_A" in name:
            parameter.requires_grad_(False)  # mean(B) A is mean(B A)
    model.lr, model.momentum = 0.4, 0.0
    federated = fedq.Federated(MECHANISM, num_clients=clients, privacy=TARGET, secure_aggregation=MASKS)
    held = DataLoader(
        TensorDataset(images[private].flip(1), labels[private]), batch_size=SAMPLES, shuffle=True
    )
    pl.Trainer(max_epochs=ROUNDS, callbacks=[federated], **quiet).fit(model, held)
    after = pl.Trainer(**quiet).validate(model, test, verbose=False)[0]["val_acc"]

    dim, last = trained_parameters(rank, factors), federated.records[-1]
    bits = (last.uplink_bits - last.protocol_bits) / last.num_received / dim
    keys = last.protocol_bits / last.num_received / 8 / 1000
    print(f"accuracy upside down: {before:.3f} as pretrained, {after:.3f} with the adapter of rank {rank}")
    print(f"{bits:.2f} bits a trained parameter and round, and {keys:.1f} kB of keys and shares a client")


if __name__ == "__main__":
    main()
