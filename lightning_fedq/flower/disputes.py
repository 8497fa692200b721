"""Disputes between clients, and clients that have broken rounds, as a server without secrets can tell.

Some messages prove that their sender is wrong. Others only show that one of two clients lies. For example, a
holder reports that a sealed share does not open, or a share is not on its owner's polynomial. Either client
may be the cause. Such a dispute excludes neither from the round.

A client in dispute with two others is left out. Clients with the most disputes are left out first, and their
disputes then no longer count against others. So a single Byzantine client is left out, because it has a
dispute with each client that it cheats or accuses. No honest client is left out then. If c Byzantine clients
collude, they can have at most c^2 / 2 honest clients left out. Each of these needs two disputes with
Byzantine clients, which have at most c disputes each.
"""

from collections import Counter

from lightning_fedq.flower.store import Store

_NAME = "disputes"


class Disputes:
    """Disputes and proofs of misbehaviour in a federation, from its first round on.

    Args:
        store: Folder that keeps them over a restart (`disputes.json`). None keeps them in the process only.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        stored = (store.get(_NAME) if store is not None else None) or {"broken": [], "between": []}
        self._broken: set[int] = set(stored["broken"])
        self._pairs: set[tuple[int, int]] = {(one, other) for one, other in stored["between"]}

    def add_dispute(self, client: int, other_client: int) -> None:
        """Note that one of two clients has lied. A dispute with itself excludes a client."""
        if client == other_client:
            self._broken.add(client)
        else:
            self._pairs |= {(client, other_client), (other_client, client)}
        self._keep()

    def exclude(self, client: int) -> None:
        """Note that a client has broken a round."""
        self.add_dispute(client, client)

    def _keep(self) -> None:
        """Write disputes and excluded clients to the folder."""
        if self._store is not None:
            self._store.put(_NAME, {"broken": sorted(self._broken), "between": sorted(self._pairs)})

    @property
    def left_out(self) -> set[int]:
        """Clients that the server no longer asks."""
        excluded = set(self._broken)
        counts = Counter(client for client, _ in self._pairs)
        for client in sorted(counts, key=lambda client: (-counts[client], client)):
            # disputes with excluded clients no longer count
            if sum(one == client and other not in excluded for one, other in self._pairs) >= 2:
                excluded.add(client)
        return excluded
