"""Leakage estimate sqrt(JS) from the hit rate of an attack, with exact confidence limits.

This is appendix Q of the near-optimal-utility paper with three repairs: it has the square root, it lacks the
spurious factor 1 / |D|, and failed attempts count as no information instead of being ignored. A wrong
candidate is a failure as well.
"""

from dataclasses import dataclass

from lightning_fedq.functional.trade_off import clopper_pearson, leakage_factor, log_ratio, recovery_leakage


@dataclass(frozen=True)
class LeakageEstimate:
    """Counts of one attack on one adversary's view, and the leakage that follows from them.

    Args:
        hits: Number of attempts that found the truth.
        attempts: Number of all attempts, >= 1.
        num_candidates: Length of the attacker's list, >= 2.
        confidence: Confidence of the two-sided limits.

    Raises:
        ValueError: If a count is out of its range.
    """

    hits: int
    attempts: int
    num_candidates: int
    confidence: float = 0.95

    def __post_init__(self) -> None:
        _ = self.hit_rate_limits, self.leakage

    @property
    def hit_rate(self) -> float:
        """Fraction of attempts that found the truth (recovery rate)."""
        return self.hits / self.attempts

    @property
    def hit_rate_limits(self) -> tuple[float, float]:
        """Clopper-Pearson limits of the hit rate."""
        return clopper_pearson(self.hits, self.attempts, self.confidence)

    @property
    def leakage(self) -> float:
        """sqrt(JS) of belief and prior: C1 for an unprotected update, epsilon_p for a protected one."""
        return recovery_leakage(self.hit_rate, self.num_candidates)

    @property
    def leakage_limits(self) -> tuple[float, float]:
        """Limits of the leakage, which rises with the hit rate."""
        low, high = self.hit_rate_limits
        return recovery_leakage(low, self.num_candidates), recovery_leakage(high, self.num_candidates)

    @property
    def xi(self) -> float:
        """Largest |log(belief / prior)|, with the hit rate smoothed by half a hit and half a miss."""
        return log_ratio((self.hits + 0.5) / (self.attempts + 1.0), self.num_candidates)

    @property
    def c2(self) -> float:
        """The paper's factor C2 of `xi`. It is so large that its bounds are often vacuous."""
        return leakage_factor(self.xi)
