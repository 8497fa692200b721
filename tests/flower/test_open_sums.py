"""Sums that hold less noise than the claims count on are opened by nobody."""

import pytest
import torch

from lightning_fedq.flower.secure import RemoteSum
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import DistributedDiscreteGaussian, RotatedCoins
from lightning_fedq.mechanisms.interface import AbortedRoundError, RoundContext
from lightning_fedq.secagg import Client, SecAgg
from lightning_fedq.secagg.simulation import model_digest

CLIENTS, DIM = 6, 4


def carried_through(mechanism, num_silent):
    """A round that the last clients leave after they have shared their keys."""
    one = torch.ones(1, dtype=torch.float64)
    context = RoundContext(0, tuple((c,) for c in range(CLIENTS)), (DIM,), 0.0 * one, one)
    public, weights = PublicRandomness(SeededKeys(0), 0), torch.zeros(DIM)
    given = {"session": b"s", "weights": weights, "num_clients": CLIENTS}
    remote = RemoteSum(SecAgg(), mechanism, context, public, **given)
    terms = remote.machine.terms
    clients = {c: Client(c, terms, model_digest(weights)) for c in range(CLIENTS)}
    first = {c: client.advertise(remote.invitation(c)) for c, client in clients.items()}
    symbols = torch.zeros(mechanism.num_symbols(context), dtype=torch.int64).numpy()

    def exchange(kind, messages):
        if kind == "shares":
            return {c: clients[c].share_keys(message) for c, message in messages.items()}
        if kind == "masked":
            for c, message in messages.items():
                clients[c].accept_shares(message)
            return {c: clients[c].masked_input(symbols) for c in range(CLIENTS - num_silent)}
        return {c: clients[c].unmask(message) for c, message in messages.items()}

    remote.run(first, exchange, pytest.fail)
    return remote


@pytest.mark.parametrize(
    "mechanism",
    [
        RotatedCoins(1.0, 0.5, max_dropped_clients=1),
        DistributedDiscreteGaussian(1.0, 0.5, 0.1, max_dropped_clients=1),
    ],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_a_sum_with_too_little_noise_is_not_opened(mechanism):
    """Four of six could open it, and the claims allow for one silent client."""
    assert carried_through(mechanism, 1).finish().shape
    with pytest.raises(AbortedRoundError, match="5 clients are needed, 4 are left"):
        carried_through(mechanism, 2)
