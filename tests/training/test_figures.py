"""Loggers get epsilons that hold as the run was run; what masks would give has another name."""

import json
import math

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger

from lightning_fedq import Cyclic, Everybody, FixedSize, mechanisms as m
from lightning_fedq.callbacks import Federated, PrivacyBudget, RunFolder
from lightning_fedq.mechanisms import LDPQ, GaussianNoise
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate
from lightning_fedq.privacy.planning import Problem, make_plan_context, plan
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.reports.runs import read_rows, summary_lines
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.accounts import make_report
from tests.callbacks.steps import EndsAfter
from tests.contract.test_targets import KINDS, WITHOUT
from tests.described import Setting
from tests.digits_run import Classifier, Digits, fitted, make_trainer
from tests.training.test_privacy_target import Line, loader
from tests.training.test_statement import DDG

TARGET = PrivacyTarget(8.0, 1e-5, "secagg_server")


def stated(folder):
    """Epsilons by adversary, as the page of the run has them."""
    rows = json.loads((folder / "run" / "privacy.json").read_text())["rows"]
    return {row["adversary"].lower(): pytest.approx(float(row["epsilon_run"]), rel=1e-6) for row in rows}


def logged(folder, federated, *callbacks):
    """The last value of everything that a fit with a CSV logger has logged."""
    fitted(Classifier(), federated, *callbacks, data=Digits(200), logger=CSVLogger(folder, "", ""))
    found = {}
    for row in read_rows(folder / "metrics.csv"):
        found |= {name: value for name, value in row.items() if value == value}
    return found


@pytest.mark.filterwarnings("ignore:Masking is accounted for only:UserWarning")
@pytest.mark.parametrize("run", ["masked", "counted"])
def test_what_masks_would_give_is_no_epsilon_of_a_run_without(run, tmp_path):
    values = logged(tmp_path, Federated(DDG, 20, secure_aggregation=SecAgg(simulation=run), privacy=TARGET))
    true, would = (
        ("fed/epsilon", "fed/sim_epsilon") if run == "masked" else ("fed/sim_epsilon", "fed/epsilon")
    )
    assert 7.9 < values[true] <= 8.0 and values[f"{true}_secagg_server"] == values[true]
    assert would not in values and f"{would}_secagg_server" not in values
    assert 7.9 < values["fed/epsilon_outsider"] <= 8.0  # whoever sees released models sees no message
    assert values["fed/delta"] == 1e-5 and values["fed/megabytes_up"] > 0 < values["fed/bits_per_parameter"]


@pytest.mark.parametrize(
    ("target", "budget", "true"),
    [(None, None, 1e-5), (None, 1e-4, 1e-4), (1e-6, None, 1e-6), (1e-6, 1e-6, 1e-6)],
)
def test_one_epsilon_has_one_delta_in_loggers_and_in_the_folder(target, budget, true, tmp_path):
    """Loggers said theirs at 1e-5 and no delta, and the folder at its own."""
    target = None if target is None else PrivacyTarget(90.0, target, "server")
    folder = RunFolder("run", str(tmp_path), show=False)
    more = [] if budget is None else [PrivacyBudget(1000.0, budget, "server")]
    values = logged(tmp_path, Federated(GaussianNoise(1.0, 1.0), 20, privacy=target), folder, *more)
    saved = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert values["fed/delta"] == pytest.approx(true) and saved["delta"] == true
    row = stated(tmp_path)
    assert values["fed/epsilon_server"] == row["server"]
    assert values["fed/epsilon_outsider"] == row["outsider"]
    if target is not None or more:
        assert values["fed/epsilon"] == row["server"]


def test_two_deltas_are_refused_before_anything_is_charged(tmp_path):
    """The headline had an epsilon at the target's delta, and the row one at the budget's."""
    fed = Federated(GaussianNoise(1.0, 1.0), 20, privacy=PrivacyTarget(90.0, 1e-6, "server"))
    folder, budget = RunFolder("run", tmp_path), PrivacyBudget(1000.0, 1e-5, "server")
    with pytest.raises(ValueError, match=r"need the same delta, got \[1e-06, 1e-05\]. Give"):
        logged(tmp_path, fed, folder, budget)
    assert fed.ledger.rounds == 0


def test_two_budgets_do_not_log_their_mean(tmp_path):
    folder = RunFolder("run", str(tmp_path), show=False)
    budgets = [PrivacyBudget(1000.0, 1e-5, who) for who in ("server", "outsider")]
    values = logged(tmp_path, Federated(GaussianNoise(1.0, 1.0), 20), *budgets, folder)
    last = read_rows(tmp_path / "run" / "metrics.csv")[-1]
    for who in ("server", "outsider"):
        wanted = stated(tmp_path)[who]
        assert last[f"epsilon_{who}"] == wanted and values[f"fed/epsilon_{who}"] == wanted
    assert "fed/epsilon" not in values and "epsilon" not in last
    assert "epsilon" not in str(json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"])


@pytest.mark.parametrize("who", ["outsider", "server"])
def test_the_target_has_the_short_name_beside_a_budget_about_somebody_else(who, tmp_path):
    target, folder = PrivacyTarget(8.0, 1e-5, "outsider"), RunFolder("run", str(tmp_path), show=False)
    budget = PrivacyBudget(1000.0, 1e-5, who)
    values = logged(tmp_path, Federated(GaussianNoise(1.0, 1.0), 20, privacy=target), budget, folder)
    row = stated(tmp_path)
    last = read_rows(tmp_path / "run" / "metrics.csv")[-1]
    assert last["epsilon"] == row["outsider"] == values["fed/epsilon"]
    assert ("epsilon_server" in last) == (who == "server")
    assert who == "outsider" or last["epsilon_server"] == row["server"]


@pytest.mark.filterwarnings("ignore:Masking is accounted for only:UserWarning")
@pytest.mark.filterwarnings("ignore:the keys come from a seed:UserWarning")
@pytest.mark.parametrize(("run", "seed"), [("masked", None), ("counted", None), ("masked", 3)])
def test_a_budget_says_what_is_no_epsilon_of_this_run(run, seed, tmp_path):
    masks, budget = SecAgg(simulation=run), PrivacyBudget(1000.0, 1e-5, "secagg_server")
    values = logged(tmp_path, Federated(DDG, 20, secure_aggregation=masks, seed=seed), budget)
    true = run == "masked" and seed is None
    assert ("fed/epsilon" in values, "fed/sim_epsilon" in values) == (true, not true)


def test_secret_cohorts_log_no_epsilon(tmp_path):
    settings = {"cohort": FixedSize(4, secret=True), "diagnostics": False}
    values = logged(tmp_path, Federated(GaussianNoise(1.0, 1.0), 20, local_steps=1, **settings))
    assert not [name for name in values if "epsilon" in name or "delta" in name]
    assert values["fed/megabytes_up"] > 0


@pytest.mark.parametrize(
    "length", [{"max_epochs": 4}, {"max_epochs": -1, "max_steps": 8}, {"max_epochs": -1}]
)
def test_no_epsilon_of_a_round_is_smaller_than_the_report_s(length, tmp_path):
    """Half of delta pays for unlucky rounds, of the whole run: of how many, has to be known."""
    target = PrivacyTarget(2.0, 1e-5, "secagg_server", over="round")
    masks = {"secure_aggregation": SecAgg(), "diagnostics": False}
    fed = Federated(LDPQ(1.0), 24, dropout_probability=0.1, privacy=target, **masks)
    trainer = make_trainer(fed, EndsAfter(4), logger=CSVLogger(tmp_path, "", ""), **length)
    trainer.fit(Classifier(), datamodule=Digits(400))
    rows = [row for row in read_rows(tmp_path / "metrics.csv") if row.get("fed/epsilon", 0) > 0]
    stated = make_report(fed, trainer, 1e-5).row(Adversary.SECAGG_SERVER).epsilon_run
    assert len(fed.records) == 4
    assert all(row["fed/epsilon"] >= stated * (1 - 1e-9) for row in rows[-1:])
    assert bool(rows) == (length != {"max_epochs": -1})


@pytest.mark.filterwarnings("ignore:Masking is accounted for only:UserWarning")
def test_a_round_has_its_own_epsilon_or_none(tmp_path):
    """A sum of coins is priced after the last round and rounds 32, 64, ...: 33 has not spent what 32 had."""
    target = PrivacyTarget(8.0, 1e-5, "secagg_server")
    masks = {"secure_aggregation": SecAgg(), "diagnostics": False}
    fed, folder = Federated(LDPQ(1.0), 24, privacy=target, **masks), RunFolder("run", root=tmp_path)
    trainer = make_trainer(fed, folder, max_epochs=34, logger=CSVLogger(tmp_path, "", ""))
    trainer.fit(Classifier(), datamodule=Digits(24))
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    known = [row.get("epsilon", math.nan) for row in rows]
    assert [round for round, one in enumerate(known, 1) if not math.isnan(one)] == [32, 34]
    assert known[31] < known[33] <= 8.0
    assert [row["megabytes_up"] for row in rows] == sorted({row["megabytes_up"] for row in rows})
    shown = dict(summary_lines(folder.summary))
    assert not {"epsilon", "megabytes_up", "bits_per_parameter"} & set(shown)


# ---- what `fedq plan` says a setting spends is what the report of a finished run with that -------------
CLIENTS, PARAMS, ROUNDS, DELTA = 12, 5, 3, 1e-3
IN_TURN = (m.HandedOnGaussian,)
"""Mechanisms that are for two disjoint cohorts, which take turns."""


def views(mechanism):
    """The first view of messages and the first of sums that a mechanism claims anything against."""
    setting = Setting(make_plan_context(mechanism, CLIENTS, PARAMS), ROUNDS, DELTA, secure_aggregation=True)
    claims = setting.claims(mechanism)
    found = []
    for group in (
        (Adversary.SERVER, Adversary.SERVER_AND_PARTNER),
        (Adversary.SECAGG_SERVER, Adversary.OUTSIDER),
    ):
        found += [who for who in group if not isinstance(claims[who].loss, NonPrivate)][:1]
    return found


ALL = [kind for kind in KINDS if type(kind).__name__ not in WITHOUT]
COINS = [kind for kind in ALL if isinstance(kind, m.RotatedCoins)]
CASES = [(kind, who) for kind in ALL if kind not in COINS[1:] for who in views(kind)]
"""Of coins, which take seconds each, one setting."""


@pytest.mark.parametrize(("mechanism", "who"), CASES, ids=[f"{type(k).__name__}-{w.name}" for k, w in CASES])
def test_the_plan_says_what_the_run_reports(mechanism, who):
    in_turn = isinstance(mechanism, IN_TURN)
    law = Cyclic(CLIENTS // 2) if in_turn else Everybody()
    target = PrivacyTarget(4.0, DELTA, who)
    problem = Problem(CLIENTS, PARAMS, ROUNDS, target, law=law)
    (option,) = plan(problem, {"it": mechanism})
    if option.mechanism is None:  # with its reason: shared bits, or no sum behind masks
        assert option.reason
        return
    assert option.epsilon <= 4.0
    masked = problem.behind_masks
    federated = Federated(
        option.mechanism, CLIENTS, cohort=option.law, secure_aggregation=SecAgg() if masked else None
    )
    trainer = make_trainer(federated, max_epochs=ROUNDS)
    torch.manual_seed(0)
    trainer.fit(Line(), loader())
    reported = make_report(federated, trainer, DELTA).row(who)
    assert reported.epsilon_any_two == pytest.approx(option.epsilon, rel=1e-6)
