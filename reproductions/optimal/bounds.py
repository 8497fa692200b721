"""Bounds on leakage and utility loss of a distorted update: what is true, beside what the paper prints.

Leakage is that of `lightning_fedq.functional.trade_off`: C1 of the unprotected update, C2 its factor. Utility
loss is the expected growth of the squared distance to the optimum.

Several theorems of Zhang, Chen, Yang (2022/23) are wrong as printed. Each bound here is a `Bound` that says
whether it is sound, so that a table can't show one without saying so. C2 is often so large that a sound bound
excludes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from lightning_fedq.functional.trade_off import LARGEST_LEAKAGE, leakage_factor
from lightning_fedq.leakage.batch_sampling import SamplingProbability


@dataclass(frozen=True)
class Bound:
    """One inequality, with its verdict.

    Args:
        name: What is bounded, and where it comes from.
        side: Is `value` a lower or an upper bound?
        value: The bound.
        sound: Is it proven? False marks what is printed and has a counter-example.
        vacuous: Does it say no more than the quantity's own range?
        note: Why, where it is unsound or vacuous.
        applies: Is its own printed condition met? Where it is not, it says nothing and nothing can refute it.
    """

    name: str
    side: Literal["lower", "upper"]
    value: float
    sound: bool
    vacuous: bool
    note: str = ""
    applies: bool = True

    def holds(self, measured: float, slack: float = 1e-12) -> bool:
        """Is `measured` on the right side, up to rounding?"""
        if self.side == "lower":
            return measured >= self.value - slack
        return measured <= self.value + slack


def utility_factor(norm: float, distance: float, bias: float) -> float:
    """C6 = 2 C3^2 + C4^2 + 2 C4 C5, collected from the proof of Theorem 6.1, where it is never defined.

    Args:
        norm: C3, bound on the norm of the parameters.
        distance: C4, bound on the distance of their mean from the optimum.
        bias: C5, bound on the bias over the distance in total variation.
    """
    return 2.0 * norm**2 + distance**2 + 2.0 * distance * bias


def leakage_bounds(c1: float, c2: float, tv: float) -> tuple[Bound, ...]:
    """Bounds on the leakage of an update whose law moved by `tv`. The last one is the paper's.

    Args:
        c1: Leakage of the unprotected update.
        c2: Factor of `leakage_factor`.
        tv: Total variation between the laws, in [0, 1].
    """
    move = c2 * tv if tv > 0.0 else 0.0
    low, high, printed = c1 - move, c1 + move, 2.0 * c1 - move
    valid = move <= c1 / 2.0
    note = "" if valid else "proven only for C2 TV <= C1 / 2; printed with C2 TV <= C1, which is false"
    return (
        Bound("leakage >= C1 - C2 TV (Lemma B.1)", "lower", low, True, low <= 0.0, "C2 explodes with xi"),
        Bound("leakage <= C1 + C2 TV", "upper", high, True, high >= LARGEST_LEAKAGE, "C2 explodes with xi"),
        Bound(
            "leakage <= 2 C1 - C2 TV (Lemma 6.5)", "upper", printed, valid, printed >= c1, note, move <= c1
        ),
    )


def paper_sufficient(c1: float, budget: float, tv: float) -> Bound:
    """Lemma 6.6: a distance of at least C1 - tau is said to bring the leakage down to tau. UNSOUND.

    Raises:
        ValueError: If the lemma's condition does not hold, so that it says nothing.
    """
    if tv < c1 - budget:
        raise ValueError(f"Lemma 6.6 says nothing for TV = {tv:.4g} < C1 - tau = {c1 - budget:.4g}")
    note = "no total variation is sufficient: at TV = 1 the leakage may still be C1"
    return Bound("leakage <= tau (Lemma 6.6)", "upper", budget, False, False, note)


def utility_bounds(c6: float, paper_c6: float, tv: float, conditional_variance: float) -> tuple[Bound, ...]:
    """Bounds on the utility loss. The last one is the paper's.

    Args:
        c6: Largest squared distance of the distorted parameters to the optimum.
        paper_c6: Factor of `utility_factor`.
        tv: Total variation between the laws.
        conditional_variance: Trace of the distorted parameters' covariance given the last global model:
            that of the sampled batches and that of the noise.
    """
    printed = paper_c6 * tv - conditional_variance
    note = "takes the variance of a conditional mean for the variance: drops the term that cancels E Var"
    return (
        Bound("utility loss <= C6 TV", "upper", c6 * tv, True, False, "parameters clipped to a ball"),
        Bound("utility loss <= C6 TV - E Var (Theorem 6.1)", "upper", printed, False, False, note),
    )


def trade_off_bound(c1: float, c2: float, tv: float) -> Bound:
    """Upper bound on leakage + (C2 / C6) utility loss, C6 the largest squared distance to the optimum."""
    move = 2.0 * c2 * tv if tv > 0.0 else 0.0
    return Bound("leakage + C2/C6 loss <= C1 + 2 C2 TV", "upper", c1 + move, True, math.isinf(move))


def paper_trade_off_bound(
    c1: float, c2: float, paper_c6: float, tv: float, conditional_variance: float
) -> Bound:
    """Theorem 6.12, on leakage + (C2 / C6) utility loss with the paper's C6. UNSOUND."""
    return Bound(
        "leakage + C2/C6 loss <= 2 C1 - C2/C6 E Var (Theorem 6.12)",
        "upper",
        2.0 * c1 - (c2 / paper_c6 * conditional_variance if conditional_variance else 0.0),
        False,
        False,
        "rests on Theorem 6.1 and on Lemma 6.5",
        tv == 0.0 or c2 * tv <= c1,
    )


def near_optimal_gap(dim: int, noise_std: float, tv: float) -> float:
    """Delta of Assumption C.1 for pure noise: the TV/2 quantile of the squared noise norm.

    Example:
        >>> round(near_optimal_gap(100, 0.1, 0.5), 3)
        0.901
    """
    return float(noise_std**2 * stats.chi2.ppf(tv / 2.0, dim))


def free_lunch_bounds(
    c1: float, xi: float, gamma: float, gap: float, utility_loss: float
) -> tuple[Bound, Bound]:
    """Lower bounds on the leakage from Theorem 6.13 (no free lunch). The second one is the paper's.

    leakage >= C1 - C_d loss with C_d = (gamma / gap) (exp(2 xi) - 1); the paper has another factor 1/4, for
    which its own assumption is too weak.

    Args:
        c1: Leakage of the unprotected update.
        xi: Largest |log(belief / prior)|.
        gamma: Mean distance of the clients' laws over that of the aggregate's.
        gap: `near_optimal_gap`, > 0.
        utility_loss: Expected growth of the squared distance to the optimum.

    Raises:
        ValueError: If gap is not > 0.
    """
    if not gap > 0.0:
        raise ValueError(f"gap must be > 0, got {gap}; Assumption C.1 does not hold")
    factor = 2.0 * leakage_factor(xi) * gamma / gap
    # where nothing is lost an infinite factor takes nothing away
    ours, printed = (c1 - f * utility_loss if utility_loss else c1 for f in (factor, factor / 4.0))
    assumed = "under Assumption C.1; imported theorem, constant re-derived from the assumption"
    return (
        Bound("leakage >= C1 - C_d loss (no free lunch)", "lower", ours, True, ours <= 0.0, assumed),
        Bound(
            "leakage >= C1 - C_d loss / 4 (Theorem 6.13)",
            "lower",
            printed,
            False,
            printed <= 0.0,
            "the factor 1/4 is not supported by Assumption C.1",
        ),
    )


def optimality_holds(
    c1: float, c2: float, c6: float, conditional_variance: float, tolerance: float = 0.01
) -> bool:
    """Does C1 = (C2 / C6) E Var hold, the condition of Theorem 6.14? It is algebra on an unsound theorem."""
    return math.isfinite(c2) and abs(c2 / c6 * conditional_variance - c1) <= tolerance * c1


def solve_quadratic(needed: float, smallest: float) -> SamplingProbability:
    """Solve p (1 - p) >= needed, equation (19), for the smallest p.

    Args:
        needed: rho = C6 TV / S2.
        smallest: Lower limit of p, in (0, 1/2].

    Returns:
        p = 2 rho / (1 + sqrt(1 - 4 rho)), which does not cancel; 1/2 and infeasible where rho > 1/4.
    """
    if not 0.0 < smallest <= 0.5:
        raise ValueError(f"smallest must be in (0, 1/2], got {smallest}")
    if needed <= 0.0:
        return SamplingProbability(smallest, needed, True, "no distortion, hence no constraint")
    if needed > 0.25:
        return SamplingProbability(
            0.5,
            needed,
            False,
            f"p (1 - p) would have to be {needed:.4g} and is at most 1/4: the gradients are too small for "
            "this noise; lower the noise, clip to a smaller norm or allow more leakage",
        )
    value = 2.0 * needed / (1.0 + math.sqrt(1.0 - 4.0 * needed))
    return SamplingProbability(max(value, smallest), needed, True, "smallest p that reaches the variance")
