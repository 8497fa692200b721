"""Trial of a few samples before the first charge of an epoch: loss, gradients, draws, and later steps.

Clipping bounds the contribution of a sample to the sum of one step. State that follows from a batch and
outlives its step changes the gradients of later samples, without any bound. Examples are a running average
of losses in `on_train_batch_end`, a callback's attribute, or an optimiser that reads raw gradients. So no
batch may affect later steps, or validation metrics, outside of the noisy sums.

`check_between_steps` trains two copies of the fit on different batches of different sizes. Both copies take
steps with zero gradients, so noisy steps can't cause a difference between them. Then both compute the
gradients of the same further batch, in a later epoch, and run the validation hooks. Gradients and logged
metrics must agree, bit for bit on a CPU. This is a test over a few batches and no proof.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.clients.changed_tensors import largest_difference
from lightning_fedq.clients.fit import Batches, Client, ClientFit
from lightning_fedq.clients.hooks import call_hooks
from lightning_fedq.clients.undo import Undo
from lightning_fedq.dpsgd.draws import check_draws_of_data
from lightning_fedq.dpsgd.loss_reduction import loss_reduction
from lightning_fedq.dpsgd.refusals import check_kinds, check_layers

Reduction = Literal["mean", "sum"]
_SAMPLES = 8
"""Number of samples whose loss is tried in an epoch."""
_NOISE = 10.0
"""Tolerance on devices with non-deterministic sums, in units of the difference of two equal trainings."""
_SIZES = [2, 3, 2, 3, 4, 2]
"""Sizes of the earlier batches: three of the one copy, then three of the other."""


def try_steps(
    home: Any,
    module: pl.LightningModule,
    held: Tensor,
    fetch: Callable[[Tensor], Any],
    of_clients: bool,
    before: Reduction | None,
) -> tuple[Reduction, list[str]]:
    """Check the loss and the gradients of a few samples.

    A module may change its loss from epoch to epoch. Only the first check chooses the loss reduction, since
    the choice follows from raw data. Later checks can only stop the run.

    Args:
        home: The user's Trainer.
        module: The user's module, without Opacus's hooks at this time.
        held: Sample indices, of all clients in a federation. Each epoch tries others of them.
        fetch: Returns the batch of the samples with the given indices.
        of_clients: Whether they are of a federation's clients. Then a copy of the fit is tried, which is not
            trained.
        before: Loss reduction that an earlier check has found. None at the first check.

    Returns:
        The loss reduction, and the names of the metrics that were logged.

    Raises:
        ValueError: If there are fewer than 2 samples. Also if this check, or one of `dpsgd.loss_reduction` or
            `dpsgd.draws`, fails.
    """
    check_kinds(module)
    trainer, epoch = home, home.current_epoch
    if of_clients:
        copy = ClientFit(home).copy(0, alone=True)
        trainer, module = copy.trainer, copy.module
    if len(held) < 2:
        raise ValueError(f"DPSGD needs 2 samples or more to find the loss reduction, got {len(held)}")
    # spread over the data set, so that a set sorted by label gives several labels
    spread = torch.linspace(0, len(held) - 1, min(_SAMPLES, len(held))).long()
    tried = (spread + epoch) % len(held)
    check_draws_of_data(fetch, held[tried])
    batch = fetch(held[tried])
    try:
        reduction = loss_reduction(trainer, module, batch, before, lambda: fetch(held[tried].flip(0)))
    except Exception:
        check_layers(module)  # mixing layers fail on a batch of one, with a less helpful error
        raise
    return reduction, check_between_steps(
        home, fetch, held[torch.roll(tried, epoch)], trainer.train_dataloader
    )


class Trained(NamedTuple):
    """Results of the training of a copy.

    Args:
        gradients: Gradients of the last batch.
        validated: Numbers that validation logs.
        names: Names of all logged metrics.
    """

    gradients: list[Tensor]
    validated: dict[str, float]
    names: list[str]


def check_between_steps(home: Any, fetch: Callable[[Tensor], Any], held: Tensor, loader: Any) -> list[str]:
    """Refuse a training in which earlier batches change later gradients or validation metrics.

    Args:
        home: The user's Trainer during its fit. Its module has no Opacus hooks at this time.
        fetch: Returns the batch of the samples with the given indices.
        held: Sample indices to use. The first ones in their order are tried.
        loader: Training loader that the copies of the fit refer to.

    Returns:
        Names of the metrics that training and validation have logged.

    Raises:
        ValueError: If gradients depend on earlier batches, or if validation logs metrics that follow from
            training batches. No epsilon covers such metrics, and log files, checkpoint names and decisions
            would release them.
    """
    # indices begin again after the last one, if there are few samples
    order = held[torch.arange(1 + sum(_SIZES)) % len(held)]
    last = fetch(order[:4])
    earlier = [fetch(part) for part in torch.split(order[1:], _SIZES)]
    first, second = earlier[:3], earlier[3:]
    one, other = (_train(home, batches, last, loader) for batches in (first, second))
    tolerance = 0.0
    if any(gradient.device.type != "cpu" for gradient in one.gradients):
        tolerance = _NOISE * _distance(one.gradients, _train(home, first, last, loader).gradients)
    if _distance(one.gradients, other.gradients) > tolerance:
        raise ValueError(
            "Gradients depend on state that earlier batches changed: in a hook, callback, global variable or "
            "random generator. Compute that state from weights or trainer.global_step, and draw from "
            "torch.rand, np.random or random without a generator."
        )
    both = sorted({*one.validated, *other.validated})
    values = {name: (one.validated.get(name), other.validated.get(name)) for name in both}
    names = [name for name, (a, b) in values.items() if a != b and (a == a or b == b)]  # NaN equals NaN
    if names:
        raise ValueError(
            f"Validation logs {', '.join(names)}, which follow from training batches and are not private. "
            "Log them with self.log in training_step, where no callback may decide by them."
        )
    return one.names


def _train(home: Any, first: Sequence[Any], last: Any, loader: Any) -> Trained:
    """Train a copy of the fit on the first batches, and return the last batch's gradients and the metrics."""
    fit = ClientFit(home)
    client = fit.copy(0, alone=True)
    child, seen = client.trainer, list[list[Tensor]]()
    vars(child.precision_plugin).pop("train_step_context", None)  # `DPSGD` installs it for noisy steps
    child.fit_loop.epoch_loop.max_steps = -1
    child.save_checkpoint = lambda *args, **kwargs: None  # a trial writes no checkpoints
    _take_no_steps(child, seen)
    logged = dict[str, float | None]()
    with pl.utilities.seed.isolate_rng(include_cuda=False):
        fit.train(client, Batches(iter(first), len(first), loader), 0)
        trained = dict.fromkeys(item.meta.name for item in child.fit_loop.epoch_loop._results.values())
        if home.enable_validation:
            _validate(home, client, logged)
    with pl.utilities.seed.isolate_rng(include_cuda=False):
        call_hooks(child, client.callbacks, "on_train_epoch_start")
        client.module.on_train_epoch_start()
        fit.train(client, Batches(iter([last]), 1, loader), len(first))
    names = [*logged, *trained]
    fit.drop(client)
    return Trained(seen[-1], {name: value for name, value in logged.items() if value is not None}, names)


def _take_no_steps(trainer: Any, seen: list[list[Tensor]]) -> None:
    """Record the true gradients in `seen`, and let the optimiser step with zeros in their place.

    Hooks and callbacks still see the true gradients, because they run before the step.
    """
    optimizer = trainer.strategy.optimizers[0]
    optimizer = getattr(optimizer, "original_optimizer", optimizer)
    trainer.strategy.optimizers = [optimizer]
    take = optimizer.step

    def step(closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            closure()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]
        seen.append(gradients)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return take()

    optimizer.step = step


def _validate(home: Any, client: Client, logged: dict[str, float | None]) -> None:
    """Run the validation hooks on one batch, and collect what they log in `logged`. None is not a number."""
    module: Any = client.module
    loop = home.fit_loop.epoch_loop.val_loop
    loop.setup_data()
    if loop.skip or loop._combined_loader is None:
        return
    loaders = loop._combined_loader.flattened
    batch = home.strategy.batch_to_device(next(iter(loaders[0])), dataloader_idx=0)
    args = (batch, 0, *([0] if len(loaders) > 1 else []))

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        logged[name] = float(value) if isinstance(value, int | float | Tensor) else None

    def log_dict(values: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            log(name, value)

    modes = {part: part.training for part in module.modules()}
    module.eval()

    def call(hook: str, *given: Any) -> None:
        call_hooks(client.trainer, client.callbacks, hook, *given)
        getattr(module, hook)(*given)

    with torch.no_grad(), Undo() as undo:
        undo.replace(module, "log", log)
        undo.replace(module, "log_dict", log_dict)
        call("on_validation_start")
        call("on_validation_epoch_start")
        call("on_validation_batch_start", *args)
        outputs = module.validation_step(*args)
        call("on_validation_batch_end", outputs, *args)
        call("on_validation_epoch_end")
        call("on_validation_end")
    for part, training in modes.items():
        part.training = training


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest absolute difference of two lists of gradients."""
    return max(map(largest_difference, one, other), default=0.0)
