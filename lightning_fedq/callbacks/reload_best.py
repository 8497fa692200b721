"""Go back to the best global model after some rounds without improvement, as CorBin-FL's training does.

The paper reloads after 5 "epochs", which we read as rounds. The reload happens at the end of a round, after
validation and after its checkpoint, so that the checkpoint has the model that the metrics describe. The
choice depends on validation data, and no epsilon covers this. Rounds that are undone stay charged.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks.trainer_lookup import find_federated

_STATE = ("best_value", "best_weights", "best_segments", "rounds_without", "num_reloads")


class ReloadBest(pl.Callback):
    """Rollback to the best global model after `patience` validations without a better `monitor`.

    Quantiser ranges and the server optimiser's state are not rolled back.

    Args:
        monitor: Name of the logged metric that defines the best model, such as `val_acc`.
        patience: Number of validations without improvement until the reload, >= 1. Usually there is one
            validation per round. After a reload the count starts again.
        mode: Whether a larger ("max") or a smaller ("min") value of the metric is better.

    Attributes:
        best_value: Best value of the metric so far, or None.
        best_weights: Weights of the best model, `(dim,)`, or None.
        num_reloads: Number of reloads so far.

    Raises:
        ValueError: If patience or mode is invalid. On validation, if `monitor` was not logged.

    Examples:
        >>> callbacks = [ReloadBest("val_acc", mode="max", patience=3)]  # next to Federated(...)
    """

    knows_clients = True

    def __init__(
        self, monitor: str = "val_acc", patience: int = 5, mode: Literal["max", "min"] = "max"
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience must be >= 1 round, got {patience}")
        if mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', got {mode!r}")
        self.monitor, self.patience, self.mode = monitor, patience, mode
        self.best_value: float | None = None
        self.best_weights: Tensor | None = None
        self.best_segments: list[int] = []
        self.rounds_without, self.num_reloads = 0, 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reload the best model if this round exhausted the patience."""
        if self.rounds_without < self.patience or self.best_weights is None:
            return
        self.rounds_without = 0
        fit = find_federated(trainer, "ReloadBest").fit
        if self.best_segments != list(fit.engine.segments):
            rank_zero_warn("Parameters were added or removed since the best model, so it can't be reloaded")
            self.best_weights, self.best_value = None, None
            return
        fit.replace_weights(self.best_weights)
        self.num_reloads += 1

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the model's weights if it is the best so far."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.monitor not in trainer.callback_metrics:
            raise ValueError(
                f"ReloadBest monitors {self.monitor!r}, but validation logged "
                f"{sorted(trainer.callback_metrics)}. Set monitor to one of these."
            )
        value = float(trainer.callback_metrics[self.monitor])
        sign = 1.0 if self.mode == "max" else -1.0
        if not math.isnan(value) and (self.best_value is None or sign * value > sign * self.best_value):
            self.best_value, self.rounds_without = value, 0
            engine = find_federated(trainer, "ReloadBest").started_engine
            self.best_weights, self.best_segments = engine.weights.clone(), list(engine.segments)
        else:
            self.rounds_without += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the best model and the number of validations since then."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that `state_dict` returned."""
        for name in _STATE:
            setattr(self, name, state_dict[name])
