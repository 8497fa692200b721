"""A federation as the parts see it that it hands itself to: its settings, its server, what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightning_fedq.federation.client_metrics import ClientMetricsChoice
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import Cohorts, RoundEngine, RoundPlanner, RoundRecord
from lightning_fedq.secagg import SecAgg


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
    """The callback `Federated`, without its hooks."""

    @property
    def planner(self) -> RoundPlanner:
        """Clients and cohorts."""

    @property
    def secure_aggregation(self) -> SecAgg | None:
        """Masks of the messages. None where the server sees each."""

    @property
    def privacy_target(self) -> PrivacyTarget | None:
        """Epsilon that was asked for, and towards whom. None without a target."""

    @property
    def cohorts(self) -> Cohorts:
        """May anybody learn who took part?"""

    @property
    def seed(self) -> int | None:
        """Source of all keys. None takes secure ones."""

    @property
    def weighting(self) -> str:
        """Weights of the clients in the mean."""

    @property
    def plain_sum(self) -> bool:
        """Does the server use the sum of the decoded updates, all weighted alike, and nothing else?"""

    @property
    def ledger(self) -> Ledger:
        """Charges of every client."""

    @property
    def engine(self) -> RoundEngine | None:
        """The rounds. None before the first fit."""

    @property
    def records(self) -> Sequence[RoundRecord]:
        """One of each finished round."""

    @property
    def client_log(self) -> ClientLog | None:
        """Metrics that clients log in training. None before the first fit."""
