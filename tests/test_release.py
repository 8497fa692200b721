"""Versions and dates of a release agree, and each kind of disagreement is found."""

import shutil
from pathlib import Path

import pytest

from tests.release import ROOT, find_version_errors

FILES = ("CITATION.cff", "README.md", "CHANGELOG.md", "lightning_fedq/__init__.py")


@pytest.fixture
def release(tmp_path):
    """Copies of the files that name the version."""
    (tmp_path / "lightning_fedq").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_all_files_name_one_version():
    assert find_version_errors(ROOT) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "error"),
    [
        ("CITATION.cff", "version: 0.3.0", "version: 0.2.9", "CITATION.cff does not have the version"),
        ("README.md", "Version 0.3", "Version 0.2", "README.md does not have the version"),
        ("CHANGELOG.md", "## 0.3.0 (", "## 0.3.1 (", "CHANGELOG.md does not begin with"),
        ("CITATION.cff", "date-released: 2026-11", "date-released: 2026-10", "different dates"),
        ("lightning_fedq/__init__.py", '"0.3.0"', '"0.3.0.dev0"', "is no release version"),
    ],
)
def test_a_file_with_another_version_is_found(release, name, old, new, error):
    path = Path(release / name)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert any(error in found for found in find_version_errors(release))
