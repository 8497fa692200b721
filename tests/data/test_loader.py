import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.data.batches import LocalWork, Stack, batch_sizes, pass_sizes
from lightning_fedq.data.loader import ClientBatches, ClientLoader, partition_dataset
from lightning_fedq.data.partition import Dirichlet
from tests.digits_run import make_trainer

VALUES = torch.arange(24)
TENSORS = TensorDataset(VALUES.float(), VALUES)


class Listed(Dataset[Any]):
    """The same samples behind __getitem__, with noise from torch's generator."""

    def __len__(self):
        return len(VALUES)

    def __getitem__(self, index):
        return {"x": torch.rand(2), "y": int(VALUES[index])}


def client_loader(loader, clients, stacks, limit=1.0):
    held = [torch.tensor(part) for part in clients]
    return ClientLoader(loader, LocalWork.from_loader(loader, held, 1, None, limit), lambda: stacks)


def round_of(loader):
    return [batch for _, batches in loader.iterate_stacks() for batch in batches]


def labels(batch):
    return (batch["y"] if isinstance(batch, dict) else batch[1]).tolist()


@pytest.mark.parametrize("dataset", [TENSORS, Listed()], ids=["tensors", "listed"])
def test_batches_client_by_client_and_stack_by_stack(dataset):
    clients = [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    stacks = [Stack((2, 0), (2, 1), 7, ()), Stack((1,), (2, 1), 8, ())]
    loader = client_loader(DataLoader(dataset, batch_size=2), clients, stacks)
    assert len(loader) == 4
    assert [labels(batch) for batch in round_of(loader)] == [[[20, 21], [0, 1]], [[22], [2]], [10, 11], [12]]


class Jittered(Dataset[Any]):
    """Draws from all three global generators, as transforms do, a different number of times each."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {
            "torch": torch.rand(2),
            "numpy": np.random.rand(1 + index % 2).sum(),  # noqa: NPY002
            "python": random.random() + random.gauss(0, 1),
        }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_client_s_random_transforms_do_not_depend_on_who_is_in_its_stack(workers):
    """From whatever generator they draw, in this process and in workers."""
    seeds, clients = [11, 12, 13], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    user = DataLoader(Jittered(), batch_size=2, num_workers=workers)

    def batches(*stacks):
        random.seed(sum(stack.training_seed for stack in stacks))
        np.random.seed(len(stacks))  # noqa: NPY002
        return round_of(client_loader(user, clients, list(stacks)))

    first, second = batches(Stack((0, 1, 2), (2, 2), seeds[0], (), training_seed_of=seeds.__getitem__))
    alone = batches(*(Stack((c,), (2, 2), seeds[c], ()) for c in (2, 0, 1)))
    for row, start in ((2, 0), (0, 2), (1, 4)):
        for name in ("torch", "numpy", "python"):
            assert torch.equal(first[name][row], alone[start][name]), (row, name)
            assert torch.equal(second[name][row], alone[start + 1][name]), (row, name)
    flat = torch.cat([first["python"].flatten(), second["python"].flatten()])
    assert len(set(flat.tolist())) == 12, "and no two samples have the same"


def test_an_idle_round_yields_nothing():
    loader = client_loader(DataLoader(TENSORS, batch_size=2), [[3, 4]], [Stack((), (1,), 0, ())])
    assert list(round_of(loader)) == []


def test_drop_last_drops_from_every_pass():
    loader = client_loader(
        DataLoader(TENSORS, batch_size=2, drop_last=True), [[0, 1, 2]], [Stack((0,), (2, 2), 0, ())]
    )
    assert [labels(batch) for batch in round_of(loader)] == [[0, 1], [0, 1]]


def test_tensor_datasets_are_gathered_through_subsets_and_other_collations_are_kept():
    nested = Subset(Subset(TENSORS, list(range(23, -1, -1))), [0, 2, 4, 6])
    default = DataLoader(nested).collate_fn
    fast, slow = ClientBatches(nested, default), ClientBatches(nested, lambda items: default(items))
    index = torch.tensor([[0, 1], [3, 2]])
    for a, b in zip(fast[index], slow[index], strict=True):
        assert torch.equal(a, b)
    assert fast[index][1].tolist() == [[23, 21], [17, 19]]
    assert ClientBatches(TENSORS, len)[torch.tensor([1, 2, 3])] == 3


def test_deal_out_refusals():
    generator = torch.Generator()
    plain = DataLoader(TENSORS, batch_size=5)
    with pytest.raises(ValueError, match="Clients 1 have fewer than 1 samples"):
        partition_dataset(plain, [[0, 1], []], 2, generator)
    with pytest.raises(ValueError, match="indices of 2 clients, but num_clients is 3"):
        partition_dataset(plain, [[0], [1]], 3, generator)
    with pytest.raises(ValueError, match=r"Client indices must be in \[0, 24\), got 0 to 24"):
        partition_dataset(plain, [[0], [24]], 2, generator)
    assert len(partition_dataset(plain, Dirichlet(5.0), 2, generator, [0, 1] * 12)) == 2


# ---- batches -------------------------------------------------------------------------------------------
def test_a_limit_can_leave_nothing():
    assert pass_sizes(10, 4, False, 0.3) == pass_sizes(10, 4, False, 0) == ()


def test_batch_sizes():
    assert batch_sizes((4, 4, 2), 1, None) == (4, 4, 2)
    assert batch_sizes((4, 4, 2), 2, None) == (4, 4, 2, 4, 4, 2)
    assert batch_sizes((4, 4, 2), 1, 5) == (4, 4, 2, 4, 4)
    assert batch_sizes((3,), 1, 2) == (3, 3)


def test_a_limit_is_that_of_lightning_for_a_loader():
    """The oracle is Lightning itself, on a client's data as one central loader."""

    class Counts(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

        def training_step(self, batch, batch_idx):
            self.seen.append(len(batch[0]))
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for samples in (4, 30, 49):
        for limit in (1, 1.0, 3, 0.25, 0.5, 0.999, 100):
            for drop_last in (False, True):
                loader = DataLoader(TensorDataset(torch.zeros(samples)), batch_size=4, drop_last=drop_last)
                own = pass_sizes(samples, 4, drop_last, limit)
                if not own:
                    continue
                counts = Counts()
                make_trainer(max_epochs=1, limit_train_batches=limit).fit(counts, loader)
                assert tuple(counts.seen) == own, (samples, limit, drop_last)


def test_local_work_under_a_limit():
    held = [torch.arange(4), torch.arange(12), torch.arange(22)]
    loader = DataLoader(TensorDataset(torch.zeros(40)), batch_size=4, shuffle=True)
    work = LocalWork.from_loader(loader, held, 2, None, 2)
    assert work.passes == [(4,), (4, 4), (4, 4)]
    assert work.sizes == [(4, 4), (4,) * 4, (4,) * 4]
    assert [work.shuffles(c) for c in range(3)] == [False, True, True]
    whole, default = (LocalWork.from_loader(loader, held, 2, None, *limit) for limit in ((1.0,), ()))
    assert whole.sizes == default.sizes
    # steps go on over as many limited passes as they need
    assert LocalWork.from_loader(loader, held, 1, 3, 2).sizes == [(4,) * 3] * 3
