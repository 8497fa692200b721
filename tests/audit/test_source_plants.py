"""Every planted fault of the specification's lists can still be planted, and fails the test that it names."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Plant(NamedTuple):
    """One fault: (clean, faulty) passages of a file of the library, and the test that fails with it."""

    name: str
    file: str
    change: tuple[tuple[str, str], ...]
    caught_by: str


def read(block):
    """A fault as `source_plants.txt` has it."""
    name, place, *lines = block.splitlines()
    file, _, caught_by = place.removeprefix("@ ").partition(" ")
    passages = []
    for line in lines:
        if not passages or passages[-1][0] != line[0]:
            passages.append((line[0], []))
        passages[-1][1].append(line[2:])
    texts = ["\n".join(found) for _, found in passages]
    return Plant(name, file, tuple(zip(texts[::2], texts[1::2], strict=True)), caught_by)


_, *BLOCKS = re.split(r"^= ", Path(__file__).with_name("source_plants.txt").read_text(), flags=re.M)
PLANTS = [read(block.partition("\n\n")[0]) for block in BLOCKS]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_every_fault_can_still_be_planted(plant):
    text = (ROOT / "lightning_fedq" / plant.file).read_text()
    assert [text.count(clean) for clean, _ in plant.change] == [1] * len(plant.change)
    for clean, faulty in plant.change:
        text = text.replace(clean, faulty)
    tree = ast.parse((ROOT / "lightning_fedq" / plant.file).read_text())
    assert ast.dump(ast.parse(text)) != ast.dump(tree)  # comments alone would change nothing
    file, _, name = plant.caught_by.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()


def outcome(folder, *tests):
    """Tests with the library of a folder, in an interpreter of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path):
    """A copy of the library and its tests."""
    for name in ("lightning_fedq", "tests", "pyproject.toml"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, tmp_path / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_every_planted_fault_is_caught(copy, plant):
    path = copy / "lightning_fedq" / plant.file
    text = path.read_text()
    for clean, faulty in plant.change:
        text = text.replace(clean, faulty)
    path.write_text(text)
    found = outcome(copy, f"tests/{plant.caught_by}")
    assert found.returncode == 1, found.stdout[-2000:]  # 1: tests ran and failed


@pytest.mark.slow
def test_the_clean_library_passes_the_same_tests(copy):
    found = outcome(copy, *sorted({f"tests/{plant.caught_by}" for plant in PLANTS}))
    assert found.returncode == 0, found.stdout[-2000:]
