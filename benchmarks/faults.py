"""One fault at a time in a federation of machines apart, and what it costs beside a run without one.

    PYTHONPATH=. python benchmarks/faults.py                  # for root on Linux, an hour; a row a fault
    PYTHONPATH=. python benchmarks/faults.py "server killed"  # the run without a fault, and this one

Machines are those of `deploy/STEPS.txt`, of four sites behind `SecAgg()`. A fault comes while site 2 trains
in the second of four rounds, once to a run without a seed, whose privacy is charged, and once to a run with
one, whose weights are compared with the simulation's.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cached_property
from pathlib import Path

import torch
from soak_sites import Soak

from tests.flower.machines import example

ROUNDS, SITES, VICTIM, LATE = 4, 4, 2, 900.0
MECHANISM = "RotatedCoins(epsilon_per_bit=0.01, clip_norm=2.0, max_dropped_clients=1)"
HOLD = """
import time
from pathlib import Path

_setup = OwnData.setup


def _hold(self, stage):  # says that it trains, and waits while it is told to
    folder = Path({folder!r})
    while self.part == {victim} and (folder / "hold").exists():
        (folder / "training").touch()
        time.sleep(0.1)
    _setup(self, stage)


OwnData.setup = _hold


def data("""
UNITS = {"server": "fedq-superlink fedq-superexec fedq-filter", "site": "fedq-supernode fedq-client"}


class Trials(Soak):
    """The federation, for one run after another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seed = folder, folder / "seed"
        self.seed.write_text("None")
        more = (
            ("CorBin(epsilon_per_coordinate=4.0, shared_bits=5)", MECHANISM),
            ("import CorBin", "import RotatedCoins"),
            ("SEED = None", f"SEED = eval(open({str(self.seed)!r}).read())"),
            ("\ndef data(", HOLD.format(folder=str(folder), victim=VICTIM)),
        )
        super().__init__(folder, ROUNDS, SITES, 1, 1, 45, more)

    @cached_property
    def simulated(self):
        """Engine of the seeded run's simulation."""
        return example.simulate(self.app, "my_app", ROUNDS)

    def try_one(self, fault, seed):
        """A federation from its registration to its end, with the fault in its second round."""
        self.seed.write_text(str(seed))
        for one in (self.server, *self.sites):
            one.halt()
            units = UNITS["server" if one is self.server else "site"]
            one.type(
                "rm -rf /etc/systemd/system/*.begun\n"
                f"rm -rf /var/lib/fedq /var/lib/flower; systemctl enable --now {units}\n"
            )
        self.count.clear()
        held, training = self.folder / "hold", self.folder / "training"
        training.unlink(missing_ok=True)
        operator = threading.Thread(target=self.operate, daemon=True)
        operator.start()
        self.until(lambda: self.done == 1)
        began = time.monotonic()
        held.touch()
        self.until(training.exists)
        mend = threading.Thread(target=fault, args=(self, held.unlink))
        mend.start()
        self.until(lambda: self.done == ROUNDS)
        seconds = time.monotonic() - began
        for thread in (mend, operator):
            thread.join()
        saved = example.checkpoint_of(self.home)
        found = {
            "seconds": round(seconds),
            "aborted": sum(bool(record["aborted"]) for record in saved["records"]),
            "answers": [record["num_received"] for record in saved["records"]],
            "starts": self.count["runs that the operator started"],
        }
        if seed is not None:
            return {**found, "weights": saved["engine"]["weights"]}
        self.check()  # no stream was used twice, none that is not charged
        page = json.loads((self.home / "runs" / "deployed" / "privacy.json").read_text())
        spent = {one["charges"]: round(one["epsilons"]["SECAGG_SERVER"], 2) for one in page["charged"]}
        charges = saved["engine"]["ledger"]["charges"].tolist()
        return {**found, "charges": charges, "epsilon": [spent[number] for number in charges]}

    def until(self, true):
        end = time.monotonic() + LATE
        while not true():
            if time.monotonic() > end:
                raise RuntimeError(f"{self.server.logs()}\n{self.sites[VICTIM].logs()}")
            time.sleep(0.2)


def none(trials, release):
    release()


def killed(unit):
    def fault(trials, release):
        machine = trials.sites[VICTIM] if unit in UNITS["site"] else trials.server
        machine.kill(unit)
        release()

    return fault


def cut(seconds):
    def fault(trials, release):
        trials.server.link.down.add(VICTIM)
        release()
        time.sleep(seconds)
        trials.server.link.down.clear()

    return fault


def slow(trials, release):
    """300 ms there and back, and 5% of all packets lost, at all sites until the run is over."""
    link = trials.server.link
    link.delay, link.loss = dict.fromkeys(range(SITES), 0.15), dict.fromkeys(range(SITES), 0.05)
    release()
    trials.until(lambda: trials.done == ROUNDS)
    link.delay, link.loss = {}, {}


FAULTS = {
    "none": none,
    "client killed": killed("fedq-client"),
    "server killed": killed("fedq-superexec"),
    "SuperLink killed": killed("fedq-superlink"),
    "link cut for 5 s": cut(5),
    "link cut for 60 s": cut(60),
    "300 ms, 5% lost": slow,
    "SuperNode killed": killed("fedq-supernode"),
}


def main(chosen):
    """Print a row for each fault."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and so are the machines
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    folder.chmod(0o755)
    machines = []
    try:
        trials = Trials(folder)
        machines = [trials.server, *trials.sites]
        trials.set_up()
        for name in ["none", *(one for one in chosen or FAULTS if one != "none")]:
            found = trials.try_one(FAULTS[name], None)
            if found["answers"] == [SITES] * ROUNDS:  # else weights are others, for an answer is missing
                seeded = trials.try_one(FAULTS[name], 5)
                simulated = trials.simulated.weights
                found["simulation's weights"] = torch.equal(seeded["weights"], simulated), seeded["answers"]
            print(time.strftime("%H:%M:%S"), name, json.dumps(found), flush=True)
    finally:
        for machine in machines:
            machine.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.TimeoutExpired as error:
        raise SystemExit(str(error)) from error
