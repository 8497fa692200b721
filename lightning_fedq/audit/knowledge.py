"""Audit of the randomness that an adversary does not hold: is it enough to hide a client's update?

A simulation of whole rounds can't see who knows the noise. Noise from a stream that the server shares looks
as random as other noise. This audit therefore fixes every stream that the adversary of a claim holds
(`HeldKeys`), and repeats the same round with all other streams fresh. If all noise comes from streams that
the adversary holds, its view no longer varies and reveals the update.

The test. Let H be the streams that the adversary holds, V the view of one position, and E(H) a set of
outcomes. H has the same law in both worlds, so a claim delta(epsilon) on (V, H) bounds the average over H:

    E_H[P(V in E(H) | high, H)] <= e^epsilon E_H[P(V in E(H) | low, H)] + delta(epsilon).

A *cell* is one position under one H. The first half of its draws chooses E(H) in two ways. One way selects
among 8 classes between quantiles of the cell's own draws. The other selects among 16 classes of distances
from the cell's mean, with one selection for all cells. The second half of the draws estimates both
probabilities.

Estimates of different cells are independent and in [0, 1]. Their mean therefore satisfies the Chernoff bound
in its Kullback-Leibler form, even with few draws per cell. The number of cells determines the confidence. A
correct mechanism raises an alarm with probability at most `alpha`, over all views, epsilons, sets and orders
of the worlds (rotated coordinates count as independent, as in `views`). Total disclosure is always detected:
it proves delta = 1 up to about (1 + e^epsilon) log(1 / alpha) over the number of cells.

The audit tests the average over H only. A claim may hold on average although it fails for some H, such as
the H of a partner who knows the shared word. A worst pair that depends on the streams tests each H
(`Mechanism.worst_pair`).
"""

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.audit.audit_case import AuditCase
from lightning_fedq.audit.bench import CROWD_SEGMENTS, FEW_SEGMENTS, Bench
from lightning_fedq.audit.cells import Tested
from lightning_fedq.audit.fixed_parts import HeldKeys
from lightning_fedq.audit.played import Played
from lightning_fedq.audit.simulated import cohort_size, position_loss
from lightning_fedq.audit.views import MOST, Array, Finding, View
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.interface import Adversary, Mechanism

SEGMENTS = (104, 101)
_CROWD = 16
"""Number of clients in cases where all clients are victims at once."""
_CLASSES = 8
_DISTANCES = 16
_HELD_ALIKE = (
    (Adversary.EAVESDROPPER, Adversary.OUTSIDER),
    (Adversary.SERVER, Adversary.SECAGG_SERVER),
    (Adversary.SERVER_AND_PARTNER,),
    (Adversary.CLIENT,),
)
"""Groups of adversaries that hold the same streams and are tested on the same rounds."""
_FRESH = 1 << 40
"""First seed of the streams that the adversary does not hold."""


def audit_knowledge(
    attacked: Mechanism | AuditCase,
    trials: int = 32,
    *,
    alpha: float = 1e-4,
    seed: int = 0,
    num_clients: int | None = None,
    cells: int = 800,
    repetitions: int = 60,
    against: Collection[Adversary] = tuple(Adversary),
) -> tuple[Finding, ...]:
    """Try to refute the claims against each adversary, with all streams fixed that the adversary holds.

    Args:
        attacked: Mechanism, or an audit case of it. Mechanisms of other packages are possible.
        trials: Number of rounds with the same held streams, a multiple of 4. Half of them choose events.
        alpha: Probability of an alarm if all claims hold.
        seed: Seed of the audit's own keys.
        num_clients: Size of the cohort. None is the size of the case, or the usual size.
        cells: Number of cells to reach, unless `repetitions` ends the audit earlier.
        repetitions: Maximum number of choices of the held streams. Each gives a cell per position.
        against: Adversaries whose claims are tested.

    Returns:
        One finding for each adversary with a claim, with the proven and the claimed delta. Empty if the
        mechanism claims nothing.

    Raises:
        ValueError: If `trials` is not a positive multiple of 4.
    """
    if trials < 4 or trials % 4:
        raise ValueError(f"trials must be a positive multiple of 4, got {trials}")
    case = attacked if isinstance(attacked, AuditCase) else AuditCase(attacked)
    size = num_clients or case.num_clients or (_CROWD if case.everybody else cohort_size(case.mechanism))
    segments = SEGMENTS
    if case.everybody:  # a message is a cell here, so four clients in all repetitions are enough
        cells = min(cells, 4 * repetitions)
    if case.concentrated or case.everybody:
        segments = FEW_SEGMENTS if case.concentrated else CROWD_SEGMENTS
    findings: list[Finding] = []
    for together in _HELD_ALIKE:
        bench = Bench(case, seed, segments, size, together[0])
        seen = {who: test for who in together if who in against and (test := _sight(bench, who))}
        if seen:
            findings += _judge(bench, seen, trials, alpha / len(Adversary), cells, repetitions)
    return tuple(findings)


def _sight(bench: Bench, adversary: Adversary) -> Tested | None:
    """Return the view of an adversary, or None if there is no claim or no other client to observe."""
    claim = bench.private_claim(adversary)
    if claim is None:
        return None
    message = Played.message if bench.symbolic else Played.decoded_message
    if adversary is Adversary.CLIENT:
        if len(bench.clients) < 2:
            return None  # there is no other client whose update the sum could reveal
        others = Played.honest_total if bench.rotated else Played.honest_sum
        return Tested("the sum less what a curious client knows", claim, others)
    if adversary is Adversary.OUTSIDER:
        released = Played.total if bench.rotated else Played.released  # the rotation is public
        return Tested("the released sum", claim, released)
    if adversary is Adversary.SECAGG_SERVER and bench.mechanism.homomorphic:
        if bench.symbolic:
            return Tested("the sum of all messages", claim, Played.total)
        return Tested("the decoded sum of all messages", claim, Played.released)
    if adversary is Adversary.SERVER and len(bench.groups[0]) > 1 and bench.aligned:
        return Tested("all messages of a group", claim, Played.group)
    return Tested("one message", claim, message)


def _insiders(bench: Bench, victim: int, adversary: Adversary) -> frozenset[int]:
    """Return the clients whose keys the adversary holds: the curious client, or the victim's partners."""
    if adversary is Adversary.CLIENT:
        place = bench.clients.index(victim) + 1
        return frozenset([bench.clients[place % len(bench.clients)]])
    if adversary is Adversary.SERVER_AND_PARTNER:
        return frozenset(bench.context(0).place(victim)[0]) - {victim}
    return frozenset()


def _judge(
    bench: Bench, tests: dict[Adversary, Tested], trials: int, alpha: float, cells: int, repetitions: int
) -> list[Finding]:
    """Run the rounds of adversaries that hold the same streams, and test each claim."""
    adversary = next(iter(tests))
    values: list[list[Array]] = [[] for _ in tests]
    labels: list[list[NDArray[np.int64]]] = [[] for _ in tests]
    for repeat in range(repetitions):
        victim = bench.clients[repeat % len(bench.clients)]
        held = (1 << 20) * (bench.seed + 1) + repeat
        known, insiders = SeededKeys(held), _insiders(bench, victim, adversary)
        played: list[Played] = []  # the same round with the same held streams and alternating labels
        for trial in range(trials):
            fresh = SeededKeys(_FRESH + held * trials + trial)
            keys = HeldKeys(adversary, known, fresh, insiders)
            played.append(bench.play_alone(keys, victim, trial % 2, told=known))
        for number, test in enumerate(tests.values()):
            seen = np.stack([test.extract(part) for part in played])
            if bench.concentrated and not bench.follows_streams:
                seen = seen[:, :1]
            labelled = np.stack([part.position_labels(seen.shape[1]) for part in played])
            counted = labelled[0] >= 0
            values[number].append(seen[:, counted])
            labels[number].append(labelled[:, counted])
        if min(sum(part.shape[1] for part in parts) for parts in values) >= cells:
            break
    findings = []
    for (who, test), seen_parts, label_parts in zip(tests.items(), values, labels, strict=True):
        drawn = np.concatenate(seen_parts, axis=1)
        loss, copies = position_loss(bench, test.claim, len(test.extract(played[0])))
        view = View(f"{test.view}, {who.name.lower()}", loss, copies, 1, 2)
        own, other = estimates(drawn, np.concatenate(label_parts, axis=1), view.epsilons)
        findings.append(_finding(view, own, other, drawn.shape[1], drawn.size // 4, alpha))
    return findings


def estimates(values: Array, labels: NDArray[np.int64], epsilons: list[float]) -> tuple[Array, Array]:
    """Estimate, from the second half of the draws, the probabilities of events that the first half chose.

    Args:
        values: `(trials, cells)` observed numbers.
        labels: `(trials, cells)` labels 0 or 1. Each half of the trials has both.
        epsilons: Epsilons at which events are chosen.

    Returns:
        Mean over cells of P(E | label for which E was chosen) and of P(E | other label), each of shape
        `(2 ways to choose, 2 labels, len(epsilons))`.
    """
    half = len(values) // 2
    learn = np.sort(values[:half], axis=0)
    edges = learn[[half * k // _CLASSES for k in range(1, _CLASSES)]]
    own = _chosen((values[:, None, :] >= edges[None]).sum(1), labels, _CLASSES, epsilons, alike=False)
    distances = values - values[:half].mean(0)
    common = np.quantile(distances[:half], np.arange(1, _DISTANCES) / _DISTANCES)
    classes = np.searchsorted(common, distances, side="right")
    pooled = _chosen(classes, labels, _DISTANCES, epsilons, alike=True)
    high, low = (np.stack(both) for both in zip(own, pooled, strict=True))
    return high, low


def _chosen(
    classes: NDArray[np.int64], labels: NDArray[np.int64], size: int, epsilons: list[float], *, alike: bool
) -> tuple[Array, Array]:
    """Choose sets of classes from the first half of the draws and estimate them from the second half.

    Args:
        classes: `(trials, cells)` class of each observed number.
        labels: `(trials, cells)` labels 0 or 1.
        size: Number of classes.
        epsilons: Epsilons at which sets are chosen.
        alike: Whether one set is chosen for all cells. Otherwise each cell has its own set.

    Returns:
        Two tensors `(2 labels, len(epsilons))`, see `estimates`.
    """
    half, cells = len(classes) // 2, classes.shape[1]
    chosen_on, judged_on = np.zeros((2, 2, size, cells))  # counts by half, label, class and cell
    for row in range(len(classes)):
        counts = chosen_on if row < half else judged_on
        np.add.at(counts, (labels[row], classes[row], np.arange(cells)), 1.0)
    judged = judged_on / judged_on.sum(1, keepdims=True)
    learned = chosen_on.sum(2, keepdims=True) if alike else chosen_on
    learned = (learned + 0.25) / (learned.sum(1, keepdims=True) + 0.25 * size)
    own, other = np.empty((2, len(epsilons))), np.empty((2, len(epsilons)))
    for label in (0, 1):
        for number, epsilon in enumerate(epsilons):
            event = learned[label] > math.exp(min(epsilon, MOST)) * learned[1 - label]
            own[label, number] = np.where(event, judged[label], 0.0).sum(0).mean()
            other[label, number] = np.where(event, judged[1 - label], 0.0).sum(0).mean()
    return own, other


def _finding(view: View, own: Array, other: Array, cells: int, draws: int, alpha: float) -> Finding:
    """Bound the mean probabilities and compare the proven delta with the claimed delta."""
    each = math.log(2.0 * own.size / alpha) / cells
    lower = np.vectorize(lambda mean: mean_bounds(mean, each)[0])(own)
    upper = np.vectorize(lambda mean: mean_bounds(mean, each)[1])(other)
    allowed = np.array([view.allowed(epsilon) for epsilon in view.epsilons])
    odds = np.exp(np.minimum(view.epsilons, MOST))
    proven = np.maximum((lower - odds * upper).max((0, 1)), 0.0)
    beyond = proven > allowed + 1e-12
    worst = int(np.argmax(np.where(beyond, 2.0 + proven - allowed, proven / np.maximum(allowed, 1e-12))))
    alarm = ""
    if beyond[worst]:
        alarm = (
            f"with all keys of the adversary fixed, delta is at least {proven[worst]:.3g} at epsilon "
            f"{view.epsilons[worst]:.3g}, and the claim is {allowed[worst]:.3g}"
        )
    return Finding(view.name, float(allowed[worst]), float(proven[worst]), draws, alarm, view.epsilons[worst])


def mean_bounds(mean: float, exponent: float) -> tuple[float, float]:
    """Return lower and upper bounds of the expectation of a mean of n independent numbers in [0, 1].

    Each bound is wrong with probability at most e^(-n exponent).

    Args:
        mean: Observed mean of the n numbers.
        exponent: log(1 / error probability) / n.

    References:
        Hoeffding, Probability inequalities for sums of bounded random variables, 1963, Theorem 1.
    """

    def divergence(p: float) -> float:
        total = 0.0
        for observed, expected in ((mean, p), (1.0 - mean, 1.0 - p)):
            if observed > 0.0:
                total += math.inf if expected <= 0.0 else observed * math.log(observed / expected)
        return total

    def edge(inside: float, outside: float) -> float:
        for _ in range(60):
            middle = 0.5 * (inside + outside)
            if divergence(middle) <= exponent:
                inside = middle
            else:
                outside = middle
        return outside

    return edge(mean, 0.0), edge(mean, 1.0)
