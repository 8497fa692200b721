"""Personalisation: tensors that stay with a client, named by patterns, and what each client keeps of them.

A client trains them with the rest and finds its own again in its next round; they are in no update. With the
last layers local this is FedPer (Arivazhagan et al., Federated Learning with Personalization Layers, 2019),
with the first ones LG-FedAvg (Liang et al., Think Locally, Act Globally, 2020), with the statistics of
BatchNorm FedBN (Li et al., ICLR 2021).

State of a client between two rounds is these, and its half of a local algorithm. A training opens a new
state, and the end of its round keeps it: where the round is given up, or the client's answer is in no sum,
the old one stands. Rows lie in memory; a deployed client has a file of them (`flower.persistent_state`), and
ranks exchange what they have opened (`training.ranks`).
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


def check_patterns(patterns: object, argument: str = "local") -> tuple[str, ...]:
    """Return patterns as a tuple.

    Args:
        patterns: Shell patterns of names, such as `["head.*"]`.
        argument: Name of the argument of `Federated`.

    Raises:
        TypeError: If it is no sequence of strings.
        ValueError: If one is empty.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(
            f"{argument} must be a list of patterns of names, such as ['head.*'], got {patterns!r}"
        )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} must hold patterns of names, such as 'head.*', got {pattern!r}")
        if not pattern:
            raise ValueError(f"{argument} holds an empty pattern; use names such as 'head.*'")
    return tuple(patterns)


def match_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Names that a pattern matches: tensors that stay with the client, or are said to travel."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def check_matches(module: nn.Module, patterns: Sequence[str], argument: str = "local") -> None:
    """Refuse patterns that match nothing, or one name of a tensor that has several.

    Raises:
        ValueError: Naming the pattern, and names there are.
    """
    parameters = list(module.named_parameters(remove_duplicate=False))
    named = [*parameters, *module.named_buffers(remove_duplicate=False)]
    for pattern in patterns:
        if not match_names(dict(named), [pattern]):
            raise ValueError(
                f"{argument}={pattern!r} matches no parameter of the module, whose names are "
                f"{in_short([name for name, _ in parameters])}; patterns match whole names, as 'head.*' does"
            )
    first, matched = dict[int, str](), match_names(dict(named), patterns)
    for name, tensor in named:
        other = first.setdefault(id(tensor), name)
        if (name in matched) != (other in matched):
            raise ValueError(
                f"{name} and {other} are one tensor, and {argument}={list(patterns)} matches one of the two "
                "names only; match both, or neither"
            )


def check_something_sent(parameters: Sequence[str], local: Sequence[str], patterns: Sequence[str]) -> None:
    """Refuse patterns that leave nothing to send.

    Raises:
        ValueError: Naming the parameters.
    """
    if local and not parameters:
        raise ValueError(
            f"local={list(patterns)} matches every parameter that is trained ({in_short(local)}), so that "
            "clients would send nothing and learn nothing from each other; leave out some"
        )


def report_personal_parameters(names: Sequence[str], module: nn.Module) -> None:
    """Say which trained parameters stay with the clients, and what it takes."""
    if not names:
        return
    tensors = [attrgetter(name)(module) for name in names]
    count = sum(tensor.numel() for tensor in tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    rank_zero_info(
        f"{in_short(names)} ({count} parameters) stay with the clients, {size} bytes for each that has "
        "trained; the model that is validated has those of the start"
    )


class PersonalTensors:
    """Tensors that every client keeps for itself, one flat row a client.

    Attributes:
        names: Names of the tensors, in the order of a row.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self._shapes: list[torch.Size] = []
        self.committed: dict[int, Tensor] = {}
        self.pending: dict[int, Tensor] = {}  # of the open round

    def __contains__(self, client: int) -> bool:
        """Has this client trained?"""
        return client in self.committed

    def set_names(self, names: Sequence[str], module: nn.Module) -> None:
        """Keep these tensors from now on. New ones begin as the module has them, others are forgotten."""
        if tuple(names) == self.names:
            return
        tensors = [attrgetter(name)(module).detach() for name in names]
        for client in self.committed:
            old = self.get_tensors(client)
            row = [old.get(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
            self.committed[client] = flatten(row) if row else self.committed[client][:0]
        self.names, self._shapes, self.pending = tuple(names), [tensor.shape for tensor in tensors], {}

    def get_tensors(self, client: int) -> dict[str, Tensor]:
        """A client's own tensors by name. There is none if it has not trained."""
        if client not in self.committed:
            return {}
        parts = torch.split(self.committed[client], [shape.numel() for shape in self._shapes])
        return {
            name: part.view(shape) for name, part, shape in zip(self.names, parts, self._shapes, strict=True)
        }

    def load_into(self, module: nn.Module, client: int) -> None:
        """Write a client's own tensors into a module, where it has some."""
        if client not in self.committed:
            return
        with torch.no_grad():
            for name, own in self.get_tensors(client).items():
                attrgetter(name)(module).copy_(own)

    def keep(self, client: int, row: Tensor) -> None:
        """Keep what a client of the open round has trained.

        Args:
            row: `(values,)`, in the order of `names`.
        """
        self.pending[client] = row.clone()

    def resume(self, before: PersonalTensors | None, saved: Mapping[str, Any] | None, resumed: bool) -> None:
        """Begin a fit with what clients kept in an earlier one, or in the run of a checkpoint.

        Args:
            before: Tensors of the last fit, whose server goes on; None without one.
            saved: State in the checkpoint, if there is one.
            resumed: Does the fit go on from a checkpoint?

        Raises:
            ValueError: If the checkpoint's are of other tensors.
        """
        if saved is not None:
            self.load_state_dict(saved)
        elif resumed and self.names:
            rank_zero_warn(
                f"the checkpoint holds nothing of what clients keep for themselves ({in_short(self.names)}; "
                "it is saved only with a seed); every client begins with that of the start"
            )
        elif not resumed and before is not None and before.names == self.names:
            self.committed = before.committed

    def state_dict(self) -> dict[str, Any]:
        """Rows by client, in the types that a checkpoint may hold."""
        return {"names": list(self.names), "rows": dict(self.committed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the rows of a checkpoint.

        Raises:
            ValueError: If they are of other tensors.
        """
        if tuple(state["names"]) != self.names:
            raise ValueError(
                f"the checkpoint's clients keep {in_short(state['names'])}, these {in_short(self.names)}; "
                "use the checkpoint's own model"
            )
        self.committed = {int(client): row for client, row in state["rows"].items()}


State = dict[str, Any]
"""One client's rows by what keeps them, in the types that a checkpoint may hold."""


Packed = dict[str, tuple[list[int], Tensor]]
"""Rows of several clients by what keeps them."""


class ClientRows(Protocol):
    """Rows of clients. `PersonalTensors` and `algorithms.local_algorithm.PersistentOffsets` are such.

    Attributes:
        committed: Rows that count, by client.
        pending: Rows of the open round.
    """

    committed: dict[int, Tensor]
    pending: dict[int, Tensor]


class ClientStates:
    """States of all clients of a fit, over everything that keeps rows of them.

    Args:
        parts: By the name that it has in a `State`.

    Example:
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
        """Let a client go on with what it has kept elsewhere.

        Args:
            state: Its state; a part that is missing begins anew.
        """
        for name, part in self._parts.items():
            if name in state:
                part.committed[client] = state[name]

    def packed(self) -> Packed:
        """Rows of the open round, by part: the clients and `(clients, values)`."""
        return {
            name: (list(part.pending), torch.stack(list(part.pending.values())))
            for name, part in self._parts.items()
            if part.pending
        }

    def unpack(self, packed: Packed) -> None:
        """Take the rows of clients that have trained elsewhere. Those that have trained here have theirs."""
        for name, (clients, rows) in packed.items():
            opened = self._parts[name].pending
            for client, row in zip(clients, rows, strict=True):
                if client not in opened:
                    opened[client] = row.clone()  # or one row would hold the memory of all

    def pending(self) -> dict[int, State]:
        """States of the open round, by client."""
        clients = sorted({client for part in self._parts.values() for client in part.pending})
        return {
            client: {n: part.pending[client] for n, part in self._parts.items() if client in part.pending}
            for client in clients
        }

    def begin_round(self) -> None:
        """Forget what a round that was given up has opened."""
        for part in self._parts.values():
            part.pending.clear()

    def commit(self, counted: Collection[int]) -> None:
        """The round has ended: clients whose answers are in its sum keep what they have opened."""
        for part in self._parts.values():
            part.committed.update({client: row for client, row in part.pending.items() if client in counted})
            part.pending.clear()
