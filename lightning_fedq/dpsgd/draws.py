"""Check, on a few samples, that a training draws only from the generators that `DPSGD` seeds.

All random draws of a step must come from a secret key of that step. An adversary who knows the draws sees how
one additional sample shifts the draws of all others. `DPSGD` fills the default generators of torch, NumPy and
Python before every batch. It can't fill a user-defined generator that continues from batch to batch, nor one
that the training step seeds itself. Draws that happen in some batches only are not found, so this is a test
and no proof.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fedq.clients.changed_tensors import are_equal
from lightning_fedq.data.generator_turns import preserve_generators, seed_generators, states_of_defaults

_KEYS = bytes(32), bytes(31) + b"\1"
"""Fixed keys for the trials. No training uses draws from them."""


def check_draws_of_data(fetch: Callable[[Tensor], Any], samples: Tensor) -> None:
    """Refuse data whose random transforms draw from a generator that goes on from batch to batch.

    Args:
        fetch: Returns the batch of the samples with the given indices.
        samples: Indices of the samples to fetch, two or more.

    Raises:
        ValueError: If the same samples differ in a second fetch with the same key, after another fetch. One
            additional sample would then change the draws of all others.
    """
    batches = []
    with preserve_generators():
        for _ in range(2):
            seed_generators(_KEYS[0])
            batches.append(tree_leaves(fetch(samples)))
            fetch(samples[:1])
    if not all(_is_same_value(one, other) for one, other in zip(*batches, strict=True)):
        raise ValueError(
            "A data set, transform or collate_fn draws from its own generator, which continues from batch to "
            "batch. Draw from torch.rand, np.random or random without a generator, which DPSGD seeds."
        )


def check_draws_of_step(step: Callable[[Any], Any], batch: Any) -> None:
    """Refuse a training step that seeds the generators it draws from.

    Args:
        step: Returns the loss of a batch.
        batch: Batch to try.

    Raises:
        ValueError: If a default generator ends in the same state for two different keys. The step has then
            seeded it, and anybody who knows the program knows its draws.
    """
    ends = []
    with preserve_generators():
        for key in _KEYS:
            seed_generators(key)
            step(batch)
            ends.append(states_of_defaults())
    seeded = [name for name, end in ends[0].items() if end == ends[1][name]]
    if seeded:
        raise ValueError(
            f"training_step seeds {' and '.join(seeded)}, so its random draws are not secret. "
            "Leave the seed out: DPSGD seeds every step from a secret key."
        )


def _is_same_value(one: Any, other: Any) -> bool:
    """Return whether two leaves of a batch are equal tensors, or other values of the same type."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return are_equal(one, other)
    return type(one) is type(other)
