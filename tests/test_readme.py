"""Blocks of README and guides run as written, in fewer rounds, bash blocks line by line."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_fedq import RunFolder, mechanisms
from lightning_fedq.cli import main
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import Classifier, Linear
from tests.changed import changed

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


def test_readme_report_load_and_review_are_one_chain(folder, monkeypatch, capsys):
    """README's training, the guide that loads its model, the report and the reviewer's hash, in one folder.

    The guide built a ReLU network around weights of a tanh one: .811 in place of .908.
    """

    class Short(pl.Trainer):
        def __init__(self, **settings):
            super().__init__(**{**settings, "max_epochs": min(6, settings.get("max_epochs", 6))})

    monkeypatch.setattr(pl, "Trainer", Short)
    found: dict[str, Any] = {}
    first = dict(PYTHON)[CHAINED]
    exec(compile(first, "README.md", "exec"), found)
    ends_within_its_target(first, folder)
    [trained] = found["trainer"].test(found["model"], datamodule=found["data"], verbose=False)
    guide = (ROOT / "docs" / "guides" / "load_the_result.md").read_text()
    block = re.findall(r"^```py\n(.*?)^```", guide, re.M | re.S)[0]
    loaded: dict[str, Any] = {}
    block = changed(block, ("pl.Trainer(", "[loaded] = pl.Trainer("))
    exec(compile(block, "load_the_result.md", "exec"), loaded)
    assert loaded["loaded"]["test_acc"] == pytest.approx(trained["test_acc"], abs=1e-9)
    assert loaded["loaded"]["test_acc"] > 0.3
    capsys.readouterr()
    for command in ("report", "privacy"):
        assert main([command, "runs/first"]) == 0
    screen, page = capsys.readouterr().out, Path("runs/first/report.html").read_text()
    model = sha256(Path("runs/first/model.ckpt").read_bytes()).hexdigest()
    written = [Path("runs/first", name).read_text() for name in ("privacy.md", "report.md")]
    for text in (screen, page, *written):
        assert model in text and "as it was run" in text and "if an assumption fails" in text
        assert "What has to hold" in text and "responsible party" in text
    review = (ROOT / "docs" / "guides" / "report_a_guarantee.md").read_text()
    for title in re.findall(r'"(Who learns how much|Of which run|What has to hold)"', review):
        assert title in screen and title in page
    assert "sha256sum runs/NAME/model.ckpt" in review


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100 and len(text.split()) <= 1300


FEDERATED = [(place, text) for place, text in PYTHON if "Federated(" in text]


@pytest.mark.parametrize(("place", "text"), FEDERATED, ids=[place for place, _ in FEDERATED])
def test_what_a_newcomer_copies_protects_or_says_that_it_does_not(place, text):
    """`test_python_block` reads the epsilon of those that train."""
    epsilons = [float(number) for number in re.findall(r"PrivacyTarget\((?:epsilon=)?([\d.]+)", text)]
    if epsilons:
        assert max(epsilons) <= 8 and "adversary=" in text
    else:
        assert "without privacy" in text


LONG = (
    *("lora_and_heads.md, block 0", "add_to_your_training.md, block 0", "trackers.md, block 0"),
    *("statistics.md, block 0", "compare.md, block 0"),
)
"""200 to 1,000 clients behind masks, or 18 runs, 5 to 100 s; README's first block is of their kind."""
CHAINED = "README.md, block 0"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        pytest.param(place, text, marks=[pytest.mark.slow] * (place in LONG), id=place)
        for place, text in PYTHON
        if place != CHAINED
    ],
)
def test_python_block(place, text, folder, monkeypatch):
    """Guides call `model`, `data` and so on what is the reader's own; blocks of the README need nothing.

    Two rounds of each training are run. Those with a target end within it, towards the one they name.
    """

    whole = pl.Trainer.__init__

    @wraps(whole)  # `fedq compare` reads its settings
    def short(self, **settings):
        callbacks = list(settings.get("callbacks") or [])
        if not any(isinstance(one, RunFolder) for one in callbacks):
            callbacks.append(RunFolder())
        rounds = min(2, settings.get("max_epochs", 2))
        whole(self, **{**settings, "callbacks": callbacks, "max_epochs": rounds})

    monkeypatch.setattr(pl.Trainer, "__init__", short)
    digits = torch.utils.data.TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    yours = {
        "model": Classifier(Linear(in_features=64), lr=0.1),
        "data": DigitsDataModule(batch_size=16),
        "dataset_a": digits,
        "load_b": lambda: digits,
        "open_shard": lambda name: digits,
        "val_set": digits,
    }
    exec(compile(text, place, "exec"), yours)
    ends_within_its_target(text, folder)


def ends_within_its_target(text, folder):
    """A run of a block that names one."""
    targets = re.findall(r"PrivacyTarget\((?:epsilon=)?([\d.]+).*?adversary=\"(\w+)\"", text, re.S)
    pages = list(folder.glob("runs/*/privacy.json"))
    assert pages or not targets or ".fit(" not in text
    for page in pages if targets else ():
        [(epsilon, adversary)] = targets
        rows = {row["adversary"].lower(): row for row in json.loads(page.read_text())["rows"]}
        assert 0.9 * float(epsilon) < rows[adversary]["epsilon_run"] <= float(epsilon)


@pytest.mark.parametrize("block", BASH, ids=range(len(BASH)))
def test_bash_block(block, folder):
    """The first line in a shell; what follows, in this process, which has imported everything."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    first, *others = block.replace("max_epochs 3", "max_epochs 1").strip().splitlines()
    pipes = {"capture_output": True, "text": True, "timeout": 300}
    run = subprocess.run(first, shell=True, env={**os.environ, "PATH": path}, **pipes)
    assert run.returncode == 0, f"{first}\n{run.stdout[-1000:]}\n{run.stderr[-3000:]}"
    for line in others:
        program, *words = shlex.split(line, comments=True)
        assert program == "fedq" and main(words) == 0, line
