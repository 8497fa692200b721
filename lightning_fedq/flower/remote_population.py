"""Clients on other machines, as the population of a fit: a round asks them in place of training.

Stacks, batches and updates of a simulation have placeholders here. The server only knows the number of
samples that clients report. After a round, every client may measure the new model.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.algorithms.local_algorithm import PersistentOffsets
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.undo import Undo
from lightning_fedq.clients.vector import Members, optimised_ids
from lightning_fedq.data.batches import LocalWork, Stack
from lightning_fedq.data.generator_turns import preserve_generators
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.flower.cohort import Cohort
from lightning_fedq.flower.exchange import Exchange
from lightning_fedq.flower.persistent_state import NEVER, Attempt
from lightning_fedq.flower.records import Fields
from lightning_fedq.flower.roster import Roster
from lightning_fedq.flower.round_inputs import plain_numbers
from lightning_fedq.flower.secure import remote_sums
from lightning_fedq.flower.settings import check_schedules, only_simulated
from lightning_fedq.rounds import Broadcast, RoundPlan, RoundRecord, RoundServer
from lightning_fedq.training.client_evaluation import (
    PREFIX,
    ClientEvaluator,
    EvaluatedClients,
    Model,
    stack_metrics,
)
from lightning_fedq.training.loops import Schedule, idle_stack
from lightning_fedq.training.population import PartitionedData, Population, Stacks
from lightning_fedq.training.settings import Federation


class RemoteRoundServer(RoundServer):
    """`RoundServer` that waits for clients before it charges a round, and asks them in `finish`.

    Attributes:
        clients: The clients to wait for and to ask.
    """

    clients: RemoteClients

    def _refuse(self, works_on_updates: object) -> None:
        """Refuse a callback that works on updates, which only the clients of a simulation have."""
        if works_on_updates is not None:
            name = type(works_on_updates).__name__
            raise ValueError(f"{name} works on updates, which a server never receives. Leave it out.")

    transform = tampering = property(
        lambda self: None, _refuse, doc="Transform of updates, always None on a server."
    )

    def start(self) -> RoundPlan:
        """Wait for enough clients, and begin the round (see `RoundServer.start`)."""
        self.clients.check_ready(self)
        return super().start()

    def _record(self, plan: RoundPlan) -> RoundRecord:
        """Return the record of a round, in which each client without an answer has dropped out."""
        record = super()._record(plan)
        return replace(record, num_dropped=len(plan.cohort) - int(record.num_received))

    def finish(self) -> RoundRecord:
        """Ask the clients, receive their answers, and finish the round (see `RoundServer.finish`)."""
        # clients run in other processes, so collecting must not change the draws of the server's step
        with preserve_generators():
            self.clients.collect(self)
        record = super().finish()
        self.clients.note_counted(self, record)
        return record


class _IdleRounds(Schedule):
    """Schedule of one idle step a round, because the server trains nothing."""

    max_batches = 1

    def _make_stacks(self, round: int, attempt: int, clients_per_step: int, most: int | None) -> list[Stack]:
        return [idle_stack(self._planner.plan(round, self._mechanism))]


class RemoteClients(Population):
    """Population of clients on other machines. The server only knows their reported sample counts.

    Args:
        federation: Settings of this fit.
        trainer: Trainer of the server.
        module: Module of the server.
        exchange: Connection to the nodes.
        roster: Registry of the clients.
        undo: Restores the user's objects after the fit.
        max_aborted_rounds: Largest number of aborted rounds in a row.

    Raises:
        ValueError: If a callback works on simulated clients.
    """

    def __init__(
        self,
        federation: Federated,
        trainer: Any,
        module: pl.LightningModule,
        exchange: Exchange,
        roster: Roster,
        undo: Undo,
        max_aborted_rounds: int,
    ) -> None:
        super().__init__(federation)
        self._federated = federation
        self._max_aborted_rounds, self._in_vain = max_aborted_rounds, list[str]()
        for callback in trainer.callbacks:
            if only_simulated(callback):
                raise ValueError(
                    f"{type(callback).__name__} works on simulated clients, but a server has none. Leave it "
                    "out."
                )
        self._exchange, self._roster, self._trainer = exchange, roster, trainer
        self._counted: dict[int, Attempt] = {}
        self._open_attempt = NEVER
        self._reported_names = set[str]()
        # the limit is for the clients' passes, not for the idle step
        undo.replace(trainer, "limit_train_batches", 1.0)
        undo.replace(trainer.datamodule or module, "train_dataloader", lambda: self.loader())

    def check_start(self, trainer: pl.Trainer) -> None:
        """Refuse schedules that clients can't follow, before anybody is charged."""
        check_schedules(trainer, self._federation.local.local_steps)
        self._held, self._values = optimised_ids(trainer.optimizers), plain_values(trainer.lightning_module)

    def check_change(self, before: Members, now: Members) -> None:
        """Refuse to freeze parameters that were trained, and to train parameters outside clients' optimisers.

        Frozen parameters do not travel, and clients keep no model between rounds. So a parameter that is
        frozen after training would have its initial value at the clients.

        Args:
            before: Parameters of the previous round.
            now: Parameters of this round.

        Raises:
            ValueError: If this round does either.
        """
        trained, module = (*now.parameters, *now.local), self._trainer.lightning_module
        if late := [name for name in trained if id(module.get_parameter(name)) not in self._held]:
            raise ValueError(
                f"This round trains {', '.join(late[:3])}, which clients' optimisers do not have. Give "
                "configure_optimizers all parameters that are ever trained, and unfreeze them by "
                "requires_grad."
            )
        if frozen := [name for name in (*before.parameters, *before.local) if name not in trained]:
            raise ValueError(
                f"This round freezes {', '.join(frozen[:3])}, which was trained and then no longer travels. "
                "Freeze it in module() from the start, or keep it trained."
            )

    def trial_stacks(self) -> None:
        """Return nothing to try, because the server has no data."""

    def server(
        self, weights: Tensor, segments: Sequence[int], settings: dict[str, Any], all: Stacks
    ) -> RemoteRoundServer:
        """Return a round server that asks clients over the network (see `Population.server`)."""
        federation = self._federation
        secagg = federation.server.secure_aggregation
        server = RemoteRoundServer(
            federation.mechanism,
            federation.planner,
            self._roster.keys(),
            weights,
            segments,
            federation.server.range_rule,
            secure_sums=None if secagg is None else remote_sums(secagg, self._roster.directory),
            **settings,
        )
        server.clients = self
        return server

    def check_ready(self, server: RemoteRoundServer) -> None:
        """Wait for enough clients, and refuse a round that is known to fail, before anybody is charged.

        Args:
            server: Server between two rounds.

        Raises:
            RuntimeError: If too many rounds in a row were aborted, or too few clients are connected.
        """
        if len(self._in_vain) >= self._max_aborted_rounds:
            raise RuntimeError(
                f"{len(self._in_vain)} rounds in a row were charged and aborted, the last because "
                f"{self._in_vain[-1]} ({self._roster.describe_failures() or 'no client has failed'}). Cure "
                "the cause and start this run again with the same home, or raise "
                "server_app(max_aborted_rounds=...)."
            )
        plan = server.next_plan()
        self._roster.wait_for(plan.cohort, self._count_needed(server, plan), f"Round {plan.round + 1}")

    def _count_needed(self, server: RemoteRoundServer, plan: RoundPlan) -> int:
        """Return the number of answers without which the round of `plan` has no mean."""
        tolerated = server.mechanism.tolerated_dropouts(server.context(plan))
        needed = 1 if tolerated is None else len(plan.cohort) - tolerated
        if (secagg := self._federation.server.secure_aggregation) is not None:
            needed = max(needed, secagg.rules(server.planner.num_clients, len(plan.cohort))[2])
        return needed if server.aggregator is None else max(needed, server.aggregator.min_clients)

    def note_counted(self, server: RemoteRoundServer, record: RoundRecord) -> None:
        """Note the clients whose answers are in the sum, so that the next task can tell them.

        Counters of batches advance as in a simulation where every client takes `local_steps`.

        Args:
            server: Server that has finished the round.
            record: Record of the round.
        """
        if (batches := self._federation.local.local_steps) is not None:
            fit, most = self._federated.fit, self._federated.fit.side.clock.max_batches
            fit.vector.max_counted.fill_(batches if most is None else min(batches, most))
        if record.aborted or not record.num_received:
            self._in_vain.append(record.aborted or "no client answered")
        else:
            self._in_vain.clear()
            failures = self._roster.failures.items()
            self._roster.failures = {c: why for c, why in failures if self._roster.absence_reason(c)}
        self._counted |= dict.fromkeys(sorted(server.last_summed_clients), self._open_attempt)

    def state_dict(self) -> dict[str, Any]:
        # last round and attempt of each client whose answer was in a sum
        return {"counted": {client: list(at) for client, at in self._counted.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counted = {int(client): (at[0], at[1]) for client, at in state["counted"].items()}

    def _round_inputs(self) -> dict[str, Any]:
        """Return the fields that clients need besides task and weights.

        These are the mean of the statistics, the vector of the local algorithm, the options of the optimisers
        and the names of trained parameters. Callbacks and schedules of this fit may change them, such as
        learning rates.
        """
        algorithm, term = self._federation.local.algorithm, self._federated.fit.correction
        optimizers, engine = self._trainer.optimizers, self._federation.engine
        groups = [[plain_numbers(group) for group in one.param_groups] for one in optimizers]
        optimised, parameters = optimised_ids(optimizers), self._trainer.lightning_module.named_parameters()
        trained = [n for n, p in parameters if p.requires_grad and id(p) in optimised]
        fields: Fields = {"groups": json.dumps(groups), "trained": json.dumps(trained)}
        if engine is not None and engine.statistic is not None:  # it was released, so it reveals nothing new
            fields["statistic"] = engine.statistic.float().numpy().astype("<f4").tobytes()
        if algorithm is not None and algorithm.sends and isinstance(term, PersistentOffsets):
            fields["algorithm"] = term.server.float().cpu().numpy().tobytes()
        return fields

    def _report_changed_values(self) -> None:
        """Warn once of each module attribute that the fit has changed and that clients do not receive.

        Values that hooks compute from `self.current_epoch`, the index of the round, are the same at the
        clients. Values that build on the previous round are lost.
        """
        now = plain_values(self._trainer.lightning_module)
        changed = [name for name, value in now.items() if self._values.get(name) != value]
        self._values = now
        if new_names := [name for name in changed if name not in self._reported_names]:
            self._reported_names.update(new_names)
            rank_zero_warn(
                f"This fit has changed {', '.join(new_names[:3])} of its module, but clients begin each "
                "round with a new module. Compute it from self.current_epoch (the round), because values of "
                "the previous round are lost."
            )

    def _partition_data(self) -> PartitionedData:
        """Return placeholder data with the reported number of samples of each client, and idle rounds."""
        index = torch.zeros(1, dtype=torch.int64)  # expanded, so that a huge reported number takes no memory
        client_indices = [index.expand(n) for _, n in sorted(self._roster.samples.items())]
        work = LocalWork((index,), 1, False, False, 1, None)
        schedule = _IdleRounds(self._federation.planner, self._federation.mechanism, work, None, 0)
        schedule.max_batches = self._federation.local.local_steps or 1
        idle = DataLoader(TensorDataset(torch.zeros(1, 1)))
        loader = ClientLoader(idle, work, lambda: self.coming(), schedule.max_batches)
        return PartitionedData(client_indices, schedule, loader, False, [])

    def collect(self, server: RemoteRoundServer) -> None:
        """Ask the cohort, and pass the answers to the server. Clients without an answer have dropped out.

        Args:
            server: Server with an open round.
        """
        self._report_changed_values()
        cohort, plan = Cohort(server, self._exchange, self._roster), server.plan
        assert plan is not None
        self._open_attempt = plan.round, server.attempt
        model_fields = self._model(server, server.broadcast)
        questions = cohort.client_requests()
        needed = self._count_needed(server, plan)
        if len(questions) < needed:  # clients left after the round began, so the others need not send
            server.abort(f"{needed} clients are needed, {len(questions)} are there")
            return
        contents = {client: {**model_fields(client), **fields} for client, fields in questions.items()}
        cohort.conclude(cohort.ask("train", contents))

    def _model(self, server: RoundServer, broadcast: Broadcast | None) -> Callable[[int], Fields]:
        """Return a function that gives the model fields for a client.

        Args:
            server: Server with the global weights.
            broadcast: Quantiser of the downlink, or None to send the weights as they are.
        """
        weights = server.weights.detach().cpu().contiguous()
        sent = weights.numpy().tobytes() if broadcast is None else broadcast.pack(weights, server.segments)
        model = {"weights": sent, "dtype": str(weights.dtype).partition(".")[2], **self._round_inputs()}
        return lambda client: {**model, "counted": list(self._counted.get(client, NEVER))}

    def evaluator(self, trainer: pl.Trainer, engine: RemoteRoundServer) -> RemoteEvaluator:
        """Return an evaluator that asks clients to measure (see `Population.evaluator`)."""
        model = lambda: self._model(engine, None)  # noqa: E731 (unquantised, as a simulation measures)
        return RemoteEvaluator(self._federation, trainer, self._exchange, self._roster, model)


def plain_values(module: pl.LightningModule) -> dict[str, Any]:
    """Return numbers, flags and text in public attributes of a module and its parts, by dotted name.

    `training` is left out, because validation changes it.
    """
    return {
        f"{part}.{name}".lstrip("."): value
        for part, submodule in module.named_modules()
        for name, value in vars(submodule).items()
        if type(value) in (bool, int, float, str) and not name.startswith("_") and name != "training"
    }


# ---- evaluation by client ----------------------------------------------------------------------------------


Row = dict[Model, dict[str, float]]


class RemoteEvaluator(ClientEvaluator):
    """Evaluator that asks real clients to measure the new model after rounds of one fit.

    A client measures as a simulated client does. It sends what its own settings allow: exact values (if
    `client_metrics="shared"` or there is no privacy claim), or nothing.

    Args:
        federation: Settings of the federation.
        trainer: Trainer of the server.
        exchange: Connection to the nodes.
        roster: Registry of the clients.
        model: Function that returns another function, which gives the model's fields for a client.
    """

    exact = True  # clients decide which values they send, so all may be shown

    def __init__(
        self,
        federation: Federation,
        trainer: Any,
        exchange: Exchange,
        roster: Roster,
        model: Callable[[], Callable[[int], Fields]],
    ) -> None:
        assert federation.local.evaluate_clients is not None
        self._settings, self._trainer = federation.local.evaluate_clients, trainer
        self._exchange, self._roster, self._model = exchange, roster, model
        self._num = federation.clients.num_clients

    def measure(self, round: int) -> EvaluatedClients:
        """Ask every connected client to measure the new model, and return the values that arrive."""
        self._roster.refresh()
        online, left_out = set(self._exchange.online()), self._roster.left_out
        nodes = {n: c for c, n in self._roster.nodes.items() if n in online and c not in left_out}
        model_fields, keys = self._model(), self._roster.keys()
        contents: dict[int, Fields] = {
            node: {"client": c, "round": round, **model_fields(c), **self._roster.introduction(keys, c, ())}
            for node, c in nodes.items()
        }
        replies = self._exchange("evaluate", contents, f"round {round + 1}")
        answers = {nodes[node]: fields for node, fields in replies.items() if "refused" not in fields}
        if silent := sorted(set(range(self._num)).difference(answers)):
            rank_zero_warn(f"Round {round + 1}: clients {silent[:10]} have sent no metrics")
        rows = _rows(answers)
        values: dict[Model, dict[str, Tensor]] = {
            model: stack_metrics([row.get(model, {}) for row in rows.values()])
            for model in PREFIX
            if any(model in row for row in rows.values())
        }
        return self._evaluated(round, values, None if len(rows) in (0, self._num) else tuple(rows))


def _rows(answers: Mapping[int, Fields]) -> dict[int, Row]:
    """Return exact values by client, in order, without unreadable answers and odd metric names.

    A client may lack metrics that others have, or have metrics that others lack. But its names must be a
    subset or a superset of the most common set of names.
    """
    rows: dict[int, Row] = {}
    for client, fields in sorted(answers.items()):
        try:
            row = json.loads(fields["measured"]) if "measured" in fields else {}
            known: Row = {
                model: {str(n): math.nan if v is None else float(v) for n, v in row[model].items()}
                for model in PREFIX
                if model in row
            }
        except (TypeError, ValueError, AttributeError, OverflowError):
            known = {}
        if any(known.values()):
            rows[client] = known
    names = {c: frozenset((model, name) for model in row for name in row[model]) for c, row in rows.items()}
    usual = Counter(names.values()).most_common(1)
    if odd := [c for c in rows if not (names[c] <= usual[0][0] or names[c] >= usual[0][0])]:
        rank_zero_warn(f"Clients {odd[:10]} measure other metrics than most clients, and are left out")
    return {client: row for client, row in rows.items() if client not in odd}
