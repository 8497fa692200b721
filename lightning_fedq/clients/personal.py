"""Personalisation: tensors that stay with a client, selected by name patterns, and their storage.

A client trains these tensors with the others and finds its own values again in its next round. They are in no
update. With local last layers this is FedPer (Arivazhagan et al., Federated Learning with Personalization
Layers, 2019), with local first layers LG-FedAvg (Liang et al., Think Locally, Act Globally, 2020), and with
local BatchNorm statistics FedBN (Li et al., ICLR 2021).

The state of a client between two rounds consists of its personal tensors and its part of a local algorithm.
Training writes a pending state. At the end of the round, the state is committed if the client's answer is in
the sum. Otherwise, or if the round is abandoned, the old state remains. States are in memory. A deployed
client stores them in a file (`flower.persistent_state`), and ranks exchange pending states
(`training.ranks`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import rank_zero_info, rank_zero_warn
from lightning_fedq.data.sampling import in_short
from lightning_fedq.functional.flatten import flatten


def check_patterns(patterns: object, argument: str = "personal_parameters") -> tuple[str, ...]:
    """Check name patterns and return them as a tuple.

    Args:
        patterns: Shell patterns of tensor names, such as `["head.*"]`.
        argument: Name of the argument of `Federated`, for errors.

    Raises:
        TypeError: If `patterns` is not a sequence of strings.
        ValueError: If a pattern is empty.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(f"{argument} must be a list of name patterns, such as ['head.*'], got {patterns!r}")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} must contain name patterns, such as 'head.*', got {pattern!r}")
        if not pattern:
            raise ValueError(f"{argument} contains an empty pattern. Use names such as 'head.*'.")
    return tuple(patterns)


def match_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that at least one shell pattern matches."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def check_matches(module: nn.Module, patterns: Sequence[str], argument: str = "personal_parameters") -> None:
    """Check that each pattern matches a tensor, and that tied tensors are matched by all names or none.

    Args:
        module: Module whose names are matched.
        patterns: Shell patterns of names.
        argument: Name of the argument of `Federated`, for errors.

    Raises:
        ValueError: If a pattern matches nothing, or only one of two names of a tied tensor.
    """
    parameters = list(module.named_parameters(remove_duplicate=False))
    named = [*parameters, *module.named_buffers(remove_duplicate=False)]
    for pattern in patterns:
        if not match_names(dict(named), [pattern]):
            raise ValueError(
                f"{argument}={pattern!r} matches none of {in_short([name for name, _ in parameters])}. "
                "Patterns match whole names, as 'head.*' does."
            )
    first, matched = dict[int, str](), match_names(dict(named), patterns)
    for name, tensor in named:
        other = first.setdefault(id(tensor), name)
        if (name in matched) != (other in matched):
            raise ValueError(
                f"{name} and {other} are one tensor, but {argument}={list(patterns)} matches only one name. "
                "Match both, or neither."
            )


def report_personal_parameters(names: Sequence[str], module: nn.Module) -> None:
    """Log the trained parameters that stay with clients, and their memory per client."""
    if not names:
        return
    tensors = [attrgetter(name)(module) for name in names]
    count = sum(tensor.numel() for tensor in tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    rank_zero_info(
        f"{in_short(names)} ({count} parameters) stay with clients, {size} bytes per trained client. "
        "Validation uses their initial values."
    )


class PersonalTensors:
    """Tensors that every client keeps for itself, as one flat row per client.

    Attributes:
        names: Names of the tensors, in the order of a row.
        committed: Row of each client that has trained in a finished round.
        pending: Row of each client that has trained in the open round.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self._shapes: list[torch.Size] = []
        self.committed: dict[int, Tensor] = {}
        self.pending: dict[int, Tensor] = {}

    def __contains__(self, client: int) -> bool:
        """Return whether this client has a committed row."""
        return client in self.committed

    def set_names(self, names: Sequence[str], module: nn.Module) -> None:
        """Change the set of tensors. New ones start with the module's values, and others are dropped."""
        if tuple(names) == self.names:
            return
        tensors = [attrgetter(name)(module).detach() for name in names]
        for client in self.committed:
            old = self.get_tensors(client)
            row = [old.get(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
            self.committed[client] = flatten(row) if row else self.committed[client][:0]
        self.names, self._shapes, self.pending = tuple(names), [tensor.shape for tensor in tensors], {}

    def get_tensors(self, client: int) -> dict[str, Tensor]:
        """Return a client's own tensors by name. Empty if the client has no committed row."""
        if client not in self.committed:
            return {}
        parts = torch.split(self.committed[client], [shape.numel() for shape in self._shapes])
        return {
            name: part.view(shape) for name, part, shape in zip(self.names, parts, self._shapes, strict=True)
        }

    def load_into(self, module: nn.Module, client: int) -> None:
        """Write a client's own tensors into a module, if the client has some."""
        with torch.no_grad():
            for name, tensor in self.get_tensors(client).items():
                attrgetter(name)(module).copy_(tensor)

    def keep(self, client: int, row: Tensor) -> None:
        """Store the trained values of a client as its pending row.

        Args:
            client: Number of the client.
            row: `(values,)` tensors in the order of `names`.
        """
        self.pending[client] = row.clone()

    def resume(self, before: PersonalTensors | None, saved: Mapping[str, Any] | None, resumed: bool) -> None:
        """Start a fit with the rows of an earlier fit or of a checkpoint.

        Args:
            before: Tensors of the last fit, if the same server continues. None otherwise.
            saved: State from the checkpoint, or None.
            resumed: Whether the fit continues from a checkpoint.

        Raises:
            ValueError: If the checkpoint has rows of other tensors.
        """
        if saved is not None:
            if tuple(saved["names"]) != self.names:
                raise ValueError(
                    f"The checkpoint's clients keep {in_short(saved['names'])}, these "
                    f"{in_short(self.names)}. Use the checkpoint's own model."
                )
            self.committed = {int(client): row for client, row in saved["rows"].items()}
        elif resumed and self.names:
            rank_zero_warn(
                f"The checkpoint has no personal tensors ({in_short(self.names)}), so every client starts "
                "with the initial ones. Set a seed to save them in checkpoints."
            )
        elif not resumed and before is not None and before.names == self.names:
            self.committed = before.committed

    def state_dict(self) -> dict[str, Any]:
        """Return the committed rows by client, in types that a checkpoint may contain."""
        return {"names": list(self.names), "rows": dict(self.committed)}


State = dict[str, Any]
"""State of one client: its row in each part ("own", "algorithm"), in types that a checkpoint may contain."""


Packed = dict[str, tuple[list[int], Tensor]]
"""Rows of several clients in each part: client numbers, and `(clients, values)`."""


class ClientRows(Protocol):
    """Store of one row per client: `PersonalTensors` or `algorithms.local_algorithm.PersistentOffsets`.

    Attributes:
        committed: Rows of finished rounds, by client.
        pending: Rows of the open round, by client.
    """

    committed: dict[int, Tensor]
    pending: dict[int, Tensor]


class ClientStates:
    """States of all clients of a fit, over all stores of client rows.

    Args:
        parts: Stores of rows, by their name in a `State`.

    Examples:
        >>> import torch
        >>> from lightning_fedq.clients.personal import PersonalTensors
        >>> states = ClientStates({"own": PersonalTensors()})
        >>> states.put(3, {"own": torch.ones(2)})
        >>> states.pending()
        {}
    """

    def __init__(self, parts: Mapping[str, ClientRows]) -> None:
        self._parts = dict(parts)

    def put(self, client: int, state: Mapping[str, Any]) -> None:
        """Set the committed state of a client, which was stored elsewhere.

        Args:
            client: Number of the client.
            state: State of the client. A missing part keeps its current row.
        """
        for name, part in self._parts.items():
            if name in state:
                part.committed[client] = state[name]

    def packed(self) -> Packed:
        """Return the rows of the open round by part: client numbers, and `(clients, values)`."""
        return {
            name: (list(part.pending), torch.stack(list(part.pending.values())))
            for name, part in self._parts.items()
            if part.pending
        }

    def unpack(self, packed: Packed) -> None:
        """Add pending rows of clients that trained on other ranks. Rows of clients trained here stay."""
        for name, (clients, rows) in packed.items():
            pending = self._parts[name].pending
            for client, row in zip(clients, rows, strict=True):
                if client not in pending:
                    pending[client] = row.clone()  # a view would keep the memory of all rows

    def pending(self) -> dict[int, State]:
        """Return the states of the open round, by client."""
        clients = sorted({client for part in self._parts.values() for client in part.pending})
        return {
            client: {n: part.pending[client] for n, part in self._parts.items() if client in part.pending}
            for client in clients
        }

    def begin_round(self) -> None:
        """Discard the pending rows of an abandoned round."""
        for part in self._parts.values():
            part.pending.clear()

    def commit(self, counted: Collection[int]) -> None:
        """End a round: commit the pending rows of clients whose answers are in its sum. Drop the others."""
        for part in self._parts.values():
            part.committed.update({client: row for client, row in part.pending.items() if client in counted})
            part.pending.clear()
