"""A deployment in one process: the same model as a simulation, and what happens when things go wrong.

All but one take the time of some forty short trainings each, and are marked slow.
"""

import inspect
from dataclasses import replace

import pytest
import torch

from lightning_fedq import DisjointOnce
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.models import MLP
from lightning_fedq.flower.federated_server import FederatedServer
from lightning_fedq.flower.records import to_record
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundTask
from lightning_fedq.secagg import SecAgg
from tests.flower.halves import identities
from tests.flower.loop import TRAINER, LoopGrid, Net, clients, deploy, deployment, federated, simulate

pytestmark = pytest.mark.filterwarnings(
    "ignore:round .* client|the message of client|node |register|train|unmask. :UserWarning"
)
slow = pytest.mark.slow
COIN = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)


def test_a_seeded_deployment_ends_with_the_weights_of_the_simulation(tmp_path):
    """Every mechanism and setting is in `test_engines`."""
    make = lambda: federated(COIN)  # noqa: E731
    expected, server = simulate(make(), 2), deploy(make, 2, tmp_path)
    assert torch.equal(server.engine.weights, expected.engine.weights)
    assert server.engine.ledger.charges.tolist() == expected.engine.ledger.charges.tolist()
    assert [r.uplink_bits for r in server.records] == [r.uplink_bits for r in expected.records]
    assert [r.num_received for r in server.records] == [r.cohort_size for r in server.records]
    assert {"val_acc", "fed/uplink_bits"} <= set(server.trainer.callback_metrics)


def of_context(own):
    """What gives each client its identity."""
    return lambda context: own[int(context.node_config["partition-id"])]


def active(**options):
    return federated(COIN, secure_aggregation=SecAgg(active=True), **options)


@slow
def test_against_a_lying_server_a_seeded_deployment_ends_with_the_weights_of_the_simulation(tmp_path):
    expected, own = simulate(active(), 2), identities()
    grid = LoopGrid(*clients(active, tmp_path, identities=of_context(own)))
    _, server = deployment(active(), 2, tmp_path, directory=own[0].directory).run(grid)
    assert torch.equal(server.engine.weights, expected.engine.weights)
    assert [r.uplink_bits for r in server.records] == [r.uplink_bits for r in expected.records]
    assert [r.downlink_bits for r in server.records] == [r.downlink_bits for r in expected.records]
    assert [r.num_received for r in server.records] == [4, 4]
    assert [kind for kind, client in grid.log if client == 2][-5:] == [
        "train", "shares", "masked", "confirm", "unmask"
    ]  # fmt: skip


TARGET = PrivacyTarget(epsilon=30.0, delta=1e-3, adversary="server")


def with_target(**options):
    return federated(CorBin(epsilon_per_coordinate=1.0, shared_bits=5), privacy=TARGET, **options)


@pytest.mark.filterwarnings("ignore:the keys come from a seed:UserWarning")
def test_both_sides_set_the_mechanism_to_a_privacy_target(tmp_path):
    """Each from its own code, for the module and the rounds that it knows, and they agree."""
    expected = simulate(with_target(), 2)
    grid = LoopGrid(*clients(with_target, tmp_path, trainer={**TRAINER, "max_epochs": 2}))
    _, server = deployment(with_target(), 2, tmp_path).run(grid)
    assert server.mechanism == expected.mechanism != CorBin(epsilon_per_coordinate=1.0, shared_bits=5)
    assert server.calibration.epsilon == expected.calibration.epsilon <= TARGET.epsilon
    assert torch.equal(server.engine.weights, expected.engine.weights)
    assert server.engine.ledger.limits.tolist() == expected.engine.ledger.limits.tolist()
    with (
        pytest.warns(UserWarning, match="mechanism is"),
        pytest.raises(RuntimeError, match="A node refuses: "),
    ):
        deployment(with_target(), 3, tmp_path).run(grid)  # the budget is for two


def test_a_privacy_target_needs_the_rounds_on_the_client_too(tmp_path):
    with pytest.raises(RuntimeError, match="needs the number of rounds, got"):
        deploy(with_target, 2, tmp_path, theirs=TRAINER)


def secure(**options):
    return federated(COIN, seed=None, **options)


@slow
def test_answers_that_are_repeated_or_foreign_are_refused(tmp_path):
    make = lambda: federated(COIN)  # noqa: E731
    first = {}

    def replay(kind, client, reply):
        if kind != "train":
            return reply
        if client == 1:  # sends its first answer again in the second round
            first.setdefault(client, reply.content)
            reply.content = first[client]
        if client == 3:
            reply.content = to_record({"answer": b"junk"})
        return reply

    with pytest.warns(UserWarning, match="client 1 is refused: Client 1: the message is of round 0"):
        server = deploy(make, 2, tmp_path, replay)
    assert [record.num_received for record in server.records] == [3, 2]


# ---- refused before the first round ---------------------------------------------------------------------


def test_a_client_with_another_model_is_refused(tmp_path):
    make = lambda: federated(COIN)  # noqa: E731
    other = lambda: Net(MLP(in_features=64, hidden=[8]), lr=0.1)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"model is 1210 parameters, .* here and 610 parameters"):
        deployment(make(), 1, tmp_path, module=other).run(LoopGrid(*clients(make, tmp_path)))


CARRIED = {"mechanism", "num_clients", "cohort", "local_epochs", "local_steps"}
CARRIED |= {"sends", "ranges", "server_lr", "server_optimizer", "weighting", "aggregator", "buffers"}
CARRIED |= {"deadline", "algorithm", "secure_aggregation", "seed", "ledger", "labels", "privacy"}
CARRIED |= {"personal_parameters", "extra_buffers"}
CARRIED |= {"constraints", "broadcast_bits", "evaluate_clients", "client_metrics", "statistics"}
REFUSED = {"dropout_probability"}
OF_SIMULATIONS = {"partition", "clients_per_step", "diagnostics", "check_isolation"}


def test_every_setting_of_a_simulation_has_its_place():
    """A setting that is added to `Federated` is carried over here, or refused: never dropped in silence."""
    known = set(inspect.signature(Federated.__init__).parameters) - {"self"}
    assert known == CARRIED | REFUSED | OF_SIMULATIONS


def test_settings_reach_the_server(tmp_path):
    spent = Ledger(4, repr(COIN))
    spent.charge([0, 1, 2, 3], 0)
    fed = federated(COIN, cohort=DisjointOnce(2), ledger=spent, server_lr=0.5, buffers="frozen")
    server = FederatedServer(fed, None, None)
    assert server.server == replace(fed.server, diagnostics=False)
    for name in ("buffers", "local_epochs", "local_steps"):
        assert getattr(server.local, name) == getattr(fed.local, name)
    assert server.ledger is fed.ledger and server.seed == fed.seed and not server.owns_ledger
    assert server.planner == replace(fed.planner, real_clients=True)


# ---- identities that the server does not control ---------------------------------------------------------


def test_keys_that_identities_have_signed(tmp_path):
    apps = clients(secure, tmp_path, identities=of_context(identities()))
    _, server = deployment(secure(), 1, tmp_path).run(LoopGrid(*apps))
    assert [record.num_received for record in server.records] == [4]
    names = {path.name for path in (tmp_path / "server").iterdir()}
    assert "signatures.json" in names
    own_keys = tmp_path / "client-1" / "keys.json"
    assert {path.name for path in own_keys.parent.iterdir()} == {"keys.json", "streams.jsonl"}
    assert own_keys.stat().st_mode & 0o077 == 0


def test_another_cohort_than_the_settings_say_is_refused(tmp_path, monkeypatch):
    """Noise and masks count on the cohort, so a client does not take its size from the server."""
    make = lambda: federated(COIN)  # noqa: E731
    whole = RoundTask.to_bytes
    smaller = lambda task: whole(replace(task, groups=task.groups[:1]))  # noqa: E731
    monkeypatch.setattr(RoundTask, "to_bytes", smaller)
    with pytest.warns(UserWarning, match=r"asks 2 clients in groups of .*\. Expected 4 of 4"):
        server = deploy(make, 1, tmp_path)
    assert [record.num_received for record in server.records] == [0]
