"""Real processes, TLS on: one SuperLink, four SuperNodes."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.flower.machines import example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with example.Machines(tmp_path_factory.mktemp("machines")) as running:
        yield running


@pytest.mark.parametrize(
    "name, mechanism, secagg",
    [
        ("corbin", "CorBin(epsilon_per_coordinate=4.0, shared_bits=5)", False),
        ("sums", "CorBin(epsilon_per_coordinate=4.0, shared_bits=5)", True),
    ],
)
def test_a_deployment_ends_with_the_weights_of_the_simulation(machines, name, mechanism, secagg):
    found = example.deploy(machines, mechanism, name, secagg)
    assert found["answers"] == [4, 4]
    assert found["same weights"]
    assert found["bits, deployed"] == found["bits, simulated"]


SIGNING = """

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from lightning_fedq.keys.party_keys import Identities

own = [Ed25519PrivateKey.from_private_bytes(bytes([client] * 32)) for client in range(CLIENTS)]
directory = {client: key.public_key() for client, key in enumerate(own)}


def identities(context):
    return Identities(own[int(context.node_config["partition-id"])], directory)
"""


def against_a_lying_server(package):
    for name, old, new in (
        ("task", "SecAgg(),", "SecAgg(active=True),"),
        ("client_app", "federated, trainer", "federated, identities=task.identities, trainer"),
        ("server_app", "federated, data", "federated, directory=task.directory, data"),
    ):
        text = (package / f"{name}.py").read_text()
        assert old in text
        more = SIGNING if name == "task" else ""
        start = "" if name == "task" else f"from {package.name} import task\n"
        (package / f"{name}.py").write_text(start + text.replace(old, new) + more)


def test_against_a_lying_server_it_ends_with_the_same_weights(machines):
    mechanism = "CorBin(epsilon_per_coordinate=4.0, shared_bits=5)"
    found = example.deploy(machines, mechanism, "signed", True, change=against_a_lying_server)
    assert found["answers"] == [4, 4]
    assert found["same weights"]
    assert found["bits, deployed"] == found["bits, simulated"]


# ---- A SuperLink that admits the SuperNodes whose keys an operator has registered, as the guide says ----
def write_keys(folder, client):
    """A P-384 key pair in OpenSSH's form, as `ssh-keygen -t ecdsa -b 384` writes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / f"node-{client}", folder / f"node-{client}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private, public


def test_a_node_is_admitted_once_its_key_is_registered(tmp_path, monkeypatch):
    monkeypatch.setattr(example, "CLIENTS", 0)  # started by hand
    pairs = [write_keys(tmp_path, client) for client in range(2)]
    nodes = [("--auth-supernode-private-key", str(private), "--max-retries", "3") for private, _ in pairs]
    with example.Machines(tmp_path, nodes=nodes, link=("--enable-supernode-auth",)) as machines:
        machines.flwr("supernode", "register", str(pairs[0][1]), "demo")
        for client in range(2):
            machines.start_node(client)
        logs = [tmp_path / f"client-{client}.log" for client in range(2)]
        machines.wait_for(lambda: "SuperNode ID" in logs[0].read_text(), 300)
        machines.wait_for(lambda: machines.running["client-1"].poll() is not None, 300)  # it has given up
        assert "SuperNode ID" not in logs[1].read_text()
        assert machines.running["client-0"].poll() is None
