"""Account of released evaluations, `ClientEvaluation(release=...)`, beside the rounds.

In a release every client of the federation takes part, whoever was in the round before it. Its charges are in
a ledger of their own, which hangs on the federation's (`Ledger.charges_beside`), and every epsilon of the run
counts both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_fedq._lightning import callbacks_of
from lightning_fedq.byzantine.counted import num_byzantine_of
from lightning_fedq.clients.evaluation import NoisyMean
from lightning_fedq.federation.client_metrics import ClientMetricsChoice, ProtectsSamples
from lightning_fedq.federation.protocol import Federation
from lightning_fedq.mechanism import Mechanism, RoundContext
from lightning_fedq.privacy.beside import Beside
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.setting import Setting
from lightning_fedq.privacy.target import PrivacyTarget, allowed_dropouts
from lightning_fedq.rounds import RoundPlanner
from lightning_fedq.secagg import SecAgg


def release_of(federation: Federation) -> NoisyMean | None:
    """Release of clients' evaluations that a federation makes. None where it makes none."""
    settings = federation.local.evaluate_clients
    return None if settings is None else settings.release


def choice_of(federation: Federation) -> ClientMetricsChoice | None:
    """Where clients' metrics go: as asked for, and by itself nowhere if noisy ones are released."""
    asked = federation.local.client_metrics
    return "local" if asked is None and release_of(federation) is not None else asked


def everybody(planner: RoundPlanner) -> RoundPlanner:
    """Plan of the releases: every client is asked, and waited for."""
    return replace(planner, clients_per_round=None, participation="random", cohort_key=None, deadline=None)


def context_of_release(planner: RoundPlanner, mechanism: Mechanism) -> RoundContext:
    """One release, as claims see it."""
    one = torch.ones(1, dtype=torch.float64)
    return RoundContext(0, planner.plan(0, mechanism).groups, (1,), 0.0 * one, one)


def setting_of_release(
    planner: RoundPlanner,
    mechanism: Mechanism,
    secagg: SecAgg | None,
    times: int,
    delta: float,
) -> Setting:
    """Setting of some releases.

    Args:
        planner: Planner of the rounds.
        mechanism: Mechanism of the releases.
        secagg: Secure aggregation of the federation.
        times: Releases.
        delta: In (0, 1).
    """
    planner = everybody(planner)
    return Setting(
        context_of_release(planner, mechanism),
        times,
        delta,
        dropout_probability=planner.dropout_probability,
        secure_aggregation=secagg is not None,
        max_corrupt=(secagg and secagg.max_corrupt) or 0.0,
        fewest_survivors=None if secagg is None else secagg.fewest_survivors(planner.num_clients),
        num_clients=planner.num_clients,
    )


def mechanism_of_release(release: NoisyMean, planner: RoundPlanner, secagg: SecAgg | None) -> Mechanism:
    """Mechanism of a federation's releases, with noise for the dropouts that are to be expected.

    Raises:
        ValueError: If the noise has no room in a sum of integers.
    """
    plain = release.mechanism(planner.num_clients, 0)
    setting = setting_of_release(planner, plain, secagg, 1, 1e-5)
    return release.mechanism(planner.num_clients, allowed_dropouts(setting))


def beside_of(
    planner: RoundPlanner,
    mechanism: Mechanism,
    secagg: SecAgg | None,
    times: int,
    delta: float,
) -> Beside | None:
    """Account of some releases, see `setting_of_release`. None where there are none."""
    if not times:
        return None
    setting = setting_of_release(planner, mechanism, secagg, times, delta)
    what = (
        f"Clients' evaluations were released {times} times beside the rounds, every client in each, by "
        f"{mechanism!r}."
    )
    return Beside(setting.claims(mechanism), times, what)


def beside(federation: Federation, delta: float, rounds: int | None = None) -> Beside | None:
    """Account of a federation's released evaluations. None where there are none.

    Args:
        federation: The federation.
        delta: In (0, 1).
        rounds: Rounds of the run whose releases are counted, at least those that are charged. None counts
            what is charged.
    """
    settings, charged = federation.local.evaluate_clients, charged_releases(federation.ledger)
    release, planner, secagg = (
        release_of(federation),
        federation.planner,
        federation.server.secure_aggregation,
    )
    if release is None or settings is None:
        if charged:
            federation.ledger.charges_beside("")
        return None
    mechanism = mechanism_of_release(release, planner, secagg)
    federation.ledger.charges_beside(repr(mechanism))
    times = charged if rounds is None else max(charged, settings.times(rounds))
    return beside_of(planner, mechanism, secagg, times, delta)


def charged_releases(ledger: Ledger) -> int:
    """Releases that a ledger has charged its clients for."""
    return 0 if ledger.beside is None else ledger.beside.most_charged


def limit_releases(federation: Federation, counted: Beside | None) -> None:
    """Let no more be released than an epsilon has counted."""
    kept = federation.ledger.beside
    if kept is None or counted is None:
        return
    limits = torch.full((kept.num_clients,), counted.times, dtype=torch.int32)
    kept.limits = limits if kept.limits is None else torch.minimum(limits, kept.limits)


def check_release(
    federation: Federation,
    trainer: Any,
    choice: ClientMetricsChoice,
    target: PrivacyTarget | None,
) -> None:
    """Refuse what a released evaluation does not go with.

    Raises:
        ValueError: With the cure.
    """
    if release_of(federation) is None:
        beside(federation, 1e-5)  # refuses a ledger of another release
        return
    protects = [
        type(callback).__name__
        for callback in callbacks_of(trainer)
        if isinstance(callback, ProtectsSamples) and callback.protects_samples
    ]
    if protects:
        raise ValueError(
            f"{protects[0]} says what one sample of a client costs, and a released evaluation is not in it; "
            "leave release out of evaluate_clients, or leave the callback out"
        )
    if num_byzantine_of(trainer, federation.planner):
        raise ValueError(
            "clients that lie are counted in a cohort, and a released evaluation asks everybody; leave "
            "release out of evaluate_clients, or leave out ByzantineClients"
        )
    if choice == "shared" and federation.seed is None:
        raise ValueError(
            "client_metrics='shared' logs what clients measure without noise, and release adds noise to it; "
            "use client_metrics='local', or leave release out of evaluate_clients"
        )
    if target is not None and target.over == "round":
        raise ValueError(
            "a target over='round' says nothing of what is released between rounds; use over='run', or leave "
            "release out of evaluate_clients"
        )
