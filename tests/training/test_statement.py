"""Every fit says at its end what was protected from whom, without a callback beside `Federated`."""

import json
import re

import pytest

import lightning_fedq as fedq
from lightning_fedq.cli import main
from lightning_fedq.privacy.verdict import format_epsilon
from tests.callbacks.steps import EndsAfter
from tests.digits_run import Classifier, Digits, make_trainer

DDG = fedq.DistributedDiscreteGaussian(0.1, 0.5, 0.01)


NOTHING = "Nothing useful is promised at delta 1e-05 over 2 rounds: the smallest epsilon is"


def said(caplog, federated, *callbacks):
    """The lines on privacy at the end of a fit."""
    with caplog.at_level("INFO"):
        make_trainer(federated, *callbacks).fit(Classifier(), datamodule=Digits(200))
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.startswith(("privacy of", "privacy:", "privacy over", "also:"))]


@pytest.mark.parametrize(
    ("mechanism", "settings", "words"),
    [
        (fedq.FedAvg(), {}, "no client is protected, because FedAvg has no guarantee against any adversary"),
        (fedq.LDPQ(0.1), {"seed": 1}, "nothing is private, because the keys come from a seed"),
        (fedq.LDPQ(4.0), {}, NOTHING),
        (fedq.CorBin(5.0, shared_bits=5), {}, NOTHING),
    ],
)
def test_a_run_that_protects_nobody_says_so(mechanism, settings, words, caplog):
    (line,) = said(caplog, fedq.Federated(mechanism, 10, **settings))
    assert words in line


def test_a_target_is_met_or_not_and_what_holds_beside_it_is_said(caplog):
    target = fedq.PrivacyTarget(8.0, 1e-5, "secagg_server")
    first, second = said(caplog, fedq.Federated(DDG, 20, secure_aggregation=fedq.SecAgg(), privacy=target))
    assert first.startswith("privacy: Asked for epsilon 8 at delta 1e-05, against the server behind")
    assert "met, 8 spent over 2 rounds" in first
    assert "8 against an outsider" in second
    assert second.endswith(
        "; if masks are broken, nothing useful against the server that sees every message, "
        "an eavesdropper on one uplink, the server with a client's partner"
    )


def test_without_a_target_the_smallest_epsilon_comes_first(caplog):
    first, _ = said(caplog, fedq.Federated(DDG, 20, secure_aggregation=fedq.SecAgg()))
    assert (
        first.startswith("privacy: No target. The smallest epsilon at delta 1e-05 over ")
        and "against" in first
    )


def test_no_row_behind_masks_that_did_not_run(caplog):
    lines = said(caplog, fedq.Federated(fedq.LDPQ(0.01), 20))
    assert lines and not any("behind secure aggregation" in line for line in lines)


@pytest.mark.filterwarnings("ignore:.*Masking is accounted for only")
def test_a_target_that_is_not_met_is_the_headline_and_masks_that_did_not_run_have_no_epsilon(
    tmp_path, capsys
):
    """Of the printed table, `report.md`, the HTML page and `fedq compare`, which also shows an honest run."""
    target, names = fedq.PrivacyTarget(8.0, 1e-5, "secagg_server"), ("counted", "without")
    for name, masks in zip(names, (fedq.SecAgg(simulation="counted"), None), strict=True):
        federated = fedq.Federated(DDG, 20, secure_aggregation=masks, privacy=target if masks else None)
        folder = fedq.RunFolder(name, root=str(tmp_path))
        make_trainer(federated, folder).fit(Classifier(), datamodule=Digits(200))
        written = (tmp_path / name / "report.md").read_text()
        words = "NOT met: masks were only counted" if masks else "aggregation, which was not there"
        assert words in written
        assert main(["report", str(tmp_path / name), "--out", str(tmp_path / "page.html")]) == 0
        page = (tmp_path / "page.html").read_text()
        assert ("NOT met" in page) == bool(masks) and "not run" in page
    capsys.readouterr()
    runs = [str(tmp_path / name) for name in names]
    options = ["--adversary", "secagg_server", "--monitor", "update_norm", "--out", str(tmp_path / "both")]
    assert main(["compare", *runs, *options]) == 0
    table = {row["run"]: row for row in json.loads((tmp_path / "both" / "table.json").read_text())["runs"]}
    assert table["without"]["epsilon"] == "not run" and "NOT met" in table["counted"]["view"]


def test_samples_have_a_line_of_their_own(caplog):
    lines = said(caplog, fedq.Federated(fedq.FedAvg(), 4), fedq.DPSGD(1.0, 1.0, delta=1e-3))
    assert lines[0].startswith("privacy of a sample: epsilon ") and "delta 0.001" in lines[0]


def test_the_page_of_rows_begins_with_their_guarantee(tmp_path, capsys):
    """The page of FedAvg with DPSGD began "Nothing is promised"; 16.53 and 16.6 were one number."""
    sgd, folder = fedq.DPSGD(1.0, 1.0, delta=1e-3), fedq.RunFolder("rows", str(tmp_path))
    make_trainer(fedq.Federated(fedq.FedAvg(), 4), sgd, folder).fit(Classifier(), datamodule=Digits(200))
    saved = json.loads((tmp_path / "rows" / "privacy.json").read_text())
    epsilon = format_epsilon(saved["samples"]["epsilon"])
    start = f"Each row of a client's training data has epsilon {epsilon} at delta 0.001 over the run"
    assert saved["headline"].startswith(start)
    assert "No client as a whole is covered: updates are sent as they are." in saved["headline"]
    for page in ("report.md", "privacy.md"):
        written = (tmp_path / "rows" / page).read_text()
        assert start in written and "Nothing is promised" not in written
        assert "rows of DPSGD" in written and "you, with rows_per_person" in written
    assert f"| dp/epsilon | {epsilon} |" in (tmp_path / "rows" / "report.md").read_text()
    assert start in " ".join(capsys.readouterr().out.split())


def test_a_target_of_a_round_is_said_between_any_two_updates(caplog):
    """SIGM's claim is about an update and zero, of which any two updates are two steps apart."""
    target = fedq.PrivacyTarget(8.0, 1e-5, "outsider", "round")
    mechanism = fedq.SIGM(0.1, 1.0, 0.5)
    first, _ = said(caplog, fedq.Federated(mechanism, 20, privacy=target))
    (spent,) = re.findall(r"met, ([\d.]+) spent", first)
    assert "in every round" in first and 7.9 <= float(spent) <= 8.0


def test_a_target_is_said_with_the_rounds_that_were_charged(caplog):
    """A run may end before the rounds that its noise was made for."""
    target = fedq.PrivacyTarget(8.0, 1e-5, "secagg_server")
    federated = fedq.Federated(DDG, 20, secure_aggregation=fedq.SecAgg(), privacy=target)
    first, _ = said(caplog, federated, EndsAfter(1))
    assert "met," in first and "spent over a round (" in first and "2 rounds" not in first
