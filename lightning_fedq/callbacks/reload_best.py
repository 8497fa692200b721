"""Go back to the best global model after some rounds without improvement, as CorBin-FL's training does.

The paper reloads after 5 "epochs"; we read rounds. The reload happens at the end of the round, after
validation and after the checkpoint that goes with it, so that this checkpoint holds the model that the
metrics are about. The choice looks at validation data; what that costs in privacy is in no epsilon.
What the rounds spent stays spent.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks.trainer_lookup import find_engine, find_federated


class ReloadBest(pl.Callback):
    """Rollback to the best global model after `patience` validations without a better `monitor`.

    Ranges and the server optimiser's state go on as they are.

    Args:
        monitor: A logged metric, such as `val_acc`.
        patience: Validations (as a rule one a round) without improvement until the reload, >= 1; then the
            count starts again.
        mode: Is a larger ("max") or a smaller ("min") value better?

    Raises:
        ValueError: If patience or mode is none of these; on validation, if `monitor` was not logged.

    Example:
        >>> callbacks = [ReloadBest("val_acc", mode="max", patience=3)]  # beside Federated(...)
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
        """Reload, if this round exhausted the patience."""
        if self.rounds_without < self.patience or self.best_weights is None:
            return
        self.rounds_without = 0
        if self.best_segments != list(find_engine(trainer, "ReloadBest").segments):
            rank_zero_warn(
                "parameters have joined or left since the best model, so there is no way back to it"
            )
            self.best_weights, self.best_value = None, None
            return
        find_federated(trainer, "ReloadBest").fit.replace_weights(self.best_weights)
        self.num_reloads += 1

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the model if it is the best so far."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.monitor not in trainer.callback_metrics:
            raise ValueError(
                f"ReloadBest monitors {self.monitor!r}, but validation logged "
                f"{sorted(trainer.callback_metrics)}; set monitor to one of these"
            )
        value = float(trainer.callback_metrics[self.monitor])
        sign = 1.0 if self.mode == "max" else -1.0
        if not math.isnan(value) and (self.best_value is None or sign * value > sign * self.best_value):
            self.best_value, self.rounds_without = value, 0
            engine = find_engine(trainer, "ReloadBest")
            self.best_weights, self.best_segments = engine.weights.clone(), list(engine.segments)
        else:
            self.rounds_without += 1

    def state_dict(self) -> dict[str, Any]:
        """The best model and how long ago it was."""
        return {
            "best_value": self.best_value,
            "best_weights": self.best_weights,
            "best_segments": self.best_segments,
            "rounds_without": self.rounds_without,
            "num_reloads": self.num_reloads,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.best_value, self.best_weights = state_dict["best_value"], state_dict["best_weights"]
        self.best_segments = state_dict["best_segments"]
        self.rounds_without, self.num_reloads = state_dict["rounds_without"], state_dict["num_reloads"]
