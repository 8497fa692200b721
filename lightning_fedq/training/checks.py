"""Checks before the first step of a federated run. Each refuses one setting, and its error has the cure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_fedq._lightning import get_callbacks, is_overridden, pl, rank_zero_info
from lightning_fedq.algorithms import LocalAlgorithm
from lightning_fedq.clients.undo import Undo
from lightning_fedq.data.batches import BatchRule, LocalWork, pass_sizes
from lightning_fedq.data.sampling import in_short
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import RoundPlanner, Statistics
from lightning_fedq.training.client_metrics import sample_protectors
from lightning_fedq.training.loops import handed_loader
from lightning_fedq.training.settings import Local

_FROM_LOADER = (
    "The training loader is not the clients' own, so it would train centrally. "
    "Use trainer.fit(model, datamodule=FederatedDataModule.from_loader(loader, val_loader))"
)


_NO_DATA = (
    "There are no training data, or the training loader is not the clients' own, so it would train "
    "centrally. "
    "Use trainer.fit(model, datamodule=...), e.g. with "
    "datamodule=FederatedDataModule.from_loader(loader, val_loader), or data: {class_path: ...} in a YAML"
)


class ClientSettingsError(ValueError):
    """Refusal of a client's settings, callbacks or module. Its text tells nothing about the data."""


def check_batch_rule(rule: BatchRule, current: BatchRule | None, local: Local) -> None:
    """Refuse a batch rule together with another rule, with stacks of clients or with personalised parameters.

    Args:
        current: Rule that is set already. None if there is none.

    Raises:
        ValueError: In these three cases.
    """
    name = type(rule).__name__
    if current is not None:
        raise ValueError(f"{type(current).__name__} and {name} both choose the local batches. Leave one out")
    check_single_clients(f"{name} draws batches of different sizes for every client", local.clients_per_step)
    if local.personal_parameters:
        raise ValueError(
            f"{name} needs all trained parameters, but personal_parameters={list(local.personal_parameters)} "
            "keeps some with the clients. Leave one out"
        )


def check_single_clients(reason: str, clients_per_step: int | Literal["auto"]) -> None:
    """Refuse stacks of clients, which train in one step.

    Args:
        reason: Why clients can't train in one step, as the beginning of a sentence.

    Raises:
        ValueError: If clients_per_step is a number other than 1.
    """
    if clients_per_step not in ("auto", 1):
        raise ValueError(
            f"{reason}, so clients can't train side by side, got clients_per_step={clients_per_step}. Use "
            "clients_per_step=1 or 'auto'"
        )


def check_algorithm(
    algorithm: LocalAlgorithm, trainer: pl.Trainer, rule: BatchRule | None, has_equal_batches: bool
) -> None:
    """Refuse clients' data, optimisers and callbacks that do not work with a local algorithm.

    Args:
        has_equal_batches: Does every client have the same number of batches in a round?

    Raises:
        ValueError: If optimisers, a batch rule, manual optimisation or unequal numbers of batches conflict.
    """
    name = type(algorithm).__name__
    algorithm.check(trainer.optimizers)
    if rule is not None:
        raise ValueError(f"{type(rule).__name__} bounds gradients that {name} would change. Leave one out")
    if algorithm.alike and not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"{name} needs as many steps as batches, which manual optimisation does not ensure. Use "
            "automatic optimisation, or FedProx"
        )
    if algorithm.alike and not has_equal_batches:
        raise ValueError(
            f"{name} needs equal numbers of steps, but clients' numbers of batches differ. Set "
            "local_steps=..."
        )


def check_memory(algorithm: LocalAlgorithm, mechanism: Mechanism, parameters: int, dim: int) -> None:
    """Refuse a mechanism that sends fewer coordinates than the clients' algorithm assumes were sent.

    Args:
        parameters: Number of trained coordinates of an update. Buffers follow them in the update.
        dim: Number of all coordinates of an update.

    Raises:
        ClientSettingsError: If coordinates would be lost. The message has the share that is enough.
    """
    handed, sent, buffers = algorithm.num_handed(parameters), mechanism.num_sent(dim), dim - parameters
    if handed is not None and sent is not None and handed + buffers > sent:
        name, share = type(mechanism).__name__, math.ceil(1e4 * (handed + buffers) / dim) / 1e4
        raise ClientSettingsError(
            f"Clients of {type(algorithm).__name__} send {handed} coordinates and {buffers} of buffers, "
            f"but {name} sends only {sent} of {dim}. Use {name}(fraction={share:g})"
        )


def check_cohorts_last(planner: RoundPlanner, rounds: int) -> None:
    """Refuse more rounds than there are cohorts, and report clients that no cohort contains.

    Args:
        rounds: Number of rounds at the end of the fit, with earlier rounds of the same server.

    Raises:
        ValueError: If cohorts run out, or the user's cohort rule has none for a round.
    """
    if note := planner.law.check_rounds(rounds, planner.num_clients):
        rank_zero_info(note)


def check_setup(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse a Trainer or module that can't train clients, as far as this is known before optimisers exist.

    Raises:
        ValueError: If package, callbacks, strategy, data or flags do not fit. The message has the cure.
    """
    is_ours = isinstance(trainer, pl.Trainer)
    if not is_ours:
        theirs = type(trainer).__module__.partition(".trainer")[0]
        raise ValueError(
            f"The Trainer is from {theirs}, but lightning_fedq uses {pl.__name__}, which was imported "
            f"first. Import {theirs} before lightning_fedq, and only one of the two"
        )
    for callback in trainer.callbacks:
        _check_callback(trainer, callback)
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy) or trainer.world_size > 1:
        raise ValueError(
            f"Federated trains all clients on one device, got {type(trainer.strategy).__name__} "
            f"on {trainer.world_size} devices. Use Trainer(strategy='auto', devices=1), or "
            "strategy='fedq_clients', which gives clients to every device"
        )
    own = is_overridden("train_dataloader", module, pl.LightningModule)
    if trainer.datamodule is None and handed_loader(trainer) is None and not own:
        raise ValueError(_NO_DATA)
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ValueError(
            "A val_check_interval in time would validate during a round, before there is a new "
            "global model. Use check_val_every_n_epoch to validate every n rounds"
        )


_FINDERS = {
    "LearningRateFinder": "set the rate found there",
    "BatchSizeFinder": "give the loader the batch size found there",
}
"""Lightning's searches before the training, and how to use their results."""


def _check_callback(trainer: Any, callback: pl.Callback) -> None:
    """Refuse a search of Lightning that would train on the data of all clients at once.

    Raises:
        ValueError: If the callback is such a search.
    """
    for name, cure in _FINDERS.items():
        if isinstance(callback, getattr(pl.callbacks, name)):
            if getattr(callback, "_early_exit", False):  # added by a Tuner for this search only
                trainer.callbacks = [other for other in trainer.callbacks if other is not callback]
            raise ValueError(
                f"{name} would train on the raw data of all clients at once, without a mechanism. "
                f"Use a Trainer without Federated, on data that need no protection, and {cure}"
            )


def validate_by_rounds(trainer: Any, batches: int, undo: Undo) -> None:
    """Convert a `val_check_interval` in batches to whole rounds, and refuse one that is no whole number.

    As in an ordinary training, an int counts the batches of one client.

    Args:
        batches: Number of batches in a round, of the client that has most.

    Raises:
        ValueError: If the interval is not a whole number of rounds. The message has the nearest one.
    """
    interval, every = trainer.val_check_interval, trainer.check_val_every_n_epoch
    if interval == 1.0 and isinstance(interval, float):
        return
    if isinstance(interval, float) or interval % batches or (every is not None and interval != batches):
        rounds = max(1, round(interval / batches)) if isinstance(interval, int) else every
        raise ValueError(
            f"val_check_interval = {interval} would validate during a round of {batches} batches a client, "
            f"before there is a new global model. Use check_val_every_n_epoch={rounds} to validate "
            f"every {rounds} rounds"
        )
    undo.replace(trainer, "val_check_interval", 1.0)
    undo.replace(trainer, "check_val_every_n_epoch", interval // batches if every is None else every)


def check_limit(work: LocalWork) -> None:
    """Refuse a `limit_train_batches` that leaves a client without a batch, as Lightning does for a loader.

    Raises:
        ValueError: If it does. The message names the clients.
    """
    idle = [client for client, one_pass in enumerate(work.passes) if not one_pass]
    if not idle:
        return
    fewest = min(len(pass_sizes(work.pass_length(c), work.batch_size, work.drop_last)) for c in idle)
    raise ValueError(
        f"limit_train_batches = {work.limit_batches} leaves clients {in_short(idle)} without a batch: their "
        f"data have as few as {fewest}. Use at least {least_fraction(fewest)}, an int >= 1, or fewer clients"
    )


def check_per_client_loaders(
    has_per_client_loaders: bool,
    clients_per_step: int | Literal["auto"],
    weighting: str,
    client_indices: Sequence[Tensor],
) -> None:
    """Refuse settings that clients with their own loaders do not support.

    Args:
        client_indices: Sample indices of each client. Empty for a stream.

    Raises:
        ValueError: If such clients are to train in one step, or a stream is weighted by its samples.
    """
    if has_per_client_loaders:
        check_single_clients("Clients have loaders of their own, or several", clients_per_step)
    streams = [client for client, part in enumerate(client_indices) if not len(part)]
    if streams and weighting == "samples":
        raise ValueError(
            f"The data of clients {in_short(streams)} are streams with an unknown number of samples. Use "
            "weighting='uniform'"
        )


def least_fraction(num_batches: int) -> float:
    """Return a short float of at least 1 / num_batches, so that this fraction is at least one batch."""
    scale: int = 10 ** (len(str(num_batches)) + 1)
    return math.ceil(scale / num_batches) / scale


def check_shapes(module: torch.nn.Module) -> None:
    """Refuse parameters that have no shape yet, or are complex, because an update is a real vector.

    Raises:
        ValueError: If there are some. The message names them.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{in_short(lazy)} have no shape before the first batch (a lazy layer). Run a batch through "
            "the model in its setup or configure_model, or give the layers their sizes"
        )
    is_complex = [name for name, p in module.named_parameters() if p.requires_grad and p.is_complex()]
    if is_complex:
        raise ValueError(
            f"{in_short(is_complex)} are complex, but an update is a vector of real numbers. Use "
            "torch.view_as_real(...) parameters, and torch.view_as_complex in forward"
        )


def check_resumable(trainer: pl.Trainer) -> None:
    """Refuse a checkpoint that contains weights only, before Lightning asks it for optimiser states.

    Raises:
        ValueError: If it contains no optimiser states.
    """
    loaded = trainer._checkpoint_connector._loaded_checkpoint
    if loaded and "optimizer_states" not in loaded:
        raise ValueError(
            f"{trainer.ckpt_path} contains weights only, so no round can be resumed. Resume from a "
            "checkpoint of ModelCheckpoint, or begin a new federation from torch.load(...)['state_dict'] "
            "and add both epsilons (docs/guides/load_the_result.md)"
        )


def check_optimizers(trainer: pl.Trainer) -> None:
    """Refuse optimisers that train nothing, or that train parameters which no update contains.

    Raises:
        ValueError: If there is none, if it trains no parameter, or if it has parameters outside the module.
    """
    if not trainer.optimizers:
        raise ValueError(
            "Federated needs an optimiser, but configure_optimizers returned none. Return an optimiser of "
            "the parameters to train"
        )
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if not any(parameter.requires_grad for group in groups for parameter in group["params"]):
        raise ValueError(
            "Federated has nothing to train, because no parameter in an optimiser requires a gradient. "
            "Return an optimiser of the parameters to train from configure_optimizers, and unfreeze them"
        )
    own = {id(parameter) for parameter in trainer.lightning_module.parameters()}
    strange = [parameter for group in groups for parameter in group["params"] if id(parameter) not in own]
    if strange:
        shapes = in_short([tuple(parameter.shape) for parameter in strange])
        raise ValueError(
            f"{len(strange)} parameters in the optimiser are not the module's (shapes {shapes}), so no "
            "update contains them. Make their owner an attribute of the module, or use "
            "self.register_parameter"
        )


def check_loader_is_ours(trainer: pl.Trainer, loader: object) -> None:
    """Refuse to train on a loader that is not the clients' own, such as one passed to `fit`.

    Raises:
        ValueError: If the Trainer's loader is not `loader`.
    """
    if trainer.train_dataloader is not loader:
        raise ValueError(_FROM_LOADER)


_HOOKS = ("client_statistics", "on_statistics")


def check_hooks(module: pl.LightningModule, statistics: Statistics | None) -> None:
    """Refuse hooks for statistics without the setting, and the setting without the hooks.

    Raises:
        ValueError: In both cases.
    """
    lacking = [name for name in _HOOKS if not callable(getattr(module, name, None))]
    if statistics is not None and lacking:
        raise ValueError(
            f"Statistics need the hook {type(module).__name__}.{lacking[0]}: client_statistics(self, "
            f"batches) returns ({statistics.size},) values of one client, on_statistics(self, mean) takes "
            "the mean"
        )
    if statistics is None and len(lacking) < len(_HOOKS):
        own = next(name for name in _HOOKS if name not in lacking)
        raise ValueError(
            f"{type(module).__name__} has {own}, which is never called. Use Federated(statistics=Statistics("
            "size=..., clip_norm=...)), or leave it out"
        )


def check_client(trainer: pl.Trainer, local: Local, rule: BatchRule | None) -> None:
    """Refuse a module, optimisers, hooks or callbacks with which no client may send. All engines call it.

    Args:
        trainer: Trainer of the clients, with their own callbacks.
        rule: Rule that draws batches. None trains whole passes over the data.

    Raises:
        ValueError: If there is such a setting. The message has the cure.
    """
    check_shapes(trainer.lightning_module)
    check_optimizers(trainer)
    check_hooks(trainer.lightning_module, local.statistics)
    protecting = sample_protectors(get_callbacks(trainer))
    # record-level privacy does not cover statistics
    if local.statistics is not None and (protecting or rule is not None):
        name = type(protecting[0] if protecting else rule).__name__
        raise ValueError(
            f"{name} accounts for privacy of samples, but not for statistics of a client's data. "
            "Leave out the statistics or the callback"
        )


def check_rounds_left(statistics: Statistics | None, rounds: int | None, num_finished: int) -> None:
    """Refuse rounds of statistics that leave no round for training.

    Args:
        statistics: Statistics that the clients still have to send. None sends none.
        rounds: Number of rounds of the fit. None if it is not known.
        num_finished: Number of rounds in earlier fits of the same server.

    Raises:
        ValueError: If the fit has too few rounds.
    """
    if statistics is not None and rounds is not None and rounds <= statistics.rounds - num_finished:
        raise ValueError(
            f"Statistics take the first {statistics.rounds} rounds, but a run of {rounds} rounds "
            "leaves none for training. Add them to max_epochs"
        )


def check_averaging(trainer: pl.Trainer, module: nn.Module) -> None:
    """Refuse StochasticWeightAveraging of a module with BatchNorm.

    It ends with a pass over all clients' data for the running statistics, which no mechanism protects.

    Raises:
        ValueError: If the Trainer has such a callback and the module such layers.
    """
    batch_norm, kind = nn.modules.batchnorm._BatchNorm, pl.callbacks.StochasticWeightAveraging
    norms = [name for name, part in module.named_modules() if isinstance(part, batch_norm)]
    if norms and any(isinstance(callback, kind) for callback in get_callbacks(trainer)):
        raise ValueError(
            "StochasticWeightAveraging reads all clients' data at the end, without a mechanism, for the "
            f"statistics of {', '.join(norms)}. Use WeightAveraging, which averages the global model once a "
            "round"
        )
