"""MkDocs hooks: pages made from files outside of docs/, and links to them.

* `CHANGELOG.md`, `SECURITY.md` and `benchmarks/README.md` become pages.
* Every script in `docs/tutorials/` is run, and becomes a page and a notebook with what it printed and drew.
* A link from a page to one of those files, right where the repository is read, is right on the site too.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Page of each file outside of docs/, by its path from the top of the repository."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def _moved(text: str, source: str, page: str) -> str:
    """Rewrite the relative links of a page that was `source`, a path from the top of the repository."""

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if path in OUTSIDE:
            path = f"docs/{OUTSIDE[path]}"
        if not path.startswith("docs/"):
            return match[1]
        return posixpath.relpath(path, posixpath.dirname(f"docs/{page}"))

    return _LINK.sub(target, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files in docs/."""
    for source, page in OUTSIDE.items():
        text = _moved((ROOT / source).read_text(), source, page)
        files.append(File.generated(config, page, content=text))
    with tempfile.TemporaryDirectory() as folder:
        scripts = sorted((DOCS / "tutorials").glob("*.py"))
        command = [sys.executable, str(DOCS / "tutorial.py"), folder, *map(str, scripts)]
        environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise PluginError(f"a tutorial failed:\n{done.stderr[-4000:]}")
        for script in scripts:
            out = Path(folder) / script.stem
            made = {"page.md": f"{script.stem}.md", **{path.name: path.name for path in out.glob("*.png")}}
            made[f"{script.stem}.ipynb"] = f"{script.stem}.ipynb"
            for name, target in made.items():
                content = (out / name).read_bytes()
                files.append(File.generated(config, f"tutorials/{target}", content=content))
            files.append(File.generated(config, f"tutorials/{script.name}", content=script.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files outside of docs/ into links to their pages."""
    return _moved(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
