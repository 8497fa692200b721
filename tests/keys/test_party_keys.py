import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lightning_fedq.keys.party_keys import (
    ClientSecrets,
    HeldClientKeys,
    HeldServerKeys,
    KeyVerificationError,
    NotHeldError,
    ServerSecrets,
    sign_key,
    verify_key,
)
from lightning_fedq.keys.randomness import (
    ClientRandomness,
    Keys,
    PublicRandomness,
    RootKeys,
    agree,
    group_info,
    private_key,
    roster_digest,
    server_info,
)


def parties(count=3):
    """A server and its clients, who have sent one public key each."""
    secrets, own = ServerSecrets.draw(), [ClientSecrets.draw() for _ in range(count)]
    roster = {client: one.public_key for client, one in enumerate(own)}
    server = HeldServerKeys(secrets, roster)
    clients = [
        HeldClientKeys(
            client,
            own[client],
            secrets.federation,
            secrets.public_key,
            server.salt,
            server.sealed_members(client),
            {other: key for other, key in roster.items() if other != client},
            entropy=lambda size: b"",
        )
        for client in range(count)
    ]
    return secrets, own, server, clients


def agreed(one, other, secrets, own, info):
    """The key of two secrets, by an X25519 exchange and the federation's salt."""
    salt = roster_digest({number: client.public_key for number, client in enumerate(own)})
    mine, theirs = (X25519PrivateKey.from_private_bytes(secret) for secret in (one, other))
    return agree(mine, theirs.public_key(), salt, info)


def test_parties_derive_what_the_key_agreement_gives():
    secrets, own, server, clients = parties()
    assert secrets.federation == server.public() == clients[1].public()
    assert secrets.members == server.members() == clients[1].members()
    for number, client in enumerate(clients):
        key = agreed(
            own[number].secret, secrets.secret, secrets, own, server_info(secrets.federation, number)
        )
        assert client.client(number) == server.client(number) == key
        assert client.private(number) == private_key(own[number].seed, secrets.federation)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        key = agreed(own[b].secret, own[a].secret, secrets, own, group_info(secrets.federation, (a, b)))
        assert clients[a].peer((b, a)) == clients[b].peer((a, b)) == key
    assert len({clients[0].peer((0, 1)), clients[0].peer((0, 2)), clients[1].peer((1, 2))}) == 3


def test_the_key_of_the_server_s_noise_is_another_one_in_every_process_and_no_client_holds_it():
    """A folder that is set back would bring the noise of released models back for other updates."""
    secrets, _, server, clients = parties()
    again = HeldServerKeys(secrets, server.roster)
    assert again.client(1) == server.client(1)
    assert len({again.server(), server.server(), RootKeys().server()}) == 3
    assert server.server() == server.server()
    with pytest.raises(NotHeldError, match="Client 1 does not hold the key of the server's own noise"):
        clients[1].server()
    streams = [PublicRandomness(keys, 0).server("noise").words64(1)[0] for keys in (server, again)]
    assert streams[0] != streams[1]
    assert PublicRandomness(server, 3).for_round(0).server("noise").words64(1)[0] == streams[0]


def test_coins_of_a_client_s_own_are_never_drawn_twice():
    """Of one folder, at one address: what another object draws is new, whatever the folder has forgotten."""
    secrets, own, server, _ = parties()
    given = 0, own[0], secrets.federation, secrets.public_key, server.salt, server.sealed_members(0), {}
    first, again = HeldClientKeys(*given), HeldClientKeys(*given)
    assert first.private(0) != again.private(0) and first.private(0) == first.private(0)
    assert len(first.private(0)) == 32 and first.client(0) == again.client(0)


def test_streams_of_the_parties_agree():
    _, _, server, clients = parties()
    public = PublicRandomness(server, 4, 1).shared_with_server(2, "dither").words(8)
    own = ClientRandomness(clients[2], [2], 4, 1)
    assert (own.shared_with_server(2, "dither").words(8) == public).all()
    other = ClientRandomness(clients[0], [0], 4, 1)
    assert (own.peer((0, 2), "bits").words(8) == other.peer((0, 2), "bits").words(8)).all()


def test_a_party_holds_nobody_else_s_keys():
    _, _, server, clients = parties()
    assert not isinstance(server, Keys)  # a server has no `peer` and no `private`, by its type
    assert not hasattr(server, "peer") and not hasattr(server, "private")
    for ask in (clients[0].client, clients[0].private):
        with pytest.raises(NotHeldError, match="Client 0 does not hold the key of client 1"):
            ask(1)
    with pytest.raises(NotHeldError, match=r"Client 0 is not in the group \(1, 2\)"):
        clients[0].peer((1, 2))
    with pytest.raises(NotHeldError, match=r"Keys are agreed in pairs, got the group \(0, 1, 2\)"):
        clients[0].peer((0, 1, 2))


def test_a_peer_that_nobody_introduced():
    secrets, own, server, _ = parties()
    alone = HeldClientKeys(
        0, own[0], secrets.federation, secrets.public_key, server.salt, server.sealed_members(0), {}
    )
    with pytest.raises(NotHeldError, match="Client 0 has no public key of client 1"):
        alone.peer((0, 1))


@pytest.mark.parametrize("what", ["number", "salt", "server", "seal"])
def test_another_server_or_roster_is_noticed(what):
    secrets, own, server, _ = parties()
    client, salt, key, sealed = 0, server.salt, secrets.public_key, server.sealed_members(0)
    if what == "number":
        client = 1
    elif what == "salt":
        salt = bytes(32)
    elif what == "server":
        key = ServerSecrets.draw().public_key
    else:
        sealed = server.sealed_members(1)
    with pytest.raises(KeyVerificationError, match="do not open with its key"):
        HeldClientKeys(client, own[0], secrets.federation, key, salt, sealed, {})


def test_a_roster_with_one_key_twice_is_refused():
    key = ClientSecrets.draw().public_key
    with pytest.raises(ValueError, match="a separate public key"):
        HeldServerKeys(ServerSecrets.draw(), {0: key, 1: key})


def test_a_low_order_key_is_refused():
    server = HeldServerKeys(ServerSecrets.draw(), {0: bytes(32)})
    with pytest.raises(ValueError, match="low order"):
        server.client(0)


def test_a_signed_key():
    identity, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    federation, key = b"f" * 32, ClientSecrets.draw().public_key
    directory = {3: identity.public_key()}
    signature = sign_key(identity, federation, key)
    verify_key(directory, 3, federation, key, signature)
    for bad in (
        (directory, 3, federation, key, sign_key(other, federation, key)),
        (directory, 3, b"g" * 32, key, signature),
        (directory, 3, federation, ClientSecrets.draw().public_key, signature),
    ):
        with pytest.raises(KeyVerificationError, match="client 3 is not signed by its identity"):
            verify_key(*bad)
    with pytest.raises(KeyVerificationError, match="no identity of client 4"):
        verify_key(directory, 4, federation, key, signature)


@pytest.mark.parametrize("secrets", [ServerSecrets, ClientSecrets])
def test_secrets_do_not_show_in_words(secrets):
    """As in a log, an error or a debugger's list of variables."""
    drawn = secrets.draw()
    for name, value in vars(drawn).items():
        if name != "federation":
            assert repr(value) not in repr(drawn) and value.hex() not in repr(drawn)


def test_a_rosters_hash_says_who_has_which_key():
    first, second = bytes([1] * 32), bytes([2] * 32)
    rosters = {0: first, 1: second}, {0: second, 1: first}, {0: first}, {1: first}
    assert len({roster_digest(roster) for roster in rosters}) == len(rosters)
