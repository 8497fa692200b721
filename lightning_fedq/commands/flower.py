"""`fedq flower`: write an app for `flwr run` (`init`), pack it (`wheels`), run a site's client (`client`)."""

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
from lightning_fedq.commands.configs import shipped_folder

SERVER_NAME = "server.example"
_APP = Path(__file__).with_name("app")
"""Folder with a text for each file of an app, and for the steps that follow. Names in braces are replaced."""


def _write_deploy_files(folder: Path, package: str, server: str) -> None:
    """Copy the deployment files into the app's folder, with the names of this app and server.

    Args:
        folder: Folder of the app.
        package: Name of the app's Python package.
        server: Name or IPv4 address of the server.
    """
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
    source = shipped_folder("deploy", "deploy")
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
    mechanism: str = "CorBin(epsilon_per_coordinate=4.0, shared_bits=5)",
    clients: int = 4,
    seed: int | None = None,
    secure_aggregation: bool = True,
    server: str = SERVER_NAME,
) -> str:
    """Write a Flower app, and return the name of its Python package.

    Args:
        folder: New or empty folder.
        mechanism: Python expression of the mechanism.
        clients: Number of clients of the federation.
        seed: Number that makes a run reproducible, and not private. None uses keys from the operating system.
        secure_aggregation: Whether the server sees only the sum of messages.
        server: Name or IPv4 address by which sites reach the server.

    Raises:
        FileExistsError: If the folder is not empty.
        ValueError: If the folder's name can't be a package name, or the server's name is not that of a
            machine.
    """
    package = folder.name.replace("-", "_").lower()
    if not package.isidentifier():
        raise ValueError(
            f"The folder's name must be a valid Python package name, got {folder.name!r}. Use letters."
        )
    if not re.fullmatch(r"[A-Za-z0-9.-]+", server):
        raise ValueError(f"--server must be the name or the IPv4 address of a machine, got {server!r}")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty. Give a new folder.")
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
    for name in ("pyproject.toml", "task.py", "client_app.py", "server_app.py"):
        place = folder if name.endswith(".toml") else folder / package
        (place / name).write_text((_APP / f"{name}.txt").read_text().format(**names))
    (folder / package / "__init__.py").write_text("")
    _write_deploy_files(folder, package, server)
    return package


def init(folder: Path, *, clients: int = 4, server: str = SERVER_NAME, seed: int | None = None) -> None:
    """Write an app that starts with `flwr run`.

    Args:
        folder: New folder for the app.
        clients: Number of clients of the federation.
        server: Name or IPv4 address of the server.
        seed: Number that makes a run reproducible, and not private. None uses keys from the operating system.
    """
    package = write_app(folder, clients=clients, seed=seed, server=server)
    steps = (folder / "deploy" / "STEPS.txt").read_text()
    print((_APP / "next.txt").read_text().format(folder=folder, package=package, steps=steps))


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

    It is the client of a site and runs next to `flower-supernode --isolation process
    --superexec-auth-secret-file SECRET`. It gives messages to the app that is installed here, and
    never installs, unpacks or imports code of a run. Exit status 2 means that an operator is needed.

    Args:
        app: PACKAGE.MODULE:NAME of a ClientApp that is installed here.
        secret: The SuperNode's --superexec-auth-secret-file.
        supernode: --host and --port of the SuperNode.
        node_config: Settings in the format of flower-supernode, whose own settings are not used:
            'partition-id=3 fedq-home="/var/lib/fedq"'.
        root_certificates: Certificate authority of the SuperNode's own certificate, if it has one.
        fab_hash: Apps (FAB) whose runs are answered (default: all).
        max_megabytes: Maximum size of a message (default: 134, 128 MiB).
    """
    os.umask(0o077)
    if sys.path[:1] == [os.getcwd()]:  # code must not be imported from the current folder
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
        print(f"error: {error}. Is flwr 1.41 or 1.42 installed?", file=sys.stderr)
        return 2
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def wheels(app: Path, *, into: Path | None = None, constraint: Path | None = None) -> int:
    """Build a folder of wheels for servers and sites that have no package index.

    It holds this library, the app and all their dependencies, in the versions that are installed here. The
    wheels are for machines with this Python version and this kind of processor.

    Args:
        app: Folder of the app.
        into: Folder of the wheels (default: wheels in the app's folder).
        constraint: File of versions to use in place of the installed versions.
    """
    folder = app / "wheels" if into is None else into
    if not (app / "pyproject.toml").is_file():
        print(f"error: {app} has no pyproject.toml. Give the folder of `fedq flower init`.", file=sys.stderr)
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
        print("error: pip built no wheels. See its output above.", file=sys.stderr)
        return 2
    found, machine = sorted(folder.glob("*.whl")), f"{platform.system()} {platform.machine()}"
    version = ".".join(map(str, sys.version_info[:2]))
    print(f"{len(found)} wheels in {folder}, for Python {version} on {machine}")
    return 0


def _installed() -> str:
    """Return the installed versions as pip constraints, without this library and local installations."""
    versions = {
        package.metadata["Name"]: package.version
        for package in metadata.distributions()
        if package.metadata["Name"] != "lightning-fedq" and package.read_text("direct_url.json") is None
    }
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


main = {"init": init, "wheels": wheels, "client": client}


def _address(address: str, secure: bool) -> str:
    """Return a SuperNode's address, checked to be HOST:PORT on this machine or reached by TLS.

    Raises:
        ValueError: If it is not HOST:PORT, or is another machine without `secure`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--supernode must be HOST:PORT, got {address!r}. Omit it for 127.0.0.1:9094.")
    if not secure and host not in ("localhost", "[::1]") and not host.startswith("127."):
        raise ValueError(
            f"--supernode {address} is another machine and needs TLS. Give the SuperNode a certificate "
            "(--ssl-certfile, --ssl-keyfile) and this command its authority (--root-certificates)."
        )
    return address


def _secret(path: Path) -> bytes:
    """Read the secret that a SuperNode and its client share.

    Raises:
        ValueError: If other users of the machine can read the file, or it has less than 16 bytes.
    """
    secret = path.read_bytes()
    if stat.S_IMODE(path.stat().st_mode) & 0o007:
        raise ValueError(f"All users of this machine can access {path}. Run chmod o= on it.")
    if len(secret) < 16:
        raise ValueError(
            f"{path} has {len(secret)} bytes, but a secret needs at least 16. Write a new one with "
            "head -c 32 /dev/urandom > secret"
        )
    return secret
