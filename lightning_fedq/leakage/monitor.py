"""`LeakageMonitor`: callback that attacks small batches during training and logs hit rates and their cost.

After a round, it takes the global model and some training samples as candidates, and attacks the message that
the mechanism would send about one of them. The attack uses separate generators and keys and changes neither
gradients nor buffers. So a training is identical in every bit with and without it.

It keeps a time limit. Half of the limit is for the candidates' gradients, and the pace of the first ones
decides how many fit. An attempt that does not end within the rest is stopped and does not count.
"""

import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.functional.checks import check_at_least
from lightning_fedq.keys.randomness import RootKeys
from lightning_fedq.leakage.gradients import in_mode, sample_gradients
from lightning_fedq.leakage.matching import Attack, Matching
from lightning_fedq.leakage.study import Study, StudyResult
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.training.client_metrics import log_figure

_COHORT = 2


class LeakageMonitor(pl.Callback):
    """Leakage measured every few rounds, within a time limit. A failing attack warns and never stops a run.

    Logs `leak/hit_rate`, `leak/leakage`, `leak/leakage_low`, `leak/leakage_high`, `leak/attempts`,
    `leak/candidates` and `leak/seconds`.

    Args:
        adversary: Adversary whose view is attacked.
        attack: Attack to run. `Matching` works on every model.
        every_n_rounds: Number of rounds between two measurements, >= 1.
        seconds_per_round: Time limit of one measurement in seconds, > 0. It is exceeded by at most one step
            of a search.
        attempts: Largest number of attempts of one measurement, >= 1.
        num_candidates: Largest number of candidates, >= 4. They are the first training samples, and fewer
            where their gradients take too long.
        loss: Mean loss of scores and labels. The module's `forward` must return the scores.
        seed: Seed of the attacks, which has no influence on the training.

    Attributes:
        results: Round and result of every measurement.
        seconds: Time spent so far, in seconds.

    Raises:
        ValueError: If a setting is out of its range.

    Examples:
        >>> callbacks = [LeakageMonitor(every_n_rounds=5)]  # behind Federated(...)
    """

    knows_clients = True

    only_simulated = True
    follows_clients: ClassVar[bool] = True
    """Whether the callback writes values that follow from drawn clients' data. Secret cohorts refuse it."""

    def __init__(
        self,
        adversary: Adversary = Adversary.EAVESDROPPER,
        attack: Attack = Matching(),  # noqa: B008 (frozen)
        *,
        every_n_rounds: int = 1,
        seconds_per_round: float = 1.0,
        attempts: int = 100,
        num_candidates: int = 100,
        loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
        seed: int = 0,
    ) -> None:
        check_at_least(1, every_n_rounds=every_n_rounds, attempts=attempts)
        check_at_least(2 * _COHORT, num_candidates=num_candidates)
        if not seconds_per_round > 0:
            raise ValueError(f"seconds_per_round must be > 0, got {seconds_per_round}")
        self.adversary, self.attack, self.loss, self.seed = adversary, attack, loss, seed
        self.every_n_rounds, self.seconds_per_round = every_n_rounds, seconds_per_round
        self.attempts, self.num_candidates = attempts, num_candidates
        self.results: list[tuple[int, StudyResult]] = []
        self.seconds = 0.0
        self._seen_rounds, self._off = 0, False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the federation, and start counting at its round.

        Raises:
            ValueError: If some parameters stay with the clients.
        """
        federated = find_federated(trainer, "LeakageMonitor")
        if patterns := list(federated.local.personal_parameters):
            raise ValueError(
                f"LeakageMonitor attacks gradients of the whole model, but personal_parameters={patterns} "
                "keeps parameters "
                "at the clients. Leave one of them out."
            )
        self._seen_rounds, self._off = len(federated.records), False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attack the round if it was finished and a measurement is due."""
        rounds = len(find_federated(trainer, "LeakageMonitor").records)
        finished, self._seen_rounds = rounds > self._seen_rounds, rounds
        if not finished or self._off or (rounds - 1) % self.every_n_rounds:
            return
        start = time.perf_counter()
        try:
            metrics = self._measure(trainer, pl_module, rounds - 1, start)
        except (ValueError, RuntimeError, TypeError) as error:
            self._off = True
            self.seconds += time.perf_counter() - start
            rank_zero_warn(f"LeakageMonitor stops measuring, but the training continues: {error}")
            return
        spent = time.perf_counter() - start
        self.seconds += spent
        if not trainer.barebones:
            for name, value in {**metrics, "seconds": spent}.items():
                log_figure(pl_module, f"leak/{name}", float(value))

    def unprotected_outputs(self, trainer: pl.Trainer) -> str:
        """Return a sentence for the report on measurements that are logged without noise."""
        return "Hit rates of an attack on the clients' own data, which only a simulation knows: `leak/*`."

    def _measure(
        self, trainer: pl.Trainer, module: pl.LightningModule, round: int, start: float
    ) -> dict[str, float]:
        """Attack the present model, append the result, and return the metrics."""
        inputs, labels = self._candidates(trainer, module.device)
        with in_mode(module, training=False):
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            count = self._affordable(module, inputs, labels, start)
            inputs, labels = inputs[:count], labels[:count]
            study = Study(module, self.loss, inputs, labels, rate, self.attack, cohort_size=_COHORT)
            generator = torch.Generator().manual_seed(self.seed + round)
            result = study.run(
                find_federated(trainer, "LeakageMonitor").started_engine.mechanism,  # as of this round
                self.adversary,
                self.attempts,
                generator,
                keys=RootKeys(),
                seconds=max(self.seconds_per_round - (time.perf_counter() - start), 0.0),
                kept=1,
            )
        self.results.append((round, result))
        estimate, (low, high) = result.estimate, result.estimate.leakage_limits
        metrics = {"hit_rate": estimate.hit_rate, "leakage": estimate.leakage}
        metrics |= {"leakage_low": low, "leakage_high": high}
        return {**metrics, "attempts": estimate.attempts, "candidates": count}

    def _affordable(self, module: nn.Module, inputs: Tensor, labels: Tensor, start: float) -> int:
        """Return the number of candidates whose gradients fit into the rest of half the time limit.

        Raises:
            ValueError: If the gradients of the smallest number of candidates do not fit.
        """
        sample_gradients(module, self.loss, inputs[:1], labels[:1])  # warm up, because the first call is slow
        before = time.perf_counter()
        sample_gradients(module, self.loss, inputs[:2], labels[:2])
        each = 0.5 * (time.perf_counter() - before)
        count = int((0.5 * self.seconds_per_round - (time.perf_counter() - start)) / each)
        if count < 2 * _COHORT:
            raise ValueError(
                f"the gradient of one sample takes {each:.2g} s, too long for {2 * _COHORT} candidates in "
                f"half of seconds_per_round = {self.seconds_per_round:g}. "
                "Allow more time, or leave the monitor out."
            )
        return min(count, len(inputs))

    def _candidates(self, trainer: pl.Trainer, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the inputs and the labels of the first training samples.

        Raises:
            ValueError: If there are too few samples, or they are no pairs of floats and a class.
        """
        loader: Any = trainer.train_dataloader  # the loader of the clients, which `Federated` has set
        dataset = loader.loader.dataset
        if len(dataset) < self.num_candidates:
            raise ValueError(
                f"num_candidates = {self.num_candidates}, but the training set has {len(dataset)} samples. "
                "Use fewer candidates."
            )
        rows = [dataset[index] for index in range(self.num_candidates)]
        if not all(isinstance(row, tuple | list) and len(row) == 2 for row in rows):
            raise ValueError(
                "LeakageMonitor needs samples that are pairs of an input and a class. Leave the monitor out."
            )
        inputs = torch.stack([torch.as_tensor(row[0]) for row in rows])
        if not inputs.is_floating_point():
            raise ValueError(
                f"LeakageMonitor needs inputs of floats, got {inputs.dtype}. Leave the monitor out."
            )
        return inputs.to(device), torch.tensor([int(row[1]) for row in rows]).to(device)
