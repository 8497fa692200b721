"""First lines of docstrings say what a thing is, as its users would search for it."""

import ast
import functools
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import lightning_fedq

PACKAGE = Path(__file__).parents[1] / "lightning_fedq"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.fixture(scope="module")
def first_lines():
    """First line of every docstring of the package, by place."""
    return {
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}": docstring.partition("\n")[0]
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node))
    }


def test_first_lines_name_the_thing(first_lines):
    assert len(first_lines) > 1000
    wrong = {place: line for place, line in first_lines.items() if line.split()[0] in ("What", "How")}
    assert not wrong


def test_first_lines_are_sentences_without_a_semicolon(first_lines):
    assert not {place: line for place, line in first_lines.items() if ";" in line}


def test_every_public_member_has_a_text_of_its_own_or_of_its_base():
    """In place of pointers to a base, which would hide from `help()` what is said there."""
    kinds = (property, classmethod, staticmethod, functools.cached_property)
    without, seen = [], 0
    for found in pkgutil.walk_packages(lightning_fedq.__path__, "lightning_fedq."):
        if found.name.startswith("lightning_fedq.flower") and importlib.util.find_spec("flwr") is None:
            continue  # an extra
        for owner in vars(importlib.import_module(found.name)).values():
            if not inspect.isclass(owner) or owner.__module__ != found.name or owner.__name__[0] == "_":
                continue
            for name, member in vars(owner).items():
                if name[0] != "_" and (inspect.isfunction(member) or isinstance(member, kinds)):
                    seen += 1
                    texts = [inspect.getdoc(vars(base)[name]) for base in owner.__mro__ if name in vars(base)]
                    if not any(texts) or re.match(r"See `[^`]*`", next(filter(None, texts))):
                        without.append(f"{found.name}.{owner.__name__}.{name}")
    assert seen > 1400
    assert not without


def test_an_argument_is_read_without_the_one_above_it():
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
