"""Scripts of a server that lies: each is refused with a typed error, and the client is out of the round.

The server owns its channel keys, so its tags are right; what it can't do is sign or open for clients.
"""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lightning_fedq.secagg import (
    AuthenticationError,
    LowOrderKeyError,
    MessageError,
    RosterError,
    SecAggError,
    Stage,
    StageError,
    TermsError,
    ThresholdError,
    messages as wire,
)
from lightning_fedq.secagg.graph import neighbours, ring_order
from lightning_fedq.secagg.layout import sum_layout
from lightning_fedq.secagg.messages import Kind, PublicKeys
from tests.secagg.play import Round, make_inputs, make_terms, seeded_entropy, total

# The seven encodings of points of low order on Curve25519 (RFC 7748, section 7; Bernstein's list).
LOW_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    (2**255 - 18).to_bytes(32, "little"),
]


def forge(played, client, kind, body):
    return wire.seal(kind, played.terms, client, body, played.server._channel_keys[client])


def roster(played, client, keys, digest=None):
    digest = digest or wire.roster_hash(played.terms, keys)
    body = wire.client_bits(keys, played.terms) + digest + b"".join(keys[c].encode() for c in sorted(keys))
    return forge(played, client, Kind.ROSTER, body)


def survivors(played, client, clients):
    return forge(played, client, Kind.SURVIVORS, wire.client_bits(clients, played.terms))


def fresh_keys(played, client, **changes):
    return replace(played.server._roster[client], **changes)


def public_key():
    return X25519PrivateKey.from_private_bytes(seeded_entropy(77)(32)).public_key().public_bytes_raw()


def until(stage, active=True):
    terms = make_terms(active=active)
    return Round(terms).run(make_inputs(terms), until=stage)


def out_of_the_round(played, client):
    """Whatever comes next, the client stays silent."""
    state, message = played.clients[client], played.incoming[client]
    for answer in (state.advertise, state.share_keys, state.accept_shares, state.confirm, state.unmask):
        with pytest.raises(StageError):
            answer(message)
    return True


def test_1_substituted_key():
    played = until(Stage.SHARE)
    keys = {**played.server._roster, 3: fresh_keys(played, 3, mask=public_key())}
    with pytest.raises(AuthenticationError, match=r"\[share keys, client 3\] the signature does not verify"):
        played.clients[0].share_keys(roster(played, 0, keys))
    assert out_of_the_round(played, 0)


def test_2_own_key_missing():
    played = until(Stage.SHARE)
    keys = {c: own for c, own in played.server._roster.items() if c != 0}
    with pytest.raises(RosterError, match="client 0\\] this client is missing"):
        played.clients[0].share_keys(roster(played, 0, keys))
    assert out_of_the_round(played, 0)


def test_3_own_key_changed():
    played = until(Stage.SHARE)
    keys = {**played.server._roster, 0: fresh_keys(played, 0, channel=public_key())}
    with pytest.raises(RosterError, match="another key for this client"):
        played.clients[0].share_keys(roster(played, 0, keys))


def test_4_same_key_for_two_clients():
    played = until(Stage.SHARE)
    keys = {**played.server._roster, 4: played.server._roster[2]}
    with pytest.raises(RosterError, match="clients 2 and 4 have a key in common"):
        played.clients[0].share_keys(roster(played, 0, keys))


def test_5_roster_below_the_threshold():
    played = until(Stage.SHARE)
    keys = {c: played.server._roster[c] for c in (0, 1, 2)}
    with pytest.raises(ThresholdError, match="5 clients are needed, 3 are left"):
        played.clients[0].share_keys(roster(played, 0, keys))


def test_6_roster_hash_of_other_keys():
    played = until(Stage.SHARE)
    with pytest.raises(RosterError, match="hash is not that of its keys"):
        played.clients[0].share_keys(roster(played, 0, played.server._roster, bytes(32)))


def test_7_different_rosters():
    """Client 0 is told that client 5 never came; then no two of them share a key with it."""
    played = until(Stage.SHARE)
    shorter = {c: own for c, own in played.server._roster.items() if c != 5}
    played.clients[0].share_keys(roster(played, 0, shorter))
    answers = {c: played.clients[c].share_keys(played.incoming[c]) for c in range(1, 6)}
    for client in range(1, 6):
        played.server.receive(answers[client])
    relayed = [played.server._relayed[owner][0] for owner in range(1, 5)]
    assert set(map(len, relayed)) == {4, 36}  # of the others' ring: some are free there, some are corrected
    # However it cuts them, for the ring that client 0 was shown.
    order, needed = played.clients[0]._order, []
    for owner in range(1, 5):
        free = played.clients[0]._is_free(order.index(0) - order.index(owner))
        needed.append((relayed[owner - 1][:-4] + bytes(32))[: 0 if free else 32] + relayed[owner - 1][-4:])
    body = wire.client_bits(range(5), played.terms) + b"".join(needed)
    with pytest.raises(AuthenticationError, match=r"\[masked input, client 1\] its shares do not open"):
        played.clients[0].accept_shares(forge(played, 0, Kind.DELIVERY, body))
    assert out_of_the_round(played, 0)


def test_8_shares_of_another_client():
    played = until(Stage.MASK)
    head = wire.FRAME_BYTES - wire.TAG_BYTES
    order, relayed = played.server._order, played.incoming[0][head + 1 : -wire.TAG_BYTES]
    pieces = []
    for owner in range(1, 6):
        size = 4 if played.clients[0]._is_free(order.index(0) - order.index(owner)) else 36
        pieces, relayed = [*pieces, relayed[:size]], relayed[size:]
    by_size = [[i for i, piece in enumerate(pieces) if len(piece) == size] for size in (4, 36)]
    for places in by_size:  # each gets that of the next client with as many bytes
        moved = [pieces[i] for i in (*places[1:], places[0])]
        for place, piece in zip(places, moved, strict=True):
            pieces[place] = piece
    body = wire.client_bits(range(6), played.terms) + b"".join(pieces)
    with pytest.raises(AuthenticationError, match="its shares do not open"):
        played.clients[0].accept_shares(forge(played, 0, Kind.DELIVERY, body))


def test_9_different_models():
    """A server that sends client 2 another model can't get its sum mixed with the others'."""
    terms = make_terms()
    played = Round(terms, models={2: bytes(32)})
    played.server._model_hash = bytes(32)
    played.server.receive(played.answer(Stage.ADVERTISE, 2))
    played.server._model_hash = bytes(range(32))
    played.step(Stage.ADVERTISE, clients=(0, 1, 3, 4, 5))
    played.step(Stage.SHARE)
    with pytest.raises(AuthenticationError, match=r"client 0\] its shares do not open, nor do those of 4"):
        played.clients[2].accept_shares(played.incoming[2])
    inputs = make_inputs(terms)
    for client in (0, 1, 3, 4, 5):  # they hold no share of client 2, whose masks nobody can take out again
        played.server.receive(played.answer(Stage.MASK, client, inputs[client]))
        assert played.clients[client].unopened == (2,)
    played.incoming = played.server.close()
    played.collect(Stage.UNMASK)
    with pytest.raises(ThresholdError, match=r"client 2\] 4 shares of its mask key are needed, 0 came"):
        played.server.close()


def test_10_survivors_without_this_client():
    played = until(Stage.CONFIRM)
    with pytest.raises(RosterError, match="this client is missing"):
        played.clients[0].confirm(survivors(played, 0, [1, 2, 3, 4, 5]))
    assert out_of_the_round(played, 0)


def test_11_too_few_survivors():
    played = until(Stage.CONFIRM)
    with pytest.raises(ThresholdError, match="5 clients are needed, 2 are left"):
        played.clients[0].confirm(survivors(played, 0, [0, 1]))


def test_12_survivor_that_never_shared():
    terms = make_terms(active=True)
    played = Round(terms).run(make_inputs(terms), {5: Stage.SHARE}, until=Stage.CONFIRM)
    with pytest.raises(RosterError, match=r"clients \[5\] were not in the stage before"):
        played.clients[0].confirm(survivors(played, 0, [0, 1, 2, 3, 4, 5]))


def test_13_two_lists_of_survivors():
    """The attack that the consistency stage is for: half of the clients hear that client 5 dropped out."""
    played = until(Stage.CONFIRM)
    lists = {c: list(range(6)) if c in (0, 1, 5) else list(range(5)) for c in range(6)}
    head = wire.FRAME_BYTES - wire.TAG_BYTES
    signatures = {
        c: played.clients[c].confirm(survivors(played, c, lists[c]))[head : -wire.TAG_BYTES] for c in range(6)
    }
    body = wire.client_bits(range(6), played.terms) + b"".join(signatures.values())
    with pytest.raises(AuthenticationError, match=r"\[unmask, client 2\] the signature does not verify"):
        played.clients[0].unmask(forge(played, 0, Kind.CONFIRMATIONS, body))
    # Leaving out the dissenters does not help either.
    body = wire.client_bits([0, 1, 5], played.terms) + b"".join(signatures[c] for c in (0, 1, 5))
    with pytest.raises(ThresholdError, match="5 clients are needed, 3 are left"):
        played.clients[1].unmask(forge(played, 1, Kind.CONFIRMATIONS, body))
    assert out_of_the_round(played, 0)
    assert out_of_the_round(played, 1)


def test_14_skipping_the_consistency_stage():
    played = until(Stage.CONFIRM)
    with pytest.raises(StageError, match="expects 'confirm' now, not 'unmask'"):
        played.clients[0].unmask(played.incoming[0])


@pytest.mark.parametrize("active", [False, True])
def test_15_asking_twice_for_the_other_share(active):
    """Client 1 survived; then the server claims that it did not, to get its key share as well."""
    terms = make_terms(active=active)
    inputs = make_inputs(terms)
    played = Round(terms).run(inputs, until=Stage.UNMASK)
    opened = played.clients[0].unmask(played.incoming[0])
    for message in (survivors(played, 0, [0, 2, 3, 4, 5]), played.incoming[0]):
        with pytest.raises(StageError, match="'nothing any more' now"):
            played.clients[0].unmask(message)
    # One share a neighbour and its own, and the sum comes out as usual.
    assert len(opened) == wire.FRAME_BYTES + 6 * 16
    played.collect(Stage.UNMASK, clients=range(1, 6))
    played.server.receive(opened)
    played.server.close()
    assert np.array_equal(played.server.total, total(inputs, range(6)))


def test_16_unmasking_before_masking():
    played = until(Stage.MASK, active=False)
    with pytest.raises(StageError, match="expects 'accept_shares' now, not 'unmask'"):
        played.clients[0].unmask(survivors(played, 0, list(range(6))))


def test_17_message_of_an_earlier_attempt():
    terms = make_terms()
    old = Round(terms).run(make_inputs(terms), until=Stage.SHARE)
    new = Round(replace(terms, attempt=1)).run(make_inputs(terms), until=Stage.SHARE)
    with pytest.raises(TermsError, match="another session, round, attempt"):
        new.clients[0].share_keys(old.incoming[0])


def test_18_same_session_id_twice():
    """The terms are those of an earlier round to the bit; its messages still fail, as all keys are fresh."""
    terms = make_terms()
    old = Round(terms).run(make_inputs(terms), until=Stage.SHARE)
    new = Round(terms)
    new.server = type(new.server)(terms, bytes(range(32)), entropy=seeded_entropy(5))
    new.incoming = {c: new.server.invitation(c) for c in terms.cohort}
    new.run(make_inputs(terms), until=Stage.SHARE)
    with pytest.raises(AuthenticationError, match="tag does not verify"):
        new.clients[0].share_keys(old.incoming[0])


def test_19_survivors_in_two_parts():
    """On the ring, two gaps wider than half the degree would show two partial sums."""
    terms = make_terms(10, degree=2, threshold=2, min_survivors=4)
    played = Round(terms).run(make_inputs(terms), until=Stage.UNMASK)
    order = played.server._order
    chosen = [order[place] for place in (0, 1, 2, 5, 6, 7)]
    with pytest.raises(ThresholdError, match="split into parts whose sums would show"):
        played.clients[order[0]].unmask(survivors(played, order[0], chosen))


def test_20_padding_bits_and_lengths():
    played = until(Stage.UNMASK, active=False)
    with pytest.raises(MessageError, match="bits beyond the cohort"):
        played.clients[0].unmask(forge(played, 0, Kind.SURVIVORS, b"\xff"))
    with pytest.raises(MessageError, match="3 bytes too many"):
        played.clients[1].unmask(forge(played, 1, Kind.SURVIVORS, b"\xfcxyz"))
    with pytest.raises(MessageError, match="ends early"):
        played.clients[2].unmask(forge(played, 2, Kind.SURVIVORS, b""))
    with pytest.raises(MessageError, match="for another client"):
        played.clients[3].unmask(played.incoming[4])


@pytest.mark.parametrize("point", LOW_ORDER)
@pytest.mark.parametrize("field", ["channel", "mask"])
def test_21_low_order_keys(point, field):
    played = until(Stage.SHARE, active=False)
    keys = {**played.server._roster, 3: fresh_keys(played, 3, **{field: point})}
    with pytest.raises(LowOrderKeyError, match="client 3\\] the public key has low order"):
        state = played.clients[0]
        answer = state.share_keys(roster(played, 0, keys))
        # A bad mask key shows when the first mask is made.
        assert answer and field == "mask"
        state._next, state._partners = "masked_input", state._neighbours
        state.masked_input(make_inputs(played.terms)[0])


@pytest.mark.parametrize("point", LOW_ORDER)
def test_22_low_order_key_of_the_server(point):
    played = Round(make_terms())
    with pytest.raises(LowOrderKeyError, match="low order"):
        played.clients[0].advertise(wire.seal(Kind.INVITATION, played.terms, 0, point, wire.NO_KEY))


def test_23_no_identity_in_the_directory():
    played = until(Stage.SHARE)
    played.clients[0]._directory = {c: key for c, key in played.directory.items() if c != 4}
    with pytest.raises(AuthenticationError, match="client 4\\] the directory holds no identity"):
        played.clients[0].share_keys(played.incoming[0])


def test_24_honest_clients_left_out_of_the_ring():
    """The order hangs on who is in it: leaving out whoever stands between brings no corrupt client near."""
    terms, degree, victim = make_terms(), 18, 7
    keys = {c: PublicKeys(seeded_entropy(c)(32), seeded_entropy(c + 1000)(32), b"") for c in range(1000)}
    corrupt = {c for c in keys if c % 10 == 0}
    order = ring_order(tuple(keys), wire.roster_hash(terms, keys))
    place, left_out = order.index(victim), set[int]()
    for step in (1, -1):
        near, at = 0, place
        while near < degree // 2:
            at = (at + step) % len(order)
            near += order[at] in corrupt
            left_out |= {order[at]} - corrupt
    left = {client: keys[client] for client in sorted(keys.keys() - left_out)}
    kept = tuple(client for client in order if client in left)  # as a ring would be that does not hang on it
    again = ring_order(tuple(left), wire.roster_hash(terms, left))
    both = [len(corrupt & set(neighbours(ring, degree, ring.index(victim)))) for ring in (kept, again)]
    assert both[0] == degree and both[1] <= degree // 2  # 2.2 are expected, keys are seeded


@pytest.mark.parametrize("changed", [{"session": b"another"}, {"layout": sum_layout(6, -3, 12, 6)}])
def test_25_a_second_ring_for_the_same_keys(changed):
    """Neither another model nor, for keys that are shown, another session or layout gives another ring."""
    plays = []
    for model in (bytes(32), bytes(31) + b"1"):
        terms = make_terms()
        played = Round(terms, dict.fromkeys(terms.cohort, model))
        played.server = type(played.server)(terms, model, entropy=seeded_entropy(10**6))
        played.incoming = {client: played.server.invitation(client) for client in terms.cohort}
        plays.append(played.run(make_inputs(terms), until=Stage.MASK))
    assert plays[0].clients[0]._order == plays[1].clients[0]._order
    played = until(Stage.SHARE, active=False)
    other = copy(played)
    other.terms = replace(played.terms, **changed)
    with pytest.raises(TermsError, match="another session, round, attempt"):
        played.clients[0].share_keys(roster(other, 0, played.server._roster))
    assert out_of_the_round(played, 0)


def test_too_few_holders_left():
    terms = make_terms(10, degree=4, threshold=4, min_survivors=4)
    played = Round(terms).run(make_inputs(terms), until=Stage.SHARE)
    near = sorted(played.server._neighbours[0])
    played.step(Stage.SHARE, clients=set(range(10)) - set(near[:2]))
    with pytest.raises(ThresholdError, match=r"client 0\] 4 holders are needed, 3 are left"):
        played.clients[0].accept_shares(played.incoming[0])


def test_every_error_is_typed_and_names_stage():
    error = SecAggError("reason", Stage.MASK, 3)
    assert (error.stage, error.client) == (Stage.MASK, 3)
    assert str(error) == "[masked input, client 3] reason"
    assert str(SecAggError("reason", Stage.MASK)) == "[masked input] reason"
