"""What trains in a simulation trains the same on real clients, or is named before anybody is charged."""

from typing import Any

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.mechanisms import CorBin
from tests.flower.loop import LoopGrid, clients, deployment, federated, module, simulate

pytestmark = pytest.mark.filterwarnings("ignore:node |register:UserWarning")

COIN = CorBin(epsilon=4.0, shared_bits=5)


class Shrinks(pl.Callback):
    """Acts on gradients, with a number of its own."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor, self.steps = factor, 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.steps += 1
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad *= self.factor ** min(self.steps, 3)


class Watches(pl.Callback):
    """Acts on nothing that clients train."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen = True


ACTS: dict[str, Any] = {
    "gradient_clip_val": lambda: {"gradient_clip_val": 0.05},
    "accumulate_grad_batches": lambda: {"accumulate_grad_batches": 2},
    "limit_train_batches": lambda: {"limit_train_batches": 1},
    "overfit_batches": lambda: {"overfit_batches": 2},
    "precision": lambda: {"precision": "bf16-true"},
    "callbacks": lambda: {"callbacks": [Shrinks()]},
}


def trained(theirs: dict[str, Any], ours: dict[str, Any], tmp_path: Any, **settings: Any) -> Any:
    """The server of a deployment whose clients train by `theirs` and whose server's Trainer has `ours`."""
    make = lambda: federated(COIN, **settings)  # noqa: E731
    grid = LoopGrid(*clients(make, tmp_path, trainer={"accelerator": "cpu", **theirs}))
    one = deployment(make(), 2, tmp_path, callbacks=ours.pop("callbacks", []))
    one.trainer.update(ours)
    return one.run(grid)[1], grid


@pytest.mark.parametrize("name", ACTS)
def test_what_acts_on_training_acts_on_real_clients_as_in_a_simulation(name, tmp_path):
    expected = simulate(federated(COIN), 2, **ACTS[name]())
    plain = simulate(federated(COIN), 2)
    server, _ = trained(ACTS[name](), ACTS[name](), tmp_path)
    assert torch.equal(server.engine.weights, expected.engine.weights)
    assert not torch.equal(server.engine.weights, plain.engine.weights), "it acts"


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("on_server", [True, False])
def test_what_acts_on_one_side_only_is_named_before_anybody_is_charged(name, on_server, tmp_path):
    theirs, ours = ({}, ACTS[name]()) if on_server else (ACTS[name](), {})
    with pytest.raises(RuntimeError, match=f"{name} is .* here and .* there"):
        trained(theirs, ours, tmp_path)


def test_another_number_in_a_callback_is_named(tmp_path):
    words = r"factor=0\.25.* here and .*factor=0\.5"
    with pytest.raises(RuntimeError, match=f"callbacks is .*{words}"):
        trained({"callbacks": [Shrinks(0.25)]}, {"callbacks": [Shrinks(0.5)]}, tmp_path)


def test_another_rate_is_named(tmp_path, monkeypatch):
    make = lambda: federated(COIN)  # noqa: E731
    other = module()
    other.lr = 0.2
    grid = LoopGrid(*clients(make, tmp_path))
    with pytest.raises(RuntimeError, match=r"optimizer is .*lr=0\.1.* here and .*lr=0\.2.* there"):
        deployment(make(), 1, tmp_path, module=lambda: other).run(grid)
    assert {kind for kind, _ in grid.log} == {"register"}


def test_other_names_of_one_thing_and_what_does_not_act_are_no_difference(tmp_path):
    theirs = {"precision": 32, "log_every_n_steps": 3}
    server, _ = trained(theirs, {"precision": "32-true", "callbacks": [Watches()]}, tmp_path)
    assert len(server.records) == 2
