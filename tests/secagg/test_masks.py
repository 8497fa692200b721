"""Shares from the pairs' keys: each wrong variant gives an input or a sum away, and the protocol does not.

The names W1, W2, ... are of a list of variants that are easily written by mistake. Those that change what a
message may say are in `test_malicious_server.py` and `test_faults.py`.
"""

from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from lightning_fedq.keys.randomness import SeededKeys, Stream, pack_fields
from lightning_fedq.secagg import (
    Client,
    SecAgg,
    SecAggError,
    Stage,
    client as clients_side,
    messages as wire,
    server as servers_side,
    shamir,
)
from lightning_fedq.secagg.graph import is_free
from lightning_fedq.secagg.layout import sum_layout
from lightning_fedq.secagg.messages import Kind, self_mask_key
from lightning_fedq.secagg.shamir import PRIME, element_bytes, interpolate, interpolate_values
from tests.secagg.play import Round, make_inputs, make_terms, total

HEAD, VICTIM = wire.FRAME_BYTES - wire.TAG_BYTES, 2


def opened(openings, owner, threshold):
    """A secret of one owner by what its holders opened, holder -> owner -> share; None without enough."""
    shares = {holder + 1: found[owner] for holder, found in openings.items() if owner in found}
    chosen = dict(sorted(shares.items())[:threshold])
    return element_bytes(interpolate(chosen)) if len(chosen) == threshold else None


def shares_in(played, holder, message):
    owners = sorted((*played.server._partners[holder], holder))
    return {owner: message[HEAD + 16 * i :][:16] for i, owner in enumerate(owners)}


def peeled(played, masked, seed, root):
    """The victim's symbols under its two secrets, as the server reads them."""
    layout, context = played.terms.layout, played.server._context
    values = layout.unpack(masked[HEAD : -wire.TAG_BYTES])
    layout.add_mask(values, self_mask_key(context, VICTIM, seed), subtract=True)
    secret = wire.mask_secret(played.terms, VICTIM, root)
    for other in played.server._partners[VICTIM]:
        public = played.server._roster[other].mask
        key = wire.mask_key(secret, public, context, (VICTIM, other), Stage.UNMASK, other)
        layout.add_mask(values, key, subtract=other > VICTIM)
    return layout.join(values, 1).tolist()


def answers(played, stage, inputs):
    found = {client: played.answer(stage, client, inputs[client]) for client in played.incoming}
    for message in found.values():
        played.server.receive(message)
    played.incoming = played.server.close()
    return found


@pytest.mark.parametrize("label", ["protocol", "no kind"])
def test_w3_a_survivors_seed_says_nothing_of_its_mask_key(label, monkeypatch):
    """Without the kind in the label the pads cancel: corrections give the polynomials' difference away."""
    if label == "no kind":
        wrong = lambda kind, owner, holder: pack_fields("share", owner, holder)  # noqa: E731
        monkeypatch.setattr(wire, "share_label", wrong)
    terms = make_terms()
    played, inputs = Round(terms), make_inputs(terms)
    answers(played, Stage.ADVERTISE, inputs)
    played.collect(Stage.SHARE)
    order, sent = played.server._order, dict(played.server._relayed[VICTIM])  # all of it goes by the server
    played.incoming = played.server.close()
    masked = answers(played, Stage.MASK, inputs)
    openings = {c: shares_in(played, c, m) for c, m in answers(played, Stage.UNMASK, inputs).items()}
    seed = opened(openings, VICTIM, terms.threshold)
    assert seed is not None
    here = order.index(VICTIM)
    corrected = {holder: raw for holder, raw in sent.items() if len(raw) > wire.CONFIRMATION_BYTES}
    difference = {
        holder + 1: 0
        for place, holder in enumerate(order)
        if holder != VICTIM and is_free(len(order), terms.degree, terms.threshold, place - here)
    }
    holder, raw = next(iter(corrected.items()))
    pair = [int.from_bytes(raw[i : i + 16], "big") for i in (0, 16)]
    difference[holder + 1] = (pair[0] - pair[1]) % PRIME
    assert len(difference) == terms.threshold
    root = (interpolate_values(difference, [0])[0] + int.from_bytes(seed, "big")) % PRIME
    found = peeled(played, masked[VICTIM], seed, element_bytes(root))
    assert (found == inputs[VICTIM].tolist()) == (label == "no kind")


@pytest.mark.parametrize("threshold", [3, 4])
def test_w7_half_of_the_holders_are_told_the_one_and_half_the_other(threshold):
    """With half of the holders as threshold both secrets open, and nobody is corrupt."""
    terms = make_terms(threshold=threshold, min_survivors=4)
    played, inputs = Round(terms), make_inputs(terms)
    for stage in (Stage.ADVERTISE, Stage.SHARE):
        answers(played, stage, inputs)
    masked = answers(played, Stage.MASK, inputs)
    told = {c: [*range(6)] if c in (0, 1, VICTIM) else [0, 1, 3, 4, 5] for c in range(6)}
    openings = {}
    for client, alive in told.items():
        body = wire.client_bits(alive, terms)
        forged = wire.seal(Kind.SURVIVORS, terms, client, body, played.server._channel_keys[client])
        openings[client] = shares_in(played, client, played.clients[client].unmask(forged))
    seed = opened({c: s for c, s in openings.items() if c in (0, 1, VICTIM)}, VICTIM, threshold)
    root = opened({c: s for c, s in openings.items() if c in (3, 4, 5)}, VICTIM, threshold)
    if threshold == 3:
        assert seed is not None and root is not None
        assert peeled(played, masked[VICTIM], seed, root) == inputs[VICTIM].tolist()
        with pytest.raises(ValueError, match="more than half of the 6 holders"):
            SecAgg(threshold=3).rules(6, 6)
    else:
        assert seed is None and root is None


@pytest.mark.parametrize("fresh", [True, False])
def test_w2_clients_set_back_to_the_same_attempt_mask_afresh(fresh):
    """With the entropy of before, the difference of two masked inputs is that of the inputs."""
    terms = make_terms(layout=sum_layout(40, 0, 1, 6))
    seen, used = [], []
    for bit in (0, 1):
        played = Round(terms)
        if fresh:
            played.clients = {c: Client(c, terms, client._model_hash) for c, client in played.clients.items()}
        inputs = {c: np.full(40, bit) for c in range(6)}
        for stage in (Stage.ADVERTISE, Stage.SHARE):
            answers(played, stage, inputs)
        message = played.answer(Stage.MASK, VICTIM, inputs[VICTIM])
        seen.append(terms.layout.unpack(message[HEAD : -wire.TAG_BYTES])[0].astype(int))
        used.append(terms.layout.blocks[0].modulus)
    assert np.all((seen[1] - seen[0]) % used[0] == 1) == (not fresh)


def test_w9_one_free_holder_too_many_loses_the_round_and_makes_no_wrong_sum(monkeypatch):
    def more(size, degree, threshold, step):
        return is_free(size, degree, threshold + 1, step)

    for side in (clients_side, servers_side):
        monkeypatch.setattr(side, "is_free", more)
    terms = make_terms()
    with pytest.raises(SecAggError, match="do not give back"):
        Round(terms).run(make_inputs(terms))


@pytest.mark.parametrize("covers", [True, False])
def test_w21_the_confirmation_covers_the_corrections(covers, monkeypatch):
    if not covers:
        right = wire.confirmation
        monkeypatch.setattr(
            wire, "confirmation", lambda key, owner, holder, _: right(key, owner, holder, b"")
        )
    terms = make_terms(7)
    played = Round(terms).run(make_inputs(terms), until=Stage.SHARE)
    played.collect(Stage.SHARE)
    owner, holder = next(
        (owner, holder)
        for owner, relayed in played.server._relayed.items()
        for holder, raw in relayed.items()
        if len(raw) > wire.CONFIRMATION_BYTES
    )
    raw = played.server._relayed[owner][holder]
    played.server._relayed[owner][holder] = bytes([raw[0] ^ 1]) + raw[1:]
    played.incoming = played.server.close()
    played.clients[holder].accept_shares(played.incoming[holder])
    assert played.clients[holder].unopened == ((owner,) if covers else ())


def test_w22_shares_are_elements_whatever_an_owner_sends(monkeypatch):
    """A correction above the field is one of the field; what is no element is never opened."""
    monkeypatch.setattr(clients_side, "element_bytes", lambda value: element_bytes(value + PRIME))
    terms = make_terms()
    played = Round(terms).run(make_inputs(terms), until=Stage.SHARE)
    message = played.answer(Stage.SHARE, VICTIM)
    monkeypatch.undo()
    played.server.receive(message)
    played.step(Stage.SHARE, clients=set(range(6)) - {VICTIM})
    for client in set(range(6)) - {VICTIM}:
        played.clients[client].accept_shares(played.incoming[client])
        pair = played.clients[client]._held.get(VICTIM, bytes(32))
        assert all(shamir.is_element(share) for share in (pair[:16], pair[16:]))


def test_w1_w8_nothing_is_used_twice(monkeypatch):
    """30 attempts of 5 clients: keys, secrets, shares and pads are all new; a pad has one meaning."""
    meanings = {}
    values = Counter[int]()

    def spy(self, kind, owner, holder):
        key = self._pair_keys[holder if owner == self.client else owner]
        label = wire.share_label(kind, owner, holder)
        if (key, label) not in meanings:
            values[shamir.free_element(key, label)] += 1
        meanings.setdefault((key, label), set()).add((kind, owner, holder))
        return shamir.free_element(key, label)

    monkeypatch.setattr(Client, "_computed", spy)
    secrets, publics = Counter[bytes](), Counter[bytes]()
    base = make_terms(5)
    inputs = make_inputs(base)
    for attempt in range(30):
        terms = replace(base, round=attempt // 10, attempt=attempt % 10)
        played = Round(terms)
        played.clients = {c: Client(c, terms, client._model_hash) for c, client in played.clients.items()}
        played.run(inputs, {3: Stage.MASK} if attempt % 2 else None, until=Stage.UNMASK)
        for client in played.clients.values():
            secrets.update([client._mask_root, client._seed])
            publics.update([client._keys.channel, client._keys.mask])
    assert all(len(meaning) == 1 for meaning in meanings.values())
    assert len(meanings) == 30 * 5 * 4 * 2 and set(values.values()) == {1}
    assert len(secrets) == len(publics) == 30 * 5 * 2 and set(secrets.values()) == set(publics.values()) == {
        1
    }
    assert not set(map(element_bytes, values)) & set(secrets)


@pytest.mark.parametrize("corrupt", list(combinations((1, 2, 3), 2)))
def test_fewer_than_threshold_shares_and_all_corrections_fit_every_secret(corrupt, monkeypatch):
    """Exact, in a field of 7 elements: threshold 3, holders 1 and 2 free, 3 corrected, two corrupt."""
    kept = (shamir._dual_weights, shamir._distances, shamir._near_inverses)
    monkeypatch.setattr(shamir, "PRIME", 7)
    monkeypatch.setattr(shamir, "_NEAR", 4)  # further ones are 0 in it
    for one in kept:
        one.cache_clear()
    seen = []
    for secret in range(7):
        views = Counter[tuple[int, ...]]()
        for pads in product(range(7), repeat=3):
            (value,) = interpolate_values({0: secret, 1: pads[0], 2: pads[1]}, [3])
            correction = (value - pads[2]) % 7
            views[(correction, *(pads[holder - 1] for holder in corrupt))] += 1
        seen.append(views)
    for one in kept:
        one.cache_clear()
    assert all(views == seen[0] for views in seen) and len(seen[0]) == 7**3


def test_corrections_look_uniform():
    """Two bits of 2,000 corrections of equal secrets. |z| < 5: 6e-7, twice."""
    terms, found = make_terms(30, 1), []
    for attempt in range(3):
        played = Round(replace(terms, attempt=attempt)).run(make_inputs(terms), until=Stage.SHARE)
        played.collect(Stage.SHARE)
        for relayed in played.server._relayed.values():
            for raw in relayed.values():
                found += [int.from_bytes(raw[i : i + 16], "big") for i in range(0, len(raw) - 4, 16)]
    assert len(found) == len(set(found)) > 2000 and max(found) < PRIME
    for bit in (0, 126):
        ones = sum(value >> bit & 1 for value in found)
        assert abs(ones - len(found) / 2) < 5 * (len(found) / 4) ** 0.5


@pytest.mark.parametrize("active", [False, True])
def test_w10_exact_sums_on_a_ring_whoever_is_missing_when(active):
    """Free holders are those of the whole ring, also where some of them never answered."""
    base = make_terms(14, active=active, degree=6, threshold=5, min_survivors=9)
    inputs, stream, sums = make_inputs(base), Stream(SeededKeys(9).public()), 0
    for attempt in range(8 if active else 30):
        terms = replace(base, attempt=attempt)
        played = Round(terms)
        gone = stream.permutation(14)[:2]
        when = dict(zip(gone, [played.stages[i] for i in stream.choice(len(played.stages), 2)], strict=True))
        try:
            played.run(inputs, when)
        except SecAggError:
            continue
        sums += 1
        assert np.array_equal(played.server.total, total(inputs, played.server.survivors))
    assert sums > (4 if active else 15)
