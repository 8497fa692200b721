"""The code in docs/threat_model.md runs, and docs/bench.md has the accountant's figures."""

import contextlib
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

import lightning_fedq.privacy
from lightning_fedq import FixedSize, Poisson
from lightning_fedq.mechanisms import LDPQ, AugCorBin, BandedGaussian
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy import report
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.assumptions import KINDS, Assumption, kinds_of
from lightning_fedq.privacy.document import document
from lightning_fedq.privacy.planning import Problem, make_plan_context
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.report_file import from_json, to_json
from lightning_fedq.privacy.run import ASSUMED
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from tests.contract.test_mechanisms import ROWS
from tests.described import Setting

DOCS = Path(__file__).parents[2] / "docs"


def test_every_block_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "threat_model.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        exec(block, {})
    assert "# What this run will protect, and from whom" in capsys.readouterr().out


@pytest.mark.slow  # the same functions as `test_accounting.test_table_of_the_specification`, 3 s
def test_the_tables_numbers_are_ours():
    """Every cell of the table beside the specification."""
    checked = 0
    for line in (DOCS / "bench.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").replace("\\|", "").split(" | ")]
        if len(cells) != 10 or not re.fullmatch(r"[\d.e]+", cells[0]):
            continue
        clients, gamma, alone, epsilon, dim, rounds = (float(cell) for cell in cells[:6])
        found = behind(LDPQ(epsilon), int(alone), int(dim), int(rounds))
        assert found == pytest.approx(float(cells[7]), rel=2e-3)
        if cells[9][0] not in "-∞":
            found = behind(AugCorBin(epsilon, 5, gamma), int(clients), int(dim), int(rounds))
            assert found == pytest.approx(float(cells[9]), rel=2e-3)
        if re.match(r"[.\d]", cells[6]):
            assert float(cells[7]) == pytest.approx(float(cells[6]), rel=5e-3)
        checked += 1
    assert checked == 6


def behind(mechanism, clients, dim, rounds):
    setting = Setting(make_plan_context(mechanism, clients, dim), rounds, 1e-5, secure_aggregation=True)
    return setting.spent(setting.claims(mechanism)[Adversary.SECAGG_SERVER], rounds).epsilon


# ---- every assumption of a privacy report has a kind, and SECURITY.md says who is responsible -----------
PAGE = (Path(lightning_fedq.privacy.__file__).parents[2] / "SECURITY.md").read_text()
MASKS = [
    SecAgg(),
    SecAgg(active=True),
    SecAgg(max_colluding_fraction=0.2),
    SecAgg(degree=58, max_colluding_fraction=0.05, max_dropped_fraction=0.1),
    SecAgg(max_colluding_fraction=0.45),
    None,
]
SAMPLINGS = [
    {},
    {"dropout_probability": 0.2},
    {"law": FixedSize(60)},
    {"law": FixedSize(60, secret=True)},
    {"may_be_silent": True},
]


def runs():
    """Runs of all mechanisms under many settings."""
    for mechanism, (number, masks) in itertools.product(ROWS, enumerate(MASKS)):
        for settings in SAMPLINGS[number % 2 :: 2]:
            secret = "law" in settings and settings["law"].secret
            target = PrivacyTarget(8.0, 1e-5, "outsider" if secret or masks is None else "secagg_server")
            planned = Problem(100, 40, 3, target, masks or SecAgg(), **settings).run(mechanism)
            for changed in ({}, {"num_byzantine": 2}, {"plain_sum": False}, {"secure_sum": ASSUMED}):
                with contextlib.suppress(ValueError):  # masks of the run count other colluders
                    yield replace(planned, threat=replace(planned.threat, **changed))


def of_own_draws():
    problem = Problem(100, 40, 3, PrivacyTarget(8.0, 1e-5, "outsider"), law=Poisson(10))
    return privacy_report(problem.run(BandedGaussian(1.0, 1.0, band=1)), 1e-5)


def sentences():
    """Assumptions of the claims of these runs, and of reports with masks and with secret cohorts."""
    for planned in runs():
        with contextlib.suppress(ValueError, TypeError):  # refused combinations
            claims = Account(planned, 1e-5).claims().values()
            yield from (sentence for claim in claims for sentence in claim.assumptions)
    for masks in filter(None, MASKS):
        target = PrivacyTarget(8.0, 1e-5, "secagg_server")
        made = privacy_report(Problem(100, 40, 3, target, masks).run(LDPQ(1.0)), 1e-5)
        yield from (sentence for row in made.rows for sentence in row.assumptions)
    yield from of_own_draws().secret.assumptions
    yield from report.CONDITIONS
    yield report.OWN_CODE


def test_each_assumption_has_a_kind_from_the_table():
    """S11 was in no row of the table, and the page said "you"."""
    found, terms = set(), set()
    for sentence in sentences():
        assert isinstance(sentence, Assumption) and sentence.kinds, sentence
        found.add(str(sentence))
        terms |= {kind.term for kind in sentence.kinds}
    assert len(found) > 80 and terms == {kind.term for kind in KINDS}


def test_the_conditions_of_secret_cohorts_are_the_librarys():
    made = of_own_draws()
    [noise] = [sentence for sentence in made.secret.assumptions if sentence.startswith("S11")]
    assert [kind.who for kind in kinds_of(noise)] == ["library; you: S6, S8 and S9"]
    _, parts = document(made)
    assert "S11: noise is the adder's alone" in str(parts)
    [rows] = [block.rows for part in parts if part.title == "What has to hold" for block in part.blocks[:1]]
    held = "secrecy of the sample: its conditions S1, S2, ...", "library; you: S6, S8 and S9"
    assert held in {row[:2] for row in rows}


def test_the_security_page_has_each_kind_and_who_is_responsible():
    for kind in KINDS:
        assert f"| {kind.term.rstrip(':')} | {kind.duty} |" in PAGE
        long = {"library": "Library", "you": "You", "nobody": "Nobody", "": "Nothing"}
        assert kind.duty.startswith(long[re.split(r"[,;: ]", kind.who)[0]]), kind


def test_a_file_keeps_the_kinds_and_an_unknown_one_is_refused():
    made = privacy_report(Problem(100, 40, 3, PrivacyTarget(8.0, 1e-5, "server")).run(LDPQ(1.0)), 1e-5)
    read, kept = (
        [[kinds_of(one) for one in row.assumptions] for row in report.rows]
        for report in (from_json(to_json(made)), made)
    )
    assert read == kept
    forged = to_json(made).replace('"secret keys, fresh randomness"', '"trust me"')
    with pytest.raises(ValueError, match="there is no kind of assumption 'trust me'"):
        from_json(forged)


def test_plain_text_of_a_mechanism_of_ones_own_is_for_its_user_to_see_to():
    assert kinds_of("our sensor draws true random bits")[0].who == "you"
