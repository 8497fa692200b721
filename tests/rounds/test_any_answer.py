"""Any bytes in a client's answer, under its own tag: taken or refused by name, for every mechanism."""

import zlib

import numpy as np
import pytest
import torch

from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.rounds import MalformedMessageError, RefusedMessageError
from lightning_fedq.rounds.messages import FRAME_BYTES, pack_frame
from lightning_fedq.wire.coding import FixedLength, UndecodableError
from lightning_fedq.wire.entropy_coding import Subset
from lightning_fedq.wire.range_coding import ConditionalRange
from tests.contract.test_mechanisms import every_mechanism
from tests.rounds.test_halves import SEGMENTS, answers, deployed

LIAR = 2


def framed(server, packed):
    context = server._context
    return pack_frame(LIAR, packed, context, PublicRandomness(server.keys, context.round, context.attempt))


def has_checksum(server):
    context = server._context
    public = PublicRandomness(server.keys, context.round, context.attempt)
    code = server.mechanism.message_code(LIAR, context, public)
    return isinstance(code.inner if isinstance(code, Subset) else code, ConditionalRange)


def spoiled(packed, rng, checksum):
    """Packed messages that are cut, longer, of other bits or words; checksums are made right."""
    body = packed[:-4] if checksum else packed
    for number in range(30):
        place, junk = int(rng.integers(0, len(body) + 1)), rng.bytes(int(rng.integers(0, len(body) + 9)))
        same = rng.bytes(len(body) - place)
        head = body[: 1 + 2 * len(SEGMENTS)]  # of a range code: the scales
        words = b"\xff" * (len(body) - len(head)) if number % 2 else rng.bytes(len(body) - len(head))
        bad = [body[:place] + same, head + words, body[:place] + junk, junk, b"\xff" * len(body)]
        found = bad[number % 5]
        yield found + zlib.crc32(found).to_bytes(4, "little") if checksum else found


@every_mechanism
@pytest.mark.filterwarnings("ignore")
def test_any_answer_is_taken_or_refused_by_name(mechanism):
    """`constriction` raised AssertionError, and the round, the Trainer and the server's process ended."""
    server, clients = deployed(mechanism)
    rng = np.random.default_rng(0)
    plan = server.start()
    sent = answers(server, clients, plan)
    packed, checksum = sent[LIAR][FRAME_BYTES - 16 : -16], has_checksum(server)
    tries = list(spoiled(packed, rng, checksum))
    for bad in tries:
        try:
            server.receive_message(framed(server, bad))
        except RefusedMessageError as error:
            assert error.client == LIAR
        else:
            server.abandon()
            plan = server.start()
            sent = answers(server, clients, plan)
    for client in plan.survivors:
        if client != LIAR:
            server.receive_message(sent[client])
    assert server.finish().num_received == len(plan.survivors) - 1 and torch.isfinite(server.weights).all()


@every_mechanism
def test_an_answer_of_any_length_is_refused_before_it_is_read(mechanism, monkeypatch):
    """64 MB of zeros in place of 1,000 Elias codes took 5 s."""
    server, _ = deployed(mechanism)
    server.start()
    context = server._context
    public = PublicRandomness(server.keys, context.round, context.attempt)
    code = server.mechanism.message_code(LIAR, context, public)
    assert code.max_bytes(server.mechanism.num_symbols(context)) < 64 * context.dim + 64
    monkeypatch.setattr(type(code), "unpack", None)
    with pytest.raises(MalformedMessageError, match=r"symbols take at most \d+ bytes, got 1000000"):
        server.receive_message(framed(server, bytes(1_000_000)))


def test_a_bug_of_a_code_is_not_a_client_s(monkeypatch):
    """It was refused as the client's message, round after round: a broken decoder looked like silence."""
    server, clients = deployed(LDPQ(1.0))
    sent = answers(server, clients, server.start())

    def failing(error):
        def unpack(self, stream, count):
            raise error

        return unpack

    for error in (AssertionError("a bug"), ValueError("a bug"), KeyError("a bug")):
        with monkeypatch.context() as patched:
            patched.setattr(FixedLength, "unpack", failing(error))
            with pytest.raises(type(error), match="a bug"):
                server.receive_message(sent[LIAR])
    with monkeypatch.context() as patched:
        patched.setattr(FixedLength, "unpack", failing(UndecodableError("no message")))
        with pytest.raises(MalformedMessageError, match="Client 2: no message"):
            server.receive_message(sent[LIAR])
    for message in sent.values():
        server.receive_message(message)
    assert server.finish().num_received == len(sent)
