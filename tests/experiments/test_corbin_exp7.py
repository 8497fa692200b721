import json
import os
from pathlib import Path

import pytest

from lightning_fedq.commands.reproduce import main
from lightning_fedq.experiments.corbin_exp7 import corbin_exp7

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")


@pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
def test_the_whole_command_on_little_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "exp7"
    quick = "--scale 0.002 --num_clients 4 --rounds 1 --local_epochs 1 --smoothing [1.0] --targets [updates]"
    assert main(["corbin-exp7", "--data.root", FEDQ_DATA, *quick.split(), "--out", str(out)]) == 0
    assert [line.split(",")[0] for line in (out / "table.csv").read_text().splitlines()] == [
        "method",
        "vanilla",
        "LDP-FL",
        "CorBin-FL",
    ]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["settings"]["training_samples"] == 90 and set(summary["chosen"]) == {"updates"}
    assert "updates: vanilla" in capsys.readouterr().out
    assert (out / "accuracy.png").read_bytes()[:4] == b"\x89PNG"


def test_scale_is_checked() -> None:
    with pytest.raises(ValueError, match=r"scale must be in \(0, 1\], got 2"):
        corbin_exp7(scale=2)
