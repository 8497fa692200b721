"""Texts of several lengths under DP-SGD: `python examples/private_text.py`.

torch's recurrent layers and its attention show no gradient of each sample; those of `opacus.layers` take the
same arguments and weights of the same names. Texts are padded, and the state behind the last word of each is
read. Packed sequences work too where `collate_fn` sorts every batch by length; with `clamp(min=1)` on the
lengths, as a Poisson batch may be empty.
"""

import pytorch_lightning as pl
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedq as fedq

WORDS, LONGEST, WIDTH, PADDING = 20, 6, 8, 0


def texts(size: int = 2000) -> TensorDataset:
    """Of 1 to 6 words, whose first one says the label."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (size, LONGEST), generator=generator)
    lengths = torch.randint(1, LONGEST + 1, (size, 1), generator=generator)
    return TensorDataset(words.masked_fill(torch.arange(LONGEST) >= lengths, PADDING), words[:, 0] // 10)


class Reader(pl.LightningModule):
    """A DPLSTM over padded words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)  # its row stays what it is
        self.lstm = DPLSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words):
        states, _ = self.lstm(self.words(words))
        last = (words != PADDING).sum(1).clamp(min=1) - 1
        return self.head(states[torch.arange(len(words)), last])

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def train_dataloader(self):
        return DataLoader(texts(), batch_size=100, shuffle=True)

    def val_dataloader(self):
        return DataLoader(texts(500), batch_size=500)


def main(epochs: int = 10) -> tuple[float, fedq.DPSGD]:
    pl.seed_everything(0)
    private = fedq.DPSGD(1.0, max_grad_norm=1.0, delta=1e-4)  # behind fedq.Federated(...) in every client
    trainer = pl.Trainer(
        max_epochs=epochs, callbacks=[private], accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(Reader())
    return float(trainer.callback_metrics["val_acc"]), private


if __name__ == "__main__":
    accuracy, private = main()
    print(f"accuracy {accuracy:.2f} at epsilon {private.epsilon(private.delta):.2f}")
