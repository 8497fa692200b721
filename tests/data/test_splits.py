"""Natural users, unequal amounts and unequal inputs."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_fedq.data import Dirichlet, FeatureShards, Natural, QuantitySkew, Sizes
from lightning_fedq.data.columns import read_column
from lightning_fedq.data.loader import partition_dataset

USERS = torch.tensor([7, 3, 7, 5, 3, 3, 9, 5, 7, 9, 9, 9])
INPUTS = torch.arange(12.0)[:, None].flip(0) * torch.ones(2)
LABELS = torch.arange(12) % 3
TABLE = TensorDataset(INPUTS, LABELS, USERS)


class Rows(Dataset[Any]):
    """Dictionaries, as many data sets have them."""

    def __len__(self):
        return len(USERS)

    def __getitem__(self, index):
        return {"x": INPUTS[index], "y": LABELS[index], "user": f"user {USERS[index]}"}


def deal(dataset, rule, num_clients, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts = partition_dataset(DataLoader(dataset, batch_size=1), rule, num_clients, generator)
    return [part.tolist() for part in parts]


BY_USER = [[1, 4, 5], [3, 7], [0, 2, 8], [6, 9, 10, 11]]


@pytest.mark.parametrize(
    ("dataset", "by"),
    [
        (TABLE, 2),
        (TABLE, lambda sample: int(sample[2])),
        (TABLE, USERS.tolist()),
        (TABLE, USERS),
        (TABLE, USERS.numpy()),
        (Rows(), "user"),
        (Rows(), lambda sample: sample["user"].split()[1]),
    ],
)
def test_the_samples_of_one_user_are_one_client_s(dataset, by):
    assert deal(dataset, Natural(by), 4) == BY_USER


def test_of_a_subset():
    part = Subset(Subset(TABLE, list(range(10))), [0, 1, 2, 9])
    assert deal(part, Natural(2), 3) == [[1], [0, 2], [3]]
    assert deal(Subset(Rows(), [0, 1, 2, 9]), Natural("user"), 3) == [[1], [0, 2], [3]]


def test_users_are_numbered_by_name():
    assert Natural("user").users(Rows()) == ["user 3", "user 5", "user 7", "user 9"]
    assert Natural([2, "b", None]).users([0, 1, 2]) == [None, 2, "b"]


def test_whole_users_are_dealt_out():
    """40 users of 1 to 10 samples to 6 clients: nobody is cut in two, and sizes are close."""
    sizes = [1 + user % 10 for user in range(40)]
    users = torch.repeat_interleave(torch.arange(40), torch.tensor(sizes))
    users = users[torch.randperm(len(users), generator=torch.Generator().manual_seed(1))]
    data = TensorDataset(torch.zeros(len(users), 1), users)
    rule = Natural(1, merge_users=True)
    parts = deal(data, rule, 6)
    homes = [{int(users[index]) for index in part} for part in parts]
    assert sum(map(len, homes)) == 40, "a user is in one place"
    assert max(map(len, parts)) - min(map(len, parts)) <= 2
    assert deal(data, rule, 6) == parts != deal(data, rule, 6, seed=1)


def test_another_number_of_users():
    with pytest.raises(
        ValueError, match=r"of 4 users, but num_clients is 3. Use num_clients=4, or .*merge_users=True"
    ):
        deal(TABLE, Natural(2), 3)
    for merge in (False, True):
        with pytest.raises(ValueError, match=r"of 4 users, but num_clients is 5. Use num_clients=4\.$"):
            deal(TABLE, Natural(2, merge_users=merge), 5)


def test_values_that_are_not_there():
    with pytest.raises(
        ValueError, match=r"Natural found no item 'writer' in the samples of Rows .*Give the index"
    ):
        deal(Rows(), Natural("writer"), 4)
    with pytest.raises(ValueError, match=r"samples have 3 items, got by=3"):
        deal(TABLE, Natural(3), 4)
    with pytest.raises(ValueError, match=r"one value per sample, but item 0 has shape \(2,\)"):
        deal(TABLE, Natural(0), 4)
    with pytest.raises(ValueError, match=r"one value per sample, but 'x' has shape \(2,\)"):
        deal(Rows(), Natural("x"), 4)
    with pytest.raises(ValueError, match=r"one value per sample, got 3 for 12 samples"):
        deal(TABLE, Natural([1, 2, 3]), 3)
    for wrong in (2.5, None, True):
        with pytest.raises(TypeError, match="by must be an index or key"):
            Natural(wrong)


# ---- how much ---------------------------------------------------------------------------------------------


def test_shares_have_the_dirichlet_variance():
    """Of one client: mean 1/n, variance (1/n)(1 - 1/n) / (n alpha + 1), 400 draws.

    The std of the sample variance is below 12% of it, so a 50% band is wrong with probability < 1e-4.
    """
    generator, rule = torch.Generator().manual_seed(3), QuantitySkew(0.7)
    shares = torch.tensor(
        [[(len(p) - 1) / 996 for p in rule.split(None, 1000, 4, generator)] for _ in range(400)]
    )
    expected = 0.25 * 0.75 / (4 * 0.7 + 1)
    assert shares.var(0).mean() == pytest.approx(expected, rel=0.5)
    assert shares.mean(0) == pytest.approx([0.25] * 4, abs=5 * (expected / 400) ** 0.5)


def test_amounts_that_can_not_be():
    with pytest.raises(ValueError, match="min_partition_size must be >= 1, got 0"):
        QuantitySkew(1.0, min_partition_size=0)
    with pytest.raises(ValueError, match="alpha must be > 0"):
        QuantitySkew(0.0)


# ---- what the inputs are ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "by"),
    [
        (TABLE, None),
        (Rows(), None),
        (TABLE, lambda sample: sample[0][0]),
        (TABLE, INPUTS[:, 0]),
        (Rows(), "z"),
    ],
)
def test_every_client_has_a_range_of_its_own(dataset, by):
    if by == "z":
        by = lambda sample: float(sample["x"].sum())  # noqa: E731
    parts = deal(dataset, FeatureShards(by), 4)
    ranges = sorted(tuple(sorted(part)) for part in parts)
    assert ranges == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]


def test_several_ranges_each():
    parts = deal(TABLE, FeatureShards(shards_per_client=3), 4)
    assert sorted(index for part in parts for index in part) == list(range(12))
    assert any(max(part) - min(part) > 2 for part in parts)


def test_words_are_the_same_in_another_process():
    """A checkpoint compares them."""
    assert repr(Natural(read_column)) == "Natural(by=read_column, merge_users=False)"
    assert repr(FeatureShards(USERS)) == "FeatureShards(by=<12 values>, shards_per_client=1)"
    assert repr(FeatureShards()) == "FeatureShards(by=None, shards_per_client=1)"
    assert repr(Natural("user")) == "Natural(by='user', merge_users=False)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((3, 1, 8), [3, 1, 8]),
        ([6.0, 3.0, 3.0], [6, 3, 3]),  # as a YAML has them
        ((0.5, 0.25, 0.25), [6, 3, 3]),
        ((0.98, 0.01, 0.01), [10, 1, 1]),  # nobody is empty
        ((1 / 3, 1 / 3, 1 / 3), [4, 4, 4]),
    ],
)
def test_sizes_are_those_that_are_given(given, expected):
    for rule in (Sizes(given), Dirichlet(0.3, sizes=given)):
        generator = torch.Generator().manual_seed(3)
        parts = rule.split(LABELS, 12, 3, generator)
        assert [len(part) for part in parts] == expected
        assert torch.cat(parts).sort().values.tolist() == list(range(12))
        assert parts[2].tolist() == rule.split(LABELS, 12, 3, torch.Generator().manual_seed(3))[2].tolist()


def test_labels_are_as_skew_in_given_sizes_as_in_drawn_ones():
    """Share of a client's most frequent class: 0.2 for equal shares, and nearly 1 for alpha = 0.02."""
    labels = torch.arange(5900) % 5
    sizes = tuple(300 + 200 * (client % 2) for client in range(15))
    for alpha, low, high in ((1e6, 0.2, 0.27), (0.02, 0.8, 1.0)):
        parts = Dirichlet(alpha, sizes=sizes).split(labels, 5900, 15, torch.Generator().manual_seed(0))
        assert [len(part) for part in parts] == list(sizes)
        share = torch.stack([torch.bincount(labels[part]).max() / len(part) for part in parts]).median()
        assert low <= share <= high


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((3, 1, 7), "sum to 11, but there are 12"),
        ((0.5, 0.2, 0.2), "sum to 0.9"),
        ((3.5, 1.5, 7.0), "integer sizes"),
        ((6, 6), "There are 2 sizes, but num_clients is 3"),
    ],
)
def test_sizes_that_do_not_fit_are_never_scaled(given, words):
    for rule in (Sizes(given), Dirichlet(0.3, sizes=given)):
        with pytest.raises(ValueError, match=words):
            rule.split(LABELS, 12, 3, torch.Generator())


@pytest.mark.parametrize("given", [(), (0, 12), (-1, 13), (float("nan"), 1), (float("inf"), 1)])
def test_sizes_that_are_none(given):
    for make in (Sizes, lambda sizes: Dirichlet(0.3, sizes=sizes)):
        with pytest.raises(ValueError, match="sizes must be > 0"):
            make(given)
