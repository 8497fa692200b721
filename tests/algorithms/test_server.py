"""The server's optimisers against algorithm 2 of Reddi et al., written out, and from a configuration."""

from functools import partial

import pytest
import torch
import yaml

from lightning_fedq.algorithms import FedAdagrad, FedAdam, FedAvgM, FedProx, FedYogi
from lightning_fedq.callbacks import Federated
from lightning_fedq.cli import main
from lightning_fedq.mechanisms import FedAvg
from tests.configurations import linear_on_digits, written
from tests.digits_run import Classifier, Digits, make_trainer, weights_of

UPDATES = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LR, BETA1, BETA2, TAU = 0.1, 0.8, 0.9, 0.01


def by_hand(kind):
    """One coordinate after the other, in plain numbers."""
    end = []
    for updates in UPDATES.T.tolist():
        x, m, v = 0.0, 0.0, TAU**2
        for update in updates:
            m = BETA1 * m + (1 - BETA1) * update
            if kind == "FedAdagrad":
                v = v + m * m
            elif kind == "FedYogi":
                v = v - (1 - BETA2) * m * m * (1 if v > m * m else -1)
            else:
                v = BETA2 * v + (1 - BETA2) * m * m
            x = x + LR * m / (v**0.5 + TAU)
        end.append(x)
    return end


@pytest.mark.parametrize("kind", [FedAdagrad, FedYogi, FedAdam])
def test_it_is_algorithm_two(kind):
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    more = {} if kind is FedAdagrad else {"beta2": BETA2}
    optimizer = kind([x], lr=LR, beta1=BETA1, tau=TAU, **more)
    for update in UPDATES:
        x.grad = -update
        optimizer.step()
    assert x.tolist() == pytest.approx(by_hand(kind.__name__), rel=1e-12)


def test_momentum():
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer, expected, m = FedAvgM([x], lr=0.5, momentum=0.9), torch.zeros(3), torch.zeros(3)
    for update in UPDATES:
        x.grad = -update
        optimizer.step()
        m = 0.9 * m + update
        expected = expected + 0.5 * m
    torch.testing.assert_close(x.detach(), expected)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"tau": 0.0}])
def test_numbers_out_of_range(wrong):
    with pytest.raises(ValueError, match="lr > 0, beta1 and beta2"):
        FedAdam([torch.zeros(1, requires_grad=True)], **wrong)


@pytest.mark.parametrize(("kind", "lr"), [(FedAvgM, 0.5), (FedAdagrad, 0.1), (FedYogi, 0.1), (FedAdam, 0.1)])
def test_a_federation_learns_and_resumes(kind, lr, tmp_path):
    def run(epochs, path=None, optimizer=kind):
        module = Classifier()
        server_optimizer = optimizer and partial(optimizer, lr=lr)
        federated = Federated(FedAvg(), 10, seed=0, server_optimizer=server_optimizer)
        trainer = make_trainer(federated, max_epochs=epochs)
        trainer.fit(module, datamodule=Digits(), ckpt_path=path)
        return trainer, module

    trainer, module = run(6)
    assert float(trainer.callback_metrics["val_acc"]) > 0.8
    run(3)[0].save_checkpoint(tmp_path / "three.ckpt")
    assert torch.equal(weights_of(run(6, tmp_path / "three.ckpt")[1]), weights_of(module))
    assert not torch.equal(weights_of(run(1)[1]), weights_of(run(1, optimizer=None)[1]))


def test_from_a_configuration(tmp_path):
    """`fedq fit` with both in YAML, as the guide says it."""
    settings = {
        "mechanism": written("mechanisms.FedAvg"),
        "num_clients": 10,
        "algorithm": written("algorithms.FedProx", mu=0.1),
        "server_optimizer": written("algorithms.FedAdam", lr=0.05),
    }
    path = tmp_path / "prox.yaml"
    more = linear_on_digits(400, 1, callbacks=[written("callbacks.Federated", **settings)])
    path.write_text(yaml.safe_dump(more))
    assert not main(["fit", "--config", str(path), "--trainer.default_root_dir", str(tmp_path)])


def test_the_same_algorithm_is_the_same_setting():
    assert FedProx(0.1) == FedProx(0.1) and repr(FedProx(0.1)) == "FedProx(mu=0.1)"
