"""Choose a mechanism for a privacy budget

In this tutorial you choose a mechanism for a given epsilon, number of clients and number of parameters. You
ask the planner, which trains nothing, and then test its answer in a training. The tutorial runs in about a
minute.
"""

# %%
# ## Describe the federation
# 479 clients hold two or three digits each. They train a linear model of 650 parameters for 20 rounds. A
# client may spend epsilon 8 over the run. The adversary is a server that sees sums only and colludes with
# 2% of the clients. `SecAgg(simulation="counted")` counts the masks and does not compute them. This is enough
# for a plan.
import logging
import warnings

import matplotlib.pyplot as plt
import pytorch_lightning as pl

from lightning_fedq.callbacks import Federated
from lightning_fedq.commands.plan import candidates
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import Classifier, Linear
from lightning_fedq.privacy.planning import Problem, plan
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg

MASKS = SecAgg(simulation="counted", degree="auto", max_colluding_fraction=0.02, max_dropped_fraction=0.02)
NAMES = ("GaussianNoise", "RotatedCoins", "RotatedCoins, share 1/8", "LDPQ", "PairedCoins")


def problem(epsilon, clients=479):
    """Return the federation and its privacy target."""
    target = PrivacyTarget(epsilon, delta=1e-5, adversary="secagg_server")
    return Problem(clients, params=650, rounds=20, target=target, secure_aggregation=MASKS)


# %%
# ## Ask the planner
# The planner calibrates each mechanism to the budget, so the mechanisms differ in the noise that they need.
# *R* is the noise-to-signal ratio of the whole run. Trainings showed no loss up to an R of 0.1, and lost
# points up to 0.7. Above 4 a model learns almost nothing. Bits are those of one masked message, per
# parameter. *Good from* is the number of clients at which R would be 0.1.
#
# `fedq plan digits_private --epsilon 8` ranks all mechanisms.
shown = {name: mechanism for name, mechanism in candidates(650).items() if name in NAMES}
options = plan(problem(8.0), shown)
print(f"{'':24} {'bits':>5} {'R':>7}  {'':16} good from")
for option in options:
    print(
        f"{option.name:24} {option.bits:5.1f} {option.ratio:7.2g}  {option.verdict:16} "
        f"{option.clients_needed or '-'}"
    )

# %%
# ## A smaller epsilon needs more clients
# With secure aggregation, R falls with the square of the number of clients: every client adds noise, and
# the sum of the noise protects all of them. You can therefore reach a smaller epsilon with more clients.
sizes = [100, 200, 479, 1000, 2000]
figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
coins = {"RotatedCoins": shown["RotatedCoins"]}
for epsilon in (1.0, 2.0, 8.0):
    ratios = [plan(problem(epsilon, size), coins)[0].ratio for size in sizes]
    axes.plot(sizes, ratios, marker="o", markersize=3, label=f"epsilon {epsilon:g}")
    print(
        f"epsilon {epsilon:g}:", ", ".join(f"R {r:.2g} with {n}" for n, r in zip(sizes, ratios, strict=True))
    )
axes.axhline(0.1, color="grey", linestyle=":", label="no loss seen below 0.1")
axes.set(xscale="log", yscale="log", xlabel="clients", ylabel="R of RotatedCoins")
axes.legend(fontsize="small")
figure.savefig("clients_and_epsilon.png", dpi=150)

# %%
# ## Test the plan in a training
# You now train with three of the mechanisms at the same budget: the second, the third and the last.
# The learning rate is the same for all. The target sets the noise, so you choose nothing else.
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
for text in ("does not have many workers", "masking is accounted for only", "this run can hardly learn"):
    warnings.filterwarnings("ignore", message=f".*{text}")


def train(mechanism):
    """Return the validation accuracy after 20 rounds at epsilon 8."""
    federated = Federated(mechanism, num_clients=479, privacy=problem(8.0).target, secure_aggregation=MASKS)
    trainer = pl.Trainer(
        max_epochs=20,
        callbacks=[federated],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(Linear(in_features=64), lr=1.0), datamodule=DigitsDataModule(batch_size=4))
    return float(trainer.callback_metrics["val_acc"])


for name in ("RotatedCoins", "LDPQ", "PairedCoins"):
    [option] = [option for option in options if option.name == name]
    print(f"{name:14} R {option.ratio:5.2g}: validation accuracy {train(shown[name]):.3f}")

# %%
# The mechanism with the largest R has the lowest accuracy, as planned. Mechanisms with similar R can change
# places from run to run. R is an estimate: it assumes how similar the clients' updates are
# (`fed/sim_homogeneity`, 0.3 by default). For other adversaries and situations, see [Choose a
# mechanism](../guides/choose_a_mechanism.md).
