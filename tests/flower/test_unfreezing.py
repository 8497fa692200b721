"""Parameters that a hook or a callback of the fit freezes or unfreezes in mid-run, on real clients."""

import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.data.models import Classifier
from lightning_fedq.mechanisms import CorBin
from tests.flower.loop import deploy, federated, simulate

pytestmark = pytest.mark.filterwarnings(
    "ignore:node |register|round .* client|the message of client|the keys come:UserWarning"
)
COIN = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)


class TwoLayers(Classifier):
    """A first layer that is frozen, or trained, from round `change_at` on."""

    def __init__(self, frozen: bool, change_at: int = 1, optimised: str = "all") -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)), lr=0.1)
        self.frozen, self.change_at = frozen, change_at
        self.backbone[1].requires_grad_(not frozen)

    def on_train_epoch_start(self):
        if self.current_epoch == self.change_at:
            self.backbone[1].requires_grad_(self.frozen)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Thaws(pl.Callback):
    """The same by a callback, which is on both sides."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.backbone[1].requires_grad_(pl_module.frozen)


def deployed(make, tmp_path, callbacks=list, rounds=2):
    fed = lambda: federated(COIN)  # noqa: E731
    theirs = {"accelerator": "cpu", "callbacks": callbacks()}
    return deploy(fed, rounds, tmp_path, module=make, theirs=theirs, callbacks=callbacks())


def test_what_the_fit_unfreezes_trains_on_real_clients(tmp_path):
    """By a callback; a module that unfreezes itself is a feature of `test_engines`."""
    make = lambda: TwoLayers(True, 99)  # noqa: E731
    expected = simulate(federated(COIN), 2, module=make(), callbacks=[Thaws()])
    server = deployed(make, tmp_path, lambda: [Thaws()])
    assert torch.equal(server.engine.weights, expected.engine.weights)
    assert len(server.engine.weights) == 64 * 8 + 8 + 8 * 10 + 10


def test_to_freeze_what_was_trained_is_refused_before_the_round_is_charged(tmp_path):
    kept = []

    class Looks(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            kept.append(next(one for one in trainer.callbacks if hasattr(one, "ledger")).ledger.rounds)

    with pytest.raises(ValueError, match=r"This round freezes backbone\.1\.weight, backbone\.1\.bias, which"):
        deployed(lambda: TwoLayers(False), tmp_path, lambda: [Looks()])
    assert kept == [1]


def test_optimisers_must_hold_what_is_ever_trained(tmp_path):
    class Late(TwoLayers):
        """Optimises what is trained when the fit begins, and gives its optimiser more later."""

        def configure_optimizers(self):
            self.optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
            return self.optimizer

        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            if self.current_epoch == 1:
                self.optimizer.param_groups[0]["params"] += list(self.backbone[1].parameters())

    with pytest.raises(
        ValueError, match=r"This round trains backbone\.1\.weight.* Give configure_optimizers"
    ):
        deployed(lambda: Late(True), tmp_path)  # TwoLayers gives its optimiser all


class Halves(TwoLayers):
    """Halves its dropout rate each round, or computes it."""

    def __init__(self, computed: bool) -> None:
        super().__init__(True, 99)
        self.backbone.insert(3, nn.Dropout(0.8))
        self.computed = computed

    def on_train_epoch_start(self):
        drop = self.backbone[3]
        drop.p = 0.8 / 2 ** (self.current_epoch + 1) if self.computed else drop.p / 2


def test_what_the_fit_changes_on_its_module_beside_is_named_with_what_does(tmp_path):
    computed = simulate(federated(COIN), 3, module=Halves(True))
    with pytest.warns(
        UserWarning, match=r"has changed backbone\.3\.p of its module.*values of the previous round are lost"
    ):
        server = deployed(lambda: Halves(False), tmp_path / "halved", rounds=3)
    assert not torch.equal(server.engine.weights, computed.engine.weights), "else nothing need be said"
    with pytest.warns(UserWarning, match=r"Compute it from self\.current_epoch"):
        server = deployed(lambda: Halves(True), tmp_path / "computed", rounds=3)
    assert torch.equal(server.engine.weights, computed.engine.weights)
