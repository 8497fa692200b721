"""A Flower app of somebody's own, with a mod on its clients and a wrapper around its strategy."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg

import lightning_fedq as fedq
from lightning_fedq.flower import DecodingStrategy, client_app, encoding_mod
from lightning_fedq.keys.party_keys import Identities
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import FedAvg as Plain
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.rounds import RoundPlanner, RoundTask
from tests.callbacks.silent import Silent
from tests.flower.loop import CLIENTS, TRAINER, LoopGrid, OwnDigits, module

pytestmark = pytest.mark.filterwarnings(
    "ignore:only the encoded update leaves:UserWarning",
    "ignore:clients evaluate nothing:UserWarning",
    "ignore:node |round .* client|train. the training has failed|round .*the label:UserWarning",
)
COIN = fedq.CorBin(epsilon=4.0, shared_bits=5)
SHAPES = {"layer.weight": (3, 4), "layer.bias": (5,)}
ROUNDS = 2


def start():
    generator = np.random.default_rng(0)
    arrays = {name: Array(generator.normal(size=shape).astype("f4")) for name, shape in SHAPES.items()}
    return ArrayRecord({**arrays, "counter": Array(np.array(7))})


def local_change(client, vector):
    """What stands for a training: every client pulls elsewhere."""
    goal = np.sin(np.arange(vector.size) * (client + 1)).astype("f4")
    return (0.3 * (goal - vector)).astype("f4")


def train(message, context):
    """An ordinary train function: arrays in, arrays and metrics out."""
    record = message.content["arrays"]
    assert set(message.content) == {"arrays", "config"}  # a mod's own fields are gone
    found = {name: array.numpy() for name, array in record.items()}
    vector = np.concatenate([found[name].ravel() for name in SHAPES])
    vector = vector + local_change(int(context.node_config["partition-id"]), vector)
    cut = SHAPES["layer.weight"][0] * SHAPES["layer.weight"][1]
    arrays = {
        "layer.weight": Array(vector[:cut].reshape(3, 4)),
        "layer.bias": Array(vector[cut:]),
        "counter": Array(np.asarray(found["counter"] + 1)),
    }
    metrics = MetricRecord({"train_loss": 0.25, "num-examples": 11})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


def app_of(federated, function=train, **options):
    app = ClientApp(mods=[] if federated is None else [encoding_mod(federated, **options)])
    app.train()(function)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"eval_loss": 0.5, "num-examples": 3})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def federation(mechanism, **options):
    return fedq.Federated(mechanism, CLIENTS, **{"seed": 5, **options})


def grid_of(make, folder, **options):
    apps = [app_of(None if make is None else make()) for _ in range(CLIENTS)]
    return LoopGrid(apps, [folder / f"client-{client}" for client in range(CLIENTS)], **options)


def run(strategy, grid, rounds=ROUNDS):
    return strategy.start(grid, start(), num_rounds=rounds).arrays


def flat(record):
    return torch.from_numpy(np.concatenate([record[name].numpy().ravel() for name in SHAPES]))


@pytest.mark.parametrize(
    "mechanism, options",
    [
        (COIN, {}),
        (fedq.LDPQ(epsilon=4.0), {"clients_per_round": 3}),
        (fedq.AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05), {}),
        (COIN, {"secure_aggregation": fedq.SecAgg()}),
    ],
)
def test_a_strategy_is_given_the_mean_that_a_simulation_decodes(mechanism, options, tmp_path):
    make = lambda: federation(mechanism, **options)  # noqa: E731
    strategy = DecodingStrategy(FedAvg(), make(), home=tmp_path / "server", wait=2.0)
    found = run(strategy, grid_of(make, tmp_path))
    planner = RoundPlanner(CLIENTS, 5, options.get("clients_per_round"))
    engine = fedq.RoundEngine(mechanism, planner, SeededKeys(5), flat(start()), (12, 5), fedq.AdaptiveRange())
    for _ in range(ROUNDS):
        for client in engine.start().survivors:
            change = local_change(client, engine.weights.numpy())
            engine.receive([client], torch.from_numpy(engine.weights.numpy() + change)[None] - engine.weights)
        engine.finish()
    assert torch.equal(flat(found), engine.weights)
    assert int(found["counter"].numpy()) == 7  # no coordinate, so the server's own
    assert strategy.ledger.charges.tolist() == engine.ledger.charges.tolist()
    assert strategy.records[0].num_received == planner.cohort_size
    assert not strategy.privacy_report(1e-3).secure_keys


@pytest.mark.parametrize("kind", [FedAvg, FedAdam])
def test_without_noise_it_is_the_strategy_itself(kind, tmp_path):
    """With equal weights and plain float messages the wrapper changes nothing but last bits."""
    make = lambda: federation(Plain())  # noqa: E731
    plain = run(kind(fraction_evaluate=0.0), grid_of(None, tmp_path))
    found = run(
        DecodingStrategy(kind(fraction_evaluate=0.0), make(), home=tmp_path / "s"), grid_of(make, tmp_path)
    )
    assert torch.allclose(flat(found), flat(plain).float(), rtol=0.0, atol=1e-6)
    assert not torch.allclose(flat(found), flat(start()), rtol=0.0, atol=1e-2)


def test_with_keys_of_their_own_and_a_server_that_begins_again(tmp_path):
    """The second server uses rounds that nobody has answered; every charge of the first one counts."""
    make = lambda: federation(COIN, seed=None, secure_aggregation=fedq.SecAgg())  # noqa: E731
    grid = grid_of(make, tmp_path)
    run(DecodingStrategy(FedAvg(), make(), home=tmp_path / "server"), grid)
    again = DecodingStrategy(FedAvg(), make(), home=tmp_path / "server")
    run(again, grid, rounds=1)
    assert again.ledger.charges.tolist() == [3] * CLIENTS
    assert [record.num_received for record in again.records] == [CLIENTS]
    for client in range(CLIENTS):
        lines = (tmp_path / f"client-{client}" / "streams.jsonl").read_text().splitlines()[1:]
        assert [json.loads(line)["round"] for line in lines] == [0, 1, 2]
    report = again.privacy_report(1e-3)
    assert report.rounds == 3


@pytest.mark.filterwarnings("ignore:train|round .*BudgetSpentError:UserWarning")
def test_against_a_lying_server_and_with_a_budget_of_its_own(tmp_path):
    """Signed survivors through the mod; client 2 pays for one message of two, as its own accountant says."""
    mechanism, rounds = fedq.LDPQ(epsilon=0.5), 2
    make = lambda: federation(mechanism, seed=None, secure_aggregation=fedq.SecAgg(active=True))  # noqa: E731
    own = [Ed25519PrivateKey.generate() for _ in range(CLIENTS)]
    directory = {client: identity.public_key() for client, identity in enumerate(own)}
    one = torch.ones(1, dtype=torch.float64)
    groups = tuple((client,) for client in range(CLIENTS))
    context = RoundTask(0, 0, groups, (17,), 0.0 * one, one).context()
    (claim,) = (c for c in mechanism.claims(context) if c.adversary is Adversary.SERVER)
    paid = spent(claim.loss, 1e-5, compositions=claim.compositions).epsilon * 1.0001

    def budget(context):
        return fedq.PrivacyTarget(paid if context.node_config["partition-id"] == 2 else 10 * paid, 1e-5)

    def identities(context):
        return Identities(own[int(context.node_config["partition-id"])], directory)

    apps = [app_of(make(), identities=identities, budget=budget) for _ in range(CLIENTS)]
    grid = LoopGrid(apps, [tmp_path / f"client-{client}" for client in range(CLIENTS)])
    strategy = DecodingStrategy(FedAvg(), make(), home=tmp_path / "server", directory=directory)
    with pytest.warns(UserWarning, match="node 102 refuses: train: declined"):
        run(strategy, grid, rounds)
    assert [record.num_received for record in strategy.records] == [CLIENTS, CLIENTS - 1]
    assert [record.aborted for record in strategy.records] == ["", ""]
    assert grid.log.count(("confirm", 0)) == rounds
    with pytest.raises(ValueError, match=r"give DecodingStrategy\(directory=...\)"):
        DecodingStrategy(FedAvg(), make(), home=tmp_path / "other")


def test_a_silent_client_is_left_out(tmp_path):
    make = lambda: federation(fedq.LDPQ(epsilon=4.0))  # noqa: E731
    silent = lambda kind, client, reply: None if (kind, client) == ("train", 2) else reply  # noqa: E731
    strategy = DecodingStrategy(FedAvg(), make(), home=tmp_path / "server")
    run(strategy, grid_of(make, tmp_path, tamper=silent), rounds=1)
    assert [record.num_received for record in strategy.records] == [CLIENTS - 1]
    assert strategy.ledger.charges.tolist() == [1] * CLIENTS


def test_a_round_with_nobody_leaves_the_model(tmp_path):
    make = lambda: federation(COIN)  # noqa: E731
    silent = lambda kind, client, reply: None if kind == "train" else reply  # noqa: E731
    strategy = DecodingStrategy(FedAvg(), make(), home=tmp_path / "server")
    result = strategy.start(grid_of(make, tmp_path, tamper=silent), start(), num_rounds=1)
    assert not result.arrays or torch.equal(flat(result.arrays), flat(start()))
    assert strategy.records[0].num_received == 0


# ---- nothing goes round the mechanism -------------------------------------------------------------------


class Wire(LoopGrid):
    """Keeps what every client sends, byte for byte."""

    def __init__(self, *args: Any) -> None:
        self.replies = []
        super().__init__(*args, tamper=self._keep)

    def _keep(self, kind, client, reply):
        said = str(reply.error) if reply.has_error() else ""
        data = b"" if reply.has_error() else b"".join(_bytes_of(reply.content))
        self.replies.append((kind, client, said.encode() + data))
        return reply


def _bytes_of(record):
    found = [repr(sorted(record)).encode()]
    for part in record.array_records.values():
        found += [name.encode() + array.data for name, array in part.items()]
    for part in [*record.config_records.values(), *record.metric_records.values()]:
        found += [repr(sorted(part.items())).encode()]
    return found


def talkative(secret):
    """A train function that tells what it knows wherever it can."""

    def function(message, context):
        if secret and message.metadata.group_id == "round 2":
            raise ValueError(f"the label of sample 3 is {secret}")
        reply = train(message, context)
        reply.content["metrics"]["train_loss"] = float(secret)
        reply.content["metrics"]["num-examples"] = 10 + secret
        reply.content["notes"] = ConfigRecord({"secret": secret, "text": f"{secret}"})
        arrays = dict(reply.content["arrays"])
        arrays["layer.bias"] = Array(np.full(5, secret, "f4"))
        arrays["counter"] = Array(np.array(secret))
        reply.content["arrays"] = ArrayRecord(arrays)
        context.state["kept"] = ConfigRecord({"secret": secret})
        return reply

    return function


def test_nothing_of_the_data_goes_round_the_mechanism(tmp_path):
    """Behind a mechanism that sends zeros, clients on different data send the same bytes."""

    def sent(secret):
        make = lambda: federation(Silent())  # noqa: E731
        folder = tmp_path / f"secret-{secret}"
        apps = [app_of(make(), talkative(secret)) for _ in range(CLIENTS)]
        wire = Wire(apps, [folder / f"client-{client}" for client in range(CLIENTS)])
        run(DecodingStrategy(FedAvg(), make(), home=folder / "server"), wire, rounds=1)
        evaluate = Message(RecordDict(), dst_node_id=101, message_type="evaluate")
        query = Message(RecordDict(), dst_node_id=101, message_type="train")
        wire.push_messages([evaluate, query])
        return wire.replies

    first, second = sent(1), sent(2)
    assert first == second
    assert sum(kind == "train" and b"answer" in data for kind, _, data in first) == CLIENTS  # they did train
    assert [kind for kind, _, _ in first].count("train") == CLIENTS + 1
    assert b"the reply would go round the mechanism" in first[-1][2]


def test_an_exception_of_the_training_stays_with_the_client(tmp_path):
    """A message of an error quotes data; the server learns that the training has failed."""
    make = lambda: federation(fedq.LDPQ(epsilon=4.0))  # noqa: E731
    apps = [app_of(make(), talkative(8)) for _ in range(CLIENTS)]
    wire = Wire(apps, [tmp_path / f"client-{client}" for client in range(CLIENTS)])
    with pytest.warns(UserWarning, match="the label of sample 3 is 8"):  # in the client's own log
        run(DecodingStrategy(FedAvg(), make(), home=tmp_path / "server"), wire)
    assert not any(b"label of sample" in data for _, _, data in wire.replies)
    assert any(b"the training has failed" in data for _, _, data in wire.replies)


class Failing(OwnDigits):
    """Reads a damaged file."""

    def train_dataloader(self):
        raise ValueError("the label of sample 3 is 8")


def test_an_exception_of_a_client_app_stays_with_the_client(tmp_path):
    from tests.flower.loop import deployment

    make = lambda: federation(fedq.LDPQ(epsilon=4.0))  # noqa: E731
    own = lambda context: Failing(int(context.node_config["partition-id"]))  # noqa: E731
    apps = [client_app(module, own, make(), trainer=TRAINER) for _ in range(CLIENTS)]
    wire = Wire(apps, [None] * CLIENTS)
    with pytest.warns(UserWarning, match="the label of sample 3 is 8"):
        deployment(make(), 1, tmp_path).run(wire)
    assert not any(b"label of sample" in data for _, _, data in wire.replies)
    assert any(b"the training has failed" in data for _, _, data in wire.replies)


def test_what_is_dropped_is_named(tmp_path):
    make = lambda: federation(COIN)  # noqa: E731
    words = "dropped: metric num-examples, metric train_loss, array counter"
    with pytest.warns(UserWarning, match=words), pytest.warns(UserWarning, match="clients evaluate nothing"):
        run(DecodingStrategy(FedAvg(), make(), home=tmp_path / "s"), grid_of(make, tmp_path), rounds=1)


# ---- refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"local_epochs": 2}, "local_epochs=2 is the business of your own train function"),
        ({"server_lr": 0.5}, "server_lr=0.5 is the business of your own strategy"),
        ({"weighting": "samples"}, "weighting='samples' is the business of your own strategy"),
        ({"dropout_probability": 0.1}, "real clients drop out by themselves"),
        ({"privacy": fedq.PrivacyTarget(30.0, 1e-3)}, "which a mod does not know"),
    ],
)
def test_settings_of_somebody_else(options, words):
    with pytest.raises(ValueError, match=words):
        encoding_mod(federation(COIN, **options))
    with pytest.raises(ValueError, match=words):
        DecodingStrategy(FedAvg(), federation(COIN, **options))


@pytest.mark.parametrize("participation", ["once", "cyclic"])
def test_disjoint_cohorts_need_a_checkpoint(participation):
    with pytest.raises(ValueError, match="would deal other cohorts"):
        DecodingStrategy(
            FedAvg(), federation(COIN, seed=None, clients_per_round=2, participation=participation)
        )


def test_a_client_with_another_mechanism(tmp_path):
    theirs = lambda: federation(fedq.CorBin(epsilon=3.0, shared_bits=5))  # noqa: E731
    strategy = DecodingStrategy(FedAvg(), federation(COIN), home=tmp_path / "server", wait=2.0)
    with pytest.warns(UserWarning, match="mechanism is"), pytest.raises(RuntimeError, match="one refuses: "):
        run(strategy, grid_of(theirs, tmp_path))


def test_arrays_that_cannot_be_encoded(tmp_path):
    make = lambda: federation(COIN)  # noqa: E731
    strategy = DecodingStrategy(FedAvg(), make(), home=tmp_path / "server", wait=2.0)
    with pytest.raises(RuntimeError, match="arrays half are not float32"):
        strategy.start(grid_of(make, tmp_path), ArrayRecord({"half": Array(np.zeros(3, "f2"))}), num_rounds=1)
