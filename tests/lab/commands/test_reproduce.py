"""`fedq reproduce` finds experiments in a checkout and in installed packages, or says where they are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fedq.lab.commands import reproduce

ROOT = Path(__file__).parents[3]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder outside of any checkout, with the package as a wheel would have installed it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "PACKAGE", tmp_path / "site-packages" / "lightning_fedq")
    return tmp_path


def checkout(folder, experiments='{"toy": "one"}'):
    """A folder of experiments with one that prints its argument."""
    package = folder / "reproductions"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"EXPERIMENTS = {experiments}\n")
    (package / "one.py").write_text('def toy(number: int = 3):\n    """A toy."""\n    print("ran", number)\n')
    return folder


def fedq(*arguments, folder):
    command = [sys.executable, "-m", "lightning_fedq.cli", "reproduce", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_repository_around_an_editable_install_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert reproduce.main() == 0
    shown = capsys.readouterr().out
    assert "exact-fig10" in shown and "Exact-error paper, figure 10" in shown
    # the paper without an experiment: its commands are named, and that there is nothing to run again
    assert "no experiment" in shown and "fedq attack" in shown and "fedq tradeoff" in shown


def test_the_working_folder_is_found(elsewhere, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert reproduce.main("-h") == 0
    assert "cpa-table6" in capsys.readouterr().out


def test_without_a_checkout_one_sentence_says_where_they_are(elsewhere, capsys):
    assert reproduce.main() == 0
    assert reproduce.WHERE in capsys.readouterr().out
    with pytest.raises(ValueError, match=re.escape(reproduce.WHERE)):
        reproduce.main("corbin-exp7")


def test_a_folder_of_the_same_name_is_not_taken_for_the_project(elsewhere, capsys):
    checkout(elsewhere)
    assert reproduce.main() == 0
    assert "toy" not in capsys.readouterr().out


def test_a_path_is_run(tmp_path):
    checkout(tmp_path / "clone")
    listed = fedq("--path", "clone", folder=tmp_path)
    assert listed.returncode == 0 and "A toy." in listed.stdout
    ran = fedq("toy", "--number", "4", "--path=clone", folder=tmp_path)
    assert ran.returncode == 0 and "ran 4" in ran.stdout, ran.stderr
    assert "--number" in fedq("toy", "--path", "clone", "--help", folder=tmp_path).stdout


def test_a_path_without_experiments_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"no folder reproductions/ with an __init__.py in {tmp_path}"):
        reproduce.main("--path", str(tmp_path))


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """An installed package with an experiment of its own, and one that does not import."""
    folder = tmp_path / "packages"
    info = folder / "others_work-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others-work\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lightning_fedq.reproductions]\nothers-table = others_work:table\nothers-gone = others_work:gone\n"
        "corbin-exp8 = others_work:table\n"
    )
    (folder / "others_work.py").write_text("def table(number: int = 1):\n    print('theirs', number)\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_an_installed_package_brings_experiments(third_party, elsewhere, capsys):
    assert reproduce.main() == 0
    assert "others-table   others_work:table, from others-work" in capsys.readouterr().out
    assert reproduce.main("others-table", "--number", "7") == 0
    assert "theirs 7" in capsys.readouterr().out


def test_an_entry_point_that_does_not_import_is_named(third_party, elsewhere):
    words = r"others-gone \(others_work:gone, from others-work\) does not import: .*'gone'"
    with pytest.raises(ValueError, match=words):
        reproduce.main("others-gone")


def test_a_name_that_stands_twice_is_refused(third_party):
    with pytest.raises(ValueError, match="corbin-exp8 stands twice"):
        reproduce.main("corbin-exp8")
