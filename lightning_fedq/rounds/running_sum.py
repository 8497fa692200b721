"""The messages of one round on their way to a mean, and the server's step by it.

Messages are kept as sparingly as the mechanism permits: a homomorphic one leaves one integer a symbol,
another one its decoded sum; a robust rule or a joint decoder needs every message. Behind secure aggregation
nothing is kept here at all.
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
        context: What everybody knows about the round.
        public: The streams that the server may know.
        template: `(dim,)` the model; its dtype and device are those of the mean.
        client_weights: `(num_clients,)` weights of a weighted mean; None is uniform.
        aggregator: A robust rule in place of the mean.
        secure: Secure aggregation: takes every message, and gives the sum.
        divisor: What the mean divides by, whoever answers; with nobody it is that of the adder's noise. None
            is the number of answers.

    Attributes:
        received: Clients that answered, in the order of arrival.
        untrusted: Whether the last message came over a wire; False once the mean is decoded.
        secure: Secure aggregation, where this round is behind it.
        kept: What is kept of messages: "integers" is the sum of their symbols, "floats" that of what they
            decode to, "messages" every one.
        integer_sum: Sum of the symbols of a homomorphic mechanism so far, `(m,)`. None before the first.
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
        """Sum of what the messages decode to, where that is kept."""
        return FloatSum(self._context.dim)

    def noise_variance(self) -> Tensor | None:
        """Bound on the variance of the mean, one value a segment. None where none is known.

        Coupled errors never add up, so weights enter squared.
        """
        found = self._noise_variance()
        return None if found is None else found[: self._segments] * self._unit**2

    def _noise_variance(self) -> Tensor | None:
        mechanism, context = self._mechanism, self._context
        received = self.received if self._divisor is None else range(self._divisor)
        if self._aggregator is not None:  # a robust rule may pick one row: its own noise is the bound
            return mechanism.noise_variance(context, received[:1])
        if self._client_weights is None:
            return mechanism.noise_variance(context, received)
        shares = self._client_weights[received].double() / self.total_weight()
        total = torch.zeros(len(context.segments), dtype=torch.float64)
        for client, share in zip(received, shares.tolist(), strict=True):
            one = mechanism.noise_variance(context, [client])
            if one is None:
                return None
            total += share**2 * one
        return total

    def total_weight(self) -> float:
        """The weights of all who answered, or what stands for them."""
        if self._client_weights is None:
            return float(len(self.received) if self._divisor is None else self._divisor)
        return float(self._client_weights[self.received].sum())

    def absent_clients(self) -> list[int]:
        """The clients of the cohort that have not answered."""
        received = set(self.received)
        return [client for client in self._context.cohort if client not in received]

    def add(self, symbols: Tensor, clients: Sequence[int], *, untrusted: bool = False) -> None:
        """Take the messages `(len(clients), m)` of some clients.

        Args:
            symbols: One row a client.
            clients: Clients that sent the messages.
            untrusted: They came over a wire, so that a row may decode to a NaN or an infinity.

        Raises:
            AbortedRoundError: If secure aggregation gives the round up.
            UndecodableError: If an untrusted message does not decode to numbers; nothing is added.
        """
        self.untrusted = untrusted
        self._store_rows(symbols, clients)
        self.received += clients

    def _store_rows(self, symbols: Tensor, clients: Sequence[int]) -> None:
        if self.secure is not None:
            self.secure.add(clients, symbols)
        elif self._aggregator is not None:
            self._rows += [*self._decode_each(symbols, clients)]  # all or none
        elif self.kept == "messages":
            self._rows.append(symbols)
        elif self.kept == "integers":
            if self.integer_sum is None:
                # above any sum of symbols of this type
                largest = len(self._context.cohort) << 8 * symbols.element_size()
                wide = torch.int32 if largest < 2**31 else torch.int64
                self.integer_sum = torch.zeros(symbols.shape[1], dtype=wide)
            add_rows(symbols, self.integer_sum)
        elif self._client_weights is not None:
            weights = self._client_weights[list(clients)].tolist()
            rows: Iterable[Tensor] = self._decode_each(symbols, clients)
            rows = [*rows] if self.untrusted else rows  # all or none
            for weight, row in zip(weights, rows, strict=True):
                self.floats.add(weight * row.double())
        else:
            self.floats.add(self._decode(symbols, clients))

    def _decode(self, symbols: Tensor, clients: Sequence[int]) -> Tensor:
        decoded = self._mechanism.decode(symbols, clients, self._context, self._public)
        if self.untrusted and not bool(torch.isfinite(decoded).all()):
            raise UndecodableError("the message decodes to a NaN or an infinity")
        return decoded

    def _decode_each(self, symbols: Tensor, clients: Sequence[int]) -> Iterator[Tensor]:
        return (self._decode(symbols[i : i + 1], [client]) for i, client in enumerate(clients))

    def mean(self, plan: RoundPlan) -> Tensor | None:
        """Return the mean `(dim,)`, or what the robust rule takes for it. None if nobody has answered, unless
        the divisor does not follow from that.

        Behind it are the coordinates that the mechanism's `core` has for `range_rule`.

        Raises:
            AbortedRoundError: If too few have answered.
        """
        answers, silent = len(self.received), len(self.absent_clients())
        tolerated = self._mechanism.tolerated_dropouts(self._context)
        if tolerated is not None and silent > tolerated:
            raise AbortedRoundError(
                f"{silent} clients did not answer, the claims of {self._mechanism} allow for {tolerated}"
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
        absent = (
            self.absent_clients() if self._mechanism.fixed_cohort and not self._mechanism.homomorphic else []
        )
        zeros = torch.zeros(1, self._mechanism.num_symbols(self._context), dtype=torch.int32)
        zeros = zeros.expand(len(absent), -1)
        if self.secure is not None:
            self.integer_sum = self.secure.finish()
        if self.integer_sum is not None:
            counted = self._context.cohort if self._mechanism.fixed_cohort else self.received
            total = self._decode(self.integer_sum, counted)
        elif self._rows:  # whoever is absent sent zeros, too: parts of a joint sum do not add up
            rows = torch.cat([*self._rows, zeros.to(self._rows[0])])
            total = self._decode(rows, [*self.received, *absent])
        else:
            if absent:
                self.floats.add(self._decode(zeros, absent))
            total = self.floats.value()
        if (grid := self._mechanism.grid(self._context)) is not None:
            total = round_to_grid(total, grid)
        # divided in float64: a sum of finite answers may be more than float32 holds
        return (total.double() * self._unit / self.total_weight()).to(self._template)


class ServerStep:
    """A server learning rate, and a torch optimiser where there is one.

    Args:
        weights: `(dim,)` initial global model.
        server_lr: Server learning rate lambda in (0, 1]; the model moves to (1 - lambda) w + lambda w_new.
        make: Makes the optimiser of the parameters; None applies the mean update itself.

    Raises:
        ValueError: If the learning rate is out of its range.
    """

    def __init__(self, weights: Tensor, server_lr: float, make: OptimizerFactory | None) -> None:
        if not 0.0 < server_lr <= 1.0:
            raise ValueError(f"server_lr must be in (0, 1], got {server_lr}")
        self._lr, self._parameter = server_lr, torch.nn.Parameter(weights.clone())
        self._optimizer = make([self._parameter]) if make else None

    def apply(self, weights: Tensor, step: Tensor) -> Tensor:
        """The next model, `(dim,)`.

        Args:
            weights: The present one.
            step: The mean update.
        """
        if self._optimizer is None:
            return weights + self._lr * step
        with torch.no_grad():
            self._parameter.copy_(weights)
        self._parameter.grad = -step  # optimisers descend
        self._optimizer.step()
        return torch.lerp(weights, self._parameter.detach(), self._lr)  # (1 - lambda) w + lambda w_new

    def rearrange(
        self, weights: Tensor, segments: Sequence[int], origins: Sequence[int | None], parts: Sequence[Tensor]
    ) -> None:
        """Change what the flat vector is made of. What stays keeps its state.

        Args:
            weights: The new model.
            segments: Lengths of the old segments.
            origins: For each new segment the old one's index, or None where it joins.
            parts: A vector for each new segment.
        """
        old, self._parameter = self._parameter, torch.nn.Parameter(weights.clone())
        if self._optimizer is None:
            return
        zeros = [torch.zeros_like(part) for part in parts]
        state = self._optimizer.state.pop(old, {})
        self._optimizer.param_groups[0]["params"] = [self._parameter]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == old.shape:  # one value a coordinate
                state[name] = rearrange(value, segments, origins, zeros)
        self._optimizer.state[self._parameter] = state

    def is_finite(self) -> bool:
        """Is the optimiser's state finite?"""
        state = {} if self._optimizer is None else self._optimizer.state.get(self._parameter, {})
        vectors = [value for value in state.values() if isinstance(value, Tensor)]
        return all(bool(torch.isfinite(value).all()) for value in vectors)

    def reset_optimizer(self) -> bool:
        """Forget the optimiser's state. False where there is no optimiser."""
        if self._optimizer is None:
            return False
        self._optimizer.state.clear()
        return True

    def state_dict(self) -> dict[str, Any]:
        """State of the optimiser, {} without one."""
        return deepcopy(self._optimizer.state_dict()) if self._optimizer else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, see `check`."""
        if self._optimizer is not None:
            self._optimizer.load_state_dict(deepcopy(state))

    def check(self, state: dict[str, Any]) -> None:
        """Refuse the state of a server of another kind.

        Raises:
            ValueError: If only one of the two has an optimiser.
        """
        if bool(state) != (self._optimizer is not None):
            raise ValueError(
                "the state and this federation must both have a server_optimizer, or neither; "
                "use the checkpoint's own setting"
            )
