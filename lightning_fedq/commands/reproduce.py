"""`fedq reproduce`: the papers' experiments by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_fedq.commands.suggestions import nearest
from reproductions import EXPERIMENTS, load, title


def main(argv: Sequence[str]) -> int:
    """Run one experiment; without a name, list all."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: fedq reproduce NAME [options]      fedq reproduce NAME --help\n")
        for name in EXPERIMENTS:
            print(f"  {name:<14} {title(name)}")
        return 0
    name, *options = argv
    if name not in EXPERIMENTS:
        print(f"error: there is no experiment {name!r}.{nearest(name, EXPERIMENTS)}", file=sys.stderr)
        print("`fedq reproduce` lists them all", file=sys.stderr)
        return 2
    from jsonargparse import auto_cli  # half a second to import, and only needed here

    auto_cli(load(name), args=options, as_positional=False, prog=f"fedq reproduce {name}")
    return 0
