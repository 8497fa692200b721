"""Every mechanism of the contract table behind secure aggregation: its plain decode, or a refusal."""

import pytest
import torch

from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.secagg import Aggregation, SecAgg
from tests.contract.test_mechanisms import ROWS
from tests.one_round import context_of, encode, updates_for

SEGMENTS, CLIENTS = (40, 24), (11, 3, 8, 0, 5, 7, 2)


def summed(mechanism, run, updates=None):
    context = context_of(mechanism, CLIENTS, SEGMENTS)
    rand = PublicRandomness(SeededKeys(0), context.round, context.attempt)
    message = encode(mechanism, updates_for(len(CLIENTS)) if updates is None else updates, context)
    silent = None if mechanism.tolerated_dropouts(context) == 0 else context.cohort[1]
    rows = [row for row, client in enumerate(context.cohort) if client != silent]
    clients = [context.cohort[row] for row in rows]
    given = {"session": b"s", "weights": torch.zeros(1), "num_clients": len(context.cohort)}
    secure = Aggregation(SecAgg(run=run), mechanism, context, rand, **given)
    secure.add(clients, message.symbols[rows])
    total = secure.finish()
    expected = message.symbols[rows].sum(0, dtype=torch.int64)
    modular = mechanism.symbol_modulus(context)
    if modular is not None:  # residues by its own design; its decode takes either
        expected %= modular[0]
    assert torch.equal(total, expected)
    plain = mechanism.decode(message.symbols[rows], clients, context, rand)
    assert torch.equal(mechanism.decode(total, clients, context, rand), plain)


@pytest.mark.parametrize("run", ["masked", "accounted"])
@pytest.mark.parametrize("mechanism", [row for row in ROWS if row.homomorphic], ids=repr)
def test_the_sum_decodes_as_the_messages_do(mechanism, run):
    summed(mechanism, run)


@pytest.mark.parametrize("mechanism", [row for row in ROWS if not row.homomorphic], ids=repr)
def test_refused(mechanism):
    with pytest.raises(TypeError, match=f"{type(mechanism).__name__} is not homomorphic"):
        summed(mechanism, "accounted")


@pytest.mark.parametrize("mechanism", [row for row in ROWS if row.homomorphic], ids=repr)
def test_the_ends_of_the_range_and_negative_zero(mechanism):
    updates = torch.full((len(CLIENTS), sum(SEGMENTS)), -0.0)
    updates[0], updates[1], updates[2] = 1e6, -1e6, 0.0
    updates[3, ::2], updates[3, 1::2] = 1e6, -1e6
    summed(mechanism, "accounted", updates)
