import torch

from lightning_fedq.data.batches import LocalWork
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.rounds import RoundPlanner
from lightning_fedq.training.loops import round_stacks


def plan(num_clients):
    return RoundPlanner(num_clients, 3).plan(1, FedAvg())


def test_stacks_hold_clients_of_equal_batch_shapes_and_differ_by_one():
    now = plan(11)
    stacks = round_stacks(now, lambda c: (4,) if c < 4 else (4, 2), lambda c: False, clients_per_step=3)
    assert sorted(c for stack in stacks for c in stack.clients) == list(range(11))
    assert all(len({c < 4 for c in stack.clients}) == 1 for stack in stacks)
    assert sorted(len(stack.clients) for stack in stacks) == [2, 2, 2, 2, 3]


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
