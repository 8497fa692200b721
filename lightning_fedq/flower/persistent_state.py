"""State of a deployed client: two files in its folder, the last that counts and the open one.

A client does not hear whether its answer was in the sum. The server says so with its next task: `counted` is
round and attempt of the last one of this client's answers that was. What the client has kept of just that one
takes the place of what it kept before, anything else is forgotten, as a simulation forgets a round that is
given up. A server that lies here sets a client back, or mixes up its own rounds; of the client's data it
learns what it would learn anyway, because a message is protected whatever was trained.

The files are made of the client's data, without noise: they are for their owner alone, as its keys are.
"""

from collections.abc import Sequence
from typing import Any

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.clients.personal import State
from lightning_fedq.flower.settings import RefusedError
from lightning_fedq.flower.store import Store

_KEPT, _OPEN = "state", "state-open"
_SPENT = ("account",)
"""What stays of a round that does not count: what was paid for secret noise, before anything was sent."""
Attempt = tuple[int, int]
NEVER: Attempt = (-1, -1)


class PersistentState:
    """A client's state, in its folder.

    Args:
        owner: The client and its federation, in words.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store, self._owner = store, owner

    def settle(self, counted: Attempt) -> State:
        """Keep or forget what the open round has left, and return what the client goes on with.

        Args:
            counted: Round and attempt of the last answer that was in a sum.

        Raises:
            RefusedError: If a file is damaged, or another client's.
        """
        open, kept = self._read(_OPEN), self._read(_KEPT)
        if open is not None and _get_attempt(open) == counted:
            self._store.move_tensors(_OPEN, _KEPT)
            kept = open
        elif open is not None:
            spent = {name: open["state"][name] for name in _SPENT if name in open["state"]}
            if spent:
                old = {} if kept is None else kept["state"]
                kept = {"at": list(_get_attempt(kept)), "owner": self._owner, "state": {**old, **spent}}
                # first: after a crash here the open file is settled again
                self._store.put_tensors(_KEPT, kept)
            self._store.drop(_OPEN)
        if _get_attempt(kept) != counted:
            rank_zero_warn(
                f"the server has last counted round {counted[0] + 1} of this client, and what it keeps is of "
                f"round {_get_attempt(kept)[0] + 1} (0 is none): one of the two folders was set back. The "
                "client goes "
                "on with what it has"
            )
        return {} if kept is None else dict(kept["state"])

    def keep(self, attempt: Attempt, state: State) -> None:
        """Keep what a round has left, until it is known whether it counts.

        Args:
            attempt: Round and attempt.
            state: State after it.
        """
        self._store.put_tensors(_OPEN, {"at": list(attempt), "owner": self._owner, "state": state})

    def _read(self, name: str) -> dict[str, Any] | None:
        lost = "delete it, and the client begins anew with what it keeps for itself; the federation goes on"
        try:
            found = self._store.get_tensors(name)
        except ValueError as error:
            raise RefusedError(f"{error}; or {lost}") from error
        if found is not None and found.get("owner") != self._owner:
            raise RefusedError(
                f"{name}.pt in this client's folder is of {found.get('owner')}, and this is {self._owner}; "
                f"give it its own folder, or {lost}"
            )
        return found


def check_names(state: State, names: Sequence[str]) -> None:
    """Refuse a state of other tensors.

    Args:
        names: Names of what it would keep now.

    Raises:
        RefusedError: Naming both.
    """
    if "own" in state and list(state["names"]) != list(names):
        raise RefusedError(
            f"this client keeps {', '.join(state['names'])}, and now would {', '.join(names) or 'nothing'}; "
            "use the model and `local` that it has begun with, or begin a new federation in another folder"
        )


def _get_attempt(saved: dict[str, Any] | None) -> Attempt:
    return NEVER if saved is None else (int(saved["at"][0]), int(saved["at"][1]))
