"""The code in docs/privacy.md runs, and docs/useful_privacy.md has the accountant's figures."""

import re
from pathlib import Path

import pytest
import torch

from lightning_fedq.mechanisms import LDPQ, AugCorBin
from lightning_fedq.mechanisms.interface import Adversary, RoundContext
from tests.described import Setting

DOCS = Path(__file__).parents[2] / "docs"


def test_every_block_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "privacy.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    assert "# What was protected, and from whom" in capsys.readouterr().out


@pytest.mark.slow  # the same functions as `test_accounting.test_table_of_the_specification`, 3 s
def test_the_tables_numbers_are_ours():
    """Every cell of the table beside the specification."""
    checked = 0
    for line in (DOCS / "useful_privacy.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").replace("\\|", "").split(" | ")]
        if len(cells) != 10 or not re.fullmatch(r"[\d.e]+", cells[0]):
            continue
        clients, gamma, alone, epsilon, dim, rounds = (float(cell) for cell in cells[:6])
        assert behind(LDPQ(epsilon), int(alone), int(dim), int(rounds)) == pytest.approx(
            float(cells[7]), rel=2e-3
        )
        if cells[9][0] not in "-∞":
            found = behind(AugCorBin(epsilon, 5, gamma), int(clients), int(dim), int(rounds))
            assert found == pytest.approx(float(cells[9]), rel=2e-3)
        if re.match(r"[.\d]", cells[6]):
            assert float(cells[7]) == pytest.approx(float(cells[6]), rel=5e-3)
        checked += 1
    assert checked == 6


def behind(mechanism, clients, dim, rounds):
    groups, start = [], 0
    for size in mechanism.group_sizes(clients):
        groups.append(tuple(range(start, start + size)))
        start += size
    one = torch.ones(1).double()
    setting = Setting(
        RoundContext(0, tuple(groups), (dim,), 0 * one, one), rounds, 1e-5, secure_aggregation=True
    )
    return setting.spent(setting.claims(mechanism)[Adversary.SECAGG_SERVER], rounds).epsilon
