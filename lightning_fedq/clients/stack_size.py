"""Number of clients that train side by side in one step: as asked for, or by a rule of size.

The rule looks at no clock, so that one seed is one run: a stack saves what a step costs beside its
arithmetic and loses where the arithmetic dominates, since convolutions and products of many sets of weights
are slower than of one. `benchmarks/rounds.py` times both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning_fedq._lightning import rank_zero_info, rank_zero_warn
from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.stack_trial import Rehearsal, elementwise, error_line, rehearse
from lightning_fedq.clients.vector import Vector
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.sampling import in_short

_STACK_VALUES = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Parameters of all clients of an automatically sized stack: 8 MiB of float32 on a CPU."""
_STEP_FLOPS = {"cpu": 2e8, "cuda": 2e10}
"""Operations of one client's step up to which a stack pays. Of a CPU's core: a CNN or a transformer of 5e7 is
1.2 to 1.8 times as fast in a stack of 16, one of 2e8 as fast, one of 5e8 slower. Of a GPU: not measured."""
_FEWEST = 4
"""Clients below which a stack does not pay."""
_CHEAP_FLOPS, _CHEAP_STACKS = {"cpu": 3e8}, 4
"""Operations of a whole stack's step up to which what surrounds it is dearer, some 3 ms of a CPU's core, so
that larger stacks pay, up to so many times the memory."""


def largest_stack(device: str, num_parameters: int, cohort_size: int) -> int:
    """Clients of an automatically sized stack, by memory and cohort. 0 where not even one fits."""
    budget = _STACK_VALUES.get(device, _STACK_VALUES["cuda"])
    return min(budget // num_parameters, cohort_size)


def with_cheap_steps(device: str, size: int, flops: int, cohort_size: int) -> int:
    """Clients of a stack whose size follows from memory, more where a client's step takes few operations.

    Example:
        >>> with_cheap_steps("cpu", 267, 235_200, 1000), with_cheap_steps("cpu", 40, 50_000_000, 1000)
        (1000, 40)
    """
    cheap = int(_CHEAP_FLOPS.get(device, 0.0) / max(flops, 1))
    return max(size, min(cheap, _CHEAP_STACKS * size, cohort_size))


def choose_clients_per_step(
    trainer: Any,
    begin: Callable[[int], Client],
    vector: Vector,
    requested: int | Literal["auto"],
    cohort_size: int,
    largest_stack_size: Callable[[int], Stack],
    first_batch: Callable[[Stack], Any],
    run_trial: Callable[[Callable[[], Rehearsal]], Rehearsal] = lambda work: work(),
) -> int:
    """Return how many clients train side by side, 1 where a stack can't run or does not pay.

    Args:
        begin: Returns a client's copy that is about to train, for a seed.
        largest_stack_size: The largest stack of the first round, for a size.
        run_trial: Tries something where it leaves nothing behind.

    Raises:
        ValueError: If a stack was asked for and the optimiser is not elementwise.
    """
    device = vector.parameters[0].device.type
    size = largest_stack(device, vector.width, cohort_size) if requested == "auto" else requested
    if size < 2:
        return 1
    asked = requested != "auto"
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    if not module.automatic_optimization:
        return _report_single_clients(f"{type(module).__name__} uses manual optimisation", asked)
    if integers := vector.members.integers:
        names = ", ".join(integers)
        return _report_single_clients(
            f"every client keeps integers of its own ({names}), and a stack is of floats", asked
        )
    frozen = {name for name, _ in vector.module.named_parameters()} & set(vector.members.buffers)
    if frozen:  # torch crashes where `.data` of one is replaced by a tensor of the map
        names = in_short(sorted(frozen), 4)
        return _report_single_clients(f"training writes into frozen parameters ({names})", asked)
    if not elementwise(optimizer):
        name = type(optimizer).__name__
        if asked:
            raise ValueError(
                f"{name} is not elementwise, so clients can't train side by side with it; "
                "use clients_per_step=1, or SGD, Adam(W), RMSprop, Adagrad or another "
                "elementwise optimiser"
            )
        return _report_single_clients(f"{name} is not elementwise")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return _report_single_clients(
            "16-mixed precision scales one client's loss; precision='bf16-mixed' has no such scale"
        )
    largest = largest_stack_size(size)
    if len(largest.clients) < 2:
        return _report_single_clients(
            "no two clients of the first round have batches of the same sizes", False
        )

    try:
        found = run_trial(lambda: rehearse(trainer, begin, vector, first_batch(largest)))
    except Exception as error:  # of the user's code, as it reads a batch, or of a fork
        found = Rehearsal(error_line(error))
    if found.obstacle is not None:
        return _report_single_clients(f"a stack of clients can't run: {found.obstacle}")
    if requested != "auto":
        return requested
    limit = _STEP_FLOPS.get(trainer.strategy.root_device.type, _STEP_FLOPS["cuda"])
    alike = len(largest.clients)
    pays = found.flops <= limit and alike >= _FEWEST
    why = f"a client's step takes {found.flops:.0e} operations, stacks pay up to {limit:.0e}"
    if alike < _FEWEST:
        why = (
            f"only {alike} of a round's clients have batches of the same sizes, and fewer than {_FEWEST} "
            "side by side train no faster than one after the other"
        )
    size = with_cheap_steps(device, size, found.flops, cohort_size)
    rank_zero_info(f"Federated: clients_per_step = {size if pays else 1} ({why})")
    return size if pays else 1


def _report_single_clients(reason: str, warn: bool = True) -> int:
    """Say why clients train one at a time."""
    (rank_zero_warn if warn else rank_zero_info)(
        f"Federated trains one client at a time, which is slower and gives the same results, because {reason}"
    )
    return 1
