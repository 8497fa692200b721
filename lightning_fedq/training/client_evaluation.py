"""Evaluation of models on each client's held-out samples, and the mean of statistics of clients' data.

The mean over a common test set says nothing about clients for whom the model is bad. Here the module's own
`validation_step` runs on every client's held-out samples, on a copy that is dropped. Metrics are summarised
over clients by the mean, the means of the tenth of the clients with the lowest and the highest values, and
the standard deviation. The worst tenth of Li et al., Fair Resource Allocation in Federated Learning, ICLR
2020, is one of the two, and is named if the direction of the metric is known. It is never guessed from the
metric's name. A client is not measured if it has no held-out sample, logs no metric, or its metric is not
defined (NaN, or torchmetrics says so). Such clients count in no summary, and their number is reported.

These numbers depend on clients' data, without noise. They are treated like metrics that clients log in
training (`Federated(client_metrics=...)`): "shared" sends them to the loggers, "local" only to the clients'
own folder of a run. Statistics (`rounds.statistics`) are sent as messages are, and this module passes on
their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
from lightning_fedq.rounds import RoundServer
from lightning_fedq.training.client_metrics import Mode, find_mode
from lightning_fedq.training.rank_group import RankGroup

if TYPE_CHECKING:
    from lightning_fedq.clients.worker import ClientWorker

Model = Literal["global", "personal"]
PREFIX: dict[Model, str] = {"global": "clients", "personal": "personal"}
"""Prefixes of the logged names."""


@dataclass(frozen=True)
class Spread:
    """Summary of one metric over all clients, which count equally.

    Args:
        mean: Mean over clients.
        lowest_decile: Mean over the tenth of the clients with the lowest values, at least one.
        highest_decile: Mean over the tenth with the highest values, at least one.
        std: Standard deviation over clients.
        not_measured: Number of clients without a value, which do not count. If no client has a value, the
            other figures are NaN.
        worst_decile: The lowest or the highest decile, where the direction of the metric is known. None if
            it is not.
    """

    mean: float
    lowest_decile: float
    highest_decile: float
    std: float
    not_measured: int = 0
    worst_decile: float | None = None

    @classmethod
    def summarise(cls, values: Tensor, mode: Mode | None = None) -> Spread:
        """Summarise a metric.

        Args:
            values: Values of the clients, `(clients,)`. NaN for a client without one.
            mode: "max" if larger values are better, "min" if smaller ones are. None if it is not known.
        """
        known = values[~values.isnan()].double()
        lacking = len(values) - len(known)
        if not len(known):
            none = math.nan
            return cls(none, none, none, none, lacking, None if mode is None else none)
        ordered, tenth = known.sort().values, -(-len(known) // 10)
        lowest, highest = float(ordered[:tenth].mean()), float(ordered[-tenth:].mean())
        worst = None if mode is None else lowest if mode == "max" else highest
        return cls(float(known.mean()), lowest, highest, float(known.std(correction=0)), lacking, worst)


@dataclass(frozen=True)
class EvaluatedClients:
    """Measurements of the clients after one round.

    Args:
        round: Round, from 0.
        values: By model and metric, the clients' values, `(clients,)` float64. NaN for a client that was not
            measured. Contains "personal" if there are personalised parameters.
        clients: Clients of the values, if some real clients did not answer. None means all clients.
        modes: Direction of each metric for which it is known, by name.
    """

    round: int
    values: dict[Model, dict[str, Tensor]]
    clients: tuple[int, ...] | None = None
    modes: Mapping[str, Mode] = field(default_factory=dict)

    def spread(self, metric: str, model: Model = "global") -> Spread:
        """Return the summary of a metric.

        Raises:
            KeyError: If no such metric was measured.
        """
        values = self.values.get(model, {})
        if metric not in values:
            available = [
                f"{name} of the {model} model" for model, names in self.values.items() for name in names
            ]
            raise KeyError(f"No metric {metric} of the {model} model, got {', '.join(available)}")
        return Spread.summarise(values[metric], self.modes.get(metric))

    def metrics(self) -> dict[str, float]:
        """Return all summaries by the names under which they are logged, such as `clients/val_acc_mean`.

        The number of clients that were not measured is left out if it is 0, and the worst decile if the
        direction of the metric is not known.
        """
        return {
            f"{PREFIX[model]}/{name}_{kind}": float(value)
            for model, found in self.values.items()
            for name in found
            for kind, value in vars(self.spread(name, model)).items()
            if value is not None and (value or kind != "not_measured")
        }

    def plain(self) -> dict[str, Any]:
        """Return the summaries and every client's values in types of JSON. None if not measured."""
        by_client = {
            f"{PREFIX[model]}/{name}": [none_if_nan(value) for value in values.tolist()]
            for model, found in self.values.items()
            for name, values in found.items()
        }
        some = {} if self.clients is None else {"clients": list(self.clients)}
        summaries = {name: none_if_nan(value) for name, value in self.metrics().items()}
        return {"round": self.round + 1, **summaries, "by_client": by_client, **some}


def none_if_nan(value: float) -> float | None:
    """Return a number, or None if it is NaN."""
    return None if math.isnan(value) else value


def stack_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """Return the values of each metric that a client has logged, `(clients,)` each. NaN if one has not.

    Args:
        rows: Metrics of each client, by name.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


class ClientEvaluator:
    """Measures each client separately, after rounds of one fit.

    Args:
        settings: Rounds after which to measure, and the data.
        parts: Held-out sample indices of each client. Empty if each client has a data set for it.
        loader: Returns the present loader of all clients.
        seed_of: Returns the seed of a client's measurement after a round, `(round, client)`.
        ranks: Group of the ranks, which measure a share of the clients each. None measures all clients here.

    Attributes:
        exact: Are exact values logged?
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

    def is_due(self, round: int, is_last: bool) -> bool:
        """Return whether clients are measured after this round, as after the last one."""
        return is_last or (round + 1) % self._settings.every_n_rounds == 0

    def measure(self, round: int) -> EvaluatedClients:
        """Measure the global model, and each client's model if there are personalised parameters.

        Raises:
            ValueError: If no client logs a metric.
        """
        models: list[Model] = ["global", "personal"] if self._worker.vector.personal.names else ["global"]
        return self._evaluated(round, {model: self._measure_all(model, round) for model in models})

    def _evaluated(
        self, round: int, values: dict[Model, dict[str, Tensor]], clients: tuple[int, ...] | None = None
    ) -> EvaluatedClients:
        """Return measurements with the direction of each metric that settings or callbacks tell."""
        modes: dict[str, Mode] = {}
        for name in {name for metrics in values.values() for name in metrics}:
            kinds = [f"{name}_{kind.name}" for kind in fields(Spread)]
            summaries = (f"{prefix}/{kind}" for prefix in PREFIX.values() for kind in kinds)
            if mode := self._settings.modes.get(name) or find_mode(self._trainer, name, *summaries):
                modes[name] = mode
        return EvaluatedClients(round, values, clients, modes)

    @property
    def _num_clients(self) -> int:
        of_each = self._settings.client_datasets
        return len(self._parts) if of_each is None else len(of_each)

    def check_sizes(self) -> None:
        """Report, before the first round, the clients without held-out samples.

        Raises:
            ValueError: If no client has held-out samples.
        """
        of_each = self._settings.client_datasets
        datasets = self._parts if of_each is None else of_each
        empty = [client for client, part in enumerate(datasets) if hasattr(part, "__len__") and not len(part)]
        if len(empty) == len(datasets):
            raise ValueError(
                "evaluate_clients has nothing to measure on, because no client has a held-out sample. Use "
                "e.g. ClientEvaluation(held_out=0.2)"
            )
        if empty:
            rank_zero_info(f"Clients {in_short(empty)} have no held-out samples, so they are not measured")

    def _measure_all(self, model: Model, round: int) -> dict[str, Tensor]:
        rank, ranks = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        rows = {}
        for client in range(rank, self._num_clients, ranks):
            seed, is_personal = self._seed_of(round, client), model == "personal"
            rows[client] = self._worker.evaluate(client, self._batches(client), seed, is_personal)
        self._worker.fit.end_round()
        if self._ranks is not None:
            shares = self._ranks.gather(rows, f"the measurement of the {model} model")
            rows = {client: row for share in shares for client, row in share.items()}
        values = stack_metrics([rows[client] for client in range(self._num_clients)])
        if not values:
            raise ValueError(
                "evaluate_clients needs a validation_step that logs metrics, but no client has logged any. "
                "Use self.log for metrics to measure"
            )
        return values

    def _batches(self, client: int) -> Iterator[tuple[Any, int]]:
        """Yield the batches of a client's held-out samples, each with its number of samples."""
        loader, held_out = self._loader(), self._settings.held_out
        max_batches = int(self._trainer.fast_dev_run) or None
        if isinstance(held_out, int | float):
            for indices in torch.split(self._parts[client], loader.batch_size)[:max_batches]:
                yield loader.fetch(indices), len(indices)
            return
        of_each = self._settings.client_datasets
        data: Any = self._settings.partitioned if of_each is None else of_each[client]
        if of_each is None:
            part = Subset(as_tensors(self._settings.partitioned_dataset), self._parts[client].tolist())
            own = isinstance(data, DataLoader) and data.batch_size is not None
            data = DataLoader(part, data.batch_size, collate_fn=data.collate_fn) if own else part
        if not isinstance(data, DataLoader):  # batched as the training data are
            data = DataLoader(data, batch_size=loader.batch_size, collate_fn=loader.collate_fn)
        for batch in islice(data, max_batches):
            yield batch, pl.utilities.data.extract_batch_size(batch)


def describe_evaluation_outputs(evaluations: Sequence[EvaluatedClients], shared: bool) -> str:
    """Describe, for the privacy page, where measurements of clients were written. "" if there are none."""
    if not evaluations:
        return ""
    if not evaluations[-1].values:
        return "Not released: metrics of models on clients' held-out samples. Each real client has its own."
    if shared:
        names = ", ".join(f"`{name}`" for name in evaluations[-1].metrics())
        return (
            f"Metrics of models on clients' held-out samples, without noise: {names}, in loggers and tables."
        )
    names = ", ".join(f"`{name}`" for name in evaluations[-1].values["global"])
    return (
        f"Not released: {names} on clients' held-out samples. They are in `clients/` of this folder only, "
        "because this is a simulation, which trains the clients, too. Do not share `clients/`."
    )


# ---- rounds of statistics ----------------------------------------------------------------------------------


def check_released(engine: RoundServer, aborted: str) -> None:
    """Refuse to train after rounds of statistics of which none has released a mean.

    Args:
        aborted: Why the last of these rounds was aborted. "" if not known.

    Raises:
        RuntimeError: If the rounds of statistics are over and none has released a mean.
    """
    statistics = engine.statistics
    if statistics is None or engine.reads_statistics or engine.released:
        return
    why = f": {aborted}" if aborted else ""
    raise RuntimeError(
        f"None of {statistics.rounds} rounds of statistics released a mean{why}. Use larger cohorts, "
        f"tolerate more dropouts, or repeat with Statistics(..., rounds={statistics.rounds + 1})"
    )


def pass_statistic_to_module(module: Any, mean: Tensor) -> None:
    """Pass the released mean to the module's hook, which may set buffers or initialise parameters with it."""
    with torch.no_grad():
        module.on_statistics(mean.to(module.device, torch.float32))


def release(module: pl.LightningModule, engine: RoundServer) -> None:
    """Pass the mean to the module after the last round of statistics, and report its noise."""
    if (mean := engine.statistic) is None:
        return
    pass_statistic_to_module(module, mean)
    std = engine.statistic_std
    noise = "their noise is not known" if std is None else f"noise of {std:.2g} each"
    rank_zero_info(f"Statistics: {len(mean)} numbers released, {noise}")


def describe_statistics_outputs(engine: RoundServer) -> str:
    """Describe, for the privacy page, the released statistics. "" if there are none."""
    if engine.statistics is None or not engine.released:
        return ""
    return (
        f"Released with the noise of a round, and charged as a round, {len(engine.released)} times: the "
        f"mean of {engine.statistics.size} numbers of each client's data (`client_statistics`)."
    )
