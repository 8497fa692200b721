"""A user's law of cohorts is priced by its own draw, or by the worst case, or it is refused by name.

A law without a draw was priced as a uniform secret draw: epsilon 1.02 where 11.48 is true.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import lightning_fedq as fedq
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.functional.divergences import randomized_response_epsilon
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.cohorts import CohortLaw
from lightning_fedq.privacy.planning import Problem
from lightning_fedq.privacy.recorded_laws import RecordedLaw, describe_law, read_law
from lightning_fedq.privacy.target import planned_charges
from lightning_fedq.rounds import RoundPlanner
from tests.digits_run import Classifier, Digits, make_trainer

CLIENTS, ROUNDS, NOISE = 60, 30, fedq.GaussianNoise(1.0, 1.0)


@dataclass(frozen=True)
class First(CohortLaw):
    """The same clients in every round."""

    size: int
    secret: bool = False

    def draw_cohort(self, clients, round, attempt, stream):
        return list(range(self.size))


@dataclass(frozen=True)
class Twice(CohortLaw):
    """One client, several times."""

    size: int

    def draw_cohort(self, clients, round, attempt, stream):
        return [0] * self.size


def run_of(law):
    target = fedq.PrivacyTarget(8.0, 1e-5, "outsider")
    return Problem(CLIENTS, 100, ROUNDS, target, law=law).run(NOISE)


def epsilon(law, who=Adversary.OUTSIDER, secret=False):
    return Account(run_of(law), 1e-5).epsilon(who, ROUNDS, secret=secret)


def test_a_law_without_an_account_of_its_secret_draw_is_refused():
    with pytest.raises(ValueError, match="has no account of its draw"):
        epsilon(First(6, secret=True), secret=True)


def test_another_draw_does_not_keep_the_account_of_its_parent():
    with pytest.raises(TypeError, match="has its own draw_cohort, but keeps of_all of FixedSize"):

        @dataclass(frozen=True)
        class Mine(fedq.FixedSize):
            def draw_cohort(self, clients, round, attempt, stream):
                return list(range(self.size))


def test_a_known_law_is_charged_for_every_round():
    run = run_of(First(6))
    assert planned_charges(run, False) == ROUNDS and run.participation == 1.0
    assert epsilon(First(6)) == pytest.approx(epsilon(fedq.FixedSize(6)), rel=1e-9)


def test_a_cohort_with_a_client_twice_is_refused():
    with pytest.raises(ValueError, match="must draw 6 different clients"):
        RoundPlanner(CLIENTS, 0, Twice(6)).plan(0, NOISE)


def test_a_secret_price_is_refused_where_the_draw_is_known():
    run = run_of(fedq.FixedSize(6, secret=True))
    run = replace(run, sampling=replace(run.sampling, dropout_probability=0.3))
    with pytest.raises(ValueError, match="secret cohorts need"):
        Account(run, 1e-5).epsilon(Adversary.OUTSIDER, ROUNDS, secret=True)
    with pytest.raises(ValueError, match="has no secret draw"):
        epsilon(fedq.FixedSize(6), secret=True)


def test_two_available_laws_share_nothing_when_the_rule_changes():
    table = {round: range(CLIENTS) for round in range(ROUNDS)}
    first = fedq.Available(table.__getitem__, 6)
    assert first.lottery(ROUNDS, CLIENTS) == (ROUNDS, 0.1)
    for round in table:
        table[round] = range(6)
    second = fedq.Available(table.__getitem__, 6)
    assert second.lottery(ROUNDS, CLIENTS) == (ROUNDS, 1.0)
    with pytest.raises(ValueError, match="named different clients in two calls"):
        first.check_rounds(ROUNDS, CLIENTS)


@pytest.mark.parametrize("law", [fedq.FixedSize(6), fedq.Cyclic(6), fedq.DisjointOnce(6)])
def test_a_checkpoint_reads_the_laws_of_the_package(law):
    assert read_law(describe_law(law, CLIENTS)) == law


def test_a_checkpoint_reads_a_users_law_as_its_worst_case():
    read = read_law(describe_law(First(6), CLIENTS))
    assert isinstance(read, RecordedLaw) and "First(size=6" in str(read)
    assert read.max_rounds(ROUNDS, CLIENTS) == ROUNDS
    available = read_law(describe_law(fedq.Available(range(CLIENTS).__getitem__, 6), CLIENTS))
    assert isinstance(available, RecordedLaw) and available.max_rounds(ROUNDS, CLIENTS) == ROUNDS


class Plain(CohortLaw):
    """A law that is no dataclass."""

    size = 6

    def draw_cohort(self, clients, round, attempt, stream):
        return list(range(6))


class Restless(First):
    """Other clients in every call."""

    calls = iter(range(10))

    def draw_cohort(self, clients, round, attempt, stream):
        first = next(Restless.calls)
        return list(range(first, first + self.size))


def test_the_cures_of_refused_laws_help():
    with pytest.raises(ValueError, match=r"knows who took part.*Use adversary='outsider'"):
        epsilon(fedq.FixedSize(6, secret=True), Adversary.SERVER, secret=True)
    assert epsilon(fedq.FixedSize(6, secret=True), Adversary.OUTSIDER, secret=True) < 2.0
    with pytest.raises(ValueError, match=r"has no account of its draw.*Use FixedSize\(..., secret=True\)"):
        First(6, secret=True).check(CLIENTS)
    fedq.FixedSize(6, secret=True).check(CLIENTS)

    with pytest.raises(TypeError, match="Add @dataclass"):
        Plain().check(CLIENTS)
    First(6).check(CLIENTS)
    with pytest.raises(ValueError, match="Use only its stream"):
        RoundPlanner(CLIENTS, 0, Restless(6)).plan(0, NOISE)
    assert RoundPlanner(CLIENTS, 0, First(6)).plan(0, NOISE).cohort == tuple(range(6))


def test_a_users_law_trains_is_reported_and_read_back(tmp_path):
    """Its page, its checkpoint and rounds to come count every round."""
    fed = fedq.Federated(fedq.LDPQ(0.5), 6, cohort=First(2), clients_per_step=1)
    folder = fedq.RunFolder("run", str(tmp_path), show=False)
    trainer = make_trainer(fed, folder, max_epochs=3)
    trainer.fit(Classifier(), datamodule=Digits(60))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert fed.ledger.charges.tolist() == [3, 3, 0, 0, 0, 0]
    page = json.loads((tmp_path / "run" / "privacy.json").read_text())
    [stated] = [row["epsilon_run"] for row in page["rows"] if row["adversary"] == "SERVER"]
    one, more = (report_of_checkpoint(tmp_path / "last.ckpt", n, 1e-5, secagg=False) for n in (3, 6))
    assert one.row(Adversary.SERVER).epsilon_run == pytest.approx(stated)
    dim = sum(parameter.numel() for parameter in trainer.lightning_module.parameters())
    six = randomized_response_epsilon(0.5, 6 * dim, 1e-5)
    assert more.row(Adversary.SERVER).epsilon_run == pytest.approx(six)


def test_the_law_of_the_guide_runs():
    """docs/writing_a_mechanism.md: ten lines, drawn, priced and charged."""
    page = (Path(__file__).parents[2] / "docs" / "writing_a_mechanism.md").read_text()
    [block] = re.findall(r"```python\n(from dataclasses.*?)```", page, re.DOTALL)
    names: dict[str, type] = {"__name__": "guide"}
    exec(block, names)
    law = names["TwoShifts"](2)
    assert len(block.strip().splitlines()) <= 13
    planner = RoundPlanner(6, 0, law)
    assert [planner.plan(round, NOISE).cohort for round in (0, 1, 2)] == [(0, 1), (4, 5), (0, 1)]
    assert planned_charges(run_of(law), secret=False) == ROUNDS
    fed = fedq.Federated(fedq.LDPQ(0.5), 6, cohort=law, clients_per_step=1)
    make_trainer(fed, max_epochs=3).fit(Classifier(), datamodule=Digits(60))
    assert fed.ledger.charges.tolist() == [2, 2, 0, 0, 1, 1]
