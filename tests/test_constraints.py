"""`constraints-oldest.txt` is what `pyproject.toml` promises at least."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
CHECKERS = {"ruff", "mypy"}  # not run with the oldest packages
BESIDE = {"transformers"}  # no requirement of ours, but the oldest peft needs an old one


def test_the_oldest_constraints_are_the_lower_bounds():
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    bounds = {
        requirement.name: Version(next(s.version for s in requirement.specifier if s.operator == ">="))
        for requirement in map(Requirement, lines)
        if requirement.specifier and requirement.name not in CHECKERS
    }
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints-oldest.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert {name: Version(version) for name, version in pins.items() if name not in BESIDE} == bounds
