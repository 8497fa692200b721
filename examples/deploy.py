"""Real processes on this machine: one SuperLink with TLS, four SuperNodes, and the weights of the simulation.

    python examples/deploy.py                # CorBin, LDPQ, AggregateGaussian, CPA, CorBin behind SecAgg
    python examples/deploy.py "LDPQ(epsilon=4.0)"

Writes the app that `fedq flower init` writes, starts it with `flwr run`, waits for its end, runs the same
federation as a simulation and compares the models bit for bit. Everything that it starts it stops.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lightning_fedq._lightning import pl
from lightning_fedq.commands.flower import write_app
from lightning_fedq.datasets import DigitsDataModule

CLIENTS, SEED, ROUNDS = 4, 5, 2
DEFAULT = (
    "CorBin(epsilon=4.0, shared_bits=5)",
    "LDPQ(epsilon=4.0)",
    "AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05)",
    "CPA(epsilon=2.0)",
    "secagg CorBin(epsilon=4.0, shared_bits=5)",
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
    """A command of Flower, beside this Python or on the path."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else os.environ.get("FLOWER_BIN", "") + name


class Machines:
    """The processes of one deployment, each with a log; leaving the block ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._running = folder, []
        self.environment = {**os.environ, "FLWR_HOME": str(folder / "flwr"), "OMP_NUM_THREADS": "1"}
        self.environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FEDQ_SERVER": str(folder / "server")}
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self.environment["PATH"] = f"{Path(tool('flwr')).parent}{os.pathsep}{os.environ['PATH']}"

    def __enter__(self) -> Machines:
        write_certificate(self.folder)
        port = free_port()
        pem = str(self.folder / "server.pem")
        tls = [
            "--ssl-certfile",
            pem,
            "--ssl-keyfile",
            str(self.folder / "server.key"),
            "--ssl-ca-certfile",
            pem,
        ]
        link = ["--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
        self.start("superlink", [tool("flower-superlink"), *tls, *link])
        self.address = f"127.0.0.1:{port}"
        for client in range(CLIENTS):
            own = f'partition-id={client} fedq-home="{self.folder / f"client-{client}"}"'
            node = ["--superlink", self.address, "--root-certificates", pem, "--port", str(free_port())]
            self.start(f"client-{client}", [tool("flower-supernode"), *node, "--node-config", own])
        (self.folder / "flwr").mkdir(exist_ok=True)
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "demo"\n\n[superlink.demo]\naddress = "{self.address}"\n'
            f'root-certificates = "{pem}"\n'
        )
        return self

    def start(self, name: str, command: list[str]) -> None:
        log = (self.folder / f"{name}.log").open("w")
        out = {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            command, env=self.environment, cwd=self.folder, start_new_session=True, **out
        )
        self._running.append(process)

    def run(self, app: Path, timeout: float) -> Path:
        """Start an app and wait until its last round is over; return the server's folder."""
        last = self.folder / "server" / "runs" / "deployed" / "summary.json"
        command = [tool("flwr"), "run", str(app), "demo", "--run-config", f"rounds={ROUNDS}"]
        end = time.monotonic() + timeout
        while True:  # the SuperLink takes a while until it answers
            done = subprocess.run(
                command, env=self.environment, cwd=self.folder, capture_output=True, text=True
            )
            if done.returncode == 0:
                break
            if time.monotonic() > end:
                raise RuntimeError(done.stdout + done.stderr)
            time.sleep(2)
        while not last.exists():
            if time.monotonic() > end:
                raise RuntimeError(f"no end after {timeout:g} s\n{self.logs()}")
            time.sleep(1)
        return self.folder / "server"

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log")))

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            try:
                os.killpg(process.pid, 15)
            except ProcessLookupError:
                continue
        for process in self._running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def deploy(mechanism: str, folder: Path, secagg: bool = False, timeout: float = 900.0) -> dict[str, object]:
    """Deploy, simulate, compare."""
    app = folder / "fedq_app"
    package = write_app(app, mechanism, clients=CLIENTS, seed=SEED, secure_aggregation=secagg)
    began = time.monotonic()
    with Machines(folder) as machines:
        server = machines.run(app, timeout)
    seconds = time.monotonic() - began
    sys.path.insert(0, str(app))
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    task = __import__(f"{package}.task").task
    sys.path.remove(str(app))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_epochs=ROUNDS, accelerator="cpu", callbacks=[task.federated], enable_model_summary=False, **quiet
    )
    trainer.fit(task.module(), datamodule=DigitsDataModule(batch_size=16))
    saved = torch.load(server / "checkpoints" / "last.ckpt", weights_only=True)
    deployed = next(s["engine"] for k, s in saved["callbacks"].items() if "Federated" in k)
    engine = task.federated.engine
    return {
        "mechanism": ("SecAgg " if secagg else "") + mechanism,
        "same weights": torch.equal(deployed["weights"], engine.weights),
        "bits, deployed": deployed["total_uplink_bits"],
        "bits, simulated": engine.total_uplink_bits,
        "seconds": round(seconds, 1),
    }


def main() -> int:
    rows = []
    for chosen in sys.argv[1:] or DEFAULT:
        with tempfile.TemporaryDirectory() as folder:
            secagg, mechanism = chosen.startswith("secagg "), chosen.removeprefix("secagg ")
            rows.append(deploy(mechanism, Path(folder), secagg))
            print("  ".join(f"{name}: {value}" for name, value in rows[-1].items()), flush=True)
    return 0 if all(row["same weights"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
