"""One federated round without Lightning: plan, encode, aggregate, server step, record.

The plan of a round is a pure function of (seed, round), so a loader, a callback and a resumed run
agree on it without talking. The engine holds the running sum of one round and the server's state;
its memory grows with the model and the stack, never with the number of clients. It names no mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedq.core import AbortedRoundError, Mechanism, Message, RoundContext
from lightning_fedq.functional.accumulate import add_rows
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.randomness import ClientRandomness, Keys, PublicRandomness, SeededKeys
from lightning_fedq.ranges import RangeRule, Ranges

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True)
class RoundPlan:
    """Who takes part in one round, in which groups, and who drops out.

    Args:
        round: Round number, from 0.
        groups: The cohort in groups of the mechanism's sizes, in random order.
        dropped: Clients of the cohort that will not answer.
        seed: Seed of the planner that made it.
    """

    round: int
    groups: tuple[tuple[int, ...], ...]
    dropped: frozenset[int]
    seed: int

    @cached_property
    def cohort(self) -> tuple[int, ...]:
        """All clients of the round, group by group."""
        return tuple(client for group in self.groups for client in group)

    @cached_property
    def survivors(self) -> tuple[int, ...]:
        """The clients that will answer, group by group: the order in which they train.

        A stack then holds whole groups, and draws what a group shares once.
        """
        return tuple(client for client in self.cohort if client not in self.dropped)

    def stream_seed(self, purpose: str, client: int | None = None) -> int:
        """A 63-bit seed for simulation randomness (data order, dropout masks), never for a coin."""
        rand = PublicRandomness(SeededKeys(self.seed), self.round)
        stream = rand.public(purpose) if client is None else rand.shared_with_server(client, purpose)
        return int(stream.words64(1)[0]) >> 1


@dataclass(frozen=True)
class RoundPlanner:
    """Draws the plan of any round from (seed, round).

    Args:
        num_clients: Size of the population, >= 1.
        seed: Seed of cohorts, groups, dropouts and data order, >= 0.
        clients_per_round: Cohort size, drawn without replacement; None is everybody.
        dropout_probability: Chance in [0, 1) that a client of the cohort does not answer.
    """

    num_clients: int
    seed: int
    clients_per_round: int | None = None
    dropout_probability: float = 0.0

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise ValueError(f"num_clients must be >= 1, got {self.num_clients}")
        if self.clients_per_round is not None and not 1 <= self.clients_per_round <= self.num_clients:
            raise ValueError(
                f"clients_per_round must be in [1, num_clients = {self.num_clients}], "
                f"got {self.clients_per_round}"
            )
        if not 0.0 <= self.dropout_probability < 1.0:
            raise ValueError(f"dropout_probability must be in [0, 1), got {self.dropout_probability}")

    @property
    def cohort_size(self) -> int:
        """Clients per round."""
        return self.clients_per_round or self.num_clients

    def plan(self, round: int, mechanism: Mechanism) -> RoundPlan:
        """Return the plan of one round.

        Raises:
            ValueError: If the mechanism can't serve a cohort of this size.
        """
        rand = PublicRandomness(SeededKeys(self.seed), round)
        order = rand.public("cohort").permutation(self.num_clients)[: self.cohort_size]
        start, groups = 0, []
        for size in mechanism.group_sizes(len(order)):
            groups.append(tuple(order[start : start + size]))
            start += size
        if start != len(order):
            raise ValueError(f"group_sizes sums to {start}, the cohort has {len(order)} clients")
        words = rand.public("dropouts").words(len(order))
        threshold = round_half_up(self.dropout_probability * 2**32)
        dropped = frozenset(c for c, word in zip(order, words.tolist(), strict=True) if word < threshold)
        return RoundPlan(round, tuple(groups), dropped, self.seed)


def round_half_up(value: float) -> int:
    """Nearest integer, halves up."""
    return math.floor(value + 0.5)


@dataclass
class RoundRecord:
    """What happened in one round; numbers only, ready to log.

    `mse`, `snr_db`, `cosine` and `clip_rate` compare with the exact mean of the updates as they reach the
    encoder, lies included: they are diagnostics that only a simulation can know, and they are not private.
    `aborted` is the reason why a round left the model as it was; empty otherwise.
    """

    round: int
    cohort_size: int
    num_received: int
    num_dropped: int
    uplink_bits: int
    downlink_bits: int
    setup_bits: int
    clip_rate: float
    radius_min: float
    radius_max: float
    update_norm: float
    mse: float = math.nan
    snr_db: float = math.nan
    cosine: float = math.nan
    non_finite_clients: tuple[int, ...] = field(default=())
    aborted: str = ""

    def metrics(self) -> dict[str, float]:
        """Every number, by name; `aborted` is 0 or 1."""
        values = {k: v for k, v in vars(self).items() if k != "non_finite_clients"}
        return {
            **values,
            "num_non_finite": len(self.non_finite_clients),
            "aborted": int(bool(self.aborted)),
        }


class Aggregator(Protocol):
    """A robust rule in place of the mean, where the server sees every message."""

    @property
    def min_clients(self) -> int:
        """With fewer answers the round is aborted."""

    def __call__(self, rows: Tensor, plan: RoundPlan) -> Tensor:
        """Return `(dim,)` from the decoded rows `(n, dim)`, one a client."""


class Traffic(Protocol):
    """Bits that a round has cost so far."""

    @property
    def uplink_bits(self) -> int:
        """From clients to the server."""

    @property
    def downlink_bits(self) -> int:
        """From the server to clients, the model not included."""


class SecureSum(Protocol):
    """One round behind secure aggregation: messages go in, and only their sum comes out."""

    @property
    def traffic(self) -> Traffic:
        """What the protocol has sent."""

    def add(self, clients: Sequence[int], symbols: Tensor) -> None:
        """Take the messages `(len(clients), m)` of some clients."""

    def finish(self) -> Tensor:
        """Return the sum of all messages, `(m,)` int64; raises `AbortedRoundError` where there is none."""


class SecureSums(Protocol):
    """Opens one `SecureSum` a round."""

    def __call__(
        self,
        mechanism: Mechanism,
        context: RoundContext,
        rand: PublicRandomness,
        *,
        session: bytes,
        weights: Tensor,
    ) -> SecureSum:
        """Open a round for the clients of `context`, who have all received the model `weights`."""


class UpdateTransform(Protocol):
    """What clients do with their updates before anything else, e.g. add a momentum that they keep."""

    def __call__(self, clients: Sequence[int], updates: Tensor) -> Tensor:
        """Return what takes the place of `updates` `(len(clients), dim)`, of the same shape."""


class Tampering(Protocol):
    """Clients that lie, put between training, encoding and the wire of a simulation."""

    def begin(self, plan: RoundPlan, context: RoundContext) -> None:
        """A round starts; what an abandoned one left behind is void."""

    def hold(self, clients: Sequence[int], updates: Tensor) -> tuple[Sequence[int], Tensor]:
        """Keep the liars' rows back, and return the others."""

    def release(self) -> tuple[Sequence[int], Tensor]:
        """Return the liars, once everybody else has answered, and what they feed the encoder."""

    def send(
        self,
        clients: Sequence[int],
        values: Tensor,
        message: Message,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> Message:
        """Return what goes on the wire in place of `message`, the honest encoding of `values`."""


def check_aggregation(
    mechanism: Mechanism, cohort_size: int, weighted: bool, aggregator: Aggregator | None, secure: bool
) -> None:
    """Refuse settings that don't fit each other.

    Raises:
        ValueError: Naming them and the cure.
    """
    name = type(mechanism).__name__
    if secure and aggregator is not None:
        raise ValueError(
            "Where SecAgg is on, per-client filters are impossible; "
            "leave out the aggregator or secure_aggregation"
        )
    if secure and weighted:
        raise ValueError(
            "behind secure aggregation the server sees the plain sum, so no client can be weighted; "
            "use weighting='uniform' or leave out secure_aggregation"
        )
    if weighted and mechanism.fixed_cohort:
        raise ValueError(
            f"the noise of {name} is made for a mean with equal weights; "
            "leave client_weights out (weighting='uniform')"
        )
    if weighted and (aggregator is not None or mechanism.joint):
        raise ValueError("a robust rule or a vote has no weights; leave client_weights out")
    if aggregator is None:
        return
    if mechanism.joint or mechanism.fixed_cohort:
        raise ValueError(
            f"{name} is decoded for the whole cohort at once, so there are no rows "
            "for a robust rule; leave the aggregator out"
        )
    if cohort_size < aggregator.min_clients:
        raise ValueError(
            f"{aggregator} needs {aggregator.min_clients} clients or more, a round has {cohort_size}; "
            "take fewer liars, smaller buckets or a larger cohort"
        )


class RoundEngine:
    """The server of a simulated federation: global weights, ranges, running sum.

    Use it as `plan = engine.start()`, then `engine.receive(clients, updates)` for every client of
    `plan.survivors` once, in stacks of any size, then `record = engine.finish()`.

    Args:
        mechanism: Turns updates into messages and messages into a sum.
        planner: Draws the rounds.
        keys: Source of all coins.
        weights: `(dim,)` initial global model; copied.
        segments: Length of each segment (layer); they sum to `dim`.
        ranges: Rule for centre and radius.
        target: What is quantised: "updates" (local - global) or, as in the CorBin paper, "weights".
        smoothing: lambda in (0, 1]; the model moves to (1 - lambda) w + lambda w_new.
        server_optimizer: Takes the parameters, returns a torch optimiser that is given minus the mean
            update as gradient; None applies the mean update itself.
        client_weights: `(num_clients,)` weights > 0 of a weighted mean; None is uniform. With weights
            every message is decoded on its own.
        aggregator: A robust rule in place of the mean. Every message is then decoded on its own and all
            rows are kept to the end of the round: memory O(clients x dim).
        secure_sums: Secure aggregation: opens the sum of each round. Messages go nowhere else, and the
            record counts the bits of the protocol in place of theirs.
        diagnostics: Also keep the exact sum of the updates, for MSE, SNR, cosine and `exact_mean`.

    Attributes:
        transform: Applied to all updates as they come in; None leaves them as they are.
        tampering: Clients that lie, between training, encoding and the wire; None if nobody does.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        planner: RoundPlanner,
        keys: Keys,
        weights: Tensor,
        segments: Sequence[int],
        ranges: RangeRule,
        *,
        target: Literal["updates", "weights"] = "updates",
        smoothing: float = 1.0,
        server_optimizer: OptimizerFactory | None = None,
        client_weights: Tensor | None = None,
        aggregator: Aggregator | None = None,
        secure_sums: SecureSums | None = None,
        diagnostics: bool = True,
    ) -> None:
        if target not in ("updates", "weights"):
            raise ValueError(f"target must be 'updates' or 'weights', got {target!r}")
        if not 0.0 < smoothing <= 1.0:
            raise ValueError(f"smoothing must be in (0, 1], got {smoothing}")
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
        self.mechanism, self.planner, self.keys = mechanism, planner, keys
        self.aggregator, self.secure_sums = aggregator, secure_sums
        self.transform: UpdateTransform | None = None
        self.tampering: Tampering | None = None
        self.segments, self.range_rule, self.target = tuple(segments), ranges, target
        self.smoothing, self.client_weights, self.diagnostics = smoothing, client_weights, diagnostics
        self.weights = weights.detach().clone()
        self.ranges = ranges.first(self.weights, self.segments)
        self.round, self.attempt = 0, 0
        self.total_uplink_bits = self.total_downlink_bits = 0
        self._parameter = torch.nn.Parameter(self.weights.clone())
        self._optimizer = server_optimizer([self._parameter]) if server_optimizer else None
        self.plan: RoundPlan | None = None
        self._exact: Tensor | None = None
        self._aborted = ""
        self._received: list[int] = []
        self.ledger = Ledger(planner.num_clients, repr(mechanism))

    @property
    def plain_sum(self) -> bool:
        """Does the model depend on the messages through their unweighted sum only?"""
        return self.client_weights is None and self.aggregator is None

    @property
    def exact_mean(self) -> Tensor | None:
        """Weighted mean `(dim,)` of the updates encoded in this round, or in the last one between two.

        What only a simulation knows, lies included, and not private. None without diagnostics, before the
        first answer, and in a round that was aborted.
        """
        if self._exact is None or self._aborted or not self._received:
            return None
        return self._exact / self._total_weight()

    # ---- one round --------------------------------------------------------------------------------

    def context(self, plan: RoundPlan) -> RoundContext:
        """What everybody knows about the round of `plan`."""
        return RoundContext(
            plan.round, plan.groups, self.segments, self.ranges.center, self.ranges.radius, self.attempt
        )

    def start(self) -> RoundPlan:
        """Plan the next round, charge its cohort and clear the running sum.

        Raises:
            RuntimeError: If the round was started before and not abandoned.
        """
        plan = self.planner.plan(self.round, self.mechanism)
        state = self.ledger.state(self.weights, self.ranges.center, self.ranges.radius)
        self.attempt = self.ledger.free_attempt(plan.round, self.attempt, state)
        self.ledger.charge(plan.cohort, plan.round, self.attempt, state)
        self.plan = plan
        self._context = self.context(plan)
        self._received = []
        self._expected = set(plan.survivors)
        self._non_finite: list[int] = []
        self._uplink_bits = self._clipped = 0
        self._aborted = ""
        self._symbols: Tensor | None = None
        self._rows: list[Tensor] = []  # decoded rows for an aggregator, or messages for a joint decoder
        if self.tampering is not None:
            self.tampering.begin(plan, self._context)
        self._decoded = torch.zeros_like(self.weights)
        self._exact = torch.zeros_like(self.weights) if self.diagnostics else None
        self._secure = self._open_secure_sum(plan)
        return plan

    def _open_secure_sum(self, plan: RoundPlan) -> SecureSum | None:
        if self.secure_sums is None:
            return None
        return self.secure_sums(
            self.mechanism,
            self._context,
            PublicRandomness(self.keys, plan.round, self.attempt),
            session=self.keys.public(),
            weights=self.weights,
        )

    def receive(self, clients: Sequence[int], updates: Tensor) -> None:
        """Transform and encode the updates of some clients and add the messages to the running sum.

        An update with a NaN or an infinity counts as a zero update, before anything is encoded, so
        that neither the model nor the message shows it; the record names the client. In a round that is
        aborted already, nobody sends anything.

        Args:
            clients: Clients of this round that have not answered yet.
            updates: `(len(clients), dim)`, local - global; may be overwritten.

        Raises:
            RuntimeError: If no round is open.
            ValueError: If a client is not expected, or the shape is wrong.
        """
        plan = self._open_plan()
        self._check_shape("updates", clients, updates)
        unexpected = set(clients) - self._expected
        if unexpected or len(set(clients)) != len(clients):
            raise ValueError(f"clients {sorted(unexpected) or clients} are not expected, or answered twice")
        self._expected -= set(clients)
        if self._aborted:
            return
        if self.transform is not None:
            updates = self.transform(clients, updates)
            self._check_shape("transformed updates", clients, updates)
        if self.tampering is not None:
            clients, updates = self.tampering.hold(clients, updates)
        if len(clients):
            self._take(plan, clients, updates)

    def _check_shape(self, name: str, clients: Sequence[int], updates: Tensor) -> None:
        expected = len(clients), self.weights.numel()
        if updates.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {tuple(updates.shape)}")

    def _take(self, plan: RoundPlan, clients: Sequence[int], updates: Tensor) -> None:
        finite = torch.isfinite(updates.sum(1))
        if not bool(finite.all()):
            finite = torch.isfinite(updates).all(1)
            updates = torch.where(finite[:, None], updates, 0.0)
            self._non_finite += [c for c, good in zip(clients, finite.tolist(), strict=True) if not good]
        values = updates if self.target == "updates" else updates + self.weights
        rand = ClientRandomness(self.keys, clients, plan.round, self.attempt)
        message = self.mechanism.encode(values, self._context, rand)
        if self.tampering is not None:
            message = self.tampering.send(clients, values, message, self._context, rand)
        self._uplink_bits += message.num_bits
        self._clipped += message.num_clipped
        self._message_size = message.symbols.shape[1]
        try:
            self._add(message.symbols, clients)
        except AbortedRoundError as error:
            self._aborted = str(error)
            return
        if self._exact is not None:
            self._exact += self._scale(updates, clients).sum(0, dtype=self._exact.dtype)
        self._received += clients

    def _scale(self, rows: Tensor, clients: Sequence[int]) -> Tensor:
        if self.client_weights is None:
            return rows
        return rows * self.client_weights[list(clients)].to(self.weights)[:, None]

    def _add(self, symbols: Tensor, clients: Sequence[int]) -> None:
        if self._secure is not None:
            self._secure.add(clients, symbols)
            return
        if self.aggregator is not None:
            public = PublicRandomness(self.keys, self._context.round, self.attempt)
            for row, client in enumerate(clients):
                self._rows.append(
                    self.mechanism.decode(symbols[row : row + 1], [client], self._context, public)
                )
            return
        if self.mechanism.joint and not self.mechanism.homomorphic:
            self._rows.append(symbols)
            return
        if self.mechanism.homomorphic and self.client_weights is None:
            if self._symbols is None:
                largest = self.planner.cohort_size << 8 * symbols.element_size()
                wide = torch.int32 if largest < 2**31 else torch.int64
                self._symbols = torch.zeros(symbols.shape[1], dtype=wide, device=symbols.device)
            add_rows(symbols, self._symbols)
            return
        public = PublicRandomness(self.keys, self._context.round, self.attempt)
        if self.client_weights is None:
            self._decoded += self.mechanism.decode(symbols, clients, self._context, public)
            return
        for row, client in enumerate(clients):
            one = self.mechanism.decode(symbols[row : row + 1], [client], self._context, public)
            self._decoded += self.client_weights[client].item() * one

    def finish(self) -> RoundRecord:
        """Decode the sum, step the server, choose the next range, and return the record.

        With no answer at all, or where the round is aborted, the model stays as it is and the round is
        recorded all the same; it stays charged.

        Raises:
            RuntimeError: If no round is open.
        """
        plan = self._open_plan()
        if self.tampering is not None and not self._aborted:
            clients, updates = self.tampering.release()
            if len(clients):
                self._take(plan, clients, updates)
        mean = self._mean_or_abort()
        record = self._record(plan)
        if mean is not None:
            step = mean if self.target == "updates" else mean - self.weights
            self._diagnose(record, step)
            self._apply(step)
            variance = self._noise_variance()
            self.ranges = self.range_rule.following(self.ranges, self.weights, mean, variance, self.segments)
        self.total_uplink_bits += record.uplink_bits
        self.total_downlink_bits += record.downlink_bits
        self.round, self.attempt, self.plan, self._secure = self.round + 1, 0, None, None
        return record

    def abandon(self) -> None:
        """Give up an open round: its streams are never used again, the next start is a new attempt."""
        if self.plan is not None:
            self.attempt, self.plan, self._secure = self.attempt + 1, None, None

    def _open_plan(self) -> RoundPlan:
        if self.plan is None:
            raise RuntimeError("no round is open; call start() first")
        return self.plan

    def _total_weight(self) -> float:
        if self.client_weights is None:
            return float(len(self._received))
        return float(self.client_weights[self._received].sum())

    def _mean_or_abort(self) -> Tensor | None:
        if self._aborted:
            return None
        try:
            self._check_answers()
            return self._mean() if self._received or self._secure is not None else None
        except AbortedRoundError as error:
            self._aborted = str(error)
            return None

    def _check_answers(self) -> None:
        answers, silent = len(self._received), len(self._absent())
        tolerated = self.mechanism.tolerated_dropouts(self._context)
        if tolerated is not None and silent > tolerated:
            raise AbortedRoundError(
                f"{silent} clients did not answer, the claims of {self.mechanism} allow for {tolerated}"
            )
        if self.aggregator is not None and answers < self.aggregator.min_clients:
            raise AbortedRoundError(
                f"{self.aggregator} needs {self.aggregator.min_clients} clients, {answers} answered"
            )

    def _mean(self) -> Tensor:
        if self.aggregator is not None:
            return self.aggregator(torch.stack(self._rows), self._open_plan()).to(self.weights)
        if self._rows:
            public = PublicRandomness(self.keys, self._context.round, self.attempt)
            messages = torch.cat(self._rows)
            self._decoded = self.mechanism.decode(messages, self._received, self._context, public)
        if self._secure is not None:
            self._symbols = self._secure.finish().to(self.weights.device)
        if self._symbols is not None:
            public = PublicRandomness(self.keys, self._context.round, self.attempt)
            counted = self._context.cohort if self.mechanism.fixed_cohort else self._received
            self._decoded = self.mechanism.decode(self._symbols, counted, self._context, public)
        elif self.mechanism.fixed_cohort and (absent := self._absent()):
            public = PublicRandomness(self.keys, self._context.round, self.attempt)
            zero = torch.zeros(1, self._message_size, dtype=torch.int32, device=self.weights.device)
            zeros = zero.expand(len(absent), -1)
            self._decoded += self.mechanism.decode(zeros, absent, self._context, public)
        return self._decoded.to(self.weights) / self._total_weight()

    def _absent(self) -> list[int]:
        received = set(self._received)
        return [client for client in self._context.cohort if client not in received]

    def _noise_variance(self) -> Tensor | None:
        """Bound on the variance of the mean; coupled errors never add up, so weights enter squared."""
        if self.aggregator is not None:  # a robust rule may pick one row: its own noise is the bound
            return self.mechanism.noise_variance(self._context, self._received[:1])
        if self.client_weights is None:
            return self.mechanism.noise_variance(self._context, self._received)
        shares = self.client_weights[self._received].double() / self._total_weight()
        total = torch.zeros(len(self.segments), dtype=torch.float64)
        for client, share in zip(self._received, shares.tolist(), strict=True):
            one = self.mechanism.noise_variance(self._context, [client])
            if one is None:
                return None
            total += share**2 * one
        return total

    def _apply(self, step: Tensor) -> None:
        if self._optimizer is None:
            self.weights = self.weights + self.smoothing * step
            return
        with torch.no_grad():
            self._parameter.copy_(self.weights)
        self._parameter.grad = -step
        self._optimizer.step()
        self.weights = torch.lerp(self.weights, self._parameter.detach(), self.smoothing)

    def _record(self, plan: RoundPlan) -> RoundRecord:
        size, dim = len(plan.cohort), self.weights.numel()
        uplink_bits, downlink_bits = self._uplink_bits, size * (32 * dim + 64 * len(self.segments))
        if self._secure is not None:
            traffic = self._secure.traffic
            uplink_bits, downlink_bits = traffic.uplink_bits, downlink_bits + traffic.downlink_bits
        return RoundRecord(
            round=plan.round,
            cohort_size=size,
            num_received=len(self._received),
            num_dropped=len(plan.dropped),
            uplink_bits=uplink_bits,
            downlink_bits=downlink_bits,
            setup_bits=self.keys.setup_bits_per_client * self.planner.num_clients if plan.round == 0 else 0,
            clip_rate=self._clipped / max(len(self._received) * dim, 1),
            radius_min=self.ranges.radius.min().item(),
            radius_max=self.ranges.radius.max().item(),
            update_norm=0.0,
            non_finite_clients=tuple(self._non_finite),
            aborted=self._aborted,
        )

    def _diagnose(self, record: RoundRecord, step: Tensor) -> None:
        record.update_norm = step.norm().item()
        if (exact := self.exact_mean) is None:
            return
        error = (step - exact).double()
        record.mse = error.square().mean().item()
        signal = exact.double().square().mean().item()
        if record.mse > 0 and signal > 0:
            record.snr_db = 10.0 * math.log10(signal / record.mse)
        if signal > 0 and record.update_norm > 0:
            record.cosine = torch.nn.functional.cosine_similarity(step, exact, dim=0).item()

    # ---- checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next round depends on, in tensors and plain numbers; keys excluded."""
        return {
            "weights": self.weights,
            "center": self.ranges.center,
            "radius": self.ranges.radius,
            "round": self.round,
            "attempt": self.attempt + (self.plan is not None),
            "total_uplink_bits": self.total_uplink_bits,
            "total_downlink_bits": self.total_downlink_bits,
            "ledger": self.ledger.state_dict(),
            "optimizer": deepcopy(self._optimizer.state_dict()) if self._optimizer else {},
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
        if bool(state["optimizer"]) != (self._optimizer is not None):
            raise ValueError(
                "the state and this federation must both have a server_optimizer, or neither; "
                "use the checkpoint's own setting"
            )
        self.ledger.load_state_dict(state["ledger"])
        self.weights = state["weights"].to(self.weights).clone()
        self.ranges = Ranges(state["center"].clone(), state["radius"].clone())
        self.round, self.attempt, self.plan = state["round"], state["attempt"], None
        self.total_uplink_bits = state["total_uplink_bits"]
        self.total_downlink_bits = state["total_downlink_bits"]
        if self._optimizer is not None:
            self._optimizer.load_state_dict(deepcopy(state["optimizer"]))
