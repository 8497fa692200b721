"""The site builds without a warning, tutorials run, tables are what the code says, public names import.

`make docs` builds the site and runs what is marked `site`.
"""

import json
import math
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from statistics import mean, stdev

import pytest

import lightning_fedq
from lightning_fedq import mechanisms
from tests.loaded import loaded

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))
READ_IN_THE_REPOSITORY = [
    *("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md"))),
]


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1"}
    pipes = {"capture_output": True, "text": True, "check": False}
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=environment, **pipes)


@pytest.fixture(scope="module")
def site():
    """The site, built where `make docs` says it is; warnings are errors."""
    folder = ROOT / "build" / "site"
    done = run("-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return folder


@pytest.mark.site
def test_every_page_is_built(site):
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


def cells(folder, script):
    """Kind and source of every cell of a notebook, whether it printed, and how many pictures it drew."""
    found = []
    for cell in json.loads((folder / f"{script.stem}.ipynb").read_text())["cells"]:
        outputs = cell.get("outputs", ())
        printed = any(out["output_type"] == "stream" for out in outputs)
        pictures = sum("image/png" in out.get("data", ()) for out in outputs)
        found.append((cell["cell_type"], cell["source"], printed, pictures))
    return found


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_pages_and_notebooks_of_tutorials_have_their_scripts_cells(script):
    """`make tutorials` writes them."""
    sources = [cell["source"] for cell in json.loads(script.with_suffix(".ipynb").read_text())["cells"]]
    code = [code for _, code in loaded("docs/tutorial.py").cells(script.read_text()) if code]
    assert [source for source in sources if source in code] == code
    page = script.with_suffix(".md").read_text()
    assert all(f"```python\n{one}\n```" in page for one in code) and "printed" in page
    pictures = re.findall(r"!\[[\w ]+\]\((\w+\.png)\)", page)
    assert pictures and all((script.parent / name).stat().st_size > 5_000 for name in pictures)


@pytest.mark.site
def test_tutorials_run_and_still_print_and_draw_what_their_notebooks_have(tmp_path):
    """Keys come from the operating system, so figures differ from run to run; what is there does not."""
    done = run("docs/tutorial.py", tmp_path, *TUTORIALS)
    assert done.returncode == 0, done.stderr[-4000:]
    for script in TUTORIALS:
        assert cells(tmp_path, script) == cells(script.parent, script), script.stem


def test_a_script_becomes_a_page_and_a_notebook_of_the_same_run(tmp_path):
    script = tmp_path / "tiny.py"
    script.write_text(
        '"""A head\n\nWith [a page](../x.md)."""\n\n# %%\n# ## A cell\n# Its text.\nimport random\n\n'
        "value = random.random()\nprint(value)\n\n# %%\n# Text alone.\n\n# %%\n"
        "import matplotlib.pyplot as plt\n\n"
        'plt.figure().savefig("drawn.png")\nprint(value)\n'
    )
    done = run("docs/tutorial.py", tmp_path, script)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "tiny.md").read_text()
    notebook = json.loads((tmp_path / "tiny.ipynb").read_text())
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
def test_the_site_asks_nobody_else(site):
    """Nothing that a browser loads by itself comes from another server."""
    for page in site.rglob("*.html"):
        loads = re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="?(https?://[^"\s>]+)', page.read_text())
        assert not loads, (page.name, loads)


@pytest.mark.site
def test_examples_of_the_reference_are_code(site):
    """Text that begins with ">" becomes a quotation."""
    quoted = [page.name for page in (site / "reference").glob("*.html") if "<blockquote>" in page.read_text()]
    assert not quoted


@pytest.mark.site
def test_the_reference_has_every_public_class(site):
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    missing = [name for name in lightning_fedq.__all__ if not re.search(rf'id="[\w.]+\.{name}"', text)]
    assert not missing


def test_tables_that_repeat_code_are_what_it_says(capsys):
    assert loaded("docs/generate.py").main(["--check"]) == 0, capsys.readouterr().out


def test_pictures_are_of_the_tables_of_today(capsys):
    """Each picture of README and the pages carries a hash of its rows, or is in the notebook of its run."""
    pictures = loaded("docs/picture.py")
    assert pictures.main(["--check"]) == 0, capsys.readouterr().out
    known = {path.name for picture in pictures.PICTURES for path in picture.files}
    shown = {path.name for path in DOCS.rglob("*.png")}
    assert known | {name for path in TUTORIALS for name in drawn_by(path)} == shown


def test_the_comparison_on_its_page_is_of_its_runs():
    """Scores and bits at epsilon 8 are the means over the seeds in docs/compare.csv."""
    runs = loaded("docs/picture.py").read_compare()
    row = r"^\| `([^`]+)`[^|]* \| ([.\d]+) ± ([.\d]+) \| ([.\d]+) \| ([.\d]+) \|$"
    rows = re.findall(row, (DOCS / "guides/compare.md").read_text(), re.M)
    assert len(rows) == 3
    for name, *shown in rows:
        cells = [run for run in runs if run["mechanism"] == name and run["epsilon"] in (8.0, math.inf)]
        scores = [run["score"] for run in cells]
        up = mean(run["bits_up"] + run["bits_keys"] for run in cells)
        both = up + mean(run["bits_down"] for run in cells)
        digits = (f"{mean(scores):.3f}", f"{stdev(scores):.1g}", f"{up:.1f}", f"{both:.1f}")
        assert [float(text) for text in shown] == [float(text) for text in digits], name


def drawn_by(tutorial):
    """Names of the pictures that a tutorial saves."""
    return re.findall(r'savefig\("(\w+\.png)"', tutorial.read_text())


def test_a_picture_of_other_rows_is_found(monkeypatch, capsys):
    pictures = loaded("docs/picture.py")
    monkeypatch.setattr(pictures, "WITHOUT_PRIVACY", 97.0)
    assert pictures.main(["--check"]) == 1
    names = ("accuracy_epsilon_bits.png", "accuracy_epsilon_bits_dark.png")
    told = [f"docs/{name}: out of date, run `python docs/picture.py`" for name in names]
    assert capsys.readouterr().out.splitlines() == told


def test_public_names_import():
    rows = re.findall(r"^\| `(lightning_fedq[\w.]*)` \| (.*) \|$", (DOCS / "public_api.md").read_text(), re.M)
    assert len(rows) > 10
    for module, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(import_module(module), name), f"{module}.{name}"


def test_the_audits_table_has_every_mechanism():
    rows = re.findall(r"^\| (\w+)", (DOCS / "audit.md").read_text(), re.M)
    assert set(mechanisms.__all__) <= set(rows)


def anchors(page):
    """Anchors of a page's headings, as sites make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("source", READ_IN_THE_REPOSITORY)
def test_links_lead_somewhere_in_the_repository(source):
    """Pages are read where the repository is, before anything is built; the site checks its own again."""
    text = (ROOT / source).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        path, _, anchor = "".join(target).partition("#")
        page = (ROOT / source).parent / path if path else ROOT / source
        assert page.exists(), target
        if page.parent.name != "reference":  # made by the site from docstrings
            assert not anchor or anchor in anchors(page), target


def test_the_index_links_every_page():
    text = (DOCS / "index.md").read_text()
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert not [page for page in pages if page != "index.md" and f"]({page})" not in text]


def test_the_round_leads_along_lines_that_are_there():
    page = (DOCS / "layout.md").read_text()
    steps = re.findall(r"\[`([^`]+)`\]\(\.\./(lightning_fedq/[^)]+)\)", page)
    assert len(steps) >= 12
    for line, path in steps:
        assert (ROOT / path).read_text().count(line) == 1, (line, path)


def test_messages_of_the_faq_are_those_of_the_library():
    """Each quoted message stands in the library's source, adjacent string literals joined."""
    source = "".join(path.read_text() for path in (ROOT / "lightning_fedq").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    quoted = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "faq.md").read_text(), re.M)
    assert len(quoted) >= 7
    assert not [message for message in quoted if message not in joined]


BY_COMMAND = {"papers", "reproductions", "reproductions_cpa", "reproductions_exact"}
"""Pages whose rows name the command that prints them."""
EXACT = {"composition", "corrections", "mechanisms", "threat_model"}
"""Pages whose figures are derived, or printed by tests of these pages."""


def test_a_page_of_measured_figures_has_their_date():
    pages = [path for path in (ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("guides/*.md"))]
    undated = []
    for path in pages:
        text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.S)
        figure = r"(?<![\d.\w])0?\.\d{2,4}(?!\d)|\d%|\d (?:ms|MB|kB|GB|seconds|minutes)\b"
        if len(re.findall(figure, text)) >= 3 and not re.search(r"\d+ November 2026", path.read_text()):
            undated.append(path.stem)
    assert set(undated) <= BY_COMMAND | EXACT, "say when these figures were measured"
