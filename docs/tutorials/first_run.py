"""First run: federated, private, and what it costs

An ordinary Lightning training on digits becomes federated and private by one callback. It ends with
accuracy, bits and one epsilon for every adversary. Then the price: the same federation without
privacy, and at a quarter of the epsilon. The script takes about a minute on one core.
"""

# %%
# ## A training that knows nothing of federations
# Model and data are ordinary. `DigitsDataModule` holds scikit-learn's digits, so nothing is
# downloaded.
import logging
import warnings

import pytorch_lightning as pl

import lightning_fedq as fedq
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import MLP, Classifier

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*does not have many workers")


class Accuracy(pl.Callback):
    """Validation accuracy after every epoch."""

    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, pl_module):
        """Keep what the module logged."""
        self.values.append(float(trainer.callback_metrics["val_acc"]))


def train(*callbacks, rounds=25, lr=0.5):
    """Train and return the validation accuracies."""
    accuracy = Accuracy()
    model = Classifier(MLP(in_features=64, hidden=[54]), lr=lr)
    trainer = pl.Trainer(
        max_epochs=rounds,
        callbacks=[accuracy, *callbacks],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=DigitsDataModule(batch_size=4))
    return accuracy.values


print(f"not federated: {train(rounds=10, lr=0.05)[-1]:.3f} of the validation digits are right")

# %%
# ## One callback
# 479 clients hold two or three digits each. Every Lightning epoch is one federated round: each client trains
# from the global model, and its update is clipped, rotated, and sent as one coin a coordinate behind
# masks, so that the server sees the sum of all clients and nothing else. `PrivacyTarget` finds the coin
# for which a client's whole run costs epsilon 8 towards that server; 2% of the clients may collude with it.


def federated(mechanism, epsilon=None, run="masked"):
    """A federation; with an epsilon a private one."""
    target = epsilon and fedq.PrivacyTarget(epsilon, delta=1e-5, adversary="secagg_server")
    masks = fedq.SecAgg(run=run, degree="auto", max_corrupt=0.02, max_dropout=0.02)
    return fedq.Federated(
        mechanism,
        num_clients=479,
        server_optimizer=fedq.FedAvgM,
        privacy=target,
        secure_aggregation=masks if epsilon else None,
    )


private = train(federated(fedq.RotatedCoins(clip_norm=0.5, share=0.5), epsilon=8.0), fedq.RunFolder("first"))

# %%
# The table says who learns how much. First whom this run has met, ahead of them what was asked for; then
# what remains if the masks are broken: nothing, since an epsilon of ten thousand excludes nothing.
# *5.7 bits a parameter* are one message: coins of half the rotated coordinates under masks, keys and shares.

# %%
# ## The price
# The same federation without privacy, and with epsilon 2. Masks are only counted here, which is faster and
# gives the same weights to the bit. Server momentum is the same in all runs.
warnings.filterwarnings("ignore", message="masking is accounted for only")
accuracies = {
    "without privacy": train(federated(fedq.FedAvg())),
    "epsilon 8": private,
    "epsilon 2": train(federated(fedq.RotatedCoins(clip_norm=0.5, share=0.5), epsilon=2.0, run="accounted")),
}
for name, values in accuracies.items():
    print(f"{name:15} {values[-1]:.3f} of the validation digits are right")

# %%
# Privacy is not free: the noise hides a client among 479, and with more clients it costs less
# ([what epsilon costs](../useful_privacy.md)). One run each, and keys come from the operating system, so your
# figures differ: at epsilon 8, .85 to .92 in three runs.
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for name, values in accuracies.items():
    axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=name)
axes.set(xlabel="round", ylabel="validation accuracy", ylim=(0, 1))
axes.legend()
figure.savefig("accuracy.png", dpi=150)
