"""`fedq audit`: try to refute the claims of mechanisms, by simulation and with all held streams fixed."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.audit import audit, bench
from lightning_fedq.audit.audit_case import AuditCase
from lightning_fedq.audit.cases import audit_cases, claimed_losses
from lightning_fedq.audit.knowledge import SEGMENTS, audit_knowledge
from lightning_fedq.audit.simulated import FEWEST_ROUNDS
from lightning_fedq.audit.views import Finding
from lightning_fedq.commands.mechanism_row import example
from lightning_fedq.commands.resolver import find_name, resolved
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, NonPrivate
from lightning_fedq.mechanisms.registry import mechanism_class
from lightning_fedq.privacy.verdict import format_epsilon

ALPHA, _DRAWS = 1e-3, 1e6
KNOWLEDGE_SHARE = 0.1
"""Part of `ALPHA` that goes to the audit with fixed streams (`audit.knowledge`)."""
CONCENTRATED_SHARE = 500
"""Divisor of the draws in concentrated cases, in which one draw is an encoding of a whole vector."""
EVERYBODY_SHARE = 100
"""Divisor of the draws in cases in which every client is a victim and one draw is a message."""
FEWEST_DRAWS = FEWEST_ROUNDS * sum(bench.SEGMENTS)
"""Minimum number of draws of a case in which every coordinate is a draw."""
_DIM = 1024
_MOST_TIMES = 4
_FEWEST_LONG = 200
"""Minimum number of rounds with repeated layers. A fault of one place shows only once per round."""


def audit_case(
    case: AuditCase, draws: int, alpha: float, seed: int = 0, times: int = 1
) -> tuple[Finding, ...]:
    """Audit one case, which was made for `times` repetitions of both layers, see `cases`."""
    if case.concentrated:
        draws = max(draws // CONCENTRATED_SHARE, 64)
    if case.everybody:
        draws = max(draws // EVERYBODY_SHARE, FEWEST_ROUNDS * bench.CROWD)
    return audit(case, draws, alpha=alpha, seed=seed, times=times)


def cases(kind: type[Mechanism], times: int = 1) -> tuple[AuditCase, ...]:
    """Return the audit cases of a mechanism, without cases that claim nothing.

    Args:
        kind: Class of the mechanism.
        times: Number of repetitions of both layers in a round.
    """
    every = audit_cases(example(kind), times * _DIM)
    return tuple(
        case
        for case in every
        if not all(isinstance(loss, NonPrivate) for loss in claimed_losses(case.mechanism, _DIM).values())
    )


def rows(name: str, draws: int, alpha: float) -> Iterator[tuple[str, ...]]:
    """Yield the table's lines of a mechanism: name, view, claim, lower bound, draws, CPU s, verdict.

    The eighth string names pairs of updates in which little is proven, or is "".
    """
    kind = mechanism_class(name)
    times = min(max(draws // (_FEWEST_LONG * sum(bench.SEGMENTS)), 1), _MOST_TIMES)
    found = cases(kind, times)
    if not found:
        loss = claimed_losses(example(kind), _DIM)[Adversary.OUTSIDER]
        assert isinstance(loss, NonPrivate)
        yield name, "", "no guarantee", "", "", "", f"nothing to refute: {loss.reason}", ""
    for case in found:
        start = time.process_time()
        findings = audit_case(case, draws, alpha / len(found), times=times)
        seconds = f"{time.process_time() - start:.0f}"
        title = f"{name}, {case.title}" if case.title else name
        for place, finding in enumerate(findings):
            blind = f"{title}, {finding.view}: {finding.blind_spots}" if finding.blind else ""
            first = (title, seconds) if place == 0 else ("", "")
            yield first[0], *_cells(finding), first[1], finding.report, blind


def knowledge(names: Sequence[str], alpha: float) -> list[Finding]:
    """Audit mechanisms with all streams fixed that each adversary holds.

    Concentrated cases and cases with dropout are left out.

    Args:
        names: Names or class paths of mechanisms.
        alpha: Probability of an alarm if all claims hold.
    """
    chosen = [
        case
        for name in names
        for case in audit_cases(example(mechanism_class(name)), sum(SEGMENTS))
        if not case.concentrated and not case.dropout_probability and case.min_survivors is None
    ]
    return [
        replace(finding, view=f"{type(case.mechanism).__name__}, {finding.view}")
        for case in chosen
        for finding in audit_knowledge(case, 16, alpha=alpha / len(chosen))
    ]


def _cells(finding: Finding) -> tuple[str, str, str, str]:
    """Return view, claim, lower bound and draws of a finding as text."""
    draws = f"{finding.draws:.2g}"
    if finding.epsilon is not None:
        at = f"δ({finding.epsilon:.2f})"
        return finding.view, f"{at} {finding.claim:.4f}", f"{finding.lower_bound:.4f}", draws
    if finding.order is not None:
        claim = f"D({finding.order:g}) {finding.claim:.4f}"
        return finding.view, claim, f"{finding.lower_bound:.4f}", draws
    if math.isinf(finding.claim):
        return finding.view, "", "", draws
    return finding.view, f"ε {format_epsilon(finding.claim)}", f"{finding.lower_bound:.4f}", draws


def main(mechanisms: Annotated[Sequence[str], "MECHANISM"] = (), *, draws: float = _DRAWS) -> int:
    """Try to refute the privacy claims of mechanisms. The audit runs their encoders and decoders on
    worst neighbours, also with all streams fixed that an adversary holds. If all claims are true,
    the whole table raises an alarm with probability at most 0.1%.

    Args:
        mechanisms: Mechanisms by row, class or class path (default: all).
        draws: Draws per neighbour: 1e6 (default) is fast, 1e8 is slow.

    Examples:
        fast:   fedq audit               10^6 draws, minutes for all mechanisms
        slow:   fedq audit --draws 1e8   100 times longer
        quick:  fedq audit LDPQ --draws 1e5

    A claim is a pure epsilon, or a delta at some epsilon if the claim is a curve. The draws prove
    the lower bound with 99.9% confidence for the whole table. 'One coordinate' is a case of a claim
    about a whole vector, in which the first coordinate has the whole difference. One encoding is
    then one draw, and there are 500 times fewer draws. The verdict is 'refuted' after an alarm.
    It is 'holds' if the bound is at least half of the claim, which is about the pairs of updates,
    the cohorts and the rounds that it names. Otherwise it is 'saw nothing'.
    """
    if not draws >= FEWEST_DRAWS:
        raise ValueError(f"draws must be >= {FEWEST_DRAWS}, got {draws:g}")
    console, start = Console(), time.process_time()
    console.width = max(console.width, 110)
    asked = resolved(mechanisms, _DIM, target=False).some()
    names = list(dict.fromkeys(find_name(type(mechanism)) for mechanism in asked.rows.values()))
    findings = knowledge(names, KNOWLEDGE_SHARE * ALPHA)
    alarms = [finding.report for finding in findings if finding.alarm]
    console.print(
        f"all keys of an adversary fixed: {alarms or 'no claim refuted'}, {len(findings)} claims "
        f"({time.process_time() - start:.1f} s)",
        highlight=False,
    )
    table = Table("mechanism", "view", "claim", "lower bound", "draws", "CPU s", "verdict", box=SIMPLE)
    blind: list[str] = []
    of_each, began = [max(len(cases(mechanism_class(name))), 1) for name in names], time.process_time()
    for place, name in enumerate(names, 1):
        for row in rows(name, int(draws), (1.0 - KNOWLEDGE_SHARE) * ALPHA / len(names)):
            table.add_row(*row[:7])
            blind += [row[7]] if row[7] else []
            if row[6].startswith("refuted"):
                alarms.append(row[6])
        remaining = (time.process_time() - began) * sum(of_each[place:]) / sum(of_each[:place])
        console.print(
            f"{name} ({place} of {len(names)}): {time.process_time() - start:.0f} s of CPU so far, about "
            f"{remaining:.0f} s left",
            highlight=False,
        )
    console.print(table)
    console.print(
        "saw nothing: the bound is below half of the claim, so a fault that doubles the loss might be missed",
        highlight=False,
    )
    for words in (*blind, *asked.words):
        console.print(words, highlight=False, markup=False)
    return int(bool(alarms or asked.left_out))
