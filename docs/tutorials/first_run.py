"""First run: federated, private, and what it costs

An ordinary Lightning training on digits becomes federated by one callback. Then three mechanisms
are compared on the same federation: floats without privacy, independent private coins, and CorBin's
coins whose errors cancel in pairs. The script runs in about ten seconds on one core.
"""

# %%
# ## A training that knows nothing of federations
# Model and data are ordinary. `DigitsDataModule` holds scikit-learn's digits, so nothing is
# downloaded.
import logging
import warnings

import pytorch_lightning as pl

from lightning_fedq.callbacks import Federated
from lightning_fedq.datasets import DigitsDataModule
from lightning_fedq.mechanisms import LDPQ, CorBin, FedAvg
from lightning_fedq.models import Classifier, Linear

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*does not have many workers")


class Accuracy(pl.Callback):
    """Validation accuracy after every epoch."""

    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, pl_module):
        """Keep what the module logged."""
        self.values.append(float(trainer.callback_metrics["val_acc"]))


def train(*callbacks):
    """Train 15 epochs and return the validation accuracies."""
    accuracy = Accuracy()
    trainer = pl.Trainer(
        max_epochs=15,
        callbacks=[accuracy, *callbacks],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(0, verbose=False)
    trainer.fit(Classifier(Linear(in_features=64), lr=0.5), datamodule=DigitsDataModule(batch_size=16))
    return accuracy.values


print(f"not federated: {train()[-1]:.3f} of the validation digits are right")

# %%
# ## One callback
# Forty clients share the training samples. Every Lightning epoch is one federated round: each
# client trains from the global model, and what it sends is one bit a parameter. With an integer
# `seed` the run is reproducible and *not* private; leave it out for keys from the operating system.

mechanisms = [FedAvg(), LDPQ(epsilon=2.0), CorBin(epsilon=2.0, shared_bits=5)]
federations = [Federated(mechanism, num_clients=40, seed=0) for mechanism in mechanisms]
accuracies = [train(fed) for fed in federations]

# %%
# ## Accuracy, and bits on the wire
# `Federated.records` holds what every round really sent and how far the decoded mean was from the
# exact one.
print(f"{'mechanism':10} accuracy  bits up a round  squared error of the mean")
for fed, accuracy in zip(federations, accuracies, strict=True):
    last = fed.records[-1]
    name = type(fed.mechanism).__name__
    print(f"{name:10} {accuracy[-1]:8.3f}  {last.uplink_bits:15,}  {last.mse:.2g}")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for fed, accuracy in zip(federations, accuracies, strict=True):
    axes.plot(range(1, 16), accuracy, marker="o", markersize=3, label=type(fed.mechanism).__name__)
axes.set(xlabel="round", ylabel="validation accuracy", ylim=(0, 1))
axes.legend()
figure.savefig("accuracy.png", dpi=150)
