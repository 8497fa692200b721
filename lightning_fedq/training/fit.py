"""One fit of a federation, made when the fit starts: trained vector, server, log, and all rounds of the fit.

The user's module contains the global model throughout. Clients train on copies, and their updates go through
the round engine. When the last client has trained, the server's step is written into the module. A round that
is given up leaves nothing to restore. This file is long because it has one class, whose methods follow a fit
from its start to its end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.algorithms import Correction
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.clients.forks import find_fork_obstacle
from lightning_fedq.clients.hooks import report_copied_callbacks, report_hooks
from lightning_fedq.clients.personal import report_personal_parameters
from lightning_fedq.clients.stack_size import choose_clients_per_step
from lightning_fedq.clients.stale import untried
from lightning_fedq.clients.undo import Undo
from lightning_fedq.clients.vector import Members, Vector
from lightning_fedq.data.batches import Stack
from lightning_fedq.rounds import RoundEngine, RoundPlan, RoundRecord
from lightning_fedq.training.accounts import RunFigures, choose_delta, report_short_rounds, run_to_charge
from lightning_fedq.training.checkpoints import (
    RecordFile,
    keep_journal,
    keep_journal_of_checkpoint,
    plain_records,
    report_key_source,
)
from lightning_fedq.training.checks import check_cohorts_last, check_rounds_left
from lightning_fedq.training.client_evaluation import ClientEvaluator, EvaluatedClients, check_released
from lightning_fedq.training.client_metrics import (
    ClientMetricsChoice,
    check_exact_monitors,
    choose_metrics_policy,
    has_claim,
    has_claims,
    log_values,
    warn_unlogged_monitors,
)
from lightning_fedq.training.client_side import ClientSide
from lightning_fedq.training.dry_round import first_clients
from lightning_fedq.training.isolation import IsolationTrial, describe_trial
from lightning_fedq.training.loops import average_by_rounds
from lightning_fedq.training.population import Population, SimulatedClients, will_share_metrics
from lightning_fedq.training.privacy_target import CalibratedTarget
from lightning_fedq.training.ranks import OtherRankStoppedError, RankEngine, agree_on_start, warn_idle_ranks
from lightning_fedq.training.rehearsal import report_unrehearsed_end
from lightning_fedq.training.round import Rounds, RoundStart
from lightning_fedq.training.secret_cohorts import check_claim, check_run
from lightning_fedq.training.settings import Federation, check_broadcast, check_modulus
from lightning_fedq.training.user_messages import (
    describe_timing,
    has_revealing_lengths,
    log_round,
    report_noised_statistics,
    report_steps,
    warn_of_noise,
    warn_round_failures,
)


class FederatedFit(Rounds):
    """The rounds of one fit, with their records and measurements.

    Args:
        federation: Settings of the federation, with the mechanism as the user gave it.
        target: Privacy target, which calibrates the mechanism. None keeps the mechanism.
        before: Last fit of the same federation. Its server goes on if the model has not changed since.
        loaded: State of a checkpoint to resume from, see `state_dict`.
        undo: Restores the user's objects when the fit ends.

    Attributes:
        records: One record for every finished round.
        client_evaluations: Measurements on clients' held-out samples, one for each round that had any.
        identity: Fingerprint of the settings, which a checkpoint must match.
        given_up: Start of a round that an exception has ended.
        isolation: Result of the isolation test, in sentences. "" if clients train elsewhere.
        averages: Hooks with averages that could not be tried, in a sentence. "" if there are none.

    Raises:
        ValueError: If settings, data, callbacks or the checkpoint do not fit together.
        RuntimeError: If the privacy target allows no further round.
    """

    def __init__(
        self,
        federation: Federation,
        target: CalibratedTarget | None,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        population: Population,
        before: FederatedFit | None,
        loaded: dict[str, Any] | None,
        undo: Undo,
    ) -> None:
        self._federation, self._trainer, self.population = federation, trainer, population
        self._target = target
        self._process = os.getpid()
        self._schedule, self._is_checked = population.partitioned_data.schedule, False
        self.start: RoundStart | None = None
        self.given_up: RoundStart | None = None
        self.figures: RunFigures | None = None
        self._steps: range | None = range(0)
        self._no_forks, self._beside = find_fork_obstacle(trainer), RecordFile()
        self.isolation = describe_trial(None) if isinstance(population, SimulatedClients) else ""
        saved, ranks, to_try = loaded or {}, population.ranks, population.trial_stacks()
        self.side = ClientSide(
            trainer,
            federation.local,
            population.partitioned_data,
            population.loader,
            federation.batch_rule,
            federation,
            self._no_forks,
            to_try,
            Members.from_plain(saved["members"]) if "members" in saved else None,
            will_share_metrics(federation, trainer),
        )
        if to_try is None and isinstance(population, SimulatedClients):
            self.side.check_end()
        elsewhere = "" if isinstance(population, SimulatedClients) else "clients train elsewhere"
        seen = self.side.findings
        report_unrehearsed_end(trainer, elsewhere or seen.end_obstacle)
        if to_try and seen.validated is not None:
            warn_unlogged_monitors(trainer, {**seen.names, **dict.fromkeys(seen.validated)})
        self.side.check_algorithm(federation.mechanism)
        if to_try:
            self.side.check_smallest(to_try[0])
        failed = f"the rehearsal failed: {seen.failure}" if seen.failure else ""
        obstacle = "there is no rehearsal" if to_try is None else self._no_forks or failed
        self.averages = untried(trainer, elsewhere or obstacle, seen.raised)
        if self.averages:
            rank_zero_info(self.averages)
        self.vector = self.side.vector
        if target is not None:
            target.begin(federation, trainer, sum(self.vector.segments), saved.get("calibration"))
        self.identity = federation.identity()
        population.coming = self.next_stacks
        goes_on = before is not None and loaded is None and before._matches_model(self.vector)
        last = before if goes_on else None
        self.records: list[RoundRecord] = [] if last is None else last.records
        self.client_evaluations: list[EvaluatedClients] = [] if last is None else last.client_evaluations
        self.engine: RoundEngine = self._make_server(loaded) if last is None else self._reuse_server(last)
        if population.keeps_personal:
            own = None if last is None else last.vector.personal
            self.vector.personal.resume(own, saved.get("own"), loaded is not None)
            report_personal_parameters(self.vector.members.local, module)
        self._prepare_rounds(loaded)
        self.clients_per_step = saved["clients_per_step"] if saved else self._choose_stack()
        if ranks is not None:
            warn_idle_ranks(self._schedule.global_stacks(0, 0, self.clients_per_step), ranks.num_ranks)
        if federation.seed is None:
            check_exact_monitors(trainer, has_revealing_lengths(self.engine))
        choice = choose_metrics_policy(federation.local.client_metrics, trainer, self.engine)
        self.correction = self._begin_algorithm(last, saved.get("algorithm"))
        group = None if ranks is None else ranks.group
        self.side.begin(choice, self.correction, self.clients_per_step, group)
        self.lengths = self._plan_lengths()
        self._evaluator = self._begin_evaluation(choice)
        if "clients" in saved:
            population.load_state_dict(saved["clients"])
        if self.engine.reads_statistics:  # before a round is charged. Clients elsewhere check it themselves
            for stack in to_try or ():
                self.side.check_statistics(stack)
        if isinstance(self.engine, RankEngine):
            self.engine.rank_state = self.side
        report_copied_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        report_hooks(trainer)
        average_by_rounds(trainer, lambda: self._steps, undo)
        population.is_training = True

    def __getstate__(self) -> dict[str, Any]:
        """Keep the server only, which refuses to be copied if its keys are secret."""
        return {"engine": self.engine}

    # ---- start ------------------------------------------------------------------------------------

    def _matches_model(self, vector: Vector) -> bool:
        """Return whether this fit's server has finished a round and the module still has its weights."""
        engine = self.engine
        if list(engine.segments) != vector.segments or not engine.round:
            return False
        weights = _weights(vector)
        own = engine.weights.to(vector.parameters[0].dtype).to(weights)
        return engine.ledger is self._federation.ledger and torch.equal(own, weights)

    def _set_ledger_terms(self, engine: RoundEngine) -> None:
        """Set the ledger's terms (cohort, secure aggregation, Byzantine clients) for the rounds to come."""
        federation = self._federation
        byzantine = count_byzantine(self._trainer, federation.planner)
        choose_delta(federation, self._trainer)  # raises for two different deltas before a round is charged
        engine.agree_on_terms(run_to_charge(engine, federation.server.secure_aggregation, byzantine))

    def _reuse_server(self, last_fit: FederatedFit) -> RoundEngine:
        """Return the last fit's server, moved to the device of the model."""
        self._set_ledger_terms(last_fit.engine)
        last_fit.engine.weights = last_fit.engine.weights.to(self.vector.parameters[0].device)
        return last_fit.engine

    def _make_server(self, loaded: dict[str, Any] | None) -> RoundEngine:
        """Make a new server, and load the checkpoint's state if there is one.

        Raises:
            ValueError: If the ledger, or the checkpoint, has charged rounds under other terms.
        """
        federation, ledger, server = self._federation, self._federation.ledger, self._federation.server
        if federation.owns_ledger and not ledger.rounds:
            ledger.reset(repr(federation.mechanism))  # the mechanism may have been replaced since
        report_key_source(ledger, federation.seed is not None, loaded and loaded["engine"]["ledger"])
        settings = {
            "target": server.sends,
            "server_lr": server.server_lr,
            "server_optimizer": server.server_optimizer,
            "client_weights": self._client_weights(),
            "aggregator": server.aggregator,
            "ledger": ledger,
            "broadcast_bits": server.broadcast_bits,
            "statistics": federation.local.statistics,
        }
        check_broadcast(server, self.vector)
        weights, segments, stacks = _weights(self.vector), self.vector.segments, self._stacks_of_all_ranks
        engine: RoundEngine = self.population.server(weights, segments, settings, stacks)
        self._set_ledger_terms(engine)
        if server.secure_aggregation is not None:
            check_modulus(server.secure_aggregation, engine)
        if loaded is not None:
            engine.load_state_dict(loaded["engine"])
            self.records = self._beside.records(loaded["records"], self._trainer.ckpt_path)
        return engine

    def _prepare_rounds(self, loaded: dict[str, Any] | None) -> None:
        """Open the journal, agree on the start with all ranks, and set the limits of a privacy target.

        Raises:
            ValueError: If there are more rounds than cohorts, or the ranks have different settings.
            RuntimeError: If the privacy target allows no further round.
        """
        federation, trainer, engine = self._federation, self._trainer, self.engine
        done = 0 if loaded is not None else engine.round - trainer.current_epoch
        rounds = federation.count_rounds(trainer)
        check_cohorts_last(federation.planner, done + (rounds or 0))
        if self.population.is_partitioned and not self.population.partitioned_data.own_loaders:
            samples = sum(map(len, self.population.partitioned_data.client_indices))
            report_steps(federation, trainer, samples, self.population.loader().batch_size)
        check_rounds_left(engine.statistics if engine.reads_statistics else None, rounds, done)
        if not federation.planner.law.secret:  # a journal names the clients of every round
            keep_journal(trainer, engine.ledger, federation.seed is not None)
        if self.population.ranks is not None:
            said = federation.planner.digest(done + (rounds or 0))
            start = {**self.identity, "round": str(engine.round), "available clients": said}
            indices = self.population.partitioned_data.client_indices
            agree_on_start(self.population.ranks, start, indices, federation.ledger)
        if self._target is not None:
            self._target.limit(engine, federation, trainer)
            if federation.seed is None:
                self._target.skip_spent_rounds(engine)

    def _plan_lengths(self) -> list[float]:
        """Return the lengths of updates that the schedule sets for each round, relative to the longest.

        Empty if the schedule does not tell, or this fit goes on with earlier rounds, whose rates are unknown.
        """
        rounds = self._federation.count_rounds(self._trainer)
        rates = None if self.engine.round or not rounds else self.side.clock.planned_rates(rounds)
        if not rates or not max(rates) > 0.0:
            return []
        lengths = [rate / max(rates) for rate in rates]
        report_short_rounds(self.engine, lengths)
        return lengths

    def _choose_stack(self) -> int:
        """Choose the number of clients that train in one step (the size of a stack)."""
        trainer, population, wanted = self._trainer, self.population, self._federation.local.clients_per_step
        if population.partitioned_data.own_loaders:
            rank_zero_info(
                "Federated trains one client at a time, because every client has its own training loaders"
            )
        if self._federation.batch_rule is not None or population.partitioned_data.own_loaders:
            return 1
        cohort, dry = self._federation.planner.cohort_size, self.side.dry()
        chosen = choose_clients_per_step(
            trainer,
            dry.start_client,
            self.vector,
            wanted,
            cohort,
            lambda size: max(self._schedule.trial_stacks(0, size), key=lambda stack: len(stack.clients)),
            lambda stack: self.fetch(next(population.loader().indices(stack))),
            dry.run_in_fork,
        )
        if population.ranks is None or wanted != "auto":
            return chosen
        share = -(-cohort // population.ranks.num_ranks)  # larger stacks would leave ranks without work
        size: int = population.ranks.group.broadcast(min(chosen, share), "the size of a stack")
        return size

    def _begin_algorithm(self, before: FederatedFit | None, saved: Any) -> Correction | None:
        """Return the state of the local algorithm: new, of the checkpoint, or of the last fit."""
        algorithm = self._federation.local.algorithm
        if algorithm is None:
            return None
        if before is not None and before.correction is not None:
            return before.correction
        correction = algorithm.begin(self.vector.num_parameters)
        if saved is not None:
            correction.load_state_dict(saved)
        elif self.engine.round and algorithm.remembers:
            name = type(algorithm).__name__
            rank_zero_warn(f"The checkpoint has no client states of {name}, so clients restart without them")
        return correction

    def _begin_evaluation(self, choice: ClientMetricsChoice) -> ClientEvaluator | None:
        """Prepare the evaluation on clients' held-out samples. None if the user did not ask for it."""
        settings, population = self._federation.local.evaluate_clients, self.population
        if settings is None:
            return None
        trainer, parts = self._trainer, population.partitioned_data.held_out
        settings.check(trainer.lightning_module, self._federation.clients.num_clients, choice == "none")
        if (elsewhere := population.evaluator(trainer, self.engine)) is not None:
            return elsewhere
        group = None if population.ranks is None else population.ranks.group
        worker, seed = self.side.worker, self._federation.planner.seed
        seed_of = lambda round, client: RoundPlan(round, (), frozenset(), seed).stream_seed(  # noqa: E731
            "evaluation", client
        )
        evaluator = ClientEvaluator(settings, trainer, worker, parts, population.loader, seed_of, group)
        evaluator.check_sizes()
        evaluator.exact = choice == "shared"
        return evaluator

    # ---- rounds ----------------------------------------------------------------------------------

    def run_round(self) -> int | None:
        """Train the next round, and return the steps of one client in it. See `RoundLoop.run_round`."""
        federation, trainer = self._federation, self._trainer
        if self.engine.statistics is not None:
            check_released(self.engine, str(self.records[-1].aborted) if self.records else "")
        before, is_secret = self.side.clock.steps_before_round, federation.planner.law.secret
        if is_secret:
            if not self._is_checked:
                check_claim(federation, trainer)
                if words := describe_timing(trainer, federation):
                    rank_zero_info(words)
            check_run(federation, trainer)
        if not self._is_checked:
            self._is_checked = True
            self._check_isolation()
            if has_claim(self.engine.mechanism, self.engine.context(self.engine.next_plan())):
                report_noised_statistics(self.vector)  # also with keys from a seed: the noise is the same
        try:
            record = self.play_round()
        except OtherRankStoppedError as error:
            rank_zero_warn(f"The run ends before the round is over: {error}")
            trainer.should_stop = True
            self._abandon()
            self._steps = None
            return None
        if is_secret:
            record = record.released()
        self.records.append(record)
        if (journal := self.engine.ledger.journal) is not None:  # rank 0 only
            self._beside.add(journal.path.parent, self._plain_records)
        if record.non_finite_clients or record.aborted:
            warn_round_failures(record, self.side.clock.merged_progress.not_finite)
        if self.population.ranks is not None:
            self.population.ranks.share_counts(trainer.lightning_module)
        trained = len(self.records) - (0 if self.engine.statistics is None else self.engine.statistics.rounds)
        if self._target is not None and trained > 0:
            self._target.check_direction(record)
        elif trained == 1:
            warn_of_noise(record, federation.count_rounds(trainer))
        steps = self.side.clock.steps
        self._steps = range(before, before + steps)
        is_last = trainer.current_epoch + 1 == federation.count_rounds(trainer)
        if self._evaluator is not None and self._evaluator.is_due(int(record.round), is_last):
            self.client_evaluations.append(self._evaluator.measure(int(record.round)))
        return steps

    def _check_isolation(self) -> None:
        local, population = self._federation.local, self.population
        wanted = local.check_isolation
        if wanted is None:
            wanted = has_claims(self.engine) or local.client_metrics in ("local", "none")
        if not wanted:
            return
        if population.partitioned_data.holds_streams:
            rank_zero_info("Isolation of the clients is not tested, because a stream can't be read twice")
            return

        def trial_stacks(round: int) -> Sequence[Stack]:
            return self._schedule.trial_stacks(round, 1)

        if self._federation.batch_rule is None:
            clients = first_clients(trial_stacks, 2)
        else:
            clients = [stack for stack in self.next_stacks() if stack.clients]
            trial_stacks = lambda round: clients  # noqa: E731 (a rule can draw its batches only once)
        dry, reads_statistics = self.side.dry(is_started=True), self.engine.reads_statistics
        self.isolation = IsolationTrial(self._trainer, dry, trial_stacks, reads_statistics).check(clients)

    def log_round(self) -> None:
        """Log the round that has just ended, and the client evaluation after it if it may be shared."""
        if self.figures is None:  # made after the first round, because it needs the federation's engine
            self.figures = RunFigures(self._federation, self._trainer)
            self._federation.when_vector_changes(self.figures.vector_changed)
        log_round(self._trainer, self.records[-1], self.figures.after(self.records[-1]))
        if self._evaluator is not None and self._evaluator.exact and self.client_evaluations:
            last = self.client_evaluations[-1]
            if last.round == self.records[-1].round and (values := last.metrics()):
                log_values(self._trainer, values)

    def replace_weights(self, weights: Tensor) -> None:
        """Set the weights of server and module to `weights`, `(dim,)`. Call it between rounds only."""
        self.engine.weights = weights.to(self.engine.weights, copy=True)
        self.vector.write(self.engine.weights)

    # ---- end --------------------------------------------------------------------------------------

    def end(self) -> None:
        """Free memory that only the rounds needed."""
        self.population.is_training = False
        self.side.worker.free_stack_memory()

    def give_up(self) -> None:
        """Drop the open round, if there is one, and tell the user."""
        if self.engine.plan is None:
            return
        rank_zero_info(
            f"Stopped in round {self.engine.round + 1}: its training is dropped, but updates that were sent "
            f"stay charged. The model is that after {len(self.records)} finished rounds, from which a "
            "checkpoint goes on (local_steps makes rounds shorter)"
        )
        self.given_up = self.start
        self._abandon()

    @property
    def start_of_round(self) -> RoundStart | None:
        """Start of the open round, or of one that an exception has ended. None between rounds."""
        return self.given_up or self.start

    def state_dict(self) -> dict[str, Any]:
        """Return server, records and choices of this fit for a checkpoint. In an open round, its start."""
        federation, own = self._federation, self.vector.personal
        is_seeded = federation.seed is not None
        if not is_seeded and os.getpid() == self._process:  # not in a fork of the isolation test
            keep_journal_of_checkpoint(self._trainer, self.engine.ledger)
        start = self.start_of_round if is_seeded else None
        # without a seed, a resumed run draws new keys. Messages of an open round are spent and stay in the
        # ledger, and the repeated round is a new attempt
        hidden = {"total_uplink_bits": math.nan} if has_revealing_lengths(self.engine) else {}
        kept = {} if self._target is None else {"calibration": self._target.state_dict()}
        if elsewhere := self.population.state_dict():
            kept["clients"] = elsewhere
        # without a seed, only clients elsewhere keep their own states
        if self.correction is not None and (is_seeded or elsewhere):
            kept["algorithm"] = self.correction.state_dict()
        if is_seeded and own.names and self.population.keeps_personal:
            kept["own"] = own.state_dict()
        return {
            **kept,
            "federation": self.identity,
            "plan_seed": federation.planner.seed,
            "members": (self.vector.members if start is None else start.members).plain(),
            "clients_per_step": self.clients_per_step,
            "engine": {**self.engine.state_dict(), **hidden} if start is None else start.engine,
            "records": self._beside.describe(len(self.records)) or self._plain_records(),
        }

    def _plain_records(self, first: int = 0) -> list[dict[str, Any]]:
        keeps_lengths = not has_revealing_lengths(self.engine)
        return plain_records(self.records[first:], self._federation.seed is None, keeps_lengths)


def _weights(vector: Vector) -> Tensor:
    """Return the global model, `(dim,)`, in float32 or wider."""
    weights = vector.read()
    return weights.to(torch.promote_types(weights.dtype, torch.float32))
