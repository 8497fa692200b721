"""Ten trainings of 2025 and 2026 style, small: one client behind `FedAvg` is the plain training.

The third corpus. What people take from packages (adapters, graphs, detection) is written out, in their style.
"""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import LDPQ, FedAvg
from tests.digits_run import make_trainer
from tests.tried import without_forks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Federated trains one client at a time"),
    pytest.mark.filterwarnings("ignore:.*run can hardly learn"),
    pytest.mark.filterwarnings("ignore:You defined"),
]
F = nn.functional


class Training(pl.LightningModule):
    """A network and a loss of a batch."""

    def __init__(self, net: nn.Module, rate: float = 1e-2) -> None:
        super().__init__()
        self.net, self.rate = net, rate

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def loss(self, *batch):
        raise NotImplementedError

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


class Diffusion(Training):
    """Noise prediction; levels and noise are fixed by the sample, so that both trainings see the same."""

    def loss(self, x, level, noise):
        noised = level.sqrt() * x + (1 - level).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noised, level], 1)), noise)


class Contrastive(Training):
    """InfoNCE of two views."""

    def loss(self, x, y):
        one, other = (F.normalize(self.net(view), dim=1) for view in (x, y))
        return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(x)))


class Segmentation(Training):
    def loss(self, x, mask):
        return F.binary_cross_entropy_with_logits(self.net(x), mask)


class Forecast(Training):
    def loss(self, series, ahead):
        return F.huber_loss(self.net[1](self.net[0](series)[0][:, -1]), ahead)


class Recommender(Training):
    """Factors of users and items, with sparse gradients."""

    def loss(self, user, item, rating):
        users, items = self.net
        return F.mse_loss((users(user) * items(item)).sum(1), rating)

    def configure_optimizers(self):
        return torch.optim.SparseAdam(list(self.parameters()), lr=self.rate)


class Audio(Training):
    def loss(self, wave, label):
        spectrum = torch.stft(wave, 32, 16, window=torch.hann_window(32), return_complex=True).abs()
        return F.cross_entropy(self.net(spectrum.log1p()), label)


class Tabular(Training):
    """A transformer over one token a column."""

    def loss(self, columns, target):
        tokens, encoder, head = self.net
        return F.cross_entropy(head(encoder(tokens(columns[..., None])).mean(1)), target)

    def configure_optimizers(self):
        # the gradient of attention's key bias is zero but for rounding, which Adam would blow up
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Adapted(nn.Module):
    """LoRA: a frozen layer and a low-rank one beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """Causal attention with adapted queries and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.query, self.value = Adapted(width, width), Adapted(width, width)
        self.key = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x):
        y = self.norm(x)
        parts = (part(y)[:, None] for part in (self.query, self.key, self.value))
        return x + F.scaled_dot_product_attention(*parts, is_causal=True)[:, 0]


class LanguageModel(Training):
    """A causal language model: frozen but for adapters, blocks recomputed in the backward pass."""

    def __init__(self) -> None:
        width = 16
        blocks = nn.ModuleList(Block(width) for _ in range(2))
        super().__init__(blocks, rate=0.05)
        self.tokens = nn.Embedding(11, width).requires_grad_(False)
        self.head = nn.Linear(width, 11).requires_grad_(False)

    def loss(self, text):
        x = self.tokens(text[:, :-1])
        for block in self.net:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.rate)


class Graphs(Training):
    """Graph convolutions over small dense graphs, batched by padding."""

    def loss(self, nodes, edges, label):
        edges = edges + torch.eye(edges.shape[-1])
        spread = edges / edges.sum(-1, keepdim=True)
        first, last = self.net
        return F.cross_entropy(last(spread @ torch.relu(first(spread @ nodes))).mean(1), label)


class Detection(Training):
    """One box a picture from every cell of a grid: objectness, and corners where something is."""

    def loss(self, picture, cell, box):
        found = self.net(picture).flatten(2)
        there = F.one_hot(cell, found.shape[-1]).float()
        corners = found[:, 1:].gather(2, cell[:, None, None].expand(-1, 4, 1))[..., 0]
        return F.binary_cross_entropy_with_logits(found[:, 0], there) + F.smooth_l1_loss(corners, box)


def corpus():
    """Each training, from the same seed, with 48 samples."""
    torch.manual_seed(0)
    n, rows = 48, torch.randn(48, 8)
    labels = (rows[:, 0] > 0).long()
    pictures = torch.randn(n, 1, 8, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    mlp = lambda inputs, outputs: nn.Sequential(nn.Linear(inputs, 16), nn.SiLU(), nn.Linear(16, outputs))  # noqa: E731
    unet = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    pooled = (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 2))
    sound = nn.Sequential(nn.Conv1d(17, 8, 3), nn.ReLU(), *pooled)
    factors = nn.ModuleList([nn.Embedding(6, 4, sparse=True), nn.Embedding(9, 4, sparse=True)])
    return {
        "diffusion": (Diffusion(mlp(9, 8)), (rows, torch.rand(n, 1), torch.randn(n, 8))),
        "contrastive": (Contrastive(mlp(8, 6)), (rows, rows + 0.1 * torch.randn(n, 8))),
        "segmentation": (Segmentation(unet), (pictures, (pictures > 0.5).float())),
        "time series": (
            Forecast(nn.ModuleList([nn.GRU(1, 8, batch_first=True), nn.Linear(8, 2)])),
            (torch.randn(n, 12, 1).cumsum(1), torch.randn(n, 2)),
        ),
        "recommender": (
            Recommender(factors),
            (torch.randint(6, (n,)), torch.randint(9, (n,)), torch.rand(n)),
        ),
        "audio": (Audio(sound), (torch.randn(n, 128), labels)),
        "tabular transformer": (
            Tabular(nn.ModuleList([nn.Linear(1, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 2)])),
            (rows, labels),
        ),
        "language model with adapters": (LanguageModel(), (torch.randint(11, (n, 12)),)),
        "graph": (
            Graphs(nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 2)])),
            (torch.randn(n, 5, 4), (torch.rand(n, 5, 5) > 0.5).float(), labels),
        ),
        "detection": (
            Detection(
                nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 5, 1))
            ),
            (pictures, torch.randint(16, (n,)), torch.rand(n, 4)),
        ),
    }


NAMES = list(corpus())


def fit(name, *callbacks):
    module, tensors = corpus()[name]
    make_trainer(*callbacks, max_epochs=2).fit(module, DataLoader(TensorDataset(*tensors), batch_size=8))
    return module


@pytest.mark.parametrize("name", NAMES)
def test_one_client_is_the_plain_training(name, monkeypatch):
    """Optimisers begin anew in a round, so the plain training is one fit of an epoch after the other."""
    without_forks(monkeypatch)  # what a rehearsal in this process leaves behind would show
    plain, tensors = corpus()[name]
    for _ in range(2):
        make_trainer(max_epochs=1).fit(plain, DataLoader(TensorDataset(*tensors), batch_size=8))
    ours = fit(name, Federated(FedAvg(), 1, seed=0))
    for (key, one), other in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5, msg=f"{name}: {key}")


@pytest.mark.parametrize("name", NAMES)
def test_six_clients_behind_coins_stay_finite(name):
    fed = Federated(LDPQ(4.0), 6, seed=0)
    module = fit(name, fed)
    assert len(fed.records) == 2 and not any(record.non_finite_clients for record in fed.records)
    assert all(bool(tensor.isfinite().all()) for tensor in module.state_dict().values())
