"""A round is charged only where enough of its clients are connected for a sum."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation
from lightning_fedq.flower import roster
from lightning_fedq.mechanisms import LDPQ, CorBin, RotatedCoins
from lightning_fedq.privacy.journal import Journal
from lightning_fedq.secagg import SecAgg
from tests.flower.loop import CLIENTS, LoopGrid, clients, deployment, federated
from tests.flower.test_registration import Clock

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
COIN, ROUNDS = CorBin(epsilon_per_coordinate=4.0), 3


class Leaving:
    """Takes nodes off the grid once they have answered round 2, whose last exchange is `stage`."""

    def __init__(self, clients: tuple[int, ...], stage: str) -> None:
        self.clients, self.stage, self.away = clients, stage, dict[int, Any]()
        self.grid = None

    def __call__(self, kind, client, reply):
        assert self.grid is not None
        if client in self.clients and kind == self.stage and self.grid.log.count((kind, client)) == 2:
            self.away[100 + client] = self.grid.contexts.pop(100 + client)
        return reply

    def come_back(self):
        assert self.grid is not None
        self.grid.contexts |= self.away
        self.away = {}


class Returning(Clock):
    """Clients that have left are back after some seconds, if ever."""

    leaving: Leaving | None = None
    at = float("inf")

    def sleep(self, seconds):
        super().sleep(seconds)
        if self.leaving is not None and self.leaving.away and self.now >= self.at:
            self.leaving.come_back()


@pytest.fixture
def clock(monkeypatch):
    found = Returning()
    monkeypatch.setattr(roster, "time", found)
    return found


def grid_of(make, folder, *gone):
    masked = make().server.secure_aggregation is not None
    leaving = Leaving(gone, "unmask" if masked else "train")
    leaving.grid = LoopGrid(*clients(make, folder), leaving)
    return leaving.grid, leaving


def charged(home):
    path = next(home.rglob("ledger*.jsonl"))
    mechanism = json.loads(path.read_text().splitlines()[0])["mechanism"]
    return [(entry.round, entry.attempt) for entry in Journal(path, mechanism, CLIENTS).unread()]


@pytest.mark.parametrize(
    "mechanism, options, gone, needed",
    [
        (COIN, {"secure_aggregation": SecAgg()}, (2, 3), 3),
        pytest.param(RotatedCoins(4.0, 0.5, max_dropped_clients=1), {}, (2, 3), 3, marks=pytest.mark.slow),
        (LDPQ(4.0), {"aggregator": RobustAggregation("krum")}, (1, 2, 3), 3),
        (COIN, {}, (0, 1, 2, 3), 1),
    ],
)
def test_a_round_that_would_be_given_up_is_not_charged(mechanism, options, gone, needed, clock, tmp_path):
    """Some clients go after round 2. Each round to come was charged, and given up within seconds."""

    def make():
        return federated(mechanism, seed=None, **options)

    grid, leaving = grid_of(make, tmp_path, *gone)
    words = (
        rf"Round 3 has not begun and nobody is charged: it needs {needed} of its 4 clients, but "
        rf"{4 - len(gone)} are connected. Missing clients: {list(gone)}".replace("[", r"\[")
    )
    with pytest.raises(RuntimeError, match=words):
        deployment(make(), ROUNDS, tmp_path).run(grid)
    assert 2.0 <= clock.now < 4.0
    assert charged(tmp_path / "server") == [(0, 0), (1, 0)]
    if mechanism is not COIN or len(gone) == CLIENTS:
        return
    with pytest.raises(RuntimeError, match=words):  # started again, it waits for them once
        deployment(make(), ROUNDS, tmp_path).run(grid)
    assert clock.now < 8.0
    leaving.come_back()
    _, server = deployment(make(), ROUNDS, tmp_path).run(grid)
    assert [record.num_received for record in server.records] == [4, 4, 4]
    assert charged(tmp_path / "server") == [(0, 0), (1, 0), (2, 0)]


def test_who_comes_back_in_time_costs_no_round(clock, tmp_path):
    def make():
        return federated(COIN, seed=None, secure_aggregation=SecAgg())

    grid, clock.leaving = grid_of(make, tmp_path, 2, 3)
    clock.at = 1.0
    with pytest.warns(
        UserWarning, match=r"Round 3 waits at most 2 s: it needs 3 of its 4 clients, but 2 are"
    ):
        _, server = deployment(make(), ROUNDS, tmp_path).run(grid)
    assert [record.num_received for record in server.records] == [4, 4, 4] and clock.now < 2.0
    assert charged(tmp_path / "server") == [(0, 0), (1, 0), (2, 0)]
