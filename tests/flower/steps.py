"""The machines of `deploy/STEPS.txt` as folders of this one, on which its commands are typed as they stand.

What is other than on a real machine: its folders and ports have other names, `apt-get`, `useradd`, `chown`
and `systemctl` are stand-ins (the last starts the units, `units.py`), and packages come from the
environment that runs the tests, not from an index.
"""

import os
import re
import shutil
import signal
import site
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from tests.flower import units
from tests.flower.machines import example

ROOT = Path(__file__).parents[2]
TOOLS = ("flwr", "flower-superlink", "flower-superexec", "flower-supernode", "flwr-serverapp", "fedq")


def blocks(steps):
    """Commands of each section of the steps, by the section's first word."""
    found, name = dict[str, str](), ""
    for line in steps.splitlines():
        if heading := re.match(r"(1\. THE SERVER|2\. EACH SITE|3\. AN OPERATOR|A FIRST TRY)", line):
            name = heading.group(1)
        elif line.startswith("with these lines"):
            name = "config"
        elif line.startswith("    ") and name:
            found[name] = found.get(name, "") + line.removeprefix("    ") + "\n"
    return found


class Machine:
    """One machine: its `/etc`, `/opt`, `/var` and the folder in which its operator types.

    Args:
        folder: Of all that.
        app: Folder of the app, which is copied to it.
        ports: Ports of this machine in place of those in the files.
    """

    def __init__(self, folder: Path, app: Path, ports: dict[str, str]) -> None:
        self.folder, self.shell, self.units = folder, folder / "shell", folder / "units"
        self.names = {
            "/etc/systemd/system": str(self.units),
            "/etc/fedq": str(folder / "etc"),
            "/opt/fedq": str(folder / "opt"),
            "/var/": f"{folder / 'var'}/",
            **ports,
        }
        for each in (self.shell, self.units, folder / "bin"):
            each.mkdir(parents=True)
        shutil.copytree(app, self.shell / app.name)
        for path in (self.shell / app.name / "deploy").rglob("*"):
            if path.is_file():
                path.write_text(self.here(path.read_text()))
        self._stand_ins()

    def here(self, text):
        """A text with this machine's folders and ports."""
        for name, value in self.names.items():
            text = text.replace(name, value)
        return text

    def _stand_ins(self):
        places = [str(ROOT), *(place for place in site.getsitepackages() if Path(place).is_dir())]
        start = f"setsid {sys.executable} {units.__file__} {self.units}/$each.service"
        start += " </dev/null >/dev/null 2>&1 &"
        made = f"""\
            {sys.executable} "$@"
            printf '%s\\n' {" ".join(places)} > "$(echo $3/lib/python*/site-packages)/parent.pth"
            for tool in {" ".join(TOOLS)}; do
                (echo "#!$3/bin/python"; tail -n +2 {Path(sys.executable).parent}/$tool) > $3/bin/$tool
                chmod 755 $3/bin/$tool
            done"""
        enable = f'shift 2; for each in "$@"; do {start} echo $! >> {self.folder}/pids; done'
        commands = {"python3": made, "systemctl": f"if [ $1 = enable ]; then {enable}; fi"}
        for name in ("apt-get", "useradd", "chown", *commands):
            path = self.folder / "bin" / name
            path.write_text("#!/bin/bash\n" + textwrap.dedent(commands.get(name, "exit 0")) + "\n")
            path.chmod(0o755)

    def type(self, commands, timeout=600.0):
        """Type commands into a fresh shell, and return what it shows, the commands included.

        Raises:
            RuntimeError: If one of them fails.
        """
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "VAR": str(self.folder / "var"),
            "OMP_NUM_THREADS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_QUIET": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # of pip's settings, which turns it off
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "FLWR_TELEMETRY_ENABLED": "0",
        }
        script = self.folder / "typed.sh"
        script.write_text(self.here(commands))
        done = subprocess.run(
            ["bash", "-euvo", "pipefail", str(script)],
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=self.shell,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{done.stdout}\n{self.logs()}")
        return done.stdout

    def logs(self):
        """The end of each unit's log."""
        return "\n".join(f"--- {p}\n{p.read_text()[-3000:]}" for p in sorted(self.units.glob("*.log")))

    def kill(self, unit):
        """SIGKILL what a unit runs, and all that it has started."""
        try:
            process = psutil.Process(int((self.units / f"{unit}.pid").read_text()))
            for one in [process, *process.children(recursive=True)]:
                one.kill()
        except psutil.NoSuchProcess:
            pass  # between two starts

    def stop(self):
        """End all units, and what they have left."""
        started = self.folder / "pids"
        for pid in started.read_text().split() if started.exists() else []:
            if psutil.pid_exists(int(pid)):
                os.kill(int(pid), signal.SIGTERM)
        for path in self.units.glob("*.pid"):
            try:
                os.killpg(int(path.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue


def federation(folder, app, sites):
    """A server and its sites, none of which has anything yet."""
    taken = {"443": str(example.free_port()), "8000": str(example.free_port())}
    server = Machine(folder / "server", app, taken)
    return server, [
        Machine(folder / f"site-{n}", app, {**taken, "9094": str(example.free_port()), "N=0": f"N={n}"})
        for n in range(sites)
    ]


def set_up(server, sites, steps):
    """Steps 1 and 2 on all machines. Returns what the shells showed."""
    shown = "== server\n" + server.type(steps["1. THE SERVER"])
    for number, one in enumerate(sites):
        shutil.copy(server.folder / "etc" / "server.pem", one.shell / "server.pem")
        shown += f"== site {number}\n" + one.type(steps["2. EACH SITE"])
        shutil.copy(one.folder / "etc" / "node.pub", server.shell / f"site-{number}.pub")
    return shown
