import pytest
import torch

from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import MVU, JoPEQ, SignRR
from lightning_fedq.mechanisms.bases.received import check_received
from tests.one_round import make_context


def test_messages_and_their_sums():
    check_received(torch.tensor([[0, 3], [3, 1]]), 2, 2, 3)
    check_received(torch.tensor([3, 6]), 2, 2, 3)
    check_received(torch.empty(0, 2, dtype=torch.int64), 0, 2, 3)
    for wrong in ([[0, 4], [0, 0]], [[-1, 0], [0, 0]], [7, 0], [[0.5, 1.0], [0.0, 0.0]]):
        with pytest.raises(ValueError, match="symbols must be integers in"):
            check_received(torch.tensor(wrong), 2, 2, 3)


@pytest.mark.parametrize("mechanism", [SignRR(1.0), SignRR(1.0, "majority"), JoPEQ(1.0), MVU(1.0)], ids=repr)
def test_a_server_refuses_what_nobody_can_have_sent(mechanism):
    context, public = make_context(mechanism, (0, 1)), PublicRandomness(SeededKeys(0), 0)
    with pytest.raises(ValueError, match=r"messages must have shape \(2, 8\)"):
        mechanism.decode(torch.zeros(2, 7, dtype=torch.int64), (0, 1), context, public)
    with pytest.raises(ValueError, match="Drop the client that sent something else"):
        mechanism.decode(torch.full((2, 8), 9), (0, 1), context, public)
