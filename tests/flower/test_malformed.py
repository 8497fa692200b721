"""Clients that answer with anything at all: the server refuses it by name, and goes on without them."""

from functools import partial

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from lightning_fedq.flower.exchange import Exchange
from lightning_fedq.flower.records import to_record
from lightning_fedq.mechanisms import LDPQ, CorBin, FedAvg, JoPEQ
from lightning_fedq.secagg import Client, SecAgg
from lightning_fedq.secagg.messages import FRAME_BYTES, TAG_BYTES, Kind, seal
from tests.flower.halves import Halves, identities
from tests.flower.loop import LoopGrid, deploy, federated

pytestmark = pytest.mark.filterwarnings(
    "ignore:the message of|client|node|unmask|round .* client:UserWarning"
)
COIN = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)
JUNK = [None, "text", 7, 1 << 40, -1, 0.5, [1, 2], b"", b"junk"]


def answering(played, kind, field, value):
    """Let client 2 put something else into one field of its answers; None leaves the field out."""
    played.line.answered = lambda asked, client, fields: (
        fields
        if (asked, client) != (kind, 2)
        else {name: found for name, found in {**fields, field: value}.items() if found is not None}
    )


@pytest.mark.parametrize("value", JUNK)
def test_an_answer_of_another_kind(value, tmp_path):
    played = Halves(federated(COIN, seed=None), tmp_path)
    answering(played, "train", "answer", value)
    assert played.round().num_received == 3
    played.line.answered = None
    assert played.round().num_received == 4


@pytest.mark.parametrize("kind", ["train", "shares", "masked", "unmask"])
@pytest.mark.parametrize("value", JUNK)
def test_behind_secure_aggregation(kind, value, tmp_path):
    played = Halves(federated(COIN, seed=None, secure_aggregation=SecAgg()), tmp_path)
    answering(played, kind, "secagg", value)
    assert played.round().num_received == (4 if kind == "unmask" else 3)
    played.line.answered = None
    assert played.round().num_received == 4


def secured(folder, active, num_clients=10):
    """A federation behind secure aggregation: t = 6 of 10 against a curious server, 7 against a lying one."""
    settings = federated(COIN, seed=None, num_clients=num_clients, secure_aggregation=SecAgg(active=active))
    return Halves(settings, folder, identities(num_clients) if active else None)


@pytest.mark.parametrize(
    ("cheated", "active"), [(1, True), (2, False), (3, True), (4, False), (4, True), (5, False), (9, False)]
)
def test_shares_that_do_not_open(cheated, active, tmp_path, monkeypatch):
    """One client that seals junk for four of nine partners ended every round, or had the four shut out."""

    class Cheats(Client):
        def _make_shares(self):
            keys, junk = self._pair_keys, [c for c in range(10) if c != 2][:cheated]
            if self.client == 2:
                self._pair_keys = {**keys, **dict.fromkeys(junk, bytes(32))}
            made = super()._make_shares()
            self._pair_keys = keys
            return made

    monkeypatch.setattr("lightning_fedq.flower.masked_rounds.Client", Cheats)
    played = secured(tmp_path, active)
    enough = 10 - cheated >= (7 if active else 6)
    first = played.round()
    assert (first.num_received, bool(first.aborted)) == ((10, False) if enough else (0, True))
    assert played.roster.left_out == ({2} if cheated > 1 else set())  # the one might lie itself
    assert played.round().num_received == (9 if cheated > 1 else 10)


@pytest.mark.parametrize(("num_clients", "active"), [(5, False), (10, True)])
def test_a_commitment_that_is_not_of_the_seed(num_clients, active, tmp_path, monkeypatch):
    """Every round of every run was given up, and the client that the log named was asked again."""
    honest = Client._make_shares
    monkeypatch.setattr(
        Client,
        "_make_shares",
        lambda self: bytes(16) + honest(self)[16:] if self.client == 2 else honest(self),
    )
    played = secured(tmp_path, active, num_clients)
    assert "client 2] the shares of its self-mask do not give back" in played.round().aborted
    assert played.roster.left_out == {2}
    assert played.round().num_received == num_clients - 1


@pytest.mark.parametrize("liars, active", [((2,), False), ((0, 5), False), ((0, 4), False), ((2,), True)])
def test_wrong_shares_are_corrected(liars, active, tmp_path, monkeypatch):
    """Two of ten ended every round, and the log named the owner of a secret in their place."""
    honest = Client.unmask

    def unmask(self, message):
        if self.client in liars:
            self._held = {owner: 2 * (bytes(1) + bytes([owner + 1]) * 15) for owner in self._held}
        return honest(self, message)

    monkeypatch.setattr(Client, "unmask", unmask)
    played = secured(tmp_path, active)
    assert played.round().num_received == 10
    while played.roster.left_out != set(liars):  # one a round: what they say of each other is explained then
        before = len(played.roster.left_out)
        assert played.round().num_received == 10 - before
        assert before < len(played.roster.left_out) <= len(liars)
    assert played.round().num_received == 10 - len(liars)


def test_accusations_that_too_few_make(tmp_path):
    """One client says of others what it likes; it is the one that is left out."""
    played = secured(tmp_path, False, 4)
    for accused in (2, 7, -1, "text", None, True, [2], [7], ["text"], [0]):
        told = {"refused": "masked: no", "accused": accused}
        played.line.answered = lambda kind, client, fields, told=told: (
            told if (kind, client) == ("masked", 2) else fields
        )
        assert played.round().num_received == 3
        assert not played.roster.left_out
    told["accused"] = [1]
    assert played.round().num_received == 3
    assert played.roster.left_out == {2}


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field in ("partition", "key", "proof", "samples", "signature") for value in JUNK]
    + [("partition", 4), ("partition", 1 << 70), ("key", bytes(32)), ("samples", 0)],
)
def test_a_registration(seed, field, value, tmp_path):
    """The server waits for a fourth client and says which one is missing, or has no use for the field."""
    settings = federated(COIN, seed=seed)
    harmless = (
        field == "signature" or (field, value) == ("partition", -1) or (field in ("key", "proof") and seed)
    )
    if field == "samples":
        settings = federated(COIN, seed=seed, weighting="samples")
        harmless = value in (7, 1 << 40)
    change = partial(answering, kind="register", field=field, value=value)
    if harmless:
        assert len(Halves(settings, tmp_path, wait=0.0, change=change).roster.nodes) == 4
        return
    with pytest.raises(RuntimeError, match=r"4 clients are needed, but 3 have registered .* Missing clients"):
        Halves(settings, tmp_path, wait=0.0, change=change)


@pytest.mark.parametrize("samples", [1 << 40, (1 << 63) - 1])
def test_a_client_that_says_it_holds_more_samples_than_there_are(samples, tmp_path):
    """The server took a list of so many numbers, 8 TiB of memory, and died. It needs their count only."""

    def tamper(kind, client, reply):
        if (kind, client) == ("register", 2):
            reply.content.config_records["fedq"]["samples"] = samples
        return reply

    make = lambda: federated(FedAvg(), weighting="samples")  # noqa: E731
    server = deploy(make, 1, tmp_path, tamper, home=False)
    assert [record.num_received for record in server.records] == [4]
    assert [len(held) for held in server.client_indices] == [50, 50, samples, 50]


@pytest.mark.parametrize(
    "mechanism", [JoPEQ(epsilon_per_coordinate=1.0), LDPQ(epsilon_per_coordinate=1.0), CorBin(1.0, 5)]
)
def test_masked_symbols_that_no_client_can_have(mechanism, tmp_path, monkeypatch):
    """Masks hide whatever a client sends, and JoPEQ's decoder ended the server's process."""
    honest = Client.masked_input

    def lying(self, symbols):
        message = honest(self, symbols)
        if self.client != 2 or not lies:
            return message
        layout, header = self.terms.layout, FRAME_BYTES - TAG_BYTES
        masked = layout.unpack(message[header:-TAG_BYTES])
        for block, values in zip(layout.blocks, masked, strict=True):
            values[:] = block.reduce(values + np.arange(len(values), dtype=values.dtype))
        return seal(Kind.MASKED, self.terms, 2, layout.pack(masked), self._channel_key)

    monkeypatch.setattr(Client, "masked_input", lying)
    played = Halves(federated(mechanism, seed=5, secure_aggregation=SecAgg()), tmp_path)
    lies = True
    record = played.round()
    assert "A client has sent impossible symbols" in record.aborted and not played.server.weights.any()
    lies = False
    assert played.round().num_received == 4 and played.server.weights.any()


@pytest.mark.parametrize("answer", ["refused", "error", "names"])
def test_words_of_a_client_are_one_short_line_of_the_server_s_log(answer):
    """A client could write lines in another one's name into the log, or control a terminal that shows it."""
    words, warned = "no\nnode 3 refuses: train: declined\x1b[2J" + "!" * 10**6, list[str]()
    LoopGrid([], [])  # Flower's messages want to know who sends them
    asked = Message(RecordDict(), dst_node_id=2, message_type="train")
    content = to_record({"refused": words}) if answer == "refused" else Error(2, words)
    content = RecordDict({words: ConfigRecord()}) if answer == "names" else content
    Exchange(None, 1.0, warned.append)._read(2, Message(content, reply_to=asked))
    (line,) = warned
    assert line.startswith("Node 2") and line.isprintable() and len(line) < 3_000
