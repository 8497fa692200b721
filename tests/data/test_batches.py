import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.data.batches import LocalWork, batch_sizes, pass_sizes


def test_pass_sizes():
    assert pass_sizes(10, 4, False) == (4, 4, 2)
    assert pass_sizes(10, 4, True) == (4, 4)
    assert pass_sizes(3, 4, False) == (3,)
    assert pass_sizes(10, 4, False, 2) == (4, 4)
    assert pass_sizes(10, 4, False, 9) == (4, 4, 2)
    assert pass_sizes(10, 4, False, 0.99) == (4, 4)
    assert pass_sizes(10, 4, False, 0.3) == pass_sizes(10, 4, False, 0) == ()
    assert pass_sizes(4, 4, False, 1) == (4,)


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

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for samples in (4, 30, 49):
        for limit in (1, 1.0, 3, 0.25, 0.5, 0.999, 100):
            for drop_last in (False, True):
                loader = DataLoader(TensorDataset(torch.zeros(samples)), batch_size=4, drop_last=drop_last)
                own = pass_sizes(samples, 4, drop_last, limit)
                if not own:
                    continue
                counts = Counts()
                pl.Trainer(
                    max_epochs=1,
                    accelerator="cpu",
                    enable_model_summary=False,
                    limit_train_batches=limit,
                    **quiet,
                ).fit(counts, loader)
                assert tuple(counts.seen) == own, (samples, limit, drop_last)


def test_local_work_under_a_limit():
    held = [torch.arange(4), torch.arange(12), torch.arange(22)]
    loader = DataLoader(TensorDataset(torch.zeros(40)), batch_size=4, shuffle=True)
    work = LocalWork.of(loader, held, 2, None, 2)
    assert work.passes == [(4,), (4, 4), (4, 4)]
    assert work.sizes == [(4, 4), (4,) * 4, (4,) * 4]
    assert [work.shuffles(c) for c in range(3)] == [False, True, True]
    assert LocalWork.of(loader, held, 2, None, 1.0).sizes == LocalWork.of(loader, held, 2, None).sizes
    # steps go on over as many limited passes as they need
    assert LocalWork.of(loader, held, 1, 3, 2).sizes == [(4,) * 3] * 3
