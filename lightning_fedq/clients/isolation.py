"""Does what one client trains on move another one's update? Tried before the first round.

Clients train on copies, so that what they leave in objects is dropped with them. What lies outside of every
object stays: module-level globals, class attributes, caches, files, data sets and transforms that remember.
Nobody can list these. So a client is trained, then another one, then the first again, on fresh copies: its
two updates must be the same, bit for bit on a CPU. It finds what shows within a client's first batches: it is
a test, and no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fedq._lightning import rank_zero_info
from lightning_fedq.data.batches import Stack

_BATCHES = 8
"""Most batches of each training."""
_NOISE = 10.0
"""On a device whose sums are not the same twice: so many times the difference of equal trainings passes."""


def check_isolation(train: Callable[[Stack, int], Tensor], clients: Sequence[Stack]) -> None:
    """Refuse a training in which one client's data move another one's update.

    Args:
        train: Trains a client on at most so many batches, and returns its update `(dim,)`.
        clients: At least two, one a stack; no more are looked at.

    Raises:
        ValueError: If they do, with what may be the cause.
    """
    if len(clients) < 2:
        rank_zero_info("isolation of the clients is not checked, because there is one client only")
        return
    one, other = clients[:2]
    first = train(one, _BATCHES)
    noise = 0.0
    if first.device.type != "cpu":
        noise = _NOISE * _distance(first, train(one, _BATCHES))
    train(other, _BATCHES)
    again = train(one, _BATCHES)
    if _distance(first, again) > noise:
        raise ValueError(
            f"clients are not isolated: client {one.clients[0]} trained twice from the same start, and its "
            f"update was another one after client {other.clients[0]} had trained. Something outlives a "
            "client: a global variable, a class attribute, a cache, a file, or a data set, a transform or a "
            "collate_fn with memory or a random generator of its own. Keep it in the module or in a "
            "callback, of which every client has a copy, and draw from the generators of torch, NumPy or "
            "Python; or, where it tells nothing of anybody's data, use Federated(check_isolation=False)"
        )


def _distance(one: Tensor, other: Tensor) -> float:
    if torch.equal(one.nan_to_num(), other.nan_to_num()):
        return 0.0
    return float((one - other).abs().nan_to_num(torch.inf).max())
