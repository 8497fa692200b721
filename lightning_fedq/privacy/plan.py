"""The question before a run: which mechanism, at which setting, can give this epsilon against this adversary?

Every candidate is a family of mechanisms with one privacy parameter. The parameter is found by bisection of
the run's epsilon, with the same accountant and the same refusals as the report, and the error follows from
the mechanism's own noise bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lightning_fedq.core import Adversary, Mechanism, NonPrivate, RoundContext
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.setting import Setting

Family = Callable[[float], Mechanism]
_SMALLEST, _LARGEST = 1e-5, 30.0


@dataclass(frozen=True)
class Option:
    """One way to reach the target, or the reason why there is none.

    Args:
        name: The candidate.
        mechanism: The mechanism with its parameter set, or None.
        epsilon: What the run then spends, at the plan's delta; infinite if the target can't be met.
        noise_std: Std of the error of the decoded mean per coordinate, in units of the range's radius;
            None where the mechanism has no bound.
        reason: Why not, where there is no mechanism.
    """

    name: str
    mechanism: Mechanism | None
    epsilon: float
    noise_std: float | None
    reason: str = ""


def plan(
    target_epsilon: float,
    clients: int,
    params: int,
    rounds: int,
    adversary: Adversary,
    delta: float,
    candidates: Mapping[str, Family],
    fewest_survivors: int | None = None,
) -> tuple[Option, ...]:
    """Find each candidate's largest privacy parameter that keeps the run within `target_epsilon`.

    Args:
        target_epsilon: Over the whole run, > 0.
        clients: Clients in every round, >= 1.
        params: Parameters of the model.
        rounds: Rounds of the run, >= 1.
        adversary: Against whom.
        delta: In (0, 1 / clients).
        candidates: Maps a name to a function from the privacy parameter (epsilon of one coordinate, say) to
            the mechanism; larger must mean less private.
        fewest_survivors: See `Setting`: for a server behind secure aggregation that may lie.

    Returns:
        One option per candidate, smallest error first.

    Raises:
        ValueError: If a number is out of range.
    """
    if not (target_epsilon > 0 and clients >= 1 and params >= 1 and rounds >= 1):
        raise ValueError(
            "target_epsilon > 0, clients >= 1, params >= 1 and rounds >= 1 are needed, "
            f"got {target_epsilon}, {clients}, {params} and {rounds}"
        )
    check_delta(delta, clients, "clients")
    options = [
        _solve(name, family, target_epsilon, (clients, params, rounds), adversary, delta, fewest_survivors)
        for name, family in candidates.items()
    ]
    return tuple(sorted(options, key=lambda option: (option.mechanism is None, option.noise_std or math.inf)))


def _context(mechanism: Mechanism, clients: int, params: int) -> RoundContext:
    groups, start = [], 0
    for size in mechanism.group_sizes(clients):
        groups.append(tuple(range(start, start + size)))
        start += size
    one = torch.ones(1, dtype=torch.float64)
    return RoundContext(0, tuple(groups), (params,), 0.0 * one, one)


def _solve(
    name: str,
    family: Family,
    target: float,
    size: tuple[int, int, int],
    adversary: Adversary,
    delta: float,
    fewest_survivors: int | None,
) -> Option:
    clients, params, rounds = size

    def cost(value: float) -> tuple[float, str]:
        """Epsilon of the run, and the reason where there is none."""
        mechanism = family(value)
        secure = adversary is Adversary.SECAGG_SERVER
        setting = Setting(
            _context(mechanism, clients, params),
            rounds,
            delta,
            secure_aggregation=secure,
            fewest_survivors=fewest_survivors if secure else None,
        )
        claim = setting.claims(mechanism)[adversary]
        if isinstance(claim.loss, NonPrivate):
            return math.inf, f"no guarantee: {claim.loss.reason}"
        run = setting.spent(claim, rounds)
        if run.infinite_mass > run.delta:
            chance = f"{run.infinite_mass:.3g}"
            return math.inf, f"with chance {chance} an outcome occurs that excludes one of two updates"
        if math.isinf(run.epsilon):
            return math.inf, run.method
        return run.epsilon, f"even a parameter of {value:g} spends {run.epsilon:.3g}"

    least, reason = cost(_SMALLEST)
    if least > target:
        return Option(name, None, math.inf, None, reason)
    low, high = _SMALLEST, _LARGEST
    if cost(high)[0] <= target:
        low = high
    while high - low > 1e-3 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle)[0] <= target else (low, middle)
    mechanism = family(low)
    context = _context(mechanism, clients, params)
    variance = mechanism.noise_variance(context, context.cohort)
    std = None if variance is None else math.sqrt(float(variance.max()))
    return Option(name, mechanism, cost(low)[0], std)
