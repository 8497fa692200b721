"""Cures of rounds of statistics."""

import torch

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.rounds import Statistics
from tests.cures.rows import dpsgd, fed, fit, row
from tests.digits_run import Classifier


class Surveys(Classifier):
    """Makes four numbers of its batches."""

    def __init__(self, numbers=lambda images: images.view(-1, 4, 16).mean((0, 2)), **hooks) -> None:
        super().__init__()
        self.numbers = numbers
        vars(self).update(hooks)

    def client_statistics(self, batches):
        return self.numbers(torch.cat([images for images, _ in batches]))

    def on_statistics(self, mean):
        pass


class Aborts(pl.Callback):
    """The first rounds have too few answers."""

    knows_clients = True

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_clients_done(self, trainer, done, expected):
        if trainer.current_epoch < self.rounds:
            next(one for one in trainer.callbacks if hasattr(one, "planner")).engine.abort("too few")


def survey(module=None, *callbacks, rounds=2, mechanism=None, statistics=Statistics(4, 1.0), **settings):  # noqa: B008
    callbacks = [fed(mechanism, statistics=statistics, **settings), *callbacks]
    fit(*callbacks, module=module or Surveys(), max_epochs=rounds)


def plain(**settings):
    survey(Classifier(), statistics=None, **settings)


row(
    "Statistics have {} numbers, but a round has {} coordinates. Use fewer",
    lambda: survey(statistics=Statistics(700, 1.0)),
    survey,
)
row(
    "is biased, but statistics need an unbiased mechanism. Leave",
    lambda: survey(mechanism=fedq.TopK()),
    lambda: plain(mechanism=fedq.TopK()),
    lambda: survey(mechanism=fedq.RotatedCoins(clip_norm=1.0, epsilon_per_bit=1.0)),
    lambda: survey(mechanism=fedq.CorBin(epsilon_per_coordinate=1.0)),
)
row("Statistics need the hook {}.{}: client_statistics", lambda: survey(Classifier()), survey)
row("Statistics need the hook {}.{}: client_statistics", lambda: survey(Surveys(on_statistics=None)), survey)
row(
    "{} has {}, which is never called. Use Federated(statistics=Statistics(",
    lambda: survey(statistics=None),
    survey,
    plain,
)
row("Statistics take the first {} rounds, but a run of {} rounds", lambda: survey(rounds=1), survey)
row(
    "{} accounts for privacy of samples, but not for statistics of a client's data. Leave out",
    lambda: survey(None, dpsgd()),
    lambda: fit(fed(), dpsgd(), module=Classifier()),
    survey,
)
row(
    "client_statistics returned shape {}, but Statistics(size={})",
    lambda: survey(statistics=Statistics(5, 1.0)),
    survey,
)
row(
    "client_statistics of client {} returned values that are not finite. Do not divide by",
    lambda: survey(Surveys(lambda images: images[:4, 0] / 0)),
    lambda: survey(Surveys(lambda images: images[:4, 0] / max(len(images), 1))),
    lambda: survey(Surveys(lambda images: images[:, :4].std(0))),
)
row(
    "of statistics released a mean{}. Use larger cohorts",
    lambda: survey(None, Aborts(1)),
    survey,
    lambda: survey(None, Aborts(1), statistics=Statistics(4, 1.0, rounds=2), rounds=3),
    error=RuntimeError,
)
row("size and rounds must be >= 1, got {} and {}", lambda: Statistics(0, 1.0), lambda: Statistics(1, 1.0))
