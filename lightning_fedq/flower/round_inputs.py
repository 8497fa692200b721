"""State and server values that a client needs for a round, besides the global weights, and their use.

The values are those that callbacks and schedules of the server's fit may change, such as learning rates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms.local_algorithm import Correction, LocalAlgorithm, PersistentOffsets
from lightning_fedq.clients.personal import State
from lightning_fedq.flower.refusals import RefusedError
from lightning_fedq.rounds import Statistics
from lightning_fedq.training.client_evaluation import pass_statistic_to_module

_RATES = re.compile("lr|momentum|dampening|weight_decay")
"""Names of optimiser options that are rates, even where the user has written an integer such as 0."""
_NUMBERS = (bool, int, float)


class RoundInputs(NamedTuple):
    """State and server values that a client needs for a round.

    Args:
        saved: State that the client kept from its earlier rounds.
        algorithm_vector: `(num_parameters,)` vector of the server's half of the local algorithm, or None if
            it sends none.
        groups: Options of the parameter groups, such as learning rates, for each optimiser of the server.
            None if the server sends none.
        trained: Names of the parameters that the server's fit trains now, or None if the server sends none.
        statistic: `(size,)` mean of all clients' statistics, or None before its release.
    """

    saved: State
    algorithm_vector: Tensor | None = None
    groups: list[list[dict[str, Any]]] | None = None
    trained: list[str] | None = None
    statistic: Tensor | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], saved: State) -> RoundInputs:
        """Read the inputs from a message of the server.

        Args:
            fields: Fields of the message by name.
            saved: State that the client kept from its earlier rounds.

        Raises:
            RefusedError: If a field can't be read, or is not of the expected form.
        """
        try:
            groups = trained = None
            if "groups" in fields:
                optimizers = json.loads(fields["groups"])
                groups = [[dict(group) for group in optimizer] for optimizer in optimizers]
            if "trained" in fields:
                trained = [str(name) for name in json.loads(fields["trained"])]
            vector, mean = (_read_vector(fields.get(name)) for name in ("algorithm", "statistic"))
            return cls(saved, vector, groups, trained, mean)
        except (ValueError, TypeError) as error:
            raise RefusedError(
                f"The server's message has unreadable vectors or optimiser settings: {error}"
            ) from error

    def pass_statistic(self, module: pl.LightningModule, statistics: Statistics | None) -> None:
        """Pass the mean of all clients' statistics to the module, if it was released.

        Raises:
            RefusedError: If the client's own settings have no such statistics.
        """
        mean = self.statistic
        if mean is None:
            return
        if statistics is None or len(mean) != statistics.size:
            raise RefusedError(
                f"The server sends a mean of {len(mean)} numbers, but this client's statistics are "
                f"{statistics!r}. Both sides need the same settings."
            )
        pass_statistic_to_module(module, mean)

    def begin_term(self, algorithm: LocalAlgorithm | None, num_parameters: int) -> Correction | None:
        """Return the client's half of the local algorithm, with the vector that the server sent, or None.

        Args:
            algorithm: Local algorithm of the client's settings.
            num_parameters: Number of values that this client trains.

        Raises:
            RefusedError: If the vector's size differs from the number of parameters that this client trains.
        """
        if algorithm is None:
            return None
        term, vector = algorithm.begin(num_parameters), self.algorithm_vector
        if vector is not None and isinstance(term, PersistentOffsets):
            if vector.shape != term.server.shape:
                raise RefusedError(
                    f"The server's vector of {type(algorithm).__name__} has {len(vector)} values, but this "
                    f"client trains {len(term.server)}. Both sides need the same module."
                )
            term.server = vector
        return term

    def copy_options(self, optimizers: Sequence[Any]) -> None:
        """Copy the options of the server's optimisers into the client's.

        Raises:
            RefusedError: If the groups differ, or the server changes an integer option that is not a rate.
        """
        if self.groups is None:
            return
        if [len(groups) for groups in self.groups] != [len(one.param_groups) for one in optimizers]:
            raise RefusedError(
                "The server's optimisers have other parameter groups. Both sides need the same module."
            )
        for optimizer, server_groups in zip(optimizers, self.groups, strict=True):
            for group, server_group in zip(optimizer.param_groups, server_groups, strict=True):
                own_numbers = plain_numbers(group)
                copied = {name: value for name, value in server_group.items() if name in own_numbers}
                for name, value in copied.items():
                    _check_option(name, own_numbers[name], value)
                group.update(copied)


class LaterRound(NamedTuple):
    """Trial of a later round's message at registration: two batches, from the module's initial weights.

    Args:
        has_zero_batches: Whether zeros replace the tensors of the data.
        round: Index of the round, from 0.
    """

    has_zero_batches: bool = False
    round: int = 1


def plain_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that are plain numbers or flags, by name."""
    return {name: value for name, value in group.items() if type(value) in _NUMBERS}


def _read_vector(data: bytes | None) -> Tensor | None:
    """Return the float32 numbers in some bytes. None without bytes."""
    return None if data is None else torch.frombuffer(bytearray(data), dtype=torch.float32)


def _check_option(name: str, own: Any, value: Any) -> None:
    """Refuse an option that is no number, or another count. A count may be the steps of L-BFGS.

    Args:
        name: Name of the option.
        own: Value at this client.
        value: Value that the server sent.
    """
    is_other_count = type(own) is int and value != own and not _RATES.search(name)
    if is_other_count or type(value) not in _NUMBERS:
        raise RefusedError(
            f"Optimiser option {name} is {own} here, but the server sends {str(value)[:40]}. A server may "
            "change rates, not counts."
        )
