"""Tutorial scripts run cell by cell and written down as pages: text, code, what it printed and drew.

python docs/tutorial.py FOLDER docs/tutorials/*.py

A tutorial is an ordinary script. Its docstring is the head of the page; `# %%` begins a cell, and the comment
below it is text. A cell's pictures are the PNG files that it saved.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from types import ModuleType


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


def run(script: Path, folder: Path) -> str:
    """Run the cells in `folder` and return the page in Markdown.

    Raises:
        Exception: Whatever a cell raises.
    """
    parts, module = [], ModuleType("__main__")
    sys.modules["__main__"] = module  # as in a script: what a tutorial defines can be pickled
    source = script.read_text()
    folder.mkdir(parents=True)
    os.chdir(folder)
    for text, code in cells(source):
        parts.append(text)
        if not code:
            continue
        line = source[: source.index(code)].count("\n")
        before, printed = set(folder.glob("*.png")), io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(script), "exec"), vars(module))
        parts.append(f"```python\n{code}\n```")
        if output := printed.getvalue().rstrip():
            parts.append(f'```text title="printed"\n{output}\n```')
        drawn = sorted(set(folder.glob("*.png")) - before)
        parts += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in drawn]
    parts.append(f"[This page as a script]({script.name}): `python docs/tutorials/{script.name}`")
    return "\n\n".join(parts) + "\n"


def main(folder: Path, scripts: list[Path]) -> None:
    """Write a page and its pictures for every script, each into a folder of its name."""
    for script in scripts:
        out = folder / script.stem
        (out / "page.md").write_text(run(script, out))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), [Path(name).resolve() for name in sys.argv[2:]])
