"""Setting for the evaluation by client: the held-out data, and the rounds in which they are evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import is_overridden, pl


@dataclass(frozen=True)
class ClientEvaluation:
    """Evaluation of models on every client's own held-out samples, after a round.

    Args:
        held_out: One of three kinds. A fraction in (0, 1) holds out this part of every client's samples. One
            data set or loader is partitioned by the rule of the training data. A list has one data set or
            loader per client, and data sets are batched like the training data. A client with an empty one is
            not evaluated.
        every_n_rounds: Number of rounds between two evaluations, >= 1. The last round of `max_epochs` is
            always evaluated.
        modes: Direction of metrics by name: "max" if a larger value is better, "min" if a smaller one is. A
            ModelCheckpoint or EarlyStopping that watches the metric also tells it. Only a metric with a
            direction has a worst decile.

    Raises:
        ValueError: If a number or a direction is out of its range, or a data set without length is to be
            partitioned.

    Examples:
        >>> ClientEvaluation(held_out=0.2, every_n_rounds=5)  # Federated(..., evaluate_clients=this)
        ClientEvaluation(held_out=0.2, every_n_rounds=5)
    """

    held_out: float | Dataset[Any] | DataLoader[Any] | Sequence[Dataset[Any] | DataLoader[Any]] = 0.2
    every_n_rounds: int = 1
    modes: Mapping[str, Literal["max", "min"]] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.held_out, int | float) and not 0.0 < self.held_out < 1.0:
            raise ValueError(f"held_out must be a fraction in (0, 1), got {self.held_out}")
        if self.partitioned is not None and not hasattr(self.partitioned_dataset, "__len__"):
            raise ValueError(
                "held_out must have a length to be partitioned, got a stream "
                f"({type(self.partitioned).__name__}). "
                "Use a map-style data set, or a list with one data set per client."
            )
        if self.every_n_rounds < 1:
            raise ValueError(f"every_n_rounds must be >= 1, got {self.every_n_rounds}")
        if wrong := {name: mode for name, mode in self.modes.items() if mode not in ("max", "min")}:
            raise ValueError(f"modes must be 'max' or 'min' by metric, got {wrong}")

    @property
    def fraction(self) -> float | None:
        """Held-out fraction of every client's samples. None if `held_out` is data."""
        return float(self.held_out) if isinstance(self.held_out, int | float) else None

    @property
    def partitioned(self) -> DataLoader[Any] | Dataset[Any] | None:
        """Data that are partitioned by the rule of the training data. None for a fraction or a list."""
        return None if isinstance(self.held_out, int | float | Sequence) else self.held_out

    @property
    def partitioned_dataset(self) -> Any:
        """Data set of `partitioned`."""
        return self.partitioned.dataset if isinstance(self.partitioned, DataLoader) else self.partitioned

    @property
    def client_datasets(self) -> Sequence[Dataset[Any] | DataLoader[Any]] | None:
        """Data of each client. None for a fraction or partitioned data."""
        return self.held_out if isinstance(self.held_out, Sequence) else None

    def identity(self) -> dict[str, str]:
        """Return the held-out fraction for the identity of the training data. Empty without a fraction."""
        return {} if self.fraction is None else {"held_out": str(self.fraction)}

    def check(self, module: pl.LightningModule, num_clients: int, dropped: bool) -> None:
        """Check that the evaluation is possible in this fit.

        Args:
            module: Module whose `validation_step` runs.
            num_clients: Number of clients.
            dropped: Whether clients' metrics are dropped (`client_metrics='none'`).

        Raises:
            ValueError: If the module has no `validation_step`, if data of a client are missing, or if metrics
                are dropped.
        """
        if not is_overridden("validation_step", module, pl.LightningModule):
            raise ValueError(
                "evaluate_clients needs a validation_step, but "
                f"{type(module).__name__} has none. Write one that logs the metrics."
            )
        datasets = self.client_datasets
        if datasets is not None and len(datasets) != num_clients:
            raise ValueError(f"held_out has {len(datasets)} data sets, expected num_clients = {num_clients}")
        if lacking := [client for client, data in enumerate(datasets or ()) if data is None]:
            raise ValueError(f"held_out has no data of clients {lacking[:10]}. Give every client a data set.")
        if dropped:
            raise ValueError(
                "client_metrics='none' drops the metrics of evaluate_clients. "
                "Use client_metrics='local', or leave evaluate_clients out."
            )
