"""DP-SGD on sequences: layers without gradients of samples are refused, what takes their place learns."""

import re
from pathlib import Path
from runpy import run_path

import pytest
import pytorch_lightning as pl
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.layers.dp_rnn import DPLSTMCell
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import make_trainer

WORDS, MOST, WIDE = 20, 6, 8


def texts(size=200):
    """Words 1 to 19, padded with 0 behind 1 to 6 of them; the label is the first word's half."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (size, MOST), generator=generator)
    lengths = torch.randint(1, MOST + 1, (size, 1), generator=generator)
    return TensorDataset(words.masked_fill(torch.arange(MOST) >= lengths, 0), (words[:, 0] > 9).long())


def by_length(samples):
    words, labels = torch.stack([w for w, _ in samples]), torch.stack([label for _, label in samples])
    order = (words != 0).sum(1).argsort(descending=True, stable=True)
    return words[order], labels[order]


class Texts(pl.LightningDataModule):
    def __init__(self, **loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return DataLoader(texts(), batch_size=20, shuffle=True, **self.loader)


class Reader(pl.LightningModule):
    """A recurrent layer over padded words, whose last state says the label."""

    def __init__(self, middle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDE, padding_idx=0), nn.Linear(WIDE, 2)
        self.middle = middle()

    def forward(self, x):
        out, _ = self.middle(self.words(x))
        return self.head(out[torch.arange(len(x)), (x != 0).sum(1) - 1])

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def accuracy(self):
        words, labels = texts().tensors
        return float((self(words).argmax(1) == labels).float().mean())


class Attends(Reader):
    def forward(self, x):
        words = self.words(x)
        return self.head(self.middle(words, words, words, key_padding_mask=x == 0)[0][:, 0])


class Encodes(Reader):
    def forward(self, x):
        return self.head(self.middle(self.words(x))[:, 0])


class Packs(Reader):
    enforce_sorted = True

    def forward(self, x):
        packed = pack_padded_sequence(self.words(x), (x != 0).sum(1), True, self.enforce_sorted)
        state = self.middle(packed)[1]
        return self.head((state[0] if isinstance(state, tuple) else state)[-1])


class PacksAnyOrder(Packs):
    enforce_sorted = False


class Steps(Reader):
    """A cell, one step after the other."""

    def forward(self, x):
        words, state = self.words(x), None
        zero = words.new_zeros(len(x), WIDE)
        pair = isinstance(self.middle, nn.LSTMCell | DPLSTMCell)
        state = (zero, zero) if pair else zero
        for number in range(MOST):
            state = self.middle(words[:, number], state)
        return self.head(state[0] if pair else state)


def recurrent(kind, **options):
    return lambda: kind(WIDE, WIDE, batch_first=True, **options)


def attention(kind):
    return lambda: kind(WIDE, 2, batch_first=True)


def encoder():
    return nn.TransformerEncoderLayer(WIDE, 2, 16, batch_first=True)


REFUSED = {  # the layer that is named, and the one of Opacus in its place
    "LSTM": (Reader, recurrent(nn.LSTM), "middle (LSTM)", "DPLSTM"),
    "GRU": (Reader, recurrent(nn.GRU), "middle (GRU)", "DPGRU"),
    "RNN": (Reader, recurrent(nn.RNN), "middle (RNN)", "DPRNN"),
    "both ways": (Reader, recurrent(nn.LSTM, bidirectional=True), "middle (LSTM)", "DPLSTM"),
    "packed": (Packs, recurrent(nn.GRU), "middle (GRU)", "DPGRU"),
    "attention": (
        Attends,
        attention(nn.MultiheadAttention),
        "middle (MultiheadAttention)",
        "DPMultiheadAttention",
    ),
    "encoder": (Encodes, encoder, "middle.self_attn (MultiheadAttention)", "DPMultiheadAttention"),
    "cell": (Steps, lambda: nn.LSTMCell(WIDE, WIDE), "middle (LSTMCell)", "dp_rnn.DPLSTMCell"),
}
WELCOME = {
    "DPLSTM": (Reader, recurrent(DPLSTM)),
    "DPGRU": (Reader, recurrent(DPGRU)),
    "DPRNN": (Reader, recurrent(DPRNN)),
    "DPMultiheadAttention": (Attends, attention(DPMultiheadAttention)),
    "encoder": (Encodes, lambda: ModuleValidator.fix(encoder())),
    "cell": (Steps, lambda: DPLSTMCell(WIDE, WIDE, True)),
    "frozen": (Reader, lambda: recurrent(nn.LSTM)().requires_grad_(False)),
}
AROUND = {"alone": list, "clients": lambda: [Federated(FedAvg(), 2, seed=0)]}


def fit(module, around="alone", rounds=1, noise=1.0, **loader):
    private = DPSGD(noise, 1.0, delta=1e-3, seed=1)
    try:
        make_trainer(*AROUND[around](), private, max_epochs=rounds).fit(module, datamodule=Texts(**loader))
    except ValueError:
        assert not any(account.steps for account in private.accounts.values()), "before anything is charged"
        raise
    assert all(account.steps for account in private.accounts.values())
    return module


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", REFUSED)
def test_layers_of_torch_without_gradients_of_samples_are_refused_by_name(kind, around):
    reader, make, layer, instead = REFUSED[kind]
    with pytest.raises(ValueError, match=f"{re.escape(layer)}.*{re.escape(f'opacus.layers.{instead}')}"):
        fit(reader(make), around)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", WELCOME)
def test_what_takes_their_place_trains(kind, around):
    reader, make = WELCOME[kind]
    fit(reader(make), around)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, DPRNN])
@pytest.mark.parametrize("reader", [Packs, PacksAnyOrder])
def test_packed_sequences_train_where_the_batch_is_sorted_as_it_is_collated(reader, kind, around):
    fit(reader(recurrent(kind)), around, collate_fn=by_length)


@pytest.mark.parametrize("around", AROUND)
def test_packed_sequences_in_any_order_are_refused_with_the_reason(around):
    with pytest.raises(ValueError, match=r"layers sort, shuffle or mix samples.*collate_fn"):
        fit(PacksAnyOrder(recurrent(DPLSTM)), around)


def test_a_sort_of_the_model_is_found_though_the_data_are_sorted():
    """The samples that are tried come in the model's own order; batches do not."""

    class Sorts(Reader):
        def training_step(self, batch, batch_idx):
            x, y = batch
            order = x[:, 0].argsort(stable=True)
            states = self.middle(self.words(x)[order])[0][:, -1]
            return nn.functional.cross_entropy(self.head(states), y[order])

    class Sorted(Texts):
        def train_dataloader(self):
            words, labels = texts().tensors
            order = words[:, 0].argsort(stable=True)
            return DataLoader(TensorDataset(words[order], labels[order]), batch_size=20, shuffle=True)

    with pytest.raises(ValueError, match="layers sort, shuffle or mix samples"):
        private = DPSGD(1.0, 1.0, delta=1e-3)
        make_trainer(private, max_epochs=1).fit(Sorts(recurrent(DPLSTM)), datamodule=Sorted())


def test_the_example_learns():
    """Texts that are padded."""
    path = Path(__file__).parents[2] / "examples" / "private_text.py"
    accuracy, private = run_path(str(path))["main"]()
    assert accuracy > 0.9 and 3.9 < private.epsilon(private.delta) < 4.1


def test_a_packed_one_learns_too():
    module = fit(Packs(recurrent(DPLSTM)), rounds=30, noise=0.3, collate_fn=by_length)
    module.enforce_sorted = False
    assert module.accuracy() > 0.8
