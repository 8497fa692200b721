"""Trial of a few samples before the first charge of an epoch: loss, gradients, draws, and later steps."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.clients.fit import ClientFit
from lightning_fedq.dpsgd.between_steps import check_between_steps
from lightning_fedq.dpsgd.draws import check_draws_of_data
from lightning_fedq.dpsgd.loss_reduction import loss_reduction, samples_to_try
from lightning_fedq.dpsgd.refusals import check_kinds, check_layers

Reduction = Literal["mean", "sum"]


class TriedData(NamedTuple):
    """Samples for a trial.

    Args:
        indices: Sample indices, of all clients in a federation.
        fetch: Returns the batch of the samples with the given indices.
        of_clients: Are they of a federation's clients? Then a copy of the fit is tried, which is not trained.
    """

    indices: Tensor
    fetch: Callable[[Tensor], Any]
    of_clients: bool


def try_steps(
    home: Any, module: pl.LightningModule, data: TriedData, before: Reduction | None
) -> tuple[Reduction, list[str]]:
    """Check the loss and the gradients of a few samples.

    A module may change its loss from epoch to epoch. Only the first check chooses the loss reduction, since
    the choice follows from raw data. Later checks can only stop the run.

    Args:
        home: The user's Trainer.
        module: The user's module, without Opacus's hooks at this time.
        data: Samples. Each epoch tries others.
        before: Loss reduction that an earlier check has found. None at the first check.

    Returns:
        The loss reduction, and the names of the metrics that were logged.

    Raises:
        ValueError: If a check of `dpsgd.loss_reduction`, `dpsgd.draws` or `dpsgd.between_steps` fails.
    """
    from lightning_fedq.dpsgd.opacus import SampleGradientHooks

    check_kinds(module)
    trainer, epoch, held, fetch = home, home.current_epoch, data.indices, data.fetch
    if data.of_clients:
        copy = ClientFit(home).copy(0, alone=True)
        trainer, module = copy.trainer, copy.module
    tried = samples_to_try(len(held), epoch)
    check_draws_of_data(fetch, held[tried])
    batch = fetch(held[tried])
    try:
        again = lambda: fetch(held[tried].flip(0))  # noqa: E731
        reduction = loss_reduction(trainer, module, batch, SampleGradientHooks, before, again)
    except Exception:
        check_layers(module)  # mixing layers fail on a batch of one, with a less helpful error
        raise
    return reduction, check_between_steps(
        home, fetch, held[torch.roll(tried, epoch)], trainer.train_dataloader
    )
