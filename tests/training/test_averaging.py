import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.training.checks import check_averaging
from reproductions.useful.training import tail_from
from tests.callbacks.silent import Silent
from tests.callbacks.steps import Fails
from tests.digits_run import Classifier, Digits, make_trainer, weights_of


class Globals(pl.Callback):
    """Keeps the global model of every round."""

    def __init__(self) -> None:
        self.models = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.models.append(weights_of(pl_module))


class Servers(pl.Callback):
    """Keeps the server's model of every round."""

    def __init__(self) -> None:
        self.models = []

    def on_train_epoch_end(self, trainer, pl_module):
        fed = next(one for one in trainer.callbacks if isinstance(one, Federated))
        self.models.append(fed.engine.weights.clone())


def federated(mechanism=None, **settings):
    return Federated(mechanism or FedAvg(), 3, seed=1, **{"clients_per_step": 1, **settings})


def averagings():
    swa = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    return [pl.callbacks.WeightAveraging(), pl.callbacks.EMAWeightAveraging(decay=0.5), swa]


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("after", [False, True])
def test_averages_are_of_what_the_server_sent(tmp_path, kind, after):
    averaging, module, fed = averagings()[kind], Classifier(), federated(Silent())
    keep = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    order = [fed, averaging, keep] if after else [averaging, fed, keep]
    make_trainer(*order, max_epochs=3, enable_checkpointing=True).fit(module, datamodule=Digits(60))
    assert torch.equal(weights_of(module), weights_of(Classifier()))
    files = list(tmp_path.glob("*.ckpt"))
    assert len(files) > 1
    for file in files:
        state = torch.load(file, weights_only=kind != 2)  # an older SWALR is saved with a function
        for part in (state["state_dict"], state.get("current_model_state", state["state_dict"])):
            assert torch.equal(torch.cat([v.reshape(-1) for v in part.values()]), weights_of(Classifier()))
    assert "should_update" not in vars(averaging) and "on_train_batch_end" not in vars(averaging)


@pytest.mark.parametrize("clients_per_step", [1, 3])
@pytest.mark.parametrize("after", [False, True])
def test_an_average_is_the_mean_of_the_global_models(clients_per_step, after):
    seen, module, fed = Globals(), Classifier(), federated(clients_per_step=clients_per_step)
    averaging = pl.callbacks.WeightAveraging()
    order = [fed, averaging, seen] if after else [averaging, fed, seen]
    make_trainer(*order, max_epochs=3).fit(module, datamodule=Digits(60))
    torch.testing.assert_close(weights_of(module), torch.stack(seen.models).mean(0))
    assert not torch.equal(weights_of(module), seen.models[-1])


def test_a_moving_average_counts_the_steps_of_one_client():
    """Two steps of each client a round: those of round r are 2r and 2r + 1."""
    seen, module = Globals(), Classifier()
    averaging = pl.callbacks.EMAWeightAveraging(decay=0.5, update_every_n_steps=3, update_starting_at_step=1)
    make_trainer(federated(), averaging, seen, max_epochs=4).fit(module, datamodule=Digits(60))
    first, second = seen.models[1], seen.models[3]  # steps 3 and 6; 0 is before the start
    torch.testing.assert_close(weights_of(module), (first + second) / 2)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_the_mean_of_a_tail_is_a_function_and_goes_on_from_a_checkpoint(tmp_path):
    """Validated is the average, and before the tail the model; clients go on from the model itself."""

    class Validated(pl.Callback):
        def __init__(self):
            self.models = []

        def on_validation_batch_end(self, trainer, pl_module, *args):
            if not trainer.sanity_checking:
                self.models.append(weights_of(pl_module))

    def run(*more, ckpt_path=None):
        seen, validated, module, fed = Servers(), Validated(), Classifier(), federated()
        averaging = pl.callbacks.WeightAveraging(avg_fn=tail_from(3))
        keep = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, filename="{epoch}")
        callbacks = [fed, averaging, seen, validated, keep, *more]
        trainer = make_trainer(*callbacks, max_epochs=6, enable_checkpointing=True)
        trainer.fit(module, datamodule=Digits(60), ckpt_path=ckpt_path)
        return module, seen.models, validated.models

    module, models, validated = run()
    plain = Servers()
    make_trainer(federated(), plain, max_epochs=6).fit(Classifier(), datamodule=Digits(60))
    assert all(torch.equal(a, b) for a, b in zip(models, plain.models, strict=True))
    expected = [*models[:4], *(torch.stack(models[3:k]).mean(0) for k in (5, 6))]
    for got, wanted in zip(validated, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(weights_of(module), expected[-1])
    with pytest.raises(KeyError, match="power cut"):
        run(Fails(KeyError("power cut"), 5))
    resumed, *_ = run(ckpt_path=tmp_path / "epoch=4.ckpt")
    torch.testing.assert_close(weights_of(resumed), weights_of(module))


def test_a_round_that_is_stopped_enters_no_average():
    class Epochs(pl.callbacks.WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return epoch_idx is not None

    seen, module = Globals(), Classifier()
    averaging = Epochs()
    with pytest.raises(RuntimeError, match="power cut"):
        make_trainer(
            averaging, federated(clients_per_step=1), Fails(RuntimeError("power cut"), 1), seen, max_epochs=3
        ).fit(module, datamodule=Digits(60))
    assert averaging._average_model is not None and int(averaging._average_model.n_averaged) == 1
    assert torch.equal(weights_of(module), seen.models[0])


def test_statistics_from_a_pass_over_everybodys_data_are_refused():
    module = Classifier(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)))
    with pytest.raises(
        ValueError, match=r"^StochasticWeightAveraging reads all clients' data .* backbone.1. Use"
    ):
        check_averaging(make_trainer(averagings()[2]), module)
    check_averaging(make_trainer(*averagings()[:2]), module)
