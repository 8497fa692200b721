"""The demonstration between processes, and the code in the documentation, really run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def demonstrate(*arguments):
    command = [sys.executable, str(ROOT / "examples" / "secagg_processes.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_client_killed_before_it_sends_its_masked_input():
    out = demonstrate("--clients", "4", "--dim", "100", "--kill", "1:mask")
    assert "client 1 dropped out" in out
    assert "-> exact sum over clients (0, 2, 3)" in out


@pytest.mark.slow
@pytest.mark.parametrize("active", [(), ("--active",)])
def test_a_client_killed_in_every_stage(active):
    out = demonstrate(*active)
    assert out.count("-> exact sum") == 5 + len(active)
    assert out.count("-> typed abort: [") == 1


def test_documentation():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "secagg.md").read_text(), re.DOTALL)
    assert blocks
    scope = {}
    for block in blocks:
        exec(block, scope)


# ---- the fault list of docs/secagg.md names tests that are there ---------------------------------------
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
