"""Every block of the README runs as written: Python blocks in this process, bash blocks line by line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fedq import mechanisms

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(python|bash)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
BASH = [text for language, text in BLOCKS if language == "bash"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the repository's own files in it; what a block writes stays here."""
    for name in ("callbacks", "configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_has_blocks_of_both_kinds():
    assert len(PYTHON) >= 2 and len(BASH) >= 2


@pytest.mark.parametrize("name", mechanisms.__all__)
def test_every_mechanism_has_a_row_and_its_runs(name):
    rows = re.findall(rf"^\| `{name}` .*\| (`.*`) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) == 1
    for config in re.findall("`(.*?)`", rows[0]):
        assert f"mechanisms.{name}" in (ROOT / "configs" / f"{config}.yaml").read_text()
        assert (ROOT / "callbacks" / f"{config.removeprefix('digits_')}.yaml").exists()


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_python_block(block, folder):
    run = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("block", BASH, ids=range(len(BASH)))
def test_bash_block(block, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in block.strip().splitlines():
        run = subprocess.run(
            line, shell=True, capture_output=True, text=True, timeout=300, env={**os.environ, "PATH": path}
        )
        assert run.returncode == 0, f"{line}\n{run.stdout[-1000:]}\n{run.stderr[-3000:]}"
