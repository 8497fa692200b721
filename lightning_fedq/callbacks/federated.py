"""`Federated`: one callback makes an ordinary Lightning training federated.

One Lightning epoch is one round. During a fit the callback replaces the training loader of the user's data
module (or module) by its own, and the Trainer's loops by loops that run a round. In a round every client
trains in a separate fit on a copy of the module (`clients`). The round engine aggregates the updates
(`rounds`), and the server's step goes into the user's module (`training.fit`). So the user's module holds the
global model all the time.

This file defines the arguments, which become four frozen groups of settings (`training.settings`), and the
Lightning hooks. Objects that belong to one fit are made when it starts (`training.fit`), on the clients of
that fit (`training.population`).

A checkpoint that is written during a round describes the state before that round. A resumed run repeats the
round: with the same random streams if there is a seed, otherwise with new keys and another charge. The
ledger's journal (`training.journal`) is stored next to the checkpoints, so that no charge is lost when a
process is killed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_info
from lightning_fedq.algorithms import LocalAlgorithm
from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation, Weighting
from lightning_fedq.callbacks.logged_settings import log_settings
from lightning_fedq.clients.constraints import Constraint
from lightning_fedq.clients.evaluation import ClientEvaluation
from lightning_fedq.clients.undo import Undo
from lightning_fedq.clients.vector import BufferMode
from lightning_fedq.data.batches import BatchRule
from lightning_fedq.data.labels import Labels, label_figure
from lightning_fedq.data.partition import IID, Partition
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.ranges import RangeRule
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.cohorts import CohortLaw
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.target import Calibration, PrivacyTarget
from lightning_fedq.rounds import Deadline, OptimizerFactory, Statistics
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training import settings
from lightning_fedq.training.checkpoints import check_federation, reset_unfinished_round
from lightning_fedq.training.checks import (
    check_averaging,
    check_batch_rule,
    check_loader_is_ours,
    check_resumable,
    check_setup,
    check_shapes,
)
from lightning_fedq.training.client_evaluation import describe_evaluation_outputs, describe_statistics_outputs
from lightning_fedq.training.client_metrics import ClientMetricsChoice
from lightning_fedq.training.fit import FederatedFit
from lightning_fedq.training.loops import forget_loader, install_round_loop
from lightning_fedq.training.population import Population, SimulatedClients
from lightning_fedq.training.privacy_target import CalibratedTarget
from lightning_fedq.training.secret_cohorts import check_processes, check_settings
from lightning_fedq.training.settings import Clients, Federation, Local, Protection, Server, group
from lightning_fedq.training.user_messages import describe_outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Federated(Federation, pl.Callback):
    """Federated training for an ordinary Trainer, module and data module.

    Args:
        mechanism: Mechanism that compresses and privatises the clients' updates, e.g.
            `CorBin(epsilon_per_coordinate=5.0)`.
        num_clients: Number of clients of the federation, >= 1.
        cohort: Rule that selects the clients of a round (`privacy.cohorts`): `FixedSize(10)`, `Cyclic(10)`,
            `DisjointOnce(10)`, `Poisson(10)`, `Available(rule, 10)` or `Everybody()`. A number n means
            `FixedSize(n)`, and None means that all clients take part in every round.
        dropout_probability: Probability in [0, 1) with which a client of the cohort does not answer.
        deadline: Time limit of a round, after which stragglers are dropped. Privacy claims then assume the
            fewest answers that the round accepts, whichever clients are missing. None waits for all clients.
        partition: Partition of the samples over the clients. A `FederatedDataModule` may set it instead.
        labels: Labels for label-based partitions, if they are not found automatically: the index or key of
            the label in a sample, or a sequence with one integer for each sample.
        algorithm: Local algorithm, which corrects the clients' gradients or keeps a part of their updates
            for later: `FedProx(mu)`, `SCAFFOLD()`, `FedDyn(alpha)` or `ErrorFeedback(fraction)`. None is
            federated averaging.
        local_epochs: Number of passes of each client over its data in a round, >= 1. The Trainer's
            `limit_train_batches` shortens every pass of every client.
        local_steps: Number of batches of each client in a round, >= 1, instead of `local_epochs`.
        clients_per_step: Number of clients that train together in one step as one batch of clients, >= 1.
            "auto" chooses it from the size of the model and of a step, never from timing
            (`clients.stack_size`). Any number gives the same weights up to rounding, including dropout
            masks, random transforms of the data and other random numbers of the training.
        sends: Quantity that is quantised: "updates" (local - global) or, as in the CorBin paper, "weights".
        ranges: Rule for the range of the quantiser. None is `AdaptiveRange()` for updates and
            `PreviousMinMax()` for weights.
        server_lr: Server learning rate lambda in (0, 1]. The server moves the model from w to
            (1 - lambda) w + lambda w_new.
        server_optimizer: Function from parameters to a torch optimiser, whose gradient is minus the mean
            update. None applies the mean update itself.
        weighting: Weights of the clients in the mean update. "uniform" gives all clients the same weight.
            "samples" weights by the number of samples that a client holds, also if `local_steps` or a limit
            uses fewer in a round. "inverse_variance" weights by one over the noise variance of a client's
            messages, for clients with different epsilons.
        aggregator: Robust aggregation in place of the mean, e.g. `RobustAggregation("median")`. The server
            then sees every message, so it can't be combined with secure aggregation.
        secure_aggregation: Secure aggregation for every round, so that the server sees only the sum.
        buffers: Handling of buffers that training changes, such as BatchNorm's running statistics. "share"
            adds them to the update as coordinates, which are quantised, averaged and charged like
            parameters. "local" keeps them on each client, and the evaluated model has their initial values.
            "frozen" trains normalisation layers in eval mode.
        personal_parameters: Name patterns of personalised parameters and buffers, such as `["head.*"]`
            (FedPer, LG-FedAvg). They stay on the client, which trains them and continues with them in its
            next round. They are in no message and no claim, and the validated model has their initial values.
        seed: Number that makes a run reproducible, and not private. All random draws follow from it. None
            draws keys and cohorts from the operating system.
        diagnostics: Whether to compare each aggregate with the exact mean, which only a simulation knows.
        ledger: Privacy ledger of an earlier training with the same clients (`other.ledger`), to which this
            training adds its charges. None starts a new ledger.
        client_metrics: Handling of metrics that `self.log` in training computes from one client's data.
            "shared" logs them as usual, without noise. "none" drops them. "local" keeps them with the
            client, which in a simulation means a separate file in the run folder. None is "shared" if
            nothing is private anyway (a seed, or no privacy claim), otherwise "local".
        privacy: Privacy target, which sets the mechanism's privacy parameter when the fit starts and limits
            the ledger. The parameter follows from the Trainer's rounds, the cohorts, dropouts, corrupt
            clients and dimension. The mechanism's own value of it is ignored.
        check_isolation: Whether to check before the first round that clients are isolated
            (`training.isolation`). A client trains alone and next to another client, in forked processes if
            possible. Its update and all other outputs must be identical. None checks if there is a privacy
            claim, or if `client_metrics` keeps metrics with the clients.
        evaluate_clients: Evaluation of the global model, and of each client's personalised model, on held-out
            samples of every client, e.g. `ClientEvaluation(held_out=0.2)`. The results are handled as
            `client_metrics` handles training metrics.
        extra_buffers: Name patterns of buffers and frozen parameters, such as `["teacher.*"]`, that clients
            send in addition to trained parameters. Tensors that a client's first steps change are found
            automatically. List tensors that change only later, and all of them with Flower, whose server has
            no data to try.
        constraints: Constraints on parameters and buffers by name patterns, such as
            `{"norm.var": "positive"}`. They are enforced on decoded tensors and after each step of `DPSGD`.
            A constraint is "positive", "fixed" (keeps the previous value), "unit" (rows along the last axis
            have length 1), or a function from a decoded tensor to the nearest valid tensor. Variances of
            torch's normalisation layers, the row of `padding_idx`, and weights that torch's `prune` has
            masked are constrained automatically.
        broadcast_bits: Bits per coordinate, 1 to 16, of the model on the downlink. Each segment is rounded to
            2^bits levels between its extremes (`rounds.messages`). The server's model stays exact, and no
            claim changes, because the sent model follows from released values. None sends floats.
        statistics: Release of the mean of one vector per client in the first rounds, for normalisation or
            class weights: `Statistics(size, clip_norm)`. These rounds count in `max_epochs` like all others,
            with the same cohorts, noise and charge. None releases no statistics.

    Attributes:
        clients: Settings of the clients: the arguments from num_clients to labels.
        local: Settings of the clients' training.
        server: Settings of the server.
        mechanism: The mechanism, with the parameter that the privacy target has set.
        ledger: Privacy ledger: rounds charged per client. It outlives fits, failures and servers, and a
            second training adds to it.

    Raises:
        ValueError: If a setting is out of its range, or two settings can't be combined.
        TypeError: If a setting has another type, or if secure aggregation is set for a mechanism that is not
            homomorphic.

    Examples:
        >>> from lightning_fedq import CorBin
        >>> from lightning_fedq.data.datasets import DigitsDataModule
        >>> from lightning_fedq.data.models import Classifier, Linear
        >>> mechanism = CorBin(epsilon_per_coordinate=1.0)
        >>> federated = Federated(mechanism, num_clients=20, seed=0)  # reproducible, not private
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = pl.Trainer(max_epochs=2, callbacks=[federated], enable_checkpointing=False, **quiet)
        >>> trainer.fit(Classifier(Linear(64)), datamodule=DigitsDataModule())
        >>> federated.records[-1].uplink_bits  # of 20 clients with 650 parameters
        13000
    """

    knows_clients = True
    writes_in_rounds = False

    def __init__(
        self,
        mechanism: Mechanism,
        num_clients: int,
        *,
        cohort: CohortLaw | int | None = None,
        dropout_probability: float = 0.0,
        deadline: Deadline | None = None,
        partition: Partition = IID(),  # noqa: B008 (frozen)
        labels: Labels = None,
        algorithm: LocalAlgorithm | None = None,
        local_epochs: int = 1,
        local_steps: int | None = None,
        clients_per_step: int | Literal["auto"] = "auto",
        sends: Literal["updates", "weights"] = "updates",
        ranges: RangeRule | None = None,
        server_lr: float = 1.0,
        server_optimizer: OptimizerFactory | None = None,
        weighting: Weighting = "uniform",
        aggregator: RobustAggregation | None = None,
        secure_aggregation: SecAgg | None = None,
        buffers: BufferMode = "share",
        personal_parameters: Sequence[str] = (),
        seed: int | None = None,
        diagnostics: bool = True,
        ledger: Ledger | None = None,
        client_metrics: ClientMetricsChoice | None = None,
        privacy: PrivacyTarget | None = None,
        check_isolation: bool | None = None,
        evaluate_clients: ClientEvaluation | None = None,
        extra_buffers: Sequence[str] = (),
        constraints: Mapping[str, Constraint] | None = None,
        broadcast_bits: int | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        given = dict(locals())
        protection, clients = group(Protection, given), group(Clients, given)
        self._check_settings(protection, clients, group(Local, given), group(Server, given))

    def _check_settings(self, protection: Protection, clients: Clients, local: Local, server: Server) -> None:
        """Store settings that are valid by themselves, and refuse invalid combinations."""
        mechanism, seed, privacy = protection.mechanism, protection.seed, protection.privacy
        planner = clients.planner(secrets.randbits(63) if seed is None else seed)
        ledger = protection.ledger
        if planner.law.secret:
            check_settings(planner, local, server, seed, privacy, ledger is not None)
            local = replace(local, client_metrics="none")
        settings.check_together(mechanism, clients, local, server, planner)
        self.mechanism, self.seed, self.planner = mechanism, seed, planner
        self.clients, self.local, self.server = clients, local, server
        self.ledger = Ledger(clients.num_clients, repr(mechanism)) if ledger is None else ledger
        self.owns_ledger = ledger is None
        # with a privacy target the mechanism is set, and compared with the ledger, when the fit starts
        self.ledger.check(clients.num_clients, self.ledger.mechanism if privacy else repr(mechanism))
        if privacy is not None:
            check_delta(privacy.delta, clients.num_clients, "clients")
        self.privacy_target = privacy
        self.calibrated_target = None if privacy is None else CalibratedTarget(privacy, mechanism)
        self._is_set_up = False
        self._fit: FederatedFit | None = None
        self._population: Population | None = None
        self._loaded: dict[str, Any] | None = None
        self._undo = Undo()
        self.engine, self.client_log, self.batch_rule, self.clients_per_step_chosen = None, None, None, 0
        self.records, self.client_evaluations, self._followers = [], [], []

    # ---- set up and take off ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse settings that can't work, and replace the user's loader and loops by the federation's."""
        several = [callback for callback in get_callbacks(trainer) if isinstance(callback, Federated)]
        if len(several) > 1:
            mechanisms = " and ".join(type(callback.mechanism).__name__ for callback in several)
            raise ValueError(
                f"The Trainer has {len(several)} Federated callbacks, with {mechanisms}. Leave all but one "
                "out, because a run has one federation and one mechanism."
            )
        self._is_set_up = True
        if stage != "fit":
            return
        check_setup(trainer, pl_module)
        if self.planner.law.secret:
            check_processes(trainer)
        check_averaging(trainer, pl_module)
        if self._fit is not None:
            self._fit.given_up = None
        install_round_loop(trainer, lambda: self.fit.run_round(), self._logged_elsewhere, self._undo)
        self._population = self._make_population(trainer, pl_module)

    def _make_population(self, trainer: pl.Trainer, module: pl.LightningModule) -> Population:
        """Return the clients of the fit that is being set up."""
        return SimulatedClients(self, trainer, module, self._undo)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Partition the data, create the server, and choose how many clients train in one step."""
        population = self._population
        assert population is not None
        population.check_start(trainer)
        check_resumable(trainer)
        if population.ranks is not None:
            check_shapes(pl_module)  # only tensors with a shape can be shared
            population.ranks.share(pl_module)
        forget_loader(trainer)
        target, loaded, undo = self.calibrated_target, self._loaded, self._undo
        fit = FederatedFit(self, target, trainer, pl_module, population, self._fit, loaded, undo)
        self._fit, self._loaded = fit, None
        self.engine, self.records, self.client_log = fit.engine, fit.records, fit.side.log
        self.client_evaluations, self.clients_per_step_chosen = fit.client_evaluations, fit.clients_per_step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a loader that does not serve the clients, and log the settings."""
        check_loader_is_ours(trainer, self.fit.population.loader())
        log_settings(trainer, self)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics of a round as soon as it has ended."""
        if not trainer.barebones:
            self.fit.log_round()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the training if no further round is possible."""
        engine = self.fit.engine
        if engine.round == self.planner.num_rounds:
            trainer.should_stop = True  # every cohort has had its round
        elif self.calibrated_target is not None:
            self.calibrated_target.end_round(self, trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the privacy outcome of the run."""
        for line in describe_outcome(self, trainer):
            rank_zero_info(line)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the user's loader and the Trainer's loops."""
        if stage == "fit":
            self._restore_trainer()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give up the open round, and restore the Trainer."""
        if self._population is not None and self._population.ranks is not None:
            self._population.ranks.fails = True
        if self._fit is not None:
            self._fit.give_up()
        self._restore_trainer()

    def _restore_trainer(self) -> None:
        self._undo.close()
        if self._fit is not None:
            self._fit.end()

    def use_batches(self, rule: BatchRule) -> None:
        """Let a rule draw the local batches until this fit is over. Callbacks call this in their `setup`.

        Raises:
            ValueError: If another rule draws them already, or if several clients train in one step.
        """
        check_batch_rule(rule, self.batch_rule, self.local)
        self._undo.replace(self, "batch_rule", rule)

    # ---- privacy target ---------------------------------------------------------------------------

    def calibrated(self, dim: int, rounds: int, num_byzantine: int) -> Mechanism:
        """Return the mechanism as the privacy target sets it, or unchanged if there is no target.

        Args:
            dim: Number of coordinates of an update.
            rounds: Number of rounds of the run.
            num_byzantine: Number of Byzantine clients, whose noise does not count.

        Raises:
            ValueError: If the target can't be met. The message says which target could be.
        """
        if self.calibrated_target is None:
            return self.mechanism
        return self.calibrated_target.calibrate(self, dim, rounds, num_byzantine).mechanism

    @property
    def calibration(self) -> Calibration | None:
        """Calibrated privacy parameter of the privacy target, from `on_fit_start` on."""
        return None if self.calibrated_target is None else self.calibrated_target.calibration

    # ---- the fit, while it runs and when it is over -----------------------------------------------

    @property
    def fit(self) -> FederatedFit:
        """The present or last fit, from `on_fit_start` on."""
        assert self._fit is not None
        return self._fit

    @property
    def max_batches(self) -> int | None:
        """Number of batches of the longest client in a round. None before the data are partitioned."""
        population = self._population
        if population is None or not population.is_partitioned:
            return super().max_batches
        return population.partitioned_data.schedule.max_batches

    @property
    def client_indices(self) -> list[Tensor]:
        """Sample indices of each client. Empty until the data are partitioned."""
        population = self._population
        if population is None or not population.is_partitioned:
            return []
        return population.partitioned_data.client_indices

    @property
    def training_clients(self) -> tuple[int, ...]:
        """Clients that train in the present batch, in the order of its rows, if several train in one step."""
        present = None if self._fit is None else self._fit.side.present
        return () if present is None else present.clients

    def personal_state(self, client: int) -> dict[str, Tensor]:
        """Return a client's personalised tensors by name. Empty if the client has not trained.

        Load them into the global model with `load_state_dict(..., strict=False)` to get the client's
        personalised model.
        """
        return {name: value.clone() for name, value in self.fit.vector.personal.get_tensors(client).items()}

    def unprotected_outputs(self, trainer: pl.Trainer) -> str:
        """Describe outputs that differential privacy does not cover, and the isolation check's result."""
        log = self.client_log
        measured = describe_evaluation_outputs(self.client_evaluations, log is not None and log.shared)
        released = describe_statistics_outputs(self.fit.engine)
        return " ".join(filter(None, (measured, released, self.fit.isolation, self.fit.averages)))

    def _logged_elsewhere(self, name: str, value: Any) -> None:
        if self.client_log is not None:
            self.client_log.note_validation_metric(name, value)

    # ---- checkpoint -------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint. Before `setup`, every instance has its own.

        A new Trainer refuses callbacks with equal keys. With different keys, `setup` refuses a second
        `Federated` and says what to do. There is no state before `setup`.
        """
        key = str(super().state_key)
        return key if self._is_set_up else f"{key}, instance {id(self)}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the server, the records and the choices of this run, before any open round."""
        if self._fit is None:
            return {}
        if self.planner.law.secret:  # the ledger's state and the plan's seed would reveal the cohorts
            return {"cohorts": "secret"}
        return self._fit.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the federation of a checkpoint.

        Raises:
            ValueError: If the checkpoint belongs to another federation.
        """
        if self.planner.law.secret or "cohorts" in state_dict:
            raise ValueError(
                "A federation with secret cohorts can't resume, since its checkpoint has no ledger. "
                "Load only the weights, begin a new Federated, and add both epsilons."
            )
        own = self.identity()
        if self.calibrated_target is not None:
            self.calibrated_target.check(state_dict.get("calibration"))
            # the mechanism is calibrated again, and compared, when the fit knows the dimension
            own["mechanism"] = state_dict["federation"]["mechanism"]
        check_federation(own, state_dict["federation"])
        self._loaded = state_dict
        if self.seed is None:
            self.set_plan_seed(state_dict["plan_seed"])
        if self._population is not None:
            self._population.forget_partition()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Mark an unfinished round as not begun, because all other state is saved as before the round."""
        reset_unfinished_round(checkpoint["loops"]["fit_loop"])

    # ---- pictures ---------------------------------------------------------------------------------

    def label_figure(self) -> Figure:
        """Draw how many samples of each label each client holds, once the data are partitioned.

        Raises:
            ValueError: If the data set has no integer labels.
        """
        return label_figure(self.fit.population.labels(), self.client_indices)
