"""`ByzantineClients`: simulated clients that send wrong updates or wrong messages.

The Byzantine clients are the same in every round. An attack on updates goes through the mechanism, with its
clipping and noise. An attack on messages replaces the mechanism's output. More attacks from the literature
are in `reproductions/cpa/liars.py`, as a subclass.

References:
    Lang et al., CPA: Compressed Private Aggregation, section 5 (ones, flip).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import Mechanism, Message, RoundContext
from lightning_fedq.rounds import RoundPlan
from lightning_fedq.rounds.protocols import Tampering
from lightning_fedq.training.client_metrics import log_figure
from lightning_fedq.wire.coding import FixedLength

Attack = Literal["sign_flip", "ones", "flip", "inverted", "inverted_without_coin"]
_ON_BITS = ("ones", "flip", "inverted", "inverted_without_coin")


class ByzantineClients(pl.Callback, Tampering):
    """Byzantine clients: a fixed fraction of the clients makes the same attack in every round.

    "sign_flip" replaces an update by -scale times the update, before it is encoded. The other attacks are on
    one-bit messages. "ones" sends ones. "flip" flips each bit with probability 1/2. The CPA paper describes
    these two as noise of mean zero. "inverted" flips all bits. "inverted_without_coin" flips all bits of a
    message that was encoded without the randomised bits that make honest clients private. Such a message
    counts as much as 1 / tanh(epsilon / 2) honest messages (the maximum influence of one client).

    Args:
        fraction: Fraction of clients that are Byzantine, in [0, 1). Their number is rounded to the nearest
            integer.
        attack: Attack that the Byzantine clients make: "sign_flip", "ones", "flip", "inverted" or
            "inverted_without_coin".
        scale: Factor of the "sign_flip" attack, finite.
        seed: Seed that selects the Byzantine clients and draws their random numbers, >= 0.

    Attributes:
        byzantine: The Byzantine clients, from `on_fit_start` on.

    Raises:
        ValueError: If a setting is out of its range, or if the attack does not fit the mechanism.

    Examples:
        >>> liars = ByzantineClients(0.2, "sign_flip")  # behind Federated in trainer.callbacks
    """

    only_simulated = True
    knows_clients = True
    attacks: tuple[str, ...] = get_args(Attack)

    def __init__(self, fraction: float, attack: Attack, *, scale: float = 1.0, seed: int = 0) -> None:
        if not 0.0 <= fraction < 1.0:
            raise ValueError(f"fraction must be in [0, 1), got {fraction}")
        if attack not in self.attacks:
            raise ValueError(f"attack must be one of {', '.join(self.attacks)}, got {attack!r}")
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}. To test a NaN, put it into an update.")
        self.fraction, self.scale, self.seed = fraction, scale, seed
        self.attack: str = attack
        self.byzantine: frozenset[int] = frozenset()

    def num_byzantine(self, num_clients: int) -> int:
        """Return the number of Byzantine clients in a federation of `num_clients`."""
        return math.floor(self.fraction * num_clients + 0.5)

    # ---- Lightning ----------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the Byzantine clients, and intercept updates and messages of the round engine."""
        federated = find_federated(trainer, "ByzantineClients")
        engine = federated.engine
        if engine is None:
            raise ValueError("ByzantineClients must come after Federated in the Trainer's callbacks")
        number = self.num_byzantine(federated.clients.num_clients)
        stream = PublicRandomness(SeededKeys(self.seed), 0).public("liars")
        self.byzantine = frozenset(stream.choice(federated.clients.num_clients, number))
        self._mechanism = federated.mechanism
        context = engine.context(engine.next_plan())
        self._check_mechanism(context)
        self._influence = max_influence(self._mechanism, context)
        if isinstance(engine.aggregator, RobustAggregation):
            share = len(self.byzantine) / federated.clients.num_clients
            engine.aggregator.warn_if_broken(engine.planner.cohort_size, share)
        engine.tampering = self

    def _check_mechanism(self, context: RoundContext) -> None:
        if self.attack in _ON_BITS and self._mechanism.code(context) != FixedLength(1):
            raise ValueError(
                f"{self.attack} needs one-bit messages, but {type(self._mechanism).__name__} sends others. "
                "Use sign_flip."
            )
        if self.attack == "inverted_without_coin":
            self._mechanism.without_noise(context)

    def state_dict(self) -> dict[str, Any]:
        """Return the Byzantine clients for a checkpoint's privacy report. They are not loaded again."""
        return {"byzantine": sorted(self.byzantine)}

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop intercepting messages."""
        engine = find_federated(trainer, "ByzantineClients").engine
        if engine is not None and engine.tampering is self:
            engine.tampering = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Stop intercepting messages, because Lightning calls no `teardown` after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the number of Byzantine clients and the maximum influence of each."""
        if trainer.barebones:
            return
        log_figure(pl_module, "byzantine/num_byzantine", float(len(self.byzantine)))
        if self._influence is not None:
            log_figure(pl_module, "byzantine/lever", self._influence)

    # ---- rounds.Tampering -----------------------------------------------------------------------------

    def begin(self, plan: RoundPlan, context: RoundContext) -> None:
        """Remember the plan and the context of the round."""
        self._plan, self._context = plan, context

    def hold(self, clients: Sequence[int], updates: Tensor) -> tuple[Sequence[int], Tensor]:
        """Multiply the Byzantine clients' updates by -scale if the attack is "sign_flip".

        Args:
            clients: Clients of the rows of `updates`.
            updates: Updates `(len(clients), dim)`, changed in place.

        Returns:
            All clients and their updates. This attack holds no client back.
        """
        if self.attack == "sign_flip":
            updates[self._rows(clients)] *= -self.scale
        return clients, updates

    def send(
        self,
        clients: Sequence[int],
        values: Tensor,
        message: Message,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> Message:
        """Return the message that clients send in place of the honest `message`.

        Args:
            clients: Clients of the rows of `values` and of the message.
            values: Updates that are encoded, `(len(clients), dim)`.
            message: The honest message.
            context: Context of the round.
            rand: Randomness with which the honest message was encoded.
        """
        rows = self._rows(clients)
        lies = self._lies(clients, values, message.symbols, context, rand) if rows else None
        if lies is None:
            return message
        symbols = message.symbols.clone()
        symbols[rows] = lies[rows]
        return replace(message, symbols=symbols)

    def _lies(
        self,
        clients: Sequence[int],
        values: Tensor,
        symbols: Tensor,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> Tensor | None:
        """Return attack symbols for all given clients, `(len(clients), m)`, or None for honest messages."""
        if self.attack == "ones":
            return torch.ones_like(symbols)
        if self.attack == "flip":
            coins = [self._words("flip", client, symbols.shape[1]) < 2**31 for client in clients]
            return symbols ^ torch.stack(coins).to(symbols)
        if self.attack == "inverted":
            return 1 - symbols
        if self.attack == "inverted_without_coin":
            return 1 - self._mechanism.without_noise(context).encode(values, context, rand).symbols
        return None

    def _rows(self, clients: Sequence[int]) -> list[int]:
        """Return the rows of the Byzantine clients among the given clients."""
        return [row for row, client in enumerate(clients) if client in self.byzantine]

    def _words(self, purpose: str, client: int, count: int) -> Tensor:
        """Return random 32-bit words of a Byzantine client in this round, `(count,)` int64."""
        public = PublicRandomness(SeededKeys(self.seed), self._plan.round, self._context.attempt)
        return torch.from_numpy(public.public(f"{purpose} {client}").words(count).astype("int64"))


def max_influence(mechanism: Mechanism, context: RoundContext) -> float | None:
    """Return the maximum influence of any client of the round (`Mechanism.influence`), or None if unknown."""
    influences = [mechanism.influence(client, context) for client in context.cohort]
    known = [influence for influence in influences if influence is not None]
    return max(known) if len(known) == len(influences) else None
