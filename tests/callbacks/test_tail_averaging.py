"""The mean of the last global models, and of nothing else."""

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, TailAveraging
from lightning_fedq.mechanisms import FedAvg, RotatedCoins
from lightning_fedq.privacy.target import PrivacyTarget
from tests.callbacks.silent import Silent
from tests.digits_run import Classifier, Digits, make_trainer, weights_of


class Servers(pl.Callback):
    """Keeps the server's model of every round, and the one that is validated."""

    def __init__(self, fed: Federated) -> None:
        self.fed = fed
        self.models = []
        self.validated = []

    def on_train_epoch_end(self, trainer, pl_module):
        assert self.fed.engine is not None
        self.models.append(self.fed.engine.weights.clone())

    def on_validation_batch_end(self, trainer, pl_module, *args):
        if not trainer.sanity_checking:
            self.validated.append(weights_of(pl_module))


def federated(mechanism=None, **settings):
    return Federated(mechanism or FedAvg(), 3, **{"seed": 1, "clients_per_step": 1, **settings})


def run(rounds, fraction=0.5, *more, **settings):
    fed, module = federated(**settings), Classifier()
    seen = Servers(fed)
    trainer = make_trainer(fed, TailAveraging(fraction), seen, *more, max_epochs=rounds)
    trainer.fit(module, datamodule=Digits(60))
    return module, seen


@pytest.mark.parametrize(
    ("rounds", "fraction", "tail"), [(6, 0.5, 3), (5, 0.5, 2), (4, 1.0, 4), (3, 0.01, 1)]
)
def test_the_module_ends_with_the_mean_of_the_last_rounds(rounds, fraction, tail):
    module, seen = run(rounds, fraction)
    torch.testing.assert_close(weights_of(module), torch.stack(seen.models[-tail:]).mean(0))
    if tail > 1:
        assert not torch.allclose(weights_of(module), seen.models[-1], atol=1e-4)


def test_what_is_validated_is_the_average_and_before_the_tail_the_model():
    _, seen = run(6)
    expected = [*seen.models[:4], *(torch.stack(seen.models[3:k]).mean(0) for k in (5, 6))]
    assert len(seen.validated) == 6
    for got, wanted in zip(seen.validated, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_no_client_s_weights_enter():
    """`Silent` sends zeros: the server's model stays, while every client trains away from it."""
    module, seen = run(4, mechanism=Silent())
    assert torch.equal(weights_of(module), weights_of(Classifier()))
    assert all(torch.equal(model, weights_of(Classifier())) for model in seen.validated)


def test_clients_go_on_from_the_model_and_the_ledger_charges_the_same():
    fed, plain = federated(), federated()
    seen, without = Servers(fed), Servers(plain)
    make_trainer(fed, TailAveraging(), seen, max_epochs=4).fit(Classifier(), datamodule=Digits(60))
    make_trainer(plain, without, max_epochs=4).fit(Classifier(), datamodule=Digits(60))
    assert all(torch.equal(a, b) for a, b in zip(seen.models, without.models, strict=True))
    assert torch.equal(fed.ledger.charges, plain.ledger.charges)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_a_resumed_fit_ends_with_the_same_average(tmp_path):
    whole, _ = run(6)
    fed = federated()
    keep = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, filename="{epoch}")

    class Stop(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 5:
                raise KeyError("power cut")

    first = make_trainer(fed, TailAveraging(), keep, Stop(), max_epochs=6, enable_checkpointing=True)
    with pytest.raises(KeyError, match="power cut"):
        first.fit(Classifier(), datamodule=Digits(60))
    module = Classifier()
    again = make_trainer(federated(), TailAveraging(), keep, max_epochs=6, enable_checkpointing=True)
    again.fit(module, datamodule=Digits(60), ckpt_path=tmp_path / "epoch=4.ckpt")
    torch.testing.assert_close(weights_of(module), weights_of(whole))


def test_a_run_that_is_stopped_averages_what_it_has_of_its_tail():
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = trainer.current_epoch == 4

    module, seen = run(6, 0.5, Stop())
    assert len(seen.models) == 5
    torch.testing.assert_close(weights_of(module), torch.stack(seen.models[3:]).mean(0))


def test_a_privacy_target_pays_for_the_average_too():
    target = PrivacyTarget(8.0, 1e-3, "outsider")
    module, seen = run(4, mechanism=RotatedCoins(2.0), privacy=target, seed=None)
    torch.testing.assert_close(weights_of(module), torch.stack(seen.models[-2:]).mean(0))
    assert seen.fed.ledger.most_charged == 4


def test_bad_input_is_refused_with_the_cure():
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 0"):
        TailAveraging(0.0)
    with pytest.raises(ValueError, match=r"TailAveraging reports on a federation, .* add .*Federated"):
        make_trainer(TailAveraging(), max_epochs=2).fit(Classifier(), datamodule=Digits(60))
