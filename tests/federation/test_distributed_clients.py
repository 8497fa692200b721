"""Ranks own disjoint clients: the same model for any number of them, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.aggregation import RobustAggregation
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.batches import LocalWork, Stack
from lightning_fedq.federation import distributed_clients
from lightning_fedq.federation.distributed_clients import (
    DistributedClientsStrategy,
    RankEngine,
    RankSchedule,
    check_for_ranks,
    deal,
)
from lightning_fedq.federation.schedule import Schedule
from lightning_fedq.mechanisms import CPA, CorBin, SubtractiveDither
from lightning_fedq.randomness import RootKeys, SeededKeys
from lightning_fedq.ranges import AdaptiveRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.secagg import SecAgg

ROOT = Path(__file__).parents[2]


# ---- who owns whom --------------------------------------------------------------------------------------


def schedule(num_clients: int = 9, dropped: float = 0.0) -> Schedule:
    held = [torch.arange(10 * (1 + client % 3)) for client in range(num_clients)]
    planner = RoundPlanner(num_clients, 3, dropout_probability=dropped)
    return Schedule(planner, CorBin(1.0), LocalWork(held, 10, False, True, 1, None), None, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("round", [0, 1, 5])
def test_every_client_trains_on_one_rank_in_the_stacks_of_one_process(num_ranks: int, round: int) -> None:
    whole = schedule(dropped=0.3)
    expected = whole.stacks(round, 0, 2)
    found = [RankSchedule(whole, rank, num_ranks).stacks(round, 0, 2) for rank in range(num_ranks)]
    assert all(own for own in found)  # a rank without work makes one idle step
    trained = [stack for own in found for stack in own if stack.clients]
    assert sorted(stack.clients for stack in trained) == sorted(stack.clients for stack in expected)
    assert all(stack in expected for stack in trained)
    assert RankSchedule(whole, 0, num_ranks).of_all_ranks(round, 0, 2, None) == expected


def test_work_is_spread() -> None:
    stacks = [Stack((client,), (10,) * steps, 0, ()) for client, steps in enumerate((8, 1, 4, 4, 1, 6))]
    assert deal(stacks, 2) == [[0, 3], [1, 2, 4, 5]]
    assert deal(stacks, 1) == [[0, 1, 2, 3, 4, 5]]


# ---- one sum, in one process that plays both ranks ------------------------------------------------------


class Together:
    """Both ranks in one process: each one's exchange is kept, and answered once the other's is known."""

    def __init__(self, rank: int) -> None:
        self.global_rank, self.num_ranks = rank, 2
        self.gathered: list[Any] = []

    def broadcast(self, obj: Any) -> Any:
        return obj

    def gather(self, obj: Any) -> list[Any]:
        return self.gathered


DIM = 12


def engines(mechanism: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[RoundEngine, list[RankEngine]]:
    def make(kind: Any, **more: Any) -> Any:
        weights = torch.linspace(-0.5, 0.5, DIM)
        return kind(mechanism, RoundPlanner(5, 3), SeededKeys(3), weights, (8, 4), AdaptiveRange(), **more)

    whole = make(RoundEngine)
    order = lambda: list(whole.planner.plan(whole.round, mechanism).survivors)  # noqa: E731
    return whole, [make(RankEngine, strategy=Together(rank), order=order) for rank in range(2)]


@pytest.mark.parametrize("mechanism", [CorBin(2.0, 5), SubtractiveDither(bits=4)])
def test_the_sum_over_ranks_is_that_of_one_process(mechanism: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, ranks = engines(mechanism, monkeypatch)
    for number in range(3):
        plan = whole.start()
        for rank in ranks:
            rank.start()
        for place, client in enumerate(plan.survivors):
            update = torch.randn(1, DIM, generator=torch.Generator().manual_seed(10 * number + client))
            whole.receive([client], update.clone())
            ranks[place % 2].receive([client], update.clone())
        symbols: list[Any] = [rank._sum.integer_sum for rank in ranks]
        own = [
            (rank._sum.received, rank._uplink_bits, rank._clipped, [], (s.shape, s.dtype))
            for rank, s in zip(ranks, symbols, strict=True)
        ]
        exact = sum(rank._exact for rank in ranks)
        total = sum(symbols)

        def all_reduce(tensor: Tensor, total: Tensor = total, exact: Tensor = exact) -> None:
            tensor.copy_(exact if tensor.is_floating_point() else total)

        monkeypatch.setattr(distributed_clients.dist, "all_reduce", all_reduce)
        record = whole.finish()
        for rank in ranks:
            rank._strategy.gathered = own  # type: ignore[attr-defined]
            assert rank.finish().uplink_bits == record.uplink_bits
            assert torch.equal(rank.weights, whole.weights)
            assert torch.equal(rank.ranges.radius, whole.ranges.radius)
            assert rank.ledger.charges.tolist() == whole.ledger.charges.tolist()


def test_a_rank_with_another_model_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (_, second) = engines(CorBin(2.0, 5), monkeypatch)
    monkeypatch.setattr(second._strategy, "broadcast", lambda pair: (pair[0], b"another"))
    with pytest.raises(RuntimeError, match="rank 1 has another model than rank 0 in round 1"):
        second.start()


def test_updates_that_somebody_changes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (first, _) = engines(CorBin(2.0, 5), monkeypatch)
    first.transform = lambda clients, updates: updates
    with pytest.raises(ValueError, match="need all clients in one process"):
        first.start()


def test_keys_of_one_root_are_private_and_the_same_on_all_ranks() -> None:
    first, second, other = RootKeys(b"r" * 32), RootKeys(b"r" * 32), RootKeys(b"s" * 32)
    assert first.mode == "secure" and not isinstance(first, SeededKeys)
    assert first.private(3) == second.private(3) != other.private(3)
    assert first.peer((2, 1)) == second.peer((1, 2)) != other.peer((1, 2))


# ---- refused --------------------------------------------------------------------------------------------


def fed(mechanism: Any = None, **options: Any) -> Federated:
    return Federated(mechanism or CorBin(1.0), 4, seed=0, **options)


@pytest.mark.parametrize(
    "federated, words",
    [
        (fed(CPA(1.0)), "do not add up to one integer sum"),
        (fed(weighting="samples"), "a weighted mean or a robust rule"),
        (fed(aggregator=RobustAggregation("median")), "a weighted mean or a robust rule"),
        (fed(secure_aggregation=SecAgg()), "simulated in one process"),
        (fed(buffers="local"), "buffers='local' keeps"),
    ],
)
def test_what_needs_one_process_is_refused_with_the_cure(federated: Federated, words: str) -> None:
    with pytest.raises(ValueError, match=rf'{words}.*devices=1.*strategy="fedq_clients"'):
        check_for_ranks(federated, None)


def test_a_batch_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="SimpleNamespace keeps every client's account in one process"):
        check_for_ranks(fed(), SimpleNamespace())


def test_lightning_knows_the_strategy_by_name() -> None:
    assert "fedq_clients" in pl.strategies.StrategyRegistry.available_strategies()
    strategy = pl.strategies.StrategyRegistry.get("fedq_clients")
    assert isinstance(strategy, DistributedClientsStrategy)


# ---- real processes -------------------------------------------------------------------------------------


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).parent / "ranks_run.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, "check": False}
    return subprocess.run(command, env=environment, **options)


def result(folder: Path, rank: int = 0) -> Any:
    return json.loads((folder / f"rank-{rank}.json").read_text())


@pytest.mark.slow
def test_one_and_two_ranks_end_with_the_same_bits(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for devices, folder in ((1, one), (2, two)):
        done = run(devices, 3, folder)
        assert done.returncode == 0, done.stderr
    assert result(one) == result(two, 0) == result(two, 1)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_which_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(1, 4, whole).returncode == 0
    done = run(2, 4, broken, "die")  # a hang would run into the timeout
    assert done.returncode != 0 and not (broken / "rank-0.json").exists()
    again = run(1, 4, broken, "resume")
    assert again.returncode == 0, again.stderr
    assert result(broken) == result(whole)
