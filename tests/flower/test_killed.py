"""Processes that are killed (SIGKILL) at a chosen point, and what a deployment makes of it.

Server and clients are processes of their own, as Flower has them: the server one for the whole run, a client
one for every message. They are forked, so that each begins where an import of minutes would have ended. What
Flower itself adds (a SuperNode and a SuperLink that are killed) is in `test_killed_machines.py`.
"""

import json
import os
import pickle
import resource
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Message

import lightning_fedq as fedq
from lightning_fedq.flower import federated_server as server_module
from lightning_fedq.flower.masked_rounds import MaskedRounds
from lightning_fedq.flower.persistent_state import PersistentState
from lightning_fedq.flower.records import from_record
from lightning_fedq.flower.remote_client import RemoteClient
from lightning_fedq.flower.roster import Roster
from lightning_fedq.keys.party_keys import Identities
from lightning_fedq.rounds import RoundServer, StreamLog
from tests.flower.loop import CLIENTS, LoopGrid, clients, deployment, federated, module, simulate
from tests.flower.test_same_training import STEPS, ByCourse, Scaled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*fork:DeprecationWarning"),
]
COIN = fedq.CorBin(epsilon_per_coordinate=4.0, shared_bits=5)
ROUNDS = 3


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def after(owner, name, when):
    """Die when a method has done its work."""
    whole = getattr(owner, name)

    def dying(self, *args, **kwargs):
        found = whole(self, *args, **kwargs)
        if when(self):
            die()
        return found

    setattr(owner, name, dying)


def before(owner, name, when):
    """Die when a method is called."""
    whole = getattr(owner, name)

    def dying(self, *args, **kwargs):
        if when(self):
            die()
        return whole(self, *args, **kwargs)

    setattr(owner, name, dying)


def in_process(work, folder):
    """Result of some work in a process of its own, or None where it was killed."""
    result = folder / "result"
    result.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            found = pickle.dumps(work())
            result.write_bytes(found)
            os._exit(0)
        except BaseException as error:  # a traceback would print twice; the parent says it
            result.write_bytes(pickle.dumps(error))
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    found = pickle.loads(result.read_bytes())
    if os.waitstatus_to_exitcode(status):
        raise found
    return found


class ForkGrid(LoopGrid):
    """Answers each message in a process of its own, and writes down what was sent.

    Args:
        dying: A client and what is done in its process before it answers round 2, so that it dies.
    """

    def __init__(self, apps: Any, homes: Any, folder: Path, dying: dict[int, Callable[[str], None]]) -> None:
        super().__init__(apps, homes)
        self.folder, self.dying = folder, dying

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            self.sent += 1
            numbers.append(f"message {self.sent}")
            message.metadata.__dict__["_message_id"] = numbers[-1]
            client = message.metadata.dst_node_id - 100
            content = in_process(lambda: self._answer(client, message), self.folder)  # noqa: B023
            if content is not None:
                self._replies[numbers[-1]] = Message(content, reply_to=message)
        return numbers

    def _answer(self, client, message):
        if client in self.dying and message.metadata.group_id == "round 2":
            self.dying[client](message.metadata.message_type.removeprefix("query."))
        content = self.apps[client](message, self.contexts[100 + client]).content
        if answer := from_record(content).get("answer"):
            kind = message.metadata.message_type.removeprefix("query.")
            with (self.folder / f"{kind}.wire").open("ab") as wire:
                wire.write(struct.pack(">I", len(answer)) + answer)
        return content


Outcome = dict[str, Any]


def serve(
    make, folder, dies=lambda: None, dying=None, rounds=ROUNDS, signed=False, build=module, trainer=None
):
    """Run the server in a process of its own, and return what it ends with, or None where it was killed."""
    own = [Ed25519PrivateKey.from_private_bytes(bytes([client] * 32)) for client in range(CLIENTS)]
    directory = {client: key.public_key() for client, key in enumerate(own)} if signed else None
    identities = lambda context: Identities(own[int(context.node_config["partition-id"])], directory)  # noqa: E731

    def work():
        dies()
        apps = clients(
            *(make, folder),
            identities=identities if signed else None,
            trainer={"max_epochs": rounds, **(trainer or {})},
            module=build,
        )
        grid = ForkGrid(*apps, folder, dying or {})
        one = deployment(make(), rounds, folder, directory=directory, module=build, **(trainer or {}))
        _, server = one.run(grid)
        assert server.engine is not None
        return {
            "weights": server.engine.weights,
            "charges": server.engine.ledger.charges.tolist(),
            "rounds": [record.round for record in server.records],
            "received": [record.num_received for record in server.records],
            "aborted": [bool(record.aborted) for record in server.records],
        }

    inner = folder / "server-process"
    inner.mkdir(parents=True, exist_ok=True)
    return in_process(work, inner)


def streams_of(folder, client):
    """Streams that a client has used, as its own log has them."""
    lines = (folder / f"client-{client}" / "streams.jsonl").read_text().splitlines()[1:]
    return [(entry["round"], entry["attempt"]) for entry in map(json.loads, lines)]


def check_streams(folder, charges):
    """No stream carries two payloads, and whatever may have been sent is charged."""
    for client in range(CLIENTS):
        used = streams_of(folder, client)
        assert used == sorted(set(used))
        assert len(used) <= charges[client]
    payloads = {}
    for wire in folder.glob("*.wire"):
        data = wire.read_bytes()
        while data:
            (size,) = struct.unpack_from(">I", data)
            answer, data = data[4 : 4 + size], data[4 + size :]
            _, _, round, attempt, client = struct.unpack_from(">4s16sQIQ", answer)
            payloads.setdefault((wire.stem, round, attempt, client), set()).add(answer)
    assert all(len(found) == 1 for found in payloads.values())


def coin(**options):
    return federated(COIN, **{"seed": None, **options})


def second(server):
    return bool(server.plan is not None and server.plan.round == 1)


PHASES = {
    "registration": lambda: after(Roster, "_load_secrets", lambda roster: True),
    "before the roster is kept": lambda: before(
        server_module.Store, "put", lambda store: (store.folder / "server.json").exists()
    ),
    "charged": lambda: after(RoundServer, "start", second),
    "asked": lambda: after(ForkGrid, "push_messages", lambda grid: grid.sent == 3 * CLIENTS),
    "answered": lambda: before(RoundServer, "finish", second),
    "stepped": lambda: after(RoundServer, "finish", lambda server: server.round == 2),
    "saving": lambda: after(
        server_module.pl.Trainer, "save_checkpoint", lambda trainer: trainer.current_epoch == 1
    ),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_server_that_is_killed_goes_on_with_new_streams(phase, tmp_path):
    assert serve(coin, tmp_path, PHASES[phase]) is None  # it was killed, not ended
    found = serve(coin, tmp_path)
    assert found is not None
    assert found["rounds"] == [0, 1, 2] and found["received"] == [CLIENTS] * 3
    again = 0 if phase in ("registration", "before the roster is kept") else 1
    assert found["charges"] == [3 + again] * CLIENTS  # the round that was cut off is paid for
    check_streams(tmp_path, found["charges"])


def no_room(room):
    """From here on this process can make no file longer, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


def full_at(name, round, room_of):
    """The server's disk is full when a method of the round is called."""
    whole = getattr(RoundServer, name)

    def filled(self):
        if self.round == round:
            no_room(room_of())
        return whole(self)

    setattr(RoundServer, name, filled)


@pytest.mark.parametrize("more", [0, 20])
@pytest.mark.parametrize(
    "name, file, again", [("start", "ledger-*.jsonl", 0), ("finish", "checkpoints/*", 1)]
)
def test_a_server_whose_disk_is_full_ends_by_name_and_goes_on_when_there_is_room(
    name, file, again, more, tmp_path
):
    """Before or in a charge's line nothing has been sent; of a checkpoint the old one stays."""

    def room():
        (ledger,) = (tmp_path / "server").rglob("ledger-*.jsonl")
        return ledger.stat().st_size + more

    elsewhere = dict.fromkeys(range(CLIENTS), lambda kind: no_room(resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=r"File too large|no space left") as full:
        serve(coin, tmp_path, lambda: full_at(name, 1, room), dying=elsewhere)
    assert Path(full.value.filename).match(file)
    found = serve(coin, tmp_path)
    assert found["rounds"] == [0, 1, 2] and found["received"] == [CLIENTS] * 3
    assert found["charges"] == [3 + again] * CLIENTS
    check_streams(tmp_path, found["charges"])


@pytest.mark.parametrize("phase", ["charged", "answered", "stepped", "saving"])
def test_a_target_is_not_exceeded_by_a_server_that_is_killed_and_goes_on(phase, tmp_path):
    """Three rounds are paid for. One is charged twice, so the last is not begun."""

    def targeted():
        return coin(privacy=fedq.PrivacyTarget(1000.0, 1e-3, "server"))

    assert serve(targeted, tmp_path, PHASES[phase]) is None
    found = serve(targeted, tmp_path)
    assert found is not None
    assert found["charges"] == [ROUNDS] * CLIENTS and found["rounds"] == [0, 1]
    check_streams(tmp_path, found["charges"])


KEPT = {
    "a local layer": (module, {"personal_parameters": ["backbone.3.*"]}),
    "local buffers": (Scaled, {"buffers": "local"}),
    "FedDyn": (module, {"algorithm": fedq.FedDyn(0.1)}),
    "SCAFFOLD": (lambda: ByCourse("plain"), {"algorithm": fedq.SCAFFOLD(), **STEPS}),
}
"""What clients keep from round to round."""


@pytest.mark.parametrize("phase", ["charged", "asked", "answered", "stepped", "saving"])
@pytest.mark.parametrize("name", KEPT)
def test_what_clients_keep_outlives_a_killed_server(name, phase, tmp_path):
    """A round that is repeated begins with what the last counted one has left, on every client."""
    build, settings = KEPT[name]
    make = lambda: coin(seed=5, **settings)  # noqa: E731
    assert serve(make, tmp_path, PHASES[phase], build=build) is None
    found = serve(make, tmp_path, build=build)
    assert found is not None
    assert torch.equal(found["weights"], simulate(make(), ROUNDS, module=build()).engine.weights)
    assert found["charges"] == [3] * CLIENTS


@pytest.mark.parametrize("point", ["training", "kept", "encoded"])
@pytest.mark.parametrize("name", KEPT)
def test_what_clients_keep_outlives_a_killed_client(name, point, tmp_path):
    """Killed in round 2, it goes on with what it had after round 1, as one whose answer was lost."""
    build, settings = KEPT[name]
    make = lambda: coin(seed=5, **settings)  # noqa: E731
    found = serve(make, tmp_path / "killed", dying={2: dies_when(point)}, build=build)
    grid = LoopGrid(*clients(make, tmp_path / "lost", module=build))
    grid.tamper = lambda kind, client, reply: (
        None if (kind, client, grid.log.count((kind, client))) == ("train", 2, 2) else reply
    )
    _, server = deployment(make(), ROUNDS, tmp_path / "lost", module=build).run(grid)
    assert found is not None
    assert found["received"] == [4, 3, 4] == [record.num_received for record in server.records]
    assert torch.equal(found["weights"], server.engine.weights)


def dies_when(point):
    """What is done in a client's process so that it dies there."""

    def arm(kind):
        if point == "training" and kind == "train":
            before(RemoteClient, "_train_update", lambda client: True)
        if point == "stream used" and kind == "train":
            after(StreamLog, "use", lambda log: True)
        if point == "kept" and kind == "train":
            after(PersistentState, "keep", lambda states: True)
        if point == "encoded" and kind == "train":
            after(RemoteClient, "train", lambda client: True)
        if point in ("shares", "masked", "confirm", "unmask") and kind == point:
            after(MaskedRounds, kind, lambda rounds: True)

    return arm


@pytest.mark.parametrize("point, used", [("training", False), ("stream used", True), ("encoded", True)])
def test_a_client_that_is_killed_is_missed_for_one_round(point, used, tmp_path):
    found = serve(coin, tmp_path, dying={2: dies_when(point)})
    assert found is not None
    assert found["received"] == [4, 3, 4]
    assert found["charges"] == [3] * CLIENTS  # what may have been sent is paid for
    assert streams_of(tmp_path, 2) == [(0, 0), *([(1, 0)] if used else []), (2, 0)]
    check_streams(tmp_path, found["charges"])


def behind_masks():
    return coin(secure_aggregation=fedq.SecAgg())


@pytest.mark.parametrize(
    "active, point",
    [
        *((False, point) for point in ("training", "encoded", "shares", "masked", "unmask")),
        *((True, point) for point in ("shares", "masked", "confirm", "unmask")),
    ],
)
def test_behind_secure_aggregation_a_killed_client_is_missed(active, point, tmp_path):
    """One of four may drop out at any exchange; at last its message is in the sum."""
    make = lambda: coin(secure_aggregation=fedq.SecAgg(active=active))  # noqa: E731
    found = serve(make, tmp_path, dying={2: dies_when(point)}, signed=active)
    assert found is not None
    assert found["received"] == [4, 4 if point in ("confirm", "unmask") else 3, 4]
    assert found["aborted"] == [False] * 3
    assert found["charges"] == [3] * CLIENTS
    check_streams(tmp_path, found["charges"])
    assert not list((tmp_path / "client-2").glob("symbols.*"))  # nothing of a round is left over


def test_behind_secure_aggregation_too_many_killed_give_the_round_up(tmp_path):
    dying = {1: dies_when("shares"), 2: dies_when("shares")}
    one = serve(behind_masks, tmp_path, rounds=1)
    two = serve(behind_masks, tmp_path, dying=dying, rounds=2)
    assert one is not None and two is not None
    assert two["aborted"] == [False, True] and torch.equal(one["weights"], two["weights"])
    found = serve(behind_masks, tmp_path)
    assert found is not None
    assert found["aborted"] == [False, True, False] and found["received"][2] == 4
    assert found["charges"] == [3] * CLIENTS
    check_streams(tmp_path, found["charges"])


@pytest.mark.parametrize("stage", ["shares", "masked", "confirm", "unmask"])
def test_behind_secure_aggregation_a_killed_server_begins_a_new_attempt(stage, tmp_path):
    active = stage == "confirm"
    make = lambda: coin(secure_aggregation=fedq.SecAgg(active=active))  # noqa: E731

    def dies():
        whole = ForkGrid.push_messages

        def push(self, messages):
            messages = list(messages)
            found = whole(self, messages)
            meta = messages[0].metadata
            if meta.group_id == "round 2" and meta.message_type == f"query.{stage}":
                die()
            return found

        ForkGrid.push_messages = push

    assert serve(make, tmp_path, dies, signed=active) is None
    found = serve(make, tmp_path, signed=active)
    assert found is not None
    assert found["received"] == [4, 4, 4] and found["aborted"] == [False] * 3
    assert found["charges"] == [4] * CLIENTS
    check_streams(tmp_path, found["charges"])
    assert [streams_of(tmp_path, client) for client in range(CLIENTS)] == [
        [(0, 0), (1, 0), (1, 1), (2, 0)]
    ] * CLIENTS


def test_a_server_that_is_set_back_is_refused_by_the_clients(tmp_path):
    """Its folder is put back to what it was after round 1: it would use the streams of round 2 again."""
    one = serve(coin, tmp_path, rounds=1)
    shutil.copytree(tmp_path / "server", tmp_path / "copy")
    assert serve(coin, tmp_path, rounds=2) is not None
    shutil.rmtree(tmp_path / "server")
    shutil.copytree(tmp_path / "copy", tmp_path / "server")
    back = serve(coin, tmp_path, rounds=2)
    assert one is not None and back is not None
    assert back["received"] == [4, 0] and torch.equal(back["weights"], one["weights"])
    check_streams(tmp_path, back["charges"])
