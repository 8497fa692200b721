"""Published styles of training: with one client as without a federation, and with three they learn."""

import warnings

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import make_trainer
from tests.isolation import corpus_more  # noqa: F401  (adds its own to TRAININGS)
from tests.isolation.corpus import EPOCHS, TRAININGS

DECIDES = frozenset(
    """
    LabelledAndNot Finetuning Moco Metrics StochasticAveraging BatchNorm Gan GradientHooks OneCycle
    Accumulates SharpnessAware OwnCallback ReplayBuffer SparseEmbedding AutoEncoder WeightNorm
    MemoryOfEpochs Recurrent Curriculum MeanTeacher WarmupByHand Closure HooksOfData
    TruncatedBackpropagation PenaltyOfGradients RunningWeight
    """.split()  # noqa: SIM905
)
"""With these every line of the package runs that any of them runs. The others are slow."""
KINDS = [pytest.param(k, marks=() if k.__name__ in DECIDES else pytest.mark.slow) for k in TRAININGS]


def train(kind, epochs, *federated):
    """Train plain, or with callbacks that federate it."""
    module = kind()
    trainer = make_trainer(*module.callbacks(), *federated, max_epochs=epochs, **kind.trainer_flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stacks that can't be, and of Lightning on few batches
        trainer.fit(module, datamodule=kind.data())
    return module, trainer


def state(module):
    return {name: value.double() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_one_client_is_the_plain_training(kind):
    """Weights to 1e-6; steps, epochs and rates exactly. An optimiser with memory is compared for a round."""
    epochs = EPOCHS if kind.rounds_equal else 1
    plain, expected = train(kind, epochs)
    module, trainer = train(kind, epochs, Federated(FedAvg(), 1, seed=0))
    for name, value in state(plain).items():
        torch.testing.assert_close(state(module)[name], value, atol=1e-6, rtol=0.0, msg=name)
    assert trainer.global_step == expected.global_step and trainer.current_epoch == expected.current_epoch
    if kind.__name__ != "WarmupByHand":  # a rate that a client's training sets goes with it
        rates = [[g["lr"] for o in t.optimizers for g in o.param_groups] for t in (trainer, expected)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-12)


ONE_AT_A_TIME = {
    **dict.fromkeys(("MeanTeacher", "Moco"), "training writes into frozen parameters"),
    **dict.fromkeys(("Closure", "SharpnessAware", "SlowWeights", "OwnEstimates"), "is not elementwise"),
    "LabelledAndNot": "loaders of its own, or from several",
    **dict.fromkeys(("Gan", "TruncatedBackpropagation"), "uses manual optimisation"),
    **dict.fromkeys(("RunningWeight", "MemoryOfEpochs"), "takes the value of a tensor out"),
    "WarmupByHand": "overrides optimizer_step",
    "Metrics": "overrides on_train_epoch_end",
    "HooksOfData": "overrides on_after_batch_transfer",
    "ReplayBuffer": "keeps tensors in samples",
    "Recurrent": "net.0 (GRU) keeps a list of its weights",
    "GradientHooks": "net.0.weight has a gradient hook",
    "OwnCallback": "_ScalesGradients has its own on_after_backward",
    "SparseEmbedding": "table (EmbeddingBag) has sparse gradients",
    "AutoEncoder": "get no gradient",
    "PenaltyOfGradients": "calls requires_grad_()",
}
"""Why clients of these do not train side by side. All others do, with branches on shapes among them."""


class UntilItLearns(pl.Callback):
    """Ends a fit whose validation loss is below that of the first round."""

    first = last = float("nan")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.last = float(trainer.callback_metrics["val_loss"])
            self.first = self.last if self.first != self.first else self.first
            trainer.should_stop = self.last < self.first


@pytest.mark.parametrize("kind", KINDS)
def test_six_clients_learn_in_stacks_or_say_the_true_reason(kind, caplog):
    federated, learns, module = Federated(FedAvg(), 6, seed=0), UntilItLearns(), kind()
    trainer = make_trainer(*module.callbacks(), federated, learns, max_epochs=8, **kind.trainer_flags)
    with warnings.catch_warnings(record=True) as warned, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=kind.data())
    said = [m for m in (*(str(w.message) for w in warned), *caplog.messages) if "one client at a time" in m]
    if kind.__name__ in ONE_AT_A_TIME:
        assert len(said) == 1 and ONE_AT_A_TIME[kind.__name__] in said[0]
    else:
        assert not said and federated.clients_per_step_chosen > 1
    assert learns.last < learns.first


@pytest.mark.parametrize("kind", [k for k in TRAININGS if k.__name__ in ("MeanTeacher", "Moco")])
def test_a_follower_travels_where_a_client_has_one_batch(kind):
    """All of its parameters, though the first step changes none of them."""
    federated = Federated(FedAvg(), 6, seed=0)
    module, _ = train(kind, 1, federated)
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert frozen <= set(federated.fit.vector.travelling)


def test_there_are_so_many():
    assert len(TRAININGS) >= 36
