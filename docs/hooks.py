"""MkDocs hooks: pages made from files outside of docs/, and links to them.

* `CHANGELOG.md`, `CONTRIBUTING.md`, `SECURITY.md` and `benchmarks/README.md` become pages.
* Scripts in `docs/tutorials/` can be downloaded; `make tutorials` has written their pages and notebooks.
* A link from a page to one of those files, right where the repository is read, is right on the site too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
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
    for script in (DOCS / "tutorials").glob("*.py"):
        files.append(File.generated(config, f"tutorials/{script.name}", content=script.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files outside of docs/ into links to their pages."""
    return _moved(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
