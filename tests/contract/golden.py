"""Golden symbols: a fingerprint of each mechanism's messages, frozen in `golden.json`.

    python -m tests.contract.golden                    what differs; adds new rows and drops those without one
    python -m tests.contract.golden --change CorBin    also rewrites the rows of these mechanisms

A changed row breaks recorded runs and the wire format. So it must be named, and CHANGELOG.md must say under
`## Unreleased` that the "golden symbols" of that mechanism changed.
"""

import argparse
import json
import sys
from pathlib import Path

from lightning_fedq.mechanisms.contract_suite import golden_symbols

GOLDEN = Path(__file__).with_name("golden.json")
CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def names_the_change(changelog, name):
    """Does a line under "Unreleased" speak of the golden symbols of this mechanism?"""
    unreleased = changelog.partition("## Unreleased")[2].partition("\n## ")[0]
    entries = unreleased.split("\n* ")
    return any("golden symbols" in entry.lower() and f"`{name}`" in entry for entry in entries)


def updated(recorded, rows, change, changelog):
    """The new table, and what may not be written: changed rows that nobody named."""
    table, refused = {}, []
    for mechanism in rows:
        key, name, found = repr(mechanism), type(mechanism).__name__, golden_symbols(mechanism)
        old = recorded.get(key, found)
        if old == found or (name in change and names_the_change(changelog, name)):
            table[key] = found
            continue
        table[key] = old
        cure = "name it with --change" if name not in change else "say so under Unreleased in CHANGELOG.md"
        refused.append(f"the golden symbols of {key} are {found}, they were {old}; {cure}")
    return table, refused


def main(argv):
    """Write the table; the exit status is 1 if a row changed that may not."""
    from tests.contract.test_mechanisms import ROWS

    parser = argparse.ArgumentParser(
        prog="python -m tests.contract.golden",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--change", nargs="+", default=[], metavar="MECHANISM")
    options = parser.parse_args(argv)
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    table, refused = updated(recorded, ROWS, options.change, CHANGELOG.read_text())
    GOLDEN.write_text(json.dumps(table, indent=2) + "\n")
    print("\n".join(refused) or f"{GOLDEN.name}: {len(table)} rows")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
