"""Evaluation by client: the global model, and each client's own, on what every client holds out.

A mean over a common test set says nothing of the clients for whom the model is bad. Here the module's own
`validation_step` runs on every client's held-out samples, on a copy that is dropped, and what it logs is kept
by client: mean, mean of the worst tenth of the clients, and standard deviation over clients (Li et al., Fair
Resource Allocation in Federated Learning, ICLR 2020, report these three).

These numbers follow from clients' data without noise. They go where what clients log in training goes
(`Federated(client_metrics=...)`): with "shared" to the loggers, with "local" nowhere but to the clients' own
folder of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedq._lightning import pl
from lightning_fedq.clients.evaluation import ClientEvaluation
from lightning_fedq.clients.worker import ClientWorker
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.reports.runs import mode_of
from lightning_fedq.training.rank_group import RankGroup
from lightning_fedq.training.records import log_values

Model = Literal["global", "personal"]
PREFIX: dict[Model, str] = {"global": "clients", "personal": "personal"}
"""What names of logged figures begin with."""


@dataclass(frozen=True)
class Spread:
    """One metric over all clients, each counted once.

    Args:
        mean: Mean over clients.
        worst_decile: Mean over the worst tenth of the clients, at least one.
        std: Standard deviation over clients.
    """

    mean: float
    worst_decile: float
    std: float

    @classmethod
    def of(cls, name: str, values: Tensor) -> Spread:
        """Summarise a metric.

        Args:
            name: Name of the metric; losses and errors are worse when larger.
            values: `(clients,)`.
        """
        values = values.double()
        worst = values.sort(descending=mode_of(name) == "min").values[: max(1, -(-len(values) // 10))]
        return cls(float(values.mean()), float(worst.mean()), float(values.std(correction=0)))


@dataclass(frozen=True)
class EvaluatedClients:
    """Measurements after one round.

    Args:
        round: Round, from 0.
        values: By model and metric, one value of each client, `(clients,)` float64. "personal" is there
            where clients keep something for themselves.
        clients: Clients of the values, where real ones did not all answer. None is everybody.
    """

    round: int
    values: dict[Model, dict[str, Tensor]]
    clients: tuple[int, ...] | None = None

    def spread(self, metric: str, model: Model = "global") -> Spread:
        """Summary of a metric.

        Args:
            metric: Name of the metric, as `validation_step` logs it.
            model: Model that was measured.

        Raises:
            KeyError: If there is none of this name.
        """
        found = self.values.get(model, {})
        if metric not in found:
            known = [f"{name} of the {model} model" for model, names in self.values.items() for name in names]
            raise KeyError(f"clients did not measure {metric} of the {model} model, but {', '.join(known)}")
        return Spread.of(metric, found[metric])

    def metrics(self) -> dict[str, float]:
        """All summaries by the names under which they are logged, such as `clients/val_acc_mean`."""
        return {
            f"{PREFIX[model]}/{name}_{kind}": value
            for model, found in self.values.items()
            for name in found
            for kind, value in vars(self.spread(name, model)).items()
        }

    def log(self, trainer: pl.Trainer, exact: bool) -> None:
        """Log all summaries, where that may be."""
        if exact and (values := self.metrics()):
            log_values(trainer, values)

    def plain(self) -> dict[str, Any]:
        """In the types of JSON: the summaries, and every client's value."""
        by_client = {
            f"{PREFIX[model]}/{name}": values.tolist()
            for model, found in self.values.items()
            for name, values in found.items()
        }
        some = {} if self.clients is None else {"clients": list(self.clients)}
        return {"round": self.round + 1, **self.metrics(), "by_client": by_client, **some}


class ClientEvaluator:
    """Measures after rounds of one fit: each client by itself, whoever else is measured.

    Args:
        settings: When, and on what.
        trainer: The user's Trainer.
        worker: Measures a client.
        parts: Held-out sample indices of each client; empty where clients have data sets for it.
        loader: Returns the loader of all clients.
        seed_of: Returns the seed of a client's measurement after a round, `(round, client)`.
        ranks: Group of the ranks that measure a share of the clients each; None measures all.

    Attributes:
        exact: Whether exact values are logged.
    """

    exact = False

    def __init__(
        self,
        settings: ClientEvaluation,
        trainer: Any,
        worker: ClientWorker,
        parts: Sequence[Tensor],
        loader: Callable[[], ClientLoader],
        seed_of: Callable[[int, int], int],
        ranks: RankGroup | None = None,
    ) -> None:
        self._settings, self._trainer, self._worker = settings, trainer, worker
        self._parts, self._loader, self._seed_of, self._ranks = list(parts), loader, seed_of, ranks

    def is_due(self, round: int) -> bool:
        """Are clients measured after this round?"""
        last = self._trainer.current_epoch + 1 == self._trainer.max_epochs
        return last or (round + 1) % self._settings.every_n_rounds == 0

    def measure(self, round: int) -> EvaluatedClients:
        """Measure the present global model and, where clients keep something, each client's own.

        Args:
            round: Round that has ended.

        Raises:
            ValueError: If clients log different metrics, or none.
        """
        models: list[Model] = ["global", "personal"] if self._worker.vector.own.names else ["global"]
        return EvaluatedClients(round, {model: self._of_all(model, round) for model in models})

    @property
    def _num_clients(self) -> int:
        held_out = self._settings.held_out
        return len(self._parts) if isinstance(held_out, int | float) else len(held_out)

    def _of_client(self, client: int, model: Model, round: int) -> dict[str, float]:
        batches, seed = self._batches(client), self._seed_of(round, client)
        return self._worker.evaluate(client, batches, seed, personal=model == "personal")

    def _of_all(self, model: Model, round: int) -> dict[str, Tensor]:
        rank, ranks = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        found = {c: self._of_client(c, model, round) for c in range(rank, self._num_clients, ranks)}
        self._worker.fit.end_round()
        if self._ranks is not None:
            shares = self._ranks.gather(found, f"the measurement of the {model} model")
            found = {client: row for share in shares for client, row in share.items()}
        rows = [found[client] for client in range(self._num_clients)]
        names = rows[0].keys()
        if not names or any(row.keys() != names for row in rows):
            odd = next((c for c, row in enumerate(rows) if row.keys() != names), 0)
            raise ValueError(
                "evaluate_clients needs a validation_step that logs the same metrics for every client, got "
                f"{sorted(names)} of client 0 and {sorted(rows[odd])} of client {odd}"
            )
        return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in names}

    def _batches(self, client: int) -> Iterator[tuple[Any, int]]:
        """Batches of a client's held-out samples, and how many samples each has."""
        loader, held_out = self._loader(), self._settings.held_out
        most = int(self._trainer.fast_dev_run) or None
        if isinstance(held_out, int | float):
            for indices in torch.split(self._parts[client], loader.batch_size)[:most]:
                yield loader.fetch(indices), len(indices)
            return
        given = held_out[client]
        if not isinstance(given, DataLoader):  # batched as the training data are
            given = DataLoader(given, batch_size=loader.batch_size, collate_fn=loader.collate_fn)
        for batch in islice(given, most):
            yield batch, pl.utilities.data.extract_batch_size(batch)


def where_it_went(evaluations: Sequence[EvaluatedClients], shared: bool) -> str:
    """Where measurements by client went, as a line of a privacy page. "" if there are none.

    Args:
        evaluations: Measurements of the run.
        shared: Whether they were logged.
    """
    if not evaluations:
        return ""
    if not evaluations[-1].values:
        return "Not out: what models score on clients' held-out samples. Each real client has its own."
    if shared:
        names = ", ".join(f"`{name}`" for name in evaluations[-1].metrics())
        return (
            f"What models score on clients' held-out samples, without noise: {names}, in loggers and tables."
        )
    names = ", ".join(f"`{name}`" for name in evaluations[-1].values["global"])
    return (
        f"Not out: {names} on clients' held-out samples. They are in `clients/` of this folder only, because "
        "this is a simulation that plays the clients, too; do not hand it on."
    )
