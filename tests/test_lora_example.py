"""`examples/lora.py`: what it chooses before anybody trains, and the whole of it (slow)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loaded import loaded

EXAMPLE = Path(__file__).parents[1] / "examples" / "lora.py"


def example():
    pytest.importorskip("peft")
    return loaded("examples/lora.py")


@pytest.mark.parametrize("rank", [2, 8])
def test_it_counts_the_parameters_that_train(rank):
    module = example()
    config = module.LoraConfig(r=rank, target_modules=module.LAYERS)
    body = module.get_peft_model(module.RowReader(0.1).body, config)
    trained = sum(parameter.numel() for parameter in body.parameters() if parameter.requires_grad)
    assert trained == module.trained_parameters(rank)


@pytest.mark.slow
def test_it_asks_the_planner_for_clients_and_rank(capsys):
    assert example().choose() == (1250, 8)
    assert "1250 clients, rank 8: 4096 parameters, 1.25 bits each" in capsys.readouterr().out


@pytest.mark.slow
def test_the_adapter_learns_at_epsilon_8_and_less_than_1_5_bits():
    data = os.environ.get("FEDQ_DATA")
    if not data:
        pytest.skip("FEDQ_DATA names no folder with MNIST")
    pytest.importorskip("peft")
    run = [sys.executable, str(EXAMPLE), "--data", data]
    done = subprocess.run(run, capture_output=True, text=True, timeout=1200)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    assert 7.9 <= float(re.search(r"met, ([\d.]+) spent", said).group(1)) <= 8.0
    before, after = map(float, re.search(r"upside down: ([\d.]+) .* ([\d.]+) with", said).groups())
    bits = float(re.search(r"([\d.]+) bits a trained", said).group(1))
    assert after > before + 0.15 and bits <= 1.5
