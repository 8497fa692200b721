"""What each adversary sees, on a mechanism without noise where it can be written down."""

import pytest
import torch

from lightning_fedq.core import Adversary
from lightning_fedq.leakage import observe
from lightning_fedq.mechanisms import CorBin, FedAvg
from lightning_fedq.randomness import SeededKeys
from tests.one_round import context_of

UPDATES = torch.tensor([[1.0, 0.0], [2.0, 4.0], [6.0, 8.0], [3.0, 0.0]])


def see(adversary, mechanism=None, updates=UPDATES, victim=0):
    mechanism = mechanism or FedAvg()
    context = context_of(mechanism, (0, 1, 2, 3), (updates.shape[1],), radius=10.0)
    return observe(mechanism, updates, context, SeededKeys(0), adversary, victim)


@pytest.mark.parametrize(
    "adversary, clients, update",
    [
        (Adversary.EAVESDROPPER, (0,), [1.0, 0.0]),
        (Adversary.SERVER, (0,), [1.0, 0.0]),
        (Adversary.SERVER_AND_PARTNER, (0,), [1.0, 0.0]),
        (Adversary.CLIENT, (0, 2, 3), [10 / 3, 8 / 3]),
        (Adversary.SECAGG_SERVER, (0, 1, 2, 3), [3.0, 3.0]),
        (Adversary.OUTSIDER, (0, 1, 2, 3), [3.0, 3.0]),
    ],
)
def test_views_without_noise(adversary, clients, update):
    seen = see(adversary)
    assert seen.clients == clients
    assert torch.allclose(seen.update, torch.tensor(update))


def test_a_pair_says_more_than_one_uplink():
    """Per coordinate the error of the pair's mean is below 1 / sqrt 2 of one uplink's: words cancel.

    5,000 coordinates: the ratio's standard error is 1%, and it is .42 here; below 0.6 alarms with 1e-9.
    """
    updates = torch.full((4, 5000), 2.0)
    mechanism = CorBin(epsilon=8.0, shared_bits=None)
    one, pair, partner = (
        see(who, mechanism, updates)
        for who in (Adversary.EAVESDROPPER, Adversary.SERVER, Adversary.SERVER_AND_PARTNER)
    )
    assert (one.clients, pair.clients, partner.clients) == ((0,), (0, 1), (0,))
    errors = [(seen.update - 2.0).square().mean().sqrt().item() for seen in (one, pair, partner)]
    assert errors[1] < 0.6 * errors[0]
    assert errors[2] < 0.9 * errors[0]


def test_refusal():
    with pytest.raises(ValueError, match="victim 7 is not in the cohort"):
        see(Adversary.SERVER, victim=7)
