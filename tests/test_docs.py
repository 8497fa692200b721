"""The site builds without a warning, tutorials run, tables are what the code says, public names import.

`make docs` builds the site and runs what is marked `site`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import lightning_fedq
from lightning_fedq import mechanisms

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
READ_IN_THE_REPOSITORY = ("README.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, built where `make docs` says it is; warnings are errors, and every tutorial has run."""
    folder = ROOT / "build" / "site"
    done = run("-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return folder


@pytest.mark.site
def test_every_page_is_built(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    pages |= {Path(f"tutorials/{path.stem}.html") for path in (DOCS / "tutorials").glob("*.py")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


@pytest.mark.site
def test_tutorials_show_what_they_printed_and_drew(site: Path) -> None:
    scripts = sorted((DOCS / "tutorials").glob("*.py"))
    assert len(scripts) >= 5
    for script in scripts:
        page = (site / "tutorials" / f"{script.stem}.html").read_text()
        pictures = re.findall(r'<img alt="[\w ]+" src="(\w+\.png)"', page)
        assert "printed" in page and pictures, script.name
        assert all((site / "tutorials" / name).stat().st_size > 5_000 for name in pictures)
        notebook = json.loads((site / "tutorials" / f"{script.stem}.ipynb").read_text())
        outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
        assert sum("image/png" in output.get("data", ()) for output in outputs) == len(pictures)


def test_a_script_becomes_a_page_and_a_notebook_of_the_same_run(tmp_path: Path) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(
        '"""A head\n\nWith [a page](../x.md)."""\n\n# %%\n# ## A cell\n# Its text.\nimport random\n\n'
        "value = random.random()\nprint(value)\n\n# %%\n# Text alone.\n\n# %%\n"
        "import matplotlib.pyplot as plt\n\n"
        'plt.figure().savefig("drawn.png")\nprint(value)\n'
    )
    done = run("docs/tutorial.py", tmp_path / "out", script)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "tiny" / "page.md").read_text()
    notebook = json.loads((tmp_path / "out" / "tiny" / "tiny.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    kinds = [cell["cell_type"] for cell in notebook["cells"]]
    assert kinds == ["markdown", "markdown", "code", "markdown", "code"]
    assert len({cell["id"] for cell in notebook["cells"]}) == 5
    first, second = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert (first["execution_count"], second["execution_count"]) == (1, 2)
    [printed] = first["outputs"]
    assert printed["text"] in page and float(printed["text"]) < 1
    [again, picture] = second["outputs"]
    assert again["text"] == printed["text"] and picture["data"]["image/png"].startswith("iVBOR")
    assert notebook["cells"][0]["source"] == "# A head\n\nWith a page." and "[a page](../x.md)" in page
    assert "(tiny.ipynb)" in page and "![drawn](drawn.png)" in page


@pytest.mark.site
def test_the_site_asks_nobody_else(site: Path) -> None:
    """Nothing that a browser loads by itself comes from another server."""
    for page in site.rglob("*.html"):
        loads = re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="?(https?://[^"\s>]+)', page.read_text())
        assert not loads, (page.name, loads)


@pytest.mark.site
def test_the_reference_has_every_public_class(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    missing = [name for name in lightning_fedq.__all__ if not re.search(rf'id="[\w.]+\.{name}"', text)]
    assert not missing


def test_tables_that_repeat_code_are_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


def test_public_names_import() -> None:
    rows = re.findall(r"^\| `(lightning_fedq[\w.]*)` \| (.*) \|$", (DOCS / "public_api.md").read_text(), re.M)
    assert len(rows) > 10
    for module, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(import_module(module), name), f"{module}.{name}"


def test_the_audits_table_has_every_mechanism() -> None:
    rows = re.findall(r"^\| (\w+)", (DOCS / "audit.md").read_text(), re.M)
    assert set(mechanisms.__all__) <= set(rows)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as sites make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("source", READ_IN_THE_REPOSITORY)
def test_links_that_the_site_does_not_check(source: str) -> None:
    """Files that are read in the repository; the site checks its own pages."""
    text = (ROOT / source).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        page = (ROOT / source).parent / path if path else ROOT / source
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


def test_messages_of_the_faq_are_those_of_the_library():
    """Each quoted message stands in the library's source, adjacent string literals joined."""
    source = "".join(path.read_text() for path in (ROOT / "lightning_fedq").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    quoted = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "faq.md").read_text(), re.M)
    assert len(quoted) >= 7
    assert not [message for message in quoted if message not in joined]
