import numpy as np
import pytest
from matplotlib.figure import Figure

from reproductions.bench import Claim
from reproductions.exact.claims import coded_bits, finish, pack_uniform, unpack_uniform

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
