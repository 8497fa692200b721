"""Who sees what: one mechanism, six adversaries

"epsilon = 1" is half a sentence. The other half is whose epsilon it is (a coordinate's, a
message's, a client's over the whole run), at which delta, and against whom. This page asks the
accountant directly, without any training. It runs in a few seconds.
"""

# %%
# ## A round, as everybody knows it
# `RoundContext` is public: the cohort in groups, the length of the update's segments, and the range
# that updates are clipped to. Here 1,000 clients work alone, and a linear model on digits has 650
# parameters.
import matplotlib.pyplot as plt
import torch

from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.mechanisms.interface import Adversary, RoundContext
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.run import ASSUMED, Run


def context(num_clients, dim=650):
    """One round of clients that share no randomness."""
    groups = tuple((client,) for client in range(num_clients))
    return RoundContext(0, groups, (dim,), center=torch.zeros(1), radius=torch.ones(1))


# %%
# ## One coin a coordinate
# `LDPQ(epsilon=0.1)` sends one bit a coordinate, and each bit is a randomised response at epsilon
# 0.1. Whoever sees a client's message sees 650 of them; whoever sees only the sum sees them among
# those of 999 others. The verdict says in a word what the number is worth.
def stated(*sizes):
    """The privacy report of 30 rounds in which everybody takes part, behind secure aggregation."""
    return privacy_report(Run.ideal(LDPQ(epsilon=0.1), context(*sizes), 30, secure_sum=ASSUMED), delta=1e-5)


report = stated(1000)
for adversary in Adversary:
    row = report.row(adversary)
    print(
        f"{adversary.name:20} a bit {row.epsilon_unit:5.3g}   the run {row.epsilon_run:6.3g}   {row.verdict}"
    )

# %%
# ## What helps is a crowd, what hurts is a long vector
# Behind secure aggregation the coins of others hide a client, so its epsilon falls with the size of
# the cohort; in the open it does not. And an epsilon of a coordinate is paid for every coordinate,
# in every view.
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
# ## The page of a run
# A run writes the same statement as `privacy.md`, one row per adversary, in words first ([how to
# read it](../guides/read_the_privacy_page.md)). A mechanism that clips the whole update, and a
# target in place of an epsilon, do better for networks: [Choose a
# mechanism](../guides/choose_a_mechanism.md). The words of one row:
print(report.row(Adversary.SECAGG_SERVER).odds)
