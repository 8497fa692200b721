"""Ranks own disjoint clients: the same model for any number of them, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.data.batches import LocalWork, Stack
from lightning_fedq.keys.randomness import RootKeys, SeededKeys
from lightning_fedq.mechanisms import CPA, CorBin, SignRR, SubtractiveDither, TopK
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange, Ranges
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.training.loops import Schedule
from lightning_fedq.training.rank_group import DistributedClientsStrategy
from lightning_fedq.training.ranks import (
    OtherRankStoppedError,
    RankEngine,
    RankSchedule,
    _dtype_of_sum,
    _Kind,
    agree_on_start,
    assign_stacks,
    check_same_on_all_ranks,
    warn_idle_ranks,
)

# ---- who owns whom --------------------------------------------------------------------------------------


def schedule(num_clients=9, dropped=0.0):
    held = [torch.arange(10 * (1 + client % 3)) for client in range(num_clients)]
    planner = RoundPlanner(num_clients, 3, dropout_probability=dropped)
    return Schedule(planner, CorBin(1.0), LocalWork(held, 10, False, True, 1, None), None, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("round", [0, 1, 5])
def test_every_client_trains_on_one_rank_in_the_stacks_of_one_process(num_ranks, round):
    whole = schedule(dropped=0.3)
    expected = whole.stacks(round, 0, 2)
    found = [RankSchedule(whole, rank, num_ranks).stacks(round, 0, 2) for rank in range(num_ranks)]
    assert all(own for own in found)  # a rank without work makes one idle step
    trained = [stack for own in found for stack in own if stack.clients]
    assert sorted(stack.clients for stack in trained) == sorted(stack.clients for stack in expected)
    assert all(stack in expected for stack in trained)
    assert RankSchedule(whole, 0, num_ranks).global_stacks(round, 0, 2, None) == expected


def test_work_is_spread():
    stacks = [Stack((client,), (10,) * steps, 0, ()) for client, steps in enumerate((8, 1, 4, 4, 1, 6))]
    assert assign_stacks(stacks, 2) == [[0, 2], [1, 3, 4, 5]]
    assert assign_stacks(stacks, 1) == [[0, 1, 2, 3, 4, 5]]


def test_clients_that_train_alone_stay_where_their_data_are_open():
    """Cohorts of 16 of 64 clients, whose data differ: ranks met 60 and 58 of them by work alone."""
    generator, met = torch.Generator().manual_seed(1), [set[int](), set[int]()]
    sizes = torch.randint(5, 30, (64,), generator=generator).tolist()
    for _ in range(20):
        cohort = torch.randperm(64, generator=generator)[:16].tolist()
        hands = assign_stacks([Stack((client,), (sizes[client],), 0, ()) for client in cohort], 2)
        work = [sum(sizes[cohort[index]] for index in hand) for hand in hands]
        assert max(work) <= 1.05 * sum(work) / 2
        for seen, hand in zip(met, hands, strict=True):
            seen |= {cohort[index] for index in hand}
    assert max(map(len, met)) < 50


# ---- one sum, in one process that plays both ranks ------------------------------------------------------


class Meeting:
    """The group of one rank, in one process that plays both: what the other one says is known beforehand."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2
        self.parts = []
        self.sums, self.floats = [], []

    def broadcast(self, obj, place):
        return obj

    def gather(self, obj, place):
        if place.startswith("the start"):
            return [obj]
        self.parts[self.rank] = obj
        return self.parts

    def add(self, tensor):
        tensor.copy_(self.sums.pop(0))

    def allgather(self, tensor):
        return self.floats


DIM = 12


def engines(mechanism, **options):
    def make(kind, **more):
        weights = torch.linspace(-0.5, 0.5, DIM)
        settings = {**options, **more}
        return kind(
            mechanism, RoundPlanner(5, 3), SeededKeys(3), weights, (8, 4), AdaptiveRange(), **settings
        )

    def of_rank(rank):
        strategy = DistributedClientsStrategy()
        strategy.group = Meeting(rank)
        return make(RankEngine, strategy=strategy, stacks=stacks)

    whole = make(RoundEngine)
    stacks = lambda: [Stack(whole.planner.plan(whole.round, mechanism).survivors, (1,), 0, ())]  # noqa: E731
    return whole, [of_rank(rank) for rank in range(2)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    "mechanism",
    [CorBin(2.0, 5), SubtractiveDither(bits=4), CPA(1.0, epsilon_scope="bit"), SignRR(1.0), TopK(0.3)],
)
def test_the_server_of_every_rank_is_that_of_one_process(mechanism, order):
    whole, ranks = engines(mechanism)
    for number in range(3):
        plan = whole.start()
        for rank in ranks:
            rank.start()
        for place, client in enumerate(plan.survivors):
            update = torch.randn(1, DIM, generator=torch.Generator().manual_seed(10 * number + client))
            whole.receive([client], update.clone())
            ranks[order[place % 2]].receive([client], update.clone())
        groups = [rank._strategy.group for rank in ranks]
        sums = [rank._sum.integer_sum for rank in ranks]
        exact = sum(rank._exact for rank in ranks)
        cuts = [rank._cut for rank in ranks if rank._cut is not None]
        for rank, group in zip(ranks, groups, strict=True):
            group.parts, group.sums = [None, None], [exact.clone(), *([sum(cuts)] if cuts else [])]
            group.floats = [one._sum.floats.parts.clone() for one in ranks]
            if sums[0] is not None:
                group.sums.insert(0, sums[0] + sums[1])
            with pytest.raises(OtherRankStoppedError):  # which leaves this rank's part
                rank.finish()
        parts = [group.parts[group.rank] for group in groups]
        received = list(whole._sum.received)
        record = whole.finish()
        for rank, group in zip(ranks, groups, strict=True):
            group.parts = list(parts)
            rank._stacks = lambda: [Stack(tuple(received), (1,), 0, ())]  # noqa: B023
            found = rank.finish()
            assert found.uplink_bits == record.uplink_bits
            assert found.homogeneity == pytest.approx(record.homogeneity)
            assert found.arrived == pytest.approx(record.arrived)
            assert torch.equal(rank.weights, whole.weights)
            assert torch.equal(rank.ranges.radius, whole.ranges.radius)
            assert rank.ledger.charges.tolist() == whole.ledger.charges.tolist()


@pytest.mark.parametrize(
    ("first", "second", "travels_as"),
    [
        ([0, 255], [0, 0], torch.uint8),
        ([0, 200], [0, 56], torch.int32),
        ([-128, 27], [0, 100], torch.int8),
        ([-128, 0], [-1, 0], torch.int32),
        ([-1, 0], [0, 128], torch.int32),
        ([2**31 - 2, 0], [1, 0], torch.int32),
    ],
)
def test_a_sum_travels_in_one_byte_if_it_fits(first, second, travels_as):
    """In the narrow type the sum is what it is in the wide one."""
    parts = [torch.tensor(part, dtype=torch.int32) for part in (first, second)]
    narrow = _dtype_of_sum([_Kind.from_symbols(part) for part in parts])
    assert narrow == travels_as
    total = sum(part.to(narrow) for part in parts)
    assert total.to(torch.int32).tolist() == [a + b for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("what", ["model", "range", "stacks of clients"])
def test_ranks_that_begin_a_round_with_something_else_all_stop_before_it_is_charged(what):
    """With another cut into stacks some clients would send two messages from one stream, and others none."""
    _, ranks = engines(CorBin(2.0, 5))
    if what == "model":
        ranks[1].weights = ranks[1].weights + 1e-6
    elif what == "range":
        ranks[1].ranges = Ranges(ranks[1].ranges.center, 2 * ranks[1].ranges.radius)
    else:
        ranks[1]._stacks = lambda: [Stack((0, 1, 2), (1,), 0, ()), Stack((3, 4), (1,), 0, ())]
    found = [(0, rank._start_digests(), None) for rank in ranks]
    for rank in ranks:
        rank._strategy.group.gather = lambda obj, place: found
        with pytest.raises(RuntimeError, match=rf"Rank 1 has (an)?other {what} than rank 0 in round 1"):
            rank.start()
        assert rank.ledger.rounds == 0


def test_keys_of_one_root_are_private_and_the_same_on_all_ranks():
    first, second, other = RootKeys(b"r" * 32), RootKeys(b"r" * 32), RootKeys(b"s" * 32)
    assert first.mode == "secure" and not isinstance(first, SeededKeys)
    assert first.private(3) == second.private(3) != other.private(3)
    assert first.peer((2, 1)) == second.peer((1, 2)) != other.peer((1, 2))


def test_a_rank_takes_over_what_the_journal_of_rank_0_says(monkeypatch):
    _, (first, second) = engines(CorBin(2.0, 5))
    first.ledger.charge([1, 2], 7)
    state = first.ledger.state_dict()
    told = lambda one, place: [(0, one[1], state)]  # noqa: E731
    monkeypatch.setattr(second._strategy.group, "gather", told)
    second.ledger.follow(state)
    assert second.ledger.charges.tolist() == [0, 1, 1, 0, 0]
    assert second.ledger.rounds == 1


def test_a_round_that_is_given_up_is_void_on_all_ranks():
    _, (first, second) = engines(CorBin(2.0, 5))
    told = []
    for rank in (first, second):
        group = rank._strategy.group
        group.parts = [None, None]
        rank.start()
        assert rank._strategy.is_single
    second._strategy.group.gather = lambda obj, place: told.append((obj, place)) or [None, None]
    second.abandon()
    assert told == [(None, "the end of round 1")]
    assert not second._strategy.is_single
    with pytest.raises(OtherRankStoppedError, match="rank 1 has given up round 1"):
        first.finish()
    first.abandon()  # says nothing more, because all know
    assert first.attempt == second.attempt == 1


def test_a_rank_that_fails_asks_nobody():
    _, (first, _) = engines(CorBin(2.0, 5))
    first.start()
    first._strategy.fails = True
    first._strategy.group.gather = lambda obj, place: pytest.fail("asked")
    first.abandon()
    assert first.attempt == 1


def test_counts_of_all_kinds_are_those_of_rank_0():
    told = []
    strategies = [DistributedClientsStrategy(), DistributedClientsStrategy()]
    shares = told.append, lambda tensor: tensor.copy_(told[0])
    for strategy, share in zip(strategies, shares, strict=True):
        strategy.group = SimpleNamespace(share=share)
    first, second = (torch.nn.BatchNorm1d(3) for _ in range(2))
    for module, factor in ((first, 1), (second, 5)):
        module.num_batches_tracked.add_(2**40 * factor)
        module.running_mean.fill_(factor)
        module.register_buffer(
            "seen", torch.tensor([[True, False]]) if factor == 1 else torch.ones(1, 2).bool()
        )
    for strategy, module in zip(strategies, (first, second), strict=True):
        strategy.share_counts(module)
    assert len(told) == 1
    assert second.num_batches_tracked == 2**40
    assert second.get_buffer("seen").tolist() == [[True, False]]
    assert second.running_mean.tolist() == [5.0, 5.0, 5.0]
    strategies[0].share_counts(torch.nn.Linear(1, 1))  # nothing to share, and nobody is asked
    assert len(told) == 1


def test_a_round_that_is_about_to_start_is_not_waited_for_twice():
    places = []
    trainer = pl.Trainer(strategy="fedq_clients", devices=2, accelerator="cpu", logger=False)
    strategy = trainer.strategy
    gather = lambda obj, place: places.append(place)  # noqa: E731
    strategy.group = SimpleNamespace(gather=gather, is_lost=False)
    for name in (None, "train_dataloader()", "val_dataloader()"):
        strategy.barrier(name)
    assert places == ["the barrier None", "the barrier val_dataloader()"]


# ---- refused --------------------------------------------------------------------------------------------


def test_ranks_with_other_settings_are_refused_by_name():
    group = Meeting(1)
    group.broadcast = lambda facts, place: {**facts, "mechanism": "CorBin(9)"}
    with pytest.raises(ValueError, match=r"Rank 1 .* other settings .*: mechanism = LDPQ \(on rank 0 CorBin"):
        check_same_on_all_ranks(group, {"mechanism": "LDPQ", "seed": "3"})
    group.broadcast = lambda facts, place: facts
    check_same_on_all_ranks(group, {"mechanism": "LDPQ"})


def start(sizes, theirs):
    """Rank 1 with clients of these sizes, of a group whose rank 0 has others."""
    group = Meeting(1)
    group.broadcast = lambda own, place: theirs if place == "the sizes of clients" else own
    ranks = SimpleNamespace(group=group, is_global_zero=True)
    agree_on_start(ranks, {}, [torch.arange(size) for size in sizes], Ledger(len(sizes), "CorBin"))


def test_ranks_without_work_are_said():
    stacks = [Stack((0, 1, 2), (10,), 0, ()), Stack((3, 4), (10,), 0, ())]
    warn_idle_ranks(stacks, 2)
    with pytest.warns(UserWarning, match="2 stacks of up to 3 clients, so only 2 of 4 ranks have work"):
        warn_idle_ranks(stacks, 4)


# ---- where it runs --------------------------------------------------------------------------------------


def on(device, backend=None, local_rank=1):
    strategy = DistributedClientsStrategy(backend)
    strategy.parallel_devices = [torch.device(device, index) for index in range(2)]
    strategy.local_rank, strategy.num_ranks = local_rank, 2
    return strategy


def test_the_sum_goes_by_nccl_on_gpus_and_by_gloo_elsewhere():
    assert on("cuda").root_device == torch.device("cuda", 1)
    assert [on("cuda").backend, on("cuda", "gloo").backend, on("cpu").backend] == ["nccl", "gloo", "gloo"]


def test_of_cpus_any_will_do_and_of_accelerators_there_must_be_one_a_rank():
    assert on("cpu", local_rank=7).root_device == torch.device("cpu", 0)
    with pytest.raises(ValueError, match=r"^Rank 2 of this machine has no device.* devices=2.*$"):
        _ = on("cuda", local_rank=2).root_device


def test_backends_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must be 'gloo', 'nccl' or None, got 'mpi'"):
        DistributedClientsStrategy("mpi")
