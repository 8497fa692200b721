"""Decoders of the wire refuse what no encoder writes, and nothing that a crash has left stays."""

import zlib

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict

from lightning_fedq.flower.records import from_record, to_record
from lightning_fedq.flower.round_inputs import RoundInputs
from lightning_fedq.flower.settings import RefusedError
from lightning_fedq.flower.store import Store
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.mechanisms.interface import HandOver
from lightning_fedq.rounds import Broadcast, RoundTask
from lightning_fedq.secagg import Client
from lightning_fedq.secagg.messages import Kind, PublicKeys
from lightning_fedq.wire.coding import FixedLength, UndecodableError
from lightning_fedq.wire.entropy_coding import Elias
from lightning_fedq.wire.range_coding import ConditionalRange
from tests.flower.halves import Halves
from tests.flower.loop import federated
from tests.flower.test_malformed import secured


@pytest.mark.parametrize("width", range(1, 9))
def test_padding_is_zeros(width):
    code = FixedLength(width)
    good = code.pack(torch.zeros(5, dtype=torch.int64))
    for bit in range(-5 * width % 8):
        with pytest.raises(UndecodableError, match="must be zeros"):
            code.unpack(good[:-1] + bytes([1 << bit]), 5)


def signed(body):
    return body + zlib.crc32(body).to_bytes(4, "little")


def test_a_range_code_is_what_its_symbols_pack_to():
    rng = np.random.default_rng(0)
    code = ConditionalRange(rng.random(64) - 0.5, np.full(64, 2.0**-14), (64,))
    symbols = torch.from_numpy(rng.integers(-20_000, 20_000, 64))
    good = code.pack(symbols)
    assert torch.equal(code.unpack(good, 64), symbols)
    body = good[:-4]
    # other words behind, the same symbols as if they did not fit, and with scales of an octave more
    further = code._body(symbols, [scale + 16 for scale in code._scales(symbols.numpy())])
    for bad in (body + bytes(4), b"\x01" + Elias(delta=True).pack(symbols), further):
        with pytest.raises(UndecodableError):
            code.unpack(signed(bad), 64)
    # one more or less on their grid is another machine's rounding
    for more in (-1, 1):
        near = code._body(symbols, [scale + more for scale in code._scales(symbols.numpy())])
        assert torch.equal(code.unpack(signed(near), 64), symbols)
    many = 1 << 18
    code = ConditionalRange(np.zeros(many), np.ones(many), (many,))
    huge = torch.zeros(many, dtype=torch.int64)
    huge[3] = 1 << 40  # too far from the others
    assert code.pack(huge)[:1] == b"\x01" and torch.equal(code.unpack(code.pack(huge), many), huge)


def test_a_model_that_is_sent_down_runs_from_end_to_end():
    code, weights = Broadcast(3), torch.tensor([0.0, 1.0, 7.0, 2.0, 2.0])
    good = code.pack(weights, (3, 2))
    assert torch.equal(code.unpack(good, (3, 2), torch.float32), weights)
    lines = np.frombuffer(good[:32], "<f8").copy()
    for place, value in ((0, np.nan), (1, -1.0), (1, np.inf), (1, 0.0), (3, 1.0)):
        bad = lines.copy()
        bad[place] = value
        with pytest.raises(ValueError, match="run from its smallest to its largest"):
            code.unpack(bad.tobytes() + good[32:], (3, 2), torch.float32)
    with pytest.raises(ValueError, match="must be zeros"):
        code.unpack(good[:-1] + bytes([good[-1] | 1]), (3, 2), torch.float32)


TASK = RoundTask(
    3, 0, ((0, 1), (2,)), (4,), *torch.ones(2, 1).double(), HandOver((2, 0), ((0, 5),), ((1, 6),))
)


@pytest.mark.parametrize(
    "old, new",
    [
        (b'"round": 3', b'"round": 3.0'),
        (b'"round": 3', b'"round":  3'),
        (b'"round": 3', b'"more": 0, "round": 3'),
        (b'"attempt": 0', b'"attempt": false'),
        (b'"cohort": 3', b'"cohort": -1'),
        (b'"since": [2, 0]', b'"since": ["2", 0]'),
    ],
)
def test_a_task_is_what_a_server_writes(old, new):
    data = TASK.to_bytes()
    assert RoundTask.from_bytes(data).to_bytes() == data
    head = data[8 : 8 + int.from_bytes(data[4:8], "big")]
    assert old in head
    changed = head.replace(old, new)
    with pytest.raises(ValueError, match="Not the task of a round"):
        RoundTask.from_bytes(data[:4] + len(changed).to_bytes(4, "big") + changed + data[8 + len(head) :])


LONG = bytes((1 << 20) + 1)


@pytest.mark.parametrize("record", [RecordDict(), RecordDict({"m": MetricRecord({"x": 1})})])
def test_records_are_as_they_are_written(record):
    assert from_record(to_record({"a": 1, "b": LONG})) == {"a": 1, "b": LONG}
    with pytest.raises(ValueError, match="Not a message of lightning_fedq"):
        from_record(record)


@pytest.mark.parametrize(
    "fields", [{"groups": "[1]"}, {"groups": '[["lr"]]'}, {"trained": "null"}, {"algorithm": b"123"}]
)
def test_what_a_server_says_beside_the_model(fields):
    assert RoundInputs.from_fields({"groups": '[[{"lr": 0.1}]]', "trained": '["a"]'}, {}).trained == ["a"]
    with pytest.raises(RefusedError, match="unreadable vectors or optimiser settings"):
        RoundInputs.from_fields(fields, {})


@pytest.mark.filterwarnings("ignore:client|node|unmask|round .* client:UserWarning")
def test_a_key_has_one_spelling(tmp_path, monkeypatch):
    """With its highest bit set a key is the same key, and passed for another one."""
    honest = Client.advertise

    def twice(self, invitation):
        found = honest(self, invitation)
        if self.client == 2:
            channel = self._keys.channel[:-1] + bytes([self._keys.channel[-1] | 128])
            self._keys = PublicKeys(channel, self._keys.mask, b"")
            found = self._answer(Kind.KEYS, self._model_hash[:16] + self._keys.encode())
        return found

    monkeypatch.setattr(Client, "advertise", twice)
    assert secured(tmp_path, False).round().num_received == 9


@pytest.mark.filterwarnings("ignore:client|node|unmask|round .* client:UserWarning")
def test_an_opened_share_is_an_element_or_none(tmp_path, monkeypatch):
    honest, said = Client.unmask, []

    def unmask(self, message):
        if self.client == 2:
            self._held = {owner: 2 * (b"\xff" * 15 + b"\xfe") for owner in self._held}
        return honest(self, message)

    monkeypatch.setattr(Client, "unmask", unmask)
    monkeypatch.setattr("lightning_fedq.flower.cohort.rank_zero_warn", said.append)
    assert secured(tmp_path, False).round().num_received == 10
    assert any("is no element" in words for words in said)


def test_a_client_and_a_server_tidy_their_folders_when_they_start(tmp_path):
    def left(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "round.json.new").write_text("secrets of a round")

    settings = federated(LDPQ(4.0), seed=None)
    Halves(settings, tmp_path, change=lambda played: left("client-1"))
    assert not list((tmp_path / "client-1").glob("*.new"))
    left("server")
    with Store(tmp_path / "server").lock():
        assert not list((tmp_path / "server").glob("*.new"))
