import pytest
import yaml

from lightning_fedq.commands.plan import CANDIDATES, main

# Lightning's command line calls what jsonargparse has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

SMALL = ["--epsilon", "8", "--clients", "60", "--params", "100", "--rounds", "5"]


def test_the_table_has_a_row_for_everybody(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "against the server behind secure aggregation" in printed
    for name in CANDIDATES:
        assert name in printed
    assert "not possible: CPA: CPA is not homomorphic" in printed
    assert "no visible loss" in printed or "costs points" in printed


def test_a_configuration_says_the_sizes_and_gets_settings_to_paste(capsys, monkeypatch):
    monkeypatch.setattr(
        "lightning_fedq.commands.plan.CANDIDATES", {"RotatedCoins": CANDIDATES["RotatedCoins"]}
    )
    assert main(["digits_private", "--epsilon", "4"]) == 0
    printed = capsys.readouterr().out
    assert "479 clients, 650 parameters, 20 rounds" in printed
    settings = yaml.safe_load(printed[printed.index("mechanism:\n") :])
    assert settings["mechanism"]["class_path"] == "lightning_fedq.mechanisms.RotatedCoins"
    assert settings["mechanism"]["init_args"]["clip_norm"] == 2.0
    assert settings["privacy"] == {"epsilon": 4.0, "delta": 1e-05, "against": "secagg_server", "over": "run"}
    assert settings["secure_aggregation"] == {"run": "masked"}


def test_the_picture(tmp_path, monkeypatch):
    few = {name: CANDIDATES[name] for name in ("RotatedCoins", "GaussianNoise")}
    monkeypatch.setattr("lightning_fedq.commands.plan.CANDIDATES", few)
    assert main([*SMALL, "--picture", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--epsilon", "8", "--clients", "60"], "say how many: --params, --rounds"),
        ([*SMALL, "--against", "serverr"], "adversary must be one of"),
        ([*SMALL, "--delta", "0.5"], "delta must be"),
    ],
)
def test_what_is_missing_is_said(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
