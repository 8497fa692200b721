"""Simulated federation: the server's half and all clients' halves of a round in one process.

The server's half is `RoundServer`. A stack of updates is encoded at once, so the fast path has no loop over
clients. Symbols reach the server without being packed, but their bits are counted.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedq.functional.accumulate import add_rows
from lightning_fedq.keys.randomness import Keys
from lightning_fedq.mechanisms.contract import check_message
from lightning_fedq.mechanisms.interface import AbortedRoundError, Mechanism, RoundContext
from lightning_fedq.mechanisms.interface.ranges import RangeRule
from lightning_fedq.rounds.client import encode_updates
from lightning_fedq.rounds.plan import RoundPlan, RoundPlanner
from lightning_fedq.rounds.protocols import Tampering, UpdateTransform
from lightning_fedq.rounds.record import RoundRecord
from lightning_fedq.rounds.server import RoundServer
from lightning_fedq.rounds.statistics import is_finite_float32


class RoundEngine(RoundServer):
    """Server of a simulated federation. It receives updates and encodes them on behalf of its clients.

    Use it as `plan = engine.start()`, then `engine.receive(clients, updates)` for every client of
    `plan.survivors` once, in stacks of any size, then `record = engine.finish()`.

    Args:
        mechanism: Mechanism of all clients.
        planner: Planner of the rounds.
        keys: Keys of the server and of all clients.
        weights: `(dim,)` initial global model, which is copied.
        segments: Length of each segment (layer). The lengths sum to `dim`.
        ranges: Rule for the quantisation range of each round.
        diagnostics: Whether to keep the exact sum of updates for MSE, SNR, cosine and `exact_mean`.
        **options: Options of `RoundServer`.

    Attributes:
        client_keys: Keys of all clients, the same object as the server's keys.
        transform: Transformation of all updates before encoding. None applies no transformation.
        tampering: Attack of Byzantine clients. None if all clients are honest.

    Examples:
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
        self._cut: Tensor | None = None  # sum of what the clip took from the updates
        self._energy, self._arrived = 0.0, ArrivedShare()

    @property
    def exact_mean(self) -> Tensor | None:
        """Exact weighted mean `(dim,)` of the updates encoded in the open round, or else in the last round.

        Only a simulation knows it, and it is not private. It contains the updates of Byzantine clients. None
        without diagnostics, before the first answer, and in an aborted round.
        """
        if self._exact is None or self._aborted or not self._sum.received:
            return None
        return (self._exact / self._sum.total_weight()).to(self.weights)

    def _open(self, plan: RoundPlan) -> None:
        super()._open(plan)
        self.non_finite: list[int] = []  # clients of the open round whose update counts as zero
        self._clipped = 0
        if self.tampering is not None:
            self.tampering.begin(plan, self._context)
        self._exact = torch.zeros_like(self.weights, dtype=torch.float64) if self.diagnostics else None
        self._cut, self._energy = None, 0.0

    def receive(self, clients: Sequence[int], updates: Tensor) -> None:
        """Transform and encode the updates of some clients, and add the messages to the running sum.

        An update with a NaN or with a value outside the range of float32 counts as a zero update. It is
        replaced before encoding, so it is not visible in the message or the model. The record names the
        client. In an aborted round nothing is encoded.

        Args:
            clients: Clients of this round that have not answered yet.
            updates: `(len(clients), dim)` updates, local - global. The tensor may be overwritten.

        Raises:
            RuntimeError: If no round is open.
            ValueError: If a client is not expected, or the shape is wrong.
            BrokenContractError: If messages break a rule of the mechanism contract (first round only).
        """
        plan = self._open_plan()
        self._check_shape("updates", clients, updates)
        unexpected = set(clients) - self._expected
        if unexpected or len(set(clients)) != len(clients):
            raise ValueError(f"Clients {sorted(unexpected) or clients} are not expected, or answered twice")
        self._expected -= set(clients)
        if self._aborted:
            return
        # parameters may have joined since the charge
        self.ledger.raise_dim(self.weights.numel(), plan.round, self.attempt)
        if self.transform is not None:
            updates = self.transform(clients, updates)
            self._check_shape("transformed updates", clients, updates)
        if self.tampering is not None:
            clients, updates = self.tampering.hold(clients, updates)
        if len(clients):
            self._encode_and_add(clients, updates)

    def receive_statistics(self, clients: Sequence[int], vectors: Tensor) -> None:
        """Encode the statistics of some clients as updates, in a round of statistics (see `receive`).

        Args:
            clients: Clients of this round that have not answered yet.
            vectors: `(len(clients), size)` statistics. A vector that is not finite counts as zeros, and the
                record names its client.
        """
        assert self.statistics is not None
        parts = self.mechanism, self._context, self.weights, self.target
        self.receive(clients, self.statistics.spread(vectors, *parts))
        pairs = zip(clients, is_finite_float32(vectors), strict=True)
        self.non_finite += [client for client, is_good in pairs if not is_good]

    def _check_shape(self, name: str, clients: Sequence[int], updates: Tensor) -> None:
        """Check that there is one row of `dim` values per client."""
        expected = len(clients), self.weights.numel()
        if updates.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {tuple(updates.shape)}")

    def _encode_and_add(self, clients: Sequence[int], updates: Tensor) -> None:
        """Encode updates, let Byzantine clients change the messages, and add these to the sum."""
        mechanism, context, keys = self.mechanism, self._context, self.client_keys
        encoded = encode_updates(mechanism, self.target, keys, clients, updates, self.weights, context)
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
            if message.num_clipped:
                clipped = clip_rows(mechanism, encoded.values, context)
                if self._cut is None:
                    self._cut = torch.zeros_like(self.weights, dtype=torch.float64)
                add_rows(self._scale((encoded.values - clipped).to(self.weights), clients), self._cut)

    def _add(self, symbols: Tensor, clients: Sequence[int]) -> None:
        """Add messages to the running sum. Subclasses override this step."""
        self._sum.add(symbols, clients)

    def _scale(self, rows: Tensor, clients: Sequence[int]) -> Tensor:
        """Multiply each client's row by its weight in the mean."""
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
        """Compare the decoded mean `step` with the exact mean, and add the numbers to the record."""
        if (exact := self.exact_mean) is None:
            return
        if self.client_weights is None and self._energy > 0.0:
            mean_energy = self._energy / max(record.num_received, 1)
            record.homogeneity = float(exact.double().square().sum()) / mean_energy
        entered = exact if self._cut is None else exact - (self._cut / self._sum.total_weight()).to(exact)
        if not self.reads_statistics:
            self._arrived.add(step, entered)
        record.arrived = self._arrived.share
        error = (step - exact).double()
        record.mse = error.square().mean().item()
        signal = exact.double().square().mean().item()
        if record.mse > 0 and signal > 0:
            record.snr_db = 10.0 * math.log10(signal / record.mse)
        if signal > 0 and record.update_norm > 0:
            record.cosine = torch.nn.functional.cosine_similarity(step, exact, dim=0).item()


# ---- share of the updates that arrived ---------------------------------------------------------------------


def clip_rows(mechanism: Mechanism, rows: Tensor, context: RoundContext) -> Tensor:
    """Return updates as a mechanism's clip leaves them, without its quantisation and noise.

    Mechanisms that clip neither the l2 norm nor coordinates get the updates as they are.

    Args:
        rows: `(n, dim)` updates, or weights if clients send weights.
        context: Public facts of the round.
    """
    if mechanism.clips_norm:
        center = context.expand(context.center).to(rows)
        norms = torch.linalg.vector_norm(rows - center, dim=1, keepdim=True)
        bound: float = mechanism.clip_norm
        clipped: Tensor = center + (rows - center) * (bound / norms.clamp(min=bound))
        return clipped
    if mechanism.longest_update(context.dim) is not None:
        return rows
    center, radius = (context.expand(part).to(rows) for part in mechanism.clipping_range(context))
    return torch.minimum(torch.maximum(rows, center - radius), center + radius)


class ArrivedShare:
    """Share of the clipped updates that arrives in the decoded means, over the rounds of a run.

    Unbiased noise averages out over rounds. A decoder that returns zeros or pure noise has a small error in
    each round where updates are short, but nothing of the updates arrives. So the sums over the run are
    compared. They contain exact updates, so they stay in memory and are in no checkpoint: a resumed run
    begins new sums.

    With D the sum of decoded means and M that of exact means, the share is <D, M> / |M|^2: 1 for unbiased
    decoders, 0 for zeros. Noise changes it by about |D - M| / (|M| sqrt(dim)), and twice that is subtracted,
    so a decoder of pure noise does not get a share by chance. Where the vector changes its length, new sums
    begin, and the numbers of all parts are added.

    Examples:
        >>> arrived = ArrivedShare()
        >>> for _ in range(10):  # a decoder that returns half of each update
        ...     arrived.add(torch.ones(100), 2.0 * torch.ones(100))
        >>> round(arrived.share, 2)
        0.4
    """

    def __init__(self) -> None:
        self._earlier = torch.zeros(3, dtype=torch.float64)
        self._decoded: Tensor | None = None
        self._exact: Tensor | None = None

    def add(self, decoded: Tensor, exact: Tensor) -> None:
        """Add a round: the decoded mean `(dim,)`, and the exact mean of the clipped updates `(dim,)`."""
        if self._decoded is None or self._exact is None or self._decoded.shape != decoded.shape:
            self._earlier = self._numbers()
            self._decoded, self._exact = (torch.zeros_like(exact, dtype=torch.float64) for _ in range(2))
        self._decoded += decoded
        self._exact += exact

    def _numbers(self) -> Tensor:
        """Return <D, M>, |M|^2 and |D - M|^2 / dim, summed over the parts of the run."""
        if self._decoded is None or self._exact is None:
            return self._earlier
        decoded, exact = self._decoded, self._exact
        error = (decoded - exact).square().mean()
        return self._earlier + torch.stack([decoded @ exact, exact @ exact, error]).cpu()

    @property
    def share(self) -> float:
        """Share of the updates that arrived, less two standard deviations. NaN if all updates were zero."""
        overlap, signal, error = self._numbers().tolist()
        return (overlap - 2.0 * math.sqrt(error * signal)) / signal if signal > 0.0 else math.nan
