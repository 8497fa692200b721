"""`python -m reproductions` lists the experiments and runs one."""

import subprocess
import sys
from pathlib import Path

from reproductions import EXPERIMENTS
from reproductions.__main__ import main, title

ROOT = Path(__file__).parents[2]


def test_without_a_name_every_experiment_has_a_line(capsys):
    assert main() == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[2:]] == list(EXPERIMENTS)
    assert all(title(name) in line for name, line in zip(EXPERIMENTS, shown[2:], strict=True))


def test_a_name_that_is_none_is_told_in_a_line(capsys):
    assert main("corbin-exp9") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: there is no experiment 'corbin-exp9'; there are corbin-exp1, ")
    assert all(name in line for name in EXPERIMENTS)


def test_a_module_that_is_run():
    command = [sys.executable, "-m", "reproductions", "corbin-exp8", "--help"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "--shared_bits" in ran.stdout, ran.stderr
