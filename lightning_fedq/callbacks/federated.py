"""`Federated`: one callback makes an ordinary Lightning training federated.

One Lightning epoch is one round. The callback puts its own training loader on the user's data module (or
module) and its own loops into the Trainer for the time of the fit. The loops train a round: every client in
a fit of its own, on a copy (`clients`), each update through the round engine (`rounds`), the server's step
into the module (`simulation`). The user's module holds the global model from the first to the last line.

A checkpoint written in mid-round says that the round has not begun: a resumed run starts it anew, with the
same streams, and ends with the same weights. Without a seed the repetition has new keys and is charged again.
Beside the checkpoints lies the ledger's journal (`federation.journal`), so that a process that is killed
outright forgets nothing that it may have sent.

The state here is large for one class because Lightning calls one object, which is built of many settings;
the parts that need neither are in `federation`: `checks` (what is refused), `averaging`, `schedule` (who
trains when), `resume` (checkpoints), `secure_sum`.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_fedq._lightning import callbacks_of, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.algorithms import Correction, LocalAlgorithm
from lightning_fedq.byzantine.aggregation import RobustAggregation, Weighting, inverse_variance_weights
from lightning_fedq.byzantine.counted import num_byzantine_of
from lightning_fedq.clients.evaluation import ClientEvaluation
from lightning_fedq.clients.fit import ClientFit
from lightning_fedq.clients.hooks import say_who_is_copied
from lightning_fedq.clients.isolation import check_isolation
from lightning_fedq.clients.personal import check_patterns, say_what_stays
from lightning_fedq.clients.stack_size import choose_clients_per_step, largest_stack
from lightning_fedq.clients.vector import BufferMode, Members, Rehearsed, Vector, check_buffer_mode, origins
from lightning_fedq.data.batches import BatchRule, Stack
from lightning_fedq.data.datamodule import split_of
from lightning_fedq.data.dealing import LocalPasses, deal
from lightning_fedq.data.held_out import HeldOut
from lightning_fedq.data.labels import Labels, are_at_hand, label_counts, label_figure, labels_of
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.partition import IID, Partition
from lightning_fedq.federation.averaging import RoundAverages, check_averaging
from lightning_fedq.federation.checks import (
    check_algorithm,
    check_cohorts_last,
    check_kinds,
    check_limit,
    check_loader_is_ours,
    check_numbers,
    check_optimizers,
    check_own_loaders,
    check_setup,
    check_shapes,
    validate_by_rounds,
)
from lightning_fedq.federation.client_metrics import (
    ClientMetricsChoice,
    check_choice,
    check_exact_monitors,
    choose,
    claims_something,
)
from lightning_fedq.federation.handed_loader import ask_module_instead, forget_loader, handed_loader
from lightning_fedq.federation.journal import keep_journal, say_at_start
from lightning_fedq.federation.privacy_target import KeptTarget
from lightning_fedq.federation.records import log_round, log_values, say_change, warn_of, warn_of_noise
from lightning_fedq.federation.resume import begin_again, check_federation, plain_records, records_of
from lightning_fedq.federation.secret_cohorts import (
    check_choice_of_cohorts,
    check_claim,
    check_processes,
    check_run,
    check_settings,
)
from lightning_fedq.federation.secure_sum import check_modulus, check_secure_aggregation, secure_sum
from lightning_fedq.federation.statement import outcome
from lightning_fedq.federation.undo import Undo
from lightning_fedq.federation.unprotected import lengths_tell
from lightning_fedq.keys.randomness import AgreedKeys, Keys, RootKeys, SeededKeys
from lightning_fedq.mechanism import Mechanism
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.target import Calibration, PrivacyTarget
from lightning_fedq.ranges import AdaptiveRange, PreviousMinMax, RangeRule
from lightning_fedq.rounds import (
    CohortKey,
    Cohorts,
    OptimizerFactory,
    Participation,
    RoundEngine,
    RoundPlan,
    RoundPlanner,
    RoundRecord,
    check_aggregation,
)
from lightning_fedq.secagg import SecAgg
from lightning_fedq.simulation.client_evaluation import ClientEvaluator, EvaluatedClients, where_it_went
from lightning_fedq.simulation.clock import Clock
from lightning_fedq.simulation.metrics import ClientMetrics
from lightning_fedq.simulation.ranks import (
    DistributedClientsStrategy,
    EndOfRound,
    OtherRankStoppedError,
    RankEngine,
    RankSchedule,
    check_for_ranks,
    check_same_on_all_ranks,
    check_streams,
    ranks_of,
    say_who_is_idle,
)
from lightning_fedq.simulation.rehearsal import Trial, first_clients, rehearse
from lightning_fedq.simulation.round_loop import install
from lightning_fedq.simulation.schedule import Schedule
from lightning_fedq.simulation.simulation import RoundStart, Simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Federated(pl.Callback):
    """Federated training of an ordinary Trainer, module and data module.

    Args:
        mechanism: Turns updates into messages, e.g. `CorBin(epsilon=5.0)`.
        num_clients: Size of the population, >= 1.
        clients_per_round: Cohort of a round, drawn without replacement; None is everybody.
        participation: "random" draws every cohort anew from all clients; "once" deals the clients out into
            disjoint public cohorts, so that each is asked in one round at most and can spend its whole budget
            there (parallel composition); "cyclic" has these cohorts take turns, so that T rounds with b
            cohorts ask nobody more than ceil(T / b) times, and with no less than b rounds in between. Of
            both, clients left over by cohorts of equal size are never asked.
        cohorts: "known" takes it that anybody may learn who took part in which round. "secret" draws cohorts
            by a key that nobody else has, and lets nothing out that tells who was drawn: reports have a
            second row of an outsider, with an epsilon that the draw has made smaller. It refuses what breaks
            it (`federation.secret_cohorts`), and can't be resumed from a checkpoint.
        dropout_probability: Chance in [0, 1) that a client of the cohort does not answer.
        partition: Partition of the samples over the clients; a `FederatedDataModule` may say otherwise.
        labels: Labels for label-based partitions, if they are not found automatically: the index or key of
            the label in a sample, or one integer a sample.
        algorithm: What clients add to their gradients: `FedProx(mu)`, `SCAFFOLD()` or `FedDyn(alpha)`; None
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
        check_isolation: Train a client twice before the first round, with another one in between, and refuse
            to go on if its update is not the same (`clients.isolation`). None does so where something is
            claimed, and where client_metrics keeps what is logged with the clients.
        evaluate_clients: Measure the global model, and each client's own, on what every client holds out:
            `ClientEvaluation(held_out=0.2)`. The numbers go where client_metrics lets training metrics go.

    Attributes:
        ledger: Privacy ledger: rounds charged per client. It belongs to this object, outlives fits, failures
            and servers, and a second training adds to it.
        engine: The round engine, from `on_fit_start` on.
        records: One record for every finished round.
        client_indices: The sample indices of each client, from `on_fit_start` on.
        clients_per_step_chosen: How many clients train side by side, from `on_fit_start` on; else 0.
        client_log: What clients have logged in training and where it went, from `on_fit_start` on.
        client_evaluations: What was measured on clients' held-out samples, of this process's rounds.

    Raises:
        ValueError: If a setting is out of its range, or two do not go together.
        TypeError: If a setting is of another kind, or the mechanism is not homomorphic and there is secure
            aggregation.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        num_clients: int,
        *,
        clients_per_round: int | None = None,
        participation: Participation = "random",
        cohorts: Cohorts = "known",
        dropout_probability: float = 0.0,
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
    ) -> None:
        check_kinds(
            mechanism=mechanism,
            num_clients=num_clients,
            clients_per_round=clients_per_round,
            dropout_probability=dropout_probability,
            partition=partition,
            algorithm=algorithm,
            local_epochs=local_epochs,
            local_steps=local_steps,
            clients_per_step=1 if clients_per_step == "auto" else clients_per_step,
            ranges=ranges,
            server_lr=server_lr,
            server_optimizer=server_optimizer,
            aggregator=aggregator,
            secure_aggregation=secure_aggregation,
            seed=seed,
            ledger=ledger,
            privacy=privacy,
            check_isolation=check_isolation,
            evaluate_clients=evaluate_clients,
        )
        check_numbers(local_epochs, local_steps, clients_per_step, weighting, target)
        check_choice(client_metrics)
        check_buffer_mode(buffers)
        plan_seed = secrets.randbits(63) if seed is None else seed
        self.cohorts, hidden = cohorts, check_choice_of_cohorts(cohorts, seed, participation, privacy)
        self.mechanism, self.num_clients = mechanism, num_clients
        self.partition, self.labels, self.algorithm = partition, labels, algorithm
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.clients_per_step, self.target, self.server_lr = clients_per_step, target, server_lr
        self.ranges = ranges or (AdaptiveRange() if target == "updates" else PreviousMinMax())
        self.server_optimizer, self.weighting, self.seed = server_optimizer, weighting, seed
        self.aggregator, self.secure_aggregation = aggregator, secure_aggregation
        self.diagnostics, self.client_metrics, self.buffers = diagnostics, client_metrics, buffers
        self.check_isolation, self.local = check_isolation, check_patterns(local)
        self.evaluate_clients, self.client_evaluations = evaluate_clients, list[EvaluatedClients]()
        self._evaluator: ClientEvaluator | None = None
        self._held_out: HeldOut | None = None
        self.planner = RoundPlanner(
            num_clients,
            plan_seed,
            clients_per_round,
            dropout_probability,
            participation,
            cohort_key=CohortKey() if hidden else None,
        )
        if hidden:
            check_settings(self, ledger is not None)
            self.client_metrics = "none"
        self.planner.plan(0, mechanism)  # refuse a cohort that the mechanism can't serve at once
        self.planner.check_separation(mechanism)
        mechanism.protection_groups(num_clients)  # and a population
        size, secure = self.planner.cohort_size, secure_aggregation is not None
        check_aggregation(mechanism, size, weighting != "uniform", aggregator, secure)
        if secure_aggregation is not None:
            check_secure_aggregation(secure_aggregation, mechanism, size)
        plain_mean = self.plain_sum and server_lr == 1.0 and server_optimizer is None
        check_algorithm(algorithm, self.planner, plain_mean, target)
        self._correction: Correction | None = None
        self.ledger = Ledger(num_clients, repr(mechanism)) if ledger is None else ledger
        self._own_ledger = self.ledger if ledger is None else None
        # a target sets the mechanism when the fit starts, and compares it then
        self.ledger.check(num_clients, self.ledger.mechanism if privacy else repr(mechanism))
        self._target = None if privacy is None else KeptTarget(privacy, mechanism)
        self.engine: RoundEngine | None = None
        self.records: list[RoundRecord] = []
        self.client_indices: list[Tensor] = []
        self.clients_per_step_chosen = 0
        self.client_log: ClientMetrics | None = None
        self._loaded: dict[str, Any] | None = None
        self._undo = Undo()
        self._followers: list[Callable[[], None]] = []
        self._rule: BatchRule | None = None
        self._simulation: Simulation | None = None
        self._given_up: RoundStart | None = None
        self._dealt: ClientLoader | None = None
        self._asked_at: int | None = None
        self._ranks: DistributedClientsStrategy | None = None

    # ---- set up and take off ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what can't work, and put the clients' loader and loops in place of the user's own."""
        if stage != "fit":
            return
        if sum(isinstance(callback, Federated) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("the Trainer has two Federated callbacks; leave one of them out")
        check_setup(trainer, pl_module)
        if self.cohorts == "secret":
            check_processes(trainer)
        check_averaging(trainer, pl_module)
        self._ranks = ranks_of(trainer)
        if self._ranks is not None:
            self._ranks.has_federation = True
        self._simulation, self._dealt, self._asked_at = None, None, None
        self._checked, self._given_up = False, None
        install(trainer, self, self._logged_elsewhere, self._undo)
        datamodule, handed = trainer.datamodule, handed_loader(trainer)  # type: ignore[attr-defined]
        self._owner = pl_module if datamodule is None else datamodule
        self._user_loader = self._owner.train_dataloader if handed is None else lambda: handed
        if handed is not None:
            ask_module_instead(trainer, pl_module, self._undo)
        self._reload_every = int(trainer.reload_dataloaders_every_n_epochs)  # type: ignore[attr-defined]
        self._limit = int(trainer.fast_dev_run)  # type: ignore[attr-defined]
        self._limit_batches = 1.0 if self._limit else trainer.limit_train_batches  # type: ignore[attr-defined]
        self._undo.replace(trainer, "limit_train_batches", 1.0)  # of every client's passes, not of the round
        # a plain function, so that a deep copy of the module does not copy this callback
        self._undo.replace(self._owner, "train_dataloader", lambda: self._client_loader(trainer))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Deal out the data, make the server, choose how many clients train side by side."""
        check_shapes(pl_module)
        check_optimizers(trainer)
        if self._ranks is not None:
            self._ranks.share(pl_module)
        if self._dealt is None:
            self._deal_out(trainer)
        forget_loader(trainer)
        clock = self._clock = Clock(trainer, self._schedule.longest)
        rehearsed, names = self._rehearse(trainer)
        saved = None if self._loaded is None else self._loaded.get("members")
        members, before = None if saved is None else Members.of(saved), getattr(self, "_vector", None)
        self._kept_by_algorithm = None if self._loaded is None else self._loaded.get("algorithm")
        self._vector = Vector(
            pl_module, lambda: trainer.strategy.optimizers, self.buffers, rehearsed, members, self.local
        )
        self._meet_target(trainer)
        self._identity = self._federation()
        server = self.engine
        self._make_engine(trainer)
        kept = before.own if before is not None and self.engine is server else None
        saved_own = None if self._loaded is None else self._loaded.get("own")
        self._vector.own.go_on(kept, saved_own, self._loaded is not None)
        say_what_stays(self._vector.members.local, pl_module)
        done = 0 if self._loaded is not None else self._engine.round - trainer.current_epoch
        check_cohorts_last(self.planner, done + (trainer.max_epochs or 0))
        if self.cohorts == "known":  # a journal names the clients of every round
            keep_journal(trainer, self._engine.ledger, self.seed is not None)
        if self._ranks is not None:
            self._agree_on_start(self._ranks)
        if self._target is not None:
            self._hold_to_target(trainer)
            if self.seed is None:
                self._target.skip_what_is_spent(self._engine)
        self._choose_stack(trainer)
        if self._ranks is not None:
            first = self._schedule.of_all_ranks(0, 0, self.clients_per_step_chosen)
            say_who_is_idle(first, self._ranks.num_ranks)
        self._loaded = None
        if self.seed is None:
            check_exact_monitors(trainer, lengths_tell(self._engine))
        choice = choose(self.client_metrics, trainer, self._engine)
        group = None if self._ranks is None else self._ranks.group
        log = self.client_log = ClientMetrics(choice, trainer, group)
        log.names |= names
        log.check_watched()
        self._begin_algorithm(trainer)
        self._begin_evaluation(trainer, choice)
        simulation = self._simulation = Simulation(
            trainer,
            self._engine,
            self._vector,
            ClientFit(trainer, trainer.loggers if log.shared else None),
            clock,
            log,
            lambda: self._loader,
            self._coming_stacks,
            self.clients_per_step_chosen,
            self._rule is not None and self._rule.skips_empty,
            self._change_vector,
            self._give_up_a_cut_round,
            self._correction,
        )
        if isinstance(self._engine, RankEngine):
            self._engine.beside = EndOfRound(simulation, log)
        say_who_is_copied(trainer.callbacks)  # type: ignore[attr-defined]
        self._averages = RoundAverages(trainer)
        self._averages.attach(self._undo)

    def _begin_algorithm(self, trainer: pl.Trainer) -> None:
        """State of the local algorithm: a new one, the checkpoint's, or the last fit's if its server goes on.

        Raises:
            ValueError: If the clients' data, optimisers or callbacks do not go with it.
        """
        if self.algorithm is None:
            return
        name = type(self.algorithm).__name__
        self.algorithm.check(trainer.optimizers)
        if self._rule is not None:
            raise ValueError(
                f"{type(self._rule).__name__} bounds gradients that {name} would change; leave one out"
            )
        if self.algorithm.remembers and self._ranks is not None:
            raise ValueError(f"clients of {name} keep vectors, in one process; use devices=1")
        if self.algorithm.alike and not self._schedule.alike:
            raise ValueError(
                f"{name} takes as many steps of every client, and theirs differ with what they hold; say "
                "local_steps=..."
            )
        if self._correction is None:
            self._correction = self.algorithm.begin(self.num_clients, self._vector.num_parameters)
            if self._kept_by_algorithm is not None:
                self._correction.load_state_dict(self._kept_by_algorithm)
            elif self._engine.round and self.algorithm.remembers:
                rank_zero_warn(f"a checkpoint holds nothing of what clients of {name} keep; they begin anew")

    def _begin_evaluation(self, trainer: pl.Trainer, choice: ClientMetricsChoice) -> None:
        """Prepare to measure on clients' held-out samples, if that is asked for."""
        self._evaluator = None
        if self.evaluate_clients is None:
            return
        self.evaluate_clients.check(trainer.lightning_module, self.num_clients, choice == "none")
        parts = [] if self._held_out is None else self._held_out.parts
        self._evaluator = ClientEvaluator(
            self.evaluate_clients, trainer, self._vector, parts, lambda: self._loader
        )

    def lets_out(self, trainer: pl.Trainer) -> str:
        """See `unprotected.LetsOut`."""
        shared = self.client_log is not None and self.client_log.shared
        return where_it_went(self.client_evaluations, shared)

    def _agree_on_start(self, ranks: DistributedClientsStrategy) -> None:
        """All ranks have the same federation and data, and rank 0, which keeps the journal, the ledger."""
        held = hashlib.sha256(b"".join(part.numpy().tobytes() for part in self.client_indices))
        round = {"round": str(self._engine.round), "who holds which samples": held.hexdigest()[:16]}
        check_same_on_all_ranks(ranks.group, {**self._identity, **round})
        ledger = ranks.group.broadcast(self.ledger.state_dict(), "the ledger at the start")
        if not ranks.is_global_zero:
            self.ledger.follow(ledger)

    def _meet_target(self, trainer: pl.Trainer) -> None:
        """Set the mechanism to the privacy target."""
        if self._target is None:
            return
        saved = None if self._loaded is None else self._loaded["calibration"]
        found = self._target.begin(self, trainer, sum(self._vector.segments), saved)
        self.mechanism = found.mechanism
        if not self.ledger.rounds:  # nothing is charged for the mechanism as it was given
            self.ledger.mechanism = repr(self.mechanism)

    def _hold_to_target(self, trainer: pl.Trainer) -> None:
        """Limits of the ledger, which follow the trained vector."""
        target = self._target
        assert target is not None
        target.limit(self._engine, self, trainer)
        self.when_vector_changes(lambda: target.limit(self._engine, self, trainer))

    def calibrated(self, dim: int, rounds: int, num_byzantine: int) -> Mechanism:
        """The mechanism as a privacy target would set it for so many parameters and rounds, or as it is.

        Raises:
            ValueError: If the target can't be met; with what could be.
        """
        if self._target is None:
            return self.mechanism
        return self._target.calibrate(self, dim, rounds, num_byzantine).mechanism

    @property
    def privacy_target(self) -> PrivacyTarget | None:
        """Epsilon that was asked for, and towards whom. None without a target."""
        return None if self._target is None else self._target.target

    @property
    def calibration(self) -> Calibration | None:
        """Solution of the privacy target, from `on_fit_start` on."""
        return None if self._target is None else self._target.found

    @property
    def privacy_statement(self) -> str:
        """The privacy target and what was found for it, in words. "" without one."""
        return "" if self._target is None else self._target.statement

    @property
    def batch_rule(self) -> BatchRule | None:
        """Draws the clients' batches. None takes whole passes."""
        return self._rule

    @property
    def reads_streams(self) -> bool:
        """Do clients read loaders of their own, or streams? From `on_fit_start` on."""
        return bool(self._own_loaders) or any(not len(part) for part in self.client_indices)

    @property
    def alike(self) -> bool:
        """Has every client as many batches in a round? From `on_fit_start` on."""
        return self._schedule.alike

    @property
    def plain_sum(self) -> bool:
        """Does the model depend on the messages through their plain sum only?"""
        return self.weighting == "uniform" and self.aggregator is None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse to train on a loader that is not the clients'."""
        check_loader_is_ours(trainer, self._loader)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what was protected from whom."""
        for line in outcome(self, trainer):
            rank_zero_info(line)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take everything off again."""
        if stage == "fit":
            self._undo.all()
            self._simulation = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give up the open round."""
        if self._ranks is not None:
            self._ranks.fails = True
        if self._simulation is not None and self._engine.plan is not None:
            rank_zero_info(
                f"stopped in the middle of round {self._engine.round + 1}: what its clients have trained is "
                f"dropped, and charged if they have sent anything; {len(self.records)} rounds are finished, "
                "and the model is that of the last one. A checkpoint goes on from there; local_steps makes "
                "rounds shorter"
            )
            self._given_up = self._simulation.start
            self._simulation.abandon()
        self._undo.all()
        self._simulation = None

    def use_batches(self, rule: BatchRule) -> None:
        """Let a rule draw the local batches until this fit is over. For callbacks, in their `setup`.

        Raises:
            ValueError: If another rule draws them already, or clients are to train side by side.
        """
        name = type(rule).__name__
        if self._rule is not None:
            raise ValueError(
                f"{type(self._rule).__name__} and {name} both choose the local batches; leave one out"
            )
        if self.clients_per_step not in ("auto", 1):
            raise ValueError(
                f"{name} draws batches of different sizes for every client, so clients can't train side by "
                f"side, got clients_per_step={self.clients_per_step}; use clients_per_step=1 or 'auto'"
            )
        if self.local:
            raise ValueError(
                f"{name} works on all trained parameters, and local={list(self.local)} keeps some with the "
                "clients; leave one out"
            )
        self._undo.replace(self, "_rule", rule)

    def _client_loader(self, trainer: Any) -> ClientLoader:
        """The clients' loader. Once the training runs, over the user's new one where that is wished for."""
        if self._dealt is None:
            self._deal_out(trainer)
        elif self._simulation is not None:
            now = trainer.current_epoch
            if self._asked_at is None:
                self._asked_at = now
            elif self._reload_every and now - self._asked_at >= self._reload_every:
                self._asked_at, self._dealt = now, self._loader.over(self._renew(self._user_loader()))
        return self._loader

    @property
    def _loader(self) -> ClientLoader:
        assert self._dealt is not None
        return self._dealt

    def _deal_out(self, trainer: Any) -> None:
        """Who holds what. At the first question, which `configure_optimizers` may ask."""
        if self._loaded is not None and self.seed is None:
            self.planner = replace(self.planner, seed=self._loaded["plan_seed"])
        if self._ranks is not None:
            check_for_ranks(self, self._rule)
            seed = self._ranks.group.broadcast(self.planner.seed, "the plan")
            self.planner = replace(self.planner, seed=seed)
        run = RoundPlan(0, (), frozenset(), self.planner.seed)
        fraction = None if self.evaluate_clients is None else self.evaluate_clients.fraction
        if fraction is not None:
            own = torch.Generator().manual_seed(run.stream_seed("held out"))
            self._held_out = HeldOut(fraction, own)
        dealt = deal(
            self._user_loader(),
            lambda: split_of(self._owner, self.partition),
            self.num_clients,
            torch.Generator().manual_seed(run.stream_seed("partition")),
            self.labels,
            LocalPasses(
                self.local_epochs, self.local_steps, self._limit_batches, not trainer.overfit_batches
            ),
            self._rule,
            self._held_out,
        )
        self.client_indices, work, self._renew = dealt.client_indices, dealt.work, dealt.renew
        self._own_loaders = dealt.own_loaders
        check_own_loaders(dealt.own_loaders, self.clients_per_step, self.weighting, self.client_indices)
        if self._ranks is not None:
            check_streams(self.client_indices)
        check_limit(work)
        if self._rule is not None:
            self._rule.begin(work)
        self._schedule = Schedule(self.planner, self.mechanism, work, self._rule, self._limit)
        if self._ranks is not None:
            self._schedule = RankSchedule(self._schedule, self._ranks.global_rank, self._ranks.num_ranks)
        validate_by_rounds(trainer, self._schedule.longest, self._undo)
        self._dealt = dealt.loader(self._coming_stacks, lambda: self._schedule.longest)

    def _client_weights(self, segments: Sequence[int]) -> Tensor | None:
        if self.weighting == "samples":
            return torch.tensor([float(len(part)) for part in self.client_indices])
        if self.weighting == "inverse_variance":
            return inverse_variance_weights(self.mechanism, segments, self.num_clients)
        return None

    def _make_engine(self, trainer: pl.Trainer) -> None:
        """A new server, the checkpoint's, or the last fit's if the model is still its own.

        Raises:
            ValueError: If the ledger's charges, or the checkpoint's, are of other terms.
        """
        byzantine = num_byzantine_of(trainer, self.planner)
        terms = {"secure_aggregation": repr(self.secure_aggregation), "num_byzantine": str(byzantine)}
        weights = self._vector.read()
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        old = self.engine
        if self._loaded is None and old is not None and list(old.segments) == self._vector.segments:
            own = old.weights.to(self._vector.parameters[0].dtype).to(weights)
            if old.round and old.ledger is self.ledger and torch.equal(own, weights):
                old.agree(**terms)
                old.weights = old.weights.to(weights.device)
                return
        if self.ledger is self._own_ledger and not self.ledger.rounds:
            self.ledger.begin_anew(repr(self.mechanism))  # it may be another one by now
        saved = None if self._loaded is None else self._loaded["engine"]["ledger"]
        say_at_start(self.ledger, self.seed is not None, saved)
        self._correction = None
        engine = self._new_engine(weights, self._vector.segments)
        engine.agree(**terms)
        self.engine = engine
        if self.secure_aggregation is not None:
            check_modulus(self.secure_aggregation, self.engine)
        self.records, self.client_evaluations = [], []
        if self._loaded is not None:
            self.engine.load_state_dict(self._loaded["engine"])
            self.records = records_of(self._loaded["records"])

    def _new_engine(self, weights: Tensor, segments: Sequence[int]) -> RoundEngine:
        keys: Keys = AgreedKeys(range(self.num_clients)) if self.seed is None else SeededKeys(self.seed)
        secagg, settings = self.secure_aggregation, self._server_settings(segments)
        settings |= {"diagnostics": self.diagnostics}
        if self._ranks is not None:
            root = self._ranks.group.broadcast(os.urandom(32), "the keys")  # also where one has a seed
            keys = RootKeys(root) if self.seed is None else keys
            settings |= {"strategy": self._ranks, "stacks": self._stacks_of_all_ranks}
        return (RoundEngine if self._ranks is None else RankEngine)(
            self.mechanism,
            self.planner,
            keys,
            weights,
            segments,
            self.ranges,
            secure_sums=None if secagg is None else partial(secure_sum, secagg),
            **settings,
        )

    def _stacks_of_all_ranks(self) -> list[Stack]:
        """The stacks of the round to come, or of the open one, that one process would train."""
        engine, most = self._engine, self._clock.most_batches
        return self._schedule.of_all_ranks(engine.round, engine.attempt, self.clients_per_step_chosen, most)

    def _server_settings(self, segments: Sequence[int]) -> dict[str, Any]:
        """Arguments of the `RoundServer` of this federation, wherever its clients are."""
        return {
            "target": self.target,
            "server_lr": self.server_lr,
            "server_optimizer": self.server_optimizer,
            "client_weights": self._client_weights(segments),
            "aggregator": self.aggregator,
            "ledger": self.ledger,
        }

    def _rehearse(self, trainer: pl.Trainer) -> tuple[Rehearsed, dict[str, None]]:
        """Tensors beside parameters that a client's first steps change, and names that they log."""
        module = trainer.lightning_module
        by_rule = self._rule is not None or any(not len(part) for part in self.client_indices)
        names: dict[str, None] = {}
        found = Rehearsed.by_layers(module)
        if not by_rule:
            clients = first_clients(lambda round: self._schedule.of_all_ranks(round, 0, 1), 1)
            trial = Trial(ClientFit(trainer), self._clock, lambda: self._loader, names)
            found = rehearse(trial, module, clients, self.buffers)
        return (Rehearsed() if self.buffers == "frozen" else found), names

    @property
    def num_buffers(self) -> int:
        """Coordinates of the flat vector that are buffers, not parameters. From `on_fit_start` on."""
        return self._vector.num_buffers

    def personal_state(self, client: int) -> dict[str, Tensor]:
        """Tensors that a client keeps for itself, by name. There is none if it has not trained.

        With them loaded over the global model (`load_state_dict(..., strict=False)`) it is the client's own.

        Args:
            client: Number of the client.
        """
        return {name: own.clone() for name, own in self._vector.own.of(client).items()}

    def replace_weights(self, weights: Tensor) -> None:
        """Let server and module go on with other weights `(dim,)`. Between rounds."""
        self._engine.weights = weights.to(self._engine.weights, copy=True)
        self._vector.show(self._engine.weights)

    def when_vector_changes(self, call: Callable[[], None]) -> None:
        """Be called, until this fit is over, when parameters have joined or left. Raise to stop there."""
        self._undo.replace(self, "_followers", [*self._followers, call])

    def _change_vector(self, members: Members) -> None:
        """Parameters join or leave at the start of a round.

        Raises:
            ValueError: If something rests on the parameters of the start.
            RuntimeError: If a budget can't pay for the new vector.
        """
        vector = self._vector
        before, names = vector.members, vector.travelling
        change = say_change(before, members, vector.module, self._engine.round)
        if self._rule is not None:
            raise ValueError(
                f"{change}, and {type(self._rule).__name__} is made for the parameters that were trained "
                "when the fit began; freeze or unfreeze before the fit, or leave it out"
            )
        if self.algorithm is not None and self.algorithm.remembers:
            raise ValueError(
                f"{change}, and clients of {type(self.algorithm).__name__} keep vectors of the parameters "
                "that were trained when the fit began; freeze or unfreeze before the fit, or use FedProx"
            )
        if not self.mechanism.covers_shorter:
            raise ValueError(
                f"{change}, and {type(self.mechanism).__name__} can't be charged for vectors of two lengths; "
                "freeze or unfreeze before the fit, or take another mechanism"
            )
        vector.take(members)
        if names != vector.travelling:
            parts, old = vector.parts(), origins(vector.travelling, names)
            self._engine.rearrange(parts, old, self._client_weights(vector.segments))
        if self.secure_aggregation is not None:
            check_modulus(self.secure_aggregation, self._engine)
        for call in self._followers:
            call()
        self.ledger.check_spent()
        longest = max(self.ledger.dim, self._engine.weights.numel())
        rank_zero_info(f"{change}; the ledger goes on, and every charge counts {longest} coordinates")

    # ---- how many clients side by side ------------------------------------------------------------

    def _choose_stack(self, trainer: pl.Trainer) -> None:
        if self._loaded is not None:
            self.clients_per_step_chosen = self._loaded["clients_per_step"]
            return
        self.clients_per_step_chosen = 1
        if self._own_loaders:
            rank_zero_info(
                "Federated trains one client at a time, because every client's batches come from loaders of "
                "its own, or from several"
            )
        if self._rule is not None or self._own_loaders:
            return
        self.clients_per_step_chosen = choose_clients_per_step(
            trainer,
            ClientFit(trainer),
            self._vector,
            self.clients_per_step,
            largest_stack(
                self._vector.parameters[0].device.type, self._vector.width, self.planner.cohort_size
            ),
            lambda size: max(self._schedule.of_all_ranks(0, 0, size), key=lambda stack: len(stack.clients)),
            lambda stack: self.fetch(next(self._loader.indices(stack))),
        )
        if self._ranks is not None and self.clients_per_step == "auto":  # every rank takes whole stacks
            share = -(-self.planner.cohort_size // self._ranks.num_ranks)
            least = min(self.clients_per_step_chosen, share)
            self.clients_per_step_chosen = self._ranks.group.broadcast(least, "the size of a stack")

    def fetch(self, indices: Tensor) -> Any:
        """Some samples as one batch, `(batch,)`, or as a stack's, `(clients, batch)`. Draws nothing."""
        with torch.random.fork_rng([]):
            return self._loader.fetch(indices)

    # ---- one round --------------------------------------------------------------------------------

    @property
    def training_clients(self) -> tuple[int, ...]:
        """Who trains in the present batch, in the order of its rows. One client's batch has no such axis."""
        present = None if self._simulation is None else self._simulation.present
        return () if present is None else present.clients

    @property
    def _engine(self) -> RoundEngine:
        assert self.engine is not None
        return self.engine

    def _coming_stacks(self) -> list[Stack]:
        """The stacks of the round to come, or of the open one."""
        engine, most = self._engine, self._clock.most_batches
        return self._schedule.stacks(engine.round, engine.attempt, self.clients_per_step_chosen, most)

    @property
    def parameter_names(self) -> list[str]:
        """Names of the trained parameters, in the order of the flat vector. From `on_fit_start` on."""
        return self._vector.names

    def present_batch(self, batch_idx: int) -> tuple[Stack, int]:
        """The stack that trains on a batch of this round, and which of its batches that is."""
        assert self._simulation is not None and self._simulation.present is not None
        return self._simulation.present, batch_idx

    @property
    def round_is_open(self) -> bool:
        """Would a checkpoint of now, with a seed, go back to the start of a round?"""
        return self._start is not None

    @property
    def _start(self) -> RoundStart | None:
        """Of the open round, or of one that an exception has ended."""
        return self._given_up if self._simulation is None else self._simulation.start

    def _logged_elsewhere(self, name: str, value: Any) -> None:
        if self.client_log is not None:
            self.client_log.elsewhere(name, value)

    def run_round(self) -> int | None:
        """Train the next round: every client in a fit of its own, and the server's step. See `RoundLoop`."""
        simulation = self._simulation
        assert simulation is not None
        trainer, before = simulation.trainer, self._clock.now
        if self.cohorts == "secret":
            if not self._checked:
                check_claim(self, trainer)
            check_run(self, trainer)
        if not self._checked:
            self._checked = True
            self._check_isolation(simulation)
        try:
            record, steps = simulation.run()
        except OtherRankStoppedError as error:
            rank_zero_warn(f"the run ends before the round is over: {error}")
            trainer.should_stop = True
            simulation.abandon()
            self._averages.steps = None
            return None
        if self.cohorts == "secret":
            record = record.released()
        self.records.append(record)
        warn_of(record)
        if self._ranks is not None:
            self._ranks.share_counts(trainer.lightning_module)
        if self._target is not None:
            self._target.check_direction(record)
        elif len(self.records) == 1:
            warn_of_noise(record, trainer.max_epochs)
        self._averages.steps = range(before, before + steps)
        if self._evaluator is not None and self._evaluator.is_due(int(record.round)):
            self.client_evaluations.append(self._evaluator.measure(int(record.round)))
        return steps

    def _check_isolation(self, simulation: Simulation) -> None:
        """See `check_isolation`, of the arguments."""
        engine, wanted = self._engine, self.check_isolation
        if wanted is None:
            claimed = self.seed is None and claims_something(
                engine.mechanism, engine.context(engine.coming_plan())
            )
            wanted = claimed or self.client_metrics in ("local", "none")
        if not wanted:
            return
        if any(not len(part) for part in self.client_indices):
            rank_zero_info("isolation of the clients is not checked, because a stream can't be read twice")
            return
        trial, vector = (
            Trial(ClientFit(simulation.trainer), self._clock, lambda: self._loader, {}),
            self._vector,
        )

        def train(stack: Stack, most: int) -> Tensor:
            return vector.read(
                trial.train(stack, most, lambda client: vector.hold_statistics(client.module)).module
            )

        if self._rule is None:
            clients = first_clients(lambda round: self._schedule.of_all_ranks(round, 0, 1), 2)
        else:
            clients = [stack for stack in self._coming_stacks() if stack.clients]
        check_isolation(train, clients)

    def _give_up_a_cut_round(self) -> None:
        """Under `fast_dev_run`, release no sum that holds fewer clients than its claims count on."""
        engine = self._engine
        if not self._limit or self.seed is not None:
            return
        if not claims_something(engine.mechanism, engine.context(engine.coming_plan())):
            return
        present = sum(len(stack.clients) for stack in self._stacks_of_all_ranks())
        expected = len(self.planner.plan(engine.round, engine.mechanism, engine.attempt).survivors)
        if present < expected:
            engine.abort(
                f"fast_dev_run={self._limit} cuts the round after {present} of {expected} clients, and "
                "what is claimed counts on all of them; nothing is sent and the model stays as it was"
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a round, as soon as it has ended."""
        if trainer.barebones:
            return
        log_round(trainer, self.records[-1])
        last = self.client_evaluations[-1] if self.client_evaluations else None
        shared = self.client_log is not None and self.client_log.shared
        if last is not None and last.round == self.records[-1].round and shared:
            log_values(trainer, last.metrics())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop where no further round can be."""
        if self._engine.round == self.planner.num_rounds:
            trainer.should_stop = True  # every cohort has had its round
        elif self._target is not None:
            self._target.end_round(self._engine, trainer)

    # ---- checkpoint -------------------------------------------------------------------------------

    def _federation(self) -> dict[str, str]:
        """Fingerprint that a checkpoint must agree with, in words."""
        return {
            "mechanism": repr(self.mechanism),
            "num_clients": str(self.num_clients),
            "clients_per_round": str(self.planner.cohort_size),
            "participation": self.planner.participation,
            "dropout_probability": str(self.planner.dropout_probability),
            "weighting": self.weighting,
            "aggregator": repr(self.aggregator),
            "secure_aggregation": repr(self.secure_aggregation),
            "partition": repr(self.partition),
            "target": self.target,
            "buffers": self.buffers,
            **({"local": repr(self.local)} if self.local else {}),
            "seed": str(self.seed),
            "batches": "passes" if self._rule is None else type(self._rule).__name__,
            **({} if self.algorithm is None else {"algorithm": repr(self.algorithm)}),
            **({} if self.evaluate_clients is None else self.evaluate_clients.identity()),
        }

    def state_dict(self) -> dict[str, Any]:
        """The server, the records and the choices of this run. Of an open round, its start."""
        if self.engine is None:
            return {}
        if self.cohorts == "secret":  # the ledger's state and the plan's seed tell who was drawn
            return {"cohorts": "secret"}
        start = None if self.seed is None else self._start
        members, kept = self._vector.members if start is None else start.members, self._correction
        own = self._vector.own
        return {
            **({} if self._target is None else {"calibration": self._target.state_dict()}),
            **({} if self.seed is None or kept is None else {"algorithm": kept.state_dict()}),
            **({} if self.seed is None or not own.names else {"own": own.state_dict()}),
            "federation": self._identity,
            "plan_seed": self.planner.seed,
            "members": members.plain(),
            "clients_per_step": self.clients_per_step_chosen,
            "engine": self._engine_state() if start is None else start.engine,
            "records": plain_records(self.records, self.seed is None, not lengths_tell(self.engine)),
        }

    def _engine_state(self) -> dict[str, Any]:
        """Without a seed the keys of a resumed run are new.

        What an open round has sent is spent, the ledger keeps it, and the repetition is a new attempt.
        """
        hidden = {"total_uplink_bits": math.nan} if lengths_tell(self._engine) else {}
        return {**self._engine.state_dict(), **hidden}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the federation of a checkpoint.

        Raises:
            ValueError: If the checkpoint belongs to another federation.
        """
        if "secret" in (self.cohorts, state_dict.get("cohorts")):
            raise ValueError(
                "a federation with secret cohorts is not resumed: its checkpoint has no ledger and no plan, "
                "which would tell who was drawn; load only the weights, begin a new Federated, and add the "
                "epsilons of both"
            )
        own = self._federation()
        if self._target is not None:
            self._target.check(state_dict.get("calibration"))
            # found again, and compared, when the fit starts and the parameters are known
            own["mechanism"] = state_dict["federation"]["mechanism"]
        check_federation(own, state_dict["federation"])
        self._loaded, self._dealt = state_dict, None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Of an unfinished round, save that it has not begun: everything else is as it was before it."""
        begin_again(checkpoint["loops"]["fit_loop"])

    # ---- pictures ---------------------------------------------------------------------------------

    def label_figure(self) -> Figure:
        """Draw who holds which labels, once the data are dealt out.

        Raises:
            ValueError: If the dataset has no integer labels.
        """
        return label_figure(self._labels(), self.client_indices)

    @property
    def held_out_sizes(self) -> list[int]:
        """Samples that each client keeps out of its training. Empty if nobody does."""
        return [] if self._held_out is None else [len(part) for part in self._held_out.parts]

    def label_counts(self) -> Tensor | None:
        """Count the samples of each label that each client holds, `(clients, labels)`.

        None where labels are not to be had without reading every sample, or there are none.
        """
        if not self.client_indices or not are_at_hand(self._loader.loader.dataset, self.labels):
            return None
        try:
            return label_counts(self._labels(), self.client_indices)
        except ValueError:
            return None

    def _labels(self) -> Tensor:
        return labels_of(self._loader.loader.dataset, self.labels)


def federated_of(trainer: pl.Trainer, asking: str) -> Federated:
    """Return the trainer's `Federated` callback.

    Args:
        trainer: The trainer.
        asking: Name of the caller, for the message.

    Raises:
        ValueError: If there is none.
    """
    of_the_fit = getattr(trainer, "home", trainer)  # a client's own Trainer has its own callbacks only
    found = [callback for callback in callbacks_of(of_the_fit) if isinstance(callback, Federated)]
    if not found:
        raise ValueError(
            f"{asking} reports on a federation, and the Trainer has no Federated callback; "
            "add lightning_fedq.callbacks.Federated to its callbacks"
        )
    return found[0]


def engine_of(trainer: pl.Trainer, asking: str) -> RoundEngine:
    """Return the engine of the trainer's federation. There is one from the start of the training on.

    Raises:
        ValueError: If there is no `Federated` callback.
    """
    engine = federated_of(trainer, asking).engine
    assert engine is not None
    return engine
