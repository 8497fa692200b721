"""What each adversary sees, on a mechanism without noise where it can be written down."""

import pytest
import torch

from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.leakage import observe
from lightning_fedq.leakage.views import _share_weight
from lightning_fedq.mechanisms import CorBin, CorrelatedQuantization, FedAvg
from lightning_fedq.mechanisms.interface import Adversary
from tests.one_round import make_context

UPDATES = torch.tensor([[1.0, 0.0], [2.0, 4.0], [6.0, 8.0], [3.0, 0.0]])


def see(adversary, mechanism=None, updates=UPDATES, victim=0):
    mechanism = mechanism or FedAvg()
    context = make_context(mechanism, (0, 1, 2, 3), (updates.shape[1],), radius=10.0)
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
    assert torch.allclose(seen.update, torch.tensor(update).double())


def test_a_pair_says_more_than_one_uplink():
    """Per coordinate the error of the pair's mean is below 1 / sqrt 2 of one uplink's: words cancel.

    5,000 coordinates: the ratio's standard error is 1%, and it is .42 here; below 0.6 alarms with 1e-9.
    """
    updates = torch.full((4, 5000), 2.0)
    mechanism = CorBin(epsilon_per_coordinate=8.0, shared_bits=None)
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


def test_the_server_has_each_message_of_a_pair():
    updates = torch.full((4, 5000), 2.0)
    mechanism = CorBin(epsilon_per_coordinate=8.0, shared_bits=None)
    pair = see(Adversary.SERVER, mechanism, updates)
    assert pair.shares.shape == (2, 5000)
    assert torch.allclose(pair.shares.mean(0), pair.update, atol=1e-4)
    assert torch.equal(pair.shares[0], see(Adversary.EAVESDROPPER, mechanism, updates).update)
    # errors cancel in the mean, so it weighs more than the difference does
    assert 0.0 < pair.share_weight < 0.5
    assert see(Adversary.SERVER).shares is None
    for who in (Adversary.SERVER_AND_PARTNER, Adversary.CLIENT, Adversary.SECAGG_SERVER, Adversary.OUTSIDER):
        assert see(who, mechanism, updates).shares is None


def test_the_declared_variances_set_the_weight():
    """Independent errors: 1 / k, the mean of two has half the variance; unknown variances: the same."""
    mechanism = CorrelatedQuantization()
    context = make_context(mechanism, tuple(range(3)), (10,), radius=1.0)
    weight = _share_weight(mechanism, context, (0, 1, 2))
    one, three = (mechanism.noise_variance(context, some).item() for some in ((0,), (0, 1, 2)))
    assert weight == pytest.approx(three * 2 / (3 * (one - three)))
    assert _share_weight(FedAvg(), make_context(FedAvg(), (0, 1), (10,)), (0, 1)) == 0.5
