"""Audit of one training run: many canaries, one guess for each, and the epsilon that the guesses refute.

The run may be any computation, for example a whole training. The inputs here are one fair random bit and one
guess per canary.

References:
    Steinke, Nasr, Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, Theorem 5.2.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from lightning_fedq.audit.views import Finding


def canary_coins(canaries: int, seed: int) -> NDArray[np.int64]:
    """Return one fair random bit per canary, +1 or -1. Its generator is not cryptographic."""
    return np.random.default_rng(seed).integers(0, 2, canaries) * 2 - 1


def one_run_lower_bound(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """Return the largest epsilon that the guesses refute, with error probability `alpha`.

    Under (epsilon, delta)-DP, P(at least v right of r) <= P(B >= v) + 2 m delta max_i P(v > B >= v - i) / i,
    where B ~ Binomial(r, e^epsilon / (1 + e^epsilon)).

    Args:
        canaries: Number m of canaries, each present or absent by a fair random bit.
        guesses: Number r of guesses, at most m.
        correct: Number v of right guesses, at most r.
        delta: Delta of the claim under test.
        alpha: Error probability.

    Raises:
        ValueError: Unless 0 <= correct <= guesses <= canaries.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"correct <= guesses <= canaries is needed, got {correct}, {guesses}, {canaries}")

    def refuted(epsilon: float) -> bool:
        law = stats.binom(guesses, special.expit(epsilon))
        tail = float(law.sf(correct - 1))  # P(B >= v)
        if delta > 0.0:
            steps = np.arange(1, correct + 1)
            below = law.cdf(correct - 1) - law.cdf(correct - steps - 1)  # P(v > B >= v - i)
            tail += 2.0 * canaries * delta * float((below / steps).max(initial=0.0))
        return tail <= alpha

    low, high = 0.0, 1.0
    if not refuted(0.0):
        return 0.0
    while refuted(high) and high < 64.0:
        low, high = high, 2.0 * high
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low  # the lower end of the bracket is refuted, so the bound is rounded down


def surest_guesses(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Guess the signs of the `count` scores with the largest absolute values. Other guesses are 0.

    Args:
        scores: `(canaries,)`, centred on 0. A larger score is more evidence that a canary's bit is +1.
        count: Number of guesses.
    """
    guesses = np.sign(scores).astype(np.int64)
    guesses[np.argsort(-np.abs(scores), kind="stable")[count:]] = 0
    return guesses


def judge_guesses(
    view: str,
    coins: NDArray[np.int64],
    guesses: NDArray[np.int64],
    claim: float,
    *,
    delta: float = 0.0,
    alpha: float = 1e-3,
) -> Finding:
    """Compare a claimed epsilon with the lower bound that the right guesses prove.

    Args:
        view: Name of the view.
        coins: `(canaries,)` random bits, +1 or -1.
        guesses: `(canaries,)` guesses, +1, -1 or 0 for none.
        claim: Epsilon that is claimed for one canary in the whole run.
        delta: Delta of the claim.
        alpha: Probability of an alarm if the claim holds.
    """
    made, right = int((guesses != 0).sum()), int((guesses == coins).sum())
    bound = one_run_lower_bound(len(coins), made, right, delta, alpha)
    alarm = "" if bound <= claim else f"{right} of {made} guesses are right"
    return Finding(view, claim, bound, made, alarm)
