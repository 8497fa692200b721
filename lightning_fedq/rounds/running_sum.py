"""Running sum of the messages of one round, and the server's step with their mean.

The sum stores as little as the mechanism permits. A homomorphic mechanism needs one integer per symbol, and
other mechanisms need the sum of decoded updates. A robust rule or a joint decoder needs every message. With
secure aggregation, the messages are not stored here.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedq.functional.accumulate import FloatSum, add_rows
from lightning_fedq.functional.exact_error.dither import round_to_grid
from lightning_fedq.functional.flatten import rearrange
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.interface import AbortedRoundError, Mechanism, RoundContext
from lightning_fedq.rounds.plan import RoundPlan
from lightning_fedq.rounds.protocols import Aggregator, OptimizerFactory, SecureSum
from lightning_fedq.wire.coding import UndecodableError


class RunningSum:
    """Running sum of the messages that the server has received in one round.

    Args:
        mechanism: Mechanism that decodes messages.
        context: Public facts of the round.
        public: Random streams that the server may know.
        template: `(dim,)` model, which determines dtype and device of the mean.
        client_weights: `(num_clients,)` weights of a weighted mean. None gives all clients equal weights.
        aggregator: Robust rule in place of the mean, or None.
        secure: Secure aggregation, which takes every message and returns the sum, or None.
        divisor: Fixed divisor of the mean, for cohorts of secret size. The mean of zero answers is then the
            noise of the trusted adder. None divides by the number of answers or by their weights.

    Attributes:
        received: Clients that answered, in the order of arrival.
        untrusted: Whether the last message came over a network. False once the mean is decoded.
        secure: Secure aggregation of this round, or None.
        kept: Stored form of messages: "integers" for the sum of symbols, "floats" for the sum of decoded
            updates, "messages" for every message.
        integer_sum: `(m,)` sum of the symbols of a homomorphic mechanism. None before the first message.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        context: RoundContext,
        public: PublicRandomness,
        template: Tensor,
        client_weights: Tensor | None,
        aggregator: Aggregator | None,
        secure: SecureSum | None,
        divisor: int | None = None,
    ) -> None:
        self._mechanism, self._context, self._unit = mechanism.core(context)
        self._public = public
        self._segments = len(context.segments)
        self._client_weights, self._aggregator, self.secure = client_weights, aggregator, secure
        self._divisor = divisor
        self.received: list[int] = []
        self.integer_sum: Tensor | None = None
        self._rows: list[Tensor] = []  # decoded rows for an aggregator, or messages for a joint decoder
        self._template = template
        self.untrusted = False
        self.kept: Literal["integers", "floats", "messages"] = "floats"
        adds_up = self._mechanism.homomorphic
        if secure is not None or aggregator is not None or (self._mechanism.joint and not adds_up):
            self.kept = "messages"
        elif adds_up and client_weights is None:
            self.kept = "integers"

    @cached_property
    def floats(self) -> FloatSum:
        """Sum of decoded updates, used if `kept` is "floats"."""
        return FloatSum(self._context.dim)

    def noise_variance(self) -> Tensor | None:
        """Return a bound on the noise variance of the mean, one value per segment. None if it is unknown.

        Errors of different clients are never positively correlated, so the squares of client weights add up.
        """
        variance = self._noise_variance()
        return None if variance is None else variance[: self._segments] * self._unit**2

    def _noise_variance(self) -> Tensor | None:
        """Return the bound in the units of the core mechanism, for all its segments."""
        mechanism, context = self._mechanism, self._context
        received = self.received if self._divisor is None else range(self._divisor)
        if self._aggregator is not None:  # a robust rule may select one row, so take one client's noise
            return mechanism.noise_variance(context, received[:1])
        if self._client_weights is None:
            return mechanism.noise_variance(context, received)
        shares = self._client_weights[received].double() / self.total_weight()
        total = torch.zeros(len(context.segments), dtype=torch.float64)
        for client, share in zip(received, shares.tolist(), strict=True):
            variance = mechanism.noise_variance(context, [client])
            if variance is None:
                return None
            total += share**2 * variance
        return total

    def total_weight(self) -> float:
        """Return the divisor of the mean: the sum of client weights, the number of answers, or `divisor`."""
        if self._client_weights is None:
            return float(len(self.received) if self._divisor is None else self._divisor)
        return float(self._client_weights[self.received].sum())

    def absent_clients(self) -> list[int]:
        """Return the clients of the cohort that have not answered."""
        received = set(self.received)
        return [client for client in self._context.cohort if client not in received]

    def add(self, symbols: Tensor, clients: Sequence[int], *, untrusted: bool = False) -> None:
        """Add the messages of some clients.

        Args:
            symbols: `(len(clients), m)` symbols, one row per client.
            clients: Clients that sent the messages.
            untrusted: Whether the messages came over a network, so that a row may decode to a NaN or an
                infinity.

        Raises:
            AbortedRoundError: If secure aggregation aborts the round.
            UndecodableError: If an untrusted message does not decode to finite numbers. Nothing is added
                then.
        """
        self.untrusted = untrusted
        self._store_rows(symbols, clients)
        self.received += clients

    def _store_rows(self, symbols: Tensor, clients: Sequence[int]) -> None:
        """Add messages to the sum in the form that `kept` names."""
        if self.secure is not None:
            self.secure.add(clients, symbols)
        elif self._aggregator is not None:
            self._rows += [*self._decode_each(symbols, clients)]  # decode all first, so an error adds no row
        elif self.kept == "messages":
            self._rows.append(symbols)
        elif self.kept == "integers":
            if self.integer_sum is None:
                # upper bound of any sum of symbols of this dtype over the cohort
                largest = len(self._context.cohort) << 8 * symbols.element_size()
                wide = torch.int32 if largest < 2**31 else torch.int64
                self.integer_sum = torch.zeros(symbols.shape[1], dtype=wide)
            add_rows(symbols, self.integer_sum)
        elif self._client_weights is not None:
            weights = self._client_weights[list(clients)].tolist()
            rows: Iterable[Tensor] = self._decode_each(symbols, clients)
            rows = [*rows] if self.untrusted else rows  # decode all first, so an error adds no row
            for weight, row in zip(weights, rows, strict=True):
                self.floats.add(weight * row.double())
        else:
            self.floats.add(self._decode(symbols, clients))

    def _decode(self, symbols: Tensor, clients: Sequence[int]) -> Tensor:
        """Decode the sum of messages. Untrusted messages must decode to finite numbers."""
        decoded = self._mechanism.decode(symbols, clients, self._context, self._public)
        if self.untrusted and not bool(torch.isfinite(decoded).all()):
            raise UndecodableError("The message decodes to a NaN or an infinity")
        return decoded

    def _decode_each(self, symbols: Tensor, clients: Sequence[int]) -> Iterator[Tensor]:
        """Decode each client's message separately, lazily."""
        return (self._decode(symbols[i : i + 1], [client]) for i, client in enumerate(clients))

    def mean(self, plan: RoundPlan) -> Tensor | None:
        """Return the mean `(dim,)`, or the result of the robust rule.

        If the mechanism's `core` appends coordinates for `range_rule`, they follow after the first `dim`
        ones.

        Args:
            plan: Plan of the round, which a robust rule reads.

        Returns:
            The mean. None if no client has answered, unless the divisor is fixed.

        Raises:
            AbortedRoundError: If too few clients have answered for the mechanism's claims or the robust rule.
        """
        answers, silent = len(self.received), len(self.absent_clients())
        tolerated = self._mechanism.tolerated_dropouts(self._context)
        if tolerated is not None and silent > tolerated:
            raise AbortedRoundError(
                f"{silent} clients did not answer, but the claims of {self._mechanism} allow {tolerated}"
            )
        if self._aggregator is not None and answers < self._aggregator.min_clients:
            raise AbortedRoundError(
                f"{self._aggregator} needs {self._aggregator.min_clients} clients, {answers} answered"
            )
        self.untrusted = False
        if not self.received and self.secure is None:
            if self._divisor is None:
                return None
            count = self._mechanism.num_symbols(self._context)
            self.integer_sum = torch.zeros(count, dtype=torch.int64)
        if self._aggregator is not None:
            return self._aggregator(torch.stack(self._rows), plan).to(self._template)
        if self.secure is not None:
            self.integer_sum = self.secure.finish()
        total = self._decoded_total()
        if (grid := self._mechanism.grid(self._context)) is not None:
            total = round_to_grid(total, grid)
        # divide in float64, because a sum of finite answers may exceed the range of float32
        return (total.double() * self._unit / self.total_weight()).to(self._template)

    def _decoded_total(self) -> Tensor:
        """Return the sum `(dim,)` of all decoded updates.

        If a mechanism decodes a fixed cohort, an absent client counts as one that sent zeros.
        """
        mechanism = self._mechanism
        if self.integer_sum is not None:
            counted = self._context.cohort if mechanism.fixed_cohort else self.received
            return self._decode(self.integer_sum, counted)
        absent = self.absent_clients() if mechanism.fixed_cohort else []
        zeros = torch.zeros(1, mechanism.num_symbols(self._context), dtype=torch.int32)
        zeros = zeros.expand(len(absent), -1)
        if self._rows:  # a joint decoder needs all rows at once
            rows = torch.cat([*self._rows, zeros.to(self._rows[0])])
            return self._decode(rows, [*self.received, *absent])
        if absent:
            self.floats.add(self._decode(zeros, absent))
        return self.floats.value()


class ServerStep:
    """Server's model step: a learning rate, and optionally a torch optimiser.

    Args:
        weights: `(dim,)` initial global model.
        server_lr: Server learning rate lambda in (0, 1]. The model moves to (1 - lambda) w + lambda w_new.
        make: Function from parameters to an optimiser. None adds the mean update to the model.

    Raises:
        ValueError: If the learning rate is not in (0, 1].
    """

    def __init__(self, weights: Tensor, server_lr: float, make: OptimizerFactory | None) -> None:
        if not 0.0 < server_lr <= 1.0:
            raise ValueError(f"server_lr must be in (0, 1], got {server_lr}")
        self._lr, self._parameter = server_lr, torch.nn.Parameter(weights.clone())
        self._optimizer = make([self._parameter]) if make else None

    def apply(self, weights: Tensor, step: Tensor) -> Tensor:
        """Return the next model `(dim,)`.

        Args:
            weights: `(dim,)` current model.
            step: `(dim,)` mean update.
        """
        if self._optimizer is None:
            return weights + self._lr * step
        with torch.no_grad():
            self._parameter.copy_(weights)
        self._parameter.grad = -step  # optimisers descend, so the gradient is minus the update
        self._optimizer.step()
        return torch.lerp(weights, self._parameter.detach(), self._lr)  # (1 - lambda) w + lambda w_new

    def rearrange(
        self, weights: Tensor, segments: Sequence[int], origins: Sequence[int | None], parts: Sequence[Tensor]
    ) -> None:
        """Change the segments of the flat vector. Remaining segments keep their optimiser state.

        Args:
            weights: `(dim,)` new model.
            segments: Lengths of the old segments.
            origins: For each new segment, the index of its old segment, or None if the segment is new.
            parts: One vector per new segment.
        """
        old, self._parameter = self._parameter, torch.nn.Parameter(weights.clone())
        if self._optimizer is None:
            return
        zeros = [torch.zeros_like(part) for part in parts]
        state = self._optimizer.state.pop(old, {})
        self._optimizer.param_groups[0]["params"] = [self._parameter]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == old.shape:  # state with one value per coordinate
                state[name] = rearrange(value, segments, origins, zeros)
        self._optimizer.state[self._parameter] = state

    def is_finite(self) -> bool:
        """Return whether the optimiser's state is finite."""
        state = {} if self._optimizer is None else self._optimizer.state.get(self._parameter, {})
        vectors = [value for value in state.values() if isinstance(value, Tensor)]
        return all(bool(torch.isfinite(value).all()) for value in vectors)

    def reset_optimizer(self) -> bool:
        """Clear the optimiser's state. Return False if there is no optimiser."""
        if self._optimizer is None:
            return False
        self._optimizer.state.clear()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state, or {} without an optimiser."""
        return deepcopy(self._optimizer.state_dict()) if self._optimizer else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned. Call `check` first."""
        if self._optimizer is not None:
            self._optimizer.load_state_dict(deepcopy(state))

    def check(self, state: dict[str, Any]) -> None:
        """Check that a saved state fits this server.

        Raises:
            ValueError: If only one of the state and this server has an optimiser.
        """
        if bool(state) != (self._optimizer is not None):
            raise ValueError(
                "Only one of the state and this federation has a server_optimizer. "
                "Use the checkpoint's own setting."
            )
