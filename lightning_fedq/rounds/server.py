"""The server's half of a round: it is given messages, never an update. It decodes, steps and records.

It holds the running sum of one round and the server's state; its memory grows with the model, never with the
number of clients. It names no mechanism, and no transport.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fedq.functional.flatten import rearrange
from lightning_fedq.keys.randomness import PublicRandomness, ServerKeys
from lightning_fedq.mechanisms.contract import check_claims, check_decoded
from lightning_fedq.mechanisms.interface import AbortedRoundError, HandOver, Mechanism, RoundContext
from lightning_fedq.mechanisms.interface.ranges import RangeRule, Ranges
from lightning_fedq.privacy.ledger import Ledger, pad_segments
from lightning_fedq.privacy.run import ASSUMED, Run, ThreatModel
from lightning_fedq.rounds.broadcast import Broadcast
from lightning_fedq.rounds.client import Target
from lightning_fedq.rounds.messages import MalformedMessageError, RefusedMessageError, RoundTask, open_frame
from lightning_fedq.rounds.plan import RoundPlan, RoundPlanner
from lightning_fedq.rounds.protocols import (
    Aggregator,
    OptimizerFactory,
    SecureSum,
    SecureSums,
    check_aggregation,
)
from lightning_fedq.rounds.record import RoundRecord
from lightning_fedq.rounds.running_sum import RunningSum, ServerStep
from lightning_fedq.rounds.statistics import Statistics
from lightning_fedq.wire.coding import UndecodableError


class RoundServer:
    """The server of a federation: global weights, ranges, running sum, ledger.

    Use it as `server.start()`, send `server.task()` and the weights to the clients of the plan, give
    `receive_message` what they answer, in any order, then `record = server.finish()`.

    Args:
        weights: `(dim,)` initial global model; copied.
        segments: Length of each segment (layer); they sum to `dim`.
        target: What is quantised: "updates" (local - global) or, as in the CorBin paper, "weights".
        server_lr: Server learning rate lambda in (0, 1]; the model moves to (1 - lambda) w + lambda w_new.
        server_optimizer: Takes the parameters, returns a torch optimiser that is given minus the mean
            update as gradient; None applies the mean update itself.
        client_weights: `(num_clients,)` weights > 0 of a weighted mean; None is uniform. With weights
            every message is decoded on its own.
        aggregator: A robust rule in place of the mean. Every message is then decoded on its own and all
            rows are kept to the end of the round: memory O(clients x dim).
        secure_sums: Secure aggregation: opens the sum of each round. Messages go nowhere else, and the
            record counts the bits of the protocol in place of theirs.
        ledger: Ledger of an earlier training with the same clients; None starts a new one.
        broadcast_bits: Bits a coordinate of the model that clients are sent; None sends floats as they are.
        statistics: What the first rounds release in place of a step; None is nothing.

    Attributes:
        weights: The model; in an open round, as its clients were sent it.
        released: Means that rounds of statistics have released, `(size,)` float64 each, and the standard
            deviation of their noise; None where it is not known.
        last_summed_clients: Clients whose answers are in the last round's mean.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        planner: RoundPlanner,
        keys: ServerKeys,
        weights: Tensor,
        segments: Sequence[int],
        ranges: RangeRule,
        *,
        target: Target = "updates",
        server_lr: float = 1.0,
        server_optimizer: OptimizerFactory | None = None,
        client_weights: Tensor | None = None,
        aggregator: Aggregator | None = None,
        secure_sums: SecureSums | None = None,
        ledger: Ledger | None = None,
        broadcast_bits: int | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        if target not in ("updates", "weights"):
            raise ValueError(f"target must be 'updates' or 'weights', got {target!r}")
        if sum(segments) != weights.numel():
            raise ValueError(f"segments sum to {sum(segments)}, the model has {weights.numel()} parameters")
        if client_weights is not None:
            if client_weights.shape != (planner.num_clients,):
                raise ValueError(
                    f"client_weights needs one weight per client, shape {(planner.num_clients,)}, "
                    f"got {tuple(client_weights.shape)}"
                )
            if not bool((client_weights > 0).all() and torch.isfinite(client_weights).all()):
                raise ValueError("client_weights must be > 0 and finite")
        weighted, secure = client_weights is not None, secure_sums is not None
        check_aggregation(mechanism, planner.cohort_size, weighted, aggregator, secure)
        planner.check_mechanism(mechanism)
        self.mechanism, self.planner, self.keys = mechanism, planner, keys
        self.aggregator, self.secure_sums = aggregator, secure_sums
        self.segments, self.range_rule, self.target = tuple(segments), mechanism.range_rule or ranges, target
        self.client_weights = client_weights
        self.broadcast = None if broadcast_bits is None else Broadcast(broadcast_bits)
        self.weights = weights.detach().clone()
        self._model: Tensor | None = None
        self.ranges = self.range_rule.first(self.weights, self.segments)
        if statistics is not None:
            statistics.check(mechanism, weights.numel())
        self.statistics = statistics
        self.released: list[tuple[Tensor, float | None]] = []
        self.round, self.attempt = 0, 0
        self._since: tuple[int, int] | None = None
        self.last_summed_clients: frozenset[int] = frozenset()
        self.total_uplink_bits: float = 0
        self.total_downlink_bits: float = 0
        self._server_step = ServerStep(self.weights, server_lr, server_optimizer)
        self.plan: RoundPlan | None = None
        self._aborted = ""
        self._unchecked = True
        self._terms: dict[str, str] | None = None
        self._sum: RunningSum
        self.ledger = Ledger(planner.num_clients, repr(mechanism)) if ledger is None else ledger
        self.ledger.check(planner.num_clients, repr(mechanism))
        self._seeded = keys.mode == "reproducible"
        self._keys_name = None if self._seeded else keys.public()
        self.ledger.begin(self._keys_name)

    @property
    def plain_sum(self) -> bool:
        """Does the model depend on the messages through their unweighted sum only?"""
        return self.client_weights is None and self.aggregator is None

    @property
    def reads_statistics(self) -> bool:
        """Is the open round, or the one to come, one of statistics?"""
        return self.statistics is not None and self.round < self.statistics.rounds

    @property
    def statistic(self) -> Tensor | None:
        """The mean of clients' statistics, `(size,)` float64. None before their last round has ended."""
        if self.reads_statistics or not self.released:
            return None
        return torch.stack([mean for mean, _ in self.released]).mean(0)

    @property
    def statistic_std(self) -> float | None:
        """Standard deviation of the noise of one number of `statistic`. None where it is not known."""
        found = [std for _, std in self.released if std is not None]
        return math.hypot(*found) / len(found) if len(found) == len(self.released) > 0 else None

    def agree_on_terms(self, run: Run) -> None:
        """Agree with the ledger on the terms of the rounds to come. Each `start` asks again.

        Raises:
            ValueError: If the ledger's charges are of other terms.
        """
        self._terms = run.terms
        self.ledger.set_terms(self._terms)

    def _default_run(self, context: RoundContext) -> Run:
        """The run of a server that nobody has told more: masks of some kind, and no clients that lie."""
        masks = None if self.secure_sums is None else replace(ASSUMED, settings="on")
        return Run(
            mechanism=self.mechanism,
            context=context,
            rounds=self.ledger.rounds,
            sampling=self.planner.sampling(""),
            threat=ThreatModel(
                secure_sum=masks, plain_sum=self.plain_sum, num_byzantine=0, secure_keys=not self._seeded
            ),
            charges=None,
            to_come=0,
        )

    # ---- one round --------------------------------------------------------------------------------

    def next_plan(self) -> RoundPlan:
        """The round to come as accounts see it (`RoundPlanner.expected`). Where every disjoint cohort has had
        its own, the last one."""
        last = self.planner.num_rounds
        round = self.round if last is None else min(self.round, last - 1)
        return self.planner.expected(round, self.mechanism, self.attempt)

    def context(self, plan: RoundPlan) -> RoundContext:
        """Public facts of the round of `plan`."""
        c, r = self.ranges.center, self.ranges.radius
        since, handed = self._since, self._pair_noise(plan)
        return RoundContext(
            plan.round, plan.groups, self.segments, c, r, self.attempt, since=since, hand_over=handed
        )

    def _pair_noise(self, plan: RoundPlan) -> HandOver | None:
        """Who takes back whose noise in the round of `plan`, if the mechanism asks."""
        if not self.mechanism.hands_on:
            return None
        now, since, after = (plan.round, self.attempt), self._since, self.planner.successors(plan.round)
        if since is None or since[0] >= plan.round or self.attempt:  # a block begins: nobody takes back
            return HandOver(now, (), after)
        pairs = self.planner.successors(plan.round - 1)
        # noise of a silent one is in no sum
        before = tuple((client, other) for other, client in pairs if other in self.last_summed_clients)
        return HandOver(since, before, after)

    def charged_context(self, plan: RoundPlan) -> RoundContext:
        """The round of `plan` as accounts see it: as long as the longest vector that was ever charged for.

        Parameters may join and leave in mid-run, and a charge has no length; so all of them have the longest.
        """
        return pad_segments(self.context(plan), self.ledger.dim)

    def rearrange(
        self, parts: Sequence[Tensor], origins: Sequence[int | None], client_weights: Tensor | None
    ) -> None:
        """Change what the flat vector is made of. Between rounds, or in one that nobody has answered yet.

        What stays keeps its weights, range and server state. The ledger goes on: see `charged_context`.

        Args:
            parts: A vector for each new segment; its values count where there is no old one.
            origins: For each new segment the old one's index, or None where it joins.
            client_weights: `(num_clients,)`, of the new vector; None is uniform.

        Raises:
            RuntimeError: If somebody has answered in the open round.
            ValueError: If the length changes and no length covers another, see `Mechanism.covers_shorter`.
        """
        length = sum(part.numel() for part in parts)
        if not self.mechanism.covers_shorter and length != self.weights.numel():
            raise ValueError(
                f"{type(self.mechanism).__name__} can't be charged for vectors of two lengths, and "
                f"parameters join or leave: there were {self.weights.numel()} coordinates, now {length}; "
                "freeze or unfreeze before the first round, or take another mechanism"
            )
        if self.plan is not None and self._expected != set(self.plan.survivors):
            raise RuntimeError("the flat vector can't change in a round that somebody has answered")
        old, segments = self.segments, tuple(part.numel() for part in parts)
        self.weights = rearrange(self._current_weights, old, origins, parts)
        self.segments, self.client_weights = segments, client_weights
        first = self.range_rule.first(self.weights, segments)
        ones, single = [1] * len(old), [first.center[i : i + 1] for i in range(len(segments))]
        center = rearrange(self.ranges.center, ones, origins, single)
        single = [first.radius[i : i + 1] for i in range(len(segments))]
        self.ranges = Ranges(center, rearrange(self.ranges.radius, ones, origins, single))
        self._server_step.rearrange(self.weights, old, origins, parts)
        self._since = None if self.plan is None else (self.plan.round, self.attempt)
        if self.plan is not None:
            self._send_down(self.weights)
            self._open(self.plan)

    def start(self) -> RoundPlan:
        """Plan the next round, charge its cohort and clear the running sum.

        Raises:
            RuntimeError: If the round was started before and not abandoned.
            ValueError: If the ledger's charges are of other terms, see `agree_on_terms`.
            BrokenContractError: In the first round of this object, if claims break a rule.
        """
        plan = self.planner.plan(self.round, self.mechanism, self.attempt)
        if self._unchecked or self._terms is None:
            context = self.context(self.planner.expected(self.round, self.mechanism, self.attempt))
            check_claims(self.mechanism.claims(context))
            if self._terms is None:
                self.agree_on_terms(self._default_run(context))
        assert self._terms is not None
        self.ledger.set_terms(self._terms)
        self.ledger.select_server(self._keys_name)
        state = self.ledger.state(self.weights, self.ranges.center, self.ranges.radius)
        # it may rise, so the plan is made again
        self.attempt = self.ledger.free_attempt(plan.round, self.attempt, state)
        plan = self.planner.plan(self.round, self.mechanism, self.attempt)
        if self._since is None or self.attempt or self._has_early_client(plan, self._since[0]):
            self._since = plan.round, self.attempt
        # all of the cohort: who does not answer may have encoded
        self.ledger.charge(plan.cohort, plan.round, self.attempt, state, self.weights.numel())
        self.plan = plan
        self._send_down(self.weights)
        self._open(plan)
        return plan

    def _send_down(self, model: Tensor) -> None:
        if self.broadcast is not None:
            self._model, self.weights = model, self.broadcast.rounded(model, self.segments)

    @property
    def _current_weights(self) -> Tensor:
        """The server's own model, which in an open round may be another one than what clients were sent."""
        return self.weights if self.plan is None or self._model is None else self._model

    def _has_early_client(self, plan: RoundPlan, since: int) -> bool:
        """Was one of the cohort there in one of the rounds that this one's noise is correlated with?"""
        needed = self.mechanism.separation
        # what lies before `since` is of another block, whose noise is independent
        return needed > 1 and self.ledger.last_round(plan.cohort) > max(since - 1, plan.round - needed)

    def _open(self, plan: RoundPlan) -> None:
        self._context = self.context(plan)
        self._expected = set(plan.survivors)
        self._uplink_bits = 0
        self._aborted = ""
        public, secure = PublicRandomness(self.keys, plan.round, self.attempt), None
        if self.secure_sums is not None:
            session, weights, clients = self.keys.public(), self.weights, self.planner.num_clients
            secure = self.secure_sums(
                self.mechanism, self._context, public, session=session, weights=weights, num_clients=clients
            )
        self._sum = RunningSum(
            self.mechanism,
            self._context,
            public,
            self.weights,
            self.client_weights,
            self.aggregator,
            secure,
            self.planner.divisor,
        )

    def task(self) -> RoundTask:
        """Task for the clients of the open round.

        Raises:
            RuntimeError: If no round is open.
        """
        self._open_plan()
        return RoundTask.from_context(self._context)

    def receive_message(self, message: bytes) -> int:
        """Take one client's answer, and return whose it is. One that is refused changes nothing.

        Raises:
            RefusedMessageError: If it is malformed, forged, late, repeated, or a stranger's; see its kinds.
                Any other error is a bug of the mechanism or its code, and no client's.
        """
        if self.plan is None:
            raise RefusedMessageError("no round is open; the message is late")
        context = self._context
        public = PublicRandomness(self.keys, context.round, context.attempt)
        client, packed = open_frame(message, context, public, self._expected)
        if self._aborted:
            self._expected.discard(client)
            return client
        try:
            symbols, num_bits = self._unpack(client, packed, public)
            self._sum.add(symbols[None], [client], untrusted=True)
        except UndecodableError as error:
            raise MalformedMessageError(str(error), client) from error
        self._expected.discard(client)
        self._uplink_bits += num_bits
        return client

    @property
    def secure_sum(self) -> SecureSum | None:
        """The open round's secure aggregation, which clients talk to where there is one."""
        return self._sum.secure

    def abort(self, reason: str) -> None:
        """Let the open round leave the model as it is. `finish` records why."""
        self._open_plan()
        self._aborted = reason

    def set_answered(self, clients: Sequence[int]) -> None:
        """Behind secure aggregation, say whose messages the sum holds, before `finish`.

        Raises:
            ValueError: If one of them is not expected.
        """
        if not self._expected.issuperset(clients):
            raise ValueError(f"clients {sorted(set(clients) - self._expected)} are not expected")
        self._expected -= set(clients)
        self._sum.received += clients

    def _unpack(self, client: int, packed: bytes, public: PublicRandomness) -> tuple[Tensor, int]:
        """The symbols `(m,)` of a message, and the bits that it takes."""
        context, mechanism = self._context, self.mechanism
        code, count = mechanism.message_code(client, context, public), mechanism.num_symbols(context)
        code.check_length(packed, count)
        symbols = code.unpack(packed, count)
        num_bits = code.num_bits(symbols)
        if symbols.shape != (count,) or len(packed) != (num_bits + 7) // 8:
            raise MalformedMessageError(f"{len(packed)} bytes for {num_bits} bits of {count} symbols", client)
        if not mechanism.can_send(symbols, client, context, public):
            raise MalformedMessageError("holds symbols that the mechanism can't send", client)
        return symbols, num_bits

    def finish(self) -> RoundRecord:
        """Decode the sum, step the server, choose the next range, and return the record.

        With no answer at all, or where the round is aborted, the model stays as it is and the round is
        recorded all the same; it stays charged. A mean that is not finite aborts it, and so does a step after
        which the model or the state of the server's optimiser is not: that state then begins anew. Where
        nobody may learn how many take part, a round of nobody releases its noise, and the record has no
        number that follows from how many there were.

        Raises:
            RuntimeError: If no round is open.
            BrokenContractError: In the first round of this object, if the decoded sum breaks a rule.
        """
        plan = self._open_plan()
        mean, sent = self._mean_or_abort(), self.weights
        self.weights = (
            self._current_weights
        )  # the step goes from the server's own model, not from the rounded one
        take = self._read_statistics if self.reads_statistics else self._step
        step = None if mean is None else take(mean[: sent.numel()], sent)
        record = self._record(plan)
        if step is not None:
            record.update_norm = step.norm().item()
            self._diagnose(record, step)
        if self.reads_statistics:
            self._since = None  # what follows is no continuation of this sum
        elif mean is not None and step is not None:
            variance = self._sum.noise_variance()
            self.ranges = self.range_rule.following(self.ranges, self.weights, mean, variance, self.segments)
        self.last_summed_clients = frozenset() if mean is None else frozenset(self._sum.received)
        if self.planner.law.own_draws:
            record = record.with_secret_size(self.planner.cohort_size)
        self.total_uplink_bits += record.uplink_bits
        self.total_downlink_bits += record.downlink_bits
        self.round, self.attempt, self.plan = self.round + 1, 0, None
        return record

    def abandon(self) -> None:
        """Give up an open round: its streams are never used again, the next start is a new attempt."""
        if self.plan is not None:
            self.weights, self.attempt, self.plan = self._current_weights, self.attempt + 1, None

    def skip(self) -> None:
        """Leave a round out that was sent before it was lost and that its cohort can't pay for twice.

        Raises:
            RuntimeError: If a round is open.
        """
        if self.plan is not None:
            raise RuntimeError("a round is open; finish or abandon it first")
        self.round, self.attempt, self.last_summed_clients = self.round + 1, 0, frozenset()

    def _open_plan(self) -> RoundPlan:
        if self.plan is None:
            raise RuntimeError("no round is open; call start() first")
        return self.plan

    def _mean_or_abort(self) -> Tensor | None:
        """The mean, checked, or None where nobody has answered or the round is aborted."""
        if self._aborted:
            return None
        from_wire = self._sum.untrusted
        try:
            mean = self._sum.mean(self._open_plan())
        except AbortedRoundError as error:
            self._aborted = str(error)
            return None
        if mean is None:
            return None
        bad = _num_not_finite(mean)
        if self._unchecked and not (bad and from_wire):  # what real clients send is not the mechanism's fault
            check_decoded(mean, self.mechanism.core(self._context)[1])
        self._unchecked = False
        if bad:
            answers = len(self._sum.received)
            self._aborted = f"the mean of {answers} answers is not finite in {bad} of {len(mean)} coordinates"
            return None
        return mean

    def _read_statistics(self, mean: Tensor, sent: Tensor) -> Tensor:
        """Read a mean of statistics, and leave the model as it is. Returns the mean of what clients sent."""
        assert self.statistics is not None
        parts, variance = (self.mechanism, self._context), self._sum.noise_variance()
        std = None if variance is None else self.statistics.std(*parts, variance)
        self.released.append((self.statistics.read(mean, *parts).cpu(), std))
        return mean if self.target == "updates" else mean - sent

    def _step(self, mean: Tensor, sent: Tensor) -> Tensor | None:
        """Take the server's step. None, with the round aborted, where the model would not be finite."""
        before, step = self.weights, mean if self.target == "updates" else mean - sent
        self.weights = self._server_step.apply(before, step)
        bad = _num_not_finite(self.weights)
        if not bad and self._server_step.is_finite():
            return step
        self.weights = before
        self._aborted = f"the model after this round's step is not finite in {bad} of {len(mean)} coordinates"
        if self._server_step.reset_optimizer():
            if not bad:
                self._aborted = "the state of the server's optimiser is not finite after this round's step"
            self._aborted += "; the server's optimiser begins anew"
        return None

    def _record(self, plan: RoundPlan) -> RoundRecord:
        size, dim, answers = len(plan.cohort), self.weights.numel(), len(self._sum.received)
        model_bits = 32 * dim if self.broadcast is None else self.broadcast.num_bits(self.segments)
        uplink_bits, downlink_bits = self._uplink_bits, size * (model_bits + 64 * len(self.segments))
        protocol_bits = 0
        if self._sum.secure is not None:
            traffic = self._sum.secure.traffic
            uplink_bits, protocol_bits = traffic.uplink_bits, traffic.protocol_bits
            downlink_bits += traffic.downlink_bits
        return RoundRecord(
            round=plan.round,
            cohort_size=size,
            num_received=answers,
            num_dropped=len(plan.dropped),
            uplink_bits=uplink_bits,
            downlink_bits=downlink_bits,
            setup_bits=self.keys.setup_bits_per_client * self.planner.num_clients if plan.round == 0 else 0,
            protocol_bits=protocol_bits,
            clip_rate=math.nan,
            radius_min=self.ranges.radius.min().item(),
            radius_max=self.ranges.radius.max().item(),
            update_norm=0.0,
            aborted=self._aborted,
        )

    def _diagnose(self, record: RoundRecord, step: Tensor) -> None:
        """Add to the record what only a simulation knows."""

    # ---- checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next round depends on, in tensors and plain numbers. Keys excluded."""
        self.ledger.select_server(self._keys_name)
        return {
            "weights": self._current_weights,
            "center": self.ranges.center,
            "radius": self.ranges.radius,
            "round": self.round,
            "attempt": self.attempt + (self.plan is not None),  # streams of an open round are used
            "total_uplink_bits": self.total_uplink_bits,
            "total_downlink_bits": self.total_downlink_bits,
            "since": None if self._since is None else list(self._since),
            "in_last_sum": sorted(self.last_summed_clients),
            "ledger": self.ledger.state_dict(),
            "optimizer": self._server_step.state_dict(),
            **({"released": list(self.released)} if self.released else {}),
            **({"available": said} if (said := self.planner.digest(self.round)) else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: If the state is of another model, or only one of the two has a server optimiser.
        """
        if state["weights"].shape != self.weights.shape or len(state["radius"]) != len(self.segments):
            raise ValueError(
                f"the state holds {state['weights'].numel()} weights in {len(state['radius'])} segments, the "
                f"model {self.weights.numel()} in {len(self.segments)}; use the checkpoint's own model"
            )
        if state.get("available", "") != self.planner.digest(state["round"]):
            raise ValueError(
                "available names other clients for the rounds that were run than it did then; use the rule "
                "of the checkpoint, or begin a new training"
            )
        self._server_step.check(state["optimizer"])  # before anything is taken over
        self.ledger.select_server(self._keys_name)
        self.ledger.load_state_dict(state["ledger"], repeatable=self._seeded)
        self.weights = state["weights"].to(self.weights).clone()
        self.ranges = Ranges(state["center"].clone(), state["radius"].clone())
        self.round, self.attempt, self.plan = state["round"], state["attempt"], None
        since = state.get("since") if self._seeded else None  # what was released since is not known here
        self._since = None if since is None else (since[0], since[1])
        self.last_summed_clients = frozenset(state.get("in_last_sum", ()))
        self.released = [(mean, std) for mean, std in state.get("released", ())]
        self.total_uplink_bits = state["total_uplink_bits"]
        self.total_downlink_bits = state["total_downlink_bits"]
        self._server_step.load_state_dict(state["optimizer"])


def _num_not_finite(values: Tensor) -> int:
    return values.numel() - int(torch.isfinite(values).sum())
