"""Cures that deployments over Flower name, as far as one process shows them."""

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from lightning_fedq import FixedSize
from lightning_fedq.algorithms import SCAFFOLD, FedProx
from lightning_fedq.callbacks import DPSGD, Federated, Langevin
from lightning_fedq.commands.flower import _address, _secret
from lightning_fedq.flower.runtime import FlowerChangedError, check_flower
from lightning_fedq.flower.settings import (
    check_client_callbacks,
    check_deployable,
    check_identities,
    deployed_mechanism,
    make_client_budget,
    server_rounds,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.mechanisms import LDPQ, CorBin
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from tests.cures.rows import fed, row
from tests.digits_run import Classifier

TARGET = PrivacyTarget(8.0, delta=1e-5, adversary="server")


def private(mechanism=None, **settings):
    return Federated(mechanism or LDPQ(1.0), 4, **settings)


def secret(mode):
    """A secret of a site in the folder of the test."""
    path = Path("secret")
    path.write_bytes(b"s" * 32)
    path.chmod(mode)
    return path


def two_servers(one, other):
    with Store(Path(one)).lock(), Store(Path(other)).lock():
        pass


row("Another server works in", lambda: two_servers("home", "home"), lambda: two_servers("home", "other"))
row("--supernode must be", lambda: _address("9094", False), lambda: _address("127.0.0.1:9094", False))
row(
    "is another machine and needs TLS. Give",
    lambda: _address("10.0.0.3:9094", False),
    lambda: _address("10.0.0.3:9094", True),
)
row(
    "All users of this machine can access {}. Run",
    lambda: _secret(secret(0o644)),
    lambda: _secret(secret(0o640)),
)
row(
    "is installed{}, which this client does not support. Install a supported version: pip install",
    lambda: check_flower("1.43.0"),
    lambda: check_flower("1.42.0"),
    error=FlowerChangedError,
)
row(
    "A privacy target over the run needs the number of rounds, got {}. Give",
    lambda: deployed_mechanism(private(privacy=TARGET), Classifier(), None),
    lambda: deployed_mechanism(private(privacy=TARGET), Classifier(), 3),
)
row(
    "Real clients drop out by themselves. Leave dropout_probability out",
    lambda: check_deployable(fed(dropout_probability=0.1)),
    lambda: check_deployable(fed()),
)
row(
    "Secret cohorts are for simulations, because a network shows the cohort. Set secret=False",
    lambda: check_deployable(private(cohort=FixedSize(2, secret=True), diagnostics=False)),
    lambda: check_deployable(private(cohort=2)),
)
row(
    "needs the same number of steps from every client. Set local_steps=...",
    lambda: check_deployable(fed(algorithm=SCAFFOLD())),
    lambda: check_deployable(fed(algorithm=SCAFFOLD(), local_steps=2)),
    lambda: check_deployable(fed(algorithm=FedProx(0.1))),
)
row(
    "Secure aggregation must run masked between real machines. Use SecAgg() without simulation='counted'",
    lambda: check_deployable(fed(LDPQ(1.0), secure_aggregation=SecAgg(simulation="counted"))),
    lambda: check_deployable(fed(LDPQ(1.0), secure_aggregation=SecAgg())),
)
row(
    "SecAgg(active=True) needs signing identities: give {}, Ed25519 keys from a source outside the",
    lambda: check_identities(fed(LDPQ(1.0), secure_aggregation=SecAgg(active=True)), False, "identities"),
    lambda: check_identities(fed(LDPQ(1.0), secure_aggregation=SecAgg(active=True)), True, "identities"),
    lambda: check_identities(fed(LDPQ(1.0), secure_aggregation=SecAgg()), False, "identities"),
)
row(
    "A budget needs secret keys, but keys from a seed hide nothing. Leave out seed= or budget=",
    lambda: make_client_budget(fed(LDPQ(1.0)), TARGET, False),
    lambda: make_client_budget(private(), TARGET, False),
    lambda: make_client_budget(fed(LDPQ(1.0)), None, False),
)
row(
    "shares bits between clients, and a server that relays unsigned keys could know them. Give the client",
    lambda: make_client_budget(private(CorBin(1.0)), TARGET, False),
    lambda: make_client_budget(private(CorBin(1.0)), TARGET, True),
    lambda: make_client_budget(
        private(CorBin(1.0)), PrivacyTarget(8.0, delta=1e-5, adversary=Adversary.SERVER_AND_PARTNER), False
    ),
)
row(
    "rounds, got {}. Set a smaller max_epochs",
    lambda: server_rounds({"max_epochs": 1 << 21}),
    lambda: server_rounds({"max_epochs": 100}),
)
row(
    "needs simulated clients, but a real client trains one round at a time. Leave it out",
    lambda: check_client_callbacks([Langevin(0.1)]),
    lambda: check_client_callbacks([DPSGD(1.0, 1.0, delta=1e-5)]),
)
