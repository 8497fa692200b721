"""A federation as the parts see it that it hands itself to: its settings, its server, what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lightning_fedq._lightning import pl
from lightning_fedq.data.batches import BatchRule
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundEngine, RoundPlanner, RoundRecord
from lightning_fedq.training.metrics import ClientMetrics
from lightning_fedq.training.settings import Clients, Local, Server

if TYPE_CHECKING:
    from lightning_fedq.training.privacy_target import KeptTarget


class Federation(Protocol):
    """The callback `Federated`, which documents these, without its hooks."""

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

    @property
    def privacy_target(self) -> PrivacyTarget | None:
        """Epsilon that was asked for, and towards whom. None without a target."""

    @property
    def engine(self) -> RoundEngine | None:
        """The rounds. None before the first fit."""

    @property
    def records(self) -> Sequence[RoundRecord]:
        """One of each finished round."""

    @property
    def client_log(self) -> ClientMetrics | None:
        """Metrics that clients log in training. None before the first fit."""

    def plan_by(self, seed: int) -> None:
        """Draw cohorts and shares of the data by a seed."""

    def meet_target(self, trainer: pl.Trainer, dim: int, saved: dict[str, Any] | None) -> None:
        """Set the mechanism to the privacy target, if there is one, or to what a checkpoint says."""

    def identity(self) -> dict[str, str]:
        """Fingerprint that a checkpoint must agree with, in words."""

    def vector_changed(self) -> None:
        """Tell whoever asked for it that parameters have joined or left."""
