"""The stacks of one round, in the order in which they train: a pure function of the round's plan.

Where a `BatchRule` draws the batches, they also depend on what the rule remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from lightning_fedq.data.batches import BatchRule, LocalWork, Stack
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import RoundPlan, RoundPlanner


def idle(plan: RoundPlan) -> Stack:
    """A stack of nobody, with one step that does nothing."""
    return Stack((), (1,), plan.stream_seed("training"), ())


def round_stacks(
    plan: RoundPlan,
    sizes_of: Callable[[int], tuple[int, ...]],
    shuffled: Callable[[int], bool],
    clients_per_step: int,
) -> list[Stack]:
    """Cut the clients that answer into stacks of equal batch shapes, all of which shuffle or none.

    Stacks of one kind differ by at most one client. A client's seeds do not depend on the other clients.

    Args:
        sizes_of: A client's batch sizes.
        shuffled: Is there anything to shuffle for this client?
        clients_per_step: Largest stack, >= 1.

    Returns:
        The stacks; a single idle one where nobody answers.
    """
    if not plan.survivors:
        return [idle(plan)]
    alike: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for client in plan.survivors:
        alike.setdefault((sizes_of(client), shuffled(client)), []).append(client)
    stacks = []
    for (sizes, shuffles), clients in alike.items():
        num_stacks = -(-len(clients) // clients_per_step)
        bounds = [len(clients) * index // num_stacks for index in range(num_stacks + 1)]
        for start, stop in pairwise(bounds):
            members = tuple(clients[start:stop])
            orders = tuple(plan.stream_seed("data order", c) for c in members) if shuffles else ()
            first = plan.stream_seed("training", members[0])
            seed_of = partial(plan.stream_seed, "training")
            stacks.append(Stack(members, sizes, first, orders, training_seed_of=seed_of))
    return stacks


def shortened(stacks: Sequence[Stack], num_steps: int) -> list[Stack]:
    """The first steps of a round, for `fast_dev_run`: whole stacks, or else a part of the first one."""
    kept, left = [], num_steps
    for stack in stacks:
        if len(stack.batch_sizes) > left:
            break
        kept.append(stack)
        left -= len(stack.batch_sizes)
    first = stacks[0]
    part = replace(
        first,
        batch_sizes=first.batch_sizes[:num_steps],
        samples=first.samples[:num_steps],
        keys=first.keys[:num_steps],
    )
    return kept or [part]


class Schedule:
    """The stacks of any round. Those of the last one asked for are kept, so that a rule draws them once.

    Args:
        planner: Draws the rounds.
        mechanism: Mechanism that says into which groups a cohort falls.
        work: What the clients hold.
        rule: Draws the batches; None is whole passes.
        num_steps: Cut a round after so many steps; 0 is all of it.
    """

    def __init__(
        self,
        planner: RoundPlanner,
        mechanism: Mechanism,
        work: LocalWork,
        rule: BatchRule | None,
        num_steps: int,
    ) -> None:
        self._planner, self._mechanism, self._work = planner, mechanism, work
        self._rule, self._num_steps = rule, num_steps
        self._kept: tuple[tuple[int, int, int, int | None], list[Stack]] | None = None

    @property
    def longest(self) -> int:
        """Batches of the client that has most of them in a round."""
        longest = max(map(len, self._work.sizes))
        return min(longest, self._num_steps) if self._num_steps else longest

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Each client's batch sizes in a round."""
        return self._work.sizes

    @property
    def alike(self) -> bool:
        """Has every client as many batches in a round?"""
        return len({len(sizes) for sizes in self._work.sizes}) == 1

    def stacks(
        self, round: int, attempt: int, clients_per_step: int, most_batches: int | None = None
    ) -> list[Stack]:
        """The stacks of one attempt at a round, in which a client has no more than `most_batches`."""
        key = (round, attempt, clients_per_step, most_batches)
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, self._new(*key))
        return self._kept[1]

    def _new(self, round: int, attempt: int, clients_per_step: int, most: int | None) -> list[Stack]:
        return self.of_all_ranks(round, attempt, clients_per_step, most)

    def of_all_ranks(
        self, round: int, attempt: int, clients_per_step: int, most: int | None = None
    ) -> list[Stack]:
        """The stacks that one process would train, in its order, however many processes there are."""
        return self._of(self._planner.plan(round, self._mechanism, attempt), attempt, clients_per_step, most)

    def to_try(self, round: int, clients_per_step: int) -> list[Stack]:
        """Stacks to try something out with: those of a round as everybody may see it."""
        return self._of(self._planner.expected(round, self._mechanism), 0, clients_per_step, None)

    def _of(self, plan: RoundPlan, attempt: int, clients_per_step: int, most: int | None) -> list[Stack]:
        work, rule = self._work, self._rule
        if rule is None:
            stacks = round_stacks(plan, lambda c: work.sizes[c][:most], work.shuffles, clients_per_step)
        else:  # one for each client that answers, on the batches that are drawn for it
            stacks, drawn = [], rule.draw(plan.round, attempt, plan.survivors)
            for client, batches in zip(plan.survivors, drawn, strict=True):
                own, seed = batches[:most], plan.stream_seed("training", client)
                sizes, keys = tuple(map(len, own)), rule.keys(client, len(own))
                stacks.append(Stack((client,), sizes, seed, (), own, keys))
            stacks = stacks or [idle(plan)]
        return shortened(stacks, self._num_steps) if self._num_steps else stacks
