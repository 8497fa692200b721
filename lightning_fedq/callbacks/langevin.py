"""`Langevin`: sample the posterior with a federation, using the compressor's error as noise.

Let U_i be the loss of client i, summed over its data (its part of the negative log posterior). The chain
theta <- theta - g sum_i grad U_i + N(0, 2 g I) samples exp(-sum_i U_i), up to a bias of order g. If each of
the n clients takes one full-batch SGD step with learning rate g n, the mean update is the drift. A mechanism
whose mean error is exactly Gaussian contributes a known part of the noise, and this callback adds the rest.

Departure from the paper's algorithm 6 (`reproductions.exact.langevin`): the compressor's noise is fixed in
advance and not scaled by each client's largest coordinate, so no float is sent. Updates are clipped by the
mechanism. A clipped update would bias the drift, so a round that clips is refused.

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
    """Langevin sampling with a federation. Put it behind `Federated` in the list of callbacks.

    Args:
        step_size: Step size g of the chain, > 0. The clients' SGD needs learning rate g times the number of
            clients.
        burn_in: Number of first rounds whose samples are discarded, >= 0.

    Attributes:
        num_samples: Number of rounds whose samples count.
        mean: Running mean of the weights, `(dim,)` float64, which estimates the posterior mean.

    Raises:
        ValueError: If step_size or burn_in is out of its range.

    Examples:
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
        """Running variance of the weights, `(dim,)` float64, which estimates the posterior variance.

        Raises:
            ValueError: If fewer than two samples count.
        """
        if self.num_samples < 2:
            raise ValueError(f"A variance needs 2 samples, got {self.num_samples}. Run more rounds.")
        return self._squares / (self.num_samples - 1)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse settings with which the chain would sample another distribution."""
        federated = self._federated(trainer)
        planner, mechanism = federated.planner, federated.mechanism
        if not mechanism.gaussian_error:
            raise ValueError(
                f"The error of {type(mechanism).__name__} is not exactly Gaussian with a known variance. "
                "Use LayeredGaussian, AggregateGaussian or FedAvg."
            )
        if planner.cohort_size != planner.num_clients or planner.dropout_probability:
            raise ValueError("Missing clients would bias the drift. Let all clients answer in every round.")
        if (
            federated.server.server_lr != 1.0
            or federated.server.sends != "updates"
            or federated.server.server_optimizer
            or federated.server.broadcast_bits
            or federated.local.statistics
        ):
            raise ValueError(
                "Langevin moves the model by the mean update itself. Use sends='updates', server_lr=1.0, no "
                "server_optimizer, no broadcast_bits and no statistics."
            )
        if not federated.server.diagnostics:
            raise ValueError("Langevin must detect clipped updates. Use Federated(diagnostics=True).")
        lr = self.step_size * federated.clients.num_clients
        optimizer = trainer.optimizers[0]
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        if not isinstance(optimizer, torch.optim.SGD) or any(abs(r / lr - 1.0) > 1e-9 for r in rates):
            raise ValueError(
                f"The clients' optimiser must be SGD with lr = step_size * num_clients = {lr:g}, got "
                f"{type(optimizer).__name__} with {sorted(rates)}"
            )

    def _federated(self, trainer: pl.Trainer) -> Federation:
        federated, order = find_federated(trainer, "Langevin"), get_callbacks(trainer)
        if order.index(federated) > order.index(self):
            raise ValueError("Langevin must come behind Federated in the list of callbacks")
        return federated

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the missing noise after the last batch of a round, and update the running moments."""
        federated = find_federated(trainer, "Langevin")
        engine = federated.started_engine
        if engine.plan is not None:
            return
        record = federated.records[-1]
        if record.aborted or record.clip_rate > 0.0 or record.non_finite_clients:
            raise ValueError(
                f"Round {record.round + 1} was aborted, clipped or had a NaN, so it is no Langevin step. "
                "Raise clip_norm, or lower step_size."
            )
        plan = engine.planner.plan(record.round, engine.mechanism)
        context = engine.context(plan)
        variance = engine.mechanism.noise_variance(context, plan.cohort)
        assert variance is not None  # `on_fit_start` refuses mechanisms that do not state it
        missing = 2.0 * self.step_size - variance
        if bool((missing < 0.0).any()):
            raise ValueError(
                f"The compressor's variance exceeds 2 step_size = {2.0 * self.step_size:g} by "
                f"{-missing.min().item():.3g}. Lower noise_multiplier."
            )
        stream = PublicRandomness(engine.keys, record.round).members("langevin noise")
        normal = torch.special.ndtri(torch.from_numpy(stream.uniforms(context.dim)))
        noise = context.expand(missing.cpu()).sqrt() * normal
        engine.weights += noise.to(engine.weights)
        copy_into(engine.weights, list(pl_module.parameters()))
        self._add_sample(engine.weights.detach().double().cpu(), record.round)

    def _add_sample(self, weights: Tensor, round: int) -> None:
        if round < self.burn_in:
            return
        if not self.num_samples:
            self.mean, self._squares = torch.zeros_like(weights), torch.zeros_like(weights)
        self.num_samples += 1
        deviation = weights - self.mean  # Welford's update of mean and sum of squares
        self.mean = self.mean + deviation / self.num_samples
        self._squares = self._squares + deviation * (weights - self.mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the running moments."""
        return {"num_samples": self.num_samples, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the running moments of a checkpoint."""
        self.num_samples = state_dict["num_samples"]
        self.mean, self._squares = state_dict["mean"], state_dict["squares"]
