"""Checks before the first step of a federated run: what is refused, each with its cure."""

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
from lightning_fedq.rounds import RoundPlanner, RoundServer, Statistics
from lightning_fedq.training.loops import handed_loader
from lightning_fedq.training.settings import Federation, Local

_FROM_LOADER = (
    "the training loader is not the clients' own, and would train centrally; "
    "use trainer.fit(model, datamodule=FederatedDataModule.from_loader(loader, val_loader))"
)


_NO_DATA = (
    "there is no training data, or the training loader is not the clients' own, and would train centrally; "
    "use trainer.fit(model, datamodule=...) with a data module, such as "
    "datamodule=FederatedDataModule.from_loader(loader, val_loader), or data: {class_path: ...} in a YAML"
)


def check_batch_rule(rule: BatchRule, current: BatchRule | None, local: Local) -> None:
    """Refuse a rule that draws batches beside another one, for stacks of clients or for parts of a model.

    Args:
        current: Rule that draws them already.

    Raises:
        ValueError: With the cure.
    """
    name = type(rule).__name__
    if current is not None:
        raise ValueError(f"{type(current).__name__} and {name} both choose the local batches; leave one out")
    check_single_clients(f"{name} draws batches of different sizes for every client", local.clients_per_step)
    if local.patterns:
        raise ValueError(
            f"{name} works on all trained parameters, and local={list(local.patterns)} keeps some with "
            "the clients; leave one out"
        )


def check_single_clients(reason: str, clients_per_step: int | Literal["auto"]) -> None:
    """Refuse stacks of clients.

    Args:
        reason: Why there can be none, as the beginning of a sentence.

    Raises:
        ValueError: If it is a number of clients.
    """
    if clients_per_step not in ("auto", 1):
        raise ValueError(
            f"{reason}, so clients can't train side by side, got clients_per_step={clients_per_step}; use "
            "clients_per_step=1 or 'auto'"
        )


def check_algorithm(
    algorithm: LocalAlgorithm, trainer: pl.Trainer, rule: BatchRule | None, has_equal_batches: bool
) -> None:
    """Refuse data, optimisers and callbacks of clients that do not go with a local algorithm.

    Args:
        has_equal_batches: Whether every client has as many batches in a round.

    Raises:
        ValueError: With the cure.
    """
    name = type(algorithm).__name__
    algorithm.check(trainer.optimizers)
    if rule is not None:
        raise ValueError(f"{type(rule).__name__} bounds gradients that {name} would change; leave one out")
    if algorithm.alike and not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"{name} counts on as many steps as there are batches, and this module takes them by hand; use "
            "automatic optimisation, or FedProx"
        )
    if algorithm.alike and not has_equal_batches:
        raise ValueError(
            f"{name} takes as many steps of every client, and theirs differ with what they hold; say "
            "local_steps=..."
        )


def check_memory(algorithm: LocalAlgorithm, mechanism: Mechanism, parameters: int, dim: int) -> None:
    """Refuse a mechanism that leaves out what clients take for sent.

    Args:
        parameters: Coordinates of an update that are trained; buffers, which no client remembers, follow.
        dim: All coordinates of an update.

    Raises:
        ValueError: With the cure.
    """
    handed, sent, buffers = algorithm.num_handed(parameters), mechanism.num_sent(dim), dim - parameters
    if handed is not None and sent is not None and handed + buffers > sent:
        name, share = type(mechanism).__name__, math.ceil(1e4 * (handed + buffers) / dim) / 1e4
        raise ValueError(
            f"clients of {type(algorithm).__name__} take {handed} coordinates and {buffers} of buffers for "
            f"sent, and {name} sends {sent} of {dim}, so that some are lost; use {name}(share={share:g})"
        )


def check_cohorts_last(planner: RoundPlanner, rounds: int) -> None:
    """Refuse more rounds than there are cohorts, and say whom cohorts leave over.

    Args:
        rounds: How many there will be when the fit ends, earlier ones of the same server included.

    Raises:
        ValueError: With the cure; or if a rule of the user's names no cohort.
    """
    if said := planner.law.check_rounds(rounds, planner.num_clients):
        rank_zero_info(said)


def check_setup(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse what can be known before optimisers exist.

    Raises:
        ValueError: Naming what can't work and its cure.
    """
    _check_package(trainer)
    for callback in trainer.callbacks:
        _check_callback(trainer, callback)
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy) or trainer.world_size > 1:
        raise ValueError(
            f"Federated simulates all clients on one device, got {type(trainer.strategy).__name__} "
            f"on {trainer.world_size} devices; use Trainer(strategy='auto', devices=1), or "
            "strategy='fedq_clients', in which every device has clients of its own"
        )
    own = is_overridden("train_dataloader", module, pl.LightningModule)
    if trainer.datamodule is None and handed_loader(trainer) is None and not own:
        raise ValueError(_NO_DATA)
    _check_flags(trainer)


def _check_package(trainer: object) -> None:
    if not isinstance(trainer, pl.Trainer):
        theirs = type(trainer).__module__.partition(".trainer")[0]
        raise ValueError(
            f"the Trainer is from {theirs}, and lightning_fedq is bound to {pl.__name__}, which was imported "
            f"first; import {theirs} before lightning_fedq, and only one of the two"
        )


_FINDERS = {
    "LearningRateFinder": "set the rate found there",
    "BatchSizeFinder": "give the loader the batch size found there",
}
"""Lightning's searches before the training, and what to do with what they find."""


def _check_callback(trainer: Any, callback: pl.Callback) -> None:
    """Refuse a search that would train on everybody's data at once.

    Raises:
        ValueError: Naming it.
    """
    for name, cure in _FINDERS.items():
        if isinstance(callback, getattr(pl.callbacks, name)):
            if getattr(callback, "_early_exit", False):  # put there by a Tuner, for this one search
                trainer.callbacks = [other for other in trainer.callbacks if other is not callback]
            raise ValueError(
                f"{name} would train on the raw data of all clients at once, past every mechanism; "
                f"run it with a Trainer without Federated, on data that need no protection, and {cure}"
            )


def _check_flags(trainer: Any) -> None:
    """Refuse Trainer flags that cut or regroup steps across clients.

    Raises:
        ValueError: Naming the flag.
    """
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ValueError(
            "val_check_interval as a time would validate in the middle of a round, where there is no new "
            "global model; use check_val_every_n_epoch to validate every n rounds"
        )


def validate_by_rounds(trainer: Any, batches: int, undo: Undo) -> None:
    """Take a `val_check_interval` that means whole rounds at its word, and refuse another.

    An int counts one client's batches, as it does in an ordinary training.

    Args:
        batches: Number of batches of the longest client in a round.

    Raises:
        ValueError: If it is no number of whole rounds, naming the nearest one that is.
    """
    interval, every = trainer.val_check_interval, trainer.check_val_every_n_epoch
    if interval == 1.0 and isinstance(interval, float):
        return
    if isinstance(interval, float) or interval % batches or (every is not None and interval != batches):
        rounds = max(1, round(interval / batches)) if isinstance(interval, int) else every
        raise ValueError(
            f"val_check_interval = {interval} would validate in the middle of a round of {batches} batches a "
            f"client, where there is no new global model; use check_val_every_n_epoch={rounds} to validate "
            f"every {rounds} rounds"
        )
    undo.replace(trainer, "val_check_interval", 1.0)
    undo.replace(trainer, "check_val_every_n_epoch", interval // batches if every is None else every)


def check_limit(work: LocalWork) -> None:
    """Refuse a `limit_train_batches` that leaves somebody without a batch, as Lightning does for a loader.

    Raises:
        ValueError: Naming the clients.
    """
    idle = [client for client, one_pass in enumerate(work.passes) if not one_pass]
    if not idle:
        return
    fewest = min(len(pass_sizes(work.pass_length(c), work.batch_size, work.drop_last)) for c in idle)
    raise ValueError(
        f"limit_train_batches = {work.limit_batches} leaves clients {in_short(idle)} without a batch, as "
        f"a pass over their data may be of {fewest} only; use at least {least_fraction(fewest)}, an int >= "
        "1, or fewer clients"
    )


def check_per_client_loaders(
    has_per_client_loaders: bool,
    clients_per_step: int | Literal["auto"],
    weighting: str,
    client_indices: Sequence[Tensor],
) -> None:
    """Refuse what clients with loaders of their own can't do.

    Raises:
        ValueError: If they are to train side by side, or a stream is weighted by its samples.
    """
    if has_per_client_loaders:
        check_single_clients("clients have loaders of their own, or several", clients_per_step)
    streams = [client for client, part in enumerate(client_indices) if not len(part)]
    if streams and weighting == "samples":
        raise ValueError(
            f"the data of clients {in_short(streams)} are streams, whose samples nobody has counted; use "
            "weighting='uniform'"
        )


def least_fraction(num_batches: int) -> float:
    """A short float, at least 1 / num_batches, so that the fraction of the batches is one or more."""
    scale: int = 10 ** (len(str(num_batches)) + 1)
    return math.ceil(scale / num_batches) / scale


def check_shapes(module: torch.nn.Module) -> None:
    """Refuse parameters of which no vector of real numbers can be made: without a shape yet, or complex.

    Raises:
        ValueError: Naming them.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{in_short(lazy)} have no shape before the first batch (a lazy layer), and the vector "
            "of an update needs one; run a batch through the model in its setup or configure_model, or give "
            "the layers their sizes"
        )
    is_complex = [name for name, p in module.named_parameters() if p.requires_grad and p.is_complex()]
    if is_complex:
        raise ValueError(
            f"{in_short(is_complex)} are complex, and an update is a vector of real numbers; keep "
            "them as torch.view_as_real(...) parameters, and torch.view_as_complex in forward"
        )


def check_resumable(trainer: pl.Trainer) -> None:
    """Refuse a checkpoint that holds weights only, before Lightning asks it for an optimiser.

    Raises:
        ValueError: With what to take in its place.
    """
    loaded = trainer._checkpoint_connector._loaded_checkpoint
    if loaded and "optimizer_states" not in loaded:
        raise ValueError(
            f"{trainer.ckpt_path} holds weights and no round, so nothing can go on from it; resume from a "
            "checkpoint that ModelCheckpoint has written, or begin anew from the weights "
            "(torch.load(...)['state_dict']), and add the epsilons of both (docs/guides/load_the_result.md)"
        )


def check_optimizers(trainer: pl.Trainer) -> list[torch.optim.Optimizer]:
    """Return the optimisers of the run: one, or several where the module optimises by hand.

    Raises:
        ValueError: If there is none, if none of its parameters is trained, or if some are not the module's.
    """
    if not trainer.optimizers:
        raise ValueError(
            "Federated needs an optimiser, configure_optimizers returned none; return one of the parameters "
            "that are to be trained"
        )
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if not any(parameter.requires_grad for group in groups for parameter in group["params"]):
        raise ValueError(
            "Federated has nothing to train: no parameter in an optimiser requires a gradient "
            "(configure_optimizers returned none, or all of them are frozen); return an optimiser of the "
            "parameters that are to be trained"
        )
    own = {id(parameter) for parameter in trainer.lightning_module.parameters()}
    strange = [parameter for group in groups for parameter in group["params"] if id(parameter) not in own]
    if strange:
        shapes = in_short([tuple(parameter.shape) for parameter in strange])
        raise ValueError(
            f"{len(strange)} parameters in the optimiser are not the module's (shapes {shapes}), so that no "
            "update carries them and every client would train its own in vain; make what holds them an "
            "attribute of the module, or register them with self.register_parameter"
        )
    return list(trainer.optimizers)


def check_loader_is_ours(trainer: pl.Trainer, loader: object) -> None:
    """Refuse to train on a loader that Lightning took from somewhere else.

    Raises:
        ValueError: If the running loader is not `loader`.
    """
    if trainer.train_dataloader is not loader:
        raise ValueError(_FROM_LOADER)


_HOOKS = ("client_statistics", "on_statistics")


def check_hooks(module: pl.LightningModule, statistics: Statistics | None) -> None:
    """Refuse a module and settings of which only one knows of statistics.

    Raises:
        ValueError: With the cure.
    """
    lacking = [name for name in _HOOKS if not callable(getattr(module, name, None))]
    if statistics is not None and lacking:
        raise ValueError(
            f"statistics need {type(module).__name__}.{lacking[0]}: client_statistics(self, batches) returns "
            f"({statistics.size},) numbers of one client, on_statistics(self, mean) takes the mean"
        )
    if statistics is None and len(lacking) < len(_HOOKS):
        own = next(name for name in _HOOKS if name not in lacking)
        raise ValueError(
            f"{type(module).__name__} has {own}, which nobody calls; say Federated(statistics=Statistics("
            "size=..., bound=...)), or leave it out"
        )


def check_statistics(
    federation: Federation, trainer: pl.Trainer, engine: RoundServer, num_finished: int
) -> None:
    """Refuse rounds of statistics that nobody trains after, or that a claim does not count.

    Args:
        num_finished: Rounds of earlier fits of the same server.

    Raises:
        ValueError: With the cure.
    """
    statistics, rounds = federation.local.statistics, trainer.max_epochs
    check_hooks(trainer.lightning_module, statistics)
    if statistics is None or not engine.reads_statistics:
        return
    if rounds is not None and 0 <= rounds <= statistics.rounds - num_finished:
        raise ValueError(
            f"statistics take the first {statistics.rounds} rounds, and max_epochs={rounds} "
            "leaves none to train in; add them to max_epochs"
        )
    protecting = [one for one in get_callbacks(trainer) if getattr(one, "protects_samples", False)]
    if protecting or federation.batch_rule is not None:
        name = type(protecting[0] if protecting else federation.batch_rule).__name__
        raise ValueError(
            f"{name} draws batches and says what one sample costs, and statistics of a client's data are not "
            "in that; leave statistics out, or leave the callback out"
        )


def check_averaging(trainer: pl.Trainer, module: nn.Module) -> None:
    """Refuse averaging that looks at the clients' data.

    Raises:
        ValueError: Naming the callback.
    """
    norms = [
        name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
    ]
    kind = pl.callbacks.StochasticWeightAveraging
    if norms and any(isinstance(callback, kind) for callback in get_callbacks(trainer)):
        raise ValueError(
            "StochasticWeightAveraging ends with a pass over the training data for the statistics of "
            f"{', '.join(norms)}, which would look at all clients' data past the mechanism; use "
            "WeightAveraging, which averages the global model's statistics, once a round"
        )
