import json

import numpy as np
import pytest

from lightning_fedq.mechanisms import LDPQ, CorBin
from reproductions.__main__ import main
from reproductions.corbin.exp8 import closed_surface, corbin_exp8, exact_spread, measured_surface

INPUTS = np.array([-0.45, 0.0, 0.3])


@pytest.mark.parametrize(
    ("mechanism", "bits"), [(CorBin(1.0, 3), 3), (CorBin(1.0, None), None), (LDPQ(1.0), 0)]
)
def test_measured_and_closed_surfaces_agree(mechanism, bits):
    # 27 points in all, each within 5 standard errors: false alarm below 27 * 5.8e-7 < 2e-5 where errors
    # are nearly normal, and the seed is fixed
    measured = measured_surface(mechanism, INPUTS, 500, seed=1)
    closed, spread = closed_surface(INPUTS, 1.0, bits), exact_spread(INPUTS, 1.0, bits, 500)
    assert (np.abs(measured - closed) <= 5 * spread + 1e-9).all()


def test_closed_surface_has_the_documented_values():
    # the specification's own test vectors: w = (0.3, -0.2), c = 0, r = 0.5, epsilon = 1
    for bits, value in ((0, 2.21134718842), (1, 0.831976706869), (5, 0.206395341374), (None, 0.206395341374)):
        surface = closed_surface(np.array([0.3, -0.2]), 1.0, bits)
        assert surface[0, 1] == pytest.approx(value, rel=1e-10)


def test_the_command_writes_settings_table_and_picture(tmp_path, capsys):
    out = tmp_path / "exp8"
    assert main("corbin-exp8", "--points", "3", "--samples", "50", "--epsilon", "2", "--out", str(out)) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["settings"]["epsilon"] == 2.0 and summary["settings"]["points"] == 3
    assert summary["CorBinQ"]["mean_closed_form"] < summary["LDPQ"]["mean_closed_form"]
    assert len((out / "surface.csv").read_text().splitlines()) == 1 + 2 * 9
    assert (out / "surface.png").read_bytes()[:4] == b"\x89PNG"
    assert "largest deviation in standard errors" in capsys.readouterr().out
    assert [line.split(":")[0] for line in summary["verdicts"]] == ["held"] * 3


def test_rare_coins_are_no_alarm(tmp_path, capsys):
    """Coins of chance 0.0067, 300 samples: an estimated standard error said 17.5 of them."""
    found = corbin_exp8(epsilon=5.0, points=11, samples=300, out=str(tmp_path / "exp8"))
    assert all(found[name]["largest_deviation_in_standard_errors"] < 6 for name in ("CorBinQ", "LDPQ"))
    assert "few rare coins are expected" in capsys.readouterr().out


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"points and samples must be >= 2, got 1 and 4000"):
        corbin_exp8(points=1)
