"""Tutorial scripts run cell by cell and written down as pages and notebooks: text, code, output, pictures.

python docs/tutorial.py          # `make tutorials`: run all, and write pages and notebooks beside the scripts
python docs/tutorial.py FOLDER docs/tutorials/*.py

A tutorial is an ordinary script. Its docstring is the head of the page; `# %%` begins a cell, and the comment
below it is text. A cell's pictures are the PNG files that it saved. Page and notebook are of the same run.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


def cells(source: str) -> list[tuple[str, str]]:
    """Text and code of every cell of a script; the first one has the docstring as its text."""
    match = re.fullmatch(r'"""(.*?)"""\n(.*)', source, re.S)
    if not match:
        raise ValueError("a tutorial begins with its docstring")
    found = [(f"# {match[1].strip()}", "")]
    for cell in match[2].split("# %%\n")[1:]:
        lines = cell.splitlines()
        size = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
        found.append(
            (
                "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:size]),
                "\n".join(lines[size:]).strip(),
            )
        )
    return found


@dataclass(frozen=True)
class Cell:
    """A cell that has run.

    Args:
        text: Text above the code, in Markdown.
        code: Code; may be empty.
        printed: What the code printed.
        pictures: Pictures that it saved.
    """

    text: str
    code: str
    printed: str
    pictures: tuple[Path, ...]


def run(script: Path, folder: Path) -> list[Cell]:
    """Run the cells of a script in `folder`.

    Raises:
        Exception: Whatever a cell raises.
    """
    found, module = [], ModuleType("__main__")
    sys.modules["__main__"] = module  # as in a script: what a tutorial defines can be pickled
    source = script.read_text()
    folder.mkdir(parents=True)
    os.chdir(folder)
    for text, code in cells(source):
        before, printed = set(folder.glob("*.png")), io.StringIO()
        if code:
            line = source[: source.index(code)].count("\n")
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * line + code, str(script), "exec"), vars(module))
        drawn = tuple(sorted(set(folder.glob("*.png")) - before))
        found.append(Cell(text, code, printed.getvalue().rstrip(), drawn))
    return found


def page(script: Path, found: Sequence[Cell]) -> str:
    """The page in Markdown."""
    parts = []
    for cell in found:
        parts.append(cell.text)
        if cell.code:
            parts.append(f"```python\n{cell.code}\n```")
        if cell.printed:
            parts.append(f'```text title="printed"\n{cell.printed}\n```')
        parts += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in cell.pictures]
    parts.append(
        f"This page [as a notebook]({script.stem}.ipynb) with its outputs, and [as a script]({script.name}): "
        f"`python docs/tutorials/{script.name}`"
    )
    return "\n\n".join(parts) + "\n"


def notebook(found: Sequence[Cell]) -> str:
    """The notebook as JSON (nbformat 4.5), outputs and pictures included.

    Links to pages of the site are left as their words: a notebook lies anywhere.
    """
    made: list[dict[str, Any]] = []
    for number, cell in enumerate(found):
        if cell.text:
            text = re.sub(
                r"\[([^\]]+)\]\((?!\w+:)[^)]+\)", r"\1", cell.text
            )  # they lead to pages of the site
            made.append({"cell_type": "markdown", "id": f"text-{number}", "metadata": {}, "source": text})
        if not cell.code:
            continue
        outputs: list[dict[str, Any]] = []
        if cell.printed:
            outputs.append({"output_type": "stream", "name": "stdout", "text": cell.printed + "\n"})
        for path in cell.pictures:
            picture = {"image/png": base64.b64encode(path.read_bytes()).decode(), "text/plain": path.name}
            outputs.append({"output_type": "display_data", "metadata": {}, "data": picture})
        made.append(
            {
                "cell_type": "code",
                "id": f"code-{number}",
                "metadata": {},
                "execution_count": sum(one["cell_type"] == "code" for one in made) + 1,
                "source": cell.code,
                "outputs": outputs,
            }
        )
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main(folder: Path, scripts: list[Path]) -> None:
    """Write a page, a notebook and their pictures into `folder` for every script."""
    for script in scripts:
        with tempfile.TemporaryDirectory() as scratch:
            found = run(script, Path(scratch) / "run")
            for picture in (picture for cell in found for picture in cell.pictures):
                shutil.copy(picture, folder / picture.name)
            (folder / f"{script.stem}.ipynb").write_text(notebook(found))
            (folder / f"{script.stem}.md").write_text(page(script, found))
            os.chdir(folder)


if __name__ == "__main__":
    beside = Path(__file__).parent / "tutorials"
    where, *named = sys.argv[1:] or [str(beside), *sorted(map(str, beside.glob("*.py")))]
    main(Path(where).resolve(), [Path(name).resolve() for name in named])
