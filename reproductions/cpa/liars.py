"""Attacks of the literature beside those of `ByzantineClients`, for table VI.

Some take the honest updates of the round into account (the strongest adversary of the literature): those
clients answer last.

References:
    Baruch et al., A Little Is Enough, NeurIPS 2019 (ALIE). Xie et al., Fall of Empires, UAI 2020 (IPM).
    Karimireddy et al., ICLR 2022 (mimic).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import ByzantineClients
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.keys.randomness import ClientRandomness
from lightning_fedq.mechanisms.interface import RoundContext
from lightning_fedq.rounds import RoundPlan
from lightning_fedq.wire.coding import FixedLength

LAST = ("alie", "ipm", "mimic")
"""Attacks that follow from the honest updates."""


class Liars(ByzantineClients):
    """`ByzantineClients` with the attacks that take more than a client's own update or message.

    "constant" is scale in every coordinate, "gaussian" the update plus noise of std scale, "ipm" -scale times
    the honest mean, "alie" that mean less scale standard deviations (0 takes the paper's), "mimic" one honest
    client's update; "label_flip" trains on labels counted backwards, "garbage" sends random symbols.

    Args:
        num_classes: Number of labels, for label_flip only.
    """

    attacks = (*ByzantineClients.attacks, "constant", "gaussian", *LAST, "label_flip", "garbage")
    is_shared_by_clients = True
    """Byzantine clients flip the labels of batches in their own training."""

    def __init__(
        self,
        fraction: float,
        attack: Any,
        *,
        scale: float = 1.0,
        num_classes: int | None = None,
        seed: int = 0,
    ) -> None:
        if (attack == "label_flip") != (num_classes is not None):
            raise ValueError("num_classes goes with label_flip, and label_flip needs it")
        super().__init__(fraction, attack, scale=scale, seed=seed)
        self.num_classes = num_classes

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """label_flip: label y becomes num_classes - 1 - y in the Byzantine clients' batches."""
        if self.num_classes is None:
            return
        labels, clients = batch[1], find_federated(trainer, "Liars").training_clients
        if len(clients) == 1:
            labels = labels[None]
        for row in self._rows(clients):
            labels[row].neg_().add_(self.num_classes - 1)

    def begin(self, plan: RoundPlan, context: RoundContext) -> None:
        """Forget what an earlier round held back."""
        super().begin(plan, context)
        self._held: list[tuple[int, Tensor]] = []
        self._honest: list[Tensor] = []

    def hold(self, clients: Sequence[int], updates: Tensor) -> tuple[Sequence[int], Tensor]:
        """Lie, or keep the rows back of those who answer last."""
        rows = self._rows(clients)
        if self.attack == "constant":
            updates[rows] = self.scale
        elif self.attack == "gaussian":
            for row in rows:
                words = self._words("gaussian", clients[row], updates.shape[1]).double()
                updates[row] += self.scale * torch.special.ndtri((words + 0.5) / 2**32).to(updates)
        elif self.attack in LAST:
            honest = [row for row in range(len(clients)) if row not in rows]
            self._held += [(clients[row], updates[row].clone()) for row in rows]
            self._honest += [row.clone() for row in updates[honest]]
            return [clients[row] for row in honest], updates[honest]
        return super().hold(clients, updates)

    def release(self) -> tuple[Sequence[int], Tensor]:
        """Return those who were held back, and what they feed the encoder."""
        if not self._held:
            return [], torch.empty(0)
        clients, own = [c for c, _ in self._held], torch.stack([update for _, update in self._held])
        honest, self._held, self._honest = self._honest, [], []
        if not honest:  # nobody is there to imitate, and nothing to spoil
            return clients, own
        rows = torch.stack(honest)
        if self.attack == "mimic":
            lie = rows[0]
        elif self.attack == "ipm":
            lie = -self.scale * rows.mean(0)
        else:
            shift = self.scale or alie_shift(len(rows) + len(own), len(own))
            lie = rows.mean(0) - shift * rows.std(0, correction=0)
        return clients, lie.expand_as(own).clone()

    def _check_mechanism(self, context: RoundContext) -> None:
        super()._check_mechanism(context)
        if self.attack == "garbage" and not isinstance(self._mechanism.code(context), FixedLength):
            raise ValueError(f"garbage needs symbols of fixed length, {self._mechanism} has others")

    def _lies(
        self,
        clients: Sequence[int],
        values: Tensor,
        symbols: Tensor,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> Tensor | None:
        if self.attack != "garbage":
            return super()._lies(clients, values, symbols, context, rand)
        code = self._mechanism.code(context)
        assert isinstance(code, FixedLength)
        low, high = self._mechanism.symbol_range(context, rand) or (0, (1 << code.bits_per_symbol) - 1)
        words = torch.stack([self._words("garbage", client, symbols.shape[1]) for client in clients])
        return (low + words % (high - low + 1)).to(symbols.dtype)  # no server can refuse them


def alie_shift(num_clients: int, num_byzantine: int) -> float:
    """z of ALIE: how many standard deviations the Byzantine clients can move and still look like most.

    With s = floor(n / 2 + 1) - f honest supporters needed, the normal quantile of (n - f - s) / (n - f). If
    they are a majority by chance, that of the largest minority.
    """
    liars = min(num_byzantine, (num_clients - 1) // 2)
    if not liars:
        return 0.0
    honest, supporters = num_clients - liars, num_clients // 2 + 1 - liars
    return NormalDist().inv_cdf(min(max((honest - supporters) / honest, 1e-6), 1 - 1e-6))
