"""`LeakageMonitor`: attack small batches while a federation trains, and log what was found and what it cost.

After a round it takes the global model, some training samples as candidates, and attacks what the mechanism
would send about one of them. The attack draws from generators and keys of its own and touches neither
gradients nor buffers, so the training is the same bit for bit with and without it.

It stops in time: half of the limit goes to the candidates' gradients, as many as fit by the pace of the first
ones; an attempt that does not end within the rest is given up and does not count.
"""

import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks.trainer_lookup import find_engine, find_federated
from lightning_fedq.keys.randomness import RootKeys
from lightning_fedq.leakage.gradients import sample_gradients
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
        attack: Attack to run; `Matching` works on every model.
        every_n_rounds: >= 1.
        seconds_per_round: Time limit of one measurement, > 0; one step of a search may exceed it, no more.
        attempts: Most attempts of one measurement, >= 1.
        num_candidates: Most training samples that the attacker tells apart, >= 4: the first ones of the data
            set, fewer where their gradients take too long.
        loss: Mean loss of scores and labels; the module's `forward` must return the scores.
        seed: Seed of the attacks, which has no influence on the training.

    Attributes:
        results: Round and result of every measurement.
        seconds: Time spent so far.

    Raises:
        ValueError: If a setting is out of its range.

    Example:
        >>> callbacks = [LeakageMonitor(every_n_rounds=5)]  # behind Federated(...)
    """

    knows_clients = True

    only_simulated = True
    follows_clients: ClassVar[bool] = True
    """Does it write what follows from the drawn clients' data? Secret cohorts refuse it."""

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
        for name, value, least in (
            ("every_n_rounds", every_n_rounds, 1),
            ("attempts", attempts, 1),
            ("num_candidates", num_candidates, 2 * _COHORT),
        ):
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if not seconds_per_round > 0:
            raise ValueError(f"seconds_per_round must be > 0, got {seconds_per_round}")
        self.adversary, self.attack, self.loss, self.seed = adversary, attack, loss, seed
        self.every_n_rounds, self.seconds_per_round = every_n_rounds, seconds_per_round
        self.attempts, self.num_candidates = attempts, num_candidates
        self.results: list[tuple[int, StudyResult]] = []
        self.seconds = 0.0
        self._seen_rounds, self._off = 0, False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the federation, and start counting at its round."""
        federated = find_federated(trainer, "LeakageMonitor")
        if kept := list(federated.local.patterns):
            raise ValueError(
                f"LeakageMonitor attacks gradients of the whole model, and local={kept} "
                "keeps some of it with the clients; leave one out"
            )
        self._seen_rounds, self._off = len(federated.records), False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attack, if the round was finished and it is its turn."""
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
            rank_zero_warn(f"LeakageMonitor stops measuring, the training goes on: {error}")
            return
        spent = time.perf_counter() - start
        self.seconds += spent
        if not trainer.barebones:
            for name, value in {**metrics, "seconds": spent}.items():
                log_figure(pl_module, f"leak/{name}", float(value))

    def unprotected_outputs(self, trainer: pl.Trainer) -> str:
        """Notice of what logged measurements are made from."""
        return "How well an attack on the clients' own data does, which only a simulation knows: `leak/*`."

    def _measure(
        self, trainer: pl.Trainer, module: pl.LightningModule, round: int, start: float
    ) -> dict[str, float]:
        inputs, labels = self._candidates(trainer, module.device)
        training = [part for part in module.modules() if part.training]
        module.eval()
        try:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            count = self._affordable(module, inputs, labels, start)
            study = Study(
                module, self.loss, inputs[:count], labels[:count], rate, self.attack, cohort_size=_COHORT
            )
            generator = torch.Generator().manual_seed(self.seed + round)
            result = study.run(
                find_engine(trainer, "LeakageMonitor").mechanism,  # as of this round
                self.adversary,
                self.attempts,
                generator,
                keys=RootKeys(),
                seconds=max(self.seconds_per_round - (time.perf_counter() - start), 0.0),
                kept=1,
            )
            self.results.append((round, result))
            low, high = result.estimate.leakage_limits
            return {
                "hit_rate": result.estimate.hit_rate,
                "leakage": result.estimate.leakage,
                "leakage_low": low,
                "leakage_high": high,
                "attempts": result.estimate.attempts,
                "candidates": count,
            }
        finally:
            for part in training:
                part.training = True

    def _affordable(self, module: nn.Module, inputs: Tensor, labels: Tensor, start: float) -> int:
        """Number of candidates whose gradients fit into what is left of half the time.

        Raises:
            ValueError: If those of the fewest candidates do not.
        """
        sample_gradients(module, self.loss, inputs[:1], labels[:1])  # the first one takes longer
        before = time.perf_counter()
        sample_gradients(module, self.loss, inputs[:2], labels[:2])
        each = 0.5 * (time.perf_counter() - before)
        count = int((0.5 * self.seconds_per_round - (time.perf_counter() - start)) / each)
        if count < 2 * _COHORT:
            raise ValueError(
                f"the gradient of one sample takes {each:.2g} s, so {2 * _COHORT} candidates take longer "
                f"than half of seconds_per_round = {self.seconds_per_round:g}; allow more, or leave the "
                "monitor out"
            )
        return min(count, len(inputs))

    def _candidates(self, trainer: pl.Trainer, device: torch.device) -> tuple[Tensor, Tensor]:
        loader: Any = trainer.train_dataloader  # the clients' own, which `Federated` has put there
        dataset = loader.loader.dataset
        if len(dataset) < self.num_candidates:
            raise ValueError(
                f"num_candidates = {self.num_candidates}, the training set has {len(dataset)} samples; "
                "take fewer"
            )
        rows = [dataset[index] for index in range(self.num_candidates)]
        if not all(isinstance(row, tuple | list) and len(row) == 2 for row in rows):
            raise ValueError(
                "samples must be pairs of an input and a class to be attacked; leave the monitor out"
            )
        inputs = torch.stack([torch.as_tensor(row[0]) for row in rows])
        if not inputs.is_floating_point():
            raise ValueError(
                f"inputs must be floats to be attacked, got {inputs.dtype}; leave the monitor out"
            )
        return inputs.to(device), torch.tensor([int(row[1]) for row in rows]).to(device)
