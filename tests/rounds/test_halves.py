"""The server's half and real clients: bytes in between, and the same model as a simulation."""

import copy
import inspect
import json
import math

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq.keys.party_keys import ClientSecrets, HeldClientKeys, HeldServerKeys, ServerSecrets
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.privacy.journal import Journal
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import (
    ForeignMessageError,
    ForgedMessageError,
    LateMessageError,
    MalformedMessageError,
    RefusedMessageError,
    RepeatedMessageError,
    RoundClient,
    RoundEngine,
    RoundPlanner,
    RoundServer,
    RoundTask,
    StreamLog,
    UnexpectedMessageError,
    UsedStreamError,
)
from lightning_fedq.rounds.messages import FRAME_BYTES, pack_frame
from tests.contract.test_mechanisms import every_mechanism
from tests.keys.parties import OfParties
from tests.keys.test_party_keys import parties
from tests.one_round import encode, make_context, updates_for

DIM, SEGMENTS, CLIENTS = 12, (8, 4), 5


def update_of(client, round=0):
    return 0.4 * torch.randn(DIM, generator=torch.Generator().manual_seed(100 * round + client))


class Alone(RoundPlanner):
    """Everybody is there in every round, and noise is handed on to nobody: each round is a block."""

    separation = 1 << 20

    def successors(self, round):
        return ()


def planner_of(mechanism, clients):
    return Alone(clients, 3) if mechanism.reuses_noise else RoundPlanner(clients, 3)


def half(kind, mechanism, keys, planner=None, ranges=None, **options):
    planner, ranges = planner or planner_of(mechanism, CLIENTS), ranges or fedq.AdaptiveRange()
    return kind(mechanism, planner, keys, torch.linspace(-0.5, 0.5, DIM), SEGMENTS, ranges, **options)


def client_of(mechanism, number, keys, path=None, **options):
    return RoundClient(number, mechanism, keys, StreamLog(path, f"client {number}"), **options)


def deployed(mechanism, keys=None, **options):
    keys = keys or SeededKeys(3)
    server = half(RoundServer, mechanism, keys, **options)
    return server, [client_of(mechanism, c, keys, target=server.target) for c in range(CLIENTS)]


def answers(server, clients, plan):
    task = RoundTask.from_bytes(server.task().to_bytes())
    return {c: clients[c].answer(task, server.weights, update_of(c, plan.round)) for c in plan.survivors}


def simulated(mechanism, rounds, keys=None, **options):
    engine = half(RoundEngine, mechanism, keys or SeededKeys(3), **options)
    records = []
    for _ in range(rounds):
        plan = engine.start()
        for client in plan.survivors:
            engine.receive([client], update_of(client, plan.round)[None])
        records.append(engine.finish())
    return engine, records


# ---- one path -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mechanism",
    [
        fedq.FedAvg(),
        fedq.CorBin(2.0, 5),
        fedq.LDPQ(1.0),
        fedq.AggregateGaussian(8.0, 0.1),
        fedq.CPA(2.0, epsilon_scope="bit"),
        fedq.LayeredGaussian(8.0, 0.1),
    ],
)
@pytest.mark.parametrize("options", [{}, {"target": "weights", "ranges": fedq.PreviousMinMax()}])
def test_bytes_between_the_halves_give_the_simulations_model(mechanism, options):
    engine, expected = simulated(mechanism, 3, **options)
    server, clients = deployed(mechanism, **options)
    for record in expected:
        plan = server.start()
        for message in answers(server, clients, plan).values():
            server.receive_message(message)
        found = server.finish()
        assert found.uplink_bits == record.uplink_bits and found.num_received == record.num_received
        assert math.isnan(found.clip_rate) and math.isnan(found.mse)  # what no real server knows
    assert torch.equal(server.weights, engine.weights)
    assert torch.equal(server.ranges.radius, engine.ranges.radius)
    assert server.ledger.charges.tolist() == engine.ledger.charges.tolist()


def test_parties_with_their_own_keys_give_the_model_of_one_process_with_all_of_them():
    (secrets, own, held, everybody), mechanism = parties(CLIENTS), fedq.CorBin(2.0, 5)
    roster = {c: one.public_key for c, one in enumerate(own)}
    server = half(RoundServer, mechanism, held)
    engine, _ = simulated(mechanism, 2, OfParties(held, everybody))
    for _ in range(2):
        plan = server.start()
        for group in plan.groups:
            for client in group:
                peers = {other: roster[other] for other in group if other != client}
                sealed = held.sealed_members(client)
                given = client, own[client], secrets.federation, secrets.public_key, held.salt, sealed, peers
                keys = HeldClientKeys(*given, entropy=lambda size: b"")
                one, update = client_of(mechanism, client, keys), update_of(client, plan.round)
                server.receive_message(one.answer(server.task(), server.weights, update))
        server.finish()
    assert torch.equal(server.weights, engine.weights)


def test_a_server_is_never_given_an_update():
    assert not hasattr(RoundServer, "receive")
    for name, method in inspect.getmembers(RoundServer, inspect.isfunction):
        assert not {"update", "updates"} & set(inspect.signature(method).parameters), name


@every_mechanism
def test_what_is_unpacked_decodes_like_what_was_packed(mechanism):
    """Symbols come off the wire as 64-bit integers, whatever type `encode` gave them."""
    context = make_context(mechanism, (4, 9, 2), (40, 24))
    message, rand = encode(mechanism, updates_for(3), context), PublicRandomness(SeededKeys(0), 0)
    codes = [mechanism.message_code(client, context, rand) for client in context.cohort]
    rows = [code.unpack(code.pack(row), len(row)) for code, row in zip(codes, message.symbols, strict=True)]
    decoded = mechanism.decode(torch.stack(rows), context.cohort, context, rand)
    assert torch.equal(decoded, mechanism.decode(message.symbols, context.cohort, context, rand))


# ---- what is refused ----------------------------------------------------------------------------------


def state_of(server):
    inner = server._sum
    kept = (inner.integer_sum, inner.floats.parts, inner._rows)
    return copy.deepcopy((kept, list(inner.received), server._expected, server._uplink_bits, server.weights))


def assert_same(one, other):
    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return [plain(part) for part in value] if isinstance(value, list | tuple) else value

    assert plain(one) == plain(other)


def refused(server, message, kind, words):
    before = state_of(server)
    with pytest.raises(kind, match=words):
        server.receive_message(message)
    assert_same(state_of(server), before)


@pytest.mark.parametrize(
    "mechanism",
    [fedq.CorBin(2.0, 5), fedq.LayeredGaussian(8.0, 0.1), fedq.CPA(2.0, epsilon_scope="bit")],
    ids=repr,
)
def test_messages_that_are_refused_change_nothing(mechanism):
    planner = RoundPlanner(CLIENTS, 3, fedq.FixedSize(3))
    server, clients = deployed(mechanism, planner=planner)
    early = answers(server, clients, server.start())
    refused(server, b"", MalformedMessageError, "Not an answer of this protocol")
    refused(server, b"GET / HTTP/1.1" * 10, MalformedMessageError, "Not an answer of this protocol")
    first, message = next(iter(early.items()))
    refused(server, message[:-1], ForgedMessageError, f"Client {first}: the tag does not verify")
    refused(server, message + b"\0", ForgedMessageError, "the tag does not verify")
    for place in (45, len(message) - 1):
        flipped = bytearray(message)
        flipped[place] ^= 1
        refused(server, bytes(flipped), ForgedMessageError, "the tag does not verify")
    absent = next(c for c in range(CLIENTS) if c not in early)
    context, public = server._context, PublicRandomness(server.keys, 0)
    stranger = pack_frame(absent, b"", context, public)
    refused(server, stranger, UnexpectedMessageError, f"Client {absent}: not in the cohort")
    foreign = PublicRandomness(SeededKeys(4), 0)
    refused(server, pack_frame(first, b"", context, foreign), ForeignMessageError, "of another federation")
    for packed in (b"", b"\xff", bytes(1000)):
        junk = pack_frame(first, packed, context, public)
        refused(server, junk, MalformedMessageError, f"Client {first}: ")
    assert server.receive_message(message) == first
    refused(server, message, RepeatedMessageError, f"Client {first}: has answered already")
    server.finish()
    with pytest.raises(RefusedMessageError, match="No round is open"):
        server.receive_message(message)
    server.start()
    for late in early.values():
        with pytest.raises(LateMessageError, match="of round 0, attempt 0, but round 1, attempt 0 is open"):
            server.receive_message(late)
    server.abandon()
    again = server.start()
    assert server.attempt == 1
    for late in answers_of_attempt(server, clients, again, attempt=0).values():
        with pytest.raises(LateMessageError, match="round 1, attempt 0, but round 1, attempt 1 is open"):
            server.receive_message(late)


def answers_of_attempt(server, clients, plan, attempt):
    fields = {**vars(server.task()), "attempt": attempt}
    fresh = [client_of(c.mechanism, c.client, c.keys) for c in clients]
    return {c: fresh[c].answer(RoundTask(**fields), server.weights, update_of(c)) for c in plan.survivors}


def test_a_symbol_that_the_mechanism_cannot_send_is_refused():
    """Five levels take three bits, and 7 is none of them."""
    server, _ = deployed(fedq.JoPEQ(epsilon_per_coordinate=1.0, levels=5))
    server.start()
    context, public = server._context, PublicRandomness(server.keys, 0)
    junk = pack_frame(0, server.mechanism.code(context).pack(torch.full((DIM,), 7)), context, public)
    refused(server, junk, MalformedMessageError, "symbols that the mechanism can't send")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_liar_cannot_send_a_nan(bad):
    server, clients = deployed(fedq.FedAvg())
    plan = server.start()
    good = answers(server, clients, plan)
    row = torch.zeros(DIM)
    row[3] = bad
    packed = fedq.FedAvg().code(server._context).pack(row.view(torch.int32))
    junk = pack_frame(2, packed, server._context, PublicRandomness(server.keys, 0))
    refused(server, junk, MalformedMessageError, "a NaN or an infinity")
    server.receive_message(good[2])


def test_the_frame_is_small():
    server, clients = deployed(fedq.LDPQ(1.0))
    message = next(iter(answers(server, clients, server.start()).values()))
    assert len(message) == FRAME_BYTES + 2 and FRAME_BYTES == 56


# ---- the client's own log -----------------------------------------------------------------------------


def test_a_stream_carries_one_payload(tmp_path):
    path, keys = tmp_path / "streams.jsonl", SeededKeys(3)
    server, _ = deployed(fedq.LDPQ(1.0))
    server.start()
    one, task = client_of(fedq.LDPQ(1.0), 0, keys, path), server.task()
    one.answer(task, server.weights, update_of(0))
    words = "Round 0, attempt 0 was asked, but this client has answered round 0"
    with pytest.raises(UsedStreamError, match=words):
        one.answer(task, server.weights, update_of(1))
    back = client_of(fedq.LDPQ(1.0), 0, keys, path)  # a client that was killed and comes back
    assert back.log.charges == 1
    with pytest.raises(UsedStreamError, match="but this client has answered round"):
        back.answer(task, server.weights, update_of(1))
    fields = {**vars(task), "attempt": 1}
    back.answer(RoundTask(**fields), server.weights, update_of(1))
    with pytest.raises(UsedStreamError):  # a server that was set back
        back.answer(task, server.weights, update_of(1))
    with pytest.raises(UsedStreamError):  # another process of the same client has used it
        one.answer(RoundTask(**fields), server.weights, update_of(1))
    assert [json.loads(line)["attempt"] for line in path.read_text().splitlines()[1:]] == [0, 1]


def test_the_log_is_on_disk_before_the_message_exists(tmp_path, monkeypatch):
    path = tmp_path / "streams.jsonl"
    server, _ = deployed(fedq.LDPQ(1.0))
    server.start()
    one = client_of(fedq.LDPQ(1.0), 0, SeededKeys(3), path)

    def killed(*args):
        assert len(path.read_text().splitlines()) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(fedq.LDPQ, "encode", killed)
    with pytest.raises(KeyboardInterrupt):
        one.answer(server.task(), server.weights, update_of(0))
    monkeypatch.undo()
    back = client_of(fedq.LDPQ(1.0), 0, SeededKeys(3), path)
    with pytest.raises(UsedStreamError):
        back.answer(server.task(), server.weights, update_of(0))


def test_the_log_of_another_client_is_refused(tmp_path):
    StreamLog(tmp_path / "streams.jsonl", "client 0")
    with pytest.raises(ValueError, match="the journal of another federation"):
        StreamLog(tmp_path / "streams.jsonl", "client 1")


def test_a_client_refuses_a_round_without_it_or_of_another_model():
    server, clients = deployed(fedq.LDPQ(1.0), planner=RoundPlanner(CLIENTS, 3, fedq.FixedSize(3)))
    plan = server.start()
    absent = next(c for c in range(CLIENTS) if c not in plan.cohort)
    with pytest.raises(ValueError, match=f"Client {absent} is not in the cohort of round 0"):
        clients[absent].answer(server.task(), server.weights, update_of(0))
    words = "has 12 coordinates, this client's model 11, and the server sent 12"
    with pytest.raises(ValueError, match=words):
        clients[plan.cohort[0]].answer(server.task(), server.weights, torch.zeros(11))
    assert clients[plan.cohort[0]].log.charges == 0


# ---- the task, and a server that comes back -----------------------------------------------------------


@pytest.mark.parametrize(
    "spoil", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"FQXX" + d[4:], lambda d: b""]
)
def test_a_spoiled_task_is_refused(spoil):
    server, _ = deployed(fedq.CorBin(1.0))
    server.start()
    data = server.task().to_bytes()
    again = RoundTask.from_bytes(data)
    assert again.groups == server._context.groups and again.segments == SEGMENTS
    assert torch.equal(again.center, server._context.center)
    assert torch.equal(again.radius, server._context.radius)
    with pytest.raises(ValueError, match="Not the task of a round"):
        RoundTask.from_bytes(spoil(data))


def test_a_server_whose_keys_outlive_it_uses_no_stream_of_its_journal_again(tmp_path):
    """Killed after the charge and restarted from a checkpoint of before: the round is a new attempt."""
    secrets, own = ServerSecrets.draw(), [ClientSecrets.draw() for _ in range(CLIENTS)]
    keys = HeldServerKeys(secrets, {c: one.public_key for c, one in enumerate(own)})
    path, name = tmp_path / "ledger.jsonl", repr(fedq.LDPQ(1.0))

    def server(position):
        ledger = Ledger(CLIENTS, name)
        one = half(RoundServer, fedq.LDPQ(1.0), keys, ledger=ledger)
        ledger.keep(Journal(path, name, CLIENTS, position), False)
        return one

    server(0).start()
    back = server(0)
    back.start()
    assert (back.round, back.attempt) == (0, 1)
    assert back.ledger.charges.tolist() == [2] * CLIENTS  # what may have been sent is paid for


@pytest.mark.parametrize(
    "mechanism, weighted",
    [
        (fedq.LayeredGaussian(8.0, 0.1), False),
        *(
            (mechanism, weighted)
            for mechanism in (fedq.CPA(2.0, epsilon_scope="bit"), fedq.LDPQ(1.0), fedq.FedAvg())
            for weighted in (False, True)
        ),
    ],
)
def test_the_order_in_which_clients_answer_does_not_change_the_model(mechanism, weighted):
    """A simulation takes clients with alike batches one after the other; real ones come as they come."""
    options = {"client_weights": torch.linspace(1.0, 2.0, CLIENTS)} if weighted else {}
    found = []
    for step in (1, 2, 3, 4):  # 5 clients, so all of these walk through everybody
        server, clients = deployed(mechanism, **options)
        for _ in range(12):
            messages = answers(server, clients, server.start())
            order = sorted(messages)
            for place in range(CLIENTS):
                server.receive_message(messages[order[place * step % CLIENTS]])
            server.finish()
        found.append(server.weights)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    "mechanism",
    [
        fedq.LayeredGaussian(1.0, 1.0),
        fedq.LayeredGaussian(1.0, 1.0, entropy_code="elias", layering="shifted"),
        fedq.AggregateGaussian(1.0, 1.0),
        fedq.SIGM(1.0, 1.0),
        fedq.SIGM(1.0, 1.0, 0.5),
    ],
)
@pytest.mark.parametrize("lie", ["huge", "long", "one step beyond"])
def test_one_message_moves_the_sum_no_further_than_an_update_that_is_clipped(mechanism, lie):
    """Symbols of 2^20 moved the mean of four clients of 40 parameters by 5e6 clipping norms."""
    context = make_context(mechanism, range(4), (40,))
    public = PublicRandomness(SeededKeys(0), 0)
    row = encode(mechanism, 100.0 * torch.ones(4, 40), context).symbols[2].clone()
    assert mechanism.can_send(row, 2, context, public)
    if lie == "huge":
        row[row.nonzero()[0]] = 2**20
    elif lie == "one step beyond":
        row[row.nonzero()] += 2
    else:  # every coordinate by itself is fine under an l2 norm
        quantizer = mechanism.quantizers(context, public)(2)
        dither, step = (quantizer[1] if isinstance(mechanism, fedq.SIGM) else quantizer)[:2]
        beyond = 1.5 if isinstance(mechanism, fedq.SIGM) else 0.9
        row = torch.from_numpy(dither + beyond / step + 0.5).floor().int()
    assert not mechanism.can_send(row, 2, context, public)


@pytest.mark.parametrize(
    ("mechanism", "largest", "beyond"),
    [
        (fedq.RotatedCoins(1.0, 1.0, bits_per_coordinate=4), 4, 7),
        (fedq.RotatedCoins(1.0, 1.0, bits_per_coordinate=8), 8, 15),
        (fedq.CSGM(1.0, 1.0), 3, 4),
        (fedq.CorrelatedQuantization(5), 4, 7),
        (fedq.SubtractiveDither(2), 1, -2),
    ],
)
def test_what_a_code_has_room_for_and_no_update_gives_is_refused(mechanism, largest, beyond):
    """From the middle of the symbols, one liar went 2 to 2.75 times as far as honest clients can."""
    context = make_context(mechanism, range(4), (8,))
    public = PublicRandomness(SeededKeys(0), 0)
    code = mechanism.message_code(2, context, public)
    for symbol in (largest, beyond):
        row = torch.full((8,), symbol)
        assert torch.equal(code.unpack(code.pack(row), 8), row)
        assert mechanism.can_send(row, 2, context, public) == (symbol == largest)
