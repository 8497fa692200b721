"""The server's half of a round: it receives messages, decodes their mean and steps the global model.

The server never receives an update. It holds the running sum of one round and the state of the server's step.
Its memory grows with the model, not with the number of clients, except with a robust rule. The module depends
on no mechanism and no transport.

The file is long because it has one class, whose methods follow a round from its start to its end and share
the round's state.
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
from lightning_fedq.rounds.client import Target
from lightning_fedq.rounds.messages import (
    Broadcast,
    MalformedMessageError,
    RefusedMessageError,
    RoundTask,
    open_frame,
)
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
    """Server of a federation, with global weights, quantisation ranges, running sum and ledger.

    For each round, call `server.start()`, send `server.task()` and the weights to the clients of the plan,
    and pass their answers to `receive_message` in any order. Then call `record = server.finish()`.

    Args:
        mechanism: Mechanism that encodes updates at clients.
        planner: Planner of the rounds.
        keys: Keys of the server.
        weights: `(dim,)` initial global model, which is copied.
        segments: Length of each segment (layer). The lengths sum to `dim`.
        ranges: Rule for the quantisation range of each round. A mechanism with its own rule ignores it.
        target: Quantised vector: "updates" (local - global) or, as in the CorBin paper, "weights".
        server_lr: Server learning rate lambda in (0, 1]. The model moves to (1 - lambda) w + lambda w_new.
        server_optimizer: Function from parameters to a torch optimiser, whose gradient is minus the mean
            update. None adds the mean update to the model.
        client_weights: `(num_clients,)` weights > 0 of a weighted mean, with every message decoded
            separately. None gives all clients equal weights.
        aggregator: Robust rule in place of the mean. Every message is decoded separately and kept until the
            end of the round, which takes O(clients x dim) memory.
        secure_sums: Secure aggregation, which opens the sum of each round. It receives all messages, and the
            record counts the bits of its protocol in place of theirs.
        ledger: Ledger of an earlier training with the same clients. None starts a new one.
        broadcast_bits: Bits per coordinate of the model on the downlink. None sends unrounded floats.
        statistics: Statistics that the first rounds release in place of a training step. None releases none.

    Attributes:
        weights: `(dim,)` global model. In an open round, the rounded model that its clients received.
        released: Pairs of a mean that a statistics round has released, `(size,)` float64, and the standard
            deviation of its noise. The deviation is None if it is unknown.
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
            raise ValueError(f"segments sum to {sum(segments)}, expected {weights.numel()} parameters")
        if client_weights is not None:
            if client_weights.shape != (planner.num_clients,):
                raise ValueError(
                    f"client_weights must have shape {(planner.num_clients,)}, one weight per client, "
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
        """Whether the model depends on the messages only through their unweighted sum."""
        return self.client_weights is None and self.aggregator is None

    @property
    def reads_statistics(self) -> bool:
        """Whether the open or next round is a statistics round."""
        return self.statistics is not None and self.round < self.statistics.rounds

    @property
    def statistic(self) -> Tensor | None:
        """Mean of clients' statistics, `(size,)` float64. None until the last statistics round has ended."""
        if self.reads_statistics or not self.released:
            return None
        return torch.stack([mean for mean, _ in self.released]).mean(0)

    @property
    def statistic_std(self) -> float | None:
        """Standard deviation of the noise in each entry of `statistic`. None if it is unknown."""
        stds = [std for _, std in self.released if std is not None]
        return math.hypot(*stds) / len(stds) if len(stds) == len(self.released) > 0 else None

    def agree_on_terms(self, run: Run) -> None:
        """Set the ledger's terms for the next rounds. Each `start` repeats the check.

        Args:
            run: Description of the run, with its terms.

        Raises:
            ValueError: If the ledger has charges under other terms.
        """
        self._terms = run.terms
        self.ledger.set_terms(self._terms)

    def _default_run(self, context: RoundContext) -> Run:
        """Return the run assumed without further settings: no Byzantine clients, masks if there are any."""
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
        """Return the next round's plan for accounting (`RoundPlanner.expected`).

        When no disjoint cohort is left, this is the plan of the last round.
        """
        last = self.planner.num_rounds
        round = self.round if last is None else min(self.round, last - 1)
        return self.planner.expected(round, self.mechanism, self.attempt)

    def context(self, plan: RoundPlan) -> RoundContext:
        """Return the public facts of the round of `plan`."""
        c, r = self.ranges.center, self.ranges.radius
        since, handed = self._since, self._pair_noise(plan)
        return RoundContext(
            plan.round, plan.groups, self.segments, c, r, self.attempt, since=since, hand_over=handed
        )

    def _pair_noise(self, plan: RoundPlan) -> HandOver | None:
        """Pair clients whose noise cancels across rounds, if the mechanism correlates noise of clients."""
        if not self.mechanism.reuses_noise:
            return None
        now, since, after = (plan.round, self.attempt), self._since, self.planner.successors(plan.round)
        if since is None or since[0] >= plan.round or self.attempt:
            return HandOver(now, (), after)  # a new block begins, with no earlier noise to cancel
        pairs = self.planner.successors(plan.round - 1)
        # the noise of a client that did not answer is in no sum, so there is nothing to cancel
        before = tuple((client, other) for other, client in pairs if other in self.last_summed_clients)
        return HandOver(since, before, after)

    def charged_context(self, plan: RoundPlan) -> RoundContext:
        """Return the facts of the round of `plan` for accounting, padded to the longest vector ever charged.

        Parameters may join and leave during a run, and a charge does not store a length. So every charge is
        priced at the longest vector.
        """
        return pad_segments(self.context(plan), self.ledger.dim)

    def rearrange(
        self, parts: Sequence[Tensor], origins: Sequence[int | None], client_weights: Tensor | None
    ) -> None:
        """Change the segments of the flat vector, between rounds or before the first answer of a round.

        Remaining segments keep their weights, range and server state. The ledger's charges stay valid, see
        `charged_context`.

        Args:
            parts: One vector per new segment. Its values are used if the segment has no old counterpart.
            origins: For each new segment, the index of its old segment, or None if the segment is new.
            client_weights: `(num_clients,)` client weights for the new vector. None gives equal weights.

        Raises:
            RuntimeError: If a client has answered in the open round.
            ValueError: If the length changes and the mechanism's charges do not cover other lengths, see
                `Mechanism.price_grows_with_dim`.
        """
        length = sum(part.numel() for part in parts)
        if not self.mechanism.price_grows_with_dim and length != self.weights.numel():
            raise ValueError(
                f"{type(self.mechanism).__name__} needs one vector length for the whole run, "
                f"but {self.weights.numel()} coordinates became {length}. "
                "Freeze or unfreeze before the first round, or use another mechanism."
            )
        if self.plan is not None and self._expected != set(self.plan.survivors):
            raise RuntimeError("The flat vector can't change after a client has answered in the open round")
        old, segments = self.segments, tuple(part.numel() for part in parts)
        self.weights = rearrange(self._current_weights, old, origins, parts)
        self.segments, self.client_weights = segments, client_weights
        first, ones = self.range_rule.first(self.weights, segments), [1] * len(old)
        center = rearrange(self.ranges.center, ones, origins, torch.split(first.center, 1))
        self.ranges = Ranges(
            center, rearrange(self.ranges.radius, ones, origins, torch.split(first.radius, 1))
        )
        self._server_step.rearrange(self.weights, old, origins, parts)
        self._since = None if self.plan is None else (self.plan.round, self.attempt)
        if self.plan is not None:
            self._send_down(self.weights)
            self._open(self.plan)

    def start(self) -> RoundPlan:
        """Plan the next round, charge its cohort and clear the running sum.

        Raises:
            RuntimeError: If the round was started before and not abandoned.
            ValueError: If the ledger has charges under other terms, see `agree_on_terms`.
            BrokenContractError: If claims break a rule of the mechanism contract (first round only).
        """
        self._check_terms()
        state = self.ledger.state(self.weights, self.ranges.center, self.ranges.radius)
        # the ledger may raise the attempt number, on which the plan depends
        self.attempt = self.ledger.free_attempt(self.round, self.attempt, state)
        plan = self.planner.plan(self.round, self.mechanism, self.attempt)
        if self._since is None or self.attempt or self._has_early_client(plan, self._since[0]):
            self._since = plan.round, self.attempt  # a new block of correlated noise
        # charge the whole cohort, because a client that does not answer may have encoded a message
        self.ledger.charge(plan.cohort, plan.round, self.attempt, state, self.weights.numel())
        self.plan = plan
        self._send_down(self.weights)
        self._open(plan)
        return plan

    def _check_terms(self) -> None:
        """Check the claims before the first round, and the terms of the ledger before each round."""
        if self._unchecked or self._terms is None:
            context = self.context(self.planner.expected(self.round, self.mechanism, self.attempt))
            check_claims(self.mechanism.claims(context))
            if self._terms is None:
                self.agree_on_terms(self._default_run(context))
        assert self._terms is not None
        self.ledger.set_terms(self._terms)
        self.ledger.select_server(self._keys_name)

    def _send_down(self, model: Tensor) -> None:
        """Round the model for the downlink, and keep the server's own model aside."""
        if self.broadcast is not None:
            self._model, self.weights = model, self.broadcast.rounded(model, self.segments)

    @property
    def _current_weights(self) -> Tensor:
        """The server's own unrounded model. In an open round, clients may have a rounded copy."""
        return self.weights if self.plan is None or self._model is None else self._model

    def _has_early_client(self, plan: RoundPlan, since: int) -> bool:
        """Return whether a client of the cohort took part in a round with correlated noise."""
        needed = self.mechanism.separation
        # rounds before `since` belong to another block, whose noise is independent
        return needed > 1 and self.ledger.last_round(plan.cohort) > max(since - 1, plan.round - needed)

    def _open(self, plan: RoundPlan) -> None:
        """Reset the state of a round: expected clients, bit count, running sum."""
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
        """Return the task for the clients of the open round.

        Raises:
            RuntimeError: If no round is open.
        """
        self._open_plan()
        return RoundTask.from_context(self._context)

    def receive_message(self, message: bytes) -> int:
        """Add one client's answer to the sum, and return the client. A refused answer changes nothing.

        Args:
            message: Framed message as `RoundClient.answer` makes it. It may come from anybody.

        Raises:
            RefusedMessageError: If the message is malformed, forged, late, repeated, or not from the cohort.
                Each case has a subclass. Any other error is a bug of the mechanism, not the fault of a
                client.
        """
        if self.plan is None:
            raise RefusedMessageError("No round is open, so the message is late")
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
        """Secure aggregation of the open round, to which clients send their messages. None without it."""
        return self._sum.secure

    def abort(self, reason: str) -> None:
        """Abort the open round: `finish` leaves the model unchanged and records the reason."""
        self._open_plan()
        self._aborted = reason

    def set_answered(self, clients: Sequence[int]) -> None:
        """Report, before `finish`, the clients whose messages are in the sum of secure aggregation.

        Raises:
            ValueError: If a client is not expected.
        """
        if not self._expected.issuperset(clients):
            raise ValueError(f"Clients {sorted(set(clients) - self._expected)} are not expected")
        self._expected -= set(clients)
        self._sum.received += clients

    def _unpack(self, client: int, packed: bytes, public: PublicRandomness) -> tuple[Tensor, int]:
        """Decode the symbols `(m,)` of a packed message, and count its bits."""
        context, mechanism = self._context, self.mechanism
        code, count = mechanism.message_code(client, context, public), mechanism.num_symbols(context)
        code.check_length(packed, count)
        symbols = code.unpack(packed, count)
        num_bits = code.num_bits(symbols)
        if symbols.shape != (count,) or len(packed) != (num_bits + 7) // 8:
            raise MalformedMessageError(f"{len(packed)} bytes for {num_bits} bits of {count} symbols", client)
        if not mechanism.can_send(symbols, client, context, public):
            raise MalformedMessageError("the message has symbols that the mechanism can't send", client)
        return symbols, num_bits

    def finish(self) -> RoundRecord:
        """Decode the sum, step the model, choose the next range, and return the record.

        Without answers, or after an abort, the model stays unchanged, but the round is recorded and charged.
        A mean that is not finite aborts the round. So does a step after which the model or the optimiser's
        state is not finite, and the optimiser's state is then reset.

        If the cohort size is secret, a round without clients still releases its noise. The record then omits
        all numbers that depend on the cohort size.

        Raises:
            RuntimeError: If no round is open.
            BrokenContractError: If the decoded sum breaks a rule of the mechanism contract (first round
                only).
        """
        plan = self._open_plan()
        mean, sent = self._mean_or_abort(), self.weights
        # the step starts from the server's own model, not from the rounded copy that clients received
        self.weights = self._current_weights
        take = self._read_statistics if self.reads_statistics else self._step
        step = None if mean is None else take(mean[: sent.numel()], sent)
        record = self._record(plan)
        if step is not None:
            record.update_norm = step.norm().item()
            self._diagnose(record, step)
        if self.reads_statistics:
            self._since = None  # training rounds start a new block of correlated noise
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
        """Give up the open round. Its streams are never used again, and the next `start` is a new attempt."""
        if self.plan is not None:
            self.weights, self.attempt, self.plan = self._current_weights, self.attempt + 1, None

    def skip(self) -> None:
        """Skip a lost round whose cohort has no budget for a second attempt.

        Raises:
            RuntimeError: If a round is open.
        """
        if self.plan is not None:
            raise RuntimeError("A round is open. Finish or abandon it first.")
        self.round, self.attempt, self.last_summed_clients = self.round + 1, 0, frozenset()

    def _open_plan(self) -> RoundPlan:
        """Return the plan of the open round, or raise if none is open."""
        if self.plan is None:
            raise RuntimeError("No round is open. Call start() first.")
        return self.plan

    def _mean_or_abort(self) -> Tensor | None:
        """Decode and check the mean. Return None if no client has answered or the round is aborted."""
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
        # a real client may send bad values, so they do not prove that the mechanism breaks its contract
        if self._unchecked and not (bad and from_wire):
            check_decoded(mean, self.mechanism.core(self._context)[1])
        self._unchecked = False
        if bad:
            answers = len(self._sum.received)
            self._aborted = f"The mean of {answers} answers is not finite in {bad} of {len(mean)} coordinates"
            return None
        return mean

    def _read_statistics(self, mean: Tensor, sent: Tensor) -> Tensor:
        """Extract the statistics from a mean, without a model step. Return the mean as an update."""
        assert self.statistics is not None
        parts, variance = (self.mechanism, self._context), self._sum.noise_variance()
        std = None if variance is None else self.statistics.std(*parts, variance)
        self.released.append((self.statistics.read(mean, *parts).cpu(), std))
        return mean if self.target == "updates" else mean - sent

    def _step(self, mean: Tensor, sent: Tensor) -> Tensor | None:
        """Step the model and return the mean update. Return None and abort if the result is not finite."""
        before, step = self.weights, mean if self.target == "updates" else mean - sent
        self.weights = self._server_step.apply(before, step)
        bad = _num_not_finite(self.weights)
        if not bad and self._server_step.is_finite():
            return step
        self.weights = before
        self._aborted = f"The model after this round's step is not finite in {bad} of {len(mean)} coordinates"
        if self._server_step.reset_optimizer():
            if not bad:
                self._aborted = "The state of the server's optimiser is not finite after this round's step"
            self._aborted += ". The server's optimiser was reset."
        return None

    def _record(self, plan: RoundPlan) -> RoundRecord:
        """Make the record of the round, without the numbers that only a simulation knows."""
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
        """Add the numbers that only a simulation knows. A real server adds none."""

    # ---- checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next round depends on, as tensors and plain numbers, without keys."""
        self.ledger.select_server(self._keys_name)
        return {
            "weights": self._current_weights,
            "center": self.ranges.center,
            "radius": self.ranges.radius,
            "round": self.round,
            "attempt": self.attempt + (self.plan is not None),  # the streams of an open round count as used
            "total_uplink_bits": self.total_uplink_bits,
            "total_downlink_bits": self.total_downlink_bits,
            "since": None if self._since is None else list(self._since),
            "in_last_sum": sorted(self.last_summed_clients),
            "ledger": self.ledger.state_dict(),
            "optimizer": self._server_step.state_dict(),
            **({"released": list(self.released)} if self.released else {}),
            **({"available": digest} if (digest := self.planner.digest(self.round)) else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ValueError: If the state is of another model, if the rule of available clients has changed, or if
                only one of the state and this server has a server optimiser.
        """
        if state["weights"].shape != self.weights.shape or len(state["radius"]) != len(self.segments):
            raise ValueError(
                f"The state has {state['weights'].numel()} weights in {len(state['radius'])} segments, the "
                f"model {self.weights.numel()} in {len(self.segments)}. Use the checkpoint's own model."
            )
        if state.get("available", "") != self.planner.digest(state["round"]):
            raise ValueError(
                "available names other clients for earlier rounds than it did in the checkpoint. "
                "Use the rule of the checkpoint, or start a new training."
            )
        self._server_step.check(state["optimizer"])  # raises before any part of the state is changed
        self.ledger.select_server(self._keys_name)
        self.ledger.load_state_dict(state["ledger"], repeatable=self._seeded)
        self.weights = state["weights"].to(self.weights).clone()
        self.ranges = Ranges(state["center"].clone(), state["radius"].clone())
        self.round, self.attempt, self.plan = state["round"], state["attempt"], None
        # without a seed, rounds released after the checkpoint are unknown, so a new noise block starts
        since = state.get("since") if self._seeded else None
        self._since = None if since is None else (since[0], since[1])
        self.last_summed_clients = frozenset(state.get("in_last_sum", ()))
        self.released = [(mean, std) for mean, std in state.get("released", ())]
        self.total_uplink_bits = state["total_uplink_bits"]
        self.total_downlink_bits = state["total_downlink_bits"]
        self._server_step.load_state_dict(state["optimizer"])


def _num_not_finite(values: Tensor) -> int:
    """Count NaN and infinite values."""
    return values.numel() - int(torch.isfinite(values).sum())
