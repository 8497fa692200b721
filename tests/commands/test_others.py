"""Settings of Flower and Opacus: what their own code adds, and what that protects."""

import inspect
import json
import math

import pytest
from opacus.accountants import PRVAccountant

from lightning_fedq import cli
from lightning_fedq.commands.others import run_of_flower, run_of_opacus
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import GaussianLoss
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.verdict import NO_GUARANTEE


def main(words):
    return cli.main(["privacy", *words])


LOCAL = {"class": "LocalDpMod", "clipping_norm": 1.0, "sensitivity": 1e-4, "epsilon": 10, "delta": 1e-5}
CENTRAL = {
    "class": "DifferentialPrivacyServerSideFixedClipping",
    "noise_multiplier": 2.0,
    "clipping_norm": 0.5,
    "num_sampled_clients": 10,
    "num_rounds": 4,
}
ADAPTIVE = {
    "class": "DifferentialPrivacyClientSideAdaptiveClipping",
    "noise_multiplier": 1.0,
    "num_sampled_clients": 100,
    "num_rounds": 1,
}
BATCHES = {"noise_multiplier": 1.0, "sample_rate": 0.01, "epochs": 5}


def stated(settings, delta=1e-5):
    """Epsilons of the run, by adversary: of a round, of the run and between any two updates."""
    report = privacy_report(run_of_flower(settings), delta)
    return {
        Adversary[row.adversary]: (row.epsilon_round, row.epsilon_run, row.epsilon_any_two)
        for row in report.rows
    }


def test_a_public_project_s_local_epsilon_of_ten_is_two_hundred_million():
    """Noise of std 4.8448e-5 on updates of norm 1."""
    found = stated(LOCAL | {"num_rounds": 1})
    assert found.pop(Adversary.SECAGG_SERVER)[1] == math.inf  # there is none
    for _, against_zero, substituted in found.values():
        assert against_zero == pytest.approx(2.13e8, rel=0.01)
        assert substituted == pytest.approx(4 * 2.13e8, rel=0.01)


def test_an_honest_sensitivity_gives_about_the_stated_epsilon():
    found = stated(LOCAL | {"sensitivity": 1.0, "epsilon": 1.0, "num_rounds": 1})
    assert 0.7 < found[Adversary.SERVER][0] <= 1.0


def test_a_wrapper_promises_nothing_against_the_server():
    found = stated(CENTRAL)
    expected = [spent(GaussianLoss(z), 1e-5, rounds=rounds).epsilon for z, rounds in ((2, 1), (2, 4), (1, 4))]
    for who, epsilons in found.items():
        models = who in (Adversary.OUTSIDER, Adversary.CLIENT)
        assert list(epsilons) == pytest.approx(expected if models else [math.inf] * 3)
    server = privacy_report(run_of_flower(CENTRAL), 1e-5).row(Adversary.SERVER)
    assert server.reason == "the server adds the noise, to what it has seen without"


def test_a_client_with_half_of_the_examples_moves_the_mean_five_times_as_far():
    heavy = stated(CENTRAL | {"largest_weight": 0.5})[Adversary.OUTSIDER]
    assert heavy == pytest.approx(stated(CENTRAL | {"noise_multiplier": 0.4})[Adversary.OUTSIDER])


@pytest.mark.parametrize("which", ["Client", "Server"])
def test_adaptive_clipping_has_no_epsilon(which):
    """Updates are clipped to the old norm, and the noise is that of the new one."""
    kind = f"DifferentialPrivacy{which}SideAdaptiveClipping"
    report = privacy_report(run_of_flower(ADAPTIVE | {"class": kind, "clip_norm_lr": 0.2}), 1e-5)
    assert {row.verdict for row in report.rows} == {NO_GUARANTEE}
    assert "has no bound" in report.row(Adversary.OUTSIDER).reason


def test_a_delta_above_one_over_the_clients_is_refused():
    with pytest.raises(ValueError, match=r"below 0\.1 = 1 / 10 clients"):
        stated(CENTRAL, 0.2)


def test_flower_scales_the_noise_by_the_norm_that_it_has_just_changed():
    """Its own code, as installed: clip by the old norm, update the norm, add noise by the new one."""
    adaptive = pytest.importorskip(
        "flwr.serverapp.strategy.dp_adaptive_clipping", reason="Flower is an extra"
    )
    source = inspect.getsource(adaptive.DifferentialPrivacyServerSideAdaptiveClipping.aggregate_train)
    order = [source.index(call) for call in ("adaptive_clip_inputs", "_geometric_update", "_add_noise")]
    assert order == sorted(order)


def test_flower_s_own_code_adds_this_noise():
    flwr = pytest.importorskip("flwr.supercore.differential_privacy", reason="Flower is an extra")
    assert flwr.compute_stdv(2.0, 0.5, 10) == pytest.approx(0.1)
    spread, left = flwr.compute_adaptive_noise_params(1.0, 100, None)
    assert (spread, left) == pytest.approx((5.0, (1 - 1 / 100) ** -0.5))


def test_opacus_s_own_accountant_agrees():
    accountant = PRVAccountant()
    accountant.history = [(1.0, 0.01, 500)]
    run, samples = run_of_opacus(BATCHES, 1e-5)
    assert samples.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=0.03)
    assert {row.verdict for row in privacy_report(run, 1e-5).rows} == {NO_GUARANTEE}


def test_without_poisson_sampling_nothing_is_amplified():
    _, samples = run_of_opacus(BATCHES | {"poisson_sampling": False}, 1e-5)
    assert samples.epsilon == spent(GaussianLoss(0.5), 1e-5, rounds=5).epsilon
    assert "replaced by another" in samples.line


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, "class must be one of LocalDpMod"),
        (LOCAL, "the settings need num_rounds"),
        (LOCAL | {"num_rounds": 1, "clip": 1}, "clip, which is not known here"),
        (LOCAL | {"num_rounds": 1, "epsilon": 0}, "epsilon must be a number > 0, got 0"),
        (LOCAL | {"num_rounds": 1, "delta": "1e-5"}, "YAML takes 1.0e-5"),
        (LOCAL | {"num_rounds": 1.5}, "num_rounds must be an integer"),
        (LOCAL | {"num_rounds": 1, "delta": 2.0}, "delta must be < 1"),
        (CENTRAL | {"largest_weight": 0.01}, "largest_weight must be from"),
    ],
)
def test_flower_settings_that_say_nothing_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        run_of_flower(settings)


def test_opacus_settings_that_say_nothing_are_refused():
    for settings, words in (
        ({}, "need epochs, noise_multiplier, sample_rate, got none"),
        (BATCHES | {"sample_rate": 2.0}, "sample_rate must be <= 1"),
        (BATCHES | {"target_epsilon": 1.0}, "target_epsilon, which is not known"),
    ):
        with pytest.raises(ValueError, match=words):
            run_of_opacus(settings, 1e-5)


def test_the_command_prints_the_page(tmp_path, capsys):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(LOCAL | {"num_rounds": 30, "delta": 0.00001}))
    assert main(["--flower", str(path), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "privacy.md").read_text()
    assert (
        "noise of std 4.84e-05" in page and "| 2.14e+08 | 6.4e+09 from zero, 2.56e+10 between any two" in page
    )
    assert "noise of std 4.84e-05" in capsys.readouterr().out
    for arguments, words in (
        (["--flower", str(path), "--rounds", "3"], "go with --delta and --out only, not with rounds"),
        (["--opacus", str(path)], "the settings need"),
        (["--opacus", str(tmp_path / "none")], "No such file"),
        ([], "give a configuration"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
    path.write_text("[1]")
    assert main(["--flower", str(path)]) == 2
    assert "must hold a mapping" in capsys.readouterr().err
