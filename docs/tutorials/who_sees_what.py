"""Six adversaries: what each one sees, and its epsilon

After this tutorial you can read an epsilon of a privacy report. "epsilon = 1" is incomplete without
three more facts: what it covers (a coordinate, a message, or a client over the whole run), the delta,
and the adversary. The page asks the accountant directly, without training, and runs in a few seconds.
"""

# %%
# ## Describe a round
# `RoundContext` contains the public facts of a round: the cohort in groups, the lengths of the update's
# segments, and the range to which updates are clipped. Here 1,000 clients share no random bits with each
# other, and the model has 650 parameters (a linear model on digits).
import matplotlib.pyplot as plt
import torch

from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.mechanisms.interface import Adversary, RoundContext
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.run import ASSUMED, Run


def context(num_clients, dim=650):
    """Return the context of a round of clients that share no randomness."""
    groups = tuple((client,) for client in range(num_clients))
    return RoundContext(0, groups, (dim,), center=torch.zeros(1), radius=torch.ones(1))


# %%
# ## Ask for the epsilon of each adversary
# `LDPQ(epsilon_per_coordinate=0.1)` sends one bit per coordinate. Each bit is a randomised response with
# epsilon 0.1. An adversary that sees a client's message sees 650 such bits. An adversary that sees only the
# sum sees them mixed with the bits of 999 other clients. The verdict summarises the guarantee in a word.
# *Vacuous* means that there is no meaningful guarantee.
def stated(*sizes):
    """Return the report of 30 rounds with all clients and secure aggregation."""
    return privacy_report(
        Run.ideal(LDPQ(epsilon_per_coordinate=0.1), context(*sizes), 30, secure_sum=ASSUMED), delta=1e-5
    )


report = stated(1000)
for adversary in Adversary:
    row = report.row(adversary)
    print(
        f"{adversary.name:20} a bit {row.epsilon_unit:5.3g}   the run {row.epsilon_run:6.3g}   {row.verdict}"
    )

# %%
# ## Change the number of clients and parameters
# With secure aggregation the other clients' random bits hide a client, so epsilon falls as the cohort
# grows. Without it, the size of the cohort has no effect. A per-coordinate epsilon composes over all
# coordinates, so epsilon grows with the number of parameters against every adversary.
sizes, dims = [100, 200, 500, 1000, 2000, 5000], [10, 100, 1_000, 10_000, 100_000]
settings = {
    "clients": (sizes, [(n, 650) for n in sizes]),
    "parameters": (dims, [(1000, dim) for dim in dims]),
}
figure, both = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
for axes, (what, (values, cases)) in zip(both, settings.items(), strict=True):
    reports = [stated(*case) for case in cases]
    print(f"{what:30}", *(f"{value:8,}" for value in values))
    for label, who in [("every message", Adversary.SERVER), ("sum only", Adversary.SECAGG_SERVER)]:
        epsilons = [found.row(who).epsilon_run for found in reports]
        axes.plot(values, epsilons, marker="o", markersize=3, label=f"the server sees {label}")
        print(f"{'the server sees ' + label:30}", *(f"{epsilon:8.3g}" for epsilon in epsilons))
    axes.axhline(20, color="grey", linestyle=":", label="vacuous above")
    axes.set(xscale="log", yscale="log", xlabel=what)
both[0].set_ylabel("epsilon of 30 rounds, delta 1e-5")
both[0].legend(fontsize="small")
figure.savefig("epsilon_by_size.png", dpi=150)

# %%
# ## Read the privacy page of a run
# A run writes the same report to `privacy.md`, one row per adversary ([how to read
# it](../guides/read_the_privacy_page.md)). For neural networks, use a mechanism that clips the whole
# update, and calibrate it to a target epsilon ([Choose a mechanism](../guides/choose_a_mechanism.md)). The
# report explains each row in words:
print(report.row(Adversary.SECAGG_SERVER).sentence)
