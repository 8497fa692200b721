"""One-shot membership inference in the manner of LiRA: was this sample in the client's batch of this round?

The score of a candidate is its weight in the best linear estimate of the batch: least squares on all
candidates' gradients, ridged by the noise that the mechanism is known to add. Shadow rounds, which the
attacker plays by itself on the candidates, give every candidate a Gaussian of its score with and without
membership; the log ratio of the two densities is compared with one threshold. As the attack's authors ask,
the figure is the true-positive rate at a low false-positive rate.

References:
    Carlini et al., Membership Inference Attacks From First Principles, IEEE S&P 2022.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fedq.functional.trade_off import clopper_pearson
from lightning_fedq.keys.randomness import Keys, SeededKeys
from lightning_fedq.leakage.study import Study
from lightning_fedq.leakage.views import observe
from lightning_fedq.mechanisms.interface import Adversary, Mechanism


@dataclass(frozen=True)
class MembershipResult:
    """True positives at a false-positive rate.

    Args:
        hits: Members above the threshold.
        members: All members asked about.
        others: Non-members asked about.
        false_positive_rate: Attained exactly or from below on the non-members.
        confidence: Confidence of the limits.
    """

    hits: int
    members: int
    others: int
    false_positive_rate: float
    confidence: float = 0.95

    @property
    def true_positive_rate(self) -> float:
        """Share of members found."""
        return self.hits / self.members

    @property
    def limits(self) -> tuple[float, float]:
        """Clopper-Pearson limits of the true-positive rate, for the threshold as it is."""
        return clopper_pearson(self.hits, self.members, self.confidence)


def at_false_positive_rate(members: Tensor, others: Tensor, rate: float = 1e-3) -> MembershipResult:
    """Count the members whose score exceeds all but a share `rate` of the non-members' scores.

    Args:
        members: `(m,)` scores.
        others: `(n,)` scores, n >= 1 / rate.
        rate: In (0, 1).

    Raises:
        ValueError: If there are too few non-members for the rate.
    """
    if not 0.0 < rate < 1.0 or len(others) * rate < 1.0 - 1e-9:
        raise ValueError(
            f"a false-positive rate of {rate:g} needs at least {math.ceil(1 / rate) if rate > 0 else 'many'} "
            f"non-members, got {len(others)}; play more rounds"
        )
    allowed = math.floor(len(others) * rate + 1e-9)  # a float just below a whole number counts as that
    threshold = others.sort(descending=True).values[allowed]  # so many at most lie strictly above
    hits = int((members > threshold).sum())
    return MembershipResult(hits, len(members), len(others), int((others > threshold).sum()) / len(others))


def membership_inference(
    study: Study,
    mechanism: Mechanism,
    adversary: Adversary,
    generator: torch.Generator,
    *,
    rate: float = 1e-3,
    shadows: int = 48,
    rounds: int = 24,
    keys: Keys | None = None,
) -> MembershipResult:
    """Play `shadows` rounds to learn, then `rounds` rounds in which client 0 holds half of the candidates.

    Args:
        study: Model, candidates and learning rate; its attack and batch size are not used.
        generator: Chooses the batches.
        rate: False-positive rate.
        shadows: >= 8.
        rounds: Each asks about every candidate once.
        keys: Source of coins; None draws a seed.

    Raises:
        ValueError: If there are too few shadows, or too few non-members for the rate.
    """
    if shadows < 8:
        raise ValueError(f"shadows must be >= 8, got {shadows}; fewer give no variance")
    if keys is None:
        keys = SeededKeys(int(torch.randint(2**62, (1,), generator=generator)))
    gradients, count = study.gradients.double(), len(study.inputs)
    context, scores, inside = study.context(mechanism), [], []
    variance = mechanism.noise_variance(context, (0,))
    noise = 0.0 if variance is None else variance.mean().item() / study.learning_rate**2
    estimator, middle = _estimator(gradients, noise), gradients.mean(0)
    for round in range(shadows + rounds):
        batches = torch.rand(study.cohort_size, count, generator=generator).argsort(1)[:, : count // 2]
        updates = -study.learning_rate * gradients[batches].mean(1)
        seen = observe(mechanism, updates.float(), replace(context, round=round), keys, adversary, 0)
        scores.append(estimator @ (-seen.update.double() / study.learning_rate - middle))
        inside.append(torch.zeros(count, dtype=torch.bool).index_fill_(0, batches[0], True))
    score, member = torch.stack(scores), torch.stack(inside)
    ratio = _log_ratio(score[shadows:], score[:shadows], member[:shadows])
    asked = member[shadows:]
    return at_false_positive_rate(ratio[asked], ratio[~asked], rate)


def _estimator(gradients: Tensor, noise: float) -> Tensor:
    """`(n, dim)` map from a gradient to the candidates' weights, each 0 or 2 / n with equal chances.

    Args:
        gradients: `(n, dim)`.
        noise: Variance of one coordinate of the observed gradient.
    """
    count = len(gradients)
    gram = gradients @ gradients.T
    # noise over the weights' variance, 1 / n^2; the rest keeps the system regular
    ridge = noise * count**2 + 1e-9 * gram.diag().mean()
    found: Tensor = torch.linalg.solve(gram + ridge * torch.eye(count, dtype=gram.dtype), gradients)
    return found


def _log_ratio(score: Tensor, shadow: Tensor, member: Tensor) -> Tensor:
    """Log density ratio of each score: one mean per candidate and world, one variance per world."""
    density = []
    for world in (member, ~member):
        size = world.sum(0).clamp(min=1)
        mean = (shadow * world).sum(0) / size
        spread = ((shadow - mean).square() * world).sum() / world.sum()
        density.append(-0.5 * (score - mean).square() / spread.clamp(min=1e-30) - 0.5 * spread.log())
    return density[0] - density[1]
