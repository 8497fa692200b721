"""What the commands of docs/papers.md last printed: a file a command in `results/`, which a test reads.

`python -m reproductions` writes the file whenever it has run a command that a row of the page names. Where
the images are, where the run went and whether it was taken up again (`--data`, `--out`, `--resume`) are no
part of a command. A file holds the date, the version, every claim with its verdict and the rows that it
judges, other lines, the table, and `source`: a hash of the code of the experiment's module and of the modules
of its paper that it imports, without docstrings and comments. Where that code has changed since, the file is
stale; so it is after a release with another minor version.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning_fedq
from lightning_fedq.reports.runs import write_atomically
from reproductions import EXPERIMENTS

HERE = Path(__file__).parent
VERDICTS = ("yes", "in part", "no", "not settled", "not run", "nothing to run")
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "papers.md"
_NO_PART = ("--data", "--out", "--resume")
_NOT_KEPT = ("_by_round", "seconds", "seconds_a_round")


def command(name: str, options: Sequence[str]) -> str:
    """A command as a row of the page has it, one space between words.

    Example:
        >>> command("cpa-fig8", ["--data.root", "images", "--learning_rates", "[1.0]", "--out=runs/x"])
        'python -m reproductions cpa-fig8 --learning_rates [1.0]'
    """
    kept, words = list[str](), iter(options)
    for word in words:
        if word.partition("=")[0].partition(".")[0] in _NO_PART:
            if "=" not in word:
                next(words, None)
            continue
        kept += word.split("=", 1) if word.startswith("--") else [word]
    return " ".join(["python -m reproductions", name, *kept])


def commands(page: str) -> list[str]:
    """Commands of experiments in a text, each once."""
    found = (shlex.split(text) for text in re.findall(r"`python -m reproductions ([^`]+)`", page))
    return list(dict.fromkeys(command(words[0], words[1:]) for words in found))


def rows() -> dict[int, list[str]]:
    """Rows of the page by their number, each its seven cells."""
    found = re.findall(r"^\| (\d+) (\|.*)", PAGE.read_text(encoding="utf-8"), re.M)
    return {int(number): [number, *map(str.strip, cells.strip("|").split("|"))] for number, cells in found}


def verdict(cells: Sequence[str]) -> str:
    """Which of `VERDICTS` a row begins its last cell with.

    Raises:
        ValueError: If it is none.
    """
    for word in VERDICTS:
        if re.match(rf"{word}\b", cells[6]):
            return word
    raise ValueError(f"row {cells[0]} says {cells[6]!r}; a verdict is one of {', '.join(VERDICTS)}")


def counts() -> str:
    """How many rows of the page have which verdict, in words."""
    found = Counter(map(verdict, rows().values()))
    return ", ".join(f"{found[word]} {word}" for word in VERDICTS)


def draw(seed: str, count: int = 5) -> list[tuple[int, list[str]]]:
    """Rows of the page and their commands, drawn by a seed; rows without a command are left out.

    Args:
        seed: Any text, such as the hash of a commit.
        count: Rows.
    """
    named = r"`((?:fedq|pytest|python -m) [^`]+)`"
    found = {number: texts for number, cells in rows().items() if (texts := re.findall(named, cells[3]))}
    order = sorted(found, key=lambda number: hashlib.sha256(f"{seed} {number}".encode()).digest())
    return [(number, found[number]) for number in sorted(order[:count])]


def file_of(text: str) -> Path:
    """Where the results of a command are kept."""
    return RESULTS / (
        re.sub(r"[^\w.]+", "-", text.removeprefix("python -m reproductions ")).strip("-") + ".json"
    )


def source(name: str) -> str:
    """Hash of an experiment's code: its module, and those of its paper that it imports."""
    waiting, seen = [EXPERIMENTS[name]], dict[str, str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        tree = ast.parse(HERE.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
        imports = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        waiting += [m.removeprefix("reproductions.") for m in imports if re.match(r"reproductions\.\w+\.", m)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                node.body[:1] = [ast.Pass()]
        seen[module] = ast.dump(tree)
    return hashlib.sha256("\n".join(seen[module] for module in sorted(seen)).encode()).hexdigest()[:16]


def record(name: str, options: Sequence[str], summary: Mapping[str, Any] | None) -> None:
    """Write the results of a command that a row of the page names; of others nothing.

    Args:
        name: Of the experiment.
        options: As they were given.
        summary: What the experiment returned.
    """
    from reproductions.bench import Claim  # imports torch, and only needed here

    text = command(name, options)
    if summary is None or not PAGE.is_file() or text not in commands(PAGE.read_text(encoding="utf-8")):
        return
    head = {
        "command": text,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "version": lightning_fedq.__version__,
        "source": source(name),
        "settings": summary.get("settings", {}),
    }
    claims = summary.get("claims", [])
    said = {Claim(**claim).line for claim in claims}
    lines = [line for line in summary.get("verdicts", []) if line not in said]
    table = summary.get("table", summary.get("rows", []))
    parts = [f'"{key}": {json.dumps(_short(value))}' for key, value in head.items()]
    parts += [_listed("claims", claims), _listed("lines", lines), _listed("table", _columns(table))]
    body = textwrap.indent(",\n".join(parts), "  ")
    write_atomically(file_of(text), "{\n" + body + "\n}\n")


def _listed(key: str, values: Sequence[Any]) -> str:
    """A list of JSON, a line an entry."""
    rows = ",\n".join("  " + json.dumps(_short(value)) for value in values)
    return f'"{key}": [\n{rows}\n]' if values else f'"{key}": []'


def _columns(table: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Names of the columns, then the rows; without curves and times."""
    names = [name for name in (table[0] if table else ()) if not name.endswith(_NOT_KEPT)]
    return [names, *([row.get(name) for name in names] for row in table)] if names else []


def _short(value: Any) -> Any:
    """Floats with five figures; what JSON lacks as words."""
    if isinstance(value, float):
        short = float(f"{value:.5g}")
        return short if short - short == 0 else str(short)
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
