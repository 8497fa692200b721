"""A simulated federation: the server's half and all its clients' in one process.

The server's half is `RoundServer` as it is. Stacks of updates go through the clients' half at once, so the
fast path has no loop over clients, and symbols come to the server without being packed; bits are counted.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedq.functional.accumulate import add_rows
from lightning_fedq.keys.randomness import Keys
from lightning_fedq.mechanisms.contract import check_message
from lightning_fedq.mechanisms.interface import AbortedRoundError, Mechanism
from lightning_fedq.mechanisms.interface.ranges import RangeRule
from lightning_fedq.rounds.client import encode_updates
from lightning_fedq.rounds.plan import RoundPlan, RoundPlanner
from lightning_fedq.rounds.protocols import Tampering, UpdateTransform
from lightning_fedq.rounds.record import RoundRecord
from lightning_fedq.rounds.server import RoundServer
from lightning_fedq.rounds.statistics import is_finite_float32


class RoundEngine(RoundServer):
    """The server of a simulated federation, which is given updates and encodes them for its clients.

    Use it as `plan = engine.start()`, then `engine.receive(clients, updates)` for every client of
    `plan.survivors` once, in stacks of any size, then `record = engine.finish()`.

    Args:
        keys: Source of all coins, the server's and everybody's.
        weights: `(dim,)` initial global model; copied.
        segments: Length of each segment (layer); they sum to `dim`.
        diagnostics: Also keep the exact sum of the updates, for MSE, SNR, cosine and `exact_mean`.
        **options: See `RoundServer`.

    Attributes:
        client_keys: Keys of all clients, the same as the server's.
        transform: Applied to all updates as they come in; None leaves them as they are.
        tampering: Clients that lie, between training, encoding and the wire; None if nobody does.

    Example:
        >>> from lightning_fedq import FedAvg, FixedRange
        >>> from lightning_fedq.keys.randomness import SeededKeys
        >>> planner, keys = RoundPlanner(4, seed=0), SeededKeys(0)
        >>> engine = RoundEngine(FedAvg(), planner, keys, torch.zeros(3), [3], FixedRange(1.0))
        >>> plan = engine.start()
        >>> engine.receive(plan.survivors, torch.ones(4, 3))
        >>> engine.finish().uplink_bits, engine.weights
        (384, tensor([1., 1., 1.]))
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
        diagnostics: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(mechanism, planner, keys, weights, segments, ranges, **options)
        self.client_keys, self.diagnostics = keys, diagnostics
        self.transform: UpdateTransform | None = None
        self.tampering: Tampering | None = None
        self._exact: Tensor | None = None
        self._energy = 0.0

    @property
    def exact_mean(self) -> Tensor | None:
        """Weighted mean `(dim,)` of the updates encoded in this round, or in the last one between two.

        What only a simulation knows, lies included, and not private. None without diagnostics, before the
        first answer, and in a round that was aborted.
        """
        if self._exact is None or self._aborted or not self._sum.received:
            return None
        return (self._exact / self._sum.total_weight()).to(self.weights)

    def _open(self, plan: RoundPlan) -> None:
        super()._open(plan)
        self.non_finite: list[int] = []  # clients whose update counts as zero, of the open round
        self._clipped = 0
        if self.tampering is not None:
            self.tampering.begin(plan, self._context)
        self._exact = torch.zeros_like(self.weights, dtype=torch.float64) if self.diagnostics else None
        self._energy = 0.0

    def receive(self, clients: Sequence[int], updates: Tensor) -> None:
        """Transform and encode the updates of some clients and add the messages to the running sum.

        An update with a NaN, or a number that float32 can't hold, counts as a zero update, before anything is
        encoded, so that neither the model nor the message shows it; the record names the client. In a round
        that is aborted already, nobody sends anything.

        Args:
            clients: Clients of this round that have not answered yet.
            updates: `(len(clients), dim)`, local - global; may be overwritten.

        Raises:
            RuntimeError: If no round is open.
            ValueError: If a client is not expected, or the shape is wrong.
            BrokenContractError: In the engine's first round, if messages break a rule.
        """
        plan = self._open_plan()
        self._check_shape("updates", clients, updates)
        unexpected = set(clients) - self._expected
        if unexpected or len(set(clients)) != len(clients):
            raise ValueError(f"clients {sorted(unexpected) or clients} are not expected, or answered twice")
        self._expected -= set(clients)
        if self._aborted:
            return
        self.ledger.raise_dim(self.weights.numel(), plan.round, self.attempt)  # joined since the charge
        if self.transform is not None:
            updates = self.transform(clients, updates)
            self._check_shape("transformed updates", clients, updates)
        if self.tampering is not None:
            clients, updates = self.tampering.hold(clients, updates)
        if len(clients):
            self._encode_and_add(clients, updates)

    def receive_statistics(self, clients: Sequence[int], vectors: Tensor) -> None:
        """Receive the statistics of some clients, in a round of them, see `receive`.

        Args:
            vectors: `(len(clients), size)`. One with a NaN counts as zeros, and the record names the client.
        """
        assert self.statistics is not None
        parts = self.mechanism, self._context, self.weights, self.target
        self.receive(clients, self.statistics.spread(vectors, *parts))
        self.non_finite += [
            client for client, good in zip(clients, is_finite_float32(vectors), strict=True) if not good
        ]

    def _check_shape(self, name: str, clients: Sequence[int], updates: Tensor) -> None:
        expected = len(clients), self.weights.numel()
        if updates.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {tuple(updates.shape)}")

    def _encode_and_add(self, clients: Sequence[int], updates: Tensor) -> None:
        mechanism, context = self.mechanism, self._context
        encoded = encode_updates(
            mechanism, self.target, self.client_keys, clients, updates, self.weights, context
        )
        message = encoded.message
        if self._unchecked:
            check_message(mechanism, message, context, len(clients))
        self.non_finite += encoded.non_finite
        if self.tampering is not None:
            message = self.tampering.send(clients, encoded.values, message, context, encoded.rand)
        self._uplink_bits += message.num_bits
        self._clipped += message.num_clipped
        try:
            self._add(message.symbols, clients)
        except AbortedRoundError as error:
            self._aborted = str(error)
            return
        if self._exact is not None:
            add_rows(self._scale(encoded.updates, clients), self._exact)
            self._energy += encoded.energy

    def _add(self, symbols: Tensor, clients: Sequence[int]) -> None:
        """Add messages to the sum."""
        self._sum.add(symbols, clients)

    def _scale(self, rows: Tensor, clients: Sequence[int]) -> Tensor:
        if self.client_weights is None:
            return rows
        return rows * self.client_weights[list(clients)].to(self.weights)[:, None]

    def finish(self) -> RoundRecord:
        self._open_plan()
        if self.tampering is not None and not self._aborted:
            clients, updates = self.tampering.release()
            if len(clients):
                self._encode_and_add(clients, updates)
        return super().finish()

    def _record(self, plan: RoundPlan) -> RoundRecord:
        record = super()._record(plan)
        record.clip_rate = self._clipped / max(record.num_received * self.weights.numel(), 1)
        record.non_finite_clients = tuple(self.non_finite)
        return record

    def _diagnose(self, record: RoundRecord, step: Tensor) -> None:
        if (exact := self.exact_mean) is None:
            return
        if self.client_weights is None and self._energy > 0.0:
            mean_energy = self._energy / max(record.num_received, 1)
            record.homogeneity = float(exact.double().square().sum()) / mean_energy
        error = (step - exact).double()
        record.mse = error.square().mean().item()
        signal = exact.double().square().mean().item()
        if record.mse > 0 and signal > 0:
            record.snr_db = 10.0 * math.log10(signal / record.mse)
        if signal > 0 and record.update_norm > 0:
            record.cosine = torch.nn.functional.cosine_similarity(step, exact, dim=0).item()
