"""The keys of all parties of a secure federation in one object, each derived by the party that holds it."""

from lightning_fedq.keys.randomness import Keys


class OfParties(Keys):
    """What a simulation with these parties' keys would hold.

    `server` and `clients` are the parties' own keys, clients by number.
    """

    mode = "secure"

    def __init__(self, server, clients):
        self._server, self._clients = server, clients
        self.setup_bits_per_client = clients[0].setup_bits_per_client

    def public(self):
        return self._server.public()

    def members(self):
        return self._server.members()

    def client(self, client):
        return self._server.client(client)

    def server(self):
        return self._server.server()

    def peer(self, group):
        return self._clients[min(group)].peer(group)

    def private(self, client):
        return self._clients[client].private(client)
