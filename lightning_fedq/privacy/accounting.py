"""Composition of privacy claims over coordinates, rounds and cohorts, at a stated delta.

Losses with a closed form for many compositions use it (`Loss.epsilon`: randomised response, Gaussian noise,
sums of Renyi divergences). All other losses go through a loss grid (`grid`), which is pessimistic. If a
client takes part in a round with some probability, the round's loss is mixed with a loss of zero. The
adversary is assumed to know in which rounds the client took part. So random cohorts lower the expected number
of rounds, but give no amplification.

Objects that are no `Loss` are refused, and so is `NonPrivate`, which has nothing to compose.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from lightning_fedq.mechanisms.interface import NO_SLACK, Slack
from lightning_fedq.privacy.grid import SMALLEST_DELTA, LossGrid, added_up, check_loss, loss_grid
from lightning_fedq.privacy.losses import Loss, composed_mass

_TAIL_SHARE = 1e-3
"""Share of delta that may be spent on truncated tails of loss distributions."""


def check_delta(delta: float | None, count: int | None = None, unit: str = "clients or samples") -> float:
    """Return delta if it is a valid delta.

    Args:
        delta: Delta of a guarantee, or None where the user gave none.
        count: Number of protected clients or samples, or None where it is not known.
        unit: Plural noun for the protected units, used in the message.

    Raises:
        ValueError: If delta is missing, below 1e-12 (where the rounding of the accountant's floats would
            show), not below 1, or not below 1 / count.
        TypeError: If delta is not a number.
    """
    if delta is None:
        raise ValueError(f"delta is missing. Choose one below 1 / {unit}, such as 1e-5.")
    if not isinstance(delta, Real) or isinstance(delta, bool):
        raise TypeError(f"delta must be a number, got {delta!r} ({type(delta).__name__})")
    if 0.0 < delta < SMALLEST_DELTA:
        raise ValueError(
            f"delta must be >= {SMALLEST_DELTA:g}, got {delta} "
            "(below it, the accountant's rounding errors matter)"
        )
    limit, known = (1.0, "") if count is None else (1.0 / count, f" = 1 / {count} {unit}")
    if not 0.0 < delta < limit:
        raise ValueError(
            f"delta must be > 0 and below {limit:g}{known}, got {delta}. "
            f"With a larger delta, publishing one of the {unit} would count as private."
        )
    return delta


@dataclass(frozen=True)
class Spending:
    """An (epsilon, delta) statement and how it was computed.

    Args:
        epsilon: Epsilon in nats, infinite where the probability of a distinguishing event exceeds delta.
        delta: Delta at which epsilon holds.
        infinite_mass: Probability of a distinguishing event: an outcome that only one of two neighbouring
            inputs can produce.
        method: Name of the accounting method.
    """

    epsilon: float
    delta: float
    infinite_mass: float
    method: str


def spent(
    loss: Loss,
    delta: float,
    *,
    compositions: int = 1,
    rounds: int = 1,
    participation: float = 1.0,
    past: int = 0,
    slack: Slack = NO_SLACK,
) -> Spending:
    """Return epsilon of `past` certain and `rounds` random rounds, of `compositions` losses each.

    Args:
        loss: Loss of one composition.
        delta: Delta of the statement, in (0, 1).
        compositions: Compositions in one round, >= 1.
        rounds: Rounds in which the client takes part with probability `participation`, >= 0.
        participation: Probability that the client takes part in one of `rounds`. The adversary learns in
            which.
        past: Rounds in which the client takes part for certain, >= 0. Without any rounds, nothing is spent.
        slack: Distance of the law that is released in one round from the law of `loss`, see `with_slack`.

    Raises:
        ValueError: If delta is no delta, a number is out of range, or the loss is `NonPrivate`.
        TypeError: If the loss is of an unknown kind.
    """
    check_delta(delta)
    if compositions < 1 or min(rounds, past) < 0 or not 0.0 <= participation <= 1.0:
        raise ValueError(
            "Expected compositions >= 1, rounds >= 0, past >= 0 and participation in [0, 1], "
            f"got {compositions}, {rounds}, {past} and {participation}"
        )
    check_loss(loss)
    mass = loss.infinite_mass
    if past and (loss.every_round or not loss.adds_up or not rounds or participation in (0.0, 1.0)):
        # every round counts as one in which the client takes part, so there is nothing to average over
        rounds, past, participation = rounds * (participation > 0.0) + past, 0, 1.0
    if past + rounds * participation == 0.0:
        return Spending(0.0, delta, 0.0, "nothing was released")
    round_mass = composed_mass(mass, compositions)
    run_mass = min(composed_mass(participation * round_mass, rounds) + composed_mass(round_mass, past), 1.0)
    if run_mass > delta:
        return Spending(math.inf, delta, run_mass, "probability of a distinguishing event above delta")

    simple = closed_form(loss, participation)

    def exact(remaining_delta: float) -> float:
        # epsilon without slack, of a run whose infinite mass is below delta
        if simple:
            return loss.epsilon(remaining_delta, compositions * (rounds + past))
        grid = composed_grid(loss, remaining_delta, compositions, rounds, participation, past)
        return grid.epsilon(remaining_delta)

    method = loss.method if simple else "privacy loss distribution, connect-the-dots, pessimistic"
    if slack == NO_SLACK:
        return Spending(exact(delta), delta, run_mass, method)
    distance = composed_mass(min(participation * slack.distance, 1.0), rounds) + past * slack.distance
    total = Slack(distance, (rounds + past) * slack.log_ratio)
    parts = Slack((rounds * participation + past) * slack.distance, total.log_ratio)
    epsilon, factor = _with_any_slack(exact, delta, total, parts, _pure(loss, compositions, slack))
    if math.isinf(epsilon):
        reason = (
            f"the released law is known up to a distance of {total.distance:.2g} only, too much for this "
            f"delta (exact arithmetic would give epsilon {exact(delta):.3g})"
        )
        return Spending(epsilon, delta, run_mass, reason)
    price = f"{factor} {total.distance:.2g} of delta and {2 * total.log_ratio:.2g} of epsilon"
    return Spending(epsilon, delta, run_mass, f"{method}; {price} cover the sampler's error")


def _with_any_slack(
    exact: Callable[[float], float], delta: float, total: Slack, parts: Slack, pure: float
) -> tuple[float, str]:
    """Return the smaller bound on epsilon of `with_slack` and `_with_slack_of_parts`, and its price in words.

    The price is the factor of the distance that is paid from delta.

    Args:
        exact: Function that returns epsilon of the known laws at a delta.
        delta: Delta of the statement, in (0, 1).
        total: Slack of the whole run.
        parts: Sums of the slacks over the parts of the run.
        pure: Largest pure epsilon of one part. Infinite for none.
    """
    by_part = _with_slack_of_parts(exact, delta, parts, pure)
    whole = with_slack(exact, delta, total)
    return (whole, "(1 + e^epsilon)") if whole <= by_part else (by_part, "(1 + e^epsilon of a part)")


def with_slack(exact: Callable[[float], float], delta: float, slack: Slack) -> float:
    """Return the smallest epsilon at delta of laws P', Q' that are within a slack of known laws P, Q.

    Let t be the distance and r the log-ratio. Then P'(S) <= e^r P(S) + t <= e^r (e^x Q(S) + d) + t <= e^(x +
    2 r) (Q'(S) + t) + e^r d + t. So P' and Q' have epsilon x + 2 r where P and Q have epsilon x at d = (delta
    - (1 + e^epsilon) t) e^-r. The search starts at epsilon 0 and only rises. It ends at the smallest
    solution, or where no delta is left.

    Args:
        exact: Function that returns epsilon of the known laws at a delta.
        delta: Delta of the statement, in (0, 1).
        slack: Slack of the whole run.

    Returns:
        Epsilon, rounded up by 1e-9 where there is slack. Infinite if 100 steps find no solution.
    """
    if slack == NO_SLACK:
        return exact(delta)
    epsilon = 0.0
    for _ in range(100):  # a few steps suffice, unless delta is barely large enough
        if epsilon > 700.0 or (left := delta - (1.0 + math.exp(epsilon)) * slack.distance) <= 0.0:
            break
        wanted = exact(left * math.exp(-slack.log_ratio)) + 2.0 * slack.log_ratio
        if wanted <= epsilon:
            return epsilon
        epsilon = wanted * (1.0 + 1e-9)
    return math.inf


def _pure(loss: Loss, compositions: int, slack: Slack) -> float:
    """Return the pure epsilon of one of the parts that a slack is the sum of: a loss or a round."""
    return loss.pure_epsilon * (1 if slack.per_loss else compositions)


def _with_slack_of_parts(exact: Callable[[float], float], delta: float, slack: Slack, pure: float) -> float:
    """Return epsilon at delta where a run has independent parts, each with a finite pure epsilon p.

    Let t_j be the distance of part j and r the log-ratio of the run. Cutting each P'_j to P'_j <= e^r P_j
    costs t_j. Cutting it by the share of Q_j that Q'_j lacks costs e^(r + p) t_j, as P_j <= e^p Q_j. What is
    left has the likelihood ratio of P and Q, up to 2 r. So P'(S) <= e^(x + 2 r) Q'(S) + e^r d + (1 + e^(r +
    p)) t with t the sum of all t_j, where P and Q have epsilon x at d. In contrast to `with_slack`, t is not
    multiplied by e^x.

    Args:
        exact: Function that returns epsilon of the known laws at a delta.
        delta: Delta of the statement, in (0, 1).
        slack: Slack of the whole run: the sums over its parts.
        pure: Largest pure epsilon of one part. Infinite for none.
    """
    if pure + slack.log_ratio > 600.0:
        return math.inf
    left = delta - (1.0 + math.exp(pure + slack.log_ratio)) * slack.distance
    if left <= 0.0:
        return math.inf
    return (exact(left * math.exp(-slack.log_ratio)) + 2.0 * slack.log_ratio) * (1.0 + 1e-9)


def closed_form(loss: Loss, participation: float = 1.0) -> bool:
    """Return whether epsilon of a loss has a closed form, so that it is cheap to compute.

    With participation below 1 this needs a loss that charges every round, since the closed forms do not
    average.
    """
    return bool(loss.method) and (participation == 1.0 or loss.every_round)


def composed_grid(
    loss: Loss, delta: float, compositions: int, rounds: int, participation: float = 1.0, past: int = 0
) -> LossGrid:
    """Return the dominating loss distribution of a run on a grid. The arguments are those of `spent`."""
    if past:
        lottery = composed_grid(loss, delta / 2, compositions, rounds, participation)
        return added_up([composed_grid(loss, delta / 2, compositions, past), lottery])
    tail = _TAIL_SHARE * delta
    if loss.every_round and (whole := loss.composed(compositions * rounds)) is not None:
        return loss_grid(whole, tail)  # rounds without the client are charged as well
    if (one_round := loss.composed(compositions)) is not None:  # one loss fits a grid more exactly than many
        loss, compositions = one_round, 1
    if participation == 1.0:
        count = compositions * rounds  # losses are independent, so their distributions are convolved
        return loss_grid(loss, tail / count).composed(count, tail)
    # truncated tails count as infinite loss: shares that exceed `tail` in sum only cost precision
    one_loss = loss_grid(loss, tail / (2 * compositions * rounds))
    round_grid = one_loss.composed(compositions, tail / (2 * rounds))
    # a round without the client has loss 0
    return round_grid.coarser().sometimes(participation).composed(rounds, tail / 2)


class Rounds(NamedTuple):
    """Rounds of a client that have the same claim against one adversary.

    Args:
        loss: Loss of one composition.
        compositions: Compositions in one round, >= 1.
        slack: Slack of one round.
    """

    loss: Loss
    compositions: int = 1
    slack: Slack = NO_SLACK


def spent_together(kinds: Mapping[Rounds, int], delta: float) -> float:
    """Return epsilon of one client's rounds under several claims against one adversary, at `delta`.

    Args:
        kinds: Number of rounds under each claim, >= 1.
        delta: Delta of the statement, in (0, 1).

    Raises:
        ValueError: If delta is no delta, or a loss is `NonPrivate`.
        TypeError: If a loss is of an unknown kind.
    """
    check_delta(delta)
    if len(kinds) < 2:
        return sum(
            spent(loss, delta, compositions=compositions, rounds=rounds, slack=slack).epsilon
            for (loss, compositions, slack), rounds in kinds.items()
        )
    for loss, *_ in kinds:
        check_loss(loss)
        _ = loss.infinite_mass  # raises for `NonPrivate`
    distance = sum(rounds * kind.slack.distance for kind, rounds in kinds.items())
    log_ratio = sum(rounds * kind.slack.log_ratio for kind, rounds in kinds.items())
    total = Slack(distance, log_ratio)

    def exact(remaining_delta: float) -> float:
        return _exact_epsilon(kinds, remaining_delta)

    pure = max(_pure(*kind) for kind in kinds)
    return _with_any_slack(exact, delta, total, total, pure)[0]


def _exact_epsilon(kinds: Mapping[Rounds, int], delta: float) -> float:
    """Return epsilon of several claims' rounds at `delta`, without slack.

    Losses with closed forms are added in closed form first. The rest is added on one grid.
    """
    parts: list[tuple[Loss, int, int]] = []
    total: Loss | None = None
    # rounds under several claims may share one stream of noise, so such losses are charged standalone
    shared = sum(not kind.loss.adds_up for kind in kinds) > 1
    for kind, rounds in kinds.items():
        loss = kind.loss.standalone if shared else kind.loss
        whole = loss.composed(kind.compositions * rounds) if loss.every_round else None
        if whole is None:
            parts.append((loss, kind.compositions, rounds))
        elif total is None or (joined := total.plus(whole)) is None:
            parts += [] if total is None else [(total, 1, 1)]
            total = whole
        else:
            total = joined
    if total is not None and not parts:
        return total.epsilon(delta, 1)
    if total is not None:
        parts.append((total, 1, 1))
    share = delta / len(parts)  # sets the size of truncated tails, while epsilon is read at the whole delta
    return added_up([composed_grid(loss, share, *counts) for loss, *counts in parts]).epsilon(delta)
