"""Cures that the two sides of a deployment name: all machines in one process, folders as they would lie."""

import shutil
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("flwr")

from lightning_fedq import Cyclic
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Langevin
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.flower import client_app
from lightning_fedq.flower.settings import RefusedError, check_schedules
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.rounds import RoundServer
from lightning_fedq.secagg import SecAgg
from tests.cures.rows import row
from tests.cures.rows_rounds import handed
from tests.cures.rows_training import Chooses
from tests.flower.halves import Halves
from tests.flower.loop import CLIENTS, LoopGrid, clients, deployment, federated, module, own_digits

COIN = LDPQ(4.0)
SECURE = {"seed": None, "local_epochs": 1}
MASKED = {"secure_aggregation": SecAgg()}


def stepping(interval):
    return SimpleNamespace(callbacks=[], lr_scheduler_configs=[SimpleNamespace(interval=interval)])


def fresh(name):
    """A folder that nobody has used."""
    number = len(list(Path.cwd().glob(f"{name}*")))
    return Path.cwd() / f"{name}{number}"


def make(**options):
    return partial(federated, options.pop("mechanism", COIN), **{"local_epochs": 1, **options})


def said(play):
    """Play a round. What clients say who are not heard is raised."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        received = play()
    if received < CLIENTS:
        raise ValueError("\n".join(str(warning.message) for warning in heard))


def deployed(ours=None, theirs=None, apps=None, folder=None, **server):
    """One round between machines."""
    folder, ours = folder or fresh("run"), ours or make()
    grid = LoopGrid(*(apps or clients(theirs or ours, folder)))

    def play():
        _, federation = deployment(ours(), 1, folder, **server).run(grid)
        return federation.records[0].num_received

    said(play)


def without_home(settings):
    return clients(settings, Path(), home=False)


def with_home(settings):
    """The clients' folders are said in code and not by the node."""
    folder = fresh("homes")

    def home(context):
        return folder / str(context.node_config["partition-id"])

    return [client_app(module, own_digits, settings(), home=home) for _ in range(CLIENTS)], [None] * CLIENTS


def two_federations(new):
    """A client of one federation is asked to join another, with its folder or a new one."""
    first, second, settings = fresh("first"), fresh("second"), make(**SECURE)
    deployed(settings, folder=first)
    deployed(settings, apps=clients(settings, second if new else first), folder=second)


def halves(mechanism=COIN, folder=None, **options):
    return Halves(federated(mechanism, **{**SECURE, **options}), folder or fresh("halves"))


def again(played):
    said(lambda: played.round().num_received)


def copied(how):
    """Client 2 goes on in a copy of its folder, in the folder itself, or in one that was moved."""
    folder = fresh("halves")
    played = halves(folder=folder)
    again(played)
    honest = played.client
    if how == "moved":
        (folder / "client-2").rename(folder / "client-9")
    else:
        shutil.copytree(folder / "client-2", folder / "client-9")
    if how != "itself":
        from lightning_fedq.flower.remote_client import ClientConfig
        from lightning_fedq.flower.store import Store
        from tests.flower.halves import Still

        other = Still(ClientConfig(played.federated, Store(folder / "client-9"), 2))
        played.line.clients = lambda number: other if number == 2 else honest(number)
    again(played)


def touched(name, cure):
    """A file of client 2 is lost, or damaged; then it is put back, or another federation begins."""
    folder = fresh("halves")
    played = halves(folder=folder)
    again(played)
    path = folder / "client-2" / name
    whole = path.read_bytes()
    if name == "streams.jsonl":
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2])
    if cure == "back":
        path.write_bytes(whole)
        path.chmod(0o600)
    again(halves() if cure == "new" else played)


def handing_on(told):
    """A round of a server that says who hands noise on, or that is of a version that does not."""
    whole = RoundServer.task
    task = whole if told else lambda self: replace(whole(self), hand_over=None)
    cycle = {"cohort": Cyclic(CLIENTS), "num_clients": 2 * CLIENTS}
    with mock.patch.object(RoundServer, "task", task):
        again(halves(handed(), **cycle))


class Tampers(pl.Callback):
    """Would change what clients send."""

    def on_train_start(self, trainer, pl_module):
        find_federated(trainer, "Tampers").started_engine.tampering = self


row(
    "This client and the server differ: {}. Run the same code and settings on both",
    lambda: deployed(make(), make(mechanism=LDPQ(3.0))),
    lambda: deployed(make(), make()),
    error=RuntimeError,
)
row(
    " need a client folder. Start",
    lambda: deployed(make(**SECURE), apps=without_home(make(**SECURE))),
    lambda: deployed(make(**SECURE)),
    lambda: deployed(make(**SECURE), apps=with_home(make(**SECURE))),
    lambda: deployed(make(**MASKED), apps=with_home(make(**MASKED))),
    error=RuntimeError,
)
row(
    "Client folder {} is of federation {}, but the server's is {}. Use a new folder for a new",
    lambda: two_federations(new=False),
    lambda: two_federations(new=True),
    error=RuntimeError,
)
row("of {}, which still exists", lambda: copied("copied"), lambda: copied("itself"), lambda: copied("moved"))
row(
    "{} is missing, so the messages under these keys are unknown. Restore the file, or begin a new",
    lambda: touched("streams.jsonl", ""),
    lambda: touched("streams.jsonl", "back"),
    lambda: touched("streams.jsonl", "new"),
)
row(
    "{} is damaged. Restore it, or begin a new federation in another folder",
    lambda: touched("keys.json", ""),
    lambda: touched("keys.json", "back"),
    lambda: touched("keys.json", "new"),
)
row("{} {} a list of clients that take back", lambda: handing_on(told=False), lambda: handing_on(told=True))
row(
    "A schedule has interval='step', but the longest client's steps are unknown over a network",
    lambda: check_schedules(stepping("step"), None),
    lambda: check_schedules(stepping("step"), 2),
    lambda: check_schedules(stepping("epoch"), None),
    error=RefusedError,
)
row("{} draws batches, but a server has no", lambda: deployed(callbacks=[Chooses()]), deployed)
row("{} works on updates, which a server never", lambda: deployed(callbacks=[Tampers()]), deployed)
row("{} works on simulated clients, but a server", lambda: deployed(callbacks=[Langevin(0.1)]), deployed)
