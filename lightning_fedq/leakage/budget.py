"""`LeakageBudget`: the controller of the near-optimal-utility paper: noise and batches, round by round.

Before a round it takes the gradients of a few samples of a client, finds the noise that keeps the measured
leakage of one step within the mechanism's budget (`leakage.control`), and solves for the probability with
which each sample joins a batch (`leakage.batch_sampling`). Both are applied: the round's mechanism
has the noise, and every local batch is a Poisson sample of its client's data (an empty one is no step).

Where it departs from the paper's Algorithm 1 and why:

* Noise by what an attack recovers, not by Lemma 6.8, which leaves every image recoverable.
* One std a round, the largest that a client of its cohort needs: a sum has one grid, and a std of each
  client's own would tell the server about that client's data.
* A round of several steps varies as much as all of them, so each step has to bring its share of C6 TV.
* C6 bounds a squared distance to the optimum that nobody knows in a run. Unless `max_squared_distance` is
  given, the mean squared length of one step stands for it. The probability is a heuristic in any case: no
  sampling buys back utility.

A measurement is used for `every_n_rounds` rounds; clients take turns. None of this is differential privacy,
and what was chosen by looking at data is itself a release.
"""

import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.clients.stack import StackedStep, further_arguments
from lightning_fedq.data.batches import LocalWork
from lightning_fedq.data.generator_turns import seed_everywhere
from lightning_fedq.leakage.batch_sampling import GradientMoments, solve_probability, update_variance
from lightning_fedq.leakage.control import (
    NoiseLevel,
    allowed_hits,
    check_controllable,
    noise_for_budget,
    with_noise,
)
from lightning_fedq.leakage.total_variation import isotropic_tv
from lightning_fedq.rounds import RoundPlan
from lightning_fedq.training.client_metrics import log_figure

_LEAST_SAMPLES = 4


class ClientSetting(NamedTuple):
    """Measured leakage of one client, and the noise and sampling that follow.

    Args:
        std: Noise std that the client needs.
        leakage: Upper confidence limit of its leakage at that std.
        unprotected: C1, its leakage without noise.
        tv: Distance between its distorted and its undistorted update, in the Gaussian model.
        probability: Chance with which a sample joins a batch.
        feasible: Do batches of this probability vary as much as they should?
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
    `leak/sampling_probability`, `leak/sampling_feasible` (means over the cohort) and
    `leak/budget_seconds`. The clients train one at a time.

    Args:
        probe: Samples of a client whose gradients are looked at, the attacker's candidates, >= 4.
        attempts: Attempts of each measured attack, >= 1.
        every_n_rounds: A client is measured anew after so many rounds, >= 1.
        max_squared_distance: C6, bound on the squared distance of a client's parameters to the optimum,
            > 0; None takes the mean squared length of one step in its place.
        on_infeasible: What happens where no probability gives batches enough variance: "warn" takes the one
            that comes closest, "raise" stops.

    Attributes:
        settings: Settings of every client that was measured, by client.
        seconds: Time spent so far.

    Raises:
        ValueError: If a setting is out of its range.

    Example:
        >>> callbacks = [LeakageBudget(probe=16)]  # behind Federated(NearOptimalUtility(...))
    """

    knows_clients = True

    skips_empty = True

    only_simulated = True
    follows_clients: ClassVar[bool] = True
    """Does it write what follows from the drawn clients' data? Secret cohorts refuse it."""

    def __init__(
        self,
        probe: int = 32,
        attempts: int = 1000,
        every_n_rounds: int = 20,
        *,
        max_squared_distance: float | None = None,
        on_infeasible: Literal["warn", "raise"] = "warn",
    ) -> None:
        for name, value, least in (
            ("probe", probe, _LEAST_SAMPLES),
            ("attempts", attempts, 1),
            ("every_n_rounds", every_n_rounds, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if max_squared_distance is not None and not max_squared_distance > 0.0:
            raise ValueError(f"max_squared_distance must be > 0 or None, got {max_squared_distance}")
        if on_infeasible not in ("warn", "raise"):
            raise ValueError(f"on_infeasible must be 'warn' or 'raise', got {on_infeasible!r}")
        self.probe, self.attempts, self.every_n_rounds = probe, attempts, every_n_rounds
        self.max_squared_distance, self.on_infeasible = max_squared_distance, on_infeasible
        self.settings: dict[int, ClientSetting] = {}
        self.seconds = 0.0
        self._round, self._std, self._warned = -1, 0.0, False
        self._loaded = False
        self._metrics: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take over the batches of the federation."""
        if stage != "fit":
            return
        self._federated = find_federated(trainer, "LeakageBudget")
        self._mechanism = check_controllable(self._federated.mechanism)
        allowed_hits(self.attempts, self.probe, self._mechanism.leakage_budget, 0.95)
        self._trainer, self._module = trainer, pl_module
        self._federated.use_batches(self)

    # ---- the batch rule -----------------------------------------------------------------------------

    def begin(self, work: LocalWork) -> None:
        """Set the noise of a training's clients from their own data."""
        # what a checkpoint has measured stays measured
        small = [client for client, held in enumerate(work.client_indices) if len(held) < _LEAST_SAMPLES]
        if small:
            raise ValueError(
                f"LeakageBudget needs {_LEAST_SAMPLES} samples of each client to tell apart, clients "
                f"{small[:10]} hold fewer; use fewer clients, or a partition with a larger least, such as "
                "Dirichlet(alpha, least=...)"
            )
        self._work = work
        if not self._loaded:
            self.settings, self._round = {}, -1
        self._loaded = False

    def keys(self, client: int, steps: int) -> tuple[bytes, ...]:
        """No secrets: draws follow from the seed."""
        return ()

    def draw(self, round: int, attempt: int, clients: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Decide for the round, then flip a coin for every sample and step."""
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
        held, steps = self._work.client_indices[client], len(self._work.sizes[client])
        generator = torch.Generator().manual_seed(plan.stream_seed("poisson batches", client))
        coins = torch.rand(steps, len(held), generator=generator, dtype=torch.float64)
        return tuple(held[row] for row in coins < self.settings[client].probability)

    # ---- the decision -------------------------------------------------------------------------------

    def _measure(self, plan: RoundPlan, clients: Sequence[int]) -> None:
        """Measure who is due, then choose their probabilities under the round's noise."""
        moments: dict[int, GradientMoments] = {}
        rate = self._trainer.optimizers[0].param_groups[0]["lr"]
        for client in clients:
            old = self.settings.get(client)
            if old is not None and plan.round - old.round < self.every_n_rounds:
                continue
            gradients = self._gradients(plan, client)
            moments[client] = GradientMoments.from_gradients(
                gradients, len(self._work.client_indices[client])
            )
            generator = torch.Generator().manual_seed(plan.stream_seed("leakage attempts", client))
            mechanism = self._mechanism
            level = noise_for_budget(
                rate * gradients, mechanism.clip_norm, mechanism.leakage_budget, self.attempts, generator
            )
            # the first time as if clients had been measured one after the other, so that they take turns
            when = plan.round if old is not None else plan.round - client % self.every_n_rounds
            probability = min(self._work.batch_size / len(self._work.client_indices[client]), 1.0)
            probability = probability if old is None else old.probability
            self.settings[client] = ClientSetting(when, *level, 0.0, probability, True)
        self._std = max((self.settings[client].std for client in clients), default=self._mechanism.noise_std)
        for client, own in moments.items():
            self._choose_probability(plan.round, client, own, rate)

    def _gradients(self, plan: RoundPlan, client: int) -> Tensor:
        """`(probe, dim)` gradients of the user's own training step at the global model, one a sample.

        Raises:
            ValueError: If the training step can't be mapped over samples.
        """
        module, held = self._module, self._work.client_indices[client]
        seed = plan.stream_seed("probe", client)
        chosen = torch.randperm(len(held), generator=torch.Generator().manual_seed(seed))[: self.probe]
        trainer = self._trainer
        batch: Any = trainer.precision_plugin.convert_input(self._federated.fit.fetch(held[chosen][:, None]))
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        step = StackedStep(module, self._federated.fit.vector.names)
        parameters = dict(module.named_parameters())
        weights = [parameters[name].detach() for name in self._federated.fit.vector.names]
        training = [part for part in module.modules() if not part.training]
        module.train()
        try:
            with torch.random.fork_rng(self._devices()):
                seed_everywhere(seed)
                with trainer.precision_plugin.train_step_context():
                    _, found, _ = step(weights, batch, *further_arguments(module), common=True)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                "LeakageBudget needs the gradient of every sample, and training_step can't be mapped over "
                f"samples: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
        finally:
            for part in training:
                part.training = False
        return torch.cat([part.reshape(len(part), -1) for part in found], dim=1).detach()

    def _devices(self) -> list[int]:
        device = self._trainer.strategy.root_device
        return [device.index or 0] if device.type == "cuda" else []

    def _choose_probability(self, round: int, client: int, moments: GradientMoments, rate: float) -> None:
        setting, steps = self.settings[client], len(self._work.sizes[client])
        engine = self._federated.engine
        assert engine is not None
        dim = engine.weights.numel()
        spread = steps * update_variance(moments, setting.probability, rate)
        # batches that never vary: any noise is at distance 1
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
                rank_zero_warn(f"LeakageBudget takes the sampling probability that comes closest. {message}")
                self._warned = True
        self.settings[client] = setting._replace(tv=tv, probability=found.value, feasible=found.feasible)

    def _apply(self, clients: Sequence[int]) -> None:
        """Give the round its noise."""
        cohort = [self.settings[client] for client in clients]
        engine = self._federated.engine
        assert engine is not None
        if not cohort:
            self._metrics = {}
            return
        limit = max(setting.leakage for setting in cohort)
        engine.mechanism = with_noise(self._mechanism, NoiseLevel(self._std, limit, 0.0))
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
        """Log what the round was given."""
        if not trainer.barebones:
            for name, value in self._metrics.items():
                log_figure(pl_module, f"leak/{name}", float(value))

    def unprotected_outputs(self, trainer: pl.Trainer) -> str:
        """Notice of what measurements and checkpoints are made from."""
        return "What is measured on the clients' own data to set their noise: `leak/*`, and in checkpoints."

    def state_dict(self) -> dict[str, Any]:
        """The settings of every client, and for which round they were chosen."""
        settings = {str(client): list(setting) for client, setting in self.settings.items()}
        return {"round": self._round, "std": self._std, "settings": settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what was measured. A round that begins anew gets the same noise and batches."""
        self._round, self._std, self._loaded = state_dict["round"], state_dict["std"], True
        self.settings = {
            int(client): ClientSetting(*values) for client, values in state_dict["settings"].items()
        }
