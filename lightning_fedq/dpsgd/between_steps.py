"""Does what a batch leaves behind move a later step, or what validation logs? Tried on copies of the fit.

Clipping bounds what one sample adds to the sum of its own step. State that follows from a batch and is kept
beyond it (an average of losses in `on_train_batch_end`, a callback's, an optimiser's that looks at gradients
before they are private) moves every later sample's gradient, too, by as much as it likes. So a copy of the
fit trains on a few batches, and another copy on other ones, of other sizes. Both take the same steps, as if
all gradients had been zero: what is left of the difference is what the batches left outside of the noisy
steps. The gradients of one further batch, an epoch later, and what the hooks of validation log, must then be
the same, bit for bit on a CPU. It finds what shows within a few batches: it is a test, and no proof.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.clients.fit import Batches, Client, ClientFit
from lightning_fedq.clients.hooks import call_hooks

_NOISE = 10.0
"""On a device whose sums are not the same twice: so many times the difference of equal trainings passes."""
_WAYS = ((2, 3, 2), (3, 4, 2))
"""Sizes of the batches that are to leave nothing behind."""

Seen = tuple[list[Tensor], dict[str, float]]


def check_between_steps(home: Any, fetch: Callable[[Tensor], Any], held: Tensor, loader: Any) -> None:
    """Refuse a training in which one batch moves the gradients of another.

    Args:
        home: The user's Trainer, in its fit, whose module has no hooks of Opacus's.
        fetch: Batch of some samples.
        held: Samples that may be tried; their order decides which ones are.

    Raises:
        ValueError: If it does, with the cure.
    """
    ways, start = list[list[Any]](), 1
    last = fetch(held[torch.arange(4) % len(held)])
    for sizes in _WAYS:
        ways.append([])
        for size in sizes:
            ways[-1].append(fetch(held[torch.arange(start, start + size) % len(held)]))
            start += size
    one, other = (_train(home, first, last, loader) for first in ways)
    allowed = 0.0
    if any(gradient.device.type != "cpu" for gradient in one[0]):
        allowed = _NOISE * _distance(one[0], _train(home, ways[0], last, loader)[0])
    if _distance(one[0], other[0]) > allowed:
        raise ValueError(
            "what earlier batches have left behind changes the gradients of a later one, so that one sample "
            "moves all steps that follow its own, and clipping bounds nothing: a value that follows from "
            "losses, gradients or batches is kept beyond its step (in on_train_batch_end, in another hook, "
            "by a callback or a global variable), or a random generator of one's own goes on from batch to "
            "batch. Leave it out of the loss, or compute it from weights, which are private, or from "
            "trainer.global_step; draw from torch.rand, np.random or random without a generator"
        )
    names = sorted(
        name for name in {*one[1], *other[1]} if not _is_same_number(one[1].get(name), other[1].get(name))
    )
    if names:
        raise ValueError(
            f"validation logs {', '.join(names)}, which follow from training batches: exact figures "
            "that no epsilon covers, in log files, names of checkpoints and decisions; log them with "
            "self.log in training_step, which DPSGD withholds from whoever decides"
        )


def _train(home: Any, first: Sequence[Any], last: Any, loader: Any) -> Seen:
    """Gradients of the last batch, and what the hooks of validation log, after the first batches."""
    fit = ClientFit(home)
    client = fit.copy(0, alone=True)
    child, seen = client.trainer, list[list[Tensor]]()
    vars(child.precision_plugin).pop("train_step_context", None)  # of the steps that are noisy
    child.fit_loop.epoch_loop.max_steps = -1
    child.save_checkpoint = lambda *args, **kwargs: None  # of a trial nothing is kept
    _take_no_steps(child, seen)
    logged = dict[str, float]()
    with pl.utilities.seed.isolate_rng(include_cuda=False):
        fit.train(client, Batches(iter(first), len(first), loader), 0)
        if home.enable_validation:
            _validate(home, client, logged)
    with pl.utilities.seed.isolate_rng(include_cuda=False):
        call_hooks(child, client.callbacks, "on_train_epoch_start")
        client.module.on_train_epoch_start()
        fit.train(client, Batches(iter([last]), 1, loader), len(first))
    fit.drop(client)
    return seen[-1], logged


def _take_no_steps(trainer: Any, seen: list[list[Tensor]]) -> None:
    """Let the optimiser see gradients of zero, after everybody else has seen the true ones."""
    optimizer = trainer.strategy.optimizers[0]
    optimizer = getattr(optimizer, "original_optimizer", optimizer)
    trainer.strategy.optimizers = [optimizer]
    take = optimizer.step

    def step(closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            closure()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]
        seen.append(found)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return take()

    optimizer.step = step


def _validate(home: Any, client: Client, logged: dict[str, float]) -> None:
    """Validate on one batch, and keep what is logged there."""
    module: Any = client.module
    loop = home.fit_loop.epoch_loop.val_loop
    loop.setup_data()
    if loop.skip or loop._combined_loader is None:
        return
    loaders = loop._combined_loader.flattened
    args = (next(iter(loaders[0])), 0, *([0] if len(loaders) > 1 else []))
    args = (home.strategy.batch_to_device(args[0], dataloader_idx=0), *args[1:])

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, int | float | Tensor):
            logged[name] = float(value)

    own = module.log, module.log_dict
    module.log = log

    def log_dict(values: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            log(name, value)

    module.log_dict = log_dict
    modes = {part: part.training for part in module.modules()}
    module.eval()

    def call(hook: str, *given: Any) -> None:
        call_hooks(client.trainer, client.callbacks, hook, *given)
        getattr(module, hook)(*given)

    with torch.no_grad():
        call("on_validation_start")
        call("on_validation_epoch_start")
        call("on_validation_batch_start", *args)
        outputs = module.validation_step(*args)
        call("on_validation_batch_end", outputs, *args)
        call("on_validation_epoch_end")
        call("on_validation_end")
    for part, training in modes.items():
        part.training = training
    module.log, module.log_dict = own


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    found = 0.0
    for first, second in zip(one, other, strict=True):
        if not torch.equal(first.nan_to_num(), second.nan_to_num()):
            found = max(found, float((first - second).abs().nan_to_num(torch.inf).max()))
    return found


def _is_same_number(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and one != one and other != other)
