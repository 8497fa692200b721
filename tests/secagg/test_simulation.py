"""What the round engine calls: the same sum and the same bits whether masks run or are accounted for."""

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.secagg import (
    Aggregation,
    SecAgg,
    Stage,
    StageError,
    SymbolError,
    ThresholdError,
    model_digest,
)
from tests.contract.test_mechanisms import ROWS
from tests.one_round import encode, make_context, updates_for

KEYS = SeededKeys(0)
MECHANISM = fedq.LDPQ(epsilon_per_coordinate=1.0)


def context(num_clients, dim):
    return make_context(MECHANISM, range(num_clients), (dim,), round=2)


def aggregation(secagg, num_clients=7, dim=300):
    rand = PublicRandomness(KEYS, 2)
    return Aggregation(
        secagg,
        MECHANISM,
        context(num_clients, dim),
        rand,
        session=b"s",
        weights=torch.zeros(1),
        num_clients=num_clients,
    )


def messages(clients, num_clients, dim):
    updates = torch.linspace(-1, 1, len(clients) * dim).reshape(len(clients), dim)
    return MECHANISM.encode(updates, context(num_clients, dim), ClientRandomness(KEYS, clients, 2)).symbols


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dropped", [(), (3,), (0, 6)])
@pytest.mark.parametrize("sparse", [False, True])
def test_masked_and_accounted_agree_to_the_bit(active, dropped, sparse):
    size, dim = (60, 50) if sparse else (9, 300)
    options = (
        {"degree": "auto", "max_colluding_fraction": 0.02, "max_dropped_fraction": 0.04} if sparse else {}
    )
    clients = [client for client in range(size) if client not in dropped]
    symbols = messages(clients, size, dim)
    seen = []
    for run in ("masked", "counted"):
        summed = aggregation(fedq.SecAgg(active=active, simulation=run, **options), size, dim)
        for start in range(0, len(clients), 4):
            summed.add(clients[start : start + 4], symbols[start : start + 4])
        assert torch.equal(summed.finish(), symbols.sum(0, dtype=torch.int64))
        seen.append(summed)
    assert seen[0].traffic == seen[1].traffic
    assert sparse == (seen[0].terms.degree < size - 1)
    # ceil(log2 m) a symbol: 9 clients need 4 bits, 60 need 6; the rest is the frame.
    bits = 8 * ((dim * (6 if sparse else 4) + 7) // 8 + 45)
    assert seen[0].traffic.uplink[Stage.MASK] == len(clients) * bits
    assert seen[0].traffic.uplink_bits > len(clients) * bits
    assert seen[0].traffic.downlink_bits > 0


@pytest.mark.parametrize("run", ["masked", "counted"])
def test_bad_input(run):
    summed = aggregation(fedq.SecAgg(simulation=run))
    symbols = messages([0, 1], 7, 300)
    summed.add([0], symbols[:1])
    with pytest.raises(StageError, match="client 0\\] this client is not expected, or answered already"):
        summed.add([0], symbols[:1])
    with pytest.raises(StageError, match="client 9"):
        summed.add([9], symbols[:1])
    with pytest.raises(SymbolError, match=r"\[masked input, client 1\] symbols must lie in \[0, 1\]"):
        summed.add([1], symbols[1:] + 1)
    with pytest.raises(SymbolError, match="client 2\\] symbols must be integers"):
        summed.add([2], symbols[:1] + 0.5)
    with pytest.raises(ThresholdError, match="4 clients are needed, 1 are left"):
        summed.finish()


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("answering", [0, 1, 3])
def test_an_aborted_round_counts_what_was_sent_until_then(active, answering):
    seen = []
    for run in ("masked", "counted"):
        summed = aggregation(fedq.SecAgg(simulation=run, active=active))
        keys_and_shares = summed.traffic.uplink_bits
        assert keys_and_shares > 7 * 8 * 64 and summed.traffic.downlink_bits > keys_and_shares
        summed.add(range(answering), messages(list(range(answering)), 7, 300))
        one = summed.traffic.uplink.get(Stage.MASK, 0) / max(answering, 1)
        assert summed.traffic.uplink_bits == keys_and_shares + answering * one
        with pytest.raises(ThresholdError, match=rf"clients are needed, {answering} are left"):
            summed.finish()
        assert not {Stage.CONFIRM, Stage.UNMASK} & set(summed.traffic.uplink)
        seen.append(summed.traffic)
    assert seen[0].uplink_bits == seen[1].uplink_bits
    assert seen[0].downlink_bits == seen[1].downlink_bits


def test_model_digest():
    weights = torch.arange(6.0)
    assert model_digest(weights) == model_digest(weights.clone())
    others = (weights + 1e-7, weights.double(), weights.reshape(2, 3), weights.flip(0))
    assert len({model_digest(weights), *map(model_digest, others)}) == 5


# ---- every mechanism of the contract table behind secure aggregation: its plain decode, or a refusal ----
SEGMENTS, CLIENTS = (40, 24), (11, 3, 8, 0, 5, 7, 2)


def summed(mechanism, run, updates=None):
    context = make_context(mechanism, CLIENTS, SEGMENTS)
    rand = PublicRandomness(SeededKeys(0), context.round, context.attempt)
    message = encode(mechanism, updates_for(len(CLIENTS)) if updates is None else updates, context)
    silent = None if mechanism.tolerated_dropouts(context) == 0 else context.cohort[1]
    rows = [row for row, client in enumerate(context.cohort) if client != silent]
    clients = [context.cohort[row] for row in rows]
    given = {"session": b"s", "weights": torch.zeros(1), "num_clients": len(context.cohort)}
    secure = Aggregation(SecAgg(simulation=run), mechanism, context, rand, **given)
    secure.add(clients, message.symbols[rows])
    total = secure.finish()
    expected = message.symbols[rows].sum(0, dtype=torch.int64)
    modular = mechanism.symbol_modulus(context)
    if modular is not None:  # residues by its own design; its decode takes either
        expected %= modular[0]
    assert torch.equal(total, expected)
    plain = mechanism.decode(message.symbols[rows], clients, context, rand)
    assert torch.equal(mechanism.decode(total, clients, context, rand), plain)


@pytest.mark.parametrize("run", ["masked", "counted"])
@pytest.mark.parametrize("mechanism", [row for row in ROWS if row.homomorphic], ids=repr)
def test_the_sum_decodes_as_the_messages_do(mechanism, run):
    summed(mechanism, run)


@pytest.mark.parametrize("mechanism", [row for row in ROWS if not row.homomorphic], ids=repr)
def test_refused(mechanism):
    with pytest.raises(TypeError, match=f"{type(mechanism).__name__} is not homomorphic"):
        summed(mechanism, "counted")


@pytest.mark.parametrize("mechanism", [row for row in ROWS if row.homomorphic], ids=repr)
def test_the_ends_of_the_range_and_negative_zero(mechanism):
    updates = torch.full((len(CLIENTS), sum(SEGMENTS)), -0.0)
    updates[0], updates[1], updates[2] = 1e6, -1e6, 0.0
    updates[3, ::2], updates[3, 1::2] = 1e6, -1e6
    summed(mechanism, "counted", updates)
