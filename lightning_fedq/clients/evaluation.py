"""Setting of the evaluation by client: what is held out, and when it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import is_overridden, pl


@dataclass(frozen=True)
class ClientEvaluation:
    """Measure models on every client's own held-out samples, after a round.

    Args:
        held_out: Fraction in (0, 1) of every client's samples, which are not trained on; or one data set (or
            loader), dealt out by the rule of the training's; or for each client, in their order, a data set,
            batched as the training data are, or a loader. A client with an empty one is not measured.
        every_n_rounds: >= 1. The last round of `max_epochs` is measured, too.

    Raises:
        ValueError: If a number is out of its range.

    Example:
        >>> ClientEvaluation(held_out=0.2, every_n_rounds=5)  # Federated(..., evaluate_clients=this)
        ClientEvaluation(held_out=0.2, every_n_rounds=5)
    """

    held_out: float | Dataset[Any] | DataLoader[Any] | Sequence[Dataset[Any] | DataLoader[Any]] = 0.2
    every_n_rounds: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.held_out, int | float) and not 0.0 < self.held_out < 1.0:
            raise ValueError(f"held_out must be a fraction in (0, 1), got {self.held_out}")
        if self.partitioned is not None and not hasattr(self.partitioned_dataset, "__len__"):
            raise ValueError(
                "held_out must have a length to be dealt out, got a stream "
                f"({type(self.partitioned).__name__}); "
                "give a map-style data set, or a list of what each client has"
            )
        if self.every_n_rounds < 1:
            raise ValueError(f"every_n_rounds must be >= 1, got {self.every_n_rounds}")

    @property
    def fraction(self) -> float | None:
        """Fraction of every client's samples. None where clients have data sets to be measured on."""
        return float(self.held_out) if isinstance(self.held_out, int | float) else None

    @property
    def partitioned(self) -> DataLoader[Any] | Dataset[Any] | None:
        """Data that are dealt out by the training's rule. None where something else is measured on."""
        return None if isinstance(self.held_out, int | float | Sequence) else self.held_out

    @property
    def partitioned_dataset(self) -> Any:
        """The data set of `partitioned`."""
        return self.partitioned.dataset if isinstance(self.partitioned, DataLoader) else self.partitioned

    @property
    def client_datasets(self) -> Sequence[Dataset[Any] | DataLoader[Any]] | None:
        """Data that each client has. None where they are dealt out."""
        return self.held_out if isinstance(self.held_out, Sequence) else None

    def identity(self) -> dict[str, str]:
        """Samples that are not trained on, in words."""
        return {} if self.fraction is None else {"held_out": str(self.fraction)}

    def check(self, module: pl.LightningModule, num_clients: int, dropped: bool) -> None:
        """Refuse what can't be measured.

        Args:
            dropped: Is what clients measure dropped?

        Raises:
            ValueError: With the cure.
        """
        if not is_overridden("validation_step", module, pl.LightningModule):
            raise ValueError(
                "evaluate_clients runs validation_step on every client's held-out samples, and "
                f"{type(module).__name__} has none; write one that logs what is to be measured"
            )
        given = self.client_datasets
        if given is not None and len(given) != num_clients:
            raise ValueError(f"held_out has data sets of {len(given)} clients, num_clients is {num_clients}")
        if lacking := [client for client, data in enumerate(given or ()) if data is None]:
            raise ValueError(f"held_out has nothing of clients {lacking[:10]}; give every client a data set")
        if dropped:
            raise ValueError(
                "client_metrics='none' drops what clients measure, and evaluate_clients measures; use "
                "client_metrics='local', or leave evaluate_clients out"
            )
