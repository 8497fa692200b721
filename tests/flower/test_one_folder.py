"""One folder of a party: one process at a time, one release, and only states that it owns."""

import json
import threading
import warnings

import pytest

import lightning_fedq as fedq
from lightning_fedq.flower.remote_client import ClientConfig, RemoteClient
from lightning_fedq.flower.settings import PROTOCOL, RefusedError
from lightning_fedq.flower.store import Store
from tests.flower.loop import TRAINER, LoopGrid, OwnDigits, clients, deployment, federated, module

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def client(folder, **settings):
    settings = federated(fedq.FedAvg(), **settings)
    return RemoteClient(ClientConfig(settings, Store(folder), 0), module, lambda: OwnDigits(0), TRAINER)


def test_a_second_process_waits_and_is_then_refused(tmp_path):
    asked = client(tmp_path)
    with (
        Store(tmp_path).lock_message(),
        pytest.raises(RefusedError, match="Another process answers a message in"),
    ):
        asked.answer("ready", {})
    assert asked.answer("ready", {}) == {}
    assert client(tmp_path / "own").answer("ready", {}) == {}


def test_two_processes_never_share_a_draft(tmp_path):
    """400 tables by four threads, each of them whole. With one name for drafts some were not found."""
    errors = []

    def write(number):
        try:
            for turn in range(100):
                Store(tmp_path).put("keys", {"number": number, "turn": turn, "more": bytes(4000)})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and Store(tmp_path).get("keys")["turn"] == 99
    assert not list(tmp_path.glob("*.new"))


def newer(path):
    """The same folder, as a release with a newer protocol writes it."""
    values = json.loads(path.read_text())
    assert values["protocol"] == PROTOCOL
    path.write_text(json.dumps({**values, "protocol": str(int(PROTOCOL) + 1), "lightning_fedq": "7.1.0"}))


def test_an_older_release_names_the_newer_one(tmp_path):
    settings = lambda: federated(fedq.LDPQ(1.0), seed=None)  # noqa: E731
    run = lambda: deployment(settings(), 1, tmp_path).run(LoopGrid(*clients(settings, tmp_path)))  # noqa: E731
    run()
    words = r"was written by lightning_fedq 7\.1\.0 \(protocol 10\).* Install that release"
    newer(tmp_path / "client-0" / "keys.json")
    with pytest.raises(RefusedError, match=words):
        client(tmp_path / "client-0", seed=None).answer("ready", {})
    newer(tmp_path / "server" / "settings.json")
    with pytest.raises(ValueError, match=words):
        run()


def test_a_restarted_server_has_no_states_of_clients(tmp_path):
    """Clients keep their BatchNorm statistics themselves, so nothing begins again with the initial ones."""
    settings = lambda: federated(fedq.LDPQ(1.0), seed=None, personal_parameters=["*bias"])  # noqa: E731
    for rounds in (1, 2):
        grid = LoopGrid(*clients(settings, tmp_path))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            server = deployment(settings(), rounds, tmp_path).run(grid)[1]
        assert not [one for one in said if "every client starts" in str(one.message)]
    assert [record.num_received for record in server.records] == [4, 4]
