import pytest
import torch

from lightning_fedq.data.partition import IID, Dirichlet, LabelShards

LABELS = torch.arange(1000) % 10
RULES = [IID(), Dirichlet(0.5), LabelShards(2)]


def split(rule, num_clients, seed=0):
    return rule.split(LABELS, len(LABELS), num_clients, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_follows_the_generator(rule):
    first, again, other = split(rule, 8), split(rule, 8), split(rule, 8, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_label_shards_show_few_labels():
    assert max(len(LABELS[part].unique()) for part in split(LabelShards(2), 50)) <= 4
    assert {len(part) for part in split(LabelShards(2), 50)} == {20}


def test_refusals():
    generator = torch.Generator()
    with pytest.raises(ValueError, match="num_clients must be >= 1, got 0"):
        IID().split(None, 3, 0, generator)
    with pytest.raises(ValueError, match="alpha must be > 0 and finite, got nan"):
        Dirichlet(float("nan"))
    with pytest.raises(ValueError, match="shards_per_client must be >= 1, got 0"):
        LabelShards(0)


def test_one_client_has_the_samples_in_their_own_order():
    """As the training without clients has them, where the loader does not shuffle."""
    assert torch.equal(split(IID(), 1)[0], torch.arange(len(LABELS)))
