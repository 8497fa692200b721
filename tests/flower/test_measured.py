"""`evaluate_clients` with real clients: what a simulation measures and releases, and nothing beside it."""

import json
import math
from dataclasses import replace

import pytest
import torch
from flwr.app import Message

from lightning_fedq import ClientEvaluation, NoisyMean
from lightning_fedq.flower.client_app import DeployedClient
from lightning_fedq.flower.records import from_record, to_record
from lightning_fedq.flower.remote_client import Own
from lightning_fedq.flower.store import Store
from lightning_fedq.keys.party_keys import ServerSecrets, of_releases
from lightning_fedq.mechanisms import CorBin, FedAvg, GaussianNoise
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.spending import run_of
from tests.flower.halves import Halves
from tests.flower.loop import CLIENTS, LoopGrid, clients, deployment, federated, module, simulate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
COIN = FedAvg()
RELEASE = NoisyMean("val_loss", 0.5, 0.0, 4.0)
NOISY = GaussianNoise(clip_norm=1.0, noise_multiplier=1.0)


def settings(mechanism=COIN, release=None, **options):
    measured = ClientEvaluation(0.25, release=release)
    return federated(mechanism, **{"evaluate_clients": measured, **options})


def trained(folder, make, rounds=2, tamper=None, **options):
    grid = LoopGrid(*clients(make, folder, **options), **({} if tamper is None else {"tamper": tamper}))
    trainer, server = deployment(make(), rounds, folder).run(grid)
    server.trainer = trainer
    return server


def own_lines(folder, client):
    return [
        json.loads(line) for line in (folder / f"client-{client}" / "measured.jsonl").read_text().splitlines()
    ]


OPTIONS = {
    "every client's own model, some train": {"local": ["backbone.3.*"], "clients_per_round": 2},
    "a mean by samples, few bits down": {"weighting": "samples", "broadcast_bits": 6},
    "released behind masks": {
        "mechanism": CorBin(4.0, 5),
        "release": RELEASE,
        "secure_aggregation": SecAgg(),
    },
}


@pytest.mark.parametrize(
    "name, choice",
    [
        ("every client's own model, some train", "local"),
        ("a mean by samples, few bits down", "shared"),
        ("released behind masks", "local"),
    ],
)
def test_real_clients_measure_what_simulated_ones_do(name, choice, tmp_path):
    make = lambda: settings(client_metrics=choice, **OPTIONS[name])  # noqa: E731
    expected, found = simulate(make(), 2), trained(tmp_path, make)
    assert torch.equal(found.engine.weights, expected.engine.weights)
    assert [one.released for one in found.client_evaluations] == [
        one.released for one in expected.client_evaluations
    ]
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


def test_secure_clients_release_and_are_charged_as_in_a_simulation(tmp_path):
    make = lambda: settings(NOISY, RELEASE, seed=None)  # noqa: E731
    exact = []

    def look(kind, client, reply):
        exact.extend(name for name in from_record(reply.content) if kind == "evaluate")
        return reply

    found = trained(tmp_path, make, tamper=look)
    beside = found.ledger.beside
    assert beside is not None and beside.charges.tolist() == [2] * CLIENTS
    assert set(exact) == {"answer"}, "one packed message, and no value beside it"
    assert all(one.released.num_clients == CLIENTS and not one.values for one in found.client_evaluations)
    run = run_of(found, found.trainer)
    assert run.releases is not None and run.releases.rounds == 2
    with_them, without = (privacy_report(one, 1e-2).rows for one in (run, replace(run, releases=None)))
    spent = [(one.epsilon, bare.epsilon) for one, bare in zip(with_them, without, strict=True)]
    assert any(math.isfinite(one) for one, _ in spent)
    assert all(one > bare for one, bare in spent if math.isfinite(one)), "and counted for everybody"
    logs = [(tmp_path / f"client-{c}" / "releases.jsonl").read_text().count("\n") for c in range(CLIENTS)]
    assert logs == [3] * CLIENTS  # a head, and two streams


def test_the_noise_of_a_release_is_the_clients(tmp_path):
    """Two servers of the same clients' data get two means; no noise would give one."""
    means = set()
    for run in range(2):
        make = lambda: settings(COIN, RELEASE, seed=None, client_metrics="local")  # noqa: E731
        means.add(trained(tmp_path / str(run), make, rounds=1).client_evaluations[0].released.mean)
    assert len(means) == 2


def test_no_key_of_a_release_is_one_of_a_round(tmp_path):
    played = Halves(settings(NOISY, RELEASE, seed=None), tmp_path)
    client = played.client(1)
    _, questions = played.questions()
    of_round = client._keys(questions[1])
    server = played.roster.keys(releases=of_round)
    told = {**questions[1], **played.roster.introduction(server, 1, ())}
    client._releasing = True
    of_release = client._keys(told)
    for name in ("public", "members"):
        assert getattr(of_round, name)() != getattr(of_release, name)()
        assert getattr(server, name)() == getattr(of_release, name)()
    assert of_round.client(1) != of_release.client(1) == server.client(1)
    assert of_round.private(1) != of_release.private(1)
    secrets = ServerSecrets.draw()
    assert secrets.of_releases().federation == of_releases(secrets.federation)


def test_a_lost_answer_leaves_the_others(tmp_path):
    """Of exact values one is missing; a release needs the noise of all, or of as many as it was told."""
    lost = lambda kind, client, reply: None if (kind, client) == ("evaluate", 2) else reply  # noqa: E731
    make = lambda: settings(client_metrics="shared")  # noqa: E731
    found, whole = trained(tmp_path / "exact", make, 1, lost), simulate(make(), 1)
    (one,), (all,) = found.client_evaluations, whole.client_evaluations
    assert one.clients == (0, 1, 3) and one.plain()["clients"] == [0, 1, 3]
    assert torch.equal(one.values["global"]["val_acc"], all.values["global"]["val_acc"][[0, 1, 3]])
    for allowed, answered in ((0, None), (1, 3)):
        release = NoisyMean("val_loss", 0.5, 0.0, 4.0, max_dropped=allowed)
        noisy = lambda: settings(COIN, release)  # noqa: B023, E731
        given = trained(tmp_path / str(allowed), noisy, 1, lost)
        assert given.ledger.beside.charges.tolist() == [1] * CLIENTS, "what may have been sent is paid for"
        (measured,) = given.client_evaluations
        assert (measured.released and measured.released.num_clients) == answered


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


class Fails(DeployedClient):
    """A client whose measurement fails, which follows from its data."""

    def measured(self, number, round, weights):
        raise ZeroDivisionError("sample 7 is bad")


def client_of(federated_, folder, kind=DeployedClient):
    from tests.flower.loop import OwnDigits

    return kind(Own(federated_, Store(folder), 0), module, lambda: OwnDigits(0), {"accelerator": "cpu"})


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
    assert "the client's own log" in shared.reply("evaluate", question(server))["refused"]
    assert "sample 7" not in json.dumps(shared.reply("evaluate", question(server)))
    assert RELEASE.centred(torch.tensor([math.nan])).isnan().all(), "which is encoded as the middle"


def test_a_release_is_of_the_round_that_it_says(tmp_path):
    """And of its stream once: the log refuses a server that asks again."""
    make = lambda: settings(NOISY, RELEASE, seed=None)  # noqa: E731
    kept = []
    apps, homes = clients(make, tmp_path)
    grid = LoopGrid(apps, homes)
    push = grid.push_messages

    def watch(messages):
        messages = list(messages)
        kept.extend(from_record(m.content) for m in messages if m.metadata.message_type == "query.evaluate")
        return push(messages)

    grid.push_messages = watch
    deployment(make(), 1, tmp_path).run(grid)
    fields = next(fields for fields in kept if fields["client"] == 0)
    client = client_of(make(), tmp_path / "client-0")
    assert "answered round 0" in client.reply("evaluate", fields)["refused"]
    for round in (-1, 1):
        assert "is no task of round 0" in client.reply("evaluate", {**fields, "round": round})["refused"]


def test_what_cannot_be_is_refused_before_anybody_is_charged(tmp_path):
    lists = ClientEvaluation([[]] * CLIENTS)
    with pytest.raises(ValueError, match="say which fraction"):
        clients(lambda: settings(evaluate_clients=lists), tmp_path)
    with pytest.raises(ValueError, match="adds noise to it; use client_metrics='local'"):
        clients(lambda: settings(NOISY, RELEASE, seed=None, client_metrics="shared"), tmp_path)
    budget = PrivacyTarget(8.0, 1e-3)
    with pytest.raises(ValueError, match="leave budget= out"):
        clients(lambda: settings(NOISY, RELEASE, seed=None), tmp_path, budget=budget)
    nothing = client_of(federated(COIN), tmp_path / "none")
    assert (
        "give both sides evaluate_clients"
        in nothing.reply("evaluate", question(simulate(settings(), 1)))["refused"]
    )
    most = lambda: settings(evaluate_clients=ClientEvaluation(0.999))  # noqa: E731
    with pytest.raises(RuntimeError, match="evaluate_clients can't work here; the client's own log says why"):
        trained(tmp_path, most)
    unknown = lambda: settings(COIN, NoisyMean("accuracy", 0.5))  # noqa: E731
    with pytest.raises(RuntimeError, match="release names 'accuracy', and validation_step logs val_loss"):
        trained(tmp_path, unknown)
    other = lambda: settings(COIN, NoisyMean("val_loss", 0.4, 0.0, 4.0))  # noqa: E731
    with pytest.raises(RuntimeError, match=r"evaluate_clients is .*std=0\.4.* here and .*std=0\.5.* there"):
        deployment(settings(COIN, RELEASE), 1, tmp_path).run(LoopGrid(*clients(other, tmp_path)))


def test_too_few_for_a_release_are_not_charged(tmp_path):
    make = lambda: settings(COIN, RELEASE, clients_per_round=2)  # noqa: E731
    grid = LoopGrid(*clients(make, tmp_path))
    server = deployment(make(), 1, tmp_path)
    whole = grid.get_node_ids
    grid.get_node_ids = lambda: [node for node in whole() if node != 103 or len(grid.log) < 6]
    _, found = server.run(grid)
    assert found.ledger.beside.rounds == 0 and found.client_evaluations[0].released is None
