"""The conformance vectors are those of today's code, and enough to write a mechanism by."""

import json
import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from lightning_fedq import mechanisms as m
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.contract_suite import decode, encode, make_context
from tests.contract.test_mechanisms import ROWS
from tests.contract.vectors import COHORT, FOLDER, SEED, SEGMENTS, files, vector_of

FILES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
VECTORS = {vector["mechanism"]: vector for vectors in FILES.values() for vector in vectors}


def same(found, wanted):
    """Equal but for the last digits of floats."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(found, wanted, rel_tol=1e-4, abs_tol=1e-6)
    return found == wanted


def test_every_row_has_a_vector_and_every_vector_a_row():
    rows = {name: [repr(row) for row in group] for name, group in files(ROWS).items()}
    assert {name: [v["mechanism"] for v in vectors] for name, vectors in FILES.items()} == rows


@pytest.mark.parametrize("mechanism", ROWS, ids=repr)
def test_the_vectors_are_those_of_the_code(mechanism):
    """Where this fails on purpose: `python -m tests.contract.vectors`, and a line in CHANGELOG.md."""
    found, wanted = json.loads(json.dumps(vector_of(mechanism))), VECTORS[repr(mechanism)]
    assert [name for name in wanted if not same(found.get(name), wanted[name])] == []


@pytest.mark.parametrize("mechanism", ROWS, ids=repr)
def test_the_recorded_streams_are_the_ordinary_ones(mechanism):
    """Messages with ordinary randomness are the recorded ones; bitstreams unpack, and decode to the sum."""
    context, vector = make_context(mechanism, COHORT, SEGMENTS), VECTORS[repr(mechanism)]
    message = encode(mechanism, torch.tensor(vector["updates"]), context, seed=SEED)
    public, rows = PublicRandomness(SeededKeys(SEED), 0), []
    for client, stream in zip(context.cohort, vector["bitstreams"], strict=True):
        code = mechanism.message_code(client, context, public)
        rows.append(code.unpack(bytes.fromhex(stream), mechanism.num_symbols(context)).long())
    assert torch.equal(torch.stack(rows), message.symbols.long())
    assert message.symbols.long().tolist() == vector["symbols"]
    total = decode(mechanism, torch.stack(rows).to(message.symbols.dtype), context.cohort, context, SEED)
    assert same(total.double().tolist(), vector["decoded_sum"])


def test_qsgd_from_its_file_alone():
    """The whole encoder again from docs/conformance.md: AES, a uniform, a comparison."""
    vector = VECTORS[repr(m.QSGD(levels=4))]
    for client, update, symbols in zip(vector["cohort"], vector["updates"], vector["symbols"], strict=True):
        (key,) = (s["key"] for s in vector["streams"] if s["kind"] == "private" and s["who"] == str(client))
        cipher = Cipher(algorithms.AES256(bytes.fromhex(key)), modes.CTR(bytes(16))).encryptor()
        words = np.frombuffer(cipher.update(bytes(8 * len(update))), "<u8")
        uniforms = (words >> np.uint64(12)) * 2.0**-52 + 2.0**-53
        scale = np.array([symbols[0]], np.int32).view(np.float32)[0]
        units = np.abs(update) * (4 / float(scale))
        levels = (np.floor(units) + (uniforms < units - np.floor(units))) * np.sign(update)
        assert levels.tolist() == symbols[1:]
        assert 0 <= float(scale) - np.linalg.norm(update) <= 1e-6
