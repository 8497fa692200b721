"""Gaussian and Laplace noise as Opacus calibrates it, beside the exact calibration of this package.

Opacus composes Renyi divergences and turns them into an epsilon. For Gaussian noise it finds the multiplier
itself; it has no Laplace noise, so its conversion is given the Renyi divergence of Laplace's. Sensitivity and
adversary are those of the mechanism here: its noise is multiplied by Opacus's multiplier over the exact one.

References:
    Mironov, Renyi Differential Privacy, CSF 2017, table II; Yousefpour et al., Opacus, 2021.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from lightning_fedq.imports import extra
from lightning_fedq.mechanisms import GaussianNoise, LaplaceNoise
from lightning_fedq.mechanisms.bases.calibration import gaussian_noise_multiplier, laplace_noise_multiplier
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.planning import Option, Problem, relative_error
from lightning_fedq.privacy.target import planned_charges

NAMES = {"GaussianNoise, by Opacus": "GaussianNoise", "LaplaceNoise, by Opacus": "LaplaceNoise"}
"""Rows of the baselines, and the mechanism of each."""
_OPACUS = ("opacus", "the baseline that Opacus calibrates")


@lru_cache(maxsize=64)
def gaussian_by_opacus(epsilon: float, delta: float, rounds: int) -> float:
    """Noise std over l2 sensitivity that Opacus's accountant finds for so many rounds of everybody.

    Args:
        epsilon: Budget of the run, > 0, in nats.
        delta: In (0, 1).
        rounds: Rounds of a client, >= 1.

    Raises:
        ModuleNotFoundError: If Opacus is not installed.

    Example:
        >>> round(gaussian_by_opacus(8.0, 1e-5, 30), 2)  # exact: 3.29
        3.49
    """
    with extra(*_OPACUS):
        from opacus.accountants.utils import get_noise_multiplier
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on its orders
        return float(
            get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=1.0,
                steps=rounds,
                accountant="rdp",
                epsilon_tolerance=1e-3 * epsilon,
            )
        )


@lru_cache(maxsize=64)
def laplace_by_opacus(epsilon: float, delta: float, rounds: int) -> float:
    """Noise scale over l1 sensitivity at which Opacus's conversion of Laplace's Renyi curve gives epsilon.

    Args:
        epsilon: Budget of the run, > 0, in nats.
        delta: In (0, 1).
        rounds: Rounds of a client, >= 1.

    Raises:
        ModuleNotFoundError: If Opacus is not installed.
    """
    with extra(*_OPACUS):
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis.rdp import get_privacy_spent
    orders = list(RDPAccountant.DEFAULT_ALPHAS)

    def spent(scale: float) -> float:
        curve = [rounds * _renyi_of_laplace(order, scale) for order in orders]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(get_privacy_spent(orders=orders, rdp=curve, delta=delta)[0])

    return _least(spent, epsilon, rounds / epsilon)


def _least(spent: Callable[[float], float], epsilon: float, high: float) -> float:
    """The least noise that spends epsilon at most. `high` is enough, or is doubled until it is."""
    while spent(high) > epsilon:
        high *= 2.0
    low = 0.0
    while high - low > 1e-4 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


def _renyi_of_laplace(order: float, scale: float) -> float:
    """Divergence of order > 1 between Laplace laws one apart (Mironov 2017, proposition 6)."""
    first = math.log(order / (2.0 * order - 1.0)) + (order - 1.0) / scale
    second = math.log((order - 1.0) / (2.0 * order - 1.0)) - order / scale
    return (first + math.log1p(math.exp(second - first))) / (order - 1.0)


def with_opacus_noise(option: Option, problem: Problem) -> Option:
    """An option of `GaussianNoise` or `LaplaceNoise` with Opacus's noise, and what it really spends.

    Args:
        option: The mechanism at the exact calibration.
        problem: What was asked.

    Raises:
        ModuleNotFoundError: If Opacus is not installed.
    """
    exact, target = option.mechanism, problem.target
    assert isinstance(exact, GaussianNoise | LaplaceNoise) and target.delta is not None
    charges = planned_charges(problem.run(exact, option.law), secret=False)
    asked = (target.epsilon, target.delta, charges)
    if exact.law == "gaussian":
        ratio = gaussian_by_opacus(*asked) / gaussian_noise_multiplier(*asked)
    else:
        ratio = laplace_by_opacus(*asked) / laplace_noise_multiplier(*asked)
    noisier = replace(exact, noise_multiplier=exact.multiplier * ratio, epsilon=None, delta=None, rounds=None)
    run = problem.run(noisier, option.law)
    spent = Account(run, target.delta).epsilon(target.against, charges, secret=False)
    error = relative_error(noisier, problem.cohort, problem.params, problem.homogeneity)
    signal = problem.homogeneity * problem.rounds
    name = f"{option.name}, by Opacus"
    ratio_of = None if error is None else error / signal
    return replace(option, name=name, mechanism=noisier, epsilon=spent, error=error, ratio=ratio_of)
