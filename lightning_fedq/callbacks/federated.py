"""`Federated`: one callback makes an ordinary Lightning training federated.

One Lightning epoch is one round. The callback puts its own training loader on the user's data module (or
module) and its own loops into the Trainer for the time of the fit. The loops train a round: every client in
a fit of its own, on a copy (`clients`), each update through the round engine (`rounds`), the server's step
into the module (`training.fit`). The user's module holds the global model from the first to the last line.

Here are the arguments, which become four frozen groups of settings (`training.settings`), and the hooks.
What belongs to one fit is made when it starts (`training.fit`), on the clients that there are
(`training.population`).

A checkpoint written in mid-round says that the round has not begun: a resumed run starts it anew, with the
same streams where there is a seed, else with new keys and another charge. Beside the checkpoints lies the
ledger's journal (`training.journal`), so that a process that is killed outright forgets no charge.
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
    check_optimizers,
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
    """Federated training of an ordinary Trainer, module and data module.

    Args:
        mechanism: Turns updates into messages, e.g. `CorBin(epsilon=5.0)`.
        num_clients: Size of the population, >= 1.
        cohort: Law by which clients take part in a round (`privacy.cohorts`): `FixedSize(10)`, `Cyclic(10)`,
            `DisjointOnce(10)`, `Poisson(10)`, `Available(rule, 10)`, or `Everybody()`. A
            number is `FixedSize` of so many, None is everybody.
        dropout_probability: Chance in [0, 1) that a client of the cohort does not answer.
        deadline: Time limit of a round: who is late is dropped. Claims then count on nobody in particular.
        partition: Partition of the samples over the clients; a `FederatedDataModule` may say otherwise.
        labels: Labels for label-based partitions, if they are not found automatically: the index or key of
            the label in a sample, or one integer a sample.
        algorithm: What clients add to their gradients or keep back: `FedProx(mu)`, `SCAFFOLD()`,
            `FedDyn(alpha)` or `ErrorFeedback(share)`; None
            is federated averaging.
        local_epochs: Passes of each client over its data in a round, >= 1. The Trainer's
            `limit_train_batches` shortens every pass of every client, as it would one loader's.
        local_steps: Batches of each client in a round, >= 1, instead of `local_epochs`.
        clients_per_step: How many clients train side by side in one step. "auto" decides by the size of the
            model and of a step, never by the clock (`clients.stack_size`). Any number gives the same
            weights up to rounding, dropout masks, random transforms of the data and other random numbers of
            the training included.
        target: What is quantised: "updates" (local - global) or, as in the CorBin paper, "weights".
        ranges: Rule for the quantiser's range; None is `AdaptiveRange()` for updates and
            `PreviousMinMax()` for weights.
        server_lr: Server learning rate lambda in (0, 1]; the model moves to (1 - lambda) w + lambda w_new.
        server_optimizer: Takes the parameters, returns a torch optimiser that is given minus the mean
            update as gradient; None applies the mean update itself.
        weighting: "uniform"; "samples" for a mean weighted by how much data each client holds, whatever
            `local_steps` or a limit lets it use of them in one round; or
            "inverse_variance", by one over how noisy its messages are (clients with their own epsilon).
        aggregator: A robust rule in place of the mean, e.g. `RobustAggregation("median")`. The server sees
            every message then; behind secure aggregation there is nothing to filter.
        secure_aggregation: Run every round behind secure aggregation: the server is handed the sum only.
        buffers: What happens to buffers that training changes, such as BatchNorm's running statistics.
            "share": they are coordinates of an update like parameters, quantised, averaged and charged;
            "local": every client keeps its own, and the model that is evaluated has those of the start;
            "frozen": normalisation layers train in eval mode.
        local: Patterns of names, such as `["head.*"]`: parameters and buffers that match stay with the client
            (FedPer, LG-FedAvg), which trains them and finds its own again in its next round. They are in no
            message and no claim, and the model that is validated has those of the start.
        seed: An integer makes the run reproducible, and NOT private: every coin follows from it. None
            takes keys and plan from the operating system.
        diagnostics: Also compare each aggregate with the exact mean, which only a simulation knows.
        ledger: Ledger of an earlier training with the same clients (`other.ledger`); None starts a new one.
        client_metrics: What `self.log` in training does with what follows from one client's data. "shared"
            logs it as usual, without noise; "none" drops it; "local" keeps it with the client, which in a
            simulation means a file of its own in the run folder. None is "shared" where nothing is private
            anyway (a seed, or no claim against anybody), else "local".
        privacy: A target that sets the mechanism's privacy parameter when the fit starts, from the Trainer's
            rounds, cohort, dropouts, corrupt clients and dimension, and that the ledger holds to. The
            parameter's own value does not count then.
        check_isolation: Before the first round, train a client alone and beside another one, in forks where
            there are any, and refuse to go on if anything of it, or anything that leaves, is not the same
            (`training.isolation`). None does so where something is claimed, and where client_metrics keeps
            what is logged with the clients.
        evaluate_clients: Measure the global model, and each client's own, on what every client holds out:
            `ClientEvaluation(held_out=0.2)`. The numbers go where client_metrics lets training metrics go.
        shared: Patterns of names, such as `["teacher.*"]`: buffers and frozen parameters that travel beside
            the trained ones. What a client's first steps change travels by itself; this is for what begins
            to change later, and for Flower, whose server has no data to try.
        constraints: What parameters and buffers are, by patterns of their names, such as
            `{"norm.var": "positive"}`: what is decoded is made so, and what a step of `DPSGD` makes.
            "positive", "fixed" (the value of before), "unit" (rows along the last axis of length 1), or a
            function from the decoded tensor to the nearest valid one. Variances of torch's normalisation
            layers, the row of `padding_idx` and weights that torch's `prune` has masked are known.
        broadcast_bits: Bits a coordinate, 1 to 16, of the model that clients are sent: each segment is
            rounded to 2^bits levels between its extremes (`rounds.broadcast`). The server's own model stays
            exact, and no claim changes, because what is sent follows from what was released. None sends
            floats as they are.
        statistics: Release the mean of a vector of each client's data in the first rounds, for normalisation,
            class weights and the like: `Statistics(size, bound)`. They are rounds of `max_epochs` as all
            others, with the same cohorts, noise and charge.

    Attributes:
        clients: Settings of the population: the arguments from num_clients to labels.
        local: Settings of what a client does; its `patterns` are the argument `local`.
        server: Settings of what the server does.
        mechanism: The mechanism, as the privacy target has set it.
        ledger: Privacy ledger: rounds charged per client. It belongs to this object, outlives fits, failures
            and servers, and a second training adds to it.

    Raises:
        ValueError: If a setting is out of its range, or two do not go together.
        TypeError: If a setting is of another kind, or the mechanism is not homomorphic and there is secure
            aggregation.

    Example:
        >>> from lightning_fedq import CorBin
        >>> from lightning_fedq.data.datasets import DigitsDataModule
        >>> from lightning_fedq.data.models import Classifier, Linear
        >>> federated = Federated(CorBin(epsilon=1.0), num_clients=20, seed=0)  # reproducible, not private
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
        target: Literal["updates", "weights"] = "updates",
        ranges: RangeRule | None = None,
        server_lr: float = 1.0,
        server_optimizer: OptimizerFactory | None = None,
        weighting: Weighting = "uniform",
        aggregator: RobustAggregation | None = None,
        secure_aggregation: SecAgg | None = None,
        buffers: BufferMode = "share",
        local: Sequence[str] = (),
        seed: int | None = None,
        diagnostics: bool = True,
        ledger: Ledger | None = None,
        client_metrics: ClientMetricsChoice | None = None,
        privacy: PrivacyTarget | None = None,
        check_isolation: bool | None = None,
        evaluate_clients: ClientEvaluation | None = None,
        shared: Sequence[str] = (),
        constraints: Mapping[str, Constraint] | None = None,
        broadcast_bits: int | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        given = {**locals(), "patterns": local}
        protection, clients = group(Protection, given), group(Clients, given)
        self._check_settings(protection, clients, group(Local, given), group(Server, given))

    def _check_settings(self, protection: Protection, clients: Clients, local: Local, server: Server) -> None:
        """Take settings that are right by themselves, and refuse what does not go together."""
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
        # a target sets the mechanism when the fit starts, and compares it then
        self.ledger.check(clients.num_clients, self.ledger.mechanism if privacy else repr(mechanism))
        self.privacy_target = privacy
        self.calibrated_target = None if privacy is None else CalibratedTarget(privacy, mechanism)
        self._fit: FederatedFit | None = None
        self._population: Population | None = None
        self._loaded: dict[str, Any] | None = None
        self._undo = Undo()
        self.engine, self.client_log, self.batch_rule, self.clients_per_step_chosen = None, None, None, 0
        self.records, self.client_evaluations, self._followers = [], [], []

    # ---- set up and take off ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what can't work, and put the clients' loader and loops in place of the user's own."""
        if stage != "fit":
            return
        if sum(isinstance(callback, Federated) for callback in get_callbacks(trainer)) > 1:
            raise ValueError("the Trainer has two Federated callbacks; leave one of them out")
        check_setup(trainer, pl_module)
        if self.planner.law.secret:
            check_processes(trainer)
        check_averaging(trainer, pl_module)
        if self._fit is not None:
            self._fit.given_up = None
        install_round_loop(trainer, lambda: self.fit.run_round(), self._logged_elsewhere, self._undo)
        self._population = self._make_population(trainer, pl_module)

    def _make_population(self, trainer: pl.Trainer, module: pl.LightningModule) -> Population:
        """The clients of a fit that is being set up."""
        return SimulatedClients(self, trainer, module, self._undo)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Deal out the data, make the server, choose how many clients train side by side."""
        population = self._population
        assert population is not None
        population.check_start(trainer)
        check_shapes(pl_module)
        check_resumable(trainer)
        check_optimizers(trainer)
        if population.ranks is not None:
            population.ranks.share(pl_module)
        forget_loader(trainer)
        target, loaded, undo = self.calibrated_target, self._loaded, self._undo
        fit = FederatedFit(self, target, trainer, pl_module, population, self._fit, loaded, undo)
        self._fit, self._loaded = fit, None
        self.engine, self.records, self.client_log = fit.engine, fit.records, fit.side.log
        self.client_evaluations, self.clients_per_step_chosen = fit.client_evaluations, fit.clients_per_step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse to train on a loader that is not the clients', and tell loggers the settings."""
        check_loader_is_ours(trainer, self.fit.population.loader())
        log_settings(trainer, self)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a round, as soon as it has ended."""
        if not trainer.barebones:
            self.fit.log_round()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop where no further round can be."""
        engine = self.fit.engine
        if engine.round == self.planner.num_rounds:
            trainer.should_stop = True  # every cohort has had its round
        elif self.calibrated_target is not None:
            self.calibrated_target.end_round(engine, trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what was protected from whom, and what stood idle."""
        for line in describe_outcome(self, trainer):
            rank_zero_info(line)
        self.fit.report_idle_cores()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take everything off again."""
        if stage == "fit":
            self._restore_trainer()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give up the open round."""
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
        """Let a rule draw the local batches until this fit is over. For callbacks, in their `setup`.

        Raises:
            ValueError: If another rule draws them already, or clients are to train side by side.
        """
        check_batch_rule(rule, self.batch_rule, self.local)
        self._undo.replace(self, "batch_rule", rule)

    # ---- privacy target ---------------------------------------------------------------------------

    def calibrated(self, dim: int, rounds: int, num_byzantine: int) -> Mechanism:
        """The mechanism as a privacy target would set it for so many parameters and rounds, or as it is.

        Raises:
            ValueError: If the target can't be met; with what could be.
        """
        if self.calibrated_target is None:
            return self.mechanism
        return self.calibrated_target.calibrate(self, dim, rounds, num_byzantine).mechanism

    @property
    def calibration(self) -> Calibration | None:
        """Solution of the privacy target, from `on_fit_start` on."""
        return None if self.calibrated_target is None else self.calibrated_target.calibration

    # ---- the fit, while it runs and when it is over -----------------------------------------------

    @property
    def fit(self) -> FederatedFit:
        """The present or last fit. From `on_fit_start` on."""
        assert self._fit is not None
        return self._fit

    @property
    def client_indices(self) -> list[Tensor]:
        """The sample indices of each client. Empty until the data are dealt out."""
        population = self._population
        return (
            []
            if population is None or not population.is_partitioned
            else population.partitioned_data.client_indices
        )

    @property
    def training_clients(self) -> tuple[int, ...]:
        """Who trains in the present batch, in the order of its rows. One client's batch has no such axis."""
        present = None if self._fit is None else self._fit.side.present
        return () if present is None else present.clients

    def personal_state(self, client: int) -> dict[str, Tensor]:
        """Tensors that a client keeps for itself, by name. There is none if it has not trained.

        With them loaded over the global model (`load_state_dict(..., strict=False)`) it is the client's own.
        """
        return {name: own.clone() for name, own in self.fit.vector.personal.get_tensors(client).items()}

    def unprotected_outputs(self, trainer: pl.Trainer) -> str:
        """Where clients' figures went, and what the trial of isolation found."""
        log = self.client_log
        measured = describe_evaluation_outputs(self.client_evaluations, log is not None and log.shared)
        released = describe_statistics_outputs(self.fit.engine)
        return " ".join(filter(None, (measured, released, self.fit.isolation, self.fit.averages)))

    def _logged_elsewhere(self, name: str, value: Any) -> None:
        if self.client_log is not None:
            self.client_log.note_validation_metric(name, value)

    # ---- checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The server, the records and the choices of this run. Of an open round, its start."""
        if self._fit is None:
            return {}
        if self.planner.law.secret:  # the ledger's state and the plan's seed tell who was drawn
            return {"cohorts": "secret"}
        return self._fit.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the federation of a checkpoint.

        Raises:
            ValueError: If the checkpoint belongs to another federation.
        """
        if self.planner.law.secret or "cohorts" in state_dict:
            raise ValueError(
                "a federation with secret cohorts is not resumed: its checkpoint has no ledger and no plan, "
                "which would tell who was drawn; load only the weights, begin a new Federated, and add the "
                "epsilons of both"
            )
        own = self.identity()
        if self.calibrated_target is not None:
            self.calibrated_target.check(state_dict.get("calibration"))
            # found again, and compared, when the fit starts and the parameters are known
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
        """Of an unfinished round, save that it has not begun: everything else is as it was before it."""
        reset_unfinished_round(checkpoint["loops"]["fit_loop"])

    # ---- pictures ---------------------------------------------------------------------------------

    def label_figure(self) -> Figure:
        """Draw who holds which labels, once the data are dealt out.

        Raises:
            ValueError: If the dataset has no integer labels.
        """
        return label_figure(self.fit.population.labels(), self.client_indices)
