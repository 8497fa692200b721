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
