"""The code in docs/privacy.md runs."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "privacy.md"


def test_every_block_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    assert "# What was protected, and from whom" in capsys.readouterr().out
