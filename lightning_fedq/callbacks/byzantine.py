"""`ByzantineClients`: some clients of a simulation lie, in their data, their updates or on the wire.

Byzantine clients are the same in every round, and they collude: they know each other's honest updates and
those of the honest clients of the round (the strongest adversary of the literature). Whoever attacks with
statistics answers last. What they can do is stated in `byzantine.attacks`. Behind which coin they do it
matters: an update attack goes through the mechanism like any update, a wire attack does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms.byzantine import attacks
from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation
from lightning_fedq.callbacks.of_trainer import federated_of
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys, Stream
from lightning_fedq.mechanisms.interface import Mechanism, Message, RoundContext
from lightning_fedq.rounds import RoundPlan
from lightning_fedq.training.client_metrics import log_figure
from lightning_fedq.wire.coding import FixedLength

UpdateAttack = Literal["sign_flip", "constant", "random", "gaussian", "alie", "ipm", "mimic"]
WireAttack = Literal["ones", "flip", "inverted", "inverted_without_coin", "copied", "garbage"]
Attack = Literal[UpdateAttack, WireAttack, "label_flip"]


class ByzantineClients(pl.Callback):
    """Byzantine clients: a fixed fraction lies by one of the attacks of the literature.

    A message that does not decode to numbers is refused, as a server refuses it from a wire, and its client
    counts as one that dropped out.

    Args:
        fraction: Share of all clients, in [0, 1); their number is rounded to the nearest.
        attack: What they do; see `byzantine.attacks`. "label_flip" trains on labels counted backwards.
        scale: Strength of sign_flip, constant, random, gaussian, ipm (in units of the update) and of alie
            (standard deviations; 0 takes the paper's).
        num_classes: Number of labels, for label_flip only.
        seed: Seed of the choice of byzantine clients and of their randomness; >= 0.

    Attributes:
        byzantine: Byzantine clients, from `on_fit_start` on.

    Raises:
        ValueError: If a setting is out of its range, or the attack does not fit the mechanism.

    Example:
        >>> liars = ByzantineClients(0.2, "sign_flip")  # behind Federated in trainer.callbacks
    """

    only_simulated = True
    knows_clients = True
    crosses_clients = True
    """Byzantine clients flip the labels of batches in their own training."""

    def __init__(
        self,
        fraction: float,
        attack: Attack,
        *,
        scale: float = 1.0,
        num_classes: int | None = None,
        seed: int = 0,
    ) -> None:
        if not 0.0 <= fraction < 1.0:
            raise ValueError(f"fraction must be in [0, 1), got {fraction}")
        known = (*get_args(UpdateAttack), *get_args(WireAttack), "label_flip")
        if attack not in known:
            raise ValueError(f"attack must be one of {', '.join(known)}, got {attack!r}")
        if (attack == "label_flip") != (num_classes is not None):
            raise ValueError("num_classes goes with label_flip, and label_flip needs it")
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}; a NaN client is tested by its update")
        self.fraction, self.attack, self.scale = fraction, attack, scale
        self.num_classes, self.seed = num_classes, seed
        self.byzantine: frozenset[int] = frozenset()

    def num_byzantine(self, num_clients: int) -> int:
        """Number of Byzantine clients among so many."""
        return math.floor(self.fraction * num_clients + 0.5)

    # ---- Lightning ----------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the Byzantine clients and stand between training and the wire."""
        federated = federated_of(trainer, "ByzantineClients")
        engine = federated.engine
        if engine is None:
            raise ValueError("ByzantineClients must come after Federated in the Trainer's callbacks")
        number = self.num_byzantine(federated.clients.num_clients)
        stream = PublicRandomness(SeededKeys(self.seed), 0).public("liars")
        self.byzantine = frozenset(stream.choice(federated.clients.num_clients, number))
        self._mechanism = federated.mechanism
        context = engine.context(engine.coming_plan())
        self._check_mechanism(context)
        self._lever = lever_of(self._mechanism, context)
        if isinstance(engine.aggregator, RobustAggregation):
            share = len(self.byzantine) / federated.clients.num_clients
            engine.aggregator.warn_if_broken(engine.planner.cohort_size, share)
        engine.tampering = self

    def _check_mechanism(self, context: RoundContext) -> None:
        name, code = type(self._mechanism).__name__, self._mechanism.code(context)
        one_bit = code == FixedLength(1)
        if self.attack in ("ones", "flip", "inverted", "inverted_without_coin") and not one_bit:
            raise ValueError(
                f"{self.attack} is an attack on one-bit messages, {name} sends others; use garbage"
            )
        if self.attack == "garbage" and not isinstance(code, FixedLength):
            raise ValueError(
                f"garbage needs symbols of fixed length, {name} has a {type(code).__name__} code"
            )
        if self.attack == "inverted_without_coin":
            self._mechanism.without_noise(context)

    def state_dict(self) -> dict[str, Any]:
        """Who lies, for the privacy report of a checkpoint. Nothing is read back."""
        return {"byzantine": sorted(self.byzantine)}

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Step aside."""
        self._step_aside(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Step aside. Lightning calls no `teardown` then."""
        self._step_aside(trainer)

    def _step_aside(self, trainer: pl.Trainer) -> None:
        engine = federated_of(trainer, "ByzantineClients").engine
        if engine is not None and engine.tampering is self:
            engine.tampering = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """label_flip: label y becomes num_classes - 1 - y in the Byzantine clients' batches."""
        if self.num_classes is None:
            return
        labels, clients = batch[1], federated_of(trainer, "ByzantineClients").training_clients
        if len(clients) == 1:
            labels = labels[None]
        for row, client in enumerate(clients):
            if client in self.byzantine:
                labels[row].neg_().add_(self.num_classes - 1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log how many lie, and the lever that the coin gives each of them."""
        if trainer.barebones:
            return
        log_figure(pl_module, "byzantine/num_byzantine", float(len(self.byzantine)))
        if self._lever is not None:
            log_figure(pl_module, "byzantine/lever", self._lever)

    # ---- rounds.Tampering -----------------------------------------------------------------------------

    def begin(self, plan: RoundPlan, context: RoundContext) -> None:
        """Forget what an earlier round held back."""
        self._plan, self._context = plan, context
        self._held: list[tuple[int, Tensor]] = []
        self._first: Tensor | None = None
        self._sum: Tensor | None = None
        self._squares: Tensor | None = None
        self._count = 0
        self._seen: dict[int, Tensor] = {}
        partners = {c for group in plan.groups if self.byzantine & set(group) for c in group}
        self._partners = partners - self.byzantine

    def hold(self, clients: Sequence[int], updates: Tensor) -> tuple[Sequence[int], Tensor]:
        """Keep the Byzantine clients' rows back, and return the others."""
        # of the honest updates only running sums and the first are kept
        honest = [row for row, client in enumerate(clients) if client not in self.byzantine]
        self._held += [(c, updates[row].clone()) for row, c in enumerate(clients) if c in self.byzantine]
        rows = updates[honest]
        if honest and self.attack in ("alie", "ipm", "mimic"):
            if self._sum is None or self._squares is None:
                self._first = rows[0].clone()
                self._sum, self._squares = torch.zeros_like(rows[0]), torch.zeros_like(rows[0])
            self._sum += rows.sum(0)
            self._squares += rows.square().sum(0)
            self._count += len(honest)
        return [clients[row] for row in honest], rows

    def release(self) -> tuple[Sequence[int], Tensor]:
        """Return the Byzantine clients, once everybody else has answered, and what they feed the encoder."""
        if not self._held:
            return [], torch.empty(0)
        clients = [client for client, _ in self._held]
        updates = torch.stack([update for _, update in self._held])
        self._held = []
        return clients, self._attacked(updates)

    def _attacked(self, updates: Tensor) -> Tensor:
        size = len(updates)
        if self.attack == "sign_flip":
            return attacks.sign_flip(updates, self.scale)
        if self.attack == "constant":
            return attacks.constant(updates, self.scale)
        if self.attack == "random":
            uniforms = torch.from_numpy(self._stream("random").uniforms(updates.numel()))
            return attacks.uniform_noise(
                updates, self.scale, uniforms.reshape(updates.shape).to(updates.device)
            )
        if self.attack == "gaussian":
            uniforms = torch.from_numpy(self._stream("gaussian").uniforms(updates.numel()))
            normals = torch.special.ndtri(uniforms).reshape(updates.shape)
            return attacks.gaussian_noise(updates, self.scale, normals)
        if self._sum is None or self._squares is None or self._first is None:
            return updates  # nobody honest answered: there is nothing to imitate, and nothing to spoil
        mean = self._sum / self._count
        if self.attack == "alie":
            std = (self._squares / self._count - mean.square()).clamp(min=0.0).sqrt()
            shift = self.scale or self._alie_shift(self._count + size, size)
            return attacks.a_little_is_enough(mean, std, size, shift)
        if self.attack == "ipm":
            return attacks.inner_product_manipulation(mean, size, self.scale)
        if self.attack == "mimic":
            return attacks.mimic(self._first, size)
        return updates

    @staticmethod
    def _alie_shift(num_clients: int, num_byzantine: int) -> float:
        """Shift of the paper. If Byzantine clients are a majority by chance, of the largest minority."""
        minority = min(num_byzantine, (num_clients - 1) // 2)
        return attacks.alie_shift(num_clients, minority) if minority else 0.0

    def send(
        self,
        clients: Sequence[int],
        values: Tensor,
        message: Message,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> Message:
        """Return what goes on the wire in place of `message`."""
        # stacks are all honest or all lies
        symbols = message.symbols
        if not self.byzantine.intersection(clients):
            if self.attack == "copied":
                for row, client in enumerate(clients):
                    if client in self._partners or not self._seen:
                        self._seen[client] = symbols[row].clone()
            return message
        return replace(message, symbols=self._lie(clients, values, symbols, context, rand))

    def _lie(
        self,
        clients: Sequence[int],
        values: Tensor,
        symbols: Tensor,
        context: RoundContext,
        rand: ClientRandomness,
    ) -> Tensor:
        if self.attack == "ones":
            return attacks.all_ones(symbols)
        if self.attack == "flip":
            coins = torch.from_numpy(self._stream("flip").words(symbols.numel()) < 2**31)
            return attacks.coin_flipped(symbols, coins.reshape(symbols.shape))
        if self.attack == "inverted":
            return attacks.inverted(symbols)
        if self.attack == "inverted_without_coin":
            honest = self._mechanism.without_noise(context).encode(values, context, rand)
            return attacks.inverted(honest.symbols)
        if self.attack == "garbage":
            code = self._mechanism.code(context)
            assert isinstance(code, FixedLength)
            words = torch.from_numpy(self._stream("garbage").words(symbols.numel()).astype("int64"))
            limits = self._mechanism.symbol_range(context, rand) or (0, (1 << code.bits_per_symbol) - 1)
            return attacks.garbage(symbols, words.reshape(symbols.shape), *limits)
        if self.attack == "copied" and self._seen:
            return torch.stack([self._partner_of(client, context) for client in clients])
        return symbols

    def _partner_of(self, client: int, context: RoundContext) -> Tensor:
        """The bits of an honest member of the client's group, or of the first honest client."""
        for member in context.place(client)[0]:
            if member in self._seen:
                return self._seen[member]
        return next(iter(self._seen.values()))

    def _stream(self, purpose: str) -> Stream:
        return PublicRandomness(SeededKeys(self.seed), self._plan.round, self._context.attempt).public(
            purpose
        )


def lever_of(mechanism: Mechanism, context: RoundContext) -> float | None:
    """The longest lever of any client of the round, see `Mechanism.lever`. None where one is not known."""
    levers = [mechanism.lever(client, context) for client in context.cohort]
    known = [lever for lever in levers if lever is not None]
    return max(known) if len(known) == len(levers) else None
