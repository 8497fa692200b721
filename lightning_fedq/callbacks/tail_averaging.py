"""Tail averaging: the mean of the global models of the last rounds, which costs no privacy.

Noise that keeps clients private makes the last model wander around a good one, the more the larger the steps
are. The mean over the last half of the rounds loses most of that wandering and little of the way there. It
is made of models that have been released already, so it is post-processing: the guarantee of a run stays
what it is.

Source: Jain, Kakade, Kidambi, Netrapalli, Sidford, Parallelizing Stochastic Gradient Descent for Least
Squares Regression, 2018 (tail averaging); Polyak and Juditsky, 1992.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks.of_trainer import federated_of


class TailAveraging(pl.callbacks.WeightAveraging):
    """Validate, save and end with the mean of the global models of the last rounds.

    Lightning's `WeightAveraging` of global models: what is validated and what `state_dict` of a checkpoint
    holds is the average, clients go on from the model itself, and after `fit` the module holds the average.
    Before the tail begins, the average is the model. A run that is stopped before its last round averages
    what it has of its tail.

    Args:
        fraction: Fraction of the fit's rounds, counted from the end, in (0, 1]; at least one round.

    Raises:
        ValueError: If the fraction is out of its range, or there is no `Federated` or no number of rounds.

    Example:
        >>> callbacks = [TailAveraging(0.5)]  # beside Federated(...)
    """

    knows_clients = True
    writes_in_rounds = False

    def __init__(self, fraction: float = 0.5) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction must be in (0, 1], got {fraction}")
        super().__init__(avg_fn=self._follow)
        self.fraction, self._first = fraction, 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what has no rounds."""
        if stage == "fit":
            federated_of(trainer, "TailAveraging")
            if trainer.max_epochs is None or trainer.max_epochs < 1:
                raise ValueError(
                    "TailAveraging has to know which rounds are the last ones, got "
                    f"Trainer(max_epochs={trainer.max_epochs}); give a number of rounds"
                )
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where the tail begins: in a resumed fit where it would have begun."""
        assert trainer.max_epochs is not None and self._average_model is not None
        done = int(self._average_model.n_averaged)
        rounds = trainer.max_epochs - trainer.current_epoch + done
        self._first = rounds - max(math.floor(rounds * self.fraction), 1)

    def _follow(self, average: Tensor, model: Tensor, done: Any) -> Tensor:
        """The model itself up to the first round of the tail, then the running mean."""
        inside = int(done) - self._first
        return model if inside <= 0 else average + (model - average) / (inside + 1)
