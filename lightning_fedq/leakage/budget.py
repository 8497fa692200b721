"""`LeakageBudget`: callback of near-optimal utility that sets noise and batch sampling of each round.

Before a round, it computes the gradients of a few samples of a client. It finds the noise that keeps the
measured leakage of one step within the mechanism's budget (`leakage.control`). It then solves for the
probability with which each sample joins a batch (`leakage.batch_sampling`). Both are applied: the mechanism
of the round has the noise, and every local batch is a Poisson sample of the client's data (an empty batch is
no step).

Departures from the paper's Algorithm 1, with reasons:

* The noise depends on what an attack recovers, not on Lemma 6.8, which leaves every image recoverable.
* Every round has one std, the largest that a client of its cohort needs. A sum has one grid, and a different
  std per client would reveal facts about that client's data to the server.
* A round of several steps varies as much as all of them, so each step has to contribute its share of C6 TV.
* C6 bounds a squared distance to the optimum, which is unknown in a run. Unless `max_squared_distance` is
  given, the mean squared length of one step replaces it. The probability is a heuristic in any case, because
  no sampling restores utility.

A measurement is used for `every_n_rounds` rounds, and clients are measured in turns. None of this is
differential privacy. Settings that were chosen by looking at data are themselves a release.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.clients.stack import StackedStep, further_arguments
from lightning_fedq.data.batches import LocalWork
from lightning_fedq.data.generator_turns import seed_everywhere
from lightning_fedq.functional.checks import check_at_least
from lightning_fedq.leakage.batch_sampling import GradientMoments, solve_probability, update_variance
from lightning_fedq.leakage.control import allowed_hits, check_controllable, noise_for_budget
from lightning_fedq.leakage.gradients import in_mode
from lightning_fedq.leakage.total_variation import isotropic_tv
from lightning_fedq.rounds import RoundPlan
from lightning_fedq.training.client_metrics import log_figure

_LEAST_SAMPLES = 4


class ClientSetting(NamedTuple):
    """Measured leakage of one client, and the noise and sampling that follow.

    Args:
        round: Round of the measurement.
        std: Standard deviation of the noise that the client needs.
        leakage: Upper confidence limit of its leakage at that std.
        unprotected: Leakage without noise, C1.
        tv: Total variation distance between its noisy and its noiseless update, in the Gaussian model.
        probability: Probability with which a sample joins a batch.
        feasible: Whether batches of this probability vary as much as they should.
    """

    round: int
    std: float
    leakage: float
    unprotected: float
    tv: float
    probability: float
    feasible: bool


class LeakageBudget(pl.Callback):
    """Leakage budget that sets noise and batch sampling of `NearOptimalUtility`.

    Logs `leak/noise_std`, `leak/limit` (largest upper limit of the cohort), `leak/unprotected`, `leak/tv`,
    `leak/sampling_probability`, `leak/sampling_feasible` (means over the cohort) and `leak/budget_seconds`.
    The clients train one at a time.

    Args:
        probe_size: Number of samples of a client whose gradients are computed, >= 4. They are the attacker's
            candidates.
        attempts: Number of attempts of each measured attack, >= 1.
        every_n_rounds: Number of rounds after which a client is measured again, >= 1.
        max_squared_distance: Bound C6 on the squared distance of a client's parameters to the optimum, > 0.
            None uses the mean squared length of one step instead.
        on_infeasible: Action where no probability gives batches enough variance. "warn" uses the best one,
            "raise" stops the run.

    Attributes:
        settings: Setting of every client that was measured, by client.
        seconds: Time spent so far, in seconds.

    Raises:
        ValueError: If a setting is out of its range.

    Examples:
        >>> callbacks = [LeakageBudget(probe_size=16)]  # behind Federated(NearOptimalUtility(...))
    """

    knows_clients = True

    skips_empty = True

    only_simulated = True
    follows_clients: ClassVar[bool] = True
    """Whether the callback writes values that follow from drawn clients' data. Secret cohorts refuse it."""

    def __init__(
        self,
        probe_size: int = 32,
        attempts: int = 1000,
        every_n_rounds: int = 20,
        *,
        max_squared_distance: float | None = None,
        on_infeasible: Literal["warn", "raise"] = "warn",
    ) -> None:
        check_at_least(_LEAST_SAMPLES, probe_size=probe_size)
        check_at_least(1, attempts=attempts, every_n_rounds=every_n_rounds)
        if max_squared_distance is not None and not max_squared_distance > 0.0:
            raise ValueError(f"max_squared_distance must be > 0 or None, got {max_squared_distance}")
        if on_infeasible not in ("warn", "raise"):
            raise ValueError(f"on_infeasible must be 'warn' or 'raise', got {on_infeasible!r}")
        self.probe_size, self.attempts, self.every_n_rounds = probe_size, attempts, every_n_rounds
        self.max_squared_distance, self.on_infeasible = max_squared_distance, on_infeasible
        self.settings: dict[int, ClientSetting] = {}
        self.seconds = 0.0
        self._round, self._std, self._warned = -1, 0.0, False
        self._loaded = False
        self._metrics: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take over the batches of the federation.

        Raises:
            ValueError: If the mechanism's noise can't follow from a leakage budget.
        """
        if stage != "fit":
            return
        self._federated = find_federated(trainer, "LeakageBudget")
        self._mechanism = check_controllable(self._federated.mechanism)
        allowed_hits(self.attempts, self.probe_size, self._mechanism.leakage_budget)
        self._trainer, self._module = trainer, pl_module
        self._federated.use_batches(self)

    # ---- the batch rule -----------------------------------------------------------------------------

    def begin(self, work: LocalWork) -> None:
        """Check the clients' data, and keep the measurements of a loaded checkpoint only.

        Raises:
            ValueError: If a client has fewer than 4 samples.
        """
        # the attacker of a measurement needs several candidates
        sizes = map(len, work.client_indices)
        small = [client for client, size in enumerate(sizes) if size < _LEAST_SAMPLES]
        if small:
            raise ValueError(
                f"LeakageBudget needs {_LEAST_SAMPLES} samples of each client, but clients {small[:10]} have "
                "fewer. Use fewer clients, or a partition with a larger minimum: "
                "Dirichlet(alpha, min_partition_size=...)."
            )
        self._work = work
        if not self._loaded:
            self.settings, self._round = {}, -1
        self._loaded = False

    def keys(self, client: int, steps: int) -> tuple[bytes, ...]:
        """Return no keys, because the draws follow from the seed."""
        return ()

    def draw(self, round: int, attempt: int, clients: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Set noise and sampling for the round, then draw the batches of all steps of each client."""
        plan = self._federated.planner.plan(round, self._mechanism)
        start = time.perf_counter()
        if round != self._round:
            self._measure(plan, clients)
            self._round = round
        self._apply(clients)
        spent = time.perf_counter() - start
        self.seconds += spent
        self._metrics["budget_seconds"] = spent
        return [self._sample(plan, client) for client in clients]

    def _sample(self, plan: RoundPlan, client: int) -> tuple[Tensor, ...]:
        """Return the batches of one client, one tensor of sample indices per step."""
        indices, steps = self._work.client_indices[client], len(self._work.sizes[client])
        generator = torch.Generator().manual_seed(plan.stream_seed("poisson batches", client))
        draws = torch.rand(steps, len(indices), generator=generator, dtype=torch.float64)
        return tuple(indices[row] for row in draws < self.settings[client].probability)

    # ---- the decision -------------------------------------------------------------------------------

    def _measure(self, plan: RoundPlan, clients: Sequence[int]) -> None:
        """Measure the clients that are due, then choose their probabilities under the round's noise."""
        moments: dict[int, GradientMoments] = {}
        rate = self._trainer.optimizers[0].param_groups[0]["lr"]
        for client in clients:
            old = self.settings.get(client)
            if old is not None and plan.round - old.round < self.every_n_rounds:
                continue
            gradients, num_samples = self._gradients(plan, client), len(self._work.client_indices[client])
            moments[client] = GradientMoments.from_gradients(gradients, num_samples)
            generator = torch.Generator().manual_seed(plan.stream_seed("leakage attempts", client))
            clip_norm, budget = self._mechanism.clip_norm, self._mechanism.leakage_budget
            level = noise_for_budget(rate * gradients, clip_norm, budget, self.attempts, generator)
            # the first measurement counts as if it had been earlier, by another number of rounds for each
            # client, so that later measurements are spread over the rounds
            when = plan.round if old is not None else plan.round - client % self.every_n_rounds
            probability = min(self._work.batch_size / num_samples, 1.0)
            probability = probability if old is None else old.probability
            self.settings[client] = ClientSetting(when, *level, 0.0, probability, True)
        self._std = max((self.settings[client].std for client in clients), default=self._mechanism.noise_std)
        for client, client_moments in moments.items():
            self._choose_probability(plan.round, client, client_moments, rate)

    def _gradients(self, plan: RoundPlan, client: int) -> Tensor:
        """Return `(probe_size, dim)` per-sample gradients of the user's training step at the global model.

        Raises:
            ValueError: If the training step can't be mapped over samples.
        """
        module, trainer, fit = self._module, self._trainer, self._federated.fit
        indices, seed = self._work.client_indices[client], plan.stream_seed("probe", client)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(indices), generator=generator)[: self.probe_size]
        batch: Any = trainer.precision_plugin.convert_input(fit.fetch(indices[chosen][:, None]))
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        step = StackedStep(module, fit.vector.names)
        parameters = dict(module.named_parameters())
        weights = [parameters[name].detach() for name in fit.vector.names]
        device = trainer.strategy.root_device
        cuda = [device.index or 0] if device.type == "cuda" else []
        try:
            with in_mode(module, training=True), torch.random.fork_rng(cuda):
                seed_everywhere(seed)
                with trainer.precision_plugin.train_step_context():
                    _, gradients, _ = step(weights, batch, *further_arguments(module), common=True)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                "LeakageBudget needs per-sample gradients, but training_step can't be mapped over samples: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
        return torch.cat([part.reshape(len(part), -1) for part in gradients], dim=1).detach()

    def _choose_probability(self, round: int, client: int, moments: GradientMoments, rate: float) -> None:
        """Set one client's sampling probability and total variation distance, under the round's noise.

        Raises:
            ValueError: If no probability is feasible and `on_infeasible` is "raise".
        """
        setting, steps = self.settings[client], len(self._work.sizes[client])
        dim = self._federated.started_engine.weights.numel()
        spread = steps * update_variance(moments, setting.probability, rate)
        # without variance of the batches, any noise is at distance 1
        tv = isotropic_tv(dim, dim * self._std**2 / spread) if spread > 0.0 else 1.0
        c6 = self.max_squared_distance
        if c6 is None:
            c6 = rate**2 * moments.sum_squares / moments.num_samples
        found = solve_probability(moments, c6 * tv / steps, rate)
        if not found.feasible:
            message = f"round {round + 1}, client {client}: {found.reason}"
            if self.on_infeasible == "raise":
                raise ValueError(message)
            if not self._warned:
                rank_zero_warn(f"LeakageBudget uses the best sampling probability. {message}")
                self._warned = True
        self.settings[client] = setting._replace(tv=tv, probability=found.value, feasible=found.feasible)

    def _apply(self, clients: Sequence[int]) -> None:
        """Set the noise of the round's mechanism, and the metrics of the round."""
        cohort = [self.settings[client] for client in clients]
        if not cohort:
            self._metrics = {}
            return
        limit = max(setting.leakage for setting in cohort)
        engine = self._federated.started_engine
        engine.mechanism = replace(self._mechanism, noise_std=self._std, measured_leakage=limit)
        self._metrics = {
            "noise_std": self._std,
            "limit": limit,
            "unprotected": sum(setting.unprotected for setting in cohort) / len(cohort),
            "tv": sum(setting.tv for setting in cohort) / len(cohort),
            "sampling_probability": sum(setting.probability for setting in cohort) / len(cohort),
            "sampling_feasible": sum(setting.feasible for setting in cohort) / len(cohort),
        }

    # ---- Lightning ----------------------------------------------------------------------------------

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log noise, leakage and sampling of the round."""
        if not trainer.barebones:
            for name, value in self._metrics.items():
                log_figure(pl_module, f"leak/{name}", float(value))

    def unprotected_outputs(self, trainer: pl.Trainer) -> str:
        """Return a sentence for the report on measurements that are logged without noise."""
        return "Measurements on the clients' own data that set their noise: `leak/*`, and in checkpoints."

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of every client, and the round for which they were chosen."""
        settings = {str(client): list(setting) for client, setting in self.settings.items()}
        return {"round": self._round, "std": self._std, "settings": settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the stored measurements. A round that restarts gets the same noise and batches."""
        self._round, self._std, self._loaded = state_dict["round"], state_dict["std"], True
        stored = state_dict["settings"].items()
        self.settings = {int(client): ClientSetting(*values) for client, values in stored}
