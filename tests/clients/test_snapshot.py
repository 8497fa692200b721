"""Copies of a training state: what pickle alone would lose."""

import weakref

import pytest
import torch
from torch import nn

from lightning_fedq.clients.snapshot import Snapshot


class Target:
    """Target of weak references, which is deleted at once."""


def copied(module):
    return Snapshot([module]).load(1)[1][0]


def test_references_to_what_is_gone_are_dead_in_a_copy():
    module, target = nn.Linear(2, 2), Target()
    module.reference, module.proxy = weakref.ref(target), weakref.proxy(target)
    del target
    copy = copied(module)
    assert isinstance(copy.reference, weakref.ref) and copy.reference() is None
    with pytest.raises(ReferenceError):
        copy.proxy.name  # noqa: B018


def test_references_lead_to_the_copy_of_their_target():
    module = nn.Module()
    module.inner = nn.Linear(2, 2)
    module.reference, module.proxy = weakref.ref(module.inner), weakref.proxy(module.inner)
    copy = copied(module)
    assert copy.reference() is copy.inner and copy.inner is not module.inner
    assert copy.proxy.weight is copy.inner.weight


def test_views_of_one_memory_stay_views_of_one_memory():
    whole = torch.arange(4.0)
    module = nn.Module()
    module.part, module.whole, module.array = whole[1:], whole, whole.numpy()[2:]
    copy = copied(module)
    copy.whole += 1.0
    assert copy.part.tolist() == [2.0, 3.0, 4.0] and copy.array.tolist() == [3.0, 4.0]
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]
