import pytest
import torch

from lightning_fedq.data.datasets import DigitsDataModule, TensorDataModule, split_indices


class Counted(TensorDataModule):
    """100 samples numbered in order, of which the last 20 are the official test set."""

    def load(self):
        return torch.arange(100.0)[:, None], torch.arange(100), 20


def test_split_covers_every_sample_once():
    train, val, test = split_indices(1000, 200, seed=3)
    assert (len(train), len(val), len(test)) == (640, 160, 200)
    assert torch.equal(torch.cat([train, val, test]).sort().values, torch.arange(1000))


def test_official_test_set_stays_apart_unless_pooled():
    official, pooled = (Counted(8, pooled, None, None, seed=0) for pooled in (False, True))
    for data in (official, pooled):
        data.setup("fit")
        assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [64, 16, 20]
    assert official.test_set.tensors[1].tolist() == list(range(80, 100))
    assert pooled.test_set.tensors[1].min() < 80


def test_limits_keep_the_test_set_whole():
    data = Counted(8, False, 10, 5, seed=0)
    data.setup("fit")
    whole = Counted(8, False, None, None, seed=0)
    whole.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [10, 5, 20]
    assert torch.equal(data.train_set.tensors[1], whole.train_set.tensors[1][:10])


def test_loaders():
    data = Counted(8, False, None, None, seed=0)
    data.setup("fit")
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 64
    assert next(iter(data.train_dataloader()))[0].shape == (8, 1)
    for loader, count in (
        (data.val_dataloader(), 16),
        (data.test_dataloader(), 20),
        (data.predict_dataloader(), 20),
    ):
        assert sum(len(labels) for _, labels in loader) == count


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"batch_size must be >= 1, got 0"):
        Counted(0, False, None, None, seed=0)


# ---- digits --------------------------------------------------------------------------------------------
def test_digits_are_split_without_overlap():
    data = DigitsDataModule()
    data.setup("fit")
    parts = [data.train_set, data.val_set, data.test_set]
    assert [len(part) for part in parts] == [1150, 288, 359]
    rows = torch.cat([part.tensors[0].flatten(1) for part in parts])
    assert rows.shape == (1797, 64)
    assert rows.min() == -1.0 and rows.max() == 1.0
    assert len(rows.unique(dim=0)) == 1797  # digits holds no duplicate, so no sample is in two parts


def test_another_seed_gives_another_split_and_the_same_seed_the_same():
    first, again, other = (DigitsDataModule(seed=seed) for seed in (0, 0, 1))
    for data in (first, again, other):
        data.setup("fit")
    assert torch.equal(first.test_set.tensors[1], again.test_set.tensors[1])
    assert not torch.equal(first.test_set.tensors[0], other.test_set.tensors[0])


def test_too_large_a_limit_is_refused():
    with pytest.raises(ValueError, match=r"num_train is 2000, but there are only 1150"):
        DigitsDataModule(num_train=2000).setup("fit")
