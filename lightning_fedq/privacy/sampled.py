"""Amplification by cohorts that stay secret, one client's update replaced by another.

Draws of a fixed size
---------------------

Of n clients m are drawn uniformly for every round, and who was drawn is never known. With q = m / n and
delta(e) the curve of one whole round, a round whose cohort is secret has, for e >= 0,

    delta'(ln(1 + q (e^epsilon - 1))) = q delta(epsilon)

and its reflection below 0. Rounds compose, because their draws are independent. On a grid the curve is
exact: an atom of mass Q_i e^(l_i) at l_i > 0 goes to L_i = ln(1 + q (e^(l_i) - 1)) with mass Q_i e^(L_i), and
to -L_i with mass Q_i; q times the infinite mass stays infinite; the rest is at 0.

A mechanism that is known by a curve of Renyi divergences only has the bound's lower convex hull in
e^epsilon for its curve: the true curve is convex, is 1 at e^epsilon = 0 and lies below the bound, so it lies
below the hull. Leaving the hull out states 0.04% more.

The base is ONE WHOLE ROUND, all its coordinates composed: the draw is one for all of them. It is a claim
under substitution: a client that is not drawn leaves its place to another one, whose update may be anything.

Draws of every client for itself
--------------------------------
Behind the Gaussian noise of a trusted adder, the same whoever is there, a client that is not drawn leaves a
hole. With a coin in every round (`PoissonGaussianLoss`, with the proof) that is worth another factor of two
in noise. Rounds compose. Nobody may learn how many were there: the divisor is m in every round, and a round
of nobody releases its noise.

What these functions do not check is whether a training keeps the draw secret. Clients with memory, limits by
client, one draw for two releases, cohorts that are dealt out and silence that depends on who a client is
break the theorem: `Federated` refuses them where a law is secret (`privacy.cohorts`), and only its reports
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
    """The loss of a round whose cohort is a secret uniform draw.

    Args:
        base: Loss of one whole round towards a client that takes part, dominating both orders.
        drawn: Clients in a cohort.
        population: Clients that could be drawn.

    Raises:
        ValueError: If no such draw exists, or the base's curve cannot be that of both orders.
    """
    if not 1 <= drawn <= population:
        raise ValueError(f"1 <= drawn <= population is needed, got {drawn} drawn of {population}")
    if drawn == population:
        return base
    q = drawn / population
    above = base.losses > 0.0  # below 0 it is the reflection
    losses = base.losses[above]
    under_q = base.masses[above] * np.exp(-losses)
    places = np.logaddexp(math.log1p(-q), math.log(q) + losses)  # ln(1 + q (e^l - 1)), where e^l may overflow
    under_p = (1.0 - q) * under_q + q * base.masses[above]  # Q e^L
    infinite = q * base.infinite
    rest = 1.0 - infinite - under_p.sum() - under_q.sum()
    if rest < -1e-9:
        raise ValueError(
            f"the loss of a round holds a mass of {-rest:.2g} too much above 0 for one that dominates both "
            "orders; pass a claim's loss, whose curve is about both"
        )
    losses = np.concatenate([-places[::-1], [0.0], places])
    masses = np.concatenate([under_q[::-1], [max(rest, 0.0)], under_p])
    mean = losses @ masses / masses.sum()
    std = math.sqrt((losses - mean) ** 2 @ masses / masses.sum())
    top = float(losses[-1])
    step = max(std / POINTS_PER_STD, top / MOST_POINTS) or 1.0
    return atoms_on(step, losses, masses, infinite)


def find_secrecy_obstacle(sampling: Sampling, plain_sum: bool, num_byzantine: int) -> str:
    """Name the condition of secret cohorts that a run does not keep, with the cure. "" for none."""
    if sampling.dropout_probability > 0.0 or sampling.may_be_silent:
        return (
            "S3, everybody who is drawn answers: clients may be silent here; use dropout_probability=0 and "
            "no deadline"
        )
    if not plain_sum:
        return (
            "S4, a plain mean: here are weights or a robust rule; use weighting='uniform' and no aggregator"
        )
    if num_byzantine:
        return "S4, clients that run the protocol: some of them lie; leave ByzantineClients out"
    return ""


def find_amplification_obstacle(
    mechanism: Mechanism, claim: PrivacyClaim, law: CohortLaw, num_clients: int
) -> str:
    """Name the condition under which a mechanism's rounds do not amplify, with the cure. "" where they do.

    Args:
        claim: Its claim towards outsiders, as it fits the setting.
        law: Law of cohorts.
        num_clients: Clients of the federation.
    """
    name = type(mechanism).__name__
    if isinstance(claim.loss, NonPrivate):
        return f"S10, a claim towards outsiders: {claim.loss.reason}; take a mechanism that has one"
    if claim.neighbours is not Neighbours.SUBSTITUTION:
        return (
            f"S10, a claim in which {Neighbours.SUBSTITUTION.value}: {name}'s is {claim.neighbours.name} "
            f"({claim.neighbours.value}), whose loss is smaller than what a draw needs; take one that claims "
            "substitution, such as GaussianNoise"
        )
    if len(mechanism.protection_groups(num_clients)) > 1:
        return f"S4, clients alike: {name} gives clients epsilons of their own; give all of them one"
    if not mechanism.alike_clients:
        return (
            f"S4, clients alike: it is not shown that {name} releases nothing of who takes part but sums of "
            "updates (alike_clients); take GaussianNoise, DistributedDiscreteGaussian or RotatedCoins"
        )
    if any(size > 1 for size in mechanism.group_sizes(law.cohort_size(num_clients))):
        return (
            f"S4, groups of one: {name} pairs clients, and a partner knows who was drawn; take a mechanism "
            "without groups, such as RotatedCoins or GaussianNoise"
        )
    if mechanism.separation > 1 or mechanism.hands_on:
        return (
            f"S7, noise that is independent over rounds: {name}'s is not; take band=1, or a mechanism with "
            "fresh noise, such as GaussianNoise"
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
    """Epsilon towards somebody who sees the released models alone and never learns who took part.

    Args:
        loss: Loss of one composition towards a client that takes part.
        delta: In (0, 1).
        law: Law of cohorts.
        num_clients: Clients that could be drawn.
        rounds: Released rounds, each with a draw of its own. Everything released from one draw belongs into
            one `loss`: amplifying two releases of one draw separately states too little.
        neighbours: Relation of the claim; substitution is needed.
        compositions: Compositions in one round.
        slack: Slack of one round, kept as it is.

    Raises:
        ValueError: If delta or the counts are none, the claim is not about substitution, cohorts are known,
            or there is no account of such a draw.
        TypeError: If the loss is of an unknown kind.
    """
    check_delta(delta)
    if compositions < 1 or rounds < 0:
        raise ValueError(f"compositions >= 1 and rounds >= 0 are needed, got {compositions} and {rounds}")
    if neighbours is not Neighbours.SUBSTITUTION:
        raise ValueError(
            f"secret cohorts need a claim in which {Neighbours.SUBSTITUTION.value}; this one is about "
            f"{neighbours.name} ({neighbours.value}), whose loss is smaller than what a draw needs. Take a "
            "mechanism that claims substitution towards outsiders (GaussianNoise, not CSGM or SIGM)"
        )
    check_loss(loss)
    _ = loss.infinite_mass  # refuses where there is nothing to account for
    if rounds == 0:
        return 0.0

    own = law.independent_draw_loss(loss, compositions, rounds, num_clients)

    def exact(remaining_delta: float) -> float:
        if own is not None:
            return composed_grid(own[0], remaining_delta, 1, own[1]).epsilon(remaining_delta)
        base = composed_grid(
            loss, remaining_delta / rounds, compositions, 1
        )  # cuts off a thousandth of its delta
        run = amplify_loss(base, law.cohort_size(num_clients), num_clients)
        return run.composed(rounds, _TAIL_SHARE * remaining_delta).epsilon(remaining_delta)

    return with_slack(
        exact, delta, Slack(composed_mass(min(slack.distance, 1.0), rounds), rounds * slack.log_ratio)
    )
