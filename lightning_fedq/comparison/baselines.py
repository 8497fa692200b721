"""Baselines: Gaussian and Laplace noise with the noise multiplier that Opacus's accountant finds.

Opacus composes Renyi divergences and converts them to an epsilon. It finds the multiplier of Gaussian noise
itself. It has no Laplace noise, so its conversion gets the Renyi divergence of Laplace noise. Sensitivity and
adversary are those of this package's mechanism, whose noise is multiplied by the ratio of Opacus's multiplier
to the exact multiplier.

References:
    Mironov, Renyi Differential Privacy, CSF 2017, table II; Yousefpour et al., Opacus, 2021.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from lightning_fedq.commands.plan_text import opacus_noise
from lightning_fedq.imports import extra
from lightning_fedq.mechanisms import GaussianNoise, LaplaceNoise
from lightning_fedq.mechanisms.bases.calibration import gaussian_noise_multiplier, laplace_noise_multiplier
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.planning import Option, Problem, noise_ratio, relative_error
from lightning_fedq.privacy.target import planned_charges

NAMES = {"GaussianNoise, by Opacus": "GaussianNoise", "LaplaceNoise, by Opacus": "LaplaceNoise"}
"""Names of the baseline rows, with the name of each mechanism."""
_OPACUS = ("opacus", "the baseline that Opacus calibrates")


@lru_cache(maxsize=64)
def gaussian_by_opacus(epsilon: float, delta: float, rounds: int) -> float:
    """Return the noise multiplier of Opacus's accountant: noise std divided by l2 sensitivity.

    All clients take part in every round, so there is no amplification by subsampling.

    Args:
        epsilon: Budget of the run, > 0, in nats.
        delta: Delta of the run, in (0, 1).
        rounds: Number of rounds of a client, >= 1.

    Raises:
        ModuleNotFoundError: If Opacus is not installed.

    Examples:
        >>> round(gaussian_by_opacus(8.0, 1e-5, 30), 2)  # exact: 3.29
        3.49
    """
    with extra(*_OPACUS):
        return opacus_noise(epsilon, delta, 1.0, rounds, 1e-3 * epsilon)


@lru_cache(maxsize=64)
def laplace_by_opacus(epsilon: float, delta: float, rounds: int) -> float:
    """Return the Laplace scale divided by l1 sensitivity at which Opacus's conversion gives epsilon.

    Args:
        epsilon: Budget of the run, > 0, in nats.
        delta: Delta of the run, in (0, 1).
        rounds: Number of rounds of a client, >= 1.

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
            warnings.simplefilter("ignore")  # as if the best Renyi order is at the end of the list
            return float(get_privacy_spent(orders=orders, rdp=curve, delta=delta)[0])

    return _least(spent, epsilon, rounds / epsilon)


def _least(spent: Callable[[float], float], epsilon: float, high: float) -> float:
    """Return the smallest noise that spends at most epsilon, by bisection to a relative 1e-4.

    Args:
        spent: Function that returns the epsilon spent at a noise scale.
        epsilon: Budget, in nats.
        high: First upper end of the search. It is doubled until it spends at most epsilon.
    """
    while spent(high) > epsilon:
        high *= 2.0
    low = 0.0
    while high - low > 1e-4 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


def _renyi_of_laplace(order: float, scale: float) -> float:
    """Return the Renyi divergence of order > 1 of Laplace laws with means 1 apart (Mironov, prop. 6)."""
    first = math.log(order / (2.0 * order - 1.0)) + (order - 1.0) / scale
    second = math.log((order - 1.0) / (2.0 * order - 1.0)) - order / scale
    return (first + math.log1p(math.exp(second - first))) / (order - 1.0)


def with_opacus_noise(option: Option, problem: Problem) -> Option:
    """Return the option with Opacus's noise, and with the epsilon that this noise spends exactly.

    Args:
        option: Option with `GaussianNoise` or `LaplaceNoise` at the exact calibration.
        problem: Problem that the option was planned for.

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
    noisier = replace(exact, noise_multiplier=exact.noise_multiplier * ratio)
    run = problem.run(noisier, option.law)
    spent = Account(run, target.delta).epsilon(target.against, charges, secret=False)
    error = relative_error(noisier, problem.cohort, problem.params, problem.homogeneity)
    name = f"{option.name}, by Opacus"
    noise = noise_ratio(error, problem.rounds, problem.homogeneity)
    return replace(option, name=name, mechanism=noisier, epsilon=spent, error=error, ratio=noise)
