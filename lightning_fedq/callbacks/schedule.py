"""The stacks of one round, in the order in which they train: a pure function of the round's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_fedq.data.loader import Stack
from lightning_fedq.rounds import RoundPlan


def round_stacks(
    plan: RoundPlan,
    sizes_of: Callable[[int], tuple[int, ...]],
    shuffled: Callable[[int], bool],
    clients_per_step: int,
) -> list[Stack]:
    """Cut the clients that answer into stacks of equal batch shapes.

    Stacks of the same shapes differ by at most one client. A client's seeds do not depend on the
    other clients; the dropout masks of a stack of two or more follow from its first client's.

    Args:
        plan: The round.
        sizes_of: A client's batch sizes.
        shuffled: Is there anything to shuffle for this client?
        clients_per_step: Largest stack, >= 1.

    Returns:
        The stacks; a single idle one where nobody answers.
    """
    if not plan.survivors:
        return [Stack((), (1,), plan.stream_seed("training"), ())]
    alike: dict[tuple[int, ...], list[int]] = {}
    for client in plan.survivors:
        alike.setdefault(sizes_of(client), []).append(client)
    stacks = []
    for sizes, clients in alike.items():
        num_stacks = -(-len(clients) // clients_per_step)
        bounds = [len(clients) * index // num_stacks for index in range(num_stacks + 1)]
        for start, stop in pairwise(bounds):
            members = tuple(clients[start:stop])
            orders = tuple(plan.stream_seed("data order", c) for c in members) if shuffled(members[0]) else ()
            stacks.append(Stack(members, sizes, plan.stream_seed("training", members[0]), orders))
    return stacks


def shortened(stacks: Sequence[Stack], num_steps: int) -> list[Stack]:
    """The first steps of a round, for `fast_dev_run`: whole stacks, or else a part of the first one."""
    kept, left = [], num_steps
    for stack in stacks:
        if len(stack.batch_sizes) > left:
            break
        kept.append(stack)
        left -= len(stack.batch_sizes)
    return kept or [replace(stacks[0], batch_sizes=stacks[0].batch_sizes[:num_steps])]
