"""What a federated run refuses, each with its cure, before the first step."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.aggregation import Weighting
from lightning_fedq.data.batches import LocalWork, pass_sizes

_NAMED = 10
"""Clients that an error names."""

_FROM_LOADER = (
    "a loader handed straight to fit(...) can't be dealt out to clients and would train centrally; "
    "use trainer.fit(model, datamodule=FederatedDataModule.from_loader(loader))"
)


def check_numbers(
    local_epochs: int, local_steps: int | None, clients_per_step: int | Literal["auto"], weighting: str
) -> None:
    """Refuse settings out of their range.

    Raises:
        ValueError: Naming the setting.
    """
    if local_epochs < 1:
        raise ValueError(f"local_epochs must be >= 1, got {local_epochs}")
    if local_steps is not None and local_steps < 1:
        raise ValueError(f"local_steps must be >= 1 or None, got {local_steps}")
    if clients_per_step != "auto" and clients_per_step < 1:
        raise ValueError(f"clients_per_step must be >= 1 or 'auto', got {clients_per_step}")
    if weighting not in get_args(Weighting):
        known = " or ".join(map(repr, get_args(Weighting)))
        raise ValueError(f"weighting must be {known}, got {weighting!r}")


def check_setup(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse what can be known before optimisers exist.

    Raises:
        ValueError: Naming what can't work and its cure.
    """
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy) or trainer.world_size > 1:
        raise ValueError(
            f"Federated simulates all clients on one device, got {type(trainer.strategy).__name__} "
            f"on {trainer.world_size} devices; use Trainer(strategy='auto', devices=1)"
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"Federated needs automatic optimisation, {type(module).__name__} sets "
            "automatic_optimization = False; "
            "return the loss from training_step and leave the steps to Lightning"
        )
    if trainer.datamodule is None and not is_overridden("train_dataloader", module, pl.LightningModule):
        raise ValueError(_FROM_LOADER)
    check_normalisation(module)
    check_flags(trainer)


def check_normalisation(module: nn.Module) -> None:
    """Refuse layers that learn outside of their parameters.

    Raises:
        ValueError: Naming the layers.
    """
    layers = [
        f"{name} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
    ]
    if layers:
        raise ValueError(
            f"layers {', '.join(layers)} keep running statistics of one client's data, which no "
            "update carries; "
            "use GroupNorm instead, e.g. model.backbone = "
            "opacus.validators.ModuleValidator.fix(model.backbone)"
        )


def check_flags(trainer: Any) -> None:
    """Refuse Trainer flags that cut or regroup steps across clients.

    Raises:
        ValueError: Naming the flag.
    """
    if not trainer.fast_dev_run and trainer.max_steps != -1:
        raise ValueError(
            f"max_steps counts the steps of all clients, got {trainer.max_steps}; "
            "use max_epochs for the number of rounds and local_steps for each client's steps"
        )
    if trainer.overfit_batches:
        raise ValueError(
            f"overfit_batches can't be dealt out to clients, got {trainer.overfit_batches}; use a "
            "small dataset"
        )
    if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None:
        raise ValueError(
            f"val_check_interval would validate in the middle of a round, got {trainer.val_check_interval}; "
            "use check_val_every_n_epoch to validate every n rounds"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            "who holds which samples is fixed for a run, but reload_dataloaders_every_n_epochs = "
            f"{trainer.reload_dataloaders_every_n_epochs}; leave it at 0"
        )
    if trainer.precision == "16-mixed":
        raise ValueError(
            "precision 16-mixed keeps one loss scale for all clients; use precision='bf16-mixed' or 32"
        )
    check_accumulation(trainer)


def check_limit(work: LocalWork) -> None:
    """Refuse a `limit_train_batches` that leaves somebody without a batch, as Lightning does for a loader.

    Raises:
        ValueError: Naming the clients.
    """
    idle = [client for client, one_pass in enumerate(work.passes) if not one_pass]
    if not idle:
        return
    fewest = min(len(pass_sizes(len(work.held[c]), work.batch_size, work.drop_last)) for c in idle)
    shown = ", ".join(map(str, idle[:_NAMED])) + (", ..." if len(idle) > _NAMED else "")
    raise ValueError(
        f"limit_train_batches = {work.limit_batches} leaves clients {shown} without a batch, as a pass over "
        f"their data may be of {fewest} only; "
        f"use at least {least_fraction(fewest)}, an int >= 1, or fewer clients"
    )


def least_fraction(num_batches: int) -> float:
    """A short float, at least 1 / num_batches, so that the fraction of the batches is one or more."""
    scale: int = 10 ** (len(str(num_batches)) + 1)
    return math.ceil(scale / num_batches) / scale


class Buffers:
    """Watches that training leaves the module's buffers alone: only parameters are federated."""

    def __init__(self, module: nn.Module) -> None:
        self._seen = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]

    def check(self) -> None:
        """Refuse to go on.

        Raises:
            ValueError: Naming the buffers that have changed.
        """
        changed = [name for name, buffer, version in self._seen if buffer._version != version]
        if changed:
            raise ValueError(
                f"training changed the buffers {', '.join(changed)}, which no update carries: clients "
                "would mix; "
                "use layers without running statistics (GroupNorm), or keep the values out of the "
                "module's buffers"
            )


def check_accumulation(trainer: pl.Trainer) -> None:
    """Refuse gradient accumulation, which would reach across clients.

    Raises:
        ValueError: If it is on.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches would mix the gradients of neighbouring clients, "
            f"got {trainer.accumulate_grad_batches}; use a larger batch_size"
        )


def check_optimizers(trainer: pl.Trainer) -> torch.optim.Optimizer:
    """Return the one optimiser of the run.

    Raises:
        ValueError: If there is none or more than one, or a schedule that counts batches.
    """
    if len(trainer.optimizers) != 1:
        raise ValueError(
            "Federated needs exactly one optimiser, configure_optimizers returned "
            f"{len(trainer.optimizers)}; "
            "put all parameters into one optimiser, with parameter groups if they differ"
        )
    for config in trainer.lr_scheduler_configs:
        if config.interval != "epoch":
            raise ValueError(
                "a learning rate schedule that steps with every batch would run through all clients "
                "of a round, "
                f"got interval={config.interval!r}; use interval='epoch', one step a round"
            )
    return trainer.optimizers[0]


def check_loader_is_ours(trainer: pl.Trainer, loader: object) -> None:
    """Refuse to train on a loader that Lightning took from somewhere else.

    Raises:
        ValueError: If the running loader is not `loader`.
    """
    if trainer.train_dataloader is not loader:
        raise ValueError(_FROM_LOADER)
