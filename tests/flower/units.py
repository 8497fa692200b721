"""What a machine without systemd lacks: keeps one unit of `deploy/` running, as its file says.

    python units.py UNIT.service      # until SIGTERM; output goes to UNIT.log beside it

`systemctl()` writes a command of that name, for machines of `Machine`.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

USED = {
    *("User", "Environment", "StateDirectory", "StateDirectoryMode", "CacheDirectory", "WorkingDirectory"),
    *("ExecStart", "Restart", "RestartSec", "RestartPreventExitStatus", "UMask"),
}
"""Settings that are followed here; users are not changed."""
SANDBOX = {
    *("NoNewPrivileges", "ProtectSystem", "PrivateTmp", "IPAddressDeny", "IPAddressAllow", "LimitCORE"),
    *("LimitNOFILE", "MemoryMax"),
}
"""Settings that only take rights away, which systemd does."""


def settings(unit):
    """The [Service] section of a unit.

    Raises:
        ValueError: If it has a setting that is not known here.
    """
    found, section = dict[str, str](), ""
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[name] = value
    if unknown := set(found) - USED - SANDBOX:
        raise ValueError(f"{unit.name} has {sorted(unknown)}")
    return found


def keep(unit, var):
    """Run it, and start it again as it says."""
    said = settings(unit)
    kept = ("HOME", "OMP_NUM_THREADS", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"  # systemd's
    environment |= dict(word.split("=", 1) for word in shlex.split(said.get("Environment", "")))
    for kind, below in (("StateDirectory", "lib"), ("CacheDirectory", "cache")):
        if kind in said:
            mode = int(said.get(f"{kind}Mode", "0755"), 8)
            (var / below / said[kind]).mkdir(mode=mode, parents=True, exist_ok=True)
    log, running = unit.with_suffix(".log"), list[subprocess.Popen[bytes]]()

    def end(*_):
        for one in running[-1:]:
            one.terminate()
            one.wait(30)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    while True:
        with log.open("ab") as output:
            began = subprocess.Popen(
                shlex.split(said["ExecStart"]),
                env=environment,
                cwd=said.get("WorkingDirectory", "/"),
                umask=int(said.get("UMask", "0022"), 8),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running.append(began)
            unit.with_suffix(".pid").write_text(str(began.pid))
            status = began.wait()
            output.write(f"-- {unit.stem} ended with {status}\n".encode())
        again = said.get("Restart", "no")
        prevented = str(status) == said.get("RestartPreventExitStatus")
        if prevented or again == "no" or (again == "on-failure" and status == 0):
            return
        time.sleep(float(said.get("RestartSec", "0.1")))


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(os.environ["VAR"]))
