"""A SuperLink that admits the SuperNodes whose keys an operator has registered, as the guide says."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.flower.machines import example

pytestmark = pytest.mark.slow


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
