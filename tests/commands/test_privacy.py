"""`fedq privacy` knows from a configuration or a checkpoint whether masks really ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.commands.privacy import main, report_of_checkpoint, report_of_config
from lightning_fedq.core import Adversary
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.secagg import SecAgg
from tests.digits_run import Classifier, Digits, make_trainer

# Lightning's command line calls what jsonargparse has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
CONFIGS = Path(__file__).parents[2] / "configs"


def fit(folder: Path, secagg: SecAgg | None) -> Path:
    federated = Federated(LDPQ(1.0), 6, clients_per_step=6, secure_aggregation=secagg)
    trainer = make_trainer(federated, RunFolder("run", str(folder)), max_epochs=1)
    trainer.fit(Classifier(), datamodule=Digits(60))
    trainer.save_checkpoint(folder / "one.ckpt")
    return folder / "one.ckpt"


@pytest.mark.parametrize(
    ("secagg", "words"),
    [
        (SecAgg(), "masking really ran, for a server that follows the protocol (semi-honest)"),
        (SecAgg(active=True), "masking really ran, for a server that may lie (active)"),
        (SecAgg(run="accounted"), "masking was accounted for only, so whoever ran this saw every message"),
    ],
)
def test_folder_and_checkpoint_say_what_ran(tmp_path: Path, secagg: SecAgg, words: str) -> None:
    report = report_of_checkpoint(fit(tmp_path, secagg), None, 1e-5, secagg=False)
    assert report.secure_aggregation and report.protocol.startswith(words)
    saved = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert saved["protocol"] == report.protocol == secagg.statement
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["secure_aggregation"] == report.protocol and summary["aborted_rounds"] == 0
    server, behind = (next(x for x in summary["privacy"] if x.startswith(a.value)) for a in SERVERS)
    assert "the server is handed the sum only" in server and words in server and words in behind


SERVERS = (Adversary.SERVER, Adversary.SECAGG_SERVER)


def test_without_it_nothing_is_claimed_unless_assumed(tmp_path: Path) -> None:
    path = fit(tmp_path, None)
    plain, assumed = (report_of_checkpoint(path, None, 1e-5, secagg=flag) for flag in (False, True))
    assert "secure aggregation is off" in plain.row(Adversary.SECAGG_SERVER).reason
    assert assumed.protocol == "assumed here, no protocol was run"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["secure_aggregation"] == "off"


def test_a_configuration_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of_config(str(CONFIGS / "digits_secagg.yaml"), 1, 1e-5, secagg=False)
    assert report.protocol == SecAgg().statement
    assert report_of_config(str(CONFIGS / "digits_byzantine.yaml"), 1, 1e-5, secagg=False).protocol == ""
    assert main([str(CONFIGS / "digits_secagg.yaml"), "--rounds", "1"]) == 0
    assert "masking really ran" in " ".join(capsys.readouterr().out.split())
