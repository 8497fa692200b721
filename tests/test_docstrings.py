"""First lines of docstrings say what a thing is, as its users would search for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_fedq"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.fixture(scope="module")
def first_lines() -> dict[str, str]:
    """First line of every docstring of the package, by place."""
    return {
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}": docstring.partition("\n")[0]
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node))
    }


def test_first_lines_name_the_thing(first_lines: dict[str, str]) -> None:
    assert len(first_lines) > 1000
    wrong = {place: line for place, line in first_lines.items() if line.split()[0] in ("What", "How")}
    assert not wrong


def test_first_lines_are_sentences_without_a_semicolon(first_lines: dict[str, str]) -> None:
    assert not {place: line for place, line in first_lines.items() if ";" in line}


def test_an_argument_is_read_without_the_one_above_it() -> None:
    """Its line names what it is, and does not go on from the argument's name or point elsewhere."""
    words = "Of|Whose|Whom|See|From|As|That|Theirs|(?:With|At|To|By) which|Has|Who|Which"
    leaning = re.compile(rf"^ {{4,}}(\w+): ({words})\b", re.M)
    wrong = [
        f"{path.relative_to(PACKAGE)}: {name}: {word} ..."
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, DOCUMENTED)
        for name, word in leaning.findall(ast.get_docstring(node) or "")
        if not name[0].isupper()  # an error says when it is raised
    ]
    assert not wrong
