"""Whole fits on a device that is not the CPU (`tests.elsewhere`) end with the CPU's weights, bit for bit."""

import pytest
import torch
from torch import nn

from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.mechanisms import LDPQ, CorBin, FedAvg, GaussianNoise, RotatedCoins
from lightning_fedq.secagg.simulation import SecAgg
from tests import elsewhere
from tests.digits_run import Classifier, Digits, fitted, weights_of


def test_it_refuses_to_mix_with_the_cpu():
    there, here = torch.ones(3, device=elsewhere.DEVICE), torch.ones(3)
    for work in (lambda: there + here, lambda: torch.cat([here, there]), lambda: here.mul_(there)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            work()
    with pytest.raises((TypeError, RuntimeError), match="numpy"):
        there.numpy()
    assert torch.equal((there * torch.tensor(2.0)).cpu(), 2.0 * here)


def backbone(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8), *(layer() for layer in layers), nn.Tanh(), nn.Linear(8, 10))


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fit(there, module, federated, *callbacks, ckpt=None, **settings):
    place = {"strategy": elsewhere.strategy(), "accelerator": "auto"} if there else {}
    return fitted(module, federated, *callbacks, data=Digits(120), ckpt_path=ckpt, **{**place, **settings})


RUNS = {
    "FedAvg": lambda: (Federated(FedAvg(), 6, seed=0),),
    "one after the other": lambda: (Federated(FedAvg(), 6, seed=0, clients_per_step=1),),
    "a stack of 4": lambda: (Federated(FedAvg(), 6, seed=0, clients_per_step=4),),
    "LDPQ": lambda: (Federated(LDPQ(5.0), 6, seed=0),),
    "CorBin": lambda: (Federated(CorBin(5.0), 6, seed=0, clients_per_step=4),),
    "GaussianNoise": lambda: (Federated(GaussianNoise(1.0, 0.1), 6, seed=0),),
    "RotatedCoins": lambda: (Federated(RotatedCoins(1.0, 2.0), 6, seed=0),),
    "SecAgg": lambda: (Federated(CorBin(5.0), 6, seed=0, secure_aggregation=SecAgg()),),
    "trimmed mean": lambda: (
        Federated(FedAvg(), 6, seed=0, aggregator=RobustAggregation("trimmed_mean", num_byzantine=1)),
    ),
    "DPSGD": lambda: (Federated(FedAvg(), 6, seed=0), DPSGD(1.0, 1.0, delta=1e-3, seed=0)),
    "bfloat16": lambda: (Federated(CorBin(5.0), 6, seed=0),),
    "server optimizer": lambda: (
        Federated(FedAvg(), 6, seed=0, server_optimizer=lambda params: torch.optim.Adam(params, lr=0.01)),
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_fit_ends_with_the_weights_of_the_cpu(run):
    weights = []
    for there in (False, True):
        module = Classifier(backbone(), momentum)
        precision = "bf16-true" if run == "bfloat16" else "32-true"
        trainer = fit(there, module, *RUNS[run](), precision=precision)
        assert trainer.strategy.root_device.type == ("elsewhere" if there else "cpu")
        weights.append(weights_of(module).cpu())
    assert torch.equal(*weights)
    assert weights[0].dtype == (torch.bfloat16 if run == "bfloat16" else torch.float32)
    assert not torch.equal(weights[0], weights_of(Classifier(backbone())))


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_batch_norm_ends_with_the_buffers_of_the_cpu(clients_per_step):
    states = []
    for there in (False, True):
        module = Classifier(backbone(lambda: nn.BatchNorm1d(8)), momentum)
        fit(there, module, Federated(FedAvg(), 6, seed=0, clients_per_step=clients_per_step))
        states.append({name: value.cpu() for name, value in module.state_dict().items()})
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_a_fit_that_goes_on_there_ends_where_it_would_have(tmp_path):
    whole = Classifier(backbone(), momentum)
    fit(False, whole, Federated(CorBin(5.0), 6, seed=0), max_epochs=4)
    first, path = Classifier(backbone(), momentum), tmp_path / "half.ckpt"
    fit(True, first, Federated(CorBin(5.0), 6, seed=0), max_epochs=2).save_checkpoint(path)
    second = Classifier(backbone(), momentum)
    fit(True, second, Federated(CorBin(5.0), 6, seed=0), max_epochs=4, ckpt=path)
    assert torch.equal(weights_of(second).cpu(), weights_of(whole))
