"""Write a mechanism: three levels with randomised response

In this tutorial you write a new mechanism, test it, read its privacy report, attack its claim and train with
it. The mechanism rounds every coordinate at random to one of three levels. The level then goes through a
three-way randomised response. [Write a mechanism](../writing_a_mechanism.md) has all rules. The tutorial runs
in about ten seconds.
"""

# %%
# ## Write the class
# A mechanism is a frozen dataclass of parameters. The privacy claim depends on two rules:
#
# * Decide random bits by **comparing integers**. The claim then follows from the probability that is really
#   attained.
# * Draw every random bit from a stream with a purpose, never from a global generator.
import logging
import math
import warnings
from dataclasses import dataclass, replace

import matplotlib.pyplot as plt
import numpy as np
import pytorch_lightning as pl
import torch

from lightning_fedq.audit import audit
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import Classifier, Linear
from lightning_fedq.functional.linear_decode import decode_sum
from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys
from lightning_fedq.mechanisms.contract_suite import check_mechanism
from lightning_fedq.mechanisms.interface import (
    Adversary,
    Mechanism,
    Message,
    PmfPairs,
    RoundContext,
    Unit,
    same_for_all,
)
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.run import Run
from lightning_fedq.wire.coding import FixedLength

LEVELS, WORDS = 3, 2**32


@dataclass(frozen=True)
class TernaryResponse(Mechanism):
    """Three-level stochastic quantiser with randomised response.

    Args:
        epsilon: Local budget per coordinate and round, > 0, in nats.
    """

    homomorphic = True  # `decode` needs the sum of the levels only

    epsilon: float

    def __post_init__(self):
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be > 0 and finite, got {self.epsilon}")

    @property
    def replaced(self):
        """Number of words of 2^32 that replace the level by a uniform one, rounded up for privacy."""
        return math.ceil(WORDS * LEVELS / (math.expm1(self.epsilon) + LEVELS))

    def encode(self, update, context, rand):
        """See `Mechanism.encode`: one row per client."""
        rows = update.detach().reshape(len(rand.clients), context.dim).double()
        scaled = (rows - context.expand(context.center)) / context.expand(context.radius)
        place = (scaled.clamp(-1, 1) + 1).numpy()  # 0 to 2
        symbols = np.empty(place.shape, np.uint8)
        for row, client in enumerate(rand.clients):
            coins = rand.private(client, "ternary response")
            up, replace = coins.words(context.dim), coins.words(context.dim)
            below = np.floor(place[row])
            level = below + (up < (place[row] - below) * WORDS)
            uniform = rand.private(client, "ternary levels").uniform_below(LEVELS, context.dim)
            symbols[row] = np.where(replace < self.replaced, uniform, level)
        bits = self.code(context).num_bits(torch.from_numpy(symbols))
        return Message(torch.from_numpy(symbols).reshape(update.shape), bits, int((scaled.abs() > 1).sum()))

    def decode(self, symbols, clients, context, rand):
        """See `Mechanism.decode`: unbiased for the sum of the clipped updates."""
        kept = 1 - self.replaced / WORDS
        center, scale = len(clients) * context.center, context.radius / kept
        return decode_sum(symbols, context.segments, center, scale, 1, len(clients))  # levels have mean 1

    def code(self, context):
        """Two bits a coordinate; an entropy coder would need 1.58."""
        return FixedLength(2)

    def symbol_range(self, context, rand):
        """Levels 0 to 2, from which secure aggregation computes its modulus."""
        return 0, LEVELS - 1

    def claims(self, context):
        """Compare every two levels, for every adversary, without the noise of other clients."""
        other = self.replaced / WORDS / LEVELS
        rows = [tuple(1 - 2 * other if i == j else other for j in range(LEVELS)) for i in range(LEVELS)]
        pairs = tuple((p, q) for p in rows for q in rows if p != q)
        loss = PmfPairs(pairs, "three-way randomised response")
        fresh = "random bits are fresh in every round and come from keys that the adversary does not have"
        return same_for_all(loss, context.dim, (fresh,), unit=Unit.COORDINATE)


# %%
# ## Check the bias
# 20,000 clients encode the same ramp from -1.2 to 1.2. Values outside the range are clipped.
mechanism = TernaryResponse(epsilon=1.0)
clients = range(20_000)
round0 = RoundContext(0, tuple((c,) for c in clients), (61,), torch.zeros(1), torch.ones(1))
rand = ClientRandomness(SeededKeys(0), clients, 0)
ramp = torch.linspace(-1.2, 1.2, 61)
message = mechanism.encode(ramp.expand(len(clients), -1), round0, rand)
mean = mechanism.decode(message.symbols, clients, round0, rand) / len(clients)

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot(ramp, ramp, color="grey", label="the update")
axes.plot(ramp, mean, ".", label="decoded mean")
axes.set(xlabel="update", ylabel="mean of 20,000 messages")
axes.legend()
figure.savefig("unbiased.png", dpi=150)
print(
    f"{message.num_bits / len(clients) / 61:.2f} bits a coordinate, {message.num_clipped} coordinates clipped"
)
print(f"largest deviation from the clipped ramp: {(mean - ramp.clamp(-1, 1)).abs().max():.3f}")

# %%
# ## Test the contract
# `check_mechanism` tests every rule that the mechanisms of the package meet: repeatable messages, fresh
# random bits, packing, bias, claims and pickling. It raises an error that names the broken rules.
check_mechanism(mechanism)
print("all rules are met")

# %%
# ## Read the privacy report
# The report uses the claims of the class. You do not have to register the class. A message has 61
# coordinates, so its epsilon is much larger than that of one coordinate. The verdict "vacuous" means that
# the guarantee excludes nothing.
row = privacy_report(Run.ideal(mechanism, round0, 1, secure_sum=None), delta=1e-5).row(Adversary.SERVER)
print(
    f"a coordinate: {row.epsilon_unit:.6f}, a message of 61: {row.epsilon_round:.3g}, verdict: {row.verdict}"
)

# %%
# ## Attack the claim
# The audit runs whole rounds with many pairs of updates. *Holds* means that no observation contradicts the
# claim for the pairs, cohorts and rounds that the verdict names, and that half of the claim was proven. It
# does not see faults for other inputs, cohorts or rounds.
findings = audit(mechanism, draws=50_000)
for finding in findings:
    print(f"{finding.view}: {finding.report}")
print(findings[0].blind_spots)


# %%
# The audit refutes a mechanism that claims half of its real epsilon:
class Braggart(TernaryResponse):
    """Claims half of its epsilon."""

    def claims(self, context):
        """Return the claims of a more private mechanism."""
        return TernaryResponse(self.epsilon / 2).claims(context)


print(audit(Braggart(epsilon=1.0), draws=50_000)[0].report)


# %%
# It also refutes a mechanism that randomises only values that are not zero. Opposite ends of the range do not
# show this fault, and an update of zeros does:
class Masked(TernaryResponse):
    """Sends an exact zero as it is."""

    def encode(self, update, context, rand):
        """See `Mechanism.encode`."""
        message = super().encode(update, context, rand)
        zero = update == context.expand(context.center).to(update)
        return replace(message, symbols=torch.where(zero, 1, message.symbols))


print(audit(Masked(epsilon=1.0), draws=50_000)[0].report)

# %%
# ## Train with it
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*does not have many workers")
fed = Federated(TernaryResponse(epsilon=2.0), num_clients=40, seed=0)
trainer = pl.Trainer(
    max_epochs=10,
    callbacks=[fed],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
pl.seed_everything(0, verbose=False)
trainer.fit(Classifier(Linear(in_features=64), lr=0.5), datamodule=DigitsDataModule(batch_size=16))
print(f"validation accuracy after 10 rounds: {trainer.callback_metrics['val_acc']:.3f}")
