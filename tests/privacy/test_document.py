"""One document: every output says the same in the same order and tense, and a program reads the same."""

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from lightning_fedq.mechanisms import LDPQ, SIGM, FedAvg, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.document import AT_THE_END, MARK, PAGE, WHOLE, Table, caveat, document, headline
from lightning_fedq.privacy.report import Bits, TargetOutcome
from lightning_fedq.privacy.report_file import SCHEMA, from_json, to_json
from lightning_fedq.privacy.report_rows import (
    FAILING,
    ORDER,
    common_adversary,
    report_rows,
    summarise_privacy,
)
from lightning_fedq.reports.layouts import html, markdown, terminal
from lightning_fedq.reports.runs import describe_bits, print_summary
from tests.described import page
from tests.privacy.test_report import report

ASKED = TargetOutcome("SECAGG_SERVER", 8.0, "run", 7.9, True)
BITS = Bits(True, 4.63, 0.504, 1.56, 35.6, 6.0, 34.6)
STATES = ("planned", "running", "ended")


def whole(secagg=True, mechanism=None, state="ended", masks="ran", **settings):
    mechanism = mechanism or RotatedCoins(1.0, epsilon_per_bit=0.3)
    made = report(mechanism, 1000, 500, rounds=10, secure_aggregation=secagg, **settings)
    return replace(made, state=state, masks=masks if secagg else "none")


def screen(made, depth=WHOLE):
    console = Console(width=80, record=True, file=StringIO())
    terminal(console, *document(made, depth))
    return console.export_text()


def test_what_was_asked_for_comes_first_and_marked_and_what_fails_last():
    made = replace(whole(), asked=ASKED)
    found = report_rows(made)
    assert [line.group for line in found] == ["as it was run"] * 3 + [FAILING] * 3
    assert found[0].row.adversary == "SECAGG_SERVER" and found[0].asked and found[0].useful
    assert all(line.when == "masks are broken" and not line.useful for line in found[3:])
    assert f"**{MARK}server behind secure aggregation** |" in page(made)


@pytest.mark.parametrize(("masks", "word"), [("counted", "only counted"), ("none", "not there")])
def test_a_target_behind_masks_that_did_not_run_is_first_and_not_met(masks, word):
    made = replace(whole(masks != "none", masks=masks), asked=replace(ASKED, met=False))
    first = report_rows(made)[0]
    assert first.asked and first.group == f"behind secure aggregation, which was {word}"
    assert f": NOT met: masks were {word}" in headline(made)
    groups = {line.row.adversary: line.group for line in report_rows(made)}
    assert groups["SERVER"] == groups["EAVESDROPPER"] == groups["OUTSIDER"] == "as it was run"
    found = summarise_privacy(made)
    assert (found.who, found.printed, found.met) == ("SECAGG_SERVER", "not run", False)
    assert found.label == "target NOT met"
    assert summarise_privacy(replace(made, asked=None), "SECAGG_SERVER").label == "masks not run"


def test_every_adversary_has_one_line_with_the_epsilon_of_its_row():
    made = whole()
    assert sorted(line.row.adversary for line in report_rows(made)) == sorted(Adversary.__members__)
    assert set(ORDER) == set(Adversary)
    for line in report_rows(made):
        value = float("inf") if line.epsilon == "∞" else float(line.epsilon)
        assert value >= line.row.epsilon * (1 - 1e-9)
        row = line.row
        assert summarise_privacy(made, row.name)[:3] == (row.name, row.epsilon, row.verdict)


@pytest.mark.parametrize(
    ("state", "words", "never"),
    [
        (
            "planned",
            ["will protect", "as it will run", "to be met, 7.9 planned", "10 to come", "will hold"],
            [r"\bwas\b", r"\bwere\b", r"\bran\b", r"\bspent\b", r"[^e] met\b"],
        ),
        ("running", ["so far", "as it has run so far", "10 charged so far", "program holds"], [r"\bwill\b"]),
        ("ended", ["What was protected", "as it was run", "met, 7.9 spent", "10 charged"], [r"\bwill\b"]),
    ],
)
def test_the_tense_is_that_of_the_state(state, words, never):
    """In all of the document, what an epsilon is and what mechanisms' methods are called aside."""
    made = replace(whole(state=state, masks="asked" if state == "planned" else "ran"), asked=ASKED, bits=BITS)
    text = page(made)
    assert all(word in text for word in words), text
    short = markdown(*document(made, PAGE))
    assert not [word for word in never if re.search(word, short)], short


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("masks", ["ran", "counted", "assumed", "none"])
def test_before_a_run_nothing_was_protected_whatever_its_masks(state, masks):
    masks = "asked" if (state, masks) == ("planned", "ran") else masks
    made = whole(masks != "none", state=state, masks=masks)
    asked = replace(ASKED, met=made.masked)
    text = markdown(*document(replace(made, asked=asked), PAGE))
    assert ("What was protected" in text) == (state == "ended")
    if state == "planned":
        assert not re.search(r"\b(was|ran|spent|held|saw)\b|: met", text), text
        assert ("will NOT be met" in text) != made.masked


@pytest.mark.parametrize("secure_keys", [True, False])
def test_all_outputs_hold_the_same_table(secure_keys):
    made = replace(whole(secure_keys=secure_keys), asked=ASKED, bits=BITS)
    [table] = [block for block in document(made)[1][1].blocks if isinstance(block, Table)]
    drawn, text = str(html(document(made)[1])), screen(made)
    for row in table.rows:
        assert row[0] in page(made) and row[0] in text and row[0].replace("'", "&#39;") in drawn
    found = json.loads(to_json(made))
    rows = found["rows" if secure_keys else "with_secure_keys"]
    groups = {line.row.name: line.group for line in report_rows(made)}
    assert {row["name"]: row["group"] for row in rows} == groups
    assert [row["name"] for row in rows if row["asked"]] == ["SECAGG_SERVER"]
    assert found["schema"] == SCHEMA and found["headline"] == headline(made)
    if not secure_keys:
        assert "NOTHING IS PRIVATE" in headline(made) and "had keys been secret" in text
        assert {row["epsilon"] for row in found["rows"]} == {"inf"}, "no program is told other keys' epsilon"
        assert summarise_privacy(made).label == "target NOT met" or summarise_privacy(made).printed == "∞"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("depth", [AT_THE_END, PAGE])
def test_a_short_output_is_the_beginning_of_the_whole_word_for_word(state, depth):
    made = replace(whole(state=state), asked=ASKED, bits=BITS)
    assert page(made).startswith(markdown(*document(made, depth)))
    assert screen(made).startswith(screen(made, depth))
    assert str(html(document(made)[1])).startswith(str(html(document(made, depth)[1])))


@pytest.mark.parametrize("masks", ["ran", "counted", "none"])
@pytest.mark.parametrize("secure_keys", [True, False])
def test_the_end_of_a_fit_has_25_lines_of_80_columns(masks, secure_keys, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    made = whole(masks != "none", masks=masks, secure_keys=secure_keys)
    made = replace(made, asked=replace(ASKED, met=made.masked), bits=BITS)
    metrics = dict.fromkeys(("train_loss", "val_loss", "val_acc", "test_loss", "test_acc"), 0.12345)
    print_summary({"name": "digits", "metrics": metrics}, made, tmp_path)
    shown_lines = capsys.readouterr().out.splitlines()
    assert len(shown_lines) <= 25 and max(map(len, shown_lines[:-1])) <= 80
    text = " ".join(" ".join(shown_lines).split())
    assert shown_lines[0].endswith("val_loss 0.1235, val_acc 0.1235, test_loss 0.1235, test_acc 0.1235")
    files = f"{tmp_path}/: report.md, privacy.md, model.ckpt"
    assert all(words in text for words in (headline(made), caveat(made), describe_bits(made), files))


@pytest.mark.parametrize("mechanism", [None, LDPQ(0.1), FedAvg(), SIGM(1.0, 8.0)])
@pytest.mark.parametrize("secure_keys", [True, False])
def test_json_is_read_back_as_it_was(mechanism, secure_keys):
    made = whole(mechanism is None, mechanism=mechanism, secure_keys=secure_keys)
    asked = replace(ASKED, spent=float("inf"), met=False)
    made = replace(made, asked=asked, bits=BITS, by_round=((1, 2.5), (10, 8.0)), ended="by a test")
    assert from_json(to_json(made)) == made


def spoiled(place, value):
    """A document with one value replaced."""
    found = json.loads(to_json(replace(whole(), asked=ASKED, bits=BITS)))
    *way, last = place
    inner = found
    for step in way:
        inner = inner[step]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "can't be read: Expecting"),
        ("[]", r"it can't be \[\]"),
        (spoiled(["schema"], "fedq-privacy/1"), "of another version of this package. Compute it again"),
        (spoiled(["dim"], "1"), "dim can't be '1'"),
        (spoiled(["dim"], True), "dim can't be True"),
        (spoiled(["delta"], "<script>"), "delta can't be '<script>'"),
        (spoiled(["state"], "over"), "state can't be 'over'"),
        (spoiled(["samples"], "evil"), "samples can't be 'evil'"),
        (spoiled(["asked", "spent"], [1]), r"spent can't be \[1\]"),
        (spoiled(["asked", "adversary"], "SOMEBODY"), "the target is about a row that is missing"),
        (spoiled(["rows", 0, "adversary"], "SERVER"), "there must be one row for each adversary"),
        (spoiled(["rows", 0, "epsilon_run"], None), "rows has no epsilon_run"),
        (spoiled(["rows", 0, "neighbours"], "none"), "neighbours has an unknown value"),
        (spoiled(["rows"], {}), "rows can't be {}"),
        (spoiled(["mechanism"], "\x1b[2J"), "mechanism can't be"),
        (spoiled(["by_round"], [[1]]), "by_round can't be"),
    ],
)
def test_a_file_of_a_stranger_is_refused_in_a_line(text, words):
    with pytest.raises(ValueError, match=words) as refused:
        from_json(text)
    assert "\n" not in str(refused.value)


def test_bits_stand_with_their_direction_their_masks_and_what_they_save_both_ways():
    text = describe_bits(replace(whole(), bits=BITS))
    assert "up 4.63 masked (0.504 unmasked) + 1.56 keys and shares = 6.19; down 35.6; both ways 41.8" in text
    assert "35% less than 32 each way. All clients, 10 rounds: 6 MB up, 34.6 MB down." in text
    text = describe_bits(replace(whole(False), bits=replace(BITS, keys=0.0, update=40.0)))
    assert "up 40 unmasked; down 35.6; both ways 75.6, 18% more than 32 each way" in text
    plan = Bits(False, 4.04, 0.5, down=32.0)
    text = describe_bits(replace(whole(masks="asked"), bits=plan))
    assert "up about 4.04 masked (0.5 unmasked), keys and shares on top; down about 32" in text
    assert text.endswith("less than 32 each way, before keys and shares.")
    assert "not known" in describe_bits(replace(whole(), bits=replace(BITS, update=None)))
    assert describe_bits(whole()) == ""


def test_what_has_to_hold_stands_in_the_fields_words_with_who_sees_to_it():
    text = markdown(*document(whole(), PAGE))
    assert "| other clients run their coins | nobody can check; you say how many lie | every row |" in text
    collusion = "| bounded collusion: the server does not collude with other clients |"
    assert f"{collusion} nobody can check; you" in text
    assert "the other clients' updates are arbitrary" not in text, "nothing has to hold for that"
    full = page(whole()).partition("## What has to hold, in full")[2]
    for row in whole().rows:
        assert all(sentence in full for sentence in row.assumptions)


def test_settings_are_named_for_what_they_are():
    text = page(whole())
    assert "| settings | clip_norm=1.0, epsilon_per_bit=0.3," in text


def test_runs_are_shown_towards_whom_all_were_asked_about():
    asked, other = replace(whole(), asked=ASKED), replace(whole(), asked=replace(ASKED, adversary="SERVER"))
    assert common_adversary([asked, whole()]) == "SECAGG_SERVER"
    assert common_adversary([asked, other]) == "OUTSIDER"
    assert common_adversary([whole(), whole()]) == whole().about.name == "SECAGG_SERVER"
    assert summarise_privacy(whole(), "OUTSIDER, cohorts secret").printed == "-"


def test_assumptions_and_the_caveat_are_about_simulations():
    made = whole()
    for text in (page(made), screen(made), str(html(document(made)[1]))):
        assert "What has to hold" in text and "one program held" in text
    assert caveat(replace(made, simulated=False)) == ""


def test_the_page_says_when_by_which_version_and_of_which_files():
    made = whole()
    origin = replace(made.origin, model="ab" * 32)
    text = page(replace(made, origin=origin))
    assert f"{origin.made}, lightning_fedq {origin.version}" in text and "ab" * 32 in text
    assert "config sha256" not in text
