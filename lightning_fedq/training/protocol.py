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
from lightning_fedq.training.client_metrics import ClientMetricsChoice
from lightning_fedq.training.settings import Clients, Local, Server

if TYPE_CHECKING:
    from lightning_fedq.training.privacy_target import KeptTarget


class ClientLog(Protocol):
    """Metrics that clients log in training.

    Attributes:
        names: Names of the metrics, in order.
    """

    names: dict[str, None]

    @property
    def choice(self) -> ClientMetricsChoice:
        """Where they go."""


class Federation(Protocol):
    """The callback `Federated`, without its hooks.

    Attributes:
        mechanism: The mechanism, as a privacy target has set it.
    """

    mechanism: Mechanism

    @property
    def clients(self) -> Clients:
        """Settings of who takes part."""

    @property
    def local(self) -> Local:
        """Settings of what a client does."""

    @property
    def server(self) -> Server:
        """Settings of what the server does."""

    @property
    def planner(self) -> RoundPlanner:
        """Clients and cohorts."""

    @property
    def seed(self) -> int | None:
        """Source of all keys. None takes secure ones."""

    @property
    def ledger(self) -> Ledger:
        """Charges of every client."""

    @property
    def owns_ledger(self) -> bool:
        """Was the ledger made here, not handed on?"""

    @property
    def kept_target(self) -> KeptTarget | None:
        """The privacy target through the fits."""

    @property
    def privacy_target(self) -> PrivacyTarget | None:
        """Epsilon that was asked for, and towards whom. None without a target."""

    @property
    def batch_rule(self) -> BatchRule | None:
        """Draws the clients' batches. None takes whole passes."""

    @property
    def engine(self) -> RoundEngine | None:
        """The rounds. None before the first fit."""

    @property
    def records(self) -> Sequence[RoundRecord]:
        """One of each finished round."""

    @property
    def client_log(self) -> ClientLog | None:
        """Metrics that clients log in training. None before the first fit."""

    def plan_by(self, seed: int) -> None:
        """Draw cohorts and shares of the data by a seed."""

    def meet_target(self, trainer: pl.Trainer, dim: int, saved: dict[str, Any] | None) -> None:
        """Set the mechanism to the privacy target, if there is one, or to what a checkpoint says."""

    def identity(self) -> dict[str, str]:
        """Fingerprint that a checkpoint must agree with, in words."""

    def vector_changed(self) -> None:
        """Tell whoever asked for it that parameters have joined or left."""
