import torch

from lightning_fedq.data.batches import LocalWork, Stack
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.rounds import RoundPlan, RoundPlanner
from lightning_fedq.training.loops import first_steps, round_stacks


def plan(num_clients, dropout=0.0):
    return RoundPlanner(num_clients, 3, dropout_probability=dropout).plan(1, FedAvg())


def test_stacks_hold_clients_of_equal_batch_shapes_and_differ_by_one():
    now = plan(11)
    stacks = round_stacks(now, lambda c: (4,) if c < 4 else (4, 2), lambda c: False, clients_per_step=3)
    assert sorted(c for stack in stacks for c in stack.clients) == list(range(11))
    assert all(len({c < 4 for c in stack.clients}) == 1 for stack in stacks)
    assert sorted(len(stack.clients) for stack in stacks) == [2, 2, 2, 2, 3]


def test_a_clients_seeds_do_not_depend_on_the_stack():
    now = plan(9)
    orders = []
    for clients_per_step in (1, 4, 9):
        stacks = round_stacks(now, lambda c: (1,), lambda c: True, clients_per_step)
        pairs = [pair for s in stacks for pair in zip(s.clients, s.order_seeds, strict=True)]
        orders.append(dict(pairs))
    assert orders[0] == orders[1] == orders[2]
    assert len(set(orders[0].values())) == 9


def test_stacks_shuffle_all_their_clients_or_none():
    """Clients of one batch and of several can train on batches of the same shapes under a limit."""
    held = [torch.arange(4 if client % 2 else 12) for client in range(8)]
    for limits in ((1, None, 1), (1, 1, 1.0)):
        work = LocalWork(held, 4, False, True, *limits)
        assert set(work.sizes) == {(4,)}
        orders = []
        for clients_per_step in (1, 3, 8):
            stacks = round_stacks(plan(8), work.sizes.__getitem__, work.shuffles, clients_per_step)
            seeds = [s.order_seeds or (None,) * len(s.clients) for s in stacks]
            orders.append(
                {
                    c: seed
                    for s, own in zip(stacks, seeds, strict=True)
                    for c, seed in zip(s.clients, own, strict=True)
                }
            )
        assert orders[0] == orders[1] == orders[2]
        assert {client for client, seed in orders[0].items() if seed is None} == {1, 3, 5, 7}


def test_dropped_clients_do_not_train_and_a_round_of_nobody_idles():
    now = plan(40, dropout=0.5)
    stacks = round_stacks(now, lambda c: (1,), lambda c: False, 5)
    assert not now.dropped & {c for stack in stacks for c in stack.clients}
    empty = RoundPlan(0, ((0,), (1,)), frozenset({0, 1}), 3)
    assert [(s.clients, s.batch_sizes) for s in round_stacks(empty, lambda c: (9,), lambda c: True, 5)] == [
        ((), (1,))
    ]


def test_shortened():
    stacks = [Stack((0,), (2, 2), 0, ()), Stack((1,), (2, 2), 0, ())]
    assert first_steps(stacks, 4) == stacks
    assert first_steps(stacks, 3) == stacks[:1]
    assert first_steps(stacks, 1) == [Stack((0,), (2,), 0, ())]
