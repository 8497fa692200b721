"""`python -m reproductions NAME`: run one of the papers' experiments. Without a name, list them all."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from lightning_fedq.commands.errors import TRACE
from reproductions import EXPERIMENTS
from reproductions.results import counts, draw, record, rows


def main(*argv: str) -> int:
    """Run one experiment and return its exit status.

    Args:
        argv: Its name and its options.
    """
    name, *options = argv or ("--help",)
    if name in ("-h", "--help"):
        usage = "usage: python -m reproductions NAME [options]      python -m reproductions NAME --help"
        print(f"{usage}      python -m reproductions draw\n")
        for one in EXPERIMENTS:
            print(f"  {one:<16} {title(one)}")
        return 0
    if name == "draw":
        words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        seed = options[0] if options else subprocess.run(words, capture_output=True, text=True).stdout.strip()
        print(f"docs/papers.md, {len(rows())} rows: {counts()}\nseed {seed}")
        for number, commands in draw(seed):
            print(f"row {number}: {'; '.join(commands)}")
        return 0
    if name not in EXPERIMENTS:
        print(f"error: there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    from jsonargparse import auto_cli  # slow to import, and only needed here

    experiment = getattr(import_module(f"reproductions.{EXPERIMENTS[name]}"), name.replace("-", "_"))
    try:
        summary = auto_cli(
            experiment, args=options, as_positional=False, prog=f"python -m reproductions {name}"
        )
    except (FileNotFoundError, ValueError) as error:  # no data, say: the message tells where they should be
        if os.environ.get(TRACE):
            raise
        print(f"error: {error}\n{TRACE}=1 in the environment shows the trace.", file=sys.stderr)
        return 2
    record(name, options, summary)
    return 0


def title(name: str) -> str:
    """First line of an experiment's docstring, read without importing it, which takes seconds.

    Raises:
        ValueError: If its module has no such function.
    """
    file = Path(__file__).parent.joinpath(*EXPERIMENTS[name].split(".")).with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name.replace("-", "_"):
            return (ast.get_docstring(node) or name).splitlines()[0]
    raise ValueError(f"{file} has no function {name.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
