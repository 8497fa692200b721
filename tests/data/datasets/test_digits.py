import pytest
import torch

from lightning_fedq.data.datasets import DigitsDataModule


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
    with pytest.raises(ValueError, match=r"num_train = 2000, but there are only 1150"):
        DigitsDataModule(num_train=2000).setup("fit")
