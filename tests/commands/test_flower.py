import ast

from lightning_fedq.cli import main


def test_init_writes_an_app_that_parses(tmp_path, capsys):
    folder = tmp_path / "my-app"
    assert main(["flower", "init", str(folder), "--clients", "7", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "flwr run" in printed and "With few clients privacy.md will say vacuous" in printed
    for name in ("task", "client_app", "server_app"):
        ast.parse((folder / "my_app" / f"{name}.py").read_text())
    assert "CLIENTS = 7\nSEED = 3" in (folder / "my_app" / "task.py").read_text()
    assert 'serverapp = "my_app.server_app:app"' in (folder / "pyproject.toml").read_text()


def test_init_overwrites_nothing(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert main(["flower", "init", str(tmp_path)]) == 2
    assert "is not empty; take a new folder" in capsys.readouterr().err


def test_a_name_that_makes_no_package(tmp_path, capsys):
    assert main(["flower", "init", str(tmp_path / "2nd try")]) == 2
    assert "becomes a Python package" in capsys.readouterr().err
