"""`evaluate_clients` with real clients: what a simulation measures and releases, and nothing beside it."""

import json

import pytest
import torch
from flwr.app import Message

from lightning_fedq import ClientEvaluation
from lightning_fedq.flower.records import to_record
from lightning_fedq.flower.remote_client import ClientConfig, RemoteClient
from lightning_fedq.flower.store import Store
from lightning_fedq.mechanisms import CorBin, FedAvg, GaussianNoise
from lightning_fedq.secagg import SecAgg
from tests.flower.loop import CLIENTS, LoopGrid, clients, deploy, deployment, federated, module, simulate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
COIN = FedAvg()
NOISY = GaussianNoise(clip_norm=1.0, noise_multiplier=1.0)


def settings(mechanism=COIN, **options):
    measured = ClientEvaluation(0.25)
    return federated(mechanism, **{"evaluate_clients": measured, **options})


def own_lines(folder, client):
    return [
        json.loads(line) for line in (folder / f"client-{client}" / "measured.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(
    "choice, options",
    [
        ("local", {"personal_parameters": ["backbone.3.*"], "cohort": 2}),
        ("shared", {"weighting": "samples", "broadcast_bits": 6}),
        ("local", {"mechanism": CorBin(4.0, 5), "secure_aggregation": SecAgg()}),
    ],
    ids=["every client's own model, some train", "a mean by samples, few bits down", "behind masks"],
)
def test_real_clients_measure_what_simulated_ones_do(choice, options, tmp_path):
    make = lambda: settings(client_metrics=choice, **options)  # noqa: E731
    expected, found = simulate(make(), 2), deploy(make, 2, tmp_path)
    assert torch.equal(found.engine.weights, expected.engine.weights)
    plain = [one.plain() for one in expected.client_evaluations]
    if choice == "shared":
        assert [one.plain() for one in found.client_evaluations] == plain
        return
    assert [one.values for one in found.client_evaluations] == [{}, {}]
    for client in range(CLIENTS):
        for line, one in zip(own_lines(tmp_path, client), plain, strict=True):
            own = {
                f"{'clients' if model == 'global' else model}/{name}": value
                for model in ("global", "personal")
                for name, value in line.get(model, {}).items()
            }
            assert own == {name: values[client] for name, values in one["by_client"].items()}
    assert (tmp_path / "client-0" / "measured.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_lost_answer_leaves_the_others(tmp_path):
    lost = lambda kind, client, reply: None if (kind, client) == ("evaluate", 2) else reply  # noqa: E731
    make = lambda: settings(client_metrics="shared")  # noqa: E731
    found, whole = deploy(make, 1, tmp_path / "exact", lost), simulate(make(), 1)
    (one,), (all,) = found.client_evaluations, whole.client_evaluations
    assert one.clients == (0, 1, 3) and one.plain()["clients"] == [0, 1, 3]
    assert torch.equal(one.values["global"]["val_acc"], all.values["global"]["val_acc"][[0, 1, 3]])


@pytest.mark.parametrize("words", ['{"global": {"other": 1.0}}', "{"])
def test_one_client_that_says_nonsense_is_left_out(words, tmp_path):
    def lies(kind, client, reply):
        if (kind, client) != ("evaluate", 0):
            return reply
        return Message(to_record({"measured": words}), reply_to=_asked(reply))

    def _asked(reply):
        return asked[reply.metadata.reply_to_message_id]

    asked = {}
    make = lambda: settings(client_metrics="shared")  # noqa: E731
    grid = LoopGrid(*clients(make, tmp_path), tamper=lies)
    whole = grid.push_messages
    grid.push_messages = lambda messages: whole(
        [asked.setdefault(f"message {grid.sent + i + 1}", one) for i, one in enumerate(messages)]
    )
    _, server = deployment(make(), 1, tmp_path).run(grid)
    assert server.client_evaluations[0].clients == (1, 2, 3)


class Fails(RemoteClient):
    """A client whose measurement fails, which follows from its data."""

    def _run_local_round(self, *args):
        raise ZeroDivisionError("sample 7 is bad")


def client_of(federated_, folder, kind=RemoteClient):
    from tests.flower.loop import OwnDigits

    return kind(
        ClientConfig(federated_, Store(folder), 0), module, lambda: OwnDigits(0), {"accelerator": "cpu"}
    )


def question(server, **more):
    weights = server.engine.weights
    return {"client": 0, "round": 0, "weights": weights.numpy().tobytes(), "dtype": "float32", **more}


def test_that_a_measurement_fails_tells_the_server_nothing(tmp_path):
    server = simulate(settings(), 1)
    found = client_of(settings(client_metrics="local"), tmp_path / "a", Fails).reply(
        "evaluate", question(server)
    )
    assert found == {}
    shared = client_of(settings(client_metrics="shared"), tmp_path / "b", Fails)
    assert "The client's log" in shared.reply("evaluate", question(server))["refused"]
    assert "sample 7" not in json.dumps(shared.reply("evaluate", question(server)))


def test_what_cannot_be_is_refused_before_anybody_is_charged(tmp_path):
    lists = ClientEvaluation([[]] * CLIENTS)
    with pytest.raises(ValueError, match="must be a fraction"):
        clients(lambda: settings(evaluate_clients=lists), tmp_path)
    nothing = client_of(federated(COIN), tmp_path / "none")
    assert (
        "Set evaluate_clients on both sides"
        in nothing.reply("evaluate", question(simulate(settings(), 1)))["refused"]
    )
    most = lambda: settings(evaluate_clients=ClientEvaluation(0.999))  # noqa: E731
    with pytest.raises(
        RuntimeError, match=r"evaluate_clients can't work here\. The client's log has the reason"
    ):
        deploy(most, 2, tmp_path)
