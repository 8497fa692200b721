"""Quick settings of the exact-error paper's figures; tables of the specification beside them."""

import json

import pytest

from reproductions.__main__ import main
from reproductions.exact.fig2 import exact_fig2
from reproductions.exact.fig4 import exact_fig4, theorem_2
from reproductions.exact.fig5 import closed_form, exact_fig5, paper_inputs, sampled_multiplier
from reproductions.exact.fig6 import exact_fig6, exact_fig8, exact_fig9
from reproductions.exact.fig10 import client_means, exact_fig10, run_chains
from tests.functional.exact_error.test_layered import ENTROPIES


def test_figure_2_has_the_specification_s_entropies(tmp_path):
    result = exact_fig2((1.0, 64.0, 2048.0), samples=20_000, out=str(tmp_path / "fig2"))
    table = {(r["laplace"], r["sigma"], r["interval"]): r for r in result["rows"]}
    for interval in (1.0, 64.0, 2048.0):
        gauss, laplace = table[0.0, 1.0, interval], table[1.0, 3.0, interval]
        found = [row[f"{kind}_entropy"] for row in (gauss, laplace) for kind in ("direct", "shifted")]
        assert found == pytest.approx(ENTROPIES[interval][:2] + ENTROPIES[interval][-2:], abs=1e-6)
    # all four claims hold; the measured lengths are within 0.03 of the entropies at a fixed seed
    assert all(claim["held"] for claim in result["claims"])


def test_figure_4_has_the_specification_s_bits(tmp_path):
    result = exact_fig4((64.0, 2048.0), (10, 100), samples=20_000, out=str(tmp_path / "fig4"))
    table = {(r["interval"], r["clients"]): r for r in result["rows"]}
    # section 5.10: bounds are exact; A is sampled, so what hangs on it has a Monte Carlo error below 0.05
    wanted = {
        (64.0, 10): (4.662, 4.287, 3.383, 2.6700, 2.9268, 6, 3.0145, 3.355),
        (64.0, 100): (4.319, 4.228, 2.955, 1.2760, 1.5117, 8, 1.3648, 2.088),
        (2048.0, 10): (8.948, 8.570, 7.831, 7.5504, 7.8166, 11, 7.9008, 8.353),
        (2048.0, 100): (7.051, 6.959, 6.208, 5.8978, 6.1634, 13, 5.9881, 6.092),
    }
    exact = ("aggregate_bound", "irwin_hall_bound", "individual_bound", "irwin_hall_entropy")
    for key, values in wanted.items():
        row = table[key]
        found = [row[name] for name in (*exact, "individual_entropy", "masked")]
        assert found == pytest.approx(values[:6], abs=6e-4)
        assert [row["aggregate_entropy"], row["aggregate_fixed"]] == pytest.approx(values[6:], abs=0.05)
        assert row["aggregate_measured"] == pytest.approx(row["aggregate_entropy"], abs=0.03)
    held = {claim["paper"][:60]: claim["held"] for claim in result["claims"]}
    assert not next(v for k, v in held.items() if k.startswith("t = 64: the aggregate Gaussian suits"))
    for n, bound in ((1, 1.9094282), (3, 1.242398), (1000, 0.024993742)):
        assert theorem_2(n) == pytest.approx(bound, abs=2e-6)


def test_sampled_multipliers_equal_the_specification_s():
    # section 11, by Renyi orders
    assert sampled_multiplier(1.0, 1e-5, 0.3, 100) == pytest.approx(12.2929, rel=2e-4)
    assert sampled_multiplier(1.0, 1e-5, 1.0, 100) == pytest.approx(40.4538, rel=2e-4)


def test_figure_5_quickly(tmp_path):
    inputs = paper_inputs(1000, 100, 0)
    # section 6.5: gamma 0.3, epsilon 1, SIGM 2.457e-3 for other inputs of the same law; the sum of squares of
    # 100,000 of them varies by less than 0.5%
    expected = closed_form(inputs, sampled_multiplier(1.0, 1e-5, 0.3, 100), 0.3, None)
    assert expected == pytest.approx(2.457e-3, rel=5e-3)
    result = exact_fig5((60,), 20, (1.0,), (0.5, 1.0), runs=2, out=str(tmp_path / "fig5"))
    # 4.5 standard errors for the measured error, so false alarm below 1e-4 (a chi-square of 40 is skewed)
    assert all(claim["held"] for claim in result["claims"][1:])
    assert all(row["csgm_closed"] > row["sigm_closed"] for row in result["rows"])


def test_figures_6_8_and_9_quickly(tmp_path):
    six = exact_fig6(60, (2.0,), (12, 16), runs=3, out=str(tmp_path / "fig6"))
    row = six["rows"][0]
    assert row["masked_bits"] > row["aggregate_bits"] + 4.0
    assert {claim["held"] for claim in six["claims"][:2]} == {True}
    # residues are uniform: the pairing of Elias gamma bits with secure aggregation never holds
    assert six["claims"][-1]["held"] is False
    eight = exact_fig8((20,), (4.0,), (14,), runs=2, out=str(tmp_path / "fig8"))
    assert eight["claims"][0]["held"]
    nine = exact_fig9((100,), (1.0,), out=str(tmp_path / "fig9"))
    # section 7.6, n = 100, epsilon 1
    found = nine["rows"][0]
    assert found["shifted_bits"] == pytest.approx(1.20, abs=0.03)
    assert found["shifted_fixed"] == pytest.approx(2.10, abs=0.01)
    assert found["aggregate_bits"] == pytest.approx(1.30, abs=0.1)


def test_figure_10_quickly(tmp_path):
    result = exact_fig10((4, 8), chains=2, steps=150, out=str(tmp_path / "fig10"))
    ratio = {(r["method"], r["bits"], r["centred"]): r["variance_ratio"] for r in result["rows"]}
    # section 9.3: without the control variate 4 bits give 7.46 (shifted) and 6.87 (rounding); the standard
    # error of a variance is 1.5% here, times 7
    assert ratio[2.0, 4, 0.0] == pytest.approx(7.46, rel=0.1)
    assert ratio[1.0, 4, 0.0] == pytest.approx(6.87, rel=0.1)
    assert ratio[2.0, 8, 0.0] == pytest.approx(1.0, abs=0.08)
    assert all(ratio[2.0, b, 1.0] == pytest.approx(1.0, abs=0.08) for b in (4, 8))
    beats = [claim for claim in result["claims"] if "beats" in claim["paper"]]
    assert not any(claim["held"] for claim in beats)


def test_more_variance_than_langevin_needs_is_seen():
    # 2 bits, no control variate: far too much noise, and the server cannot take it back
    variance, _ = run_chains("shifted", 2, False, client_means(0), 1, 60, 0)
    assert variance > 20.0 / 750.0


def test_the_command_runs_one(tmp_path):
    out = tmp_path / "run"
    options = ["--intervals", "[4.0]", "--sigmas", "[1.0]", "--samples", "1000", "--out", str(out)]
    assert main("exact-fig2", *options) == 0
    assert {path.name for path in out.iterdir()} == {"table.csv", "picture.png", "summary.json"}
    assert len(json.loads((out / "summary.json").read_text())["claims"]) == 5
    assert (out / "picture.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("experiment", [exact_fig2, exact_fig4])
def test_sample_counts_are_checked(experiment):
    with pytest.raises(ValueError, match=r"samples must be >= 100, got 1"):
        experiment(samples=1)


@pytest.mark.parametrize("experiment", [exact_fig5, exact_fig6, exact_fig8, exact_fig9])
def test_run_counts_are_checked(experiment):
    with pytest.raises(ValueError, match=r"runs must be >= 1, got 0"):
        experiment(runs=0)


def test_chains_are_checked():
    with pytest.raises(ValueError, match=r"chains must be >= 1 and steps >= 10, got 0 and 2000"):
        exact_fig10(chains=0)
