"""All contract rows on a device that is not the CPU: `tests.elsewhere`."""

import pytest
import torch

from tests import elsewhere
from tests.contract.test_mechanisms import ROWS
from tests.one_round import context_of, decode, encode, updates_for


def test_it_refuses_to_mix_with_the_cpu():
    there, here = torch.ones(3, device=elsewhere.DEVICE), torch.ones(3)
    for work in (lambda: there + here, lambda: torch.cat([here, there]), lambda: here.mul_(there)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            work()
    with pytest.raises((TypeError, RuntimeError), match="numpy"):
        there.numpy()
    assert torch.equal((there * torch.tensor(2.0)).cpu(), 2.0 * here)


@pytest.mark.parametrize("mechanism", ROWS, ids=repr)
def test_messages_and_sums_are_the_cpus_bit_for_bit(mechanism):
    clients = (4, 9, 2, 7, 5, 1)
    context = context_of(mechanism, clients, (40, 24), radius=(1.0, 0.9))
    updates = updates_for(len(clients))
    message, there = (encode(mechanism, rows, context) for rows in (updates, updates.to(elsewhere.DEVICE)))
    assert there.symbols.device == elsewhere.DEVICE
    assert torch.equal(there.symbols.cpu(), message.symbols)
    assert (there.num_bits, there.num_clipped) == (message.num_bits, message.num_clipped)
    total = decode(mechanism, message.symbols, clients, context)
    found = decode(mechanism, there.symbols, clients, context)
    assert found.device == elsewhere.DEVICE
    assert torch.equal(found.cpu(), total)
