"""Versions and dates of a release agree, each kind of disagreement is found, and Python 3.10 is enough."""

import ast
import shutil
from pathlib import Path

import pytest

from tests.release import ROOT, find_version_errors

FILES = ("CITATION.cff", "README.md", "CHANGELOG.md", "lightning_fedq/__init__.py")


NEWER = {
    "asyncio": {"TaskGroup", "timeout"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "EnumType", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "inspect": {"getmembers_static"},
    "itertools": {"batched"},
    "math": {"cbrt", "exp2", "sumprod"},
    "operator": {"call"},
    "pathlib": {"UnsupportedOperation"},
    "tomllib": {"load", "loads"},
    "typing": {"LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack"}
    | {"assert_never", "assert_type", "dataclass_transform", "override", "reveal_type"},
}
"""Names of the standard library that Python 3.10, the oldest that the package supports, does not have."""


@pytest.fixture
def release(tmp_path):
    """Copies of the files that name the version."""
    (tmp_path / "lightning_fedq").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_package_imports_nothing_that_the_oldest_python_lacks():
    """`from datetime import UTC` stopped every import with 3.10, where no test ran."""
    found = []
    for path in (ROOT / "lightning_fedq").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 10))):
            if isinstance(node, ast.ImportFrom):
                found += [
                    (path, alias.name) for alias in node.names if alias.name in NEWER.get(node.module, ())
                ]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found += [(path, node.attr)] if node.attr in NEWER.get(node.value.id, ()) else []
    assert not found


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
