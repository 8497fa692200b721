"""Every partition over a grid of classes, samples a class, clients and parameters.

With few samples a client rounding decides who holds what, so that shares can't be looked at alone: sizes,
labels and empty clients are held against the multinomial law and against `IID`.
"""

import math
from itertools import product

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq.data import IID, Dirichlet, FeatureShards, LabelShards, Natural, QuantitySkew
from lightning_fedq.data.labels import label_counts
from lightning_fedq.data.loader import partition_dataset

CLASSES, EACH, CLIENTS = (1, 2, 10, 62), (2, 30, 144), (2, 20, 479)
ALPHAS = (0.01, 0.1, 1.0, 10.0, 100.0, 1e6)
CELLS = [(c, n, k) for c, n, k in product(CLASSES, EACH, CLIENTS) if c * n >= k]


def labels_of(classes, each):
    return torch.arange(classes).repeat_interleave(each)


def split(rule, labels, clients, seed=0):
    values = labels if rule.needs_labels or isinstance(rule, Natural | FeatureShards) else None
    return rule.split(values, len(labels), clients, torch.Generator().manual_seed(seed))


def sizes(parts):
    return torch.tensor([len(part) for part in parts], dtype=torch.float64)


def rules(classes, each, clients):
    found = [Dirichlet(alpha) for alpha in ALPHAS]
    found += [QuantitySkew(alpha) for alpha in ALPHAS]
    shards = [number for number in (1, 2, 5) if clients * number <= classes * each]
    found += [kind(shards_per_client=number) for kind in (LabelShards, FeatureShards) for number in shards]
    if classes >= clients:
        found.append(Natural(0, merge_users=True))
    return [IID(), *found]


@pytest.mark.parametrize(("classes", "each", "clients"), CELLS)
def test_all_is_dealt_out_once_and_nobody_is_empty(classes, each, clients):
    labels = labels_of(classes, each)
    for rule in rules(classes, each, clients):
        parts = split(rule, labels, clients)
        assert len(parts) == clients and min(map(len, parts)) >= 1, rule
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels))), rule


@pytest.mark.parametrize(("classes", "each", "clients"), CELLS)
def test_sizes_are_those_of_iid_where_shares_are_equal(classes, each, clients):
    labels = labels_of(classes, each)
    for rule in (Dirichlet(1e9), QuantitySkew(1e9)):
        assert sizes(split(rule, labels, clients)).aminmax().max - len(labels) / clients < 1.01
        assert len(labels) / clients - sizes(split(rule, labels, clients)).min() < 1.01


@pytest.mark.parametrize(("each", "clients", "alpha"), [(144, 10, 0.5), (30, 20, 1.0), (6, 20, 10.0)])
def test_counts_of_a_class_have_the_mean_and_variance_of_the_law(each, clients, alpha):
    """Dirichlet-multinomial: mean n/k, variance (n/k)(1 - 1/k)(n + k alpha)/(1 + k alpha), 300 draws.

    Equal sizes where shares are equal take some of the multinomial part away, and nothing of the Dirichlet's:
    the variance lies between. Client-class pairs number 10 clients or more x 4 x 300, so that the std of the
    sample variance is below 4% of it.
    """
    labels, generator = labels_of(4, each), torch.Generator().manual_seed(1)
    rule = Dirichlet(alpha)
    draws = [rule.split(labels, len(labels), clients, generator) for _ in range(300)]
    counts = torch.stack([label_counts(labels, parts).double() for parts in draws])
    mean = each / clients
    dirichlet = each**2 * (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    whole = mean * (1 - 1 / clients) * (each + clients * alpha) / (1 + clients * alpha)
    found = float(((counts - mean) ** 2).mean())
    assert 0.85 * dirichlet < found < 1.15 * whole
    # every client's mean of every class; six sigma, of up to 80 pairs
    assert torch.allclose(
        counts.mean(0), torch.full((clients, 4), mean).double(), atol=6 * (whole / 300) ** 0.5
    )


def test_empty_clients_where_they_are_asked_for_are_those_of_the_law():
    """`min_partition_size=0`: shares of 0.01 leave most of 100 clients with nothing, as the law would."""
    labels = labels_of(10, 144)
    for alpha in (0.01, 0.1, 1.0):
        generator, rule = torch.Generator().manual_seed(2), Dirichlet(alpha, min_partition_size=0)
        draws = [rule.split(labels, 1440, 100, generator) for _ in range(50)]
        empty = [sum(not len(part) for part in parts) for parts in draws]
        # a client holds nothing of a class with chance E (1 - p)^n, p of Beta(alpha, 99 alpha)
        chance = math.exp(
            math.lgamma(99 * alpha + 144)
            + math.lgamma(100 * alpha)
            - math.lgamma(99 * alpha)
            - math.lgamma(100 * alpha + 144)
        )
        assert sum(empty) / 50 <= 100 * chance**10 + 3, alpha
        assert alpha != 0.01 or sum(empty) / 50 > 10


@pytest.mark.parametrize("least", [0, 1, 2, 3])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_everybody_has_the_least(alpha, least):
    labels = labels_of(10, 144)
    assert sizes(split(Dirichlet(alpha, min_partition_size=least), labels, 479)).min() >= least
    if least:
        assert sizes(split(QuantitySkew(alpha, min_partition_size=least), labels, 479)).min() >= least


def test_the_cure_of_clients_that_hold_too_little_works():
    """Whatever the skew: the refusal names a smallest size where there are samples for it, else clients."""
    data = TensorDataset(torch.zeros(1440), labels_of(10, 144))
    loader = DataLoader(data, batch_size=3, drop_last=True)
    generator = torch.Generator().manual_seed(0)
    for rule in (Dirichlet(0.1), QuantitySkew(0.1)):
        with pytest.raises(
            ValueError, match=rf"Use {type(rule).__name__}\(alpha=0.1, min_partition_size=3\)"
        ):
            partition_dataset(loader, rule, 479, generator)
        cured = partition_dataset(loader, type(rule)(0.1, min_partition_size=3), 479, generator)
        assert min(map(len, cured)) >= 3
    loader = DataLoader(data, batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match=r"Use num_clients <= 360"):
        partition_dataset(loader, Dirichlet(100.0), 479, generator)
    assert (
        min(map(len, partition_dataset(loader, Dirichlet(100.0, min_partition_size=4), 360, generator))) >= 4
    )


def test_refusals_of_a_smallest_size():
    with pytest.raises(ValueError, match="min_partition_size must be >= 0, got -1"):
        Dirichlet(1.0, min_partition_size=-1)
