"""List the tests that `make test` leaves out, by how long they took.

    python -m pytest -n 2 --dist loadfile --durations=0 --durations-min=0 > LOG
    python -m tests.longest LOG

writes `tests/long.txt`: a line for every test function whose cases took `LEAST` seconds each on average,
setting up and taking down included; it wants the time of every case. `make test-all` and CI run them.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

LEAST = 0.5
PAGE = Path(__file__).with_name("long.txt")


def long_functions():
    """Functions that `make test` leaves out, as `tests/FILE.py::NAME`."""
    return frozenset(PAGE.read_text().split())


def main(log):
    """Write the list anew."""
    cases = defaultdict(lambda: defaultdict(float))
    for line in log.read_text().splitlines():
        if found := re.match(r"([\d.]+)s (?:call|setup|teardown) +(tests/\S+?::\S+?)(\[.*)?$", line):
            cases[found[2]][found[3] or ""] += float(found[1])
    long = [name for name, took in cases.items() if sum(took.values()) >= LEAST * len(took)]
    PAGE.write_text("".join(f"{name}\n" for name in sorted(long)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
