"""`fedq report`: the page of real runs, its numbers and its errors."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from shutil import copytree

import pytest

import lightning_fedq as fedq
from lightning_fedq import cli
from lightning_fedq.commands.report import write_report
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.html.page import Line, line_chart
from tests.callbacks.runs import small_data, small_model, small_run
from tests.changed import changed
from tests.digits_run import make_trainer


def main(words):
    return cli.main(["report", *words])


_VOID = {"meta", "img", "source", "br"}


class Page(HTMLParser):
    """Elements, attributes and words of a page; refuses one whose elements do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.values, self.words = list[str](), list[str](), list[str](), list[str]()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [f"{name}={value}" for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def asked_for(target, folder, *budget, mechanism=fedq.GaussianNoise(1.0, 1.0), rounds=3, **settings):  # noqa: B008
    """A run of four clients with a target."""
    federated = fedq.Federated(mechanism, 4, clients_per_step=1, privacy=target, **settings)
    trainer = make_trainer(federated, folder, *budget, max_epochs=rounds)
    trainer.fit(small_model(), datamodule=small_data())


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """A run that was asked for epsilon 400 behind masks that run."""
    root = tmp_path_factory.mktemp("private")
    target = fedq.PrivacyTarget(400.0, 1e-5, "secagg_server")
    asked_for(target, fedq.RunFolder("asked", str(root), show=False), secure_aggregation=fedq.SecAgg())
    return root / "asked"


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    root = tmp_path_factory.mktemp("seeded")
    small_run(fedq.RunFolder("seeded <b>", str(root), show=False), mechanism=fedq.LayeredGaussian(1.0, 1.0))
    return root / "seeded <b>"


def privacy_of(folder):
    return json.loads((folder / "privacy.json").read_text())


def test_a_page_says_what_the_summary_and_the_document_say(private):
    assert main([str(private)]) == 0
    html, summary = (private / "report.html").read_text(), json.loads((private / "summary.json").read_text())
    page, privacy = Page(html), privacy_of(private)
    asked, points = privacy["asked"], privacy["by_round"]
    assert asked["epsilon"] == 400.0 and asked["met"] and asked["adversary"] == "SECAGG_SERVER"
    assert f"{summary['metrics']['val_acc']:.4g}" in page.text
    assert f"uplink {summary['bits_per_parameter']:.4g}, downlink {privacy['bits']['down']:.3g}" in page.text
    assert privacy["headline"] in page.text and "Asked for epsilon 400 at delta 1e-05, against" in page.text
    assert "asked for 400 over the run: met" in page.text and privacy["caveat"] in page.text
    assert page.tags.count("img") == 3  # metric, epsilon, bits
    assert "alt=epsilon spent by round: asked, target 400" in page.values
    assert [round for round, _ in points] == [1, 2, 3]
    [row] = [row for row in privacy["rows"] if row["asked"]]
    assert points[0][1] < points[1][1] < points[2][1] == pytest.approx(row["epsilon"], rel=1e-12)
    table = [line.split(",") for line in (private / "clients" / "holdings.csv").read_text().splitlines()]
    assert len(table) == 5 and sum(int(row[1]) for row in table[1:]) == 60
    assert "clients/holdings.csv" in (private / "privacy.md").read_text()  # it says what else it wrote


def test_every_page_is_drawn_from_privacy_json_and_never_from_text(private, tmp_path, capsys):
    copytree(private, tmp_path / "run")
    drawn = []
    for name in ("privacy.md", "report.md"):
        (tmp_path / "run" / name).write_text("nothing to see")
    for out in (private, tmp_path / "run"):
        assert cli.main(["privacy", str(out), "--out", str(tmp_path / "again")]) == 0
        drawn.append(capsys.readouterr().out)
        assert (tmp_path / "again" / "privacy.md").read_text() == (private / "privacy.md").read_text()
        assert (tmp_path / "again" / "privacy.json").read_text() == (private / "privacy.json").read_text()
    assert drawn[0] == drawn[1] and "What was protected, and from whom" in drawn[0]


def test_the_file_of_a_stranger_is_refused_in_a_line_and_nothing_is_drawn(private, tmp_path, capsys):
    for name, text, words in (
        ("types", changed((private / "privacy.json").read_text(), ('"dim": ', '"dim": "x", "of": ')), "dim"),
        ("half", (private / "privacy.json").read_text()[:500], "privacy.json can't be read"),
    ):
        copytree(private, tmp_path / name)
        (tmp_path / name / "report.html").unlink(missing_ok=True)
        (tmp_path / name / "privacy.json").write_text(text)
        for command in ("report", "privacy"):
            assert cli.main([command, str(tmp_path / name)]) == 2
            shown = capsys.readouterr()
            assert words in shown.err.splitlines()[0] and not shown.out
        assert not (tmp_path / name / "report.html").exists()


def test_a_folder_of_an_earlier_version_has_its_curves_and_a_line_on_its_privacy(private, tmp_path, capsys):
    copytree(private, old := tmp_path / "old")
    (old / "privacy.json").write_text(json.dumps({"rows": [], "protocol": "masking really ran"}))
    line = "Compute it again: `fedq privacy CONFIG`, or `fedq privacy CKPT`"
    for folders, curves in (([old], 2), ([private, old], 3)):
        write_report(folders, tmp_path / "page.html")
        page = Page((tmp_path / "page.html").read_text())
        assert line in page.text and page.tags.count("img") == curves
        assert "really ran" not in page.text
    assert cli.main(["privacy", str(old)]) == 2
    assert line in capsys.readouterr().err


def test_the_page_needs_nobody_else(private, seeded, tmp_path):
    write_report([private, seeded], tmp_path / "both.html")
    html = (tmp_path / "both.html").read_text()
    text = Page(html).text
    assert "epsilon spent, server behind secure aggregation" in text  # one adversary for all curves
    assert text.count("not drawn") == 1
    assert not re.search(r"https?:|src=(?!\"data:)|srcset=(?!\"data:)|url\(|@import|<script", html)
    assert "prefers-color-scheme: dark" in html and "@media print" in html


def test_a_run_with_a_seed_is_never_called_private(seeded, tmp_path):
    write_report([seeded], tmp_path / "one.html")
    page = Page((tmp_path / "one.html").read_text())
    assert "NOTHING IS PRIVATE" in page.text and "∞ no guarantee" in page.text
    assert "epsilon spent" not in page.text  # no empty panel
    assert {row["epsilon"] for row in privacy_of(seeded)["rows"]} == {"inf"}


def test_a_target_a_round_is_no_epsilon_of_the_run(tmp_path):
    """What is met in every round is said as such, and beside it what all rounds together come to."""
    target = fedq.PrivacyTarget(4.0, 1e-5, "server", "round")
    asked_for(target, fedq.RunFolder("each", str(tmp_path), show=False), mechanism=fedq.LDPQ(1.0))
    privacy = privacy_of(tmp_path / "each")
    [row] = [row for row in privacy["rows"] if row["asked"]]
    assert privacy["asked"]["met"] and privacy["asked"]["spent"] <= 4.0 < row["epsilon"]
    assert row["epsilon"] == privacy["by_round"][-1][1]
    write_report([tmp_path / "each"], tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert "in every round" in privacy["headline"] and privacy["headline"] in page.text
    assert "asked for 4 over a round: met" in page.text
    assert f"{format_epsilon(row['epsilon'])} {row['verdict']}" in page.text
    assert not any("target 4" in value for value in page.values)  # the curve is of the run


@pytest.mark.filterwarnings("ignore:Masking is accounted for only:UserWarning")
def test_masks_that_did_not_run_meet_no_target(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    masks, target = fedq.SecAgg(simulation="counted"), fedq.PrivacyTarget(400.0, 1e-5, "secagg_server")
    asked_for(target, fedq.RunFolder("counted", show=False), rounds=2, secure_aggregation=masks)
    assert main(["runs/counted"]) == 0
    page = Page(Path("runs/counted/report.html").read_text())
    assert "NOT met: masks were only counted, so whoever ran this saw every message" in page.text
    assert "not run no guarantee" in page.text and "asked for 400 over the run: NOT met" in page.text
    assert cli.main(["compare", "runs/counted"]) == 0
    assert "server behind secure aggregation, asked for 400 over the run: NOT met" in capsys.readouterr().out


def test_a_run_has_one_delta(tmp_path):
    """Its target's; a budget at a larger one, at which epsilon is smaller, is refused at the start."""

    def fit(asked, *budget):
        folder = fedq.RunFolder("small", str(tmp_path), show=False)
        asked_for(fedq.PrivacyTarget(4.0, asked, "server"), folder, *budget, rounds=1)

    with pytest.raises(ValueError, match=r"need the same delta, got \[1e-09, 0.01\]"):
        fit(1e-9, fedq.PrivacyBudget(9.0, 1e-2, "server"))
    fit(1e-9)
    privacy = privacy_of(tmp_path / "small")
    assert privacy["delta"] == 1e-9 and {row["delta"] for row in privacy["rows"]} == {1e-9}
    assert privacy["asked"]["met"] and "at delta 1e-09" in privacy["headline"]


def test_several_runs_stand_side_by_side(private, seeded, tmp_path):
    write_report([private, seeded, private], tmp_path / "all.html")
    page = Page((tmp_path / "all.html").read_text())
    for name in ("asked", "seeded <b>", "asked (3)"):
        assert page.text.count(name) >= 4
    assert page.tags.count("b") == 6  # three values and three headlines, none from a name


@pytest.mark.parametrize("missing", ["metrics.csv", "summary.json", "privacy.json"])
def test_a_folder_that_is_no_run_is_refused(private, missing, tmp_path, capsys):
    for name in {"metrics.csv", "summary.json", "privacy.json"} - {missing}:
        (tmp_path / name).write_text((private / name).read_text())
    assert main([str(tmp_path)]) == 2
    assert f"There is no {missing} in" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_metric_that_nobody_logged_is_refused(private, tmp_path):
    with pytest.raises(ValueError, match=r"No run logged 'val_auc'\. The runs logged .*val_acc"):
        write_report([private], tmp_path / "page.html", "val_auc")


def test_a_chart_says_what_it_draws_and_leaves_out_what_is_infinite():
    """A dollar sign is no formula, and a limit alone no chart."""
    one = Line("a$b$", [(1, 0.1), (2, 900.0), (3, float("inf"))], 0)
    limit = Line("target 4", [(0, 4.0)], 0, is_limit=True)
    page = Page(line_chart([one, limit], "a by round"))
    assert "alt=a by round: a$b$, target 4" in page.values
    light, dark = (value for value in page.values if "data:image/png;base64," in value and len(value) > 2000)
    assert light.split(",")[1] != dark.split(",")[1]
    assert line_chart([Line("a", [(1, float("inf"))], 0), limit], "nothing") == ""


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</b>'\"&"])
def test_nothing_that_a_run_wrote_becomes_an_element(private, evil, tmp_path):
    """Names of metrics, settings, reasons and columns are anybody's words: a report is sent around."""

    def spoiled(value):
        if isinstance(value, dict):
            return {key: spoiled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoiled(item) for item in value]
        return value + evil if isinstance(value, str) and value != "inf" else value

    folder = tmp_path / "run"
    folder.mkdir()
    summary = json.loads((private / "summary.json").read_text())
    keys = {"adversary", "neighbours", "cohorts"}
    summary = {**spoiled(summary), "name": evil, "metrics": {f"test{evil}": 1.0, evil: 2.0}}
    privacy = privacy_of(private)
    rows = [{**spoiled(row), **{key: row[key] for key in keys}} for row in privacy["rows"]]
    kinds = {spoiled(sentence): terms for sentence, terms in privacy["kinds"].items()}
    privacy = {**privacy, "rows": rows, "mechanism": evil, "kinds": kinds}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "privacy.json").write_text(json.dumps(privacy))
    (folder / "config.yaml").write_text(evil)
    quoted = '"' + evil.replace('"', '""') + '"'
    table = changed((private / "metrics.csv").read_text(), ("val_acc", quoted))
    (folder / "metrics.csv").write_text(table)
    write_report([folder], tmp_path / "page.html", evil)
    write_report([private], tmp_path / "plain.html")
    page, plain = (Page((tmp_path / name).read_text()) for name in ("page.html", "plain.html"))
    allowed = {*plain.tags, "details", "summary", "pre", "p"}
    assert not set(page.tags) - allowed and page.text.count(evil) >= 6  # settings, rows, columns
    assert not any(value.startswith("on") for value in page.values)
