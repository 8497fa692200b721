"""The processes of `examples/deploy.py`, which is no package."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).parents[2] / "examples" / "deploy.py"
_spec = importlib.util.spec_from_file_location("deploy_example", PATH)
assert _spec is not None and _spec.loader is not None
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)
