"""`fedq audit`: try to refute what mechanisms claim, by simulation and with all held streams fixed."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.audit import audit, bench
from lightning_fedq.audit.knowledge import SEGMENTS, audit_knowledge
from lightning_fedq.audit.simulated import FEWEST_ROUNDS
from lightning_fedq.audit.views import Finding
from lightning_fedq.commands.mechanism_row import example
from lightning_fedq.commands.resolver import find_name, resolved
from lightning_fedq.mechanisms.interface import (
    Adversary,
    AuditCase,
    Loss,
    Mechanism,
    NonPrivate,
    RoundContext,
)
from lightning_fedq.mechanisms.registry import mechanism_class
from lightning_fedq.privacy.verdict import format_epsilon

ALPHA, _DRAWS = 1e-3, 1e6
KNOWLEDGE_SHARE = 0.1
"""Part of `ALPHA` that goes to the audit of knowledge."""
CONCENTRATED_SHARE = 500
"""One draw in so many is an encoding of a whole vector whose difference lies in one coordinate."""
EVERYBODY_SHARE = 100
"""One draw in so many is a message of one symbol."""
FEWEST_DRAWS = FEWEST_ROUNDS * sum(bench.SEGMENTS)
"""Of a case in which every coordinate is a draw."""
_DIM = 1024
_MOST_TIMES = 4
_FEWEST_LONG = 200
"""Rounds that there are at least where layers are repeated: each shows a fault of one place only once."""


def count_repetitions(draws: int) -> int:
    """Number of times that both layers stand in a round, for so many draws of a coordinate."""
    return min(max(draws // (_FEWEST_LONG * sum(bench.SEGMENTS)), 1), _MOST_TIMES)


def audit_case(
    case: AuditCase, draws: int, alpha: float, seed: int = 0, times: int = 1
) -> tuple[Finding, ...]:
    """Audit one case. `times` is what it is a case of, see `cases`."""
    if case.concentrated:
        draws = max(draws // CONCENTRATED_SHARE, 64)
    if case.everybody:
        draws = max(draws // EVERYBODY_SHARE, FEWEST_ROUNDS * bench.CROWD)
    return audit(case, draws, alpha=alpha, seed=seed, times=times)


def claimed_losses(mechanism: Mechanism) -> dict[Adversary, Loss]:
    """Losses, of three clients or four and `_DIM` coordinates."""
    sizes = mechanism.group_sizes(3 if mechanism.fixed_cohort else 4)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    groups = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    one = torch.ones(1, dtype=torch.float64)
    claims = mechanism.claims(RoundContext(0, groups, (_DIM,), 0 * one, one))
    return {claim.adversary: claim.loss for claim in claims}


def cases(kind: type[Mechanism], times: int = 1) -> tuple[AuditCase, ...]:
    """Cases in which a mechanism is audited. None if it claims nothing.

    Args:
        times: How often both layers stand in a round.
    """
    found = example(kind).audit_cases(times * _DIM)
    return tuple(
        case
        for case in found
        if not all(isinstance(loss, NonPrivate) for loss in claimed_losses(case.mechanism).values())
    )


def rows(name: str, draws: int, alpha: float) -> Iterator[tuple[str, ...]]:
    """Lines of the table for one mechanism: name, view, claim, lower bound, draws, CPU seconds, verdict."""
    kind = mechanism_class(name)
    times = count_repetitions(draws)
    found = cases(kind, times)
    if not found:
        loss = claimed_losses(example(kind))[Adversary.OUTSIDER]
        assert isinstance(loss, NonPrivate)
        yield name, "", "no guarantee", "", "", "", f"nothing to refute: {loss.reason}"
    for case in found:
        start = time.process_time()
        findings = audit_case(case, draws, alpha / len(found), times=times)
        seconds = f"{time.process_time() - start:.0f}"
        title = f"{name}, {case.title}" if case.title else name
        for finding in findings:
            yield title, *_cells(finding), seconds, _verdict(finding)
            title = seconds = ""


def _verdict(finding: Finding) -> str:
    return f"{finding.verdict}: {finding.alarm}" if finding.alarm else finding.verdict


def knowledge(names: Sequence[str], alpha: float) -> list[Finding]:
    """Findings with all streams fixed that each adversary holds, of all cases that are not concentrated."""
    found = [
        case
        for name in names
        for case in example(mechanism_class(name)).audit_cases(sum(SEGMENTS))
        if not case.concentrated and not case.dropout_probability and case.min_survivors is None
    ]
    return [
        replace(finding, view=f"{type(case.mechanism).__name__}, {finding.view}")
        for case in found
        for finding in audit_knowledge(case, 16, alpha=alpha / len(found))
    ]


def _cells(finding: Finding) -> tuple[str, str, str, str]:
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
    """Try to refute the privacy claims of mechanisms: their encoders and decoders are run on
    worst neighbours, also with all streams fixed that an adversary holds. If all claims are true,
    the whole table raises an alarm with probability 0.1% at most.

    Args:
        mechanisms: Mechanisms by row, class or class path (default: all).
        draws: Draws per neighbour: 1e6 (default) is fast, 1e8 long.

    Examples:
        fast:   fedq audit               10^6 draws; minutes for all
        long:   fedq audit --draws 1e8   a hundred times that, by hand
        quick:  fedq audit LDPQ --draws 1e5

    A claim is a pure epsilon, or a delta at some epsilon where the claim is a curve. The lower
    bound is what the draws prove, at 99.9% for the whole table. 'One coordinate': the claim is
    about a whole vector, and the whole difference lies in its first coordinate; one encoding is
    one draw then, and there are 500 times fewer. Verdicts: 'holds' where a fault
    that doubles the loss would have been proven, 'refuted', and 'saw nothing' elsewhere.
    """
    if not draws >= FEWEST_DRAWS:
        raise ValueError(f"draws must be >= {FEWEST_DRAWS}, got {draws:g}")
    console, start = Console(), time.process_time()
    console.width = max(console.width, 110)
    asked = resolved(mechanisms, _DIM, target=False).some()
    names = list(dict.fromkeys(find_name(type(mechanism)) for mechanism in asked.rows.values()))
    held = knowledge(names, KNOWLEDGE_SHARE * ALPHA)
    alarms = [_verdict(finding) for finding in held if finding.alarm]
    console.print(
        f"all that an adversary holds fixed: {alarms or 'no claim refuted'}, {len(held)} claims "
        f"({time.process_time() - start:.1f} s)",
        highlight=False,
    )
    table = Table("mechanism", "view", "claim", "lower bound", "draws", "CPU s", "verdict", box=SIMPLE)
    of_each, began = [max(len(cases(mechanism_class(name))), 1) for name in names], time.process_time()
    for place, name in enumerate(names, 1):
        for row in rows(name, int(draws), (1.0 - KNOWLEDGE_SHARE) * ALPHA / len(names)):
            table.add_row(*row)
            if row[6].startswith("refuted"):
                alarms.append(row[6])
        left = (time.process_time() - began) * sum(of_each[place:]) / sum(of_each[:place])
        console.print(
            f"{name} ({place} of {len(names)}): {time.process_time() - start:.0f} s of CPU so far, about "
            f"{left:.0f} s left",
            highlight=False,
        )
    console.print(table)
    console.print(
        "saw nothing: the bound is below half of the claim, so a fault that doubles the loss might be missed",
        highlight=False,
    )
    for words in asked.words:
        console.print(words, highlight=False, markup=False)
    return int(bool(alarms or asked.left_out))
