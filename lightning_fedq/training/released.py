"""Account of released evaluations, `ClientEvaluation(release=...)`, beside the rounds.

In a release every client of the federation takes part, whoever was in the round before it. Its charges are in
a ledger of their own, which hangs on the federation's (`Ledger.charges_beside`), and every epsilon of the run
counts both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fedq._lightning import callbacks_of
from lightning_fedq.algorithms.byzantine.counted import num_byzantine_of
from lightning_fedq.privacy.run import Run
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.training.client_metrics import ClientMetricsChoice, protecting_samples
from lightning_fedq.training.described import release_of, releases_of

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation


def choice_of(federation: Federation) -> ClientMetricsChoice | None:
    """Where clients' metrics go: as asked for, and by itself nowhere if noisy ones are released."""
    asked = federation.local.client_metrics
    return "local" if asked is None and release_of(federation) is not None else asked


def limit_releases(federation: Federation, counted: Run | None) -> None:
    """Let no more be released than an epsilon has counted."""
    kept = federation.ledger.beside
    if kept is None or counted is None or not counted.rounds:
        return
    limits = torch.full((kept.num_clients,), counted.rounds, dtype=torch.int32)
    kept.limits = limits if kept.limits is None else torch.minimum(limits, kept.limits)


def check_release(
    federation: Federation, trainer: Any, choice: ClientMetricsChoice, target: PrivacyTarget | None
) -> None:
    """Refuse what a released evaluation does not go with.

    Raises:
        ValueError: With the cure.
    """
    if release_of(federation) is None:
        releases_of(federation, None)  # refuses a ledger of another release
        return
    check_samples(federation, callbacks_of(trainer))
    if num_byzantine_of(trainer, federation.planner):
        raise ValueError(
            "clients that lie are counted in a cohort, and a released evaluation asks everybody; leave "
            "release out of evaluate_clients, or leave out ByzantineClients"
        )
    check_exact(federation, choice)
    if target is not None and target.over == "round":
        raise ValueError(
            "a target over='round' says nothing of what is released between rounds; use over='run', or leave "
            "release out of evaluate_clients"
        )


def check_samples(federation: Federation, callbacks: Sequence[object]) -> None:
    """Refuse releases beside a claim about single samples.

    Raises:
        ValueError: With the cure.
    """
    protects = protecting_samples(callbacks)
    if protects and release_of(federation) is not None:
        raise ValueError(
            f"{type(protects[0]).__name__} says what one sample of a client costs, and a released evaluation "
            "is not in it; leave release out of evaluate_clients, or leave the callback out"
        )


def check_exact(federation: Federation, choice: ClientMetricsChoice | None) -> None:
    """Refuse to let out with noise, and without it, too.

    Raises:
        ValueError: With the cure.
    """
    if release_of(federation) is not None and choice == "shared" and federation.seed is None:
        raise ValueError(
            "client_metrics='shared' logs what clients measure without noise, and release adds noise to it; "
            "use client_metrics='local', or leave release out of evaluate_clients"
        )
