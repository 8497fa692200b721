"""Batches of different shapes inside a stack: padded sequences, strings, and what else does not stack."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import make_trainer, weights_of


class Sentences(Dataset[Any]):
    """Tokens of 3 to `longest` words, and a label."""

    def __init__(self, longest: int, num_samples: int = 96) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, longest + 1, (num_samples,), generator=generator)
        self.tokens = [torch.randint(1, 20, (int(n),), generator=generator) for n in lengths]
        self.labels = torch.randint(4, (num_samples,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.tokens[index], int(self.labels[index])


def padded(samples):
    tokens = pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return {"tokens": tokens, "labels": torch.tensor([label for _, label in samples]), "pad": 0}


class Text(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        hidden = self.embedding(batch["tokens"])
        mask = (batch["tokens"] != batch["pad"]).unsqueeze(-1)
        loss = nn.functional.cross_entropy(self.head((hidden * mask).sum(1)), batch["labels"])
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["labels"]))
        self.log("words", mask.float().sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class Data(pl.LightningDataModule):
    def __init__(self, longest: int, collate: Any = padded) -> None:
        super().__init__()
        self.loader = DataLoader(Sentences(longest), batch_size=4, shuffle=True, collate_fn=collate)

    def train_dataloader(self):
        return self.loader


def fit(clients_per_step, longest, module=None, seed=0, collate=padded):
    fed = Federated(FedAvg(), 8, seed=seed, clients_per_step=clients_per_step)
    module = module or Text()
    trainer = make_trainer(fed)
    trainer.fit(module, datamodule=Data(longest, collate))
    return fed.clients_per_step_chosen, weights_of(module), trainer.callback_metrics


def assert_same(found, expected):
    torch.testing.assert_close(found[1], expected[1], atol=2e-6, rtol=1e-5)
    for name in ("loss", "words"):
        torch.testing.assert_close(found[2][name], expected[2][name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_some_stacks_of_padded_batches_are_unequal(seed):
    """Few lengths: the first stack maps, later ones are of several shapes."""
    expected = fit(1, 4, seed=seed)
    found = fit(8, 4, seed=seed)
    assert found[0] == 8
    assert_same(found, expected)
    again = fit(8, 4, seed=seed)
    assert torch.equal(found[1], again[1])


@pytest.mark.parametrize("clients_per_step", [8, "auto"])
def test_batches_that_hardly_ever_agree_go_one_client_at_a_time(clients_per_step):
    expected = fit(1, 40)
    with pytest.warns(UserWarning, match="one client at a time.*of 8 clients are of [5-8] kinds"):
        found = fit(clients_per_step, 40)
    assert found[0] == 1
    assert torch.equal(found[1], expected[1])


def test_strings_in_a_batch_say_why():
    def named(samples):
        return {**padded(samples), "names": [str(tokens.tolist()) for tokens, _ in samples]}

    with pytest.warns(UserWarning, match="strings or objects"):
        found = fit(8, 4, collate=named)
    assert torch.equal(found[1], fit(1, 4, collate=named)[1])
