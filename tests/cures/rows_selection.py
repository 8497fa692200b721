"""Cures that sweeps, the best of several runs, secret cohorts and tables as data name."""

from pathlib import Path
from unittest import mock

import torch
import yaml

from lightning_fedq.commands import run
from lightning_fedq.comparison.commands import sweep
from lightning_fedq.comparison.selection import NegativeBinomialTrials, run_loss, selected
from lightning_fedq.mechanisms import LDPQ, RotatedCoins
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.losses import GaussianLoss, Loss
from tests.comparison.commands.test_sweep import Clock
from tests.cures.rows import row
from tests.cures.rows_commands import fedq, plan, small
from tests.cures.rows_rounds import ddg
from tests.described import privacy_report
from tests.one_round import context_of

BEST = ("--mean", "1.2")
MECHANISMS = {"CorBin": {"epsilon": 1.0}, "GaussianNoise": {"clip_norm": 1.0, "noise_multiplier": 1.0}}


def swept(*arguments, mechanism="GaussianNoise", rounds=1, logger=False):
    """The best of a random number of runs of one configuration."""
    path, settings = Path(small(rounds=rounds)), MECHANISMS[mechanism]
    config = yaml.safe_load(path.read_text())
    config["trainer"]["logger"] = logger
    config["trainer"]["callbacks"][0]["init_args"]["mechanism"] = {
        "class_path": f"lightning_fedq.mechanisms.{mechanism}",
        "init_args": settings,
    }
    path.write_text(yaml.safe_dump(config))
    fedq("sweep", "select", str(path), *arguments)


def folder_of_one():
    """A run's folder."""
    return str(run.run_config(run.resolve([small()]), "one", Path("runs")))


def in_time(*arguments):
    """With a clock of its own: how many runs are drawn is chance, and how fast this machine is, too."""
    with mock.patch.object(sweep, "time", Clock()):
        swept(*BEST, *arguments)


SECRET = ("--params", "100", "--rounds", "5", "--delta", "1e-4", "--adversary", "outsider")


def of_outsiders(mechanism):
    """What three rounds lose towards outsiders."""
    claims = mechanism.claims(context_of(mechanism, range(4)))
    return run_loss(next(claim.loss for claim in claims if claim.adversary.name == "OUTSIDER"), 3)


class Unknown(Loss):
    """A kind of which a curve is known and nothing else."""

    note = ""

    def curve(self, epsilons):
        return GaussianLoss(1.0).curve(epsilons)


TRIALS = NegativeBinomialTrials.of_mean(1.0, 2.0)


def report(**settings):
    mechanism = LDPQ(1.0)
    context = context_of(mechanism, (0, 1))
    return privacy_report(mechanism, context, rounds=2, delta=1e-3, num_clients=8, **settings)


def limited(limit, rounds):
    ledger = Ledger(4, "m")
    ledger.round_limit = limit
    for number in range(rounds):
        ledger.charge((0,), number)


CHARGES = torch.tensor([1] * 8)
CSV = {"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": {"save_dir": "."}}
row(
    "secret cohorts need {}; or leave cohorts out",
    lambda: plan(*SECRET, "--cohorts", "secret"),
    lambda: plan(*SECRET, "--cohorts", "secret", "--clients_per_round", "6"),
    lambda: plan(*SECRET),
)
row("{} has a logger of its own,", lambda: swept(*BEST, logger=CSV), lambda: swept(*BEST, logger=False))
row(
    "{} holds no config.yaml, since `fedq fit` did not start its run; give folders of those",
    lambda: fedq("sweep", "cost", "."),
    lambda: fedq("sweep", "cost", folder_of_one()),
)
row(
    "nothing is left of delta {}: more than {} runs are drawn with chance {}; let --at-most be ",
    lambda: swept(*BEST, "--at-most", "2"),
    lambda: swept(*BEST, "--at-most", "200"),
    lambda: swept("--mean", "1.001", "--at-most", "2", "--delta", "1e-3"),
)
row(
    "the runs took {} minutes longer than --publish-after, so when the winner came out would tell of",
    lambda: swept(*BEST, "--publish-after", "1e-9"),
    lambda: in_time("--at-most", "20", "--publish-after", "0.1"),
)
row(
    "a run needs a number of rounds, got trainer.max_epochs={}; give",
    lambda: swept(*BEST, rounds=-1),
    lambda: swept(*BEST),
)
row(
    "a {} has no Renyi divergences and no largest loss, so nothing is known of the best of seve",
    lambda: swept(*BEST, mechanism="CorBin"),
    lambda: swept(*BEST),
    lambda: of_outsiders(RotatedCoins(1.0, epsilon=1.0)),
    lambda: of_outsiders(ddg()),
)
row(
    "a {} has no Renyi divergence; see `run_loss`",
    lambda: selected(Unknown(), TRIALS),
    lambda: selected(run_loss(GaussianLoss(1.0), 3), TRIALS),
)
row(
    "charges tell who was drawn, and cohorts are secret: leave charges out",
    lambda: report(charges=CHARGES, secret_cohorts=""),
    lambda: report(secret_cohorts=""),
    lambda: report(charges=CHARGES),
)
row(
    "the privacy budget allows {} rounds, and round {} would be one more; raise the budget, or ",
    lambda: limited(2, 3),
    lambda: limited(3, 3),
    lambda: limited(2, 2),
    error=RuntimeError,
)
