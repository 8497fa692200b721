"""Who can't answer is away: no round is charged for it, and rounds in vain come to an end."""

import errno

import pytest
from flwr.app import Error

from lightning_fedq.flower import roster, server_app
from lightning_fedq.flower.store import Store
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.secagg import SecAgg
from tests.flower.loop import CLIENTS, LoopGrid, clients, deployment, federated, module
from tests.flower.test_killed import check_streams
from tests.flower.test_registration import Clock
from tests.flower.test_too_few import charged

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
COIN = CorBin(epsilon_per_coordinate=4.0)


def make():
    return federated(COIN, seed=None, secure_aggregation=SecAgg())


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(roster, "time", found)
    return found


class Disk:
    """Of some clients it is full while `full`, from their second round on."""

    def __init__(self, folder, monkeypatch, *who) -> None:
        self.full, whole = False, Store._replace

        def replace(store, name, data):
            number = int(store.folder.name.partition("-")[2] or -1)
            if self.full and number in who:
                raise OSError(errno.ENOSPC, "No space left on device")
            whole(store, name, data)

        monkeypatch.setattr(Store, "_replace", replace)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_full_disk_and_an_absent_site_cost_one_round(comes_back, clock, tmp_path, monkeypatch):
    """Six rounds were begun, charged and aborted, five seconds each."""
    disk = Disk(tmp_path, monkeypatch, 1)
    grid = LoopGrid(*clients(make, tmp_path))

    def tamper(kind, client, reply):
        if kind == "unmask" and grid.log.count((kind, client)) == 1 and client == 3:
            grid.contexts.pop(103)
            disk.full = True
        return reply

    grid.tamper = tamper
    sleep = clock.sleep

    def passes(seconds):
        sleep(seconds)
        disk.full &= not (comes_back and clock.now > 30.0)

    clock.sleep = passes
    one = deployment(make(), 6, tmp_path, patience=90.0)
    if comes_back:
        _, server = one.run(grid)
        assert [record.num_received for record in server.records] == [4, 0, 3, 3, 3, 3]
        return
    words = r"Round 3 has not begun and nobody is charged: it needs 3 of its 4 clients, but 2 are connected"
    with pytest.raises(
        RuntimeError, match=f"{words}. Failures: client 1 has failed .*folder can't be written"
    ):
        one.run(grid)
    assert charged(tmp_path / "server") == [(0, 0), (1, 0)]
    assert grid.log.count(("train", 1)) == 2


def test_rounds_in_vain_come_to_an_end(clock, tmp_path):
    """Two of four fail in every round, and say each time that they are ready."""
    failing = []

    def replied(kind, client, reply):
        if failing and kind == "masked" and client < 2:
            reply.__dict__["_content"], reply.__dict__["_error"] = None, Error(2, "the client has died")
        return reply

    grid = LoopGrid(*clients(make, tmp_path), replied)
    deployment(make(), 1, tmp_path).run(grid)
    failing.append(True)
    words = r"3 rounds in a row were charged and aborted, the last because .*\(client 0 has failed \(the "
    with pytest.raises(RuntimeError, match=words + "client has died"):
        deployment(make(), 9, tmp_path).run(grid)
    assert charged(tmp_path / "server") == [(round, 0) for round in range(4)]
    failing.clear()
    _, server = deployment(make(), 5, tmp_path).run(grid)
    assert [record.num_received for record in server.records] == [4, 0, 0, 0, 4]
    with pytest.raises(ValueError, match="max_aborted_rounds must be >= 1"):
        server_app(module, make(), max_aborted_rounds=0)


def test_one_who_fails_is_asked_whether_it_is_ready_and_is_there_again(clock, tmp_path):
    """Three of four are enough: nobody waits, and the round after has all four."""

    def tamper(kind, client, reply):
        lost = (kind, client) == ("train", 2) and grid.log.count(("train", 2)) == 1
        return None if lost else reply

    grid = LoopGrid(*clients(make, tmp_path), tamper)
    _, server = deployment(make(), 3, tmp_path).run(grid)
    assert [record.num_received for record in server.records] == [3, CLIENTS, CLIENTS]
    assert grid.log.count(("ready", 2)) == 1 and clock.now < 2.0


def test_one_who_stays_silent_is_left_alone(clock, tmp_path):
    """It cost each round its whole timeout."""
    grid = LoopGrid(
        *clients(make, tmp_path),
        lambda kind, client, reply: None if client == 2 and kind in ("train", "ready") else reply,
    )
    _, server = deployment(make(), 4, tmp_path).run(grid)
    assert [record.num_received for record in server.records] == [3] * 4
    assert grid.log.count(("train", 2)) == grid.log.count(("ready", 2)) == 1


def test_a_folder_that_is_emptied_in_mid_run_is_named(clock, tmp_path):
    """New keys were drawn for it, which nobody knows, and kept. Put back, it is the same client."""
    grid = LoopGrid(*clients(make, tmp_path))
    home, safe, keys = tmp_path / "client-2", tmp_path / "safe", []

    def tamper(kind, client, reply):
        if kind == "unmask" and client == 3:
            done = grid.log.count((kind, client))
            if done == 1:
                keys.append((home / "keys.json").read_bytes())
                home.rename(safe)
                home.mkdir()
            elif done == 3:
                home.rmdir()
                safe.rename(home)
                clock.now += 60.0
        return reply

    grid.tamper = tamper
    with pytest.warns(
        UserWarning, match="client-2 has no keys, but this client has registered: the folder was emptied"
    ):
        _, server = deployment(make(), 5, tmp_path).run(grid)
    assert [record.num_received for record in server.records] == [4, 3, 3, 4, 4]
    assert [(home / "keys.json").read_bytes()] == keys
    check_streams(tmp_path, server.engine.ledger.charges.tolist())
