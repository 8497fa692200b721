"""`fedq flower`: `init` writes an app for `flwr run`, `wheels` packs it, `client` runs it where installed."""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from lightning_fedq import __version__

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "A private federation: lightning_fedq over Flower"
license = "Apache-2.0"
dependencies = ["lightning-fedq[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
rounds = 3
home = "fedq-server"
"""
TASK = '''\
"""What both sides share: the module, the federation's settings, and each client's own data."""

import torch
from flwr.app import Context
from torch.utils.data import DataLoader, Subset

from lightning_fedq import Federated
from lightning_fedq._lightning import pl
from lightning_fedq.data import IID
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.mechanisms import {mechanism_class}
from lightning_fedq.data.models import MLP, Classifier
from lightning_fedq.rounds import RoundPlan
from lightning_fedq.secagg import SecAgg

CLIENTS = {clients}
SEED = {seed}  # None: keys from the operating system, secret and not reproducible

# A start, and no protection to rely on: with a handful of clients and a whole network every row of
# privacy.md says vacuous, whatever the mechanism. RotatedCoins with
# privacy=PrivacyTarget(epsilon=8.0, delta=1e-5, adversary="secagg_server") is calibrated to a budget, and
# `fedq plan --clients N --params D --rounds R --epsilon 8` says how many clients that needs.
federated = Federated(
    {mechanism},
    num_clients=CLIENTS,
    local_epochs=2,
    clients_per_step=1,
    secure_aggregation={secagg},
    seed=SEED,
)

# What acts on training: both sides' Trainers are given it, and a client that has another is turned away.
TRAINING = {{"accelerator": "cpu"}}


def module() -> pl.LightningModule:
    torch.manual_seed(0)
    return Classifier(MLP(in_features=64, hidden=[32]), lr=0.1, momentum=0.9)


class OwnData(pl.LightningDataModule):
    """One client's samples: here a part of the digits; a real client reads its own."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.part = part

    def setup(self, stage: str) -> None:
        whole = DigitsDataModule(batch_size=16)
        whole.setup("fit")
        seed = RoundPlan(0, (), frozenset(), SEED or 0).stream_seed("partition")
        generator = torch.Generator().manual_seed(seed)
        parts = IID().split(None, len(whole.train_set), CLIENTS, generator)
        self.samples = Subset(whole.train_set, parts[self.part].tolist())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, batch_size=16, shuffle=True)


def data(context: Context) -> OwnData:
    return OwnData(int(context.node_config["partition-id"]))
'''
CLIENT = """\
from lightning_fedq.flower import client_app

from {package}.task import TRAINING, data, federated, module

app = client_app(module, data, federated, trainer=TRAINING)
"""
SERVER = """\
from pathlib import Path

from lightning_fedq.callbacks import RunFolder
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.flower import server_app

from {package}.task import TRAINING, federated, module


def home(context):
    return Path(context.run_config["home"])


def trainer(context):
    rounds = int(context.run_config["rounds"])
    folder = RunFolder("deployed", root=home(context) / "runs", show=False)
    own = TRAINING.get("callbacks", [])
    return {{**TRAINING, "max_epochs": rounds, "callbacks": [folder, *own], "logger": False}}


def data():
    return DigitsDataModule(batch_size=64)


app = server_app(module, federated, data=data, trainer=trainer, home=home, round_timeout=600)
"""
NEXT = """\
wrote {folder}. In {folder}/{package}/task.py stand the module, the data and the settings, and
in {folder}/deploy what is copied to the machines. These are the steps, {folder}/deploy/STEPS.txt:

{steps}
With few clients privacy.md will say vacuous: task.py says how a mechanism is chosen that protects yours.
"""
SERVER_NAME = "server.example"


def _deploy_files() -> Path:
    """Units, filter and steps: `deploy/` of the repository, in the package once it is installed."""
    package = Path(__file__).parents[1]
    installed = package / "deploy"
    return installed if installed.is_dir() else package.parent / "deploy"


def _write_deploy_files(folder: Path, package: str, server: str) -> None:
    """Copy them with this app's and this server's names in them."""
    try:
        address = f"IP:{ipaddress.ip_address(server)}"
    except ValueError:
        address = f"DNS:{server}"
    names = {
        "my_app.client_app": f"{package}.client_app",
        "my_app": folder.name,
        f"DNS:{SERVER_NAME}": address,
        SERVER_NAME: server,
    }
    source = _deploy_files()
    for path in sorted(source.rglob("*")):
        if path.is_file():
            text = path.read_text()
            for name, value in names.items():
                text = text.replace(name, value)
            copy = folder / "deploy" / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)


def write_app(
    folder: Path,
    mechanism: str = "CorBin(epsilon=4.0, shared_bits=5)",
    clients: int = 4,
    seed: int | None = None,
    secure_aggregation: bool = True,
    server: str = SERVER_NAME,
) -> str:
    """Write the app, and return the name of its package.

    Args:
        folder: Must not hold anything yet.
        mechanism: Mechanism as it is written in Python.
        seed: Seed of a run that is to be reproducible, and not private.
        secure_aggregation: Let the server see the sum only.
        server: Name or address by which sites reach the server.

    Raises:
        FileExistsError: If there is something in the folder.
        ValueError: If its name makes no package, or the server's is no name of a machine.
    """
    package = folder.name.replace("-", "_").lower()
    if not package.isidentifier():
        raise ValueError(
            f"the folder's name becomes a Python package, and {folder.name!r} can't; use letters"
        )
    if not re.fullmatch(r"[A-Za-z0-9.-]+", server):
        raise ValueError(f"--server must be the name or the IPv4 address of a machine, got {server!r}")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; take a new folder")
    names = {
        "name": package.replace("_", "-"),
        "package": package,
        "mechanism": mechanism,
        "mechanism_class": mechanism.partition("(")[0],
        "clients": clients,
        "seed": seed,
        "secagg": "SecAgg()" if secure_aggregation else None,
    }
    (folder / package).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(**names))
    files = {"task": TASK, "client_app": CLIENT, "server_app": SERVER}
    for name, text in files.items():
        (folder / package / f"{name}.py").write_text(text.format(**names))
    (folder / package / "__init__.py").write_text("")
    _write_deploy_files(folder, package, server)
    return package


def init(folder: Path, *, clients: int = 4, server: str = SERVER_NAME, seed: int | None = None) -> None:
    """Write an app that starts with `flwr run`.

    Args:
        folder: A new folder.
        clients: Number of clients.
        server: Name or address of the server.
        seed: Seed that makes it reproducible, and not private.
    """
    package = write_app(folder, clients=clients, seed=seed, server=server)
    steps = (folder / "deploy" / "STEPS.txt").read_text()
    print(NEXT.format(folder=folder, package=package, steps=steps))


def client(
    *,
    app: str,
    secret: Path,
    supernode: str = "127.0.0.1:9094",
    node_config: str = "",
    root_certificates: Path | None = None,
    fab_hash: Sequence[str] = (),
    max_megabytes: float = 134.217728,
) -> int:
    """Answer a SuperNode's messages with the app that is installed here, and run no other code.

    A site's own client. It stands beside `flower-supernode --isolation process
    --superexec-auth-secret-file SECRET`, hands messages to the app that is installed here, and
    never installs, unpacks or imports what a run brings along. Exit status 2 asks for an operator.

    Args:
        app: PACKAGE.MODULE:NAME of a ClientApp that is installed here.
        secret: The SuperNode's --superexec-auth-secret-file.
        supernode: Its --host and --port.
        node_config: Settings as of flower-supernode, whose own are not used:
            'partition-id=3 fedq-home="/var/lib/fedq"'.
        root_certificates: Authority of the SuperNode's own certificate, if it has one.
        fab_hash: Apps (FAB) whose runs are answered, and no others (default: all).
        max_megabytes: Size of the longest message (default: 134, 128 MiB).
    """
    os.umask(0o077)
    if sys.path[:1] == [os.getcwd()]:  # never from the folder that the process happens to be in
        del sys.path[0]
    sys.path[:] = [place for place in sys.path if place]
    try:
        from lightning_fedq.flower import runtime, site

        runtime.check_flower()
        node = runtime.SuperNode(
            _address(supernode, root_certificates is not None),
            _secret(secret),
            None if root_certificates is None else root_certificates.read_bytes(),
            round(max_megabytes * 1e6),
        )
        config = runtime.node_config(node_config)
        with site.ended_by_signals():
            site.serve(site.Site(site.load(app), node, config, frozenset(fab_hash)))
    except ImportError as error:
        print(f"error: {error}; is it flwr 1.41 or 1.42 that is installed?", file=sys.stderr)
        return 2
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def wheels(app: Path, *, into: Path | None = None, constraint: Path | None = None) -> int:
    """Build the folder of wheels that a server and sites install, which have no index.

    It holds this library, the app and all that both need, in the versions that are installed here: for
    machines with this Python and this kind of processor.

    Args:
        app: Folder of the app.
        into: Folder of the wheels (default: wheels in the app's).
        constraint: Versions to take in place of those that are installed here.
    """
    folder = app / "wheels" if into is None else into
    if not (app / "pyproject.toml").is_file():
        print(f"error: {app} has no pyproject.toml; name the folder of `fedq flower init`", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    versions = folder / "constraints.txt"
    versions.write_text(_installed() if constraint is None else constraint.read_text())
    source = Path(__file__).parents[2]
    ours = f"lightning-fedq[flower]=={__version__}"
    if (source / "pyproject.toml").is_file():  # installed from its repository
        ours = f"lightning-fedq[flower] @ {source.as_uri()}"
    build = [sys.executable, "-m", "pip", "wheel", "--wheel-dir", str(folder), "--constraint", str(versions)]
    done = subprocess.run([*build, ours, str(app.resolve())], check=False)
    if done.returncode != 0:
        print("error: pip has built no wheels; its words are above", file=sys.stderr)
        return 2
    found = sorted(folder.glob("*.whl"))
    version = ".".join(map(str, sys.version_info[:2]))
    print(
        f"{len(found)} wheels in {folder}, for Python {version} on {platform.system()} {platform.machine()}"
    )
    return 0


def _installed() -> str:
    """Versions of what is installed here, ours and what comes from a folder aside."""
    found = {
        one.metadata["Name"]: one.version
        for one in metadata.distributions()
        if one.metadata["Name"] != "lightning-fedq" and one.read_text("direct_url.json") is None
    }
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


main = {"init": init, "wheels": wheels, "client": client}


def _address(address: str, secure: bool) -> str:
    """A SuperNode's address, which messages reach by TLS unless it is this machine's own."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--supernode must be HOST:PORT, got {address!r}; leave it out for 127.0.0.1:9094")
    if not secure and host not in ("localhost", "[::1]") and not host.startswith("127."):
        raise ValueError(
            f"--supernode {address} is another machine: weights and answers would travel in the clear; give "
            "the SuperNode a certificate (--ssl-certfile, --ssl-keyfile), and its authority's here "
            "(--root-certificates)"
        )
    return address


def _secret(path: Path) -> bytes:
    """The secret that a SuperNode and its client share, which others of the machine can't read."""
    found = path.read_bytes()
    if stat.S_IMODE(path.stat().st_mode) & 0o007:
        raise ValueError(f"{path} can be read by everybody on this machine; run chmod o= on it")
    if len(found) < 16:
        raise ValueError(
            f"{path} has {len(found)} bytes, at least 16 make a secret; write a new one, "
            "head -c 32 /dev/urandom > secret"
        )
    return found
