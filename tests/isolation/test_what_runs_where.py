"""The page "what runs where", hook by hook: in whose Trainer, and how often."""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.client_trainer import is_client
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer

CLIENTS, ROUNDS, BATCHES = 3, 2, 2
PAGE = Path(__file__).parents[2] / "docs" / "isolation.md"
FIT, CLIENT = "fit", "client"
EACH_BATCH = {(CLIENT, ROUNDS * CLIENTS * BATCHES)}
EACH_CLIENT = {(CLIENT, ROUNDS * CLIENTS)}
EACH_ROUND, ONCE = {(FIT, ROUNDS)}, {(FIT, 1)}

OF_A_MODULE = {
    **dict.fromkeys(
        (
            *("prepare_data", "configure_callbacks", "setup", "configure_model", "configure_optimizers"),
            *("on_fit_start", "on_train_start", "on_train_end", "on_fit_end", "teardown"),
        ),
        ONCE,
    ),
    **dict.fromkeys(
        (
            *("on_train_epoch_start", "on_round_end", "on_save_checkpoint"),
            *("on_validation_start", "on_validation_model_eval", "on_validation_epoch_start"),
            *("on_validation_batch_start", "validation_step", "on_validation_batch_end"),
            *("on_validation_epoch_end", "on_validation_end", "on_validation_model_train"),
        ),
        EACH_ROUND,
    ),
    **dict.fromkeys(
        (
            *("on_train_batch_start", "training_step", "on_before_zero_grad", "optimizer_zero_grad"),
            *("on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step"),
            *("optimizer_step", "configure_gradient_clipping", "on_train_batch_end"),
        ),
        EACH_BATCH,
    ),
    "lr_scheduler_step": EACH_BATCH | {(FIT, ROUNDS * BATCHES)},  # the fit's schedules follow one client
    "on_train_epoch_end": EACH_CLIENT,
}
OF_A_DATA_MODULE = {
    "prepare_data": ONCE,
    "setup": ONCE,
    "train_dataloader": ONCE,
    "val_dataloader": ONCE,
    "on_before_batch_transfer": EACH_BATCH | EACH_ROUND,  # of a client's batch, and of one of validation
    "transfer_batch_to_device": EACH_BATCH | EACH_ROUND,
    "on_after_batch_transfer": EACH_BATCH | EACH_ROUND,
    "state_dict": EACH_ROUND,
    "teardown": ONCE,
}
BATCH_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)
EPOCH_HOOKS = {
    **dict.fromkeys(
        ("setup", "on_fit_start", "on_train_start", "on_train_end", "on_fit_end", "teardown"), ONCE
    ),
    **dict.fromkeys(
        (
            *("on_train_epoch_start", "on_validation_start", "on_validation_epoch_start"),
            *("on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end"),
            *("on_validation_end", "on_save_checkpoint"),
        ),
        EACH_ROUND,
    ),
}
OF_BATCHES = {**EPOCH_HOOKS, **dict.fromkeys(BATCH_HOOKS, EACH_BATCH)}
OF_A_CALLBACK = {
    "epochs": {**EPOCH_HOOKS, "on_train_epoch_end": EACH_ROUND},
    "batches": {**OF_BATCHES, "on_train_epoch_end": EACH_CLIENT},
    "crosses": {**OF_BATCHES, "on_train_epoch_end": EACH_CLIENT | EACH_ROUND},
}
CALLS = Counter()


class FromHereOn(pl.Callback):
    """What a rehearsal calls does not count."""

    def on_train_start(self, trainer, pl_module):
        for key in [key for key in CALLS if key[1] == CLIENT]:
            del CALLS[key]


def found():
    seen = {}
    for (name, where), number in CALLS.items():
        seen.setdefault(name, set()).add((where, number))
    return seen


def recording(kind, names, trainer_of):
    """A subclass that notes calls of some hooks."""

    def hook(name):
        def call(self, *args, **kwargs):
            trainer = trainer_of(self, args)
            if not getattr(trainer, "sanity_checking", False):
                CALLS[name, CLIENT if is_client(trainer) else FIT] += 1
            inherited = getattr(super(made, self), name, None)
            return None if inherited is None else inherited(*args, **kwargs)

        return call

    made = type("Recording", (kind,), {name: hook(name) for name in names})
    return made


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def run(module, *callbacks, kind=Digits, **flags):
    CALLS.clear()
    federated = Federated(FedAvg(), CLIENTS, seed=0, clients_per_step=1)
    trainer = make_trainer(federated, FromHereOn(), *callbacks, max_epochs=ROUNDS, **flags)
    trainer.fit(module, datamodule=kind(CLIENTS * BATCHES * 10, 10))
    return trainer


def saved_in(folder):
    """Flags of a Trainer that saves once a round, and looks at nothing before the first."""
    return {"enable_checkpointing": True, "default_root_dir": folder, "num_sanity_val_steps": 0}


def test_hooks_of_a_module(tmp_path):
    run(recording(Scheduled, OF_A_MODULE, lambda self, args: self._trainer)(), **saved_in(tmp_path))
    assert found() == OF_A_MODULE


def test_hooks_of_a_data_module(tmp_path):
    kind = recording(Digits, OF_A_DATA_MODULE, lambda self, args: self.trainer)
    run(Classifier(), kind=kind, **saved_in(tmp_path))
    assert found() == OF_A_DATA_MODULE


@pytest.mark.parametrize("hook", ["training_step", "validation_step"])
def test_an_exception_is_the_fits(hook, tmp_path):
    """`on_exception` of every callback runs once, in the fit, wherever the exception came from."""

    class Fails(Classifier):
        pass

    def fail(self, *args):
        if not self.trainer.sanity_checking:
            raise RuntimeError("here")

    setattr(Fails, hook, fail)
    callback = recording(pl.Callback, ["on_exception", *BATCH_HOOKS], lambda self, args: args[0])()
    with pytest.raises(RuntimeError, match="here"):
        run(Fails(), callback)
    assert CALLS["on_exception", FIT] == 1 and CALLS["on_exception", CLIENT] == 0


@pytest.mark.parametrize("kind", OF_A_CALLBACK)
def test_hooks_of_a_callback(kind, tmp_path):
    wanted = OF_A_CALLBACK[kind]
    callback = recording(pl.Callback, wanted, lambda self, args: args[0])()
    callback.is_shared_by_clients = kind == "crosses"
    run(Classifier(), callback, **saved_in(tmp_path))
    assert found() == wanted


def test_every_argument_of_the_trainer_is_on_the_page():
    section = PAGE.read_text().partition("## Every argument of the Trainer")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    named = Counter(name for row in rows for name in re.findall(r"`(\w+)`", row))
    assert named == Counter(set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"})


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        {"detect_anomaly": True, "deterministic": True, "precision": "64-true", "log_every_n_steps": 7},
        {"max_steps": 100, "limit_train_batches": 1, "limit_val_batches": 0, "inference_mode": False},
    ],
    ids=["ordinary", "steps", "numerics", "limits"],
)
def test_a_client_s_trainer_has_the_flags_of_the_user_s(flags):
    """Whatever `Trainer.__init__` has set; what is the fit's alone is named."""
    seen = {}

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            seen.update(vars(self.trainer), max_epochs=self.trainer.max_epochs)
            return super().training_step(batch, batch_idx)

    trainer = run(Looks(), **flags)
    own = {
        *("callbacks", "_data_connector", "_logger_connector", "_accelerator_connector", "fit_loop", "state"),
        *(
            "_loggers",
            "should_stop",
            "home",
            "training",
            "datamodule",
            "limit_train_batches",
            "_last_val_time",
        ),
    }
    kept = {name: value for name, value in vars(trainer).items() if name not in own}
    assert {name for name, value in kept.items() if seen[name] is not value and seen[name] != value} == set()
    assert seen["max_epochs"] == ROUNDS
    assert {name for name, value in flags.items() if seen.get(name, value) != value} <= own


def test_on_round_end_sees_the_new_global_model():
    weights = []

    class Looks(Classifier):
        def on_round_end(self):
            weights.append(torch.cat([p.detach().flatten() for p in self.parameters()]).clone())
            self.log("rounds", float(len(weights)))

    trainer = run(Looks())
    assert len(weights) == ROUNDS and not torch.equal(*weights)
    assert trainer.callback_metrics["rounds"] == ROUNDS
