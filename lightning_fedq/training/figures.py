"""Figures of a run so far, as loggers get them after a round: epsilon, bits a parameter, megabytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_fedq._lightning import callbacks_of, pl
from lightning_fedq.algorithms.byzantine.counted import num_byzantine_of
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import closed_form
from lightning_fedq.reports.runs import BITS_PER_MEGABYTE
from lightning_fedq.rounds import RoundRecord
from lightning_fedq.training.described import whole_run

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation

FIGURES = ("fed/epsilon", "fed/sim_epsilon", "fed/delta", "fed/bits_per_parameter", "fed/megabytes_up")
_LARGEST_DELTA = 1e-5
_FIRST_PRICED = 32
"""A grid's epsilon takes half a round of 1,000 clients: from here on, below 2% of all rounds before it."""


def delta_of(federation: Federation, trainer: pl.Trainer) -> float:
    """Delta of all that a run says of its clients: its target's, its folder's or budget's, or the usual one.

    Args:
        trainer: Its callbacks ask for a delta by `clients_delta`.

    Raises:
        ValueError: If two of them ask for different ones.
    """
    target, usual = federation.privacy_target, min(_LARGEST_DELTA, 0.1 / federation.planner.num_clients)
    said: list[float | None] = [
        getattr(callback, "clients_delta", None) for callback in callbacks_of(trainer)
    ]
    asked = {delta for delta in (*said, None if target is None else target.delta) if delta is not None}
    if len(asked) > 1:
        raise ValueError(
            f"the epsilons of a run's clients are all said at one delta, got {sorted(asked)}; give target, "
            "budget and RunFolder the same one, or leave the RunFolder's out"
        )
    return asked.pop() if asked else usual


class RunFigures:
    """Figures of a federation's rounds.

    Where an epsilon has no closed form it takes milliseconds, so it is known after rounds 32, 64, ... and the
    last one only. An older one is never shown in its place. With keys from a seed it is what secret keys
    would give, and its name says so.

    Args:
        federation: The federation, with its server.
        trainer: Its Trainer.
    """

    def __init__(self, federation: Federation, trainer: pl.Trainer) -> None:
        self._federation, self._trainer = federation, trainer
        self._megabytes, self._costs = 0.0, dict[str, tuple[Account, PrivacyClaim]]()
        self._counted = any(hasattr(callback, "epsilon_spent") for callback in callbacks_of(trainer))
        self.vector_changed()

    def vector_changed(self) -> None:
        """Price the rounds again: parameters have joined or left."""
        federation, target = self._federation, self._federation.privacy_target
        self._costs = {}
        if self._counted or federation.clients.cohorts == "secret":
            return  # a budget logs its own; and who was charged would tell who was drawn
        assert federation.engine is not None
        to_come = (self._trainer.max_epochs or 0) - self._trainer.current_epoch
        # half of delta pays for unlucky rounds, of as many as there will be
        if to_come < 0 and federation.planner.dropout_probability:
            return
        horizon = max(federation.engine.ledger.paid[0] + to_come, 1)
        byzantine = num_byzantine_of(self._trainer, federation.planner)
        run = whole_run(federation, federation.engine, byzantine, horizon)
        account = Account(run, delta_of(federation, self._trainer))
        groups = run.mechanism.protection_groups(run.num_clients)
        if len(groups) > 1:
            return  # every kind of clients has an epsilon of its own: the report says them
        sums = run.threat.secure_sum
        for who, claim in account.claims().items():
            if target is None or who is not target.against or isinstance(claim.loss, NonPrivate):
                continue  # without a target the six stand in the report at the end
            masked = who is not Adversary.SECAGG_SERVER or (sums is not None and sums.ran)
            true = run.threat.secure_keys and masked
            self._costs["fed/epsilon" if true else "fed/sim_epsilon"] = account, claim

    def after(self, record: RoundRecord) -> dict[str, float]:
        """Figures after a round, by name, NaN where one is not computed after this round."""
        engine, last = self._federation.engine, self._trainer.max_epochs
        assert engine is not None
        self._megabytes += (record.uplink_bits + record.setup_bits) / BITS_PER_MEGABYTE
        values = {"fed/megabytes_up": self._megabytes}
        if record.num_received:
            values["fed/bits_per_parameter"] = (
                record.uplink_bits / record.num_received / engine.weights.numel()
            )
        count = record.round + 1
        sparse = count == last or (count >= _FIRST_PRICED and count & (count - 1) == 0)
        charges = int(engine.ledger.paid[1].max())
        for name, (account, claim) in self._costs.items():
            values["fed/delta"] = account.delta
            known = sparse or closed_form(claim.loss)
            values[name] = account.between_any_two(claim, charges) if known else math.nan
        return values


def of_all(rows: list[tuple[str, float]], masked: bool) -> dict[str, float]:
    """Epsilon of a finished run with secure keys towards every adversary, by name, where it is finite.

    Args:
        rows: Adversaries by name, with an epsilon each.
        masked: Whether the masks of secure aggregation really ran; else that row's name says "sim".
    """
    found = {}
    for who, value in rows:
        prefix = "fed/epsilon" if masked or who != Adversary.SECAGG_SERVER.name else "fed/sim_epsilon"
        if math.isfinite(value):
            found[f"{prefix}_{who.lower()}"] = value
    return found
