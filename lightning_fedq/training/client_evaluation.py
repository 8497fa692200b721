"""Measured on clients: models on what each holds out, and statistics of their data before the training.

A mean over a common test set says nothing of the clients for whom the model is bad. Here the module's own
`validation_step` runs on every client's held-out samples, on a copy that is dropped, and what it logs is kept
by client: mean, mean of the worst tenth of the clients, and standard deviation over clients (Li et al., Fair
Resource Allocation in Federated Learning, ICLR 2020, report these three). A client without a held-out sample,
one whose metric is not defined (NaN, or torchmetrics says so) and one that logs none is not measured: it
counts in none of the three, and how many these are stands beside them.

These numbers follow from clients' data without noise. They go where what clients log in training goes
(`Federated(client_metrics=...)`): with "shared" to the loggers, with "local" nowhere but to the clients' own
folder of a run. Statistics (`rounds.statistics`) travel as messages do; here is what becomes
of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_fedq._lightning import pl, rank_zero_info
from lightning_fedq.clients.evaluation import ClientEvaluation
from lightning_fedq.data.columns import as_tensors
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.reports.runs import metric_mode
from lightning_fedq.rounds import RoundServer
from lightning_fedq.training.client_metrics import log_values
from lightning_fedq.training.rank_group import RankGroup

if TYPE_CHECKING:
    from lightning_fedq.clients.worker import ClientWorker

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
        not_measured: Clients without a value, whom the three leave out; of none of them all three are NaN.
    """

    mean: float
    worst_decile: float
    std: float
    not_measured: int = 0

    @classmethod
    def summarise(cls, name: str, values: Tensor) -> Spread:
        """Summarise a metric.

        Args:
            name: Name of the metric; losses and errors are worse when larger.
            values: `(clients,)`, NaN where there is none.
        """
        known = values[~values.isnan()].double()
        lacking = len(values) - len(known)
        if not len(known):
            return cls(math.nan, math.nan, math.nan, lacking)
        worst = known.sort(descending=metric_mode(name) == "min").values[: max(1, -(-len(known) // 10))]
        return cls(float(known.mean()), float(worst.mean()), float(known.std(correction=0)), lacking)


@dataclass(frozen=True)
class EvaluatedClients:
    """Measurements after one round.

    Args:
        round: Round, from 0.
        values: By model and metric, one value of each client, `(clients,)` float64, NaN where it was not
            measured. "personal" is there where clients keep something for themselves.
        clients: Clients of the values, where real ones did not all answer. None is everybody.
    """

    round: int
    values: dict[Model, dict[str, Tensor]]
    clients: tuple[int, ...] | None = None

    def spread(self, metric: str, model: Model = "global") -> Spread:
        """Summary of a metric.

        Raises:
            KeyError: If there is none of this name.
        """
        found = self.values.get(model, {})
        if metric not in found:
            known = [f"{name} of the {model} model" for model, names in self.values.items() for name in names]
            raise KeyError(f"clients did not measure {metric} of the {model} model, but {', '.join(known)}")
        return Spread.summarise(metric, found[metric])

    def metrics(self) -> dict[str, float]:
        """All summaries by the names under which they are logged, such as `clients/val_acc_mean`.

        How many were not measured is there where somebody was not.
        """
        return {
            f"{PREFIX[model]}/{name}_{kind}": float(value)
            for model, found in self.values.items()
            for name in found
            for kind, value in vars(self.spread(name, model)).items()
            if value or kind != "not_measured"
        }

    def log(self, trainer: pl.Trainer, exact: bool) -> None:
        """Log all summaries, where that may be."""
        if exact and (values := self.metrics()):
            log_values(trainer, values)

    def plain(self) -> dict[str, Any]:
        """In the types of JSON: the summaries, and every client's value, None where it was not measured."""
        by_client = {
            f"{PREFIX[model]}/{name}": [none_if_nan(value) for value in values.tolist()]
            for model, found in self.values.items()
            for name, values in found.items()
        }
        some = {} if self.clients is None else {"clients": list(self.clients)}
        summaries = {name: none_if_nan(value) for name, value in self.metrics().items()}
        return {"round": self.round + 1, **summaries, "by_client": by_client, **some}


def none_if_nan(value: float) -> float | None:
    """A number, or None where it was not measured."""
    return None if math.isnan(value) else value


def stack_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """Values `(clients,)` of each metric that some client has logged, NaN where one has not.

    Args:
        rows: What each client has logged, by name.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


class ClientEvaluator:
    """Measures after rounds of one fit: each client by itself, whoever else is measured.

    Args:
        settings: When, and on what.
        parts: Held-out sample indices of each client; empty where each has a data set for it.
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

        Raises:
            ValueError: If no client logs a metric.
        """
        models: list[Model] = ["global", "personal"] if self._worker.vector.personal.names else ["global"]
        return EvaluatedClients(round, {model: self._measure_all(model, round) for model in models})

    @property
    def _num_clients(self) -> int:
        of_each = self._settings.client_datasets
        return len(self._parts) if of_each is None else len(of_each)

    def check_sizes(self) -> None:
        """Say, before the first round, who has nothing to be measured on.

        Raises:
            ValueError: If that is everybody.
        """
        of_each = self._settings.client_datasets
        given = self._parts if of_each is None else of_each
        empty = [client for client, part in enumerate(given) if hasattr(part, "__len__") and not len(part)]
        if len(empty) == len(given):
            raise ValueError(
                "evaluate_clients has nothing to measure on, because no client has a held-out sample; use "
                "data that some have, e.g. ClientEvaluation(held_out=0.2)"
            )
        if empty:
            rank_zero_info(f"clients {in_short(empty)} have no held-out samples and are not measured")

    def _measure_client(self, client: int, model: Model, round: int) -> dict[str, float]:
        batches, seed = self._batches(client), self._seed_of(round, client)
        return self._worker.evaluate(client, batches, seed, personal=model == "personal")

    def _measure_all(self, model: Model, round: int) -> dict[str, Tensor]:
        rank, ranks = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        found = {c: self._measure_client(c, model, round) for c in range(rank, self._num_clients, ranks)}
        self._worker.fit.end_round()
        if self._ranks is not None:
            shares = self._ranks.gather(found, f"the measurement of the {model} model")
            found = {client: row for share in shares for client, row in share.items()}
        values = stack_metrics([found[client] for client in range(self._num_clients)])
        if not values:
            raise ValueError(
                "evaluate_clients needs a validation_step that logs metrics, and no client has logged any; "
                "use self.log for what is to be measured"
            )
        return values

    def _batches(self, client: int) -> Iterator[tuple[Any, int]]:
        """Batches of a client's held-out samples, and how many samples each has."""
        loader, held_out = self._loader(), self._settings.held_out
        most = int(self._trainer.fast_dev_run) or None
        if isinstance(held_out, int | float):
            for indices in torch.split(self._parts[client], loader.batch_size)[:most]:
                yield loader.fetch(indices), len(indices)
            return
        of_each = self._settings.client_datasets
        given: Any = self._settings.partitioned if of_each is None else of_each[client]
        if of_each is None:
            part = Subset(as_tensors(self._settings.partitioned_dataset), self._parts[client].tolist())
            own = isinstance(given, DataLoader) and given.batch_size is not None
            given = DataLoader(part, given.batch_size, collate_fn=given.collate_fn) if own else part
        if not isinstance(given, DataLoader):  # batched as the training data are
            given = DataLoader(given, batch_size=loader.batch_size, collate_fn=loader.collate_fn)
        for batch in islice(given, most):
            yield batch, pl.utilities.data.extract_batch_size(batch)


def describe_evaluation_outputs(evaluations: Sequence[EvaluatedClients], shared: bool) -> str:
    """Where measurements by client went, as a line of a privacy page. "" if there are none."""
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


# ---- rounds of statistics ----------------------------------------------------------------------------------


def check_released(engine: RoundServer, aborted: str) -> None:
    """Refuse to train on statistics that no round has released.

    Args:
        aborted: Why the last one of them was aborted. "" if that is not known.

    Raises:
        RuntimeError: If their rounds are over, and none was released.
    """
    statistics = engine.statistics
    if statistics is None or engine.reads_statistics or engine.released:
        return
    why = f": {aborted}" if aborted else ""
    raise RuntimeError(
        f"none of {statistics.rounds} rounds of statistics has released a mean{why}; they stay charged, and "
        "on_statistics was never called. Ask more clients or allow more of them to be silent, or repeat: "
        f"Statistics(..., rounds={statistics.rounds + 1}) is the mean of those that are released"
    )


def pass_statistic_to_module(module: Any, mean: Tensor) -> None:
    """Hand a released mean to the module, which keeps it in buffers or begins its parameters with it."""
    with torch.no_grad():
        module.on_statistics(mean.to(module.device, torch.float32))


def release(module: pl.LightningModule, engine: RoundServer) -> None:
    """After the last round of statistics: hand the mean to the user's module, and say how exact it is."""
    if (mean := engine.statistic) is None:
        return
    pass_statistic_to_module(module, mean)
    std = engine.statistic_std
    noise = "their noise is not known" if std is None else f"noise of {std:.2g} each"
    rank_zero_info(f"statistics: {len(mean)} numbers released, {noise}")


def describe_statistics_outputs(engine: RoundServer) -> str:
    """Line of a privacy page on what rounds of statistics have let out. "" if nothing."""
    if engine.statistics is None or not engine.released:
        return ""
    return (
        f"Released with the noise of a round and charged as one, {len(engine.released)} times: the mean of "
        f"{engine.statistics.size} numbers of each client's data (`client_statistics`)."
    )
