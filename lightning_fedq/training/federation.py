"""A federation: its settings, its ledger and target, its server and what came of it, without hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_fedq._lightning import pl
from lightning_fedq.clients.constraints import shown
from lightning_fedq.clients.undo import Undo

if TYPE_CHECKING:
    from lightning_fedq.data.batches import BatchRule
    from lightning_fedq.mechanisms.interface import Mechanism
    from lightning_fedq.privacy.ledger import Ledger
    from lightning_fedq.privacy.target import Calibration, PrivacyTarget
    from lightning_fedq.rounds import RoundEngine, RoundPlanner, RoundRecord
    from lightning_fedq.training.client_evaluation import EvaluatedClients
    from lightning_fedq.training.metrics import ClientMetrics
    from lightning_fedq.training.privacy_target import KeptTarget
    from lightning_fedq.training.settings import Clients, Local, Server


class Federation:
    """Base of `Federated`: all that parts of a fit and other callbacks need to know of it.

    Attributes:
        engine: The round engine. None before the first fit.
        records: One record for every finished round.
        client_log: Metrics that clients have logged in training, and where they went. None before the first
            fit.
        client_evaluations: Measurements on clients' held-out samples, of this process's rounds.
        clients_per_step_chosen: Number of clients that train side by side, from `on_fit_start` on. 0 before.
    """

    mechanism: Mechanism
    clients: Clients
    local: Local
    server: Server
    planner: RoundPlanner
    seed: int | None
    ledger: Ledger
    owns_ledger: bool
    kept_target: KeptTarget | None
    batch_rule: BatchRule | None
    engine: RoundEngine | None
    records: list[RoundRecord]
    client_log: ClientMetrics | None
    client_evaluations: list[EvaluatedClients]
    clients_per_step_chosen: int
    _followers: list[Callable[[], None]]
    _undo: Undo

    def when_vector_changes(self, call: Callable[[], None]) -> None:
        """Be called, until this fit is over, when parameters have joined or left. Raise to stop there."""
        self._undo.replace(self, "_followers", [*self._followers, call])

    def vector_changed(self) -> None:
        """Tell whoever asked for it that parameters have joined or left."""
        for call in self._followers:
            call()

    def plan_by(self, seed: int) -> None:
        """Draw cohorts and shares of the data by a seed."""
        self.planner = replace(self.planner, seed=seed)

    # ---- privacy target ---------------------------------------------------------------------------

    def meet_target(self, trainer: pl.Trainer, dim: int, saved: dict[str, Any] | None) -> None:
        """Set the mechanism to the privacy target, if there is one, or to what a checkpoint says."""
        if self.kept_target is None:
            return
        self.mechanism = self.kept_target.begin(self, trainer, dim, saved).mechanism
        if not self.ledger.rounds:  # nothing is charged for the mechanism as it was given
            self.ledger.mechanism = repr(self.mechanism)

    def calibrated(self, dim: int, rounds: int, num_byzantine: int) -> Mechanism:
        """The mechanism as a privacy target would set it for so many parameters and rounds, or as it is.

        Raises:
            ValueError: If the target can't be met; with what could be.
        """
        if self.kept_target is None:
            return self.mechanism
        return self.kept_target.calibrate(self, dim, rounds, num_byzantine).mechanism

    @property
    def privacy_target(self) -> PrivacyTarget | None:
        """Epsilon that was asked for, and towards whom. None without a target."""
        return None if self.kept_target is None else self.kept_target.target

    @property
    def calibration(self) -> Calibration | None:
        """Solution of the privacy target, from `on_fit_start` on."""
        return None if self.kept_target is None else self.kept_target.found

    def identity(self) -> dict[str, str]:
        """Fingerprint that a checkpoint must agree with, in words."""
        clients, local, server = self.clients, self.local, self.server
        rule = clients.available
        return {
            "mechanism": repr(self.mechanism),
            "num_clients": str(clients.num_clients),
            "clients_per_round": str(self.planner.cohort_size),
            "participation": clients.participation,
            "dropout_probability": str(clients.dropout_probability),
            **({} if clients.deadline is None else {"deadline": repr(clients.deadline)}),
            **({} if rule is None else {"available": getattr(rule, "__qualname__", type(rule).__name__)}),
            "weighting": server.weighting,
            "aggregator": repr(server.aggregator),
            "secure_aggregation": repr(server.secure_aggregation),
            "partition": repr(clients.partition),
            "target": server.target,
            **({} if server.broadcast_bits is None else {"broadcast_bits": str(server.broadcast_bits)}),
            "buffers": local.buffers,
            **({"local": repr(local.patterns)} if local.patterns else {}),
            **({"shared": repr(local.shared)} if local.shared else {}),
            **({"constraints": shown(local.constraints)} if local.constraints else {}),
            **({} if local.statistics is None else {"statistics": repr(local.statistics)}),
            "seed": str(self.seed),
            "batches": "passes" if self.batch_rule is None else type(self.batch_rule).__name__,
            **({} if local.algorithm is None else {"algorithm": repr(local.algorithm)}),
            **({} if local.evaluate_clients is None else local.evaluate_clients.identity()),
        }
