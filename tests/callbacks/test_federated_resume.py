import signal

import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import Dirichlet
from lightning_fedq.mechanisms import CorBin, FedAvg
from lightning_fedq.secagg import SecAgg
from tests.callbacks.steps import Saves
from tests.digits_run import Classifier, Digits, fitted, make_trainer, weights_of

ROUNDS, CLIENTS = 4, 6
pytestmark = [  # what Lightning says when a run goes on in another folder, or with another ModelCheckpoint
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]


class Interrupted(pl.Callback):
    """Raises after so many batches of all clients, or stacks."""

    is_shared_by_clients = True

    def __init__(self, at_batch: int, error: BaseException) -> None:
        self.left, self.error = at_batch, error

    def on_train_batch_end(self, trainer, *args):
        self.left -= 1
        if self.left == 0:
            raise self.error


Interrupted.knows_clients = True  # known to leave stacks alone


def federation(clients_per_step, **settings):
    values = {
        "mechanism": CorBin(epsilon_per_coordinate=5.0),
        "num_clients": CLIENTS,
        "clients_per_step": clients_per_step,
        "seed": 3,
        "server_optimizer": lambda params: torch.optim.Adam(params, lr=0.01),
        "local_epochs": 2,
    }
    return Federated(**{**values, **settings})


def module():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))
    return Classifier(backbone, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))


def fit(folder, clients_per_step, *extra, resume=None, **settings):
    keep = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1)
    fed, model = federation(clients_per_step, **settings), module()
    trainer = make_trainer(fed, keep, *extra, enable_checkpointing=True, max_epochs=ROUNDS)
    trainer.fit(model, datamodule=Digits(120), ckpt_path=resume)
    return model, fed


def latest(folder):
    return max(folder.glob("*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]))


def test_resumed_with_rounds_of_different_length(tmp_path):
    settings = {"dropout_probability": 0.4, "partition": Dirichlet(0.5)}
    whole, fed = fit(tmp_path / "whole", 1, **settings)
    assert len({r.num_received for r in fed.records}) > 1
    paths = sorted((tmp_path / "whole").glob("*.ckpt"))[:-1]
    assert paths
    for path in paths:
        resumed, _ = fit(tmp_path / f"again-{path.stem}", 1, resume=path, **settings)
        assert torch.equal(weights_of(resumed), weights_of(whole)), path.stem


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_resumed_from_a_checkpoint_in_mid_round(tmp_path, clients_per_step):
    """The interrupted round is repeated from its start, with the same streams."""
    whole, _ = fit(tmp_path / "whole", clients_per_step, Saves(tmp_path / "batches", "on_train_batch_end"))
    checkpoints = sorted((tmp_path / "batches").glob("*.ckpt"), key=lambda p: int(p.stem.rpartition("=")[2]))
    per_round = len(checkpoints) // ROUNDS
    assert per_round == (24 if clients_per_step == 1 else 8)
    for step in (1, per_round - 1, per_round, per_round + 1, 2 * per_round + 2, 4 * per_round - 1):
        path = checkpoints[step - 1]
        resumed, fed = fit(tmp_path / f"again-{path.stem}", clients_per_step, resume=path)
        assert torch.equal(weights_of(resumed), weights_of(whole)), path.stem
        assert [r.round for r in fed.records] == list(range(ROUNDS)), path.stem


class Told(pl.Callback):
    """Of which epochs it was told that they start and end."""

    def __init__(self) -> None:
        self.epochs = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs.append(("starts", trainer.current_epoch))

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append(("ends", trainer.current_epoch))


def test_callbacks_are_told_of_the_start_of_a_round_that_is_repeated(tmp_path):
    """To Lightning the repeated round would be one in its middle, whose start it leaves out."""
    make_trainer(federation(1, seed=3), Saves(tmp_path, "on_train_batch_end"), max_epochs=2).fit(
        Classifier(), datamodule=Digits(80)
    )
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]))
    told, checkpoint = Told(), paths[len(paths) // 2 + 1]  # in the middle of the second round
    trainer = make_trainer(federation(1, seed=3), told, max_epochs=2)
    trainer.fit(Classifier(), datamodule=Digits(80), ckpt_path=checkpoint, weights_only=False)
    assert told.epochs == [("starts", 1), ("ends", 1)]


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_an_exception_leaves_the_global_model_and_a_loadable_checkpoint(tmp_path, error, clients_per_step):
    whole, _ = fit(tmp_path / "whole", clients_per_step)
    fed, model = federation(clients_per_step), module()
    at_step = 24 + 13 if clients_per_step == 1 else 8 + 3
    trainer = make_trainer(fed, Interrupted(at_step, error), max_epochs=ROUNDS)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else RuntimeError):
        trainer.fit(model, datamodule=Digits(120))
    signal.signal(signal.SIGINT, handler)
    after_one_round = torch.load(next((tmp_path / "whole").glob("epoch=0*")), weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, after_one_round[name])
    assert fed.engine is not None and fed.engine.plan is None and fed.engine.attempt == 1
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    resumed, again = fit(tmp_path / "again", clients_per_step, resume=tmp_path / "late.ckpt")
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert [r.round for r in again.records] == list(range(ROUNDS))


def test_without_a_seed_an_interrupted_round_stays_charged_and_is_a_new_attempt(tmp_path):
    fed = federation(1, seed=None)
    trainer = make_trainer(fed, Interrupted(30, RuntimeError("boom")), max_epochs=ROUNDS)
    with pytest.raises(RuntimeError):
        trainer.fit(module(), datamodule=Digits(120))
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    _, again = fit(tmp_path / "again", 1, resume=tmp_path / "late.ckpt", seed=None)
    assert again.planner.seed == fed.planner.seed
    assert all(torch.equal(a, b) for a, b in zip(again.client_indices, fed.client_indices, strict=True))
    assert again.engine is not None and again.engine.ledger.max_charges == ROUNDS + 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"mechanism": FedAvg()}, r"mechanism = CorBin\(.*\(here FedAvg\(\)\)"),
        ({"num_clients": 5}, r"num_clients = 6 \(here 5\)"),
        ({"seed": 4}, "seed = "),
        ({"partition": Dirichlet(9.0)}, "partition = "),
        ({"broadcast_bits": 5}, r"broadcast_bits = None \(here 5\)"),
        ({"secure_aggregation": SecAgg()}, r"secure_aggregation = None \(here SecAgg\("),
    ],
)
def test_a_checkpoint_of_another_federation_is_refused(tmp_path_factory, tmp_path, other, words):
    checkpoint = tmp_path_factory.getbasetemp() / "of-one-round" / "one.ckpt"
    if not checkpoint.exists():
        fitted(module(), federation(1), data=Digits(120), max_epochs=1).save_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=f"checkpoint is of another federation: .*{words}"):
        fit(tmp_path, 1, resume=checkpoint, **other)


def normed():
    torch.manual_seed(0)
    return Classifier(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 10)))


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"broadcast_bits": 4}, module),
        ({"secure_aggregation": SecAgg(), "dropout_probability": 0.2}, module),
        ({"mechanism": FedAvg()}, normed),
    ],
    ids=["broadcast_bits", "secure_aggregation", "shared statistics"],
)
def test_a_run_that_goes_on_ends_as_one(tmp_path, settings, make):
    def train(rounds, resume=None):
        fed, model = federation(4, **settings), make()
        trainer = fitted(model, fed, data=Digits(120), ckpt_path=resume, max_epochs=rounds)
        return fed, model, trainer

    fed, whole, _ = train(3)
    train(2)[-1].save_checkpoint(tmp_path / "two.ckpt")
    again, resumed, _ = train(3, tmp_path / "two.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert repr(again.records) == repr(fed.records)
