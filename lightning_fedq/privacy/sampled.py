"""Privacy amplification by secret cohorts, where one client's update is replaced by another.

Draws of a fixed size
---------------------

In every round, m of n clients are drawn uniformly, and the adversary never learns which. Let q = m / n, and
let delta(e) be the curve of one whole round. A round with a secret cohort has, for e >= 0,

    delta'(ln(1 + q (e^epsilon - 1))) = q delta(epsilon)

and the reflection of this curve below 0. Rounds compose, because their draws are independent. On a grid the
curve is exact: an atom of mass Q_i e^(l_i) at l_i > 0 moves to L_i = ln(1 + q (e^(l_i) - 1)) with mass Q_i
e^(L_i), and to -L_i with mass Q_i. The fraction q of the infinite mass stays infinite, and the rest is at 0.

If only Renyi divergences of a mechanism are known, its curve is the lower convex hull of the bounds in
e^epsilon. The true curve is convex, is 1 at e^epsilon = 0 and lies below the bounds, so it lies below the
hull. Without the hull, the stated epsilon would be 0.04% larger.

The base is one whole round with all its coordinates composed, because all coordinates share one draw. The
claim is under substitution: if a client is not drawn, another client takes its place, and that client's
update may be anything.

Independent draws of the clients
--------------------------------
A trusted adder adds Gaussian noise that does not depend on the clients, and a client that is not drawn has no
replacement. With an independent draw per client and round (`PoissonGaussianLoss`, with the proof), this is
worth another factor of two in noise. Rounds compose. Nobody may learn how many clients took part: the divisor
is m in every round, and a round without clients also releases its noise.

These functions do not check whether a training keeps the draw secret. The theorem fails for clients with
memory, limits per client, one draw for two releases, fixed partitions into cohorts, and silence that depends
on the client. `Federated` refuses these settings for secret laws (`privacy.cohorts`), and only its reports
state this epsilon.

References:
    Balle, Barthe, Gaboardi, Privacy Amplification by Subsampling, NeurIPS 2018, theorems 2 and 9.
    Zhu, Dong, Wang, Optimal Accounting via Characteristic Functions, AISTATS 2022, proposition 9, theorem 10.
"""

import math

import numpy as np

from lightning_fedq.mechanisms.interface import (
    NO_SLACK,
    Mechanism,
    Neighbours,
    NonPrivate,
    PrivacyClaim,
    Slack,
)
from lightning_fedq.privacy.accounting import check_delta, composed_grid, with_slack
from lightning_fedq.privacy.cohorts import CohortLaw
from lightning_fedq.privacy.grid import MOST_POINTS, POINTS_PER_STD, LossGrid, atoms_on, check_loss
from lightning_fedq.privacy.losses import Loss, composed_mass
from lightning_fedq.privacy.run import Sampling

_TAIL_SHARE = 1e-3


def amplify_loss(base: LossGrid, drawn: int, population: int) -> LossGrid:
    """Return the loss of a round whose cohort is a secret uniform draw of fixed size.

    Args:
        base: Loss of one whole round against a client that takes part, which dominates both orders.
        drawn: Number of clients in a cohort.
        population: Number of clients that could be drawn.

    Raises:
        ValueError: If no such draw exists, or the curve of `base` can't be that of both orders.
    """
    if not 1 <= drawn <= population:
        raise ValueError(f"Expected 1 <= drawn <= population, got {drawn} of {population}")
    if drawn == population:
        return base
    q = drawn / population
    above = base.losses > 0.0  # the part below 0 is the reflection of this part
    losses = base.losses[above]
    under_q = base.masses[above] * np.exp(-losses)
    places = np.logaddexp(math.log1p(-q), math.log(q) + losses)  # ln(1 + q (e^l - 1)), where e^l may overflow
    under_p = (1.0 - q) * under_q + q * base.masses[above]  # Q e^L
    infinite = q * base.infinite
    rest = 1.0 - infinite - under_p.sum() - under_q.sum()
    if rest < -1e-9:
        raise ValueError(
            f"The loss of a round has {-rest:.2g} too much mass above 0 to dominate both orders. "
            "Pass the loss of a claim, whose curve covers both orders."
        )
    losses = np.concatenate([-places[::-1], [0.0], places])
    masses = np.concatenate([under_q[::-1], [max(rest, 0.0)], under_p])
    mean = losses @ masses / masses.sum()
    std = math.sqrt((losses - mean) ** 2 @ masses / masses.sum())
    top = float(losses[-1])
    step = max(std / POINTS_PER_STD, top / MOST_POINTS) or 1.0
    return atoms_on(step, losses, masses, infinite)


def find_secrecy_obstacle(sampling: Sampling, plain_sum: bool, num_byzantine: int) -> str:
    """Return the condition of secret cohorts that a run does not meet, with the cure. "" for none.

    Args:
        sampling: Participation of clients.
        plain_sum: Whether the model depends on the messages only through their plain sum.
        num_byzantine: Number of Byzantine clients of a cohort.
    """
    if sampling.dropout_probability > 0.0 or sampling.may_be_silent:
        return (
            "S3, an answer from every drawn client, but clients may be silent here. "
            "Use dropout_probability=0 and no deadline"
        )
    if not plain_sum:
        return (
            "S4, a plain mean, but this one has weights or a robust rule. "
            "Use weighting='uniform' and no aggregator"
        )
    if num_byzantine:
        return "S4, clients that run the protocol, but some are Byzantine. Leave ByzantineClients out"
    return ""


def find_amplification_obstacle(
    mechanism: Mechanism, claim: PrivacyClaim, law: CohortLaw, num_clients: int
) -> str:
    """Return the reason why secret cohorts do not amplify a mechanism's rounds, with the cure. "" if they do.

    Args:
        mechanism: Mechanism of the run.
        claim: Its claim against outsiders, as it fits the setting.
        law: Law of cohorts.
        num_clients: Number of clients of the federation.
    """
    name = type(mechanism).__name__
    if isinstance(claim.loss, NonPrivate):
        return f"S10, a claim against outsiders: {claim.loss.reason}. Use a mechanism that has one"
    if claim.neighbours is not Neighbours.SUBSTITUTION:
        return (
            f"S10, a claim in which {Neighbours.SUBSTITUTION.value}, but that of {name} is "
            f"{claim.neighbours.name} ({claim.neighbours.value}), with a smaller loss. Use a mechanism that "
            "claims substitution, such as GaussianNoise"
        )
    if len(mechanism.protection_groups(num_clients)) > 1:
        return f"S4, clients treated identically, but {name} gives them different epsilons. Give all one"
    if not mechanism.has_exchangeable_clients:
        return (
            f"S4, clients treated identically, but it is not shown that {name} releases only sums of updates "
            "(has_exchangeable_clients). Use GaussianNoise, DistributedDiscreteGaussian or RotatedCoins"
        )
    if any(size > 1 for size in mechanism.group_sizes(law.cohort_size(num_clients))):
        return (
            f"S4, groups of one client, but {name} pairs clients, and a partner knows who was drawn. "
            "Use a mechanism without groups, such as RotatedCoins or GaussianNoise"
        )
    if mechanism.separation > 1 or mechanism.reuses_noise:
        return (
            f"S7, noise that is independent over rounds, but that of {name} is not. "
            "Use band=1, or a mechanism with fresh noise, such as GaussianNoise"
        )
    return law.check_mechanism(mechanism)


def secret_epsilon(
    loss: Loss,
    delta: float,
    *,
    law: CohortLaw,
    num_clients: int,
    rounds: int,
    neighbours: Neighbours,
    compositions: int = 1,
    slack: Slack = NO_SLACK,
) -> float:
    """Return epsilon against an adversary that sees only released models and never learns who took part.

    Args:
        loss: Loss of one composition against a client that takes part.
        delta: Delta of the statement, in (0, 1).
        law: Law of cohorts.
        num_clients: Number of clients that could be drawn.
        rounds: Number of released rounds, each with its own draw. Everything that is released from one draw
            must be in one `loss`, because amplifying two releases of one draw separately would state a too
            small epsilon.
        neighbours: Adjacency of the claim, which must be substitution.
        compositions: Compositions in one round, >= 1.
        slack: Slack of one round, which is not amplified.

    Raises:
        ValueError: If delta or a count is out of range, the claim is not under substitution, cohorts are
            known, or there is no account of such a draw.
        TypeError: If the loss is of an unknown kind.
    """
    check_delta(delta)
    if compositions < 1 or rounds < 0:
        raise ValueError(f"Expected compositions >= 1 and rounds >= 0, got {compositions} and {rounds}")
    if neighbours is not Neighbours.SUBSTITUTION:
        raise ValueError(
            f"secret cohorts need a claim in which {Neighbours.SUBSTITUTION.value}, got "
            f"{neighbours.name} ({neighbours.value}). Use a mechanism that claims substitution against "
            "outsiders (GaussianNoise, not CSGM or SIGM)."
        )
    check_loss(loss)
    _ = loss.infinite_mass  # raises for `NonPrivate`
    # raises for a law without an account of a secret draw, also if no round was released
    drawn_loss = law.independent_draw_loss(loss, compositions, rounds, num_clients)
    if rounds == 0:
        return 0.0

    def exact(remaining_delta: float) -> float:
        if drawn_loss is not None:
            return composed_grid(drawn_loss[0], remaining_delta, 1, drawn_loss[1]).epsilon(remaining_delta)
        # the truncated tails of the grid take a thousandth of this delta
        base = composed_grid(loss, remaining_delta / rounds, compositions, 1)
        run = amplify_loss(base, law.cohort_size(num_clients), num_clients)
        return run.composed(rounds, _TAIL_SHARE * remaining_delta).epsilon(remaining_delta)

    distance = composed_mass(min(slack.distance, 1.0), rounds)
    return with_slack(exact, delta, Slack(distance, rounds * slack.log_ratio))
