"""A small federated run for the tests of reporting callbacks."""

from lightning_fedq.callbacks import Federated
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import Classifier, Linear
from lightning_fedq.data.models.initial import seeded
from lightning_fedq.mechanisms import CorBin
from tests.digits_run import make_trainer


def small_run(*callbacks, rounds=3, fit=True, **settings):
    """Train a linear model on 60 digits with four clients, or build the trainer only."""
    seed = settings.pop("seed", 0)
    mechanism = settings.pop("mechanism", CorBin(5.0))
    federated = Federated(mechanism, 4, seed=seed, clients_per_step=1, privacy=settings.pop("privacy", None))
    trainer = make_trainer(federated, *callbacks, max_epochs=rounds, **settings)
    if fit:
        trainer.fit(small_model(), datamodule=small_data())
    return trainer


def small_model():
    return Classifier(seeded(Linear(64), 0), lr=0.1)


def small_data():
    return DigitsDataModule(batch_size=8, num_train=60)
