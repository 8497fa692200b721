"""Every cure that an error names is run. A new error with a cure needs a row, or the name of its test."""

import ast
import importlib
import types
import warnings
from pathlib import Path

import pytest
import torch

from tests.cures import elsewhere
from tests.cures.rows import ROWS, raised, says, sites

for path in sorted(Path(__file__).parent.glob("rows_*.py")):
    importlib.import_module(f"tests.cures.{path.stem}")
TESTS = Path(__file__).parents[1]


def trains(work):
    """Does this begin a fit or a command, or the tests' function that it calls?"""
    codes, seen = [(work.__code__, work.__globals__)], set()
    for code, names in codes:
        if {"fit", "main", "Popen"} & set(code.co_names):
            return True
        codes += [(inner, names) for inner in code.co_consts if isinstance(inner, types.CodeType)]
        called = [names[name] for name in code.co_names if isinstance(names.get(name), types.FunctionType)]
        for one in called:
            if one.__module__.startswith("tests.") and one not in seen:
                seen.add(one)
                codes.append((one.__code__, one.__globals__))
    return False


def cases():
    """All rows with their first cures. Others run beside these where they train nothing, else when slow.

    The trial of isolation runs in the row that is about it.
    """
    for row in ROWS:
        marks = [pytest.mark.tried] if row.words.startswith("Data of client {} changed") else []
        first, later = row.cures[:1], row.cures[1:]
        quick = [cure for cure in later if not trains(cure)]
        slow = [cure for cure in later if trains(cure)]
        yield pytest.param(row, [*first, *quick], id=row.words[:70], marks=marks)
        if slow:
            yield pytest.param(row, slow, id=f"{row.words[:70]}, others", marks=[*marks, pytest.mark.slow])


@pytest.mark.parametrize(("row", "cures"), list(cases()))
def test_cures(row, cures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(row.error, match=row.pattern):
                row.refused()
            for cure in cures:
                cure()
    finally:
        if torch.distributed.is_initialized():  # by a strategy that was refused
            torch.distributed.destroy_process_group()


def test_every_error_that_names_a_cure_has_a_row():
    known = [row.words for row in ROWS] + [*elsewhere.TESTED, *elsewhere.NOT_RUN]
    missing = [f"{where} {texts[-1]}" for where, texts in sites() if not any(says(texts, p) for p in known)]
    assert not missing, "\n".join(missing)


def test_every_row_is_an_error_of_the_package():
    found = [texts for _, texts in raised()]
    listed = [*(row.words for row in ROWS), *elsewhere.TESTED, *elsewhere.NOT_RUN]
    stale = [part for part in listed if not any(says(texts, part) for texts in found)]
    assert not stale, stale
    assert all(row.cures for row in ROWS)


def test_what_is_run_is_not_listed_as_not_run():
    run = [row.words for row in ROWS] + list(elsewhere.TESTED)
    unrun = [texts for _, texts in sites() if any(says(texts, part) for part in elsewhere.NOT_RUN)]
    both = [texts for texts in unrun if any(says(texts, part) for part in run)]
    assert not both, both


@pytest.mark.parametrize("where", sorted(set(elsewhere.TESTED.values())))
def test_the_tests_that_are_named_are_there(where):
    file, name = where.split("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
