"""Composition of privacy claims over coordinates, rounds and cohorts, at a stated delta.

A loss that knows a closed form for many compositions is asked for it (`Loss.epsilon`: a randomised response,
a Gaussian, sums of Renyi divergences); everything else goes through a loss grid (`grid`, pessimistic). A run
in which a client takes part with some probability a round composes the round's loss mixed with no loss at
all: that the client was there is taken as known to the adversary, so sampling buys fewer rounds and no
amplification.

What is no `Loss` is refused, and so is `NonPrivate`: there is nothing to add up.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_fedq.mechanisms.interface import NO_SLACK, Slack
from lightning_fedq.privacy.grid import SMALLEST_DELTA, LossGrid, added_up, check_loss, loss_grid
from lightning_fedq.privacy.losses import Loss, composed_mass

_TAIL_SHARE = 1e-3
"""Share of delta that truncated tails may take."""


def check_delta(delta: float | None, count: int | None = None, unit: str = "clients or samples") -> float:
    """Return delta if it is a delta.

    Args:
        delta: Chance with which a guarantee may fail.
        count: How many are protected; None where it is not known.
        unit: What they are, for the message.

    Raises:
        ValueError: If it is missing, below 1e-12 (where an accountant's floats would show), not below 1, or
            not below 1 / count.
    """
    if delta is None:
        raise ValueError(f"delta is missing; choose one below 1 / {unit}, 1e-5 say")
    if 0.0 < delta < SMALLEST_DELTA:
        raise ValueError(
            f"delta must be >= {SMALLEST_DELTA:g}, got {delta}; below it the accountant's rounding shows, "
            "and nothing can be stated"
        )
    limit, known = (1.0, "") if count is None else (1.0 / count, f" = 1 / {count} {unit}")
    if not 0.0 < delta < limit:
        raise ValueError(
            f"delta must be > 0 and below {limit:g}{known}, got {delta}; above 1 over the number of "
            f"{unit}, publishing one of them outright would count as private"
        )
    return delta


@dataclass(frozen=True)
class Spending:
    """An (epsilon, delta) statement and how it was found.

    Args:
        epsilon: In nats; infinite where the infinite mass exceeds delta.
        delta: The delta at which it holds.
        infinite_mass: Chance that an outcome occurs which only one of the two worlds can produce.
        method: How it was computed.
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
    """Epsilon of `past` rounds and a lottery of `rounds`, of `compositions` losses each, at `delta`.

    Args:
        loss: Loss of one composition.
        delta: In (0, 1).
        compositions: Compositions in one round, >= 1.
        rounds: >= 0.
        participation: Chance that the client takes part in one of them, known to the adversary afterwards.
        past: Rounds, >= 0, in which it surely takes part. With neither, nothing is spent.
        slack: How far what is released in one round may be from what `loss` describes, see `with_slack`.

    Raises:
        ValueError: If delta is no delta, or the loss is `NonPrivate`.
        TypeError: If the loss is of an unknown kind.
    """
    check_delta(delta)
    if compositions < 1 or min(rounds, past) < 0 or not 0.0 <= participation <= 1.0:
        raise ValueError(
            "compositions >= 1, rounds and past >= 0 and participation in [0, 1] are needed, "
            f"got {compositions}, {rounds}, {past} and {participation}"
        )
    check_loss(loss)
    mass = loss.infinite_mass
    if past and (loss.every_round or not loss.adds_up or not rounds or participation in (0.0, 1.0)):
        # no lottery to average over
        rounds, past, participation = rounds * (participation > 0.0) + past, 0, 1.0
    if past + rounds * participation == 0.0:
        return Spending(0.0, delta, 0.0, "nothing was released")
    round_mass = composed_mass(mass, compositions)
    run_mass = min(composed_mass(participation * round_mass, rounds) + composed_mass(round_mass, past), 1.0)
    if run_mass > delta:
        return Spending(math.inf, delta, run_mass, "infinite-loss mass above delta")

    simple = closed_form(loss, participation)

    def exact(remaining_delta: float) -> float:
        # epsilon of a run whose infinite mass is below delta
        if simple:
            return loss.epsilon(remaining_delta, compositions * (rounds + past))
        return composed_grid(loss, remaining_delta, compositions, rounds, participation, past).epsilon(
            remaining_delta
        )

    method = loss.method if simple else "privacy loss distribution, connect-the-dots, pessimistic"
    if slack == NO_SLACK:
        return Spending(exact(delta), delta, run_mass, method)
    distance = composed_mass(min(participation * slack.distance, 1.0), rounds) + past * slack.distance
    total = Slack(distance, (rounds + past) * slack.log_ratio)
    epsilon = with_slack(exact, delta, total)
    if math.isinf(epsilon):
        reason = (
            f"the released law is known to a distance of {total.distance:.2g} only, too much for this delta; "
            f"exact arithmetic would give epsilon {exact(delta):.3g}"
        )
        return Spending(epsilon, delta, run_mass, reason)
    price = f"(1 + e^epsilon) {total.distance:.2g} of delta and {2 * total.log_ratio:.2g} of epsilon"
    return Spending(epsilon, delta, run_mass, f"{method}; {price} pay for the sampler")


def with_slack(exact: Callable[[float], float], delta: float, slack: Slack) -> float:
    """Smallest epsilon at delta of laws P', Q' that are within a slack of laws P, Q that are known.

    With t the distance and r the log-ratio, P'(S) <= e^r P(S) + t <= e^r (e^x Q(S) + d) + t
    <= e^(x + 2 r) (Q'(S) + t) + e^r d + t: an epsilon of x + 2 r where the known laws reach x at
    d = (delta - (1 + e^epsilon) t) e^-r. The search starts at 0 and only rises, so it ends at the smallest
    solution, or where nothing is left of delta.

    Args:
        exact: Epsilon of the known laws at a delta.
        delta: In (0, 1).
        slack: Slack of the whole run.

    Returns:
        Rounded up by 1e-9 where there is slack; infinite where no epsilon will do in 100 steps.
    """
    if slack == NO_SLACK:
        return exact(delta)
    epsilon = 0.0
    for _ in range(100):  # a handful, unless a solution hardly exists
        if epsilon > 700.0 or (left := delta - (1.0 + math.exp(epsilon)) * slack.distance) <= 0.0:
            break
        wanted = exact(left * math.exp(-slack.log_ratio)) + 2.0 * slack.log_ratio
        if wanted <= epsilon:
            return epsilon
        epsilon = wanted * (1.0 + 1e-9)
    return math.inf


def closed_form(loss: Loss, participation: float = 1.0) -> bool:
    """Does an epsilon of a loss cost next to nothing, where no lottery is averaged over?"""
    return bool(loss.method) and (participation == 1.0 or loss.every_round)


def composed_grid(
    loss: Loss, delta: float, compositions: int, rounds: int, participation: float = 1.0, past: int = 0
) -> LossGrid:
    """The dominating loss distribution of a run. See `spent`."""
    if past:
        lottery = composed_grid(loss, delta / 2, compositions, rounds, participation)
        return added_up([composed_grid(loss, delta / 2, compositions, past), lottery])
    tail = _TAIL_SHARE * delta
    if loss.every_round and (whole := loss.composed(compositions * rounds)) is not None:
        return loss_grid(whole, tail)  # rounds without the client are not counted on
    if (one_round := loss.composed(compositions)) is not None:  # a grid holds one loss more exactly than many
        loss, compositions = one_round, 1
    if participation == 1.0:
        count = compositions * rounds  # independent losses add up: their laws convolve
        return loss_grid(loss, tail / count).composed(count, tail)
    # what is cut counts as infinite mass: shares that exceed `tail` together cost precision only
    one = loss_grid(loss, tail / (2 * compositions * rounds)).composed(compositions, tail / (2 * rounds))
    return one.coarser().sometimes(participation).composed(rounds, tail / 2)  # a round without it costs 0


class Rounds(NamedTuple):
    """One kind of a client's rounds, by its claim against one adversary."""

    loss: Loss
    compositions: int = 1
    slack: Slack = NO_SLACK


def spent_together(kinds: Mapping[Rounds, int], delta: float) -> float:
    """Epsilon of one client's rounds of several kinds against one adversary, at `delta`.

    Args:
        kinds: How many rounds of each kind there were, >= 1.
        delta: In (0, 1).

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
        _ = loss.infinite_mass  # refuses where there is nothing to account for
    distance = sum(rounds * kind.slack.distance for kind, rounds in kinds.items())
    log_ratio = sum(rounds * kind.slack.log_ratio for kind, rounds in kinds.items())
    return with_slack(lambda left: _exact_epsilon(kinds, left), delta, Slack(distance, log_ratio))


def _exact_epsilon(kinds: Mapping[Rounds, int], delta: float) -> float:
    """Epsilon of all rounds: losses in closed form are added first, then all losses on one grid."""
    parts: list[tuple[Loss, int, int]] = []
    total: Loss | None = None
    # several kinds of rounds may share one stream of noise
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
    share = delta / len(parts)  # sizes the tails that are cut; the sum is read at all of delta
    return added_up([composed_grid(loss, share, *counts) for loss, *counts in parts]).epsilon(delta)
