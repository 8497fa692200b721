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
    count_rounds,
    deployed_mechanism,
    make_client_budget,
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


row("and two would charge", lambda: two_servers("home", "home"), lambda: two_servers("home", "other"))
row("--supernode must be", lambda: _address("9094", False), lambda: _address("127.0.0.1:9094", False))
row(
    "is another machine: weights and answers would travel in the clear; give",
    lambda: _address("10.0.0.3:9094", False),
    lambda: _address("10.0.0.3:9094", True),
)
row("can be read by everybody on this", lambda: _secret(secret(0o644)), lambda: _secret(secret(0o640)))
row(
    "is installed{}; use a version that this client was tried with: pip install",
    lambda: check_flower("1.43.0"),
    lambda: check_flower("1.42.0"),
    error=FlowerChangedError,
)
row(
    "a privacy target over the run hangs on the number of rounds, which both sides must know: give",
    lambda: deployed_mechanism(private(privacy=TARGET), Classifier(), None),
    lambda: deployed_mechanism(private(privacy=TARGET), Classifier(), 3),
)
row(
    "real clients drop out by themselves; leave dropout_probability out",
    lambda: check_deployable(fed(dropout_probability=0.1)),
    lambda: check_deployable(fed()),
)
row(
    "secret cohorts are for simulations: a network shows which clients are asked, so anybody who",
    lambda: check_deployable(private(cohort=FixedSize(2, secret=True), diagnostics=False)),
    lambda: check_deployable(private(cohort=2)),
)
row(
    "takes as many steps of every client, and a server that does not see what they hold has to know how",
    lambda: check_deployable(fed(algorithm=SCAFFOLD())),
    lambda: check_deployable(fed(algorithm=SCAFFOLD(), local_steps=2)),
    lambda: check_deployable(fed(algorithm=FedProx(0.1))),
)
row(
    "between real machines secure aggregation runs masked; use SecAgg() without run='accounted'",
    lambda: check_deployable(fed(LDPQ(1.0), secure_aggregation=SecAgg(run="accounted"))),
    lambda: check_deployable(fed(LDPQ(1.0), secure_aggregation=SecAgg())),
)
row(
    "SecAgg(active=True) has clients sign their keys and the list of survivors, because the server may",
    lambda: check_identities(fed(LDPQ(1.0), secure_aggregation=SecAgg(active=True)), False, "identities"),
    lambda: check_identities(fed(LDPQ(1.0), secure_aggregation=SecAgg(active=True)), True, "identities"),
    lambda: check_identities(fed(LDPQ(1.0), secure_aggregation=SecAgg()), False, "identities"),
)
row(
    "keys from a seed hide nothing, so there is no budget to keep to; leave out seed=, or budget=",
    lambda: make_client_budget(fed(LDPQ(1.0)), TARGET, False),
    lambda: make_client_budget(private(), TARGET, False),
    lambda: make_client_budget(fed(LDPQ(1.0)), None, False),
)
row(
    "shares bits between clients, and a server that relays their keys could know them: give the client",
    lambda: make_client_budget(private(CorBin(1.0)), TARGET, False),
    lambda: make_client_budget(private(CorBin(1.0)), TARGET, True),
    lambda: make_client_budget(
        private(CorBin(1.0)), PrivacyTarget(8.0, delta=1e-5, adversary=Adversary.SERVER_AND_PARTNER), False
    ),
)
row(
    "rounds at most, got {}; say fewer max_epochs",
    lambda: count_rounds({"max_epochs": 1 << 21}),
    lambda: count_rounds({"max_epochs": 100}),
)
row(
    "works on the clients of a simulation; a real client trains one round at a time and keeps nothing",
    lambda: check_client_callbacks([Langevin(0.1)], fed()),
    lambda: check_client_callbacks([DPSGD(1.0, 1.0, delta=1e-5)], fed()),
)
