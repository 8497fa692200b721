import ast
import subprocess
from importlib import metadata

from lightning_fedq.cli import main


def test_init_writes_an_app_that_parses(tmp_path, capsys):
    folder = tmp_path / "my-app"
    assert main(["flower", "init", str(folder), "--clients", "7", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "flwr run" in printed and "With few clients, privacy.md will say vacuous" in printed
    for name in ("task", "client_app", "server_app"):
        ast.parse((folder / "my_app" / f"{name}.py").read_text())
    assert "CLIENTS = 7\nSEED = 3" in (folder / "my_app" / "task.py").read_text()
    assert 'serverapp = "my_app.server_app:app"' in (folder / "pyproject.toml").read_text()


def test_init_overwrites_nothing(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert main(["flower", "init", str(tmp_path)]) == 2
    assert "is not empty. Give a new folder" in capsys.readouterr().err


def test_a_name_that_makes_no_package(tmp_path, capsys):
    assert main(["flower", "init", str(tmp_path / "2nd try")]) == 2
    assert "must be a valid Python package name" in capsys.readouterr().err


def test_wheels_are_of_the_app_and_of_all_that_it_needs(tmp_path, monkeypatch, capsys):
    """The guide's first command found nothing: `pip install` without an index."""
    app, ran = tmp_path / "my_app", []

    def run(command, check):
        ran.append(command)
        (app / "wheels" / "one.whl").touch()
        return subprocess.CompletedProcess(command, len(ran) - 1)

    assert main(["flower", "init", str(app)]) == 0
    monkeypatch.setattr("lightning_fedq.commands.flower.subprocess.run", run)
    assert main(["flower", "wheels", str(app)]) == 0
    assert "1 wheels in" in capsys.readouterr().out
    (command,) = ran
    assert command[1:4] == ["-m", "pip", "wheel"] and command[-1] == str(app)
    assert command[-2].startswith("lightning-fedq[flower] ")
    versions = (app / "wheels" / "constraints.txt").read_text().splitlines()
    assert f"torch=={metadata.version('torch')}" in versions
    assert not [line for line in versions if line.startswith("lightning-fedq")]
    own = tmp_path / "own.txt"
    own.write_text("torch==2.6\n")
    assert main(["flower", "wheels", str(app), "--constraint", str(own)]) == 2
    assert "See its output above" in capsys.readouterr().err
    assert (app / "wheels" / "constraints.txt").read_text() == "torch==2.6\n"
    assert main(["flower", "wheels", str(tmp_path)]) == 2
    assert "has no pyproject.toml. Give the folder" in capsys.readouterr().err
