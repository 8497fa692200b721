"""A federation of pinned sites whose processes are killed at random, from one seed; counts what is lost.

    PYTHONPATH=. python benchmarks/soak_sites.py --rounds 200 --sites 10 --seed 1 --minutes 240

Machines are those of `deploy/STEPS.txt` (`steps.py`): SuperLink, SuperExec and nginx on the server, a
SuperNode and a client beside it on each site, every one started again as its unit says. The operator starts
the run again when it ends early. Killed (SIGKILL) are a SuperNode, a client, the SuperExec with its run, or
the SuperLink, at a random moment of every `--every`th round or so.

It fails where a stream was used twice, a client has used one that the server's journal does not charge, a
round has no record, the model is not finite, or a client has lost its keys.
"""

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from lightning_fedq.commands.flower import write_app
from lightning_fedq.privacy.journal import Journal
from tests.changed import changed
from tests.flower.apart import federation, server_name
from tests.flower.machines import example
from tests.flower.steps import blocks, pack, set_up

WEIGHTS = {"fedq-supernode": 0.35, "fedq-client": 0.35, "fedq-superexec": 0.15, "fedq-superlink": 0.15}
"""Chance of each to be the one that is killed."""


class Soak:
    """One federation, its kills, and what came of them.

    Args:
        folder: Of everything.
        rounds: Rounds of the run.
        sites: Number of sites.
        seed: Of the kills.
        every: Rounds between two kills, on average.
        timeout: Seconds that the server waits for an exchange.
        changes: What else is other than in the app that `fedq flower init` writes: pairs of texts.
    """

    def __init__(
        self,
        folder: Path,
        rounds: int,
        sites: int,
        seed: int,
        every: float,
        timeout: float,
        changes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.rounds, self.rng, self.every = rounds, np.random.default_rng(seed), every
        self.app = folder / "my_app"
        write_app(self.app, clients=sites, server=server_name())
        self.change("pyproject.toml", ("rounds = 3", f"rounds = {rounds}"))
        self.change("my_app/server_app.py", ("round_timeout=600", f"round_timeout={timeout}"))
        self.change("my_app/task.py", *changes)
        self.steps, self.count = blocks((self.app / "deploy" / "STEPS.txt").read_text()), Counter[str]()
        pack(folder, self.app, self.steps)
        self.server, self.sites = federation(folder, self.app, sites)
        self.over = threading.Event()
        self.home = self.server.folder / "var" / "lib" / "flower" / "fedq-server"

    def set_up(self):
        """Type the steps on all machines."""
        print(len(set_up(self.server, self.sites, self.steps)), "characters of set-up", flush=True)

    def change(self, name, *changes):
        """Change a file of the app."""
        path = self.app / name
        path.write_text(changed(path.read_text(), *changes))

    @property
    def done(self):
        """Rounds of the last checkpoint."""
        try:
            return len(example.checkpoint_of(self.home)["records"])
        except (OSError, RuntimeError, KeyError):
            return 0

    def run(self, minutes):
        """Operate until all rounds are over or the time is."""
        end = time.monotonic() + 60 * minutes
        killer = threading.Thread(target=self._kill, daemon=True)
        killer.start()
        operator = threading.Thread(target=self.operate, daemon=True)
        operator.start()
        seen = -1
        while operator.is_alive() and time.monotonic() < end:
            if (now := self.done) != seen:
                print(time.strftime("%H:%M:%S"), now, "rounds", dict(self.count), flush=True)
                seen = now
            time.sleep(5)
        self.over.set()

    def operate(self):
        """The operator's step, again until all rounds are over."""
        while not self.over.is_set() and self.done < self.rounds:
            with suppress(RuntimeError):  # the SuperLink is not back yet
                self.server.type(self.steps["3. AN OPERATOR"], timeout=None)
                self.count["runs that the operator started"] += 1
            time.sleep(10)

    def _kill(self):
        while not self.over.is_set():
            due = self.done + int(self.rng.geometric(1 / self.every))
            while self.done < due and not self.over.is_set():
                time.sleep(2)
            time.sleep(float(self.rng.uniform(0, 20)))
            unit = str(self.rng.choice(list(WEIGHTS), p=list(WEIGHTS.values())))
            number = int(self.rng.integers(len(self.sites)))
            machine = self.sites[number] if unit in ("fedq-supernode", "fedq-client") else self.server
            if self.over.is_set():
                return
            machine.kill(unit)
            self.count[f"killed {unit}"] += 1
            print(time.strftime("%H:%M:%S"), "SIGKILL", unit, number, flush=True)

    def check(self):
        """Compare everybody's records once all are stopped, and return the figures."""
        for one in (self.server, *self.sites):
            one.halt()
        saved = example.checkpoint_of(self.home)
        records = saved["records"]
        assert [record["round"] for record in records] == list(range(len(records)))
        assert torch.isfinite(saved["engine"]["weights"]).all()
        path = next(self.home.rglob("ledger-*.jsonl"))
        header = json.loads(path.read_text().splitlines()[0])
        charges = Journal(path, header["mechanism"], len(self.sites)).unread()
        charged = Counter((entry.round, entry.attempt) for entry in charges)
        assert {round for round, _ in charged} >= set(range(len(records)))
        used = 0
        for one in self.sites:
            own = one.folder / "var" / "lib" / "fedq"
            assert (own / "keys.json").exists()
            lines = [json.loads(line) for line in (own / "streams.jsonl").read_text().splitlines()[1:]]
            streams = [(line["round"], line["attempt"]) for line in lines]
            assert streams == sorted(set(streams)), "a stream was used twice"
            assert set(streams) <= set(charged), "a stream that nobody was charged for"
            used += len(streams)
            log = (one.units / "fedq-client.log").read_text()
            self.count["answers refused"] += log.count("REFUSED")
            self.count["clients started"] += len(re.findall(r"waiting for messages", log))
        received = [record["num_received"] for record in records]
        lost = [record for record in records if record["aborted"]]
        return {
            "rounds": len(records),
            "rounds lost": len(lost),
            "attempts charged": len(charged),
            "streams used": used,
            "answers in sums": sum(r["num_received"] for r in records if not r["aborted"]),
            "fewest answers of a round that ended": min(
                (n for n, record in zip(received, records, strict=True) if not record["aborted"]), default=0
            ),
            "rounds with everybody": sum(n == len(self.sites) for n in received),
            **self.count,
        }


def soak(rounds, sites, seed, every, timeout, minutes):
    """Run it in a folder that nginx's worker can enter. Returns the figures."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    folder.chmod(0o755)
    machines = []
    try:
        one = Soak(folder, rounds, sites, seed, every, timeout)
        machines = [one.server, *one.sites]
        one.set_up()
        one.run(minutes)
        return one.check()
    finally:
        for machine in machines:
            machine.stop()
        shutil.rmtree(folder, ignore_errors=True)


def main():
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=4.0, help="rounds between two kills, on average")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of an exchange")
    parser.add_argument("--minutes", type=float, default=240.0, help="ends it early")
    chosen = parser.parse_args()
    print(json.dumps(soak(**vars(chosen)), indent=1))


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired as error:
        raise SystemExit(str(error)) from error
