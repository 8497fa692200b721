"""A client's half of secure aggregation: three or four more messages after the first one of a round.

Each message may come to another process, so the state of the open round is in the client's folder in between.
No message is answered twice: the state is removed before an answer is made, and stored again afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from lightning_fedq.callbacks import Federated
from lightning_fedq.flower.client_folder import KEY_FIELDS, ClientFolder
from lightning_fedq.flower.records import Fields
from lightning_fedq.flower.secure import session_id
from lightning_fedq.flower.store import Store
from lightning_fedq.keys.party_keys import Identities
from lightning_fedq.keys.randomness import Keys, PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import RoundTask
from lightning_fedq.secagg import Client, SecAgg, StageError

_ROUND, _SYMBOLS = "round", "symbols"
_NEEDED = ("task", "client", "signatures", *KEY_FIELDS)
"""Fields of the server's first message that the client needs for its later answers."""


class MaskedRounds:
    """Protocol of secure aggregation on one client, one message at a time.

    Args:
        federated: Settings of the federation.
        mechanism: Function that returns the mechanism of the client's own code.
        folder: Folder of the client.
        identities: Signing key of this client and verification keys of its peers, or None.
    """

    def __init__(
        self,
        federated: Federated,
        mechanism: Callable[[], Mechanism],
        folder: ClientFolder,
        identities: Identities | None,
    ) -> None:
        self._federated, self._mechanism = federated, mechanism
        self._folder, self._identities = folder, identities

    @property
    def _store(self) -> Store:
        """Folder that stores open rounds."""
        return self._folder.require("States of secure aggregation between messages")

    def open(self, fields: Fields, keys: Keys, task: RoundTask, digest: bytes, symbols: Tensor) -> bytes:
        """Open a round, store its state, and return the client's first message.

        Args:
            fields: Fields of the server's message, with the invitation.
            keys: Keys of the client in this round.
            task: Task of the round.
            digest: Digest of the model that the client has received.
            symbols: `(m,)` symbols of the encoded update.
        """
        machine = self._machine(fields, keys, task, digest)
        reply = machine.advertise(fields["invitation"])
        self._store.drop(_ROUND)  # if killed after this, an older round does not find these symbols
        self._store.put_tensors(_SYMBOLS, {_SYMBOLS: symbols.cpu().long()})
        kept = {name: fields[name] for name in _NEEDED if name in fields}
        self._keep({**kept, "digest": digest}, machine)
        return reply

    def _machine(self, fields: Fields, keys: Keys, task: RoundTask, digest: bytes) -> Client:
        """Return this client's protocol machine for a round."""
        secagg, context = self._federated.server.secure_aggregation, task.context()
        assert isinstance(secagg, SecAgg)
        public = PublicRandomness(keys, task.round, task.attempt)
        session, clients = session_id(keys.public(), task), self._federated.clients.num_clients
        terms = secagg.round_terms(self._mechanism(), context, public, session, clients)
        if not secagg.active:
            return Client(fields["client"], terms, digest)
        identities = self._identities
        assert identities is not None  # `check_identities` has refused None
        identities.check_number(fields["client"])
        own, directory = identities.own, identities.directory
        return Client(fields["client"], terms, digest, identity=own, directory=directory)

    def _keep(self, fields: Fields, machine: Client) -> None:
        """Store the state of the open round between messages."""
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
        self._store.put(_ROUND, {**plain, "machine": machine.to_bytes()})

    @contextmanager
    def _resume(self, is_last: bool = False) -> Iterator[Client]:
        """Restore the protocol machine of the open round, for one message at a time.

        After an error this client is out of the round. A message out of turn leaves the state unchanged.

        Args:
            is_last: Whether this is the last exchange, after which nothing is stored.

        Raises:
            ValueError: If no round is open, or another message has the machine.
        """
        # removed from disk until it is stored again, so a crash leaves the client out of the round
        kept = self._store.pop(_ROUND)
        if kept is None:
            raise ValueError("No round is open at this client, or another message is being answered")
        task = RoundTask.from_bytes(kept["task"])
        machine = self._machine(kept, self._folder.keys(kept), task, kept["digest"])
        machine.resume(kept["machine"])
        try:
            yield machine
        except StageError:
            self._keep(kept, machine)
            raise
        if not is_last:
            self._keep(kept, machine)

    def shares(self, fields: Fields) -> Fields:
        """Answer the roster with key shares for the neighbours."""
        with self._resume() as machine:
            return {"secagg": machine.share_keys(fields["secagg"])}

    def masked(self, fields: Fields) -> Fields:
        """Accept the neighbours' shares, and return the masked symbols."""
        with self._resume() as machine:
            machine.accept_shares(fields["secagg"])
            kept = self._store.get_tensors(_SYMBOLS)
            self._store.drop(_SYMBOLS)  # removed, so that no second message masks them
            assert kept is not None  # `open` has written them
            masked = machine.masked_input(kept[_SYMBOLS].numpy())
            accused = {"accused": list(machine.unopened)} if machine.unopened else {}
            return {"secagg": masked, **accused}

    def confirm(self, fields: Fields) -> Fields:
        """Sign the list of survivors, where the server may lie about it."""
        with self._resume() as machine:
            return {"secagg": machine.confirm(fields["secagg"])}

    def unmask(self, fields: Fields) -> Fields:
        """Return one share of each neighbour, after which the client keeps nothing of the round."""
        with self._resume(is_last=True) as machine:
            return {"secagg": machine.unmask(fields["secagg"])}
