"""Buffers that travel stay what they are, whatever they are called and whatever was decoded."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.constraints import holds, of_values, repaired
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


class Codebook(nn.Module):
    """EMA counts and sums of a vector quantiser, and codes of length one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.register_buffer("codes", nn.functional.normalize(torch.randn(12, 8), dim=1))
        self.register_buffer("often", torch.zeros(12))

    def forward(self, x):
        z = nn.functional.normalize(x, dim=1)
        nearest = nn.functional.one_hot((z @ self.codes.T).argmax(1), 12).to(x)
        if self.training:
            with torch.no_grad():
                self.often.lerp_(nearest.sum(0), 0.1)
                moved = self.codes + 0.1 * nearest.T @ z
                self.codes.copy_(nn.functional.normalize(moved, dim=1))
        return x + (nearest @ self.codes - x).detach()


class Whitening(nn.Module):
    """A running covariance, whose Cholesky factor is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cov", torch.eye(8))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.cov.lerp_(x.T @ x / len(x), 0.1)
        factor = torch.linalg.cholesky(self.cov + 1e-3 * torch.eye(8))
        return torch.linalg.solve_triangular(factor, x.T, upper=False).T


class ActNorm(nn.Module):
    """Scale and shift of the first batch, and a flag that says they are there."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(1, size)), nn.Parameter(torch.ones(1, size))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if self.training and not self.initialized.item():
            self.loc.data.copy_(-x.detach().mean(0, keepdim=True))
            self.scale.data.copy_(1 / (x.detach().std(0, keepdim=True) + 1e-3))
            self.initialized.fill_(1)
        return self.scale * (x + self.loc)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*run can hardly learn"),
    pytest.mark.filterwarnings("ignore:Federated trains one client at a time"),
]
KINDS = {
    "input normaliser": lambda: [Normaliser(), nn.Linear(64, 8)],
    "counts and unit codes": lambda: [nn.Linear(64, 8), Codebook()],
    "running covariance": lambda: [nn.Linear(64, 8), nn.Tanh(), Whitening()],
    "spectral norm": lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(64, 8))],
    "spectral norm by hooks": lambda: [nn.utils.spectral_norm(nn.Linear(64, 8))],
    "batch norm": lambda: [nn.Linear(64, 8), nn.BatchNorm1d(8)],
}
MECHANISMS = {
    "coins": lambda: LDPQ(1.0),
    "Gaussian": lambda: AggregateGaussian(clip_norm=1.0, noise_multiplier=0.5),
    "rotated": lambda: RotatedCoins(epsilon=2.0, clip_norm=1.0),
}


def module(kind):
    torch.manual_seed(0)
    return Classifier(nn.Sequential(*KINDS[kind](), nn.Linear(8, 10)))


def fit(net, mechanism, rounds=4, **settings):
    fed = Federated(mechanism, 4, seed=1, **settings)
    make_trainer(fed, max_epochs=rounds).fit(net, datamodule=Digits(80, 10))
    return fed


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_decoded_is_valid(kind, mechanism):
    net = module(kind)
    fed = fit(net, MECHANISMS[mechanism]())
    assert not any(record.non_finite_clients for record in fed.records)
    for name, constraint in fed.fit.vector.constraints.items():
        assert holds(constraint, net.get_buffer(name)), (name, constraint)
    assert all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values())
    assert fed.fit.vector.constraints


def test_what_is_found():
    found = {kind: fit(module(kind), FedAvg(), 1).fit.vector.constraints for kind in KINDS}
    assert found["input normaliser"] == {"backbone.0.var": "positive"}
    assert found["counts and unit codes"] == {"backbone.1.codes": "unit:-1"}  # counts begin at zero
    assert found["running covariance"] == {"backbone.2.cov": "psd"}
    for kind in ("spectral norm", "spectral norm by hooks"):
        assert list(found[kind].values()) == ["unit:-1", "unit:-1"], kind
    assert found["batch norm"] == {"backbone.1.running_var": "positive"}


def test_a_name_makes_no_difference():
    """`running_var` was right before, `var` was not: both are the same run now."""
    ends = []
    for name in ("running_var", "var"):
        torch.manual_seed(0)
        net = Classifier(nn.Sequential(Normaliser(name), nn.Linear(64, 10)))
        fit(net, LDPQ(1.0), 6)
        ends.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    assert bool(ends[0].isfinite().all()) and torch.equal(*ends)


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_in_stacks_as_one_by_one(clients_per_step):
    net = module("input normaliser")
    fed = fit(net, LDPQ(2.0), 2, clients_per_step=clients_per_step)
    assert fed.clients_per_step_chosen == clients_per_step
    assert float(net.get_buffer("backbone.0.var").min()) > 0


def test_without_noise_nothing_is_repaired():
    """One client behind `FedAvg` is the plain training, buffers included."""
    for kind in KINDS:
        plain, ours = module(kind), module(kind)
        data = Digits(40, 10, shuffle=False)
        make_trainer(max_epochs=2).fit(plain, datamodule=data)
        make_trainer(Federated(FedAvg(), 1, seed=0), max_epochs=2).fit(ours, datamodule=data)
        for (name, one), other in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5, msg=f"{kind}: {name}")


def test_a_flag_is_set_once():
    """Else every client would start anew from its own first batch in every round."""
    seen = []

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                seen.append(self.get_buffer("backbone.1.initialized").clone())
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    net = Looks(nn.Sequential(nn.Linear(64, 8), ActNorm(), nn.Linear(8, 10)))
    fit(net, FedAvg(), 2, clients_per_step=1, constraints={"*.initialized": "flag"})
    assert int(net.get_buffer("backbone.1.initialized")) == 1
    assert [int(flag) for flag in seen[-8:]] == [0] * 4 + [1] * 4


class Drifting(Classifier):
    """A buffer that looks like a second moment in the first steps and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("trend", torch.ones(3))

    def training_step(self, batch, batch_idx):
        self.trend -= 0.3
        return super().training_step(batch, batch_idx)


def test_what_was_read_off_and_is_not_so_is_named():
    with pytest.raises(ValueError, match=r"trend was taken to be 'positive'.*constraints=\{'trend': 'any'\}"):
        fit(Drifting(), FedAvg(), 2)
    net = Drifting()
    fit(net, FedAvg(), 2, constraints={"trend": "any"})
    assert net.trend.tolist() == pytest.approx([-0.2] * 3)


def test_one_s_own_constraint():
    net = module("input normaliser")
    fit(net, LDPQ(1.0), 3, constraints={"*.middle": lambda value: value.clamp(0.0, 1.0)})
    middle = net.get_buffer("backbone.0.middle")
    assert float(middle.min()) >= 0.0 and float(middle.max()) <= 1.0
    with pytest.raises(ValueError, match=r"finite values of shape \(64,\), got shape \(\)"):
        fit(module("input normaliser"), FedAvg(), 1, constraints={"*.middle": torch.sum})
    with pytest.raises(
        ValueError, match=r"constraints='norm.var' matches no buffer that travels \(backbone.0"
    ):
        fit(module("input normaliser"), FedAvg(), 1, constraints={"norm.var": "positive"})
    with pytest.raises(ValueError, match=r"must be one of 'nonnegative'.*got 'postive'"):
        Federated(FedAvg(), 4, constraints={"var": "postive"})
    with pytest.raises(TypeError, match="constraints must map patterns"):
        Federated(FedAvg(), 4, constraints=["var"])


class Broken(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(2))

    def training_step(self, batch, batch_idx):
        self.level.mul_(float("inf") if int(batch[1][0]) % 2 else 1.1)
        return super().training_step(batch, batch_idx)


def test_what_is_not_finite_is_named():
    with pytest.warns(
        UserWarning, match=r"clients \[.*\] held a NaN or an infinity \(level\) and count as zero"
    ):
        fit(Broken(), FedAvg(), 1)


def test_observers():
    """Their ranges begin at infinity, which no update can leave; kept with the clients they train."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    def quantised():
        torch.manual_seed(0)
        fake = FakeQuantize(MovingAverageMinMaxObserver, 0, 255)
        return Classifier(nn.Sequential(nn.Linear(64, 8), fake, nn.Linear(8, 10)))

    with pytest.raises(
        ValueError, match=r"min_val travels .* is not finite .*local=\['backbone.1.activation"
    ):
        fit(quantised(), FedAvg(), 1)
    fit(quantised(), LDPQ(4.0), 2, local=["*.min_val", "*.max_val", "*.scale", "*.zero_point"])
    net = quantised()
    net.backbone[1](torch.randn(5, 8))  # calibrated
    fed = fit(net, LDPQ(1.0), 3, local=["*.zero_point"])
    low, high = (net.get_buffer(f"backbone.1.activation_post_process.{n}_val") for n in ("min", "max"))
    assert float(low) <= float(high) and float(net.get_buffer("backbone.1.scale")) > 0
    assert fed.fit.vector.constraints["backbone.1.activation_post_process.max_val"].startswith("above:")


def test_a_flag_is_one_of_integers():
    with pytest.raises(ValueError, match=r"'flag'} matches no buffer; a flag is a buffer of integers"):
        fit(module("batch norm"), FedAvg(), 1, constraints={"nothing": "flag"})
    with pytest.raises(ValueError, match=r"matches \['backbone.1.running_var'\]; a flag is"):
        fit(module("batch norm"), FedAvg(), 1, constraints={"*.running_var": "flag"})


# ---- the functions ----------------------------------------------------------------------------------------


def test_values_say_what_a_buffer_is():
    torch.manual_seed(0)
    unit = nn.functional.normalize(torch.randn(5, 9), dim=1)
    assert of_values(torch.ones(16)) == "positive"
    assert of_values(torch.tensor([0.0, 2.0, 3.0])) == "nonnegative"
    assert of_values(torch.zeros(16)) == "any" == of_values(torch.randn(16))
    assert of_values(unit) == "unit:-1" and of_values(unit.T) == "unit:-2"
    assert of_values(torch.full((4,), 0.25)) == "simplex" and of_values(2.0 * torch.eye(3)) == "psd"
    assert of_values(torch.full((3,), math.inf)) == "any"


@pytest.mark.parametrize("constraint", ["nonnegative", "positive", "unit", "unit:0", "simplex", "psd"])
def test_a_repair_is_valid_and_leaves_what_is_valid(constraint):
    generator = torch.Generator().manual_seed(0)
    last = {
        "unit": torch.eye(6),
        "unit:0": torch.eye(6),
        "simplex": torch.full((6, 6), 1 / 6),
        "psd": torch.eye(6),
    }.get(constraint, torch.ones(6, 6))
    for _ in range(20):
        value = repaired(constraint, torch.randn(6, 6, generator=generator), last)
        assert holds(constraint, value)
        if constraint == "positive":
            assert float(value.min()) > 0
        torch.testing.assert_close(repaired(constraint, value, last), value, atol=1e-5, rtol=1e-5)
    assert torch.equal(repaired(constraint, last, last), last)
    poisoned = repaired(constraint, torch.full((6, 6), math.nan), last)
    torch.testing.assert_close(poisoned, last)


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
