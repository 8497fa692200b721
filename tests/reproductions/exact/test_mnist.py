import os
from pathlib import Path

import pytest
import torch

from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import RoundContext
from reproductions.bench import ImageData
from reproductions.exact.mnist import ClippedFloats, _claims, exact_mnist

DATA = os.environ.get("FEDQ_DATA", "")


def test_clipped_floats_keep_short_updates_and_shorten_long_ones():
    one = torch.ones(1, dtype=torch.float64)
    context = RoundContext(0, ((0,), (1,)), (2,), 0 * one, one)
    rand = ClientRandomness(SeededKeys(0), [0, 1], 0)
    mechanism = ClippedFloats(5.0)
    update = torch.tensor([[3.0, -1.0], [30.0, 40.0]])
    symbols = mechanism.encode(update, context, rand).symbols
    rows = [mechanism.decode(row, [client], context, rand) for client, row in enumerate(symbols)]
    torch.testing.assert_close(torch.stack(rows).float(), torch.tensor([[3.0, -1.0], [3.0, 4.0]]))


def row(kind, seed, accuracy, bits):
    found = {"kind": kind, "seed": seed, "accuracy": accuracy, "epsilon": 7.5}
    return {**found, "bits_per_parameter": bits, "update_bits": bits}


def test_verdicts_can_fail():
    rows = [row(k, s, 0.9 + 0.001 * s, 32.0) for k in (0.0, 1.0) for s in (0, 1)]
    good = rows + [row(2.0, s, 0.9 + 0.001 * s, 12.0) for s in (0, 1)]
    bad = rows + [row(2.0, s, 0.8 + 0.001 * s, 40.0) for s in (0, 1)]
    assert [claim.held for claim in _claims(good, 8.0)] == [True, True, True]
    assert [claim.held for claim in _claims(bad, 7.0)] == [False, False, False]


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.skipif(not Path(DATA, "MNIST").is_dir(), reason="set FEDQ_DATA to a folder with MNIST/raw")
def test_quickly_with_real_masks(tmp_path):
    small = {"num_clients": 25, "rounds": 1, "samples": 200, "seeds": (0, 1)}
    result = exact_mnist(ImageData(DATA), **small, secagg="masked", out=str(tmp_path / "mnist"))
    bits = {row["kind"]: row["bits_per_parameter"] for row in result["rows"]}
    # floats cost exactly 32; masked sums carry the protocol's own messages too
    assert bits[0.0] == bits[1.0] == 32.0
    assert 7.0 < bits[2.0] < 32.0
    assert result["settings"]["secagg"] == "masked"


def test_one_seed_is_refused():
    with pytest.raises(ValueError, match=r"seeds needs two or more values .* got \[0\]"):
        exact_mnist(seeds=(0,))
