"""Cures that encoding, decoding, sums behind masks and loss distributions name."""

import numpy as np
import torch

from lightning_fedq import Cyclic, FixedSize, Poisson
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import CPA, LDPQ, QSGD, SIGM, LayeredGaussian, SignRR, TopK
from lightning_fedq.mechanisms.interface import Neighbours
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.grid import LossGrid, loss_grid
from lightning_fedq.privacy.losses import GaussianLoss, LaplaceLoss, Loss, PmfPairs, RenyiLoss
from lightning_fedq.privacy.sampled import amplify_loss, secret_epsilon
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from tests.cures.rows import fed, row
from tests.cures.rows_rounds import handed
from tests.one_round import decode, encode, make_context, updates_for
from tests.secagg.test_terms import Unbounded

TARGET = PrivacyTarget(0.5, delta=1e-5, adversary="secagg_server")
CYCLE = {"cohort": Cyclic(4)}
PUBLIC = PublicRandomness(SeededKeys(0), 0)


def received(mechanism, clients=(0, 1, 2), wrong=False):
    """The mean of some clients, the last of whom may have sent something else."""
    context = make_context(mechanism, clients, (64,))
    symbols = encode(mechanism, updates_for(len(clients)), context).symbols.clone()
    if wrong:
        symbols[-1, -1] = 9
    return decode(mechanism, symbols, clients, context)


def dropped(mechanism):
    """The mean without the client that sent something else."""
    context = make_context(mechanism, (0, 1, 2), (64,))
    symbols = encode(mechanism, updates_for(3), context).symbols
    return decode(mechanism, symbols[:2], (0, 1), context)


class Bounded(Unbounded):
    def symbol_range(self, context, rand):
        return 0, 1


class Wide(LDPQ):
    """Its symbols may be that large."""

    largest = 2**60

    def symbol_range(self, context, rand):
        return 0, self.largest


class Coarser(Wide):
    largest = 2**20


def masked(mechanism, num_clients=8):
    """Moduli of a sum."""
    return SecAgg().layout(mechanism, make_context(mechanism, range(num_clients)), PUBLIC)


def words(count):
    return np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)


def secret(neighbours, loss=None, law=None):
    loss, law = loss or GaussianLoss(1.0), law or FixedSize(1, secret=True)
    return secret_epsilon(loss, 1e-5, law=law, num_clients=10, rounds=2, neighbours=neighbours)


def of_outsiders(mechanism):
    """The relation of what a mechanism claims towards outsiders."""
    claims = mechanism.claims(make_context(mechanism, range(4), (8,)))
    return next(claim.neighbours for claim in claims if claim.adversary.name == "OUTSIDER")


def one_sided():
    """All the mass above 0, as no loss that dominates both orders has it."""
    return LossGrid(1.0, 0, np.array([0.0, 1.0]), 0.0)


def hands_on(bits):
    """Its noise and its grid, as a target sets them."""
    federated = fed(handed(bits=bits), 8, seed=None, privacy=TARGET, secure_aggregation=SecAgg(), **CYCLE)
    return federated.calibrated(650, 2, 0)


class Mine(Loss):
    """A kind of one's own."""

    note = ""

    def curve(self, epsilons):
        return LaplaceLoss(1.0).curve(epsilons)


row(
    "{} stage(s) of {} and then {}",
    lambda: CPA(1.0, stages=41, epsilon_scope="bit"),
    lambda: received(CPA(1.0, stages=2, epsilon_scope="bit")),
)
row(
    "a symbol of client {} is {}, too large for the sum of {} clients. Raise noise_multiplier, got {}.",
    lambda: received(LayeredGaussian(1.0, 1e-12)),
    lambda: received(LayeredGaussian(1.0, 1e-2)),
)
row("symbol of client {} is {}. Raise", lambda: received(SIGM(1.0, 1e-12)), lambda: received(SIGM(1.0, 1e-2)))
row("integers in [0, {}]. Drop", lambda: received(SignRR(1.0), wrong=True), lambda: dropped(SignRR(1.0)))
row("{}. Drop the client", lambda: received(QSGD(levels=3), wrong=True), lambda: dropped(QSGD(levels=3)))
row(
    "indices must be in [0, {}). Drop the client that sent something else.",
    lambda: decode(TopK(), torch.full((1, 2), 99), (0,), make_context(TopK(), (0,), (64,))),
    lambda: dropped(TopK()),
)
row(
    "messages must contain bits, 0 or",
    lambda: received(CPA(1.0, epsilon_scope="bit"), wrong=True),
    lambda: dropped(CPA(1.0, epsilon_scope="bit")),
)
row(
    "epsilon has {} entries, none for client {}. Add them.",
    lambda: received(CPA((1.0, 2.0, 1.0), epsilon_scope="bit"), clients=(0, 1, 3)),
    lambda: received(CPA((1.0, 2.0, 1.0, 2.0), epsilon_scope="bit"), clients=(0, 1, 3)),
)
row("with {} bits, noise of {} clip_norm is below {}", lambda: hands_on(9), lambda: hands_on(20))
row("of {} have no known", lambda: masked(Unbounded(1.0)), lambda: masked(Bounded(1.0)), error=TypeError)
row(
    "The sum of {} symbols in [{}, {}] does not fit 63 bits. Use a coarser mechanism or a smaller cohort",
    lambda: masked(Wide(1.0)),
    lambda: masked(Coarser(1.0)),
    lambda: masked(Wide(1.0), 4),
)
row(
    "secret cohorts need a claim in which {}, got {} ({}). Use a mechanism that claims",
    lambda: secret(of_outsiders(SIGM(1.0, 1.0))),
    lambda: secret(of_outsiders(LayeredGaussian(1.0, 1.0))),
)
row(
    "{} can't account for {} with {} compositions a round, only for one GaussianLoss. Use",
    lambda: secret(Neighbours.SUBSTITUTION, LaplaceLoss(1.0), Poisson(1)),
    lambda: secret(Neighbours.SUBSTITUTION, LaplaceLoss(1.0)),
    lambda: secret(Neighbours.SUBSTITUTION, GaussianLoss(1.0), Poisson(1)),
)
row(
    "{} has no secret draw, so nothing amplifies. Use",
    lambda: secret(Neighbours.SUBSTITUTION, law=FixedSize(1)),
    lambda: secret(Neighbours.SUBSTITUTION, law=FixedSize(1, secret=True)),
)
row(
    "The loss of a round has {} too much mass above 0 to dominate both orders. Pass",
    lambda: amplify_loss(one_sided(), 1, 2),
    lambda: amplify_loss(loss_grid(GaussianLoss(1.0), 1e-9), 1, 2),
)
row(
    "Unknown loss {}. Subclass",
    lambda: spent(1.0, 1e-5),
    lambda: spent(Mine(), 1e-5),
    lambda: spent(PmfPairs((((0.4, 0.6), (0.6, 0.4)),)), 1e-5),
    lambda: spent(GaussianLoss(1.0), 1e-5),
    lambda: spent(RenyiLoss((2.0, 4.0), (0.2, 0.4)), 1e-5),
    error=TypeError,
)
