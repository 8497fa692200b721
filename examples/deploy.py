"""Real processes on this machine: one SuperLink with TLS, four SuperNodes, and the weights of the simulation.

    python examples/deploy.py                # CorBin, LDPQ, AggregateGaussian, CPA, CorBin behind SecAgg
    python examples/deploy.py "LDPQ(epsilon_per_coordinate=4.0)"

For each of them it writes the app that `fedq flower init` writes, starts it with `flwr run`, waits for its
end, runs the same federation as a simulation and compares the models bit for bit. Everything that it starts
it stops. What takes the time is Python: Flower starts a process for every message to a client.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lightning_fedq._lightning import pl
from lightning_fedq.commands.flower import write_app
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.training.checkpoints import RecordFile

CLIENTS, SEED, ROUNDS = 4, 5, 2
DEFAULT = (
    "CorBin(epsilon_per_coordinate=4.0, shared_bits=5)",
    "LDPQ(epsilon_per_coordinate=4.0)",
    "AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05)",
    "CPA(epsilon=2.0, epsilon_scope='bit')",
    "secagg CorBin(epsilon_per_coordinate=4.0, shared_bits=5)",
)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def write_certificate(folder: Path) -> None:
    """A certificate for localhost, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    (folder / "server.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))


def tool(name: str) -> str:
    """A command of Flower: beside this Python, or where its package was installed."""
    scripts = [Path(sys.executable).parent / name]
    for file in importlib.metadata.files("flwr") or []:
        if file.name == name:
            scripts.append(Path(str(file.locate())).resolve())
    return str(next(script for script in scripts if script.exists()))


class Machines:
    """The processes of one deployment, each with a log; leaving the block ends them.

    Args:
        folder: Of certificates, logs, and everybody's own folder.
        nodes: Further arguments of each SuperNode.
        link: Further arguments of the SuperLink, such as a database to survive in.
    """

    def __init__(self, folder: Path, nodes: Sequence[Sequence[str]] = (), link: Sequence[str] = ()) -> None:
        self.folder, self._nodes, self._link, self.running = folder, nodes, link, {}
        self.environment = {**os.environ, "FLWR_HOME": str(folder / "flwr"), "OMP_NUM_THREADS": "1"}
        self.environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self.environment["PATH"] = f"{Path(tool('flwr')).parent}{os.pathsep}{os.environ['PATH']}"
        self.port, self.ports = free_port(), dict[int, int]()
        self.address, self.pem = f"127.0.0.1:{self.port}", str(folder / "server.pem")

    def __enter__(self) -> Machines:
        self.folder.mkdir(exist_ok=True)
        write_certificate(self.folder)
        self.start_link()
        for client in range(CLIENTS):
            self.start_node(client)
        (self.folder / "flwr").mkdir(exist_ok=True)
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "demo"\n\n[superlink.demo]\naddress = "{self.address}"\n'
            f'root-certificates = "{self.pem}"\n'
        )
        return self

    def start_link(self) -> None:
        """Start the SuperLink."""
        key = str(self.folder / "server.key")
        tls = ["--ssl-certfile", self.pem, "--ssl-keyfile", key, "--ssl-ca-certfile", self.pem]
        link = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        self.start("superlink", [tool("flower-superlink"), *tls, *link, *self._link])

    def start_node(self, client: int) -> None:
        """Start one client's SuperNode."""
        own = f'partition-id={client} fedq-home="{self.folder / f"client-{client}"}"'
        port = self.ports.setdefault(client, free_port())
        node = ["--superlink", self.address, "--root-certificates", self.pem, "--port", str(port)]
        more = self._nodes[client] if self._nodes else ()
        command = [tool("flower-supernode"), *node, "--node-config", own, *more]
        self.start(f"client-{client}", command)

    def start(self, name: str, command: list[str]) -> None:
        """Start a process with its own log."""
        with (self.folder / f"{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        """SIGKILL a process, and everything that it has started."""
        process = psutil.Process(self.running[name].pid)
        for one in [process, *process.children(recursive=True)]:
            one.kill()
        self.running.pop(name).wait()

    def flwr(self, *arguments: str, timeout: float = 300.0) -> str:
        """An operator's command. The SuperLink takes a while until it answers."""
        end = time.monotonic() + timeout
        while True:
            command = [tool("flwr"), *arguments]
            done = subprocess.run(
                command, env=self.environment, cwd=self.folder, capture_output=True, text=True
            )
            if done.returncode == 0:
                return done.stdout
            if time.monotonic() > end:
                raise RuntimeError(done.stdout + done.stderr)
            time.sleep(2)

    def run(self, app: Path, home: Path, rounds: int, **config: object) -> None:
        """Start an app, whose server keeps its folder in `home`."""
        given = {"rounds": rounds, "home": f'"{home}"', **config}
        words = " ".join(f"{name}={value}" for name, value in given.items())
        self.flwr("run", str(app), "demo", "--run-config", words)

    def wait_for(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait until something is true."""
        end = time.monotonic() + timeout
        while not done():
            if time.monotonic() > end:
                raise RuntimeError(f"no end after {timeout:g} s\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log")))

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            try:
                os.killpg(process.pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def deploy(
    machines: Machines,
    mechanism: str,
    name: str,
    secagg: bool = False,
    timeout: float = 1800.0,
    change: Callable[[Path], None] = lambda package: None,
) -> dict[str, object]:
    """Deploy, simulate, compare.

    Args:
        machines: Running.
        mechanism: As in Python.
        name: Of the app, new for every one.
        secagg: Behind secure aggregation.
        timeout: Seconds until the deployment has to be over.
        change: Done to the app's package before it starts.
    """
    app, server = machines.folder / name, machines.folder / f"{name}-server"
    package = write_app(app, mechanism, clients=CLIENTS, seed=SEED, secure_aggregation=secagg)
    change(app / package)
    began = time.monotonic()
    machines.run(app, server, ROUNDS)
    machines.wait_for((server / "runs" / "deployed" / "summary.json").exists, timeout)
    seconds = time.monotonic() - began
    engine, saved = simulate(app, package, ROUNDS), checkpoint_of(server)
    deployed = saved["engine"]
    return {
        "mechanism": ("SecAgg " if secagg else "") + mechanism,
        "same weights": torch.equal(deployed["weights"], engine.weights),
        "answers": [record["num_received"] for record in saved["records"]],
        "bits, deployed": deployed["total_uplink_bits"],
        "bits, simulated": engine.total_uplink_bits,
        "seconds": round(seconds, 1),
    }


def simulate(app: Path, package: str, rounds: int) -> Any:
    """The engine of an app's federation after a simulation of it."""
    sys.path.insert(0, str(app))
    task = importlib.import_module(f"{package}.task")
    sys.path.remove(str(app))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_epochs=rounds, accelerator="cpu", callbacks=[task.federated], enable_model_summary=False, **quiet
    )
    trainer.fit(task.module(), datamodule=DigitsDataModule(batch_size=16))
    return task.federated.engine


def checkpoint_of(server: Path) -> dict[str, Any]:
    """What a server's checkpoint holds of the federation, and the records beside it."""
    path = server / "checkpoints" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    found = next(state for name, state in saved["callbacks"].items() if "Federated" in name)
    return {**found, "records": [vars(record) for record in RecordFile().records(found["records"], path)]}


def main() -> int:
    rows = []
    with tempfile.TemporaryDirectory() as folder, Machines(Path(folder)) as machines:
        for number, chosen in enumerate(sys.argv[1:] or DEFAULT):
            secagg, mechanism = chosen.startswith("secagg "), chosen.removeprefix("secagg ")
            rows.append(deploy(machines, mechanism, f"fedq_app_{number}", secagg))
            print("  ".join(f"{name}: {value}" for name, value in rows[-1].items()), flush=True)
    return 0 if all(row["same weights"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
