"""Whoever handles a batch handles one client's: transfer hooks, `collate_fn`, `transfer_batch_to_device`."""

import re
import signal
import warnings
from dataclasses import dataclass, replace
from os import getpid, kill
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import make_trainer, weights_of


class Words(Dataset[Any]):
    """Tokens of 3 to `longest` words, a label, and where they are from."""

    def __init__(self, longest: int) -> None:
        draws = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, longest + 1, (64,), generator=draws).tolist()
        self.tokens = [torch.randint(1, 20, (n,), generator=draws) for n in lengths]
        self.labels = torch.randint(4, (64,), generator=draws)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.tokens[index], self.labels[index], f"/texts/{index}.txt"


@dataclass
class Record:
    tokens: Any
    labels: Any


class Movable(SimpleNamespace):
    def to(self, device):
        return Movable(tokens=self.tokens.to(device), labels=self.labels.to(device))


class Pair(NamedTuple):
    tokens: Tensor
    labels: Tensor


def padded(samples, width=0):
    tokens, labels = pad_sequence([one[0] for one in samples], batch_first=True), [one[1] for one in samples]
    return nn.functional.pad(tokens, (0, max(width - tokens.shape[1], 0))), torch.stack(labels)


def of_dict(samples):
    return dict(zip(("tokens", "labels"), padded(samples), strict=True))


COLLATIONS = {
    "of one length": lambda samples: dict(zip(("tokens", "labels"), padded(samples, 6), strict=True)),
    "padded": of_dict,
    "with paths": lambda samples: {**of_dict(samples), "path": [one[2] for one in samples]},
    "dataclass": lambda samples: Record(*padded(samples, 6)),
    "with .to": lambda samples: Movable(**of_dict(samples)),
    "named tuple": lambda samples: Pair(*padded(samples)),
    "list": lambda samples: {
        "tokens": [one[0] for one in samples],
        "labels": torch.stack([one[1] for one in samples]),
    },
}


def fields_of(batch):
    if isinstance(batch, dict):
        return batch
    return batch._asdict() if isinstance(batch, Pair) else vars(batch)


def changed(batch):
    """Add one to every token, in whatever holds them: of a stack, or a list of batches, it can't."""
    assert not isinstance(batch, list), "the batches of several clients"
    held = fields_of(batch)
    tokens = held["tokens"]
    assert held["labels"].shape == (4,)
    more = [one + 1 for one in tokens] if isinstance(tokens, list) else (tokens + 1) * (tokens > 0)
    if isinstance(batch, dict):
        return {**batch, "tokens": more}
    if isinstance(batch, Pair):
        return batch._replace(tokens=more)
    return replace(batch, tokens=more) if isinstance(batch, Record) else Movable(**{**held, "tokens": more})


class Before:
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return changed(batch)


class Transfers:
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return changed(batch)


class After:
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return changed(batch)


class Text(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(21, 8), nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        held = fields_of(batch)
        tokens = held["tokens"]
        if isinstance(tokens, list):
            pooled = torch.stack([self.embedding(one).mean(0) for one in tokens])
        else:
            pooled = (self.embedding(tokens) * (tokens > 0)[..., None]).sum(1)
        loss = nn.functional.cross_entropy(self.head(pooled), held["labels"])
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=4)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class Texts(pl.LightningDataModule):
    def __init__(self, collate, longest=6) -> None:
        super().__init__()
        self.loader = DataLoader(Words(longest), batch_size=4, shuffle=True, collate_fn=collate)

    def train_dataloader(self):
        return self.loader


def fit(clients_per_step, module, data, **trainer):
    fed = Federated(FedAvg(), 8, seed=0, clients_per_step=clients_per_step)
    found = make_trainer(fed, **trainer)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found.fit(module, datamodule=data)
    said = [str(one.message) for one in warned if "one client at a time" in str(one.message)]
    return fed.clients_per_step_chosen, weights_of(module), said


def same(found, expected):
    torch.testing.assert_close(found[1], expected[1], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("owner", ["module", "data"])
@pytest.mark.parametrize("hook", [Before, Transfers, After])
@pytest.mark.parametrize("kind", COLLATIONS)
def test_a_hook_sees_one_client_s_batch(kind, hook, owner):
    """Whatever it is; where the batches stack after it, clients train side by side."""

    def trained(clients_per_step):
        own = type("Own", (hook, Text), {}) if owner == "module" else Text
        data = type("Own", (hook, Texts), {}) if owner == "data" else Texts
        return fit(clients_per_step, own(), data(COLLATIONS[kind]))

    found = trained(8)
    same(found, trained(1))
    assert found[0] == (1 if kind in ("with paths", "with .to", "list") else 8)
    assert len(found[2]) == (found[0] == 1)


@pytest.mark.parametrize("kind", COLLATIONS)
def test_without_hooks_either(kind):
    data = COLLATIONS[kind]
    same(fit(8, Text(), Texts(data)), fit(1, Text(), Texts(data)))


@pytest.mark.parametrize("clients_per_step", [8, "auto"])
def test_batches_that_hardly_ever_agree_go_one_client_at_a_time(clients_per_step):
    found, expected = (fit(n, Text(), Texts(COLLATIONS["padded"], 40)) for n in (clients_per_step, 1))
    assert found[0] == 1 and re.search("of 8 clients are of [5-8] kinds", found[2][0])
    assert torch.equal(found[1], expected[1])


class Mixes(Text):
    """As augmentation on the device does: every client draws its own."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        order = torch.randperm(len(batch["labels"]))
        return {"tokens": batch["tokens"][order], "labels": batch["labels"]}


def test_a_hook_draws_for_each_client_what_it_draws_for_one_alone():
    one = COLLATIONS["of one length"]
    found, expected = fit(8, Mixes(), Texts(one)), fit(1, Mixes(), Texts(one))
    assert found[0] == 8
    same(found, expected)


class Counts(Text):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen = getattr(self, "seen", 0) + 1
        return {**batch, "tokens": batch["tokens"].roll(self.seen, 1)}


class Remembers(Text):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        before, self.before = getattr(self, "before", batch), batch
        return {**batch, "labels": before["labels"]}


class Normalises(Text):
    """Writes a buffer, of which a stack has one a client."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.mean.lerp_(batch["tokens"].float().mean(), 0.5)
        return batch

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.mean)


class LabelsByItself(Text):
    """With the weights as they are trained so far."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        with torch.no_grad():
            found = self.head(self.embedding(batch["tokens"]).sum(1)).argmax(1)
        return {**batch, "labels": found}


class OwnGenerator(Text):
    def __init__(self):
        super().__init__()
        self.draws = torch.Generator().manual_seed(0)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "tokens": batch["tokens"][torch.randperm(4, generator=self.draws)]}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counts, "store something besides the batch (seen)"),
        (Remembers, "store something besides the batch (before["),
        (Normalises, "store something besides the batch (mean)"),
        (LabelsByItself, "depend on the weights"),
        (OwnGenerator, "draw from a separate random generator"),
    ],
)
def test_a_hook_with_a_memory_goes_one_client_at_a_time(kind, why):
    one = COLLATIONS["of one length"]
    found, expected = fit(8, kind(), Texts(one)), fit(1, kind(), Texts(one))
    assert found[0] == 1 and len(found[2]) == 1 and why in found[2][0]
    assert torch.equal(found[1], expected[1])


class Killed(Text):
    """What torch does where it meets a bug of its own below `vmap`."""

    def training_step(self, batch, batch_idx):
        if torch._C._functorch.peek_interpreter_stack() is not None:
            if getpid() == STARTED:
                raise RuntimeError("in no fork\nwhich may not die")
            kill(getpid(), signal.SIGSEGV)
        return super().training_step(batch, batch_idx)


STARTED = getpid()


@pytest.mark.tried
def test_a_fork_that_dies_is_a_reason():
    found, expected = (fit(n, Killed(), Texts(COLLATIONS["of one length"])) for n in (8, 1))
    assert found[0] == 1 and len(found[2]) == 1 and "signal SIGSEGV" in found[2][0]
    assert torch.equal(found[1], expected[1])


def test_an_error_of_several_lines_is_one_line():
    found, expected = (fit(n, Killed(), Texts(COLLATIONS["of one length"])) for n in (8, 1))
    assert found[0] == 1 and [one.partition("run: ")[2] for one in found[2]] == ["RuntimeError: in no fork"]
    assert torch.equal(found[1], expected[1])


def test_objects_that_refuse_to_be_compared_are_not_stacked():
    class Odd:
        def __init__(self, samples):
            self.tokens, self.labels = padded(samples)

        def __eq__(self, other):
            raise ValueError("ambiguous")

        __hash__ = None

    class Own(Text):
        def training_step(self, batch, batch_idx):
            return super().training_step(SimpleNamespace(**vars(batch["one"])), batch_idx)

    collate = lambda samples: {"one": Odd(samples)}  # noqa: E731
    same(fit(8, Own(), Texts(collate)), fit(1, Own(), Texts(collate)))
