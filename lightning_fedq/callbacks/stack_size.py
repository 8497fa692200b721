"""How many clients train side by side in one step: as asked for, or what a rehearsal finds faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from lightning_fedq._lightning import rank_zero_info, rank_zero_warn
from lightning_fedq.data.batches import Stack
from lightning_fedq.rounds import RoundPlanner
from lightning_fedq.strategies.rehearsal import elementwise, rehearse

_STACK_VALUES = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Parameters of all clients of an automatically sized stack: 8 MiB of float32 on a CPU."""


def largest_stack(device: str, num_parameters: int, planner: RoundPlanner) -> int:
    """Clients of an automatically sized stack, by memory and cohort; 0 where not even one fits."""
    budget = _STACK_VALUES.get(device, _STACK_VALUES["cuda"])
    return min(budget // num_parameters, planner.cohort_size)


def choose_clients_per_step(
    trainer: Any,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    wanted: int | Literal["auto"],
    automatic: int,
    largest_of: Callable[[int], Stack],
    first_batch: Callable[[Stack], Any],
    buffer_names: Sequence[str] = (),
) -> int:
    """Return how many clients train side by side, 1 where a stack can't run or does not pay.

    Args:
        trainer: The trainer, its strategy ready.
        optimizer: The user's own.
        names: Of the trained parameters.
        wanted: What the user asked for.
        automatic: The size to try for "auto".
        largest_of: The largest stack of the first round, for a size.
        first_batch: A stack's first batch.
        buffer_names: Of the buffers that training changes.

    Raises:
        ValueError: If a stack was asked for and the optimiser is not elementwise.
    """
    size = automatic if wanted == "auto" else wanted
    if size < 2:
        return 1
    if not elementwise(optimizer):
        name = type(optimizer).__name__
        if wanted != "auto":
            raise ValueError(
                f"{name} is not elementwise, so clients can't train side by side with it; "
                "use clients_per_step=1, or SGD, Adam(W), RMSprop, Adagrad or another "
                "elementwise optimiser"
            )
        rank_zero_warn(
            "Federated trains one client at a time, which is slower and gives the same results, because "
            f"{name} is not elementwise"
        )
        return 1
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        rank_zero_warn(
            "Federated trains one client at a time, which is slower and gives the same results, because "
            "16-mixed precision scales one client's loss; precision='bf16-mixed' has no such scale"
        )
        return 1
    largest = largest_of(size)
    if len(largest.clients) < 2:
        return 1
    batch = trainer.precision_plugin.convert_input(first_batch(largest))
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    found = rehearse(trainer, list(names), batch, wanted == "auto", buffer_names)
    if found.obstacle is not None:
        rank_zero_warn(
            "Federated trains one client at a time, which is slower and gives the same results, because a "
            f"stack of clients can't run: {found.obstacle}"
        )
        return 1
    if wanted != "auto":
        return wanted
    alone = found.single_seconds * len(largest.clients)
    chosen = size if found.stacked_seconds < alone else 1
    rank_zero_info(
        f"Federated: a step of {len(largest.clients)} clients takes {1e3 * found.stacked_seconds:.1f} ms "
        f"side by side and {1e3 * alone:.1f} ms one at a time; clients_per_step = {chosen}"
    )
    return chosen
