"""Who has broken rounds, as far as a server can tell that sees no secrets.

Some messages prove their sender wrong. Others only tell that one of two clients lies: a holder says that what
an owner sealed for it does not open, or a share is not on the owner's polynomial, and either may have made it
so. Such a dispute costs neither of them the round. A client in dispute with two others is left out, those
with the most disputes first, whose disputes then count against nobody else: so one Byzantine client, who
has a dispute with each client that it cheats or accuses, goes, and no honest client ever does. c Byzantine
clients that agree can have at most c^2 / 2 honest ones left out: each of these has two disputes, with
Byzantine clients who have no more than c each.
"""

from lightning_fedq.flower.store import Store

_NAME = "disputes"


class Disputes:
    """Disputes and proofs of a federation, from its first round on.

    Args:
        store: Folder that keeps them over a restart (`disputes.json`); None forgets them with the process.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        kept = (store.get(_NAME) if store is not None else None) or {"broken": [], "between": []}
        self._broken: set[int] = set(kept["broken"])
        self._with: dict[int, set[int]] = {}
        for one, other in kept["between"]:
            self._with.setdefault(one, set()).add(other)

    def add_dispute(self, client: int, other_client: int) -> None:
        """One of these two has lied. They may be one."""
        if client == other_client:
            self.exclude(client)
            return
        self._with.setdefault(client, set()).add(other_client)
        self._with.setdefault(other_client, set()).add(client)
        self._keep()

    def exclude(self, client: int) -> None:
        """This one has broken a round."""
        self._broken.add(client)
        self._keep()

    def _keep(self) -> None:
        between = [[one, other] for one, others in sorted(self._with.items()) for other in sorted(others)]
        if self._store is not None:
            self._store.put(_NAME, {"broken": sorted(self._broken), "between": between})

    def disputed_clients(self, client: int) -> set[int]:
        """With whom a client is in dispute, those who are left out aside."""
        return self._with.get(client, set()) - self.left_out

    @property
    def left_out(self) -> set[int]:
        """Clients that are asked no more."""
        found = set(self._broken)
        for client in sorted(self._with, key=lambda client: (-len(self._with[client]), client)):
            if len(self._with[client] - found) > 1:
                found.add(client)
        return found
