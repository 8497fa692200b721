"""Blocks of README and guides run as written, bash blocks line by line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_fedq import mechanisms
from lightning_fedq.datasets import DigitsDataModule
from lightning_fedq.models import Classifier, Linear

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
BLOCKS = [
    (f"{page.name}, block {number}", language, text)
    for page in PAGES
    for number, (language, text) in enumerate(
        re.findall(r"^```(python|bash)\n(.*?)^```", page.read_text(), re.M | re.S)
    )
]
WHOLE = [ROOT / "docs" / "secagg.md", ROOT / "docs" / "scale.md"]
"""Further pages whose Python blocks need nothing that the page doesn't import."""
PYTHON = [(place, text) for place, language, text in BLOCKS if language == "python"]
PYTHON += [
    (f"{page.name}, block {number}", text)
    for page in WHOLE
    for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]
BASH = [text for _, language, text in BLOCKS if language == "bash"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the repository's own files in it; what a block writes stays here."""
    for name in ("callbacks", "configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_has_blocks_of_both_kinds():
    assert len(PYTHON) >= 5 and len(BASH[0].splitlines()) >= 2


@pytest.mark.parametrize("name", mechanisms.__all__)
def test_every_mechanism_has_a_row_and_its_runs(name):
    rows = re.findall(rf"^\| `{name}` .*\| (`.*`) \|$", (ROOT / "docs" / "mechanisms.md").read_text(), re.M)
    assert len(rows) == 1
    for config in re.findall("`(.*?)`", rows[0]):
        assert f"mechanisms.{name}" in (ROOT / "configs" / f"{config}.yaml").read_text()
        assert (ROOT / "callbacks" / f"{config.removeprefix('digits_')}.yaml").exists()


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90 and len(text.split()) <= 1300


@pytest.mark.parametrize(("place", "text"), PYTHON, ids=[place for place, _ in PYTHON])
def test_python_block(place, text, folder):
    """Guides call `model`, `data` and so on what is the reader's own; blocks of the README need nothing."""
    digits = torch.utils.data.TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    yours = {
        "model": Classifier(Linear(in_features=64), lr=0.1),
        "data": DigitsDataModule(batch_size=16),
        "dataset_a": digits,
        "load_b": lambda: digits,
        "val_set": digits,
    }
    exec(compile(text, place, "exec"), yours)


@pytest.mark.parametrize("block", BASH, ids=range(len(BASH)))
def test_bash_block(block, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in block.strip().splitlines():
        run = subprocess.run(
            line, shell=True, capture_output=True, text=True, timeout=300, env={**os.environ, "PATH": path}
        )
        assert run.returncode == 0, f"{line}\n{run.stdout[-1000:]}\n{run.stderr[-3000:]}"
