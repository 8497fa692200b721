"""`Langevin`: a federation that samples the posterior instead of optimising, the compressor making the noise.

With U_i the loss of client i, summed over its data (minus its part of the log posterior), the chain theta <-
theta - g sum_i grad U_i + N(0, 2 g I) samples exp(-sum_i U_i), up to a bias of order g. One full-batch SGD
step a client, with learning rate g n, makes the mean of the updates the drift; a mechanism whose mean error
is exactly Gaussian brings a known part of the noise, and this callback adds only what is missing.

Departure from the paper's algorithm 6 (`reproductions.exact.langevin`): the compressor's noise is fixed
beforehand and not scaled by each client's largest coordinate, so no float travels, and updates are clipped as
the mechanism says; a clipped update bends the drift, so a round that clips is refused.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, appendix C.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import get_callbacks, pl
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.functional.flatten import copy_into
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.training.settings import Federation


class Langevin(pl.Callback):
    """Langevin sampling with a federation. Stands behind `Federated` in the list of callbacks.

    Args:
        step_size: g > 0; the clients' SGD needs learning rate g times the number of clients.
        burn_in: Rounds before samples count, >= 0.

    Attributes:
        num_samples: Rounds that counted.
        mean: Running mean of the weights, `(dim,)` float64; the estimate of the posterior mean.

    Raises:
        ValueError: If step_size or burn_in is out of range.

    Example:
        >>> sampler = Langevin(step_size=1e-4)  # behind Federated in trainer.callbacks
    """

    knows_clients = True

    only_simulated = True

    def __init__(self, step_size: float, burn_in: int = 0) -> None:
        if not step_size > 0:
            raise ValueError(f"step_size must be > 0, got {step_size}")
        if burn_in < 0:
            raise ValueError(f"burn_in must be >= 0, got {burn_in}")
        self.step_size, self.burn_in = step_size, burn_in
        self.num_samples = 0
        self.mean: Tensor = torch.zeros(0, dtype=torch.float64)
        self._squares: Tensor = torch.zeros(0, dtype=torch.float64)

    @property
    def variance(self) -> Tensor:
        """Running variance of the weights, `(dim,)`. The estimate of the posterior's diagonal.

        Raises:
            ValueError: If fewer than two rounds have counted.
        """
        if self.num_samples < 2:
            raise ValueError(f"a variance needs 2 samples, got {self.num_samples}; run more rounds")
        return self._squares / (self.num_samples - 1)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what would sample another law."""
        federated = self._federated(trainer)
        planner, mechanism = federated.planner, federated.mechanism
        if not mechanism.gaussian_error:
            raise ValueError(
                f"the error of {type(mechanism).__name__} is not exactly Gaussian with a known variance; "
                "use LayeredGaussian, AggregateGaussian or FedAvg"
            )
        if planner.cohort_size != planner.num_clients or planner.dropout_probability:
            raise ValueError("a missing client bends the drift; let all clients answer in every round")
        if (
            federated.server.server_lr != 1.0
            or federated.server.target != "updates"
            or federated.server.server_optimizer
            or federated.server.broadcast_bits
            or federated.local.statistics
        ):
            raise ValueError(
                "a chain moves by the mean update itself; use target='updates', server_lr=1.0, no "
                "server_optimizer, no broadcast_bits and no statistics, whose rounds take no step"
            )
        if not federated.server.diagnostics:
            raise ValueError("a clipped update bends the drift, and only diagnostics=True shows it")
        wanted = self.step_size * federated.clients.num_clients
        optimizer = trainer.optimizers[0]
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        if not isinstance(optimizer, torch.optim.SGD) or any(abs(r / wanted - 1.0) > 1e-9 for r in rates):
            raise ValueError(
                f"the clients' optimiser must be SGD with lr = step_size * num_clients = {wanted:g}, got "
                f"{type(optimizer).__name__} with {sorted(rates)}"
            )

    def _federated(self, trainer: pl.Trainer) -> Federation:
        federated, order = find_federated(trainer, "Langevin"), get_callbacks(trainer)
        if order.index(federated) > order.index(self):
            raise ValueError("Langevin must stand behind Federated in the list of callbacks")
        return federated

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the last batch of a round: add the missing noise, count the sample."""
        federated = find_federated(trainer, "Langevin")
        engine = federated.engine
        assert engine is not None
        if engine.plan is not None:
            return
        record = federated.records[-1]
        if record.aborted or record.clip_rate > 0.0 or record.non_finite_clients:
            raise ValueError(
                f"round {record.round + 1} was aborted, clipped or held a NaN, so its step is not "
                "Langevin's; raise clip_norm or lower step_size"
            )
        plan = engine.planner.plan(record.round, engine.mechanism)
        context = engine.context(plan)
        missing = 2.0 * self.step_size - self._error_variance(federated, context, plan.cohort)
        if bool((missing < 0.0).any()):
            raise ValueError(
                f"the compressor's variance exceeds 2 step_size = {2.0 * self.step_size:g} by "
                f"{-missing.min().item():.3g}; lower noise_multiplier"
            )
        stream = PublicRandomness(engine.keys, record.round).members("langevin noise")
        normal = torch.special.ndtri(torch.from_numpy(stream.uniforms(context.dim)))
        noise = context.expand(missing.cpu()).sqrt() * normal
        engine.weights += noise.to(engine.weights)
        copy_into(engine.weights, list(pl_module.parameters()))
        self._add_sample(engine.weights.detach().double().cpu(), record.round)

    @staticmethod
    def _error_variance(federated: Federation, context: Any, cohort: tuple[int, ...]) -> Tensor:
        variance = federated.mechanism.noise_variance(context, cohort)
        assert variance is not None  # all mechanisms that `on_fit_start` lets through state it
        return variance

    def _add_sample(self, weights: Tensor, round: int) -> None:
        if round < self.burn_in:
            return
        if not self.num_samples:
            self.mean, self._squares = torch.zeros_like(weights), torch.zeros_like(weights)
        self.num_samples += 1
        away = weights - self.mean
        self.mean = self.mean + away / self.num_samples
        self._squares = self._squares + away * (weights - self.mean)

    def state_dict(self) -> dict[str, Any]:
        """The running moments."""
        return {"num_samples": self.num_samples, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the running moments of a checkpoint."""
        self.num_samples = state_dict["num_samples"]
        self.mean, self._squares = state_dict["mean"], state_dict["squares"]
