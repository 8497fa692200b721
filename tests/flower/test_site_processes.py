"""Sites that run their own code, against apps of whoever reaches the SuperLink's port: real processes.

Run it with the Python of each environment whose flwr is to be tried (1.41, 1.42).
"""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from lightning_fedq.commands.flower import write_app
from tests.flower import evil_apps
from tests.flower.machines import example
from tests.flower.test_processes import write_keys

pytestmark = pytest.mark.slow
ROUNDS, SITES = 3, 2
LARGE = 64 << 20
"""Floats of the message that is too long: 256 MiB."""


class Sites(example.Machines):
    """Machines whose SuperNodes run nothing, with a client process beside each.

    Args:
        folder: As of `Machines`.
        app: Reference of the app that every site has installed.
        installed: Folder in which it is.
    """

    def __init__(self, folder: Path, app: str, installed: Path) -> None:
        super().__init__(folder, link=("--enable-supernode-auth", "--database", str(folder / "link.db")))
        self._app, self._installed = app, installed

    def start(self, name, command):
        """Each process has a Flower folder of its own, in which an app that is installed would lie."""
        before = self.environment
        self.environment = {**before, "FLWR_HOME": str(self.folder / f"flwr-{name}")}
        if name.startswith("site-"):
            path = os.pathsep.join((str(self._installed), before["PYTHONPATH"]))
            self.environment |= {"PYTHONPATH": path}
        super().start(name, command)
        self.environment = before

    def admit(self, client):
        """Register a key; returns the arguments with which its SuperNode proves that it has it."""
        private, public = write_keys(self.folder, client)
        self.flwr("supernode", "register", str(public), "demo")
        return ["--auth-supernode-private-key", str(private)]

    def start_pinned(self, client):
        """A SuperNode that runs nothing, and the site's own client."""
        secret = self.folder / f"secret-{client}"
        if not secret.exists():
            self.keys = getattr(self, "keys", {}) | {client: self.admit(client)}
            secret.write_bytes(os.urandom(32))
            secret.chmod(0o600)
        apart = ("--isolation", "process", "--superexec-auth-secret-file", str(secret))
        self._nodes = {client: [*self.keys[client], *apart]}
        self.start_node(client)
        self.start_client(client)

    def run_evil(self, app, out):
        """Start somebody else's app, whose server writes what came back to `out`."""
        self.flwr("run", str(app), "demo", "--run-config", f'home="{out}"')

    def start_client(self, client, *more):
        """The site's own client."""
        own = f'partition-id={client} fedq-home="{self.folder / f"client-{client}"}"'
        words = ["--app", self._app, "--secret", str(self.folder / f"secret-{client}"), "--node-config", own]
        words += ["--supernode", f"127.0.0.1:{self.ports[client]}", *more]
        self.start(f"site-{client}", [sys.executable, "-m", "lightning_fedq.cli", "flower", "client", *words])


def test_shipped_code_runs_at_no_site_and_the_honest_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(example, "CLIENTS", 0)
    print("flwr", importlib.metadata.version("flwr"))
    app, mark, home = tmp_path / "my_app", tmp_path / "ran", tmp_path / "home"
    write_app(app, clients=SITES, seed=None)
    with Sites(tmp_path, "my_app.client_app:app", app) as machines:
        for client in range(SITES):
            machines.start_pinned(client)
        machines.run(app, home, ROUNDS)
        machines.wait_for((home / "server.json").exists, 600)
        stealing = evil_apps.stealing(tmp_path / "stealing", mark)
        trying = evil_apps.trying(tmp_path / "trying", mark, LARGE)
        machines.wait_for((tmp_path / "client-1" / "streams.jsonl").exists, 600)
        machines.run_evil(stealing, tmp_path / "stolen")
        machines.run_evil(trying, tmp_path / "tried")
        machines.wait_for((home / "runs" / "deployed" / "summary.json").exists, 900)
        machines.wait_for((tmp_path / "tried.done").exists, 900)
        assert (tmp_path / "stolen").read_text().split() == ["error"] * SITES
        tried = (tmp_path / "tried").read_text().splitlines()
        assert len(tried) == (3 * len(evil_apps.KINDS) + 1) * SITES
        # registration, and what a site's own app refuses in its own words, are messages of a lying server
        assert all("refused by this client" in line or "ANSWER {'fedq'" in line for line in tried), tried
        assert not any("keys" in line or "secret" in line for line in tried)
        logs = [(tmp_path / f"site-{client}.log").read_text() for client in range(SITES)]
        assert all("REFUSED 'query.steal'" in log for log in logs)
        assert all("unfolds to 268,4" in log for log in logs)
        assert not mark.exists()
        for client in range(SITES):
            for name in ("site", "client"):
                assert not list((tmp_path / f"flwr-{name}-{client}").rglob("*.py"))
        records = example.checkpoint_of(home)["records"]
        assert [record["num_received"] for record in records] == [SITES] * ROUNDS
        for name in ("secret-1", "wrong"):  # another node's secret, and nobody's
            (tmp_path / "wrong").write_bytes(os.urandom(32))
            (tmp_path / "wrong").chmod(0o600)
            words = ["--app", "my_app.client_app:app", "--secret", str(tmp_path / name)]
            words += ["--supernode", f"127.0.0.1:{machines.ports[0]}"]
            machines.start(
                f"site-{name}", [sys.executable, "-m", "lightning_fedq.cli", "flower", "client", *words]
            )
            assert machines.running[f"site-{name}"].wait(120) == 2
            assert "is --secret the file" in (tmp_path / f"site-{name}.log").read_text()
        # what this is about: a SuperNode that runs what is sent
        (tmp_path / "client-2").mkdir()
        (tmp_path / "client-2" / "keys.json").write_text('{"secret": "of client 2"}')
        machines._nodes = {2: machines.admit(2)}
        machines.start_node(2)
        machines.wait_for(lambda: "SuperNode ID" in (tmp_path / "client-2.log").read_text(), 300)
        again = evil_apps.stealing(tmp_path / "again", mark)
        machines.run_evil(again, tmp_path / "stolen-2")
        machines.wait_for((tmp_path / "stolen-2").exists, 600)
        assert sorted((tmp_path / "stolen-2").read_text().splitlines()) == [
            "error",
            "error",
            '{"secret": "of client 2"}',
        ]
        assert mark.exists()
