"""Files of no package, examples and tools, as modules."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[1]


def loaded(path):
    """The module of a file, by its place in the repository."""
    spec = spec_from_file_location(f"loaded_{Path(path).stem}", ROOT / path)
    module = sys.modules[spec.name] = module_from_spec(spec)  # where a dataclass looks for annotations
    spec.loader.exec_module(module)
    return module
