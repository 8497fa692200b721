"""Metrics that clients log while they train, on their way to loggers, to files of their own, or nowhere.

Clients that share log into the round's results, as batches do in an ordinary training. Otherwise every client
logs into results of its own, which its own training may read, and which are dropped with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fedq.training.client_metrics import ClientMetricsChoice, check_spikes, forks, monitors_of
from lightning_fedq.training.rank_group import RankGroup
from lightning_fedq.training.round_loop import told_results


class Logged(NamedTuple):
    """Record of what one rank's clients have logged in a round.

    Args:
        values: For each of Lightning's results its sum or extreme so far and the size of its batches, in
            plain numbers.
        names: Names of all metrics so far, in order.
    """

    values: dict[Any, tuple[Any, Any]]
    names: dict[str, None]


class ClientMetrics:
    """Collects what clients log.

    Args:
        choice: "shared" logs as usual, "none" drops, "local" keeps for `take` and logs nothing.
        trainer: The user's Trainer, in its fit.
        ranks: The ranks that the clients are spread over, where there are several.

    Attributes:
        names: Names of what clients have logged, in order.
        keep: Whether somebody takes the clients' values; else they are dropped at once.
    """

    def __init__(self, choice: ClientMetricsChoice, trainer: Any, ranks: RankGroup | None = None) -> None:
        self.choice, self.keep = choice, False
        self.names: dict[str, None] = {}
        self._trainer, self._ranks = trainer, ranks
        self._elsewhere: set[str] = set()
        self._checked: set[str] = set()
        self._sums: dict[int, dict[str, tuple[float, int]]] = {}
        self._shared: dict[Any, Any] = {}
        self._results = told_results(True, lambda name, value: None, trainer.strategy.reduce)
        if self.shared:
            trainer.fit_loop.epoch_loop._results = self._results

    @property
    def shared(self) -> bool:
        """Does it all go where it would go anyway?"""
        return self.choice == "shared"

    def elsewhere(self, name: str, value: Any) -> None:
        """Note that validation logs a metric, which may be watched then."""
        self._elsewhere.add(name)

    def check_watched(self) -> None:
        """Refuse, before anybody trains, what decides by metrics that clients are known to log.

        Raises:
            ValueError: Naming who watches what.
        """
        if not self.shared:
            check_spikes(self._trainer)
        for name in self.names:
            self._check(name)

    def _check(self, name: str) -> None:
        if name in self._checked:
            return
        self._checked.add(name)
        if self.choice != "shared":
            why = f"and which stays with them (client_metrics={self.choice!r})"
            cure = ", or let it out without noise by Federated(client_metrics='shared')"
        elif self._ranks is not None:
            why, cure = "each rank those of its own clients", ""
        else:
            return
        for who, monitor in monitors_of(self._trainer):
            if monitor in forks(name) and monitor not in self._elsewhere:
                raise ValueError(
                    f"{who} watches {monitor!r}, which clients log in training, {why}; watch a metric of the "
                    f"validation{cure}"
                )

    # ---- where clients log --------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Forget what nobody has taken of the last round."""
        self._sums = {}

    def attach(self, trainer: Any, clients: tuple[int, ...]) -> None:
        """Let a client's Trainer log where it is to.

        Args:
            trainer: The client's, or a stack's.
        """
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        if not self.shared:
            loop._results = told_results(True, partial(self._of_client, clients))
            return
        home = self._trainer
        loop._results = self._results
        self._results.tell = self._of_round
        connector._callback_metrics = home._logger_connector._callback_metrics
        connector._logged_metrics = home._logger_connector._logged_metrics
        connector._progress_bar_metrics = home._logger_connector._progress_bar_metrics
        connector._first_loop_iter = False  # or the first batch would forget what others have logged

    def detach(self) -> None:
        """Clients log no more in this round."""
        self._results.tell = lambda name, value: None

    def _of_round(self, name: str, value: Any) -> None:
        if self._ranks is not None and isinstance(value, nn.Module):
            raise ValueError(
                f"{name!r} is a metric object that clients update in training, and every rank's own has seen "
                "its own clients only; log the metric's value of each batch, leave it to the validation, or "
                "train in one process (devices=1)"
            )
        self.names.setdefault(name)
        self._check(name)

    def _of_client(self, clients: tuple[int, ...], name: str, value: Any) -> None:
        self.names.setdefault(name)
        self._check(name)
        if isinstance(value, nn.Module):
            value = getattr(value, "_forward_cache", None)
        if len(clients) == 1 and value is not None:
            self._add(name, clients, [value])

    def keep_stack(self, clients: tuple[int, ...], name: str, values: Tensor) -> None:
        """Keep the values of a stack, `(clients, ...)`, before they are reduced."""
        if not self.shared and len(clients) == len(values):
            self._add(name, clients, values.detach().tolist())

    def _add(self, name: str, clients: tuple[int, ...], values: Any) -> None:
        if not self.keep or self.choice != "local":
            return
        for client, value in zip(clients, values, strict=True):
            own = self._sums.setdefault(client, {})
            total, count = own.get(name, (0.0, 0))
            number = float(value.detach() if isinstance(value, Tensor) else value)
            own[name] = (total + number, count + 1)

    # ---- ranks --------------------------------------------------------------------------------------

    def of_rank(self) -> Logged | None:
        """Record of what this rank's clients have logged in a round. None if nothing is shared."""
        self._shared = {}
        if not self.shared:
            return None
        self._shared = {
            key: result
            for key, result in self._results.items()
            if result.meta.name in self.names and result.meta.on_epoch and not result.has_reset
        }
        own = {
            key: (_plain(result.value), _plain(result.cumulated_batch_size))
            for key, result in self._shared.items()
        }
        return Logged(own, self.names)

    def of_all_ranks(self, everybody: Sequence[Logged | None]) -> None:
        """Let what clients have logged in a round be that of all ranks: its mean, or what reduces it.

        A rank none of whose clients has logged a metric goes without; rank 0 has clients if any rank has.
        """
        logged = [part for part in everybody if part is not None]
        for part in logged:
            self.names |= part.names
        for key, result in self._shared.items():
            values = [part.values[key] for part in logged if key in part.values]
            meta = result.meta
            both = torch.stack([torch.as_tensor(value).to(result.value) for value, _ in values])
            extreme = both.amax(0) if meta.is_max_reduction else both.amin(0)
            result.value = extreme if meta.is_max_reduction or meta.is_min_reduction else both.sum(0)
            size = torch.as_tensor(sum(size for _, size in values))
            result.cumulated_batch_size = size.to(result.cumulated_batch_size)
            result._computed = None

    def take(self) -> dict[int, dict[str, float]]:
        """Metrics that each client has logged since the round began: the mean of each over its batches."""
        taken = {
            client: {name: total / count for name, (total, count) in own.items()}
            for client, own in self._sums.items()
        }
        if self._ranks is not None:
            everybody = self._ranks.gather((taken, self.names), "what stays with clients")
            for others, names in everybody:
                taken |= others
                self.names |= names
        self._sums = {}
        return taken


def _plain(value: Any) -> Any:
    """Numbers in place of a tensor, which takes a quarter of a millisecond to pickle."""
    return value.tolist() if isinstance(value, Tensor) else value
