"""Runs by the few facts that a test is about; everything else is the plainest."""

import math
from dataclasses import dataclass
from typing import Any

from lightning_fedq import Cyclic, DisjointOnce, FixedSize, Poisson
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import RoundContext
from lightning_fedq.privacy import report, target
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.collusion import Colluders
from lightning_fedq.privacy.document import document
from lightning_fedq.privacy.run import ASSUMED, Run, Sampling, SecureSum, ThreatModel
from lightning_fedq.reports.layouts import markdown


@dataclass(frozen=True)
class Setting:
    """A run and a delta, whose mechanism comes with each question."""

    context: RoundContext
    rounds: int
    delta: float | None
    dropout_probability: float = 0.0
    secure_aggregation: bool = False
    equal_weights: bool = True
    max_colluding_fraction: float = 0.0
    num_byzantine: int = 0
    min_survivors: int | None = None
    fewest_answers: int | None = None
    num_clients: int | None = None
    secret_cohorts: bool = False
    secure_keys: bool = True
    protocol: str = ASSUMED.statement
    charges: Any = None
    participates: str = "random"
    broken: str = ""
    opened_log2: float = -math.inf

    def run(self, mechanism):
        size, lying = len(self.context.cohort), self.min_survivors is not None
        sums = SecureSum(
            colluders=Colluders(
                self.max_colluding_fraction, self.num_clients or size, size, lying, self.num_byzantine
            ),
            opened_log2=self.opened_log2,
            min_survivors=self.min_survivors,
            min_summands=self.fewest_answers or 1,
            ran=True,
            settings="",
            statement=self.protocol,
        )
        laws = {"once": DisjointOnce, "cyclic": Cyclic, "poisson": Poisson}
        law = FixedSize(size, secret=self.secret_cohorts)
        if self.participates != "random":
            law = laws[self.participates](size)
        used = self.secure_aggregation or self.max_colluding_fraction or self.min_survivors
        return Run(
            mechanism=mechanism,
            context=self.context,
            rounds=self.rounds,
            sampling=Sampling(
                num_clients=self.num_clients or len(self.context.cohort),
                law=law,
                broken=self.broken,
                dropout_probability=self.dropout_probability,
                real_clients=False,
                may_be_silent=self.fewest_answers is not None,
            ),
            threat=ThreatModel(
                secure_sum=sums if used else None,
                plain_sum=self.equal_weights,
                num_byzantine=self.num_byzantine,
                secure_keys=self.secure_keys,
            ),
            to_come=0,
            charges=self.charges,
        )

    def account(self, mechanism):
        return Account(self.run(mechanism), self.delta)

    def claims(self, mechanism, client=None):
        return self.account(mechanism).claims(client)

    @property
    def _any(self):
        return self.account(FedAvg())  # which claims nothing

    @property
    def num_colluding(self):
        return self._any.num_colluding

    def available(self, *args):
        return self._any.available(*args)

    def spent(self, *args):
        return self._any.spent(*args)


def privacy_report(mechanism, context, *, most_rounds=None, secret_cohorts=None, **given):
    settings = {"rounds": 1, "delta": None, **given, "broken": secret_cohorts or ""}
    if most_rounds is not None:
        settings["participates"] = "once" if most_rounds <= 1 else "cyclic"
    setting = Setting(context, **settings, secret_cohorts=secret_cohorts is not None)
    return report.privacy_report(setting.run(mechanism), setting.delta)


def calibrate(wanted, mechanism, setting, charges):
    return target.calibrate(wanted, setting.run(mechanism))


def epsilon_of(setting, mechanism, adversary, charges):
    return setting.account(mechanism).epsilon(adversary, charges, secret=setting.secret_cohorts)


def allowed_dropouts(setting):
    return target.allowed_dropouts(setting.run(None))


def planned_charges(rounds, cohort, num_clients):
    from lightning_fedq.mechanisms import LDPQ
    from lightning_fedq.privacy.planning import make_plan_context

    context = make_plan_context(LDPQ(1.0), cohort, 1)
    return target.planned_charges(Setting(context, rounds, 1e-5, num_clients=num_clients).run(None), False)


def page(made):
    """The whole privacy document as Markdown: `privacy.md`."""
    return markdown(*document(made))
