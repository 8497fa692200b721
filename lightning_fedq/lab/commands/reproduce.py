"""`fedq reproduce`: the papers' experiments by name, from the project's repository or an installed package.

The experiments are not in the wheel. They stand in the folder `reproductions/` of the repository, which is
found in the working folder, around an editable install, or by `--path`. Other packages bring theirs by entry
points of the group `lightning_fedq.reproductions`: the name on the command line, and a function whose
arguments become options.
"""

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import lightning_fedq
from lightning_fedq.commands.errors import nearest

GROUP = "lightning_fedq.reproductions"
FOLDER = "reproductions"
PACKAGE = Path(lightning_fedq.__file__).parent
WHERE = (
    "the papers' experiments are in the project's repository, not in the installed package: clone it, and "
    "run `fedq reproduce` inside or with --path CLONE"
)
OTHER_COMMANDS = """
Near-optimal utility under a leakage budget has no experiment; beside optimal-theorems, what it is about:
  fedq attack    reconstructs training data from updates, and noise for a leakage budget
  fedq tradeoff  leakage against utility, with the paper's bounds as printed and as proven"""


def main(*argv: str) -> int:
    """Run one experiment. Without a name, list all.

    Raises:
        ValueError: If there is no such experiment, or it does not import.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--path")
    known, options = parser.parse_known_args(argv)
    checkout = _checkout(known.path)
    found = [*_own(checkout), *entry_points(group=GROUP)]
    if known.name is None:
        print("usage: fedq reproduce [--path CLONE] NAME [options]      fedq reproduce NAME --help\n")
        for one in found:
            print(f"  {one.name:<14} {_origin(one) if one.dist or not checkout else _title(one, checkout)}")
        print(OTHER_COMMANDS, *([WHERE] if checkout is None else []), sep="\n")
        return 0
    point = _chosen(known.name, found, checkout)
    try:
        experiment = point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{point.name} ({_origin(point)}) does not import: {error}") from error
    from jsonargparse import auto_cli  # slow to import, and only needed here

    try:
        auto_cli(experiment, args=options, as_positional=False, prog=f"fedq reproduce {point.name}")
    except FileNotFoundError as error:  # no data: the message says where they should be
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _checkout(path: str | None) -> Path | None:
    """The folder that holds `reproductions/`, or None.

    Raises:
        ValueError: If it is not where `path` says.
    """
    if path is not None:
        if not (Path(path) / FOLDER / "__init__.py").is_file():
            raise ValueError(f"there is no folder {FOLDER}/ with an __init__.py in {path}")
        return Path(path).resolve()
    for folder in (Path.cwd(), PACKAGE.parent):
        # another project may have a folder of this name: ours stands beside the package
        if (folder / FOLDER / "__init__.py").is_file() and (folder / "lightning_fedq").is_dir():
            return folder
    return None


def _own(checkout: Path | None) -> list[EntryPoint]:
    """The experiments of a checkout, which is put on the path of imports."""
    if checkout is None:
        return []
    sys.path.insert(0, str(checkout))
    package = import_module(FOLDER)
    if [Path(place) for place in package.__path__] != [checkout / FOLDER]:
        raise ValueError(f"{FOLDER} was imported from {package.__file__}, not from {checkout}")
    return [
        EntryPoint(name, f"{FOLDER}.{module}:{name.replace('-', '_')}", GROUP)
        for name, module in package.EXPERIMENTS.items()
    ]


def _chosen(name: str, found: Sequence[EntryPoint], checkout: Path | None) -> EntryPoint:
    points = [point for point in found if point.name == name]
    if len(points) > 1:
        places = "; ".join(_origin(point) for point in points)
        raise ValueError(f"{name} stands twice: {places}; uninstall one")
    if not points:
        hint = nearest(name, [point.name for point in found])
        more = "`fedq reproduce` lists them all" if checkout else WHERE
        raise ValueError(f"there is no experiment {name!r}.{hint}\n{more}")
    return points[0]


def _origin(point: EntryPoint) -> str:
    return f"{point.value}, from {point.dist.name}" if point.dist else point.value


def _title(point: EntryPoint, checkout: Path) -> str:
    """First line of an experiment's docstring, read without importing it, which takes seconds."""
    source = (checkout / point.module.replace(".", "/")).with_suffix(".py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == point.attr:
            return (ast.get_docstring(node) or point.name).splitlines()[0]
    raise ValueError(f"{point.module} has no function {point.attr}")
