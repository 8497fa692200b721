"""What `fedq plan` says a setting spends is what the report of a finished run with that setting says."""

import pytest
import torch

from lightning_fedq import mechanisms as m
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate
from lightning_fedq.privacy.planning import Problem, context_of, plan
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.spending import report_of
from tests.contract.test_targets import KINDS, WITHOUT
from tests.described import Setting
from tests.digits_run import make_trainer
from tests.training.test_privacy_target import Line, loader

CLIENTS, PARAMS, ROUNDS, DELTA = 12, 5, 3, 1e-3
IN_TURN = (m.HandedOnGaussian,)
"""Mechanisms that are for two disjoint cohorts, which take turns."""


def views(mechanism):
    """The first view of messages and the first of sums that a mechanism claims anything against."""
    setting = Setting(context_of(mechanism, CLIENTS, PARAMS), ROUNDS, DELTA, secure_aggregation=True)
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
    cohort = CLIENTS // 2 if in_turn else None
    target = PrivacyTarget(4.0, DELTA, who)
    problem = Problem(CLIENTS, PARAMS, ROUNDS, target, clients_per_round=cohort, in_turn=in_turn)
    (option,) = plan(problem, {"it": mechanism})
    if option.mechanism is None:  # with its reason: shared bits, or no sum behind masks
        assert option.reason
        return
    assert option.epsilon <= 4.0
    settings = {"clients_per_round": cohort, "participation": "cyclic"} if in_turn else {}
    if option.participation == "once":
        settings = {"clients_per_round": CLIENTS // ROUNDS, "participation": "once"}
    masked = problem.behind_masks
    federated = Federated(
        option.mechanism, CLIENTS, secure_aggregation=SecAgg() if masked else None, **settings
    )
    trainer = make_trainer(federated, max_epochs=ROUNDS)
    torch.manual_seed(0)
    trainer.fit(Line(), loader())
    reported = report_of(federated, trainer, DELTA).row(who)
    assert reported.epsilon_any_two == pytest.approx(option.epsilon, rel=1e-6)
