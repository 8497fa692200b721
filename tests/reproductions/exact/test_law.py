"""The Kolmogorov-Smirnov table: what it measures, and that it would notice."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

from lightning_fedq.mechanisms import AggregateGaussian, LayeredGaussian
from reproductions.bench import Claim
from reproductions.exact.claims import coded_bits, finish, pack_uniform, unpack_uniform
from reproductions.exact.law import (
    BLOCK,
    CASES,
    EDGE,
    Block,
    Case,
    block_errors,
    dependence,
    distance,
    exact_law,
)
from tests.one_round import decode, encode, make_context

EXACT = {
    "LayeredGaussian, direct": LayeredGaussian,
    "LayeredGaussian, shifted": lambda *args: LayeredGaussian(*args, layering="shifted"),
    "AggregateGaussian": AggregateGaussian,
}


@pytest.mark.parametrize("name", EXACT)
def test_a_block_errs_as_the_mechanism_itself(name):
    """Encode and decode of the same clients, streams and inputs."""
    n = 3
    mechanism = EXACT[name](1.0, (n / BLOCK) ** 0.5 / (2 * EDGE))
    context = make_context(mechanism, range(n), (BLOCK,), round=4)
    updates = torch.full((n, BLOCK), (1.0 - 1e-9) / BLOCK**0.5, dtype=torch.float64)
    message = encode(mechanism, updates, context)
    error = decode(mechanism, message.symbols, context.cohort, context).double() - updates.sum(0)
    spread = n * mechanism.sigma(context)
    found, _ = block_errors(CASES[name], n, 4, 0)
    assert np.abs(found[1] - error.numpy() / spread).max() < 1e-8  # the inputs


def test_distance_is_the_statistic():
    sample = np.random.default_rng(0).normal(size=3000)
    expected = stats.kstest(sample, "norm").statistic
    assert distance(sample.copy(), stats.norm.cdf) == pytest.approx(expected, abs=1e-15)


def test_dependence_is_noticed():
    # independent: p below 1e-3 is a false alarm of 1e-3; each kind of dependence is far beyond that
    rng = np.random.default_rng(1)
    inputs, errors = rng.uniform(-1, 1, 20_000), rng.normal(size=20_000)
    assert dependence(errors, inputs, 0.3) > 1e-3
    assert dependence(errors + 0.1 * inputs, inputs, 0.3) < 1e-6
    assert dependence(errors * (1.0 + 0.1 * inputs), inputs, 0.3) < 1e-6
    assert dependence(errors * (1.0 + 0.3 * ((inputs / 0.3) % 1.0)), inputs, 0.3) < 1e-6


def test_a_wrong_law_is_not_held(tmp_path, monkeypatch):
    """Noise that is 5% too small at 100,000 samples."""
    right = CASES["AggregateGaussian"]

    def weak(n, context, rand):
        block = right.make(n, context, rand)
        return Block(block.shares, block.spread * 1.05, block.common)

    monkeypatch.setitem(CASES, "AggregateGaussian", Case(weak, right.cdf))
    result = exact_law(100_000, (2,), ("AggregateGaussian",), out=str(tmp_path / "law"))
    assert [claim["held"] for claim in result["claims"]] == [False, True]


def test_every_mechanism_quickly(tmp_path):
    # false alarm 1e-3 for the whole table, whatever its size
    result = exact_law(20_000, (1, 3), out=str(tmp_path / "law"))
    assert [claim["held"] for claim in result["claims"][:2]] == [True, True]
    assert len(result["rows"]) == 3 * (2 * 6 + 2)
    table = (tmp_path / "law" / "table.md").read_text()
    assert all(name in table for name in CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ten_million_errors(name, tmp_path):
    # false alarm 1e-3 a mechanism
    result = exact_law(10_000_000, (1, 2, 3, 10, 50), (name,), out=str(tmp_path / "law"))
    assert all(claim["held"] for claim in result["claims"])


def test_refused(tmp_path):
    with pytest.raises(ValueError, match="samples must be a multiple of 10,000, got 15000"):
        exact_law(15_000, out=str(tmp_path / "law"))
    with pytest.raises(ValueError, match="there is no mechanism 'LDPQ'; known: LayeredGaussian, direct"):
        exact_law(10_000, mechanisms=("LDPQ",), out=str(tmp_path / "law"))


# ---- claims --------------------------------------------------------------------------------------------
RNG = np.random.default_rng(0)
DITHER = RNG.uniform(-0.5, 0.5, 4000)


@pytest.mark.parametrize("interval", [0.3, 7.0, 1e9])
def test_streams_decode_to_what_was_encoded(interval):
    step = np.exp(RNG.normal(0.0, 3.0, DITHER.size))
    symbols = np.floor(interval * RNG.uniform(size=DITHER.size) / step + DITHER + 0.5).astype(np.int64)
    words = pack_uniform(symbols, DITHER, step, interval)
    assert np.array_equal(unpack_uniform(words, DITHER, step, interval), symbols)


def test_length_of_a_known_case():
    # interval 4096 steps: log2(4096) + log2(e) / (2 * 4096) bits a symbol; the law of the length is nearly
    # a constant, so 0.01 covers 32-bit words and sampling many times over
    step = np.ones(DITHER.size)
    bits = coded_bits(4096.0 * RNG.uniform(size=DITHER.size), DITHER, step, 4096.0)
    assert bits == pytest.approx(12.0, abs=0.02)


def test_impossible_symbols_and_intervals_are_refused():
    with pytest.raises(ValueError, match=r"impossible for inputs in \(0, 7\)"):
        pack_uniform(np.full(DITHER.size, 9), DITHER, np.ones(DITHER.size), 7.0)
    with pytest.raises(ValueError, match=r"interval must be > 0 and finite, got 0"):
        coded_bits(DITHER, DITHER, np.ones(DITHER.size), 0.0)


def test_finish_writes_and_prints_verdicts(tmp_path, capsys):
    claims = [Claim("all is well", "1", True), Claim("none is", "2", False)]
    summary = finish(tmp_path, {"seed": 0}, [{"a": 1.0}], claims, Figure())
    assert [claim["held"] for claim in summary["claims"]] == [True, False]
    printed = capsys.readouterr().out
    assert "held: all is well; ours: 1" in printed and "NOT held: none is; ours: 2" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "picture.png", "summary.json"}
