"""`Mechanism.influence`: no message that a server accepts decodes beyond it, and some message comes near."""

import math

import pytest
import torch

from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import CPA
from lightning_fedq.mechanisms.contract_suite import make_context
from lightning_fedq.wire.coding import FixedLength
from tests.contract.test_mechanisms import ROWS

CLIENT = 4
BOUNDED = [m for m in ROWS if (m.influence(CLIENT, make_context(m, (4, 9))) or math.inf) < math.inf]


def messages(mechanism, context, public):
    """Rows of symbols: both ends of their range alone and mixed, and anything between."""
    count, code = mechanism.num_symbols(context), mechanism.code(context)
    bounds = mechanism.symbol_range(context, public)
    if bounds is None:
        assert isinstance(code, FixedLength)
        low = -(2 ** (code.bits_per_symbol - 1)) if code.signed else 0
        bounds = low, low + 2**code.bits_per_symbol - 1
    low, high = (torch.as_tensor(bound).expand(count).long() for bound in bounds)
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(60, count, generator=generator, dtype=torch.float64)
    shares[:40] = shares[:40].round()
    shares[0], shares[1] = 0.0, 1.0
    rows = low + ((high - low) * shares).round().long()
    one = torch.zeros(1, count, dtype=torch.long)  # one large coordinate, where the whole length is checked
    one[0, 0] = high[0]
    return torch.cat([rows, one])


@pytest.mark.parametrize("mechanism", BOUNDED, ids=repr)
def test_no_message_goes_beyond_and_one_comes_near(mechanism):
    longest = mechanism.longest_update(64)
    radius = longest if mechanism.range_rule else 1.0
    context = make_context(mechanism, (4, 9), (40, 24), radius=radius)
    public, influence = PublicRandomness(SeededKeys(0), 0), mechanism.influence(CLIENT, context)
    blocks = mechanism.block_dim if isinstance(mechanism, CPA) else 1 if longest is None else 64
    unit = mechanism._design.limit if isinstance(mechanism, CPA) else longest or 1.0
    found, noise = [], 0.0
    if mechanism.has_central_noise:  # the server's own, whoever sends
        noise = mechanism.decode(torch.zeros(1, 64, dtype=torch.int32), (CLIENT,), context, public)
    for row in messages(mechanism, context, public):
        if mechanism.can_send(row, CLIENT, context, public):
            decoded = (mechanism.decode(row[None], (CLIENT,), context, public) - noise).double()
            found.append(float(decoded.reshape(-1, blocks).norm(dim=1).max()) / unit)
    assert max(found) <= influence * (1.0 + 1e-6)
    # codewords of nested lattices differ in length, and only some are drawn
    assert max(found) >= (0.1 if isinstance(mechanism, CPA) else 0.4) * influence
