"""Machines of `deploy/STEPS.txt` apart from each other, so that its commands are typed letter by letter.

Each has `/etc`, `/opt`, `/var` and a network of its own (namespaces of Linux, for root). A `Link` leads from
a site to the server, and may be cut, slow or lossy; the kernel's netem does the same where there is one.
"""

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

from tests.flower.machines import example
from tests.flower.steps import Machine

OVER = ("etc", "opt", "var")
_TUNSETIFF, _TUN_NO_INFO, _NEW_NETWORK = 0x400454CA, 0x1001, 0x40000000


def possible():
    """May this process make such machines?"""
    tools = all(shutil.which(name) for name in ("unshare", "nsenter", "ip", "mount"))
    return bool(
        tools and os.geteuid() == 0 and os.access("/dev/net/tun", os.W_OK) and "overlay" in _systems()
    )


def server_name():
    """Name under which sites find the server of a `federation`."""
    return "server.example" if possible() else "localhost"


def _systems():
    path = Path("/proc/filesystems")
    return path.read_text() if path.exists() else ""


class Apart(Machine):
    """A machine of its own: what is written to its folders lies in `over`, and nowhere else.

    Args:
        number: Of the site; None is the server.
    """

    def __init__(self, folder: Path, app: Path, number: int | None) -> None:
        self.link: Link | None = None
        self.number, over = number, folder / "over"
        (over / "etc" / "systemd" / "system").mkdir(parents=True)
        address = "127.0.0.1" if number is None else f"10.77.{number}.1"
        (over / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{address} {server_name()}\n")
        lines = ["set -e", "mount --make-rprivate /"]
        for name in OVER:
            (over / name).mkdir(exist_ok=True)
            (folder / f"work-{name}").mkdir()
            options = f"lowerdir=/{name},upperdir={over / name},workdir={folder / f'work-{name}'}"
            lines.append(f"mount -t overlay {name} -o {options} /{name}")
        lines += ["ip link set lo up", "echo ready", "exec sleep infinity"]
        for name, place in (
            ("etc", "etc/fedq"),
            ("opt", "opt/fedq"),
            ("var", "var"),
            ("units", "etc/systemd/system"),
        ):
            (folder / name).symlink_to(over / place)
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "bash", "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as said:
            if said.readline() != "ready\n":
                raise RuntimeError("no namespaces for a machine")
        super().__init__(folder, app, {} if number is None else {"setup.sh N": f"setup.sh {number}"})

    def _places(self):
        return {}

    @property
    def pid(self):
        """Of the process that holds its namespaces."""
        return self._holder.pid

    def _enter(self):
        return ["nsenter", "-t", str(self.pid), "-m", "-n", f"--wdns={self.shell}"]

    def stop(self):
        """As of `Machine`, and the machine and the cables to it are gone."""
        super().stop()
        if self.link is not None:
            self.link.close()
        self._holder.kill()
        self._holder.wait()


class Link:
    """The cables between sites and a server, whose packets a thread carries.

    Args:
        seed: Of the packets that are lost.

    Attributes:
        down: Sites that nothing reaches.
        delay: Seconds that a packet takes, one way, by site.
        loss: Chance that it is lost, by site.
    """

    def __init__(self, server: Apart, sites: list[Apart], seed: int = 1) -> None:
        self.down, self.delay, self.loss = set[int](), dict[int, float](), dict[int, float]()
        self._rng, self._other, self._site = np.random.default_rng(seed), dict[int, int](), dict[int, int]()
        for site in sites:
            number = site.number
            assert number is not None
            here, there = f"10.77.{number}.1", f"10.77.{number}.2"
            ends = [_end(server, f"site{number}", here, there), _end(site, "server", there, here)]
            self._other |= dict(zip(ends, reversed(ends), strict=True))
            self._site |= dict.fromkeys(ends, number)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self):
        due, count = list[tuple[float, int, int, bytes]](), 0
        while not self._over.is_set():
            wait = min(0.2, max(0.0, due[0][0] - time.monotonic())) if due else 0.2
            for end in select.select(list(self._other), [], [], wait)[0]:
                packet, site = os.read(end, 65536), self._site[end]
                if site in self.down or self._rng.random() < self.loss.get(site, 0.0):
                    continue
                count += 1
                at = time.monotonic() + self.delay.get(site, 0.0)
                heapq.heappush(due, (at, count, self._other[end], packet))
            while due and due[0][0] <= time.monotonic():
                os.write(due[0][2], heapq.heappop(due)[3])

    def close(self):
        """Take the cables away."""
        self._over.set()
        self._thread.join()
        for end in self._other:
            os.close(end)


def federation(folder, app, sites):
    """A server and its sites, none of which has anything yet: apart, or folders where that can't be."""
    if possible():
        server = Apart(folder / "server", app, None)
        apart = [Apart(folder / f"site-{n}", app, n) for n in range(sites)]
        server.link = Link(server, apart)
        return server, apart
    taken = {"443": str(example.free_port()), "8000": str(example.free_port())}
    return Machine(folder / "server", app, taken), [
        Machine(
            folder / f"site-{n}",
            app,
            {**taken, "9094": str(example.free_port()), "setup.sh N": f"setup.sh {n}"},
        )
        for n in range(sites)
    ]


def _end(machine, name, here, there):
    """A network device of a machine, whose packets are read from and written to what is returned."""
    made = []

    def make():  # the namespace is one thread's, which ends
        with open(f"/proc/{machine.pid}/ns/net") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_NO_INFO))
        made.append(end)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    for words in (f"addr add {here} peer {there} dev {name}", f"link set {name} up"):
        subprocess.run([*machine._enter(), "ip", *words.split()], check=True)
    return made[0]
