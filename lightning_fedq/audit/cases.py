"""Settings in which the audit attacks the claims of a mechanism.

`audit_cases` derives them from what the mechanism clips, from its level and from its claims. Mechanisms with
parameters that decide how closely a claim can be proven have a function of their own, which other packages
register in the same way:

    @audit_cases.register
    def _(mechanism: MyMechanism, dim: int) -> tuple[AuditCase, ...]:
        return (AuditCase(replace(mechanism, bits=1)),)
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import singledispatch
from typing import Any

from lightning_fedq.audit.audit_case import AuditCase
from lightning_fedq.mechanisms.adaptive_clip import AdaptiveClip
from lightning_fedq.mechanisms.banded_gaussian import BandedGaussian
from lightning_fedq.mechanisms.bases.exact_error import ExactError
from lightning_fedq.mechanisms.bases.subsampled import SubsampledMechanism
from lightning_fedq.mechanisms.contract_suite.manual_round import make_context
from lightning_fedq.mechanisms.cpa import CPA
from lightning_fedq.mechanisms.ddg import DistributedDiscreteGaussian
from lightning_fedq.mechanisms.handed_on_gaussian import HandedOnGaussian
from lightning_fedq.mechanisms.interface import Adversary, Loss, Mechanism, NonPrivate
from lightning_fedq.mechanisms.near_optimal_utility import NearOptimalUtility
from lightning_fedq.mechanisms.paired_coins import PairedCoins
from lightning_fedq.mechanisms.rotated_coins import RotatedCoins


def claimed_losses(mechanism: Mechanism, dim: int) -> dict[Adversary, Loss]:
    """Return the claimed losses by adversary, for 3 or 4 clients and `dim` coordinates."""
    context = make_context(mechanism, range(3 if mechanism.fixed_cohort else 4), (dim,))
    return {claim.adversary: claim.loss for claim in mechanism.claims(context)}


def _with_less_noise(mechanism: Any, dim: int) -> Any:
    """Return a mechanism whose noise leaves one of `dim` coordinates about as private as an update was.

    A coordinate of the longest update that is spread evenly has this share of the clipping norm.
    """
    share = mechanism.longest_update(dim) / mechanism.clip_norm / math.sqrt(dim)
    return replace(mechanism, noise_multiplier=mechanism.noise_multiplier * share)


@singledispatch
def audit_cases(mechanism: Mechanism, dim: int) -> tuple[AuditCase, ...]:
    """Return the settings in which the audit attacks the claims of a mechanism.

    A claim about a whole vector is attacked twice. In the first case the noise is so small that one of `dim`
    coordinates, with its share of the difference, is about as private as single coordinates usually are. In
    the second case the whole difference is in one coordinate. A claim about sums that other clients
    strengthen is also attacked with missing clients.

    Args:
        mechanism: Mechanism with the settings of its tables.
        dim: Number of coordinates in cases that are not `concentrated`.
    """
    context = make_context(mechanism, range(4), (dim,))
    if mechanism.num_symbols(context) == 1:
        return (AuditCase(mechanism, everybody=True),)
    spread: Mechanism = mechanism
    concentrated: tuple[AuditCase, ...] = ()
    if mechanism.level == "noise_multiplier" and mechanism.longest_update(dim) is not None:
        spread = _with_less_noise(mechanism, dim)
        concentrated = (AuditCase(mechanism, concentrated=True, title="one coordinate"),)
    losses = claimed_losses(mechanism, dim)
    summed, single = losses[Adversary.SECAGG_SERVER], losses[Adversary.EAVESDROPPER]
    by_others = not isinstance(summed, NonPrivate) and summed != single
    missing = AuditCase(spread).without_clients() if by_others else ()
    return (AuditCase(spread), *concentrated, *missing)


@audit_cases.register
def _(mechanism: AdaptiveClip, dim: int) -> tuple[AuditCase, ...]:
    # the wrapped mechanism's cases, each with an adaptive clip around it
    cases = audit_cases(mechanism.mechanism, dim)
    return tuple(replace(case, mechanism=replace(mechanism, mechanism=case.mechanism)) for case in cases)


@audit_cases.register
def _(mechanism: PairedCoins, dim: int) -> tuple[AuditCase, ...]:
    # the pair's secret affects the bit most for values at the centre
    to_center = AuditCase(mechanism, title="an end and the centre", to_center=True)
    return (AuditCase(mechanism), *AuditCase(mechanism).without_clients(), to_center)


@audit_cases.register
def _(mechanism: CPA, dim: int) -> tuple[AuditCase, ...]:
    # the second case gives every client its own epsilon
    epsilon = mechanism.epsilon[0] if isinstance(mechanism.epsilon, tuple) else mechanism.epsilon
    each = (epsilon, epsilon / 2.0, epsilon, epsilon / 2.0)
    several = replace(mechanism, epsilon=each, epsilon_scope="bit", rounds=None)
    return AuditCase(mechanism), AuditCase(several, title="an epsilon for each client")


@audit_cases.register
def _(mechanism: SubsampledMechanism, dim: int) -> tuple[AuditCase, ...]:
    # a hidden selection, a selection of all coordinates, and a dropout
    half, whole = (replace(mechanism, sampling_probability=gamma) for gamma in (0.5, 1.0))
    return (
        AuditCase(half),
        AuditCase(whole, title="gamma 1"),
        AuditCase(half, title="one dropout", num_dropped=1),
    )


@audit_cases.register
def _(mechanism: ExactError, dim: int) -> tuple[AuditCase, ...]:
    # Elias codes save time
    plain = replace(mechanism, entropy_code="elias")
    return _vector_cases(_with_less_noise(plain, dim), _with_less_noise(plain, dim), plain)


@audit_cases.register
def _(mechanism: BandedGaussian, dim: int) -> tuple[AuditCase, ...]:
    # band 1, because an audit plays one round with all clients
    one = replace(mechanism, band=1)
    return (AuditCase(_with_less_noise(one, dim)), AuditCase(one, concentrated=True, title="one coordinate"))


@audit_cases.register
def _(mechanism: NearOptimalUtility, dim: int) -> tuple[AuditCase, ...]:
    # the audit attacks the Gaussian claim, which needs a public calibration
    public = replace(mechanism, public_calibration=True)
    little = replace(public, noise_std=mechanism.noise_std / math.sqrt(dim))
    return AuditCase(little), AuditCase(public, concentrated=True, title="one coordinate")


@audit_cases.register
def _(mechanism: DistributedDiscreteGaussian, dim: int) -> tuple[AuditCase, ...]:
    # The noise is doubled, because Renyi bounds of integer orders say nothing about larger losses. The grid
    # is five times finer, because rounding then hardly lengthens an update, and the audit notices if there is
    # a little too little noise.
    sigma = 2.0 * mechanism.local_sigma / math.sqrt(dim)
    little = replace(mechanism, local_sigma=sigma, granularity=0.2 * mechanism.granularity)
    return _vector_cases(little, _allow_dropout(little), mechanism)


@audit_cases.register
def _(mechanism: HandedOnGaussian, dim: int) -> tuple[AuditCase, ...]:
    # Blocks have three rounds, in which none of fifty cohorts comes back. A fine grid makes the bounds on
    # rounding and the fresh noise small.
    grid, bits = 0.02 * mechanism.granularity, min(mechanism.bits + 4, 31)
    one = replace(mechanism, num_cohorts=50, granularity=grid, bits=bits)
    little = replace(one, local_sigma=2.0 * mechanism.local_sigma / math.sqrt(dim))
    return _vector_cases(little, _allow_dropout(little), one)


@audit_cases.register
def _(mechanism: RotatedCoins, dim: int) -> tuple[AuditCase, ...]:
    # Single messages at the mechanism's epsilon, and sums of weak bits with nearly tight claims. With the
    # range at two standard deviations, an update in the worst direction takes half of every range, and an
    # update that is not clipped in l2 all of it. The clip is wide enough for the audit's other clients, whose
    # coordinates are within +-1.
    wide = replace(mechanism, clip_stds=1.0, clip_norm=4.0 * math.sqrt(dim), max_dropped_clients=0)
    sums = replace(wide, clip_stds=2.0, epsilon_per_bit=0.5, bits_per_coordinate=16)
    half = replace(sums, fraction=0.5, max_dropped_clients=1)
    return (
        AuditCase(wide),
        AuditCase(sums, title="16 coins", only_sums=True),
        AuditCase(replace(sums, paired=True), title="16 coins, paired", only_sums=True),
        AuditCase(half, title="16 coins, half of the axes, one dropout", only_sums=True, num_dropped=1),
    )


def _allow_dropout(mechanism: Any) -> Any:
    """Return a mechanism whose claims allow for at least one dropout."""
    return replace(mechanism, max_dropped_clients=max(mechanism.max_dropped_clients, 1))


def _vector_cases(little: Mechanism, dropped: Mechanism, plain: Mechanism) -> tuple[AuditCase, ...]:
    """Return the cases of a claim about a whole vector whose noise all clients make together.

    Args:
        little: Mechanism with little noise, for a spread difference.
        dropped: The same for a cohort in which one client drops out.
        plain: Mechanism for a difference in one coordinate.
    """
    return (
        AuditCase(little),
        AuditCase(dropped, title="one dropout", num_dropped=1),
        AuditCase(plain, concentrated=True, title="one coordinate"),
    )
