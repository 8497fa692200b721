"""State of a deployed client in two files: of the last round that counts, and of the open round.

A client does not learn from its own exchange whether its answer was in the sum. The server says so with its
next task: the field `counted` is the round and attempt of this client's last answer that was. If the open
file is of that attempt, it replaces the kept one. Otherwise it is dropped, as a simulation forgets a round
that is given up. A server that lies here resets a client or mixes up its own rounds. It learns no more about
the client's data, because every message is protected whatever was trained.

The files are made from the client's data without noise. Only their owner may read them, like its keys.
"""

from collections.abc import Sequence
from typing import Any

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.clients.personal import State
from lightning_fedq.flower.refusals import RefusedError
from lightning_fedq.flower.store import Store

_KEPT, _OPEN = "state", "state-open"
_SPENT = ("account",)
"""Entries that survive a round that does not count: spending on private noise, before a message was sent."""
Attempt = tuple[int, int]
NEVER: Attempt = (-1, -1)


class PersistentState:
    """State of one client, in its folder.

    Args:
        store: Folder of the client.
        owner: Client and federation, as text that is stored in the files and compared.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store, self._owner = store, owner

    def settle(self, counted: Attempt) -> State:
        """Keep or drop the state of the open round, and return the state that the client continues with.

        Args:
            counted: Round and attempt of the client's last answer that was in a sum.

        Raises:
            RefusedError: If a file is damaged, or another client's.
        """
        open, saved = self._read(_OPEN), self._read(_KEPT)
        if open is not None and _get_attempt(open) == counted:
            self._store.move_tensors(_OPEN, _KEPT)
            saved = open
        elif open is not None:
            spent = {name: open["state"][name] for name in _SPENT if name in open["state"]}
            if spent:
                saved_entries = {} if saved is None else saved["state"]
                saved = {
                    "at": list(_get_attempt(saved)),
                    "owner": self._owner,
                    "state": {**saved_entries, **spent},
                }
                # written first, so that after a crash the open file is settled again
                self._store.put_tensors(_KEPT, saved)
            self._store.drop(_OPEN)
        if _get_attempt(saved) != counted:
            rank_zero_warn(
                f"The server last counted round {counted[0] + 1} of this client, but its state is of round "
                f"{_get_attempt(saved)[0] + 1} (0 is none). One of the two folders was reset, and the client "
                "continues with its state."
            )
        return {} if saved is None else dict(saved["state"])

    def keep(self, attempt: Attempt, state: State) -> None:
        """Store the state after a round, until the server says whether the round counts.

        Args:
            attempt: Round and attempt.
            state: State after it.
        """
        self._store.put_tensors(_OPEN, {"at": list(attempt), "owner": self._owner, "state": state})

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return the contents of a file, or None if there is none.

        Args:
            name: Name of the file without its ending.

        Raises:
            RefusedError: If the file is damaged, or another client's.
        """
        reset = "delete it, which resets the client's own state only"
        try:
            contents = self._store.get_tensors(name)
        except ValueError as error:
            raise RefusedError(f"{error}, or {reset}") from error
        if contents is not None and contents.get("owner") != self._owner:
            raise RefusedError(
                f"{name}.pt in this client's folder is of {contents.get('owner')}, but this is "
                f"{self._owner}. Use a separate folder, or {reset}"
            )
        return contents


def check_names(state: State, names: Sequence[str]) -> None:
    """Refuse a state with other tensors than the client would keep now.

    Args:
        state: State that was kept.
        names: Names of the tensors that the client would keep now.

    Raises:
        RefusedError: If the names differ. The message has both lists.
    """
    if "own" in state and list(state["names"]) != list(names):
        raise RefusedError(
            f"This client's state has {', '.join(state['names'])}, but the model needs "
            f"{', '.join(names) or 'nothing'}. Restore the model and `personal_parameters`, or begin a new "
            "federation in another folder."
        )


def _get_attempt(saved: dict[str, Any] | None) -> Attempt:
    """Return round and attempt of a stored state, or `NEVER` if there is none."""
    return NEVER if saved is None else (int(saved["at"][0]), int(saved["at"][1]))
