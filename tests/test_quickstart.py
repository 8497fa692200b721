import ast
import runpy
from pathlib import Path

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"


def test_it_learns(capsys):
    """0.923 with its own seed; chance is 0.1."""
    accuracy = runpy.run_path(str(QUICKSTART))["main"]()
    assert accuracy > 0.88
    assert capsys.readouterr().out.count("accuracy") == 4


def test_it_is_short_and_free_of_lightning():
    source = QUICKSTART.read_text()
    assert len(source.splitlines()) < 60
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    assert not any("lightning" in name and not name.startswith("lightning_fedq") for name in imported)
