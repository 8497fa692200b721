from pathlib import Path

import pytest

from lightning_fedq.cli import main
from lightning_fedq.commands.configs import configs, expand, find, fragments

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_file_has_its_name():
    assert set(configs()) == {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert set(fragments()) == {path.stem for path in (ROOT / "callbacks").glob("*.yaml")}


def test_no_sentence_of_the_list_is_cut_off(capsys):
    assert main(["configs"]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(listed) > 50
    assert [line for line in listed if not line.endswith(".")] == []


def test_a_file_goes_before_a_name(tmp_path):
    assert find("digits_corbin") == ROOT / "configs" / "digits_corbin.yaml"
    (tmp_path / "digits_corbin").write_text("")
    assert find("digits_corbin") == Path("digits_corbin")


@pytest.mark.parametrize("wrong", ["digits_corbim", "configs/digits_corbin.yaml"])
def test_a_wrong_name_has_a_hint(wrong):
    with pytest.raises(ValueError, match=r"Did you mean 'digits_corbin'\? `fedq configs` lists the names"):
        find(wrong)
    with pytest.raises(ValueError, match=r"no fragment corbim.* Did you mean 'corbin'\?"):
        find("corbim", "fragment")


def test_names_become_files_in_order(tmp_path):
    (tmp_path / "mine.yaml").write_text("")
    corbin, plain = str(ROOT / "callbacks" / "corbin.yaml"), str(ROOT / "configs" / "digits_fedavg.yaml")
    assert expand(["fit", "mine.yaml", "--with", "corbin", "--trainer.max_epochs=3"]) == [
        *("fit", "--config", "mine.yaml", "--config", corbin, "--trainer.max_epochs=3")
    ]
    assert expand(["fit", "--with=corbin", "-c", "digits_fedavg", "--seed_everything", "1"]) == [
        *("fit", "--config", corbin, "--config", plain, "--seed_everything", "1")
    ]
    assert expand(["--config=digits_fedavg"]) == ["--config", plain]
    with pytest.raises(ValueError, match="--with needs the name or the path of a YAML file"):
        expand(["fit", "--with"])


def test_an_evaluation_begins_no_run_of_the_training_s_loggers(tmp_path):
    for name in ("config.yaml", "model.ckpt"):
        (tmp_path / name).write_text("")
    arguments = expand(["test", str(tmp_path), "--trainer.logger=CSVLogger"])
    assert arguments == [
        *("test", "--config", str(tmp_path / "config.yaml"), "--trainer.logger", "false"),
        *("--ckpt_path", str(tmp_path / "model.ckpt"), "--trainer.logger=CSVLogger"),
    ]


def test_lists_and_writes_out(tmp_path, capsys):
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in (*configs(), *fragments()))
    assert main(["configs", "digits_corbin"]) == 0
    text = (ROOT / "configs" / "digits_corbin.yaml").read_text()
    assert capsys.readouterr().out == text
    assert main(["configs", "digits_corbin", "--out", "mine.yaml"]) == 0
    assert Path("mine.yaml").read_text() == text
    capsys.readouterr()
    for arguments, message in (
        (["digits_ldpq", "--out", "mine.yaml"], "mine.yaml exists and is not overwritten"),
        (["digits_corbim"], "Did you mean 'digits_corbin'?"),
        (["--out", "other.yaml"], "needs the name of one file"),
    ):
        assert main(["configs", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == text
