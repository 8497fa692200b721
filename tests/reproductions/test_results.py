"""docs/papers.md says what its commands last wrote: figures and verdicts of rows that experiments judge.

The files in reproductions/results are written by `python -m reproductions`, and by nothing else. One whose
code has changed since is stale: run its command again (`--resume true` keeps finished trainings).
"""

import copy
import json
import re
from datetime import date

import pytest

import lightning_fedq
from reproductions.corbin.theorems import corbin_theorems
from reproductions.cpa.theorems import cpa_theorems
from reproductions.optimal.theorems import optimal_theorems
from reproductions.results import (
    PAGE,
    RESULTS,
    command,
    commands,
    counts,
    draw,
    file_of,
    record,
    rows,
    source,
    verdict,
)

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
NOT_SINCE = re.compile(r"not run since \d+ November 2026")
TEXT, ROWS = PAGE.read_text(encoding="utf-8"), rows()
FILES = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def results_of(row):
    """Results of the row's experiments, or None where one was not run since."""
    paths = [file_of(text) for text in commands(row[3])]
    return None if not paths or any(path not in FILES for path in paths) else [FILES[path] for path in paths]


JUDGED = {number: found for number, row in ROWS.items() if (found := results_of(row)) is not None}


def said(number, found):
    """Claims of a row."""
    return [claim for one in found for claim in one["claims"] if number in claim["rows"]]


def word(claims):
    """The verdict that claims add up to."""
    held = {claim["held"] for claim in claims}
    some = "in part" if True in held else "no" if False in held else "not settled"
    return "yes" if held == {True} else some


def numbers(value):
    """All numbers in texts."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in numbers(item)]
    return [float(text.replace(",", "")) for text in NUMBER.findall(value)] if isinstance(value, str) else []


def known(number, found):
    """Numbers that a row may say: those of its claims, and of lines that have none."""
    return numbers([[said(number, [one]), one["lines"]] for one in found])


def unknown(text, there):
    """Figures of a text that are no rounding of a number that is there."""
    wrong = []
    for figure in NUMBER.findall(NOT_SINCE.sub("", text)):
        places = len(figure.partition(".")[2]) if "e" not in figure else 9
        value, half = abs(float(figure.replace(",", ""))), 0.5000001 * 10.0**-places
        if not any(abs(abs(number) - value) <= half for number in there):
            wrong.append(figure)
    return wrong


def test_every_command_of_a_row_has_results_or_says_since_when_not():
    for number, row in ROWS.items():
        missing = [text for text in commands(row[3]) if file_of(text) not in FILES]
        if missing:
            says = verdict(row) == "not run" or NOT_SINCE.search(row[4] + row[6])
            assert says, f"row {number} names what was not run: {missing}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_are_of_this_code(path):
    found = FILES[path]
    text, name = found["command"], found["command"].split()[3]
    assert path == file_of(text), "a file is named by its command"
    assert text in commands(TEXT), f"no row names {text}; delete {path.name}"
    assert found["source"] == source(name), f"{path.name} is stale: run {text} again"
    assert found["version"].split(".")[:2] == lightning_fedq.__version__.split(".")[:2], "of another release"
    assert date.fromisoformat(found["date"]) >= date(2026, 11, 28) and found["claims"]


@pytest.mark.parametrize("number", JUDGED)
def test_a_row_has_the_verdict_of_its_commands(number):
    claims = said(number, JUDGED[number])
    assert claims, f"no claim of {ROWS[number][3]} is of row {number}"
    assert verdict(ROWS[number]) == word(claims), [(claim["paper"], claim["held"]) for claim in claims]


@pytest.mark.parametrize("number", JUDGED)
def test_a_row_has_the_figures_of_its_commands(number):
    wrong = unknown(ROWS[number][4], known(number, JUDGED[number]))
    assert not wrong, f"row {number} says {wrong}, which its commands did not write"


def test_changed_figures_and_verdicts_are_found():
    """What the tests above are worth: four of five changed last digits, and every verdict."""
    changed, noticed = 0, 0
    for number, found in JUDGED.items():
        there = known(number, found)
        for figure in re.findall(r"(?<![\w.])\d+\.\d+", ROWS[number][4]):
            changed += 1
            noticed += bool(unknown(f"{figure[:-1]}{(int(figure[-1]) + 4) % 10}", there))
        claims = copy.deepcopy(said(number, found))
        before = word(claims)
        claims[0]["held"] = claims[0]["held"] is not True
        if len(claims) == 1:
            assert word(claims) != before
    assert changed > 150 and noticed >= 0.8 * changed, (noticed, changed)


@pytest.mark.parametrize("experiment", [corbin_theorems, cpa_theorems, optimal_theorems])
def test_fast_commands_still_say_so(experiment, tmp_path):
    """A change of the library that moves a figure is found at once here."""
    written = FILES[file_of(command(experiment.__name__.replace("_", "-"), []))]["claims"]
    claims = [{**claim, "rows": tuple(claim["rows"])} for claim in written]
    assert experiment(out=str(tmp_path / "run"))["claims"] == claims


def test_a_file_is_written_for_the_commands_of_rows_only(tmp_path, monkeypatch):
    from reproductions import results

    page = tmp_path / "papers.md"
    page.write_text("| 1 | `python -m reproductions cpa-fig8 --learning_rates '[1.0]'` |")
    monkeypatch.setattr(results, "PAGE", page)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    claim = {"paper": "p", "ours": "o 2.5", "held": True, "rows": (7,), "where": "w"}
    table = [{"acc": 86.43211, "cpu_seconds": 3.0, "val_by_round": "1 2"}]
    summary = {"claims": [claim], "verdicts": ["w: held: p; ours: o 2.5", "more"], "table": table}
    record("cpa-fig8", ["--rounds", "2"], summary)
    assert not list(tmp_path.glob("*.json"))
    record("cpa-fig8", ["--out", "x", "--learning_rates=[1.0]", "--data.root", "y"], summary)
    found = json.loads((tmp_path / "cpa-fig8-learning_rates-1.0.json").read_text())
    assert found["command"] == "python -m reproductions cpa-fig8 --learning_rates [1.0]"
    assert found["claims"] == [{**claim, "rows": [7]}] and found["lines"] == ["more"]
    assert found["table"] == [["acc"], [86.432]] and found["source"] == source("cpa-fig8")


def test_a_hash_sees_code_and_no_words(tmp_path, monkeypatch):
    from reproductions import results

    before = {name: source(name) for name in ("cpa-fig8", "cpa-fig6", "corbin-exp8")}
    for name in ("cpa/fig8.py", "cpa/runs.py", "corbin/exp8.py"):
        for path in [*results.HERE.glob("*/*.py")]:
            copied = tmp_path / path.relative_to(results.HERE)
            copied.parent.mkdir(exist_ok=True)
            copied.write_text(path.read_text())
        monkeypatch.setattr(results, "HERE", tmp_path)
        file = tmp_path / name
        file.write_text(file.read_text().replace('"""', '"""Other words. ', 1) + "\n# a remark\n")
        assert {one: source(one) for one in before} == before
        file.write_text(file.read_text() + "\nMORE = 1\n")
        changed = {one for one in before if source(one) != before[one]}
        wanted = {"cpa/fig8.py": {"cpa-fig8"}, "cpa/runs.py": {"cpa-fig8", "cpa-fig6"}}
        assert changed == wanted.get(name, {"corbin-exp8"})
        monkeypatch.undo()


def test_a_seed_draws_five_rows_with_commands(capsys):
    from reproductions.__main__ import main

    drawn = draw("a commit")
    assert drawn == draw("a commit") != draw("another") and len(drawn) == 5
    assert all(found and f"`{found[0]}`" in ROWS[number][3] for number, found in drawn)
    assert main("draw", "a commit") == 0
    said = capsys.readouterr().out
    assert f"row {drawn[0][0]}: " in said and f"{len(ROWS)} rows: {counts()}" in said


def test_the_page_says_how_many_rows_have_which_verdict():
    assert sum(map(int, re.findall(r"\d+", counts()))) == len(ROWS)
    assert f"{len(ROWS)} rows" in TEXT and counts() in " ".join(TEXT.split())
