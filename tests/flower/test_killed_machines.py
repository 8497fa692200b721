"""On real machines: a SuperNode and the SuperLink are killed."""

import json
from pathlib import Path

import pytest

from lightning_fedq.commands.flower import write_app
from tests.changed import changed
from tests.flower.machines import example

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
ROUNDS = 3
HOLD = """

import time
from pathlib import Path

_setup = OwnData.setup


def _hold(self, stage):  # says that it trains in a round, and waits while it is told to
    folder = Path({folder!r})
    if (folder / f"client-{{self.part}}" / "streams.jsonl").exists():  # no trial at registration
        (folder / f"training-{{self.part}}").touch()
        while (folder / f"hold-{{self.part}}").exists():
            time.sleep(0.2)
    _setup(self, stage)


OwnData.setup = _hold
"""


def done(home):
    """Rounds that the server has kept."""
    if not (home / "checkpoints" / "last.ckpt").exists():
        return 0
    return int(example.checkpoint_of(home)["engine"]["round"])


def streams_of(folder):
    lines = (folder / "streams.jsonl").read_text().splitlines()[1:]
    return [(entry["round"], entry["attempt"]) for entry in map(json.loads, lines)]


def test_a_node_and_then_the_link_are_killed_in_mid_round(tmp_path):
    home, link = tmp_path / "home", ("--database", str(tmp_path / "link.db"))
    app = tmp_path / "killed_app"
    package = write_app(app, clients=4, seed=None, secure_aggregation=False)
    task, server = app / package / "task.py", app / package / "server_app.py"
    task.write_text(task.read_text() + HOLD.format(folder=str(tmp_path)))
    server.write_text(changed(server.read_text(), ("round_timeout=600", "round_timeout=120")))
    with example.Machines(tmp_path, link=link) as machines:
        (tmp_path / "hold-2").touch()
        machines.run(app, home, ROUNDS)
        machines.wait_for((tmp_path / "training-2").exists, 600)
        machines.kill("client-2")
        (tmp_path / "hold-2").unlink()
        machines.start_node(2)  # with its folder: the same client at another node
        machines.wait_for(lambda: done(home) == 1, 600)
        (tmp_path / "training-0").unlink()
        (tmp_path / "hold-0").touch()
        machines.wait_for((tmp_path / "training-0").exists, 600)
        before = done(home)
        machines.kill("superlink")
        (tmp_path / "hold-0").unlink()
        machines.start_link()
        machines.run(app, home, ROUNDS)
        machines.wait_for((home / "runs" / "deployed" / "summary.json").exists, 900)
    saved = example.checkpoint_of(home)
    received = [record["num_received"] for record in saved["records"]]
    assert received[0] == 3  # the killed client was missed, and nobody else
    assert received[1:] == [4, 4] and [record["round"] for record in saved["records"]] == [0, 1, 2]
    assert saved["engine"]["ledger"]["charges"].tolist() == [ROUNDS + 1] * 4  # the cut off round is paid for
    for client in range(4):
        used = streams_of(tmp_path / f"client-{client}")
        assert used == sorted(set(used)) and len(used) <= ROUNDS + 1
        assert (before, 1) in used  # the round that was cut off is a new attempt
        assert ((0, 0) in used) == (client != 2)  # it was killed before it encoded
