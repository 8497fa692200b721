"""The fault list: what clients, networks and restarts can do to a round; never a wrong sum."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from lightning_fedq.keys.randomness import SeededKeys, Stream
from lightning_fedq.secagg import (
    AuthenticationError,
    LowOrderKeyError,
    MessageError,
    ModelError,
    RosterError,
    SecAggError,
    Server,
    ShareError,
    Stage,
    StageError,
    SymbolError,
    TermsError,
    messages as wire,
)
from lightning_fedq.secagg.layout import sum_layout
from lightning_fedq.secagg.messages import Kind
from tests.secagg.play import MODEL, Round, make_inputs, make_terms, seeded_entropy, total
from tests.secagg.test_malicious_server import LOW_ORDER, public_key

HEAD = wire.FRAME_BYTES - wire.TAG_BYTES


def until(stage, active=False):
    terms = make_terms(active=active)
    inputs = make_inputs(terms)
    return Round(terms).run(inputs, until=stage), inputs


def finish(played, inputs, start, skip=()):
    """Play the stages from number `start` on without the clients in `skip`, and check the sum."""
    for stage in played.stages[start:]:
        done = {*skip, *played.server._answered}
        played.step(stage, inputs, [client for client in played.incoming if client not in done])
    assert np.array_equal(played.server.total, total(inputs, played.server.survivors))


def test_late_message_after_the_stage_was_closed():
    """A masked input that comes after the others' shares were asked for is refused, and stays masked."""
    played, inputs = until(Stage.MASK)
    late = played.answer(Stage.MASK, 5, inputs[5])
    played.step(Stage.MASK, inputs, range(5))
    with pytest.raises(StageError, match=r"\[unmask, client 5\] expected OPENING, got MASKED"):
        played.server.receive(late)
    finish(played, inputs, 3)
    assert played.server.survivors == (0, 1, 2, 3, 4)
    with pytest.raises(StageError, match="the round is over"):
        played.server.receive(late)
    with pytest.raises(StageError, match="the round is over"):
        played.server.close()


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK])
def test_duplicate_message(stage):
    played, inputs = until(stage)
    message = played.answer(stage, 2, inputs[2])
    played.server.receive(message)
    with pytest.raises(StageError, match="client 2\\] this client has answered already"):
        played.server.receive(message)
    finish(played, inputs, played.stages.index(stage))


def test_return_after_missing_a_stage():
    """A client that crashed between shares and mask comes back with fresh keys: it is not let in again."""
    played, inputs = until(Stage.SHARE)
    played.step(Stage.SHARE, clients=range(5))
    reborn = played.client(5)
    played.clients[5] = reborn
    message = reborn.advertise(played.server.invitation(5))
    with pytest.raises(StageError, match="expected MASKED, got KEYS"):
        played.server.receive(message)
    forged = wire.seal(Kind.MASKED, played.terms, 5, bytes(played.terms.layout.num_bytes), b"k" * 32)
    with pytest.raises(
        StageError, match="client 5\\] this client is not expected: it missed an earlier stage"
    ):
        played.server.receive(forged)
    finish(played, inputs, 2)


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK])
def test_every_flipped_bit_and_every_truncation_is_refused(stage):
    played, inputs = until(stage)
    message = played.answer(stage, 3, inputs[3])
    step = max(len(message) * 8 // 800, 1)
    for bit in range(0, len(message) * 8, step):
        broken = bytearray(message)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SecAggError):
            played.server.receive(bytes(broken))
    for size in range(0, len(message), step):
        with pytest.raises(SecAggError):
            played.server.receive(message[:size])
    with pytest.raises(SecAggError):
        played.server.receive(message + b"\0")
    # The server is as if nothing had come, and the right message still counts.
    played.server.receive(message)
    finish(played, inputs, played.stages.index(stage))


def fuzz(count):
    """Random bytes, and random bodies behind a right header: none is accepted, none is an untyped error."""
    played, inputs = until(Stage.MASK)
    stream = Stream(SeededKeys(3).public())
    lengths = stream.uniform_below(200, count).tolist()
    header = wire.seal(Kind.MASKED, played.terms, 4, b"", bytes(32))[:HEAD]
    for number, size in enumerate(lengths):
        raw = stream.words(50).tobytes()[:size]
        with pytest.raises(SecAggError):
            played.server.receive(raw if number % 2 else header + raw)
    finish(played, inputs, 2)


def test_fuzzed_messages():
    fuzz(20_000)


@pytest.mark.slow
def test_a_million_fuzzed_messages():
    fuzz(1_000_000)


@pytest.mark.parametrize(
    ("symbols", "match"),
    [
        (np.zeros(4, np.int64), r"integers of shape \(5,\), got int64 of shape \(4,\)"),
        (np.zeros((1, 5), np.int64), r"got int64 of shape \(1, 5\)"),
        (np.zeros(1, np.int64), r"got int64 of shape \(1,\)"),
        (np.full(5, np.nan), "got float64"),
        (np.full(5, np.inf, np.float32), "got float32"),
        (np.full(5, -0.0), "Encode the update first"),
        (np.array([0, 0, 13, 0, 0]), r"must lie in \[-3, 12\].*got \[0, 13\]"),
        (np.array([0, -4, 0, 0, 0]), r"got \[-4, 0\]"),
        (np.array([0, 2**64 - 1, 0, 0, 0], np.uint64), "must fit 64 signed bits"),
    ],
)
def test_symbols_that_are_not_the_mechanisms(symbols, match):
    played, inputs = until(Stage.MASK)
    with pytest.raises(SymbolError, match=match) as caught:
        played.answer(Stage.MASK, 1, symbols)
    assert (caught.value.client, caught.value.stage) == (1, Stage.MASK)
    # That client is out; the others go on.
    with pytest.raises(StageError):
        played.clients[1].masked_input(inputs[1])
    finish(played, inputs, 2, skip=(1,))


@pytest.mark.parametrize("value", [-3, 12])
@pytest.mark.parametrize("modulus", [None, 91, 97, 2**63])
def test_extremes_of_the_range_do_not_wrap(value, modulus):
    """All clients at one end: the sum is the largest there is; 6 x 15 + 1 = 91 is the smallest modulus."""
    terms = make_terms(layout=sum_layout(5, -3, 12, 6, modulus))
    inputs = {client: np.full(5, value) for client in range(6)}
    assert Round(terms).run(inputs).server.total.tolist() == [6 * value] * 5


def masked(gone=()):
    """All masked inputs but those of some clients have come."""
    terms = make_terms()
    inputs = make_inputs(terms)
    return Round(terms).run(inputs, dict.fromkeys(gone, Stage.MASK), until=Stage.UNMASK), inputs


@pytest.mark.parametrize("gone", [(), (5,)], ids=["self-mask", "mask key"])
def test_one_corrupt_share_is_survived(gone):
    """Client 0 was given a wrong share; the shares of the five others suffice."""
    played, inputs = masked(gone)
    pair = played.clients[0]._held[5]
    wrong = b"\1" * 16
    played.clients[0]._held[5] = wrong + pair[16:] if gone else pair[:16] + wrong
    finish(played, inputs, 3)


@pytest.mark.parametrize(("opened", "gone"), [("self-mask", ()), ("mask key", (5,))])
def test_too_many_corrupt_shares_are_detected(opened, gone):
    played, _ = masked(gone)
    for client in (0, 2, 4):
        played.clients[client]._held[5] = 2 * (b"\1" * 16)
    played.collect(Stage.UNMASK)
    with pytest.raises(ShareError, match=f"client 5\\] the shares of its {opened} do not give back"):
        played.server.close()
    with pytest.raises(StageError, match="the sum is not known"):
        _ = played.server.total


@pytest.mark.parametrize("gone", [(), (5,)])
def test_wrong_commitment_is_detected(gone):
    """A client that shares another seed than it committed to loses the round, and is named as the cause."""
    played, _ = until(Stage.UNMASK)
    played.server._commitments[2] = bytes(16)
    played.collect(Stage.UNMASK, clients=[client for client in played.incoming if client not in gone])
    with pytest.raises(ShareError, match="client 2"):
        played.server.close()
    assert played.server.broken == {2} and not played.server.wrong_shares


def lying_holders(liars, num_clients=10, active=False):
    """A round whose `liars` have opened wrong shares of everybody, up to the server's last step."""
    terms = make_terms(num_clients, active=active)
    played = Round(terms).run(make_inputs(terms), until=Stage.UNMASK)
    for liar in liars:
        for owner, pair in played.clients[liar]._held.items():
            wrong = hashlib.sha256(b"%d of %d" % (liar, owner)).digest()[:15]
            played.clients[liar]._held[owner] = pair[:16] + b"\0" + wrong
    played.collect(Stage.UNMASK)
    return played


@pytest.mark.parametrize(
    "liars, active", [((2,), False), ((0, 4), False), ((0, 5), False), ((2,), True), ((9,), False)]
)
def test_holders_that_open_wrong_shares(liars, active):
    """Two of ten ended every round, and the log named the owner of a secret in their place."""
    played = lying_holders(liars, active=active)
    played.server.close()
    assert np.array_equal(played.server.total, total(make_inputs(played.terms), range(10)))
    for liar in liars:  # twice found, then asked last; a wrong share that is not needed is not looked for
        found = [owner for holder, owner in played.server.wrong_shares if holder == liar]
        assert len(set(found)) == (2 if liar < played.terms.threshold else 0)
    assert {holder for holder, _ in played.server.wrong_shares} <= set(liars) and not played.server.broken


def test_more_lying_holders_than_shares_correct_blame_nobody():
    played = lying_holders((0, 2, 4))
    with pytest.raises(ShareError):
        played.server.close()
    assert not played.server.broken


@pytest.mark.parametrize("gone", [False, True])
def test_an_owner_whose_shares_lie_on_no_polynomial(gone):
    """Every share is of another secret: no holder is blamed, and the owner is."""
    terms = make_terms(10)
    played = Round(terms).run(make_inputs(terms), until=Stage.MASK)
    for holder, client in played.clients.items():
        if holder != 3:
            client.accept_shares(played.incoming[holder])
            client._held[3] = 2 * (b"\0" + hashlib.sha256(b"%d" % holder).digest()[:15])
            client._next, inputs = "masked_input", make_inputs(terms)
            played.server.receive(client.masked_input(inputs[holder]))
    if not gone:
        played.server.receive(played.answer(Stage.MASK, 3, make_inputs(terms)[3]))
    for client, message in played.server.close().items():
        played.server.receive(played.clients[client].unmask(message))
    with pytest.raises(ShareError, match="client 3"):
        played.server.close()
    assert played.server.broken == {3}


def test_restart_of_the_server_in_every_stage():
    """State is not kept: the round starts again as a new attempt, and nothing of the old one counts."""
    for stage in (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK):
        played, inputs = until(stage)
        old = played.answer(stage, 0, inputs[0])
        again = Round(replace(played.terms, attempt=1))
        with pytest.raises(TermsError, match="another session, round, attempt"):
            again.server.receive(old)
        again.run(inputs)
        assert np.array_equal(again.server.total, total(inputs, range(6)))


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 1},
        {"session": b"other"},
        {"cohort": (0, 1, 2, 3, 4, 6)},
        {"threshold": 5},
        {"layout": sum_layout(5, -3, 12, 6, 2**20)},
        {"layout": sum_layout(6, -3, 12, 6)},
        {"layout": sum_layout(5, np.array([-3, -3, -3, -3, -2]), 12, 6)},
        {"degree": 4},
        {"min_survivors": 5},
    ],
)
def test_a_client_with_other_terms(changes):
    """Another round, modulus, shape or threshold: whatever differs, the first message tells."""
    terms = make_terms()
    played = Round(terms)
    other = Round(replace(terms, **changes))
    with pytest.raises(TermsError, match="cohort or modulus"):
        other.clients[0].advertise(played.incoming[0])
    with pytest.raises(TermsError):
        played.server.receive(other.answer(Stage.ADVERTISE, 1))


def test_a_client_with_another_model_is_named():
    terms = make_terms()
    inputs = make_inputs(terms)
    played = Round(terms, models={4: bytes(32)})
    with pytest.raises(ModelError, match=r"\[advertise keys, client 4\] this client trained another model"):
        played.server.receive(played.answer(Stage.ADVERTISE, 4))
    finish(played, inputs, 0, skip=(4,))
    assert played.server.survivors == (0, 1, 2, 3, 5)


@pytest.mark.parametrize("point", LOW_ORDER)
@pytest.mark.parametrize("field", [0, 1])
def test_a_client_with_a_low_order_key(point, field):
    played = Round(make_terms())
    message = played.answer(Stage.ADVERTISE, 2)
    start = HEAD + wire.SHORT_BYTES + 32 * field
    body = message[HEAD:start] + point + message[start + 32 : -wire.TAG_BYTES]
    forged = wire.seal(Kind.KEYS, played.terms, 2, body, played.clients[2]._channel_key)
    with pytest.raises(LowOrderKeyError, match=r"\[advertise keys, client 2\] the public key has low order"):
        played.server.receive(forged)


def test_a_client_with_another_clients_key():
    played = Round(make_terms())
    first = played.answer(Stage.ADVERTISE, 1)
    played.server.receive(first)
    second, start = played.answer(Stage.ADVERTISE, 2), HEAD + wire.SHORT_BYTES + 32
    body = second[HEAD:start] + first[start : start + 32]
    with pytest.raises(RosterError, match="client 2\\] this client's key is used twice"):
        played.server.receive(wire.seal(Kind.KEYS, played.terms, 2, body, played.clients[2]._channel_key))


def test_impersonation_against_a_server_with_a_directory():
    """A stranger who speaks as client 2 with a key of its own can't sign for it."""
    played = Round(make_terms(active=True))
    played.clients[2]._identity = played.identities[3]
    with pytest.raises(
        AuthenticationError, match=r"\[advertise keys, client 2\] the signature does not verify"
    ):
        played.server.receive(played.answer(Stage.ADVERTISE, 2))


def test_forged_confirmation_is_refused_by_the_server():
    played, inputs = until(Stage.CONFIRM, active=True)
    played.clients[2]._identity = played.identities[3]
    with pytest.raises(AuthenticationError, match=r"\[consistency, client 2\]"):
        played.server.receive(played.answer(Stage.CONFIRM, 2))
    finish(played, inputs, 3, skip=(2,))
    assert played.server.survivors == tuple(range(6))


def test_messages_that_are_not_of_this_protocol():
    played, inputs = until(Stage.MASK)
    message = played.answer(Stage.MASK, 0, inputs[0])
    terms, key, full = played.terms, played.server._channel_keys[0], b"\xff" * played.terms.layout.num_bytes
    for bad, error, match in [
        (b"", MessageError, "45 bytes or more, got 0"),
        (b"HTTP" + message[4:], MessageError, "not a message of this protocol"),
        (message[:4] + b"\x63" + message[5:], MessageError, "kind 99"),
        (wire.seal(Kind.MASKED, terms, 99, b"", bytes(32)), MessageError, "client 99 is not in the cohort"),
        (wire.seal(Kind.SHARES, terms, 0, b"", bytes(32)), StageError, "expected MASKED, got SHARES"),
        (wire.seal(Kind.MASKED, terms, 0, b"xy", key), MessageError, "ends early"),
        (wire.seal(Kind.MASKED, terms, 0, full, key), MessageError, "padding"),
    ]:
        with pytest.raises(error, match=match):
            played.server.receive(bad)
    with pytest.raises(MessageError, match="keys take 125 bytes"):
        Round(terms).server.receive(wire.seal(Kind.KEYS, terms, 0, b"xy", bytes(32)))


def test_constructors_refuse_what_does_not_fit():
    terms, active = make_terms(), make_terms(active=True)
    played = Round(terms)
    with pytest.raises(ValueError, match="client 6 is not in the cohort"):
        played.client(6)
    with pytest.raises(ValueError, match="model_hash must be 32 bytes"):
        played.client(0, b"short")
    with pytest.raises(ValueError, match="identity and directory are needed against an active server"):
        type(played.clients[0])(0, active, MODEL)
    with pytest.raises(ValueError, match="directory is needed iff"):
        Server(active, MODEL)


def test_masked_inputs_look_uniform():
    """The same symbols in another round give masked symbols that agree no more often than chance.

    20,000 symbols modulo 128: matches are Binomial(20000, 1/128), mean 156; |z| < 5 fails with 6e-7.
    """
    layout = sum_layout(20_000, 0, 15, 6)
    packed = []
    for attempt in (0, 1):
        terms = replace(make_terms(layout=layout), attempt=attempt)
        inputs = dict.fromkeys(range(6), np.full(20_000, 7))
        played = Round(terms).run(inputs, until=Stage.MASK)
        message = played.answer(Stage.MASK, 0, inputs[0])
        packed.append(layout.unpack(message[HEAD : -wire.TAG_BYTES])[0])
    matches = int((packed[0] == packed[1]).sum())
    assert abs(matches - 20_000 / 128) < 5 * np.sqrt(20_000 / 128)
    counts = np.bincount(packed[0], minlength=128)
    assert counts.size == 128
    # Chi-square with 127 degrees of freedom exceeds 240 with probability 5e-9.
    assert ((counts - 156.25) ** 2 / 156.25).sum() < 240


def test_keys_come_from_the_entropy_only():
    """Golden digest: the same entropy gives the same bytes, so a change of the format shows here."""
    terms = make_terms()
    played = Round(terms).run(make_inputs(terms), until=Stage.MASK)
    message = played.answer(Stage.MASK, 0, make_inputs(terms)[0])
    assert hashlib.sha256(message).hexdigest()[:16] == "d83646bb69d41059"
    assert public_key() != seeded_entropy(77)(32)
