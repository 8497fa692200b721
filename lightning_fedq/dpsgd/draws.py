"""Does a training draw from generators that `DPSGD` does not fill? Tried on a few samples.

All random draws of a step must come from a secret of that step: who knows them sees what a sample more shifts
in those of all others. The default generators of torch, NumPy and Python are filled before every batch. A
generator of one's own that goes on from batch to batch is not, nor is one that a step seeds itself. What only
shows in some batches is not found: it is a test, and no proof.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fedq.data.generator_turns import preserve_generators, seed_generators, states_of_defaults
from lightning_fedq.dpsgd.refusals import equal

_KEYS = bytes(32), bytes(31) + b"\1"
"""Of trials, whose draws nobody trains on."""


def check_draws_of_data(fetch: Callable[[Tensor], Any], samples: Tensor) -> None:
    """Refuse data whose random transforms draw from a generator that goes on from batch to batch.

    Args:
        fetch: Batch of some samples.
        samples: Samples to fetch, two or more.

    Raises:
        ValueError: If the same samples with the same draws differ once others were fetched.
    """
    found = []
    with preserve_generators():
        for _ in range(2):
            seed_generators(_KEYS[0])
            found.append(tree_leaves(fetch(samples)))
            fetch(samples[:1])
    if not all(_is_same_value(one, other) for one, other in zip(*found, strict=True)):
        raise ValueError(
            "samples differ from one fetch to the next though torch's, NumPy's and Python's own generators "
            "begin alike: a data set, transform or collate_fn draws from a generator of its own, which goes "
            "on from batch to batch, so that one sample more changes what all others draw; draw from "
            "torch.rand, np.random or random without a generator, which DPSGD fills from a secret"
        )


def check_draws_of_step(step: Callable[[Any], Any], batch: Any) -> None:
    """Refuse a training step that seeds the generators it draws from.

    Args:
        step: Loss of a batch.

    Raises:
        ValueError: If a generator ends in the same state wherever it began.
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
            f"training_step seeds {' and '.join(seeded)}, so that its draws are known to whoever knows the "
            "program, and one sample more shifts those of all others; leave the seed out, DPSGD draws from "
            "a secret of every step"
        )


def _is_same_value(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return equal(one, other)
    return type(one) is type(other)
