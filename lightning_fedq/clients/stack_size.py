"""Number of clients that train in one step: as requested, or chosen by a rule.

The rule measures no time, so a run is reproducible from its seed. A stack saves the fixed cost of a step. It
is slower where arithmetic dominates, because convolutions and products with many sets of weights are slower
than with one set. `benchmarks/rounds.py` times both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning_fedq._lightning import rank_zero_info, rank_zero_warn
from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.stack import ELEMENTWISE_OPTIMIZERS
from lightning_fedq.clients.stack_trial import Rehearsal, error_line, rehearse
from lightning_fedq.clients.vector import Vector
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.sampling import in_short

_STACK_VALUES = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Parameters of all clients in an automatically sized stack: 8 MiB of float32 on a CPU."""
_STEP_FLOPS = {"cpu": 2e8, "cuda": 2e10}
"""Operations of one client's step up to which a stack is faster. Measured on a CPU core in a stack of 16: a
CNN or a transformer with 5e7 operations is 1.2 to 1.8 times as fast, with 2e8 equally fast, with 5e8 slower.
The value for a GPU is not measured."""
_FEWEST = 4
"""Number of clients below which a stack is not faster."""
_CHEAP_FLOPS, _CHEAP_STACKS = {"cpu": 3e8}, 4
"""Operations of a whole stack's step up to which the fixed cost dominates (about 3 ms on a CPU core), so
larger stacks are faster. They may use up to this multiple of the memory."""


def with_cheap_steps(device: str, size: int, flops: int, cohort_size: int) -> int:
    """Return the size of a stack, larger than `size` if a client's step takes few operations.

    Args:
        device: Type of the device, such as "cpu".
        size: Size that fits into memory.
        flops: Operations of one client's step.
        cohort_size: Clients per round.

    Examples:
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
    """Return the number of clients per step: 1 if a stack is impossible or not faster.

    Args:
        trainer: User's Trainer during its fit.
        begin: Function from a seed to a client's copy that is ready to train.
        vector: Flat vector of the sent tensors.
        requested: Number of clients that the user requested, or "auto".
        cohort_size: Clients per round.
        largest_stack_size: Function from a size to the largest stack of the first round.
        first_batch: Function that reads the first batch of a stack.
        run_trial: Function that runs a trial without side effects, such as in a fork.

    Raises:
        ValueError: If the user requested a stack and the optimiser is not elementwise.
    """
    device = vector.parameters[0].device.type
    fits = _STACK_VALUES.get(device, _STACK_VALUES["cuda"]) // vector.width
    size = min(fits, cohort_size) if requested == "auto" else requested
    if size < 2:
        return 1
    asked = requested != "auto"
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    if not module.automatic_optimization:
        return _report_single_clients(f"{type(module).__name__} uses manual optimisation", asked)
    if integers := vector.members.integers:
        names = ", ".join(integers)
        return _report_single_clients(
            f"every client keeps its own integer buffers ({names}), and a stack has floats only", asked
        )
    frozen = {name for name, _ in vector.module.named_parameters()} & set(vector.members.buffers)
    if frozen:  # torch crashes if training assigns a mapped tensor to `.data` of a frozen parameter
        names = in_short(sorted(frozen), 4)
        return _report_single_clients(f"training writes into frozen parameters ({names})", asked)
    if type(optimizer) not in ELEMENTWISE_OPTIMIZERS:
        name = type(optimizer).__name__
        if asked:
            raise ValueError(
                f"{name} is not elementwise, so clients can't train in one step. "
                "Use clients_per_step=1, or SGD, Adam(W), RMSprop, Adagrad or another elementwise one."
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
        trial = run_trial(lambda: rehearse(trainer, begin, vector, first_batch(largest)))
    except Exception as error:  # from the user's code that reads a batch, or from a fork
        trial = Rehearsal(error_line(error))
    if trial.obstacle is not None:
        return _report_single_clients(f"a stack of clients can't run: {trial.obstacle}")
    if requested != "auto":
        return requested
    limit = _STEP_FLOPS.get(trainer.strategy.root_device.type, _STEP_FLOPS["cuda"])
    equal = len(largest.clients)
    reason = f"a client's step takes {trial.flops:.0e} operations, stacks are faster up to {limit:.0e}"
    if equal < _FEWEST:
        reason = (
            f"only {equal} of a round's clients have batches of the same sizes, and a stack needs {_FEWEST} "
            "to be faster"
        )
    is_faster = trial.flops <= limit and equal >= _FEWEST
    chosen = with_cheap_steps(device, size, trial.flops, cohort_size) if is_faster else 1
    rank_zero_info(f"Federated: clients_per_step = {chosen} ({reason})")
    return chosen


def _report_single_clients(reason: str, warn: bool = True) -> int:
    """Report why clients train one at a time, and return 1."""
    (rank_zero_warn if warn else rank_zero_info)(
        f"Federated trains one client at a time, which is slower with the same results, because {reason}"
    )
    return 1
