"""The machines of `deploy/STEPS.txt` as folders of this one, on which its commands are typed as they stand.

What is other than on a real machine: its folders and ports have other names, and `apt-get`, `useradd`,
`chown` and `systemctl` are stand-ins (the last starts the units, `units.py`). Packages come from the folder
of wheels that `fedq flower wheels` has built. Of the dependencies these wheels are hollow: name, version,
requirements and commands of what is installed here, whose code is found here once all is installed.
"""

import os
import re
import shutil
import signal
import site
import subprocess
import sys
import textwrap
import zipfile
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from tests.flower import units

ROOT = Path(__file__).parents[2]


def blocks(steps):
    """Commands of each section of the steps, by the section's first word."""
    found, name = dict[str, str](), ""
    for line in steps.splitlines():
        if heading := re.match(r"(0\. WHERE|1\. THE SERVER|2\. EACH SITE|3\. AN OPERATOR|A FIRST TRY)", line):
            name = heading.group(1)
        elif line.startswith("with these lines"):
            name = "config"
        elif line.startswith("    ") and name:
            found[name] = found.get(name, "") + line.removeprefix("    ") + "\n"
    return found


def printed(command, **options):
    """What a command prints, with its errors.

    Raises:
        RuntimeError: If it fails.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(done.stdout)
    return done.stdout


class Machine:
    """One machine: its `/etc`, `/opt`, `/var` and the folder in which its operator types.

    Args:
        folder: Of all that.
        app: Folder of the app, which is copied to it.
        ports: Ports of this machine in place of those in the files.
    """

    def __init__(self, folder: Path, app: Path, ports: dict[str, str]) -> None:
        self.folder, self.shell, self.units = folder, folder / "shell", folder / "units"
        self.names = {**self._places(), **ports}
        for each in (self.shell, self.units, folder / "bin"):
            each.mkdir(parents=True, exist_ok=True)
        shutil.copytree(app, self.shell / app.name)
        for path in (self.shell / app.name / "deploy").rglob("*"):
            if path.is_file():
                path.write_text(self.here(path.read_text()))
        self._stand_ins()

    def _places(self):
        return {
            "/etc/systemd/system": str(self.units),
            "/etc/fedq": str(self.folder / "etc"),
            "/opt/fedq": str(self.folder / "opt"),
            "/var/": f"{self.folder / 'var'}/",
        }

    def _enter(self):
        """What a command of this machine begins with."""
        return []

    def here(self, text):
        """A text with this machine's folders and ports."""
        for name, value in self.names.items():
            text = text.replace(name, value)
        return text

    def _stand_ins(self):
        places = " ".join(place for place in site.getsitepackages() if Path(place).is_dir())
        place, opt = self.here("/etc/systemd/system"), self.here("/opt/fedq")
        start = f"setsid {sys.executable} {units.__file__} {place}/$each.service"
        start += " </dev/null >/dev/null 2>&1 &"
        code = f"printf '%s\\n' {places} > $(echo {opt}/lib/python*/site-packages)/parent.pth"
        begun = f"{place}/$each.begun"
        enable = f"""\
            {code}
            shift 2
            for each in "$@"; do
                [ -f {begun} ] || {{ touch {begun}; {start} echo $! >> {self.folder}/pids; }}
            done"""
        python = f'exec {sys.executable} "$@"'
        commands = {
            "python3": python,
            "systemctl": f"if [ $1 = enable ]; then\n{textwrap.dedent(enable)}\nfi",
        }
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
            "VAR": self.here("/var/"),
            "OMP_NUM_THREADS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_QUIET": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # of pip's settings, which turns it off
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "FLWR_TELEMETRY_ENABLED": "0",
        }
        script = self.folder / "typed.sh"
        script.write_text(self.here(commands))
        command = [*self._enter(), "bash", "-euvo", "pipefail", str(script)]
        given = {"stdin": subprocess.DEVNULL, "env": environment, "cwd": self.shell, "timeout": timeout}
        try:
            return printed(command, **given)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.logs()}") from None

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
        """Be gone."""
        self.halt()

    def halt(self):
        """End all units, and what they have left."""
        started = self.folder / "pids"
        for pid in started.read_text().split() if started.exists() else []:
            if psutil.pid_exists(int(pid)):
                os.kill(int(pid), signal.SIGTERM)
        started.unlink(missing_ok=True)
        for path in self.units.glob("*.pid"):
            try:
                os.killpg(int(path.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue


def hollow_wheels(folder):
    """Wheels of all that is installed here and needed there, without code."""
    wanted, found = ["lightning-fedq[flower]"], dict[str, metadata.Distribution]()
    while wanted:
        one = Requirement(wanted.pop())
        here = metadata.distribution(one.name)
        key = f"{one.name.lower()}{sorted(one.extras)}"
        if key in found:
            continue
        found[key] = here
        for words in here.requires or ():
            each = Requirement(words)
            extras = [{"extra": extra} for extra in one.extras] or [{"extra": ""}]
            if each.marker is None or any(each.marker.evaluate(extra) for extra in extras):
                wanted.append(f"{each.name}[{','.join(each.extras)}]" if each.extras else each.name)
    for here in found.values():
        name, version = re.sub(r"[-_.]+", "_", here.metadata["Name"]), here.version
        if name == "lightning_fedq":
            continue
        inside = f"{name}-{version}.dist-info"
        wheel = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        files = {"METADATA": here.read_text("METADATA"), "WHEEL": wheel}
        files["entry_points.txt"] = here.read_text("entry_points.txt") or ""
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            for file, text in files.items():
                archive.writestr(f"{inside}/{file}", text)
            archive.writestr(f"{inside}/RECORD", "".join(f"{inside}/{n},,\n" for n in [*files, "RECORD"]))


def pack(folder, app, steps):
    """Step 0, whose index is a folder."""
    index = folder / "index"
    index.mkdir()
    hollow_wheels(index)
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", steps["0. WHERE"]]
    return printed(command, env={**os.environ, **own, "PATH": path}, cwd=app.parent, timeout=600)


def set_up(server, sites, steps):
    """Steps 1 and 2 on all machines. Returns what the shells showed."""
    shown = "== server\n" + server.type(steps["1. THE SERVER"])
    for number, one in enumerate(sites):
        shutil.copy(server.folder / "etc" / "server.pem", one.shell / "server.pem")
        shown += f"== site {number}\n" + one.type(steps["2. EACH SITE"])
        shutil.copy(one.folder / "etc" / "node.pub", server.shell / f"site-{number}.pub")
    return shown
