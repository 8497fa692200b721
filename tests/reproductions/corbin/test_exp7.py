import json
import os
from importlib import import_module
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_fedq.commands.reproduce import main
from lightning_fedq.datasets import DigitsDataModule, TensorDataModule
from reproductions.corbin.exp7 import corbin_exp7

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")
QUICK = "--scale 0.002 --num_clients 4 --rounds 1 --local_epochs 1 --smoothing [1.0] --targets [updates]"


class LargeDigits(TensorDataModule):
    """scikit-learn's digits in MNIST's size, in place of MNIST."""

    def __init__(self, root, download, batch_size, pooled, num_train, num_val, seed) -> None:
        super().__init__(batch_size, pooled, num_train, None, seed)

    def load(self) -> tuple[Tensor, Tensor, int]:
        images, labels, _ = DigitsDataModule().load()
        return interpolate(images, (28, 28)), labels, 0


def check_the_command(root: str, out: Path) -> None:
    assert main(["corbin-exp7", "--data.root", root, *QUICK.split(), "--out", str(out)]) == 0
    methods = [line.split(",")[0] for line in (out / "table.csv").read_text().splitlines()]
    assert methods == ["method", "vanilla", "LDP-FL", "CorBin-FL", "AugCorBin-FL"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["settings"]["training_samples"] == 90
    assert summary["verdicts"][2].endswith("one seed, no verdict")
    assert (out / "accuracy.png").read_bytes()[:4] == b"\x89PNG"


def test_settings_table_picture_and_verdict_are_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the function of the same name hides the module from a dotted path
    monkeypatch.setattr(import_module("reproductions.corbin.exp7"), "MNISTDataModule", LargeDigits)
    check_the_command("unused", tmp_path / "exp7")
    assert "updates: vanilla" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
def test_the_command_on_a_little_mnist(tmp_path: Path) -> None:
    check_the_command(FEDQ_DATA, tmp_path / "exp7")


def test_without_data_it_says_so_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["corbin-exp7", "--data.root", str(tmp_path), "--out", str(out)]) == 2
    assert "no MNIST/raw in" in capsys.readouterr().err and not out.exists()


def test_scale_is_checked() -> None:
    with pytest.raises(ValueError, match=r"scale must be in \(0, 1\], got 2"):
        corbin_exp7(scale=2)
