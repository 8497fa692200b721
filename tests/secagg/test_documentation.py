"""The fault list of docs/secagg.md names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_fault_names_tests_that_exist():
    table = (ROOT / "docs/secagg.md").read_text().split("## The fault list")[1]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| F")]
    numbers = [int(number) for row in rows for number in re.findall(r"F(\d+)", row[0])]
    assert sorted({*numbers, 2, 3}) == list(range(1, 24))  # "F1 to F4"
    for row in rows:
        found = 0
        for file, tests in re.findall(r"`([\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", row[-1]):
            source = (ROOT / (file if "/" in file else f"tests/secagg/{file}")).read_text()
            for test in re.findall(r"`(test_\w+)`", tests):
                assert f"def {test}(" in source, f"{test} is not in {file}"
                found += 1
        assert found == len(re.findall(r"`test_\w+`", row[-1])) > 0, row
