"""LoRA adapters, tied weights, frozen layers, compiled parts: a stack against one client at a time."""

import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.data import Dirichlet
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer


def trained(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])


def rest(module):
    parts = [p.detach().reshape(-1) for p in module.parameters() if not p.requires_grad]
    return torch.cat(parts) if parts else torch.zeros(0)


def adam(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.view(-1, 8, 8))).mean(1))


def lora():
    peft = pytest.importorskip("peft")
    layers = {"target_modules": ["linear1", "linear2"], "modules_to_save": ["head"]}
    return peft.get_peft_model(Mixer(), peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, **layers))


class Tied(nn.Module):
    """One weight in two places, as the embedding and the head of a language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inward, self.outward = nn.Linear(64, 10), nn.Linear(64, 10)
        self.outward.weight = self.inward.weight

    def forward(self, x):
        return self.outward(self.inward(x) @ self.inward.weight)


def frozen():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    net[0].requires_grad_(False)
    return net


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("build", [lora, Tied, frozen])
def test_a_stack_is_one_client_after_the_other(build):
    found = []
    for size in (1, 5, "auto"):
        module = Classifier(build(), adam)
        start = rest(module)
        fed = Federated(FedAvg(), 5, seed=0, clients_per_step=size)
        make_trainer(fed).fit(module, datamodule=Digits(100))
        assert fed.clients_per_step_chosen == (1 if size == 1 else 5)
        assert torch.equal(rest(module), start), "what is frozen stays"
        assert fed.engine is not None
        assert fed.engine.weights.numel() == trained(module).numel(), "only what is trained travels"
        found.append(trained(module))
    # AdamW divides by the square root of squared gradients near zero
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-3)
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0], trained(Classifier(build(), adam)))


class Factors(nn.Module):
    """A frozen layer and a product of two factors beside it, as an adapter of `peft`."""

    def __init__(self, freeze_a: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.layer = nn.Linear(64, 10).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(4, 64, generator=generator) / 8, requires_grad=not freeze_a)
        self.lora_B = nn.Parameter(torch.zeros(10, 4))

    def forward(self, inputs):
        return self.layer(inputs) + inputs @ self.lora_A.T @ self.lora_B.T


@pytest.mark.parametrize("freeze_a", [False, True])
def test_the_mean_of_an_adapter_is_exact_where_one_factor_is_frozen(freeze_a):
    """Of the products that clients come to: both factors' means miss it by percents of the round's move."""
    products = []

    class Watched(Classifier):
        def on_train_epoch_end(self):
            products.append((self.backbone.lora_B @ self.backbone.lora_A).detach().clone())

    module = Watched(Factors(freeze_a))
    fed = Federated(FedAvg(), 5, seed=0, clients_per_step=1, partition=Dirichlet(0.3))
    make_trainer(fed, max_epochs=3).fit(module, datamodule=Digits(100))
    moved = torch.stack(products[-5:]).mean(0)
    before = torch.stack(products[-10:-5]).mean(0)
    error = (module.backbone.lora_B @ module.backbone.lora_A - moved).norm() / (moved - before).norm()
    assert error < 1e-5 if freeze_a else error > 0.01
