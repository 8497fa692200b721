"""Buffers that travel stay what their layers know, or their users say, whatever was decoded."""

import logging
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.constraints import nearest_valid
from lightning_fedq.mechanisms import LDPQ, AggregateGaussian, FedAvg, RotatedCoins
from tests.digits_run import Classifier, Digits, make_trainer


class Normaliser(nn.Module):
    """Running second moments under a name of one's own."""

    def __init__(self, name: str = "var", size: int = 64) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("middle", torch.zeros(size))
        self.register_buffer(name, torch.ones(size))

    def forward(self, x):
        spread = getattr(self, self.name)
        if self.training:
            with torch.no_grad():
                self.middle.lerp_(x.mean(0), 0.1)
                spread.lerp_(x.var(0), 0.1)
        return (x - self.middle) / (spread + 1e-3).sqrt()


class ByChannel(nn.Module):
    """Four channels of one sample, and running statistics of each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x):
        return self.norm(x.reshape(-1, 4, 16)).flatten(1)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*run can hardly learn"),
    pytest.mark.filterwarnings("ignore:Federated trains one client at a time"),
]
KINDS = {
    "input normaliser": lambda: [Normaliser(), nn.Linear(64, 8)],
    "batch norm": lambda: [nn.Linear(64, 8), nn.BatchNorm1d(8)],
    "instance norm": lambda: [ByChannel(), nn.Linear(64, 8)],
    "spectral norm": lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(64, 8))],
}
VARIANCES = {
    "input normaliser": "backbone.0.var",
    "batch norm": "backbone.1.running_var",
    "instance norm": "backbone.0.norm.running_var",
}
SAID = {
    "input normaliser": {"constraints": {"*.var": "positive"}},
    "spectral norm": {"constraints": {"*._[uv]": lambda value: nn.functional.normalize(value, dim=-1)}},
}
MECHANISMS = {
    "coins": lambda: LDPQ(1.0),
    "Gaussian": lambda: AggregateGaussian(clip_norm=1.0, noise_multiplier=0.5),
    "rotated": lambda: RotatedCoins(epsilon_per_bit=2.0, clip_norm=1.0),
}


def module(kind):
    torch.manual_seed(0)
    return Classifier(nn.Sequential(*KINDS[kind](), nn.Linear(8, 10)))


def fit(net, mechanism, rounds=4, **settings):
    fed = Federated(mechanism, 4, seed=1, **settings)
    make_trainer(fed, max_epochs=rounds).fit(net, datamodule=Digits(80, 10))
    return fed


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
@pytest.mark.parametrize("kind", list(VARIANCES))
def test_variances_stay_positive(kind, mechanism):
    net = module(kind)
    fed = fit(net, MECHANISMS[mechanism](), **SAID.get(kind, {}))
    assert not any(record.non_finite_clients for record in fed.records)
    assert float(net.get_buffer(VARIANCES[kind]).min()) > 0
    assert all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values())
    assert fed.fit.vector.constraints == {VARIANCES[kind]: "positive"}


def test_directions_have_length_one_where_a_function_says_so():
    net = module("spectral norm")
    fit(net, LDPQ(1.0), **SAID["spectral norm"])
    directions = [b for name, b in net.named_buffers() if name.endswith(("._u", "._v"))]
    assert [float(one.norm()) for one in directions] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_what_nobody_has_said_anything_of_is_named(caplog):
    caplog.set_level(logging.INFO)
    fit(module("input normaliser"), LDPQ(1.0), 1)
    assert "backbone.0.middle, backbone.0.var. For a value that must stay positive" in caplog.text
    assert "constraints={'backbone.0.middle': 'positive'}" in caplog.text
    caplog.clear()
    fit(module("batch norm"), LDPQ(1.0), 1)
    fit(module("input normaliser"), FedAvg(), 1)
    assert "must stay positive" not in caplog.text


def test_without_noise_nothing_is_repaired():
    """One client behind `FedAvg` is the plain training, buffers included."""
    for kind in KINDS:
        plain, ours = module(kind), module(kind)
        data = Digits(40, 10, shuffle=False)
        make_trainer(max_epochs=2).fit(plain, datamodule=data)
        make_trainer(Federated(FedAvg(), 1, seed=0, **SAID.get(kind, {})), max_epochs=2).fit(
            ours, datamodule=data
        )
        for (name, one), other in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5, msg=f"{kind}: {name}")


def test_one_s_own_constraint():
    net = module("input normaliser")
    said = {"*.var": "positive", "*.middle": lambda value: value.clamp(0.0, 1.0)}
    fit(net, LDPQ(1.0), 3, constraints=said)
    middle = net.get_buffer("backbone.0.middle")
    assert float(middle.min()) >= 0.0 and float(middle.max()) <= 1.0
    with pytest.raises(ValueError, match=r"finite values of shape \(64,\), got shape \(\)"):
        fit(module("input normaliser"), FedAvg(), 1, constraints={"*.middle": torch.sum})
    with pytest.raises(
        ValueError, match=r"constraints='norm.var' matches no sent tensor \(backbone.1.weight"
    ):
        fit(module("input normaliser"), FedAvg(), 1, constraints={"norm.var": "positive"})
    with pytest.raises(ValueError, match=r"must be 'positive', 'fixed', .*got 'postive'"):
        Federated(FedAvg(), 4, constraints={"var": "postive"})
    with pytest.raises(TypeError, match="constraints must map name patterns"):
        Federated(FedAvg(), 4, constraints=["var"])


def test_observers():
    """Their ranges begin at infinity, which no update can leave; kept with the clients they train."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    def quantised():
        torch.manual_seed(0)
        fake = FakeQuantize(MovingAverageMinMaxObserver, 0, 255)
        return Classifier(nn.Sequential(nn.Linear(64, 8), fake, nn.Linear(8, 10)))

    with pytest.raises(
        ValueError, match=r"min_val is not finite .*personal_parameters=\['backbone.1.activation"
    ):
        fit(quantised(), FedAvg(), 1)
    fit(quantised(), LDPQ(4.0), 2, personal_parameters=["*.min_val", "*.max_val", "*.scale", "*.zero_point"])
    net = quantised()
    net.backbone[1](torch.randn(5, 8))  # calibrated
    fit(net, FedAvg(), 3, personal_parameters=["*.zero_point"])
    low, high = (net.get_buffer(f"backbone.1.activation_post_process.{n}_val") for n in ("min", "max"))
    assert float(low) <= float(high) and float(net.get_buffer("backbone.1.scale")) > 0


# ---- the functions ----------------------------------------------------------------------------------------


def test_a_repair_is_positive_and_leaves_what_is():
    generator, last = torch.Generator().manual_seed(0), torch.ones(6, 6)
    for _ in range(20):
        value = nearest_valid("positive", torch.randn(6, 6, generator=generator), last)
        assert float(value.min()) > 0
        assert torch.equal(nearest_valid("positive", value, last), value)
    assert torch.equal(nearest_valid("positive", torch.full((6, 6), math.nan), last), last)
    assert float(nearest_valid("positive", torch.tensor(-1.0), torch.tensor(0.0))) > 0


# ---- nothing of a client's data decides --------------------------------------------------------------------


class Marks(Classifier):
    """Notes the labels that it has met, and a level that follows the sign of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("met", torch.zeros(10, dtype=torch.int64))
        self.register_buffer("level", torch.zeros(16))

    def training_step(self, batch, batch_idx):
        self.met[batch[1]] = 1
        self.level += batch[0].mean()
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:training changed met")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_the_first_client_holds_decides_nothing(sign):
    """The rehearsal is its first steps: no integer of it gets into the global model, and no sign either."""

    class Turned(Digits):
        def train_set(self):
            inputs, labels = super().train_set().tensors
            return TensorDataset(sign * inputs, labels)

    net, fed = Marks(), Federated(LDPQ(1.0), 4, seed=1)
    make_trainer(fed, max_epochs=1).fit(net, datamodule=Turned(80, 10))
    assert not net.met.any()
    assert fed.fit.vector.constraints == {}
