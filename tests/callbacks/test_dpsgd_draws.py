"""DP-SGD where a step draws: nobody who knows the program's seeds knows a draw of it."""

import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.data.generator_turns import preserve_generators, seed_generators, states_of_defaults
from lightning_fedq.dpsgd import first_trial
from lightning_fedq.dpsgd.loss_reduction import loss_reduction
from lightning_fedq.dpsgd.opacus import STEPS_PER_SIGMA, GridDPOptimizer
from lightning_fedq.dpsgd.poisson import PoissonBatches
from lightning_fedq.mechanisms import FedAvg
from tests.callbacks.test_privacy import trainer

pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
NOISE, WIDTH, STEPS = 4.0, 50, 3


class Inputs(Dataset):
    """Samples of a fixed order; transforms draw where `draws` is given."""

    def __init__(self, size, draws=None):
        self.x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1))
        self.draws = draws

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        drawn = draw_all() if self.draws is None else self.draws(index)
        return self.x[index], torch.as_tensor(drawn, dtype=torch.float64)


def draw_all():
    return [float(torch.rand((), dtype=torch.float64)), float(np.random.rand()), random.random()]  # noqa: NPY002


class Drops(pl.LightningModule):
    """Dropout in front of a linear layer, at rate 0; remembers what every hook draws."""

    def __init__(self, data, workers=0, draws=None):
        super().__init__()
        with preserve_generators():
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(WIDTH, 1))
        self.data, self.workers, self.draws = data, workers, draws

    def _draw(self, where):
        if DRAWN is not None:
            DRAWN.extend(draw_all())

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self._draw("before transfer")
        return batch

    def on_train_batch_start(self, batch, batch_idx):
        self._draw("start")

    def training_step(self, batch, batch_idx):
        x, drawn = batch
        if DRAWN is not None:
            DRAWN.extend(drawn.flatten().tolist())
        self._draw("step")
        if self.draws is not None:
            x = x + self.draws(x)
        return self.net(x).mean() + 1.0

    def on_after_backward(self):
        self._draw("backward")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._draw("end")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class WithData(Drops):
    def train_dataloader(self):
        return DataLoader(self.data, batch_size=len(self.data), num_workers=self.workers)


DRAWN = None


def clipped_sums(monkeypatch, run):
    """Clipped sum of every step `(steps, width + 1)`, in units of the clipping norm."""
    sums, clip = [], GridDPOptimizer.clip_and_accumulate

    def clipping(self):
        clip(self)
        sums.append(torch.cat([p.summed_grad.flatten() for p in self.params]).double() * self.grid)

    with monkeypatch.context() as patch:
        patch.setattr(GridDPOptimizer, "clip_and_accumulate", clipping)
        run()
    return torch.stack(sums)


def alone(size, **settings):
    def run():
        pl.seed_everything(7, verbose=False)
        data = Inputs(size, lambda index: [0.0] * 3)
        trainer(DPSGD(NOISE, 1.0, delta=1e-3), epochs=STEPS, **settings).fit(WithData(data))

    return run


def in_a_client(size, **settings):
    """The plan's seed is known, and DPSGD has none."""

    def run():
        pl.seed_everything(7, verbose=False)
        fed = Federated(FedAvg(), 1, seed=5, local_epochs=STEPS, check_isolation=False)
        data = FederatedDataModule(
            Inputs(size, lambda index: [0.0] * 3), clients=[list(range(size))], batch_size=size
        )
        trainer(fed, DPSGD(NOISE, 1.0, delta=1e-3), epochs=1, **settings).fit(Drops(None), datamodule=data)

    return run


class Rows(Dataset):
    """Sample i is a hundred times the i-th unit vector: its gradient has a coordinate of its own."""

    def __len__(self):
        return WIDTH

    def __getitem__(self, index):
        return 100.0 * torch.eye(WIDTH)[index], torch.zeros(3, dtype=torch.float64)


class OfRows(pl.LightningModule):
    """A linear layer whose loss is its mean output, so that a sample's gradient is the sample."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(WIDTH, 1, bias=False)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        return DataLoader(Rows(), batch_size=EXPECTED)


EXPECTED = WIDTH // 2


@pytest.mark.parametrize("federated", [False, True])
def test_every_sample_is_clipped_in_batches_of_all_sizes(monkeypatch, federated):
    """Of one sample to twice as many as are expected."""
    sizes = iter(range(1, WIDTH + 1))
    take = lambda batches, client, step: batches._held[client][: next(sizes)]  # noqa: E731

    def run():
        private = DPSGD(NOISE, 1.0, delta=1e-3)
        monkeypatch.setattr(PoissonBatches, "draw_samples", take)
        if federated:
            held = FederatedDataModule(Rows(), clients=[list(range(WIDTH))], batch_size=EXPECTED)
            fed = Federated(FedAvg(), 1, local_epochs=EXPECTED, seed=0, check_isolation=False)
            trainer(fed, private, epochs=1).fit(OfRows(), datamodule=held)
        else:
            trainer(private, epochs=EXPECTED).fit(OfRows())

    sums = clipped_sums(monkeypatch, run)
    assert len(sums) == WIDTH == 2 * EXPECTED
    step = NOISE / STEPS_PER_SIGMA  # of the grid, towards zero
    for size, clipped in enumerate(sums, 1):
        assert (clipped[:size] <= 1.0).all() and (clipped[:size] > 1.0 - 2.0 * step).all(), size
        assert not clipped[size:].any(), size


@pytest.mark.filterwarnings("ignore:Full backward hook")  # DPSGD leaves it out, too
def test_two_losses_that_are_equal_by_chance_are_not_taken_for_a_loss_that_draws_nothing():
    """At a rate of .004 a batch of 8 loses nothing in one of five passes: two pairs in 50 are equal."""
    module = WithData(Inputs(8, lambda index: [0.0] * 3)).train()
    module.net[0].p = 0.004
    fitted = trainer(epochs=0)
    fitted.fit(module)
    batch = next(iter(DataLoader(module.data, batch_size=8)))
    for seed in range(50):
        torch.manual_seed(seed)
        assert loss_reduction(fitted, module, batch) == "mean", seed


@pytest.mark.parametrize("where", [alone, in_a_client])
def test_masks_are_of_no_seed_and_anew_in_every_step(monkeypatch, where):
    once, again = (clipped_sums(monkeypatch, where(64)) for _ in range(2))
    steps = torch.cat([once, again])
    assert len(torch.unique(steps, dim=0)) == 2 * STEPS
    assert torch.pdist(steps).min() > 1.0  # masks of 64 samples, not the last digit of one


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("federated", [False, True])
def test_no_draw_of_any_hook_follows_from_seeds_or_recurs(federated, workers, monkeypatch):
    """Data sets, hooks on the batch, hooks of the step: torch, NumPy and Python, in workers, too."""
    global DRAWN
    found = []

    def set_aside(trial):
        """A trial draws from keys that are no secret, trains on nothing, and leaves nothing."""

        def without(*arguments):
            before = len(DRAWN)
            try:
                return trial(*arguments)
            finally:
                del DRAWN[before:]

        return without

    for name in ("loss_reduction", "check_between_steps"):
        monkeypatch.setattr(first_trial, name, set_aside(getattr(first_trial, name)))
    for _ in range(2):
        pl.seed_everything(3, verbose=False, workers=True)
        data, private = Inputs(12), DPSGD(NOISE, 1.0, delta=1e-3)
        DRAWN = []
        try:
            if federated:
                held = FederatedDataModule(
                    data, clients=[list(range(6)), list(range(6, 12))], batch_size=3, num_workers=workers
                )
                fed = Federated(FedAvg(), 2, seed=5, check_isolation=False)
                trainer(fed, private, epochs=2).fit(Drops(None), datamodule=held)
            else:
                trainer(private, epochs=2).fit(WithData(data, workers))
            found.append([value for value in DRAWN if value])  # empty batches are of zeros
        finally:
            DRAWN = None
    once, again = map(set, found)
    assert len(once) > 50
    assert len(once) == len(found[0]) and len(again) == len(found[1])
    assert not once & again


def test_the_generators_are_as_they_were_when_the_fit_is_over():
    pl.seed_everything(11, verbose=False)
    before = states_of_defaults()
    trainer(DPSGD(NOISE, 1.0, delta=1e-3), epochs=1).fit(WithData(Inputs(12)))
    assert states_of_defaults() == before


def test_a_key_fills_every_word_of_every_generator():
    """Torch keeps 32 bits of a seed: two that differ by 2^32 draw the same."""
    assert torch.equal(
        torch.rand(4, generator=torch.Generator().manual_seed(5)),
        torch.rand(4, generator=torch.Generator().manual_seed(5 + 2**32)),
    )
    with preserve_generators():
        states = []
        for key in (bytes(32), bytes(31) + b"\1", bytes(32)):
            seed_generators(key, "a")
            states.append((states_of_defaults(), draw_all()))
        seed_generators(bytes(32), "b")
        states.append((states_of_defaults(), draw_all()))
        assert states[0] == states[2]
        for name, state in states[0][0].items():
            assert state != states[1][0][name] and state != states[3][0][name]
        assert len({value for _, drawn in states for value in drawn}) == 9
        seed_generators(bytes(range(32)))
        drawn = torch.rand(20_000, dtype=torch.float64)
        assert abs(drawn.mean() - 0.5) < 6 / math.sqrt(12 * 20_000)  # false alarm below 1e-8
        words = torch.default_generator.get_state().numpy()[24 : 24 + 8 * 624].view(np.uint64)
        assert len(set(words.tolist())) > 620 and words.max() < 2**32


OWN = np.random.default_rng(0)
SHARED = torch.Generator().manual_seed(3)
REMEMBERS = "Gradients depend on state .* or random generator"


@pytest.mark.parametrize(
    ("data", "step", "message"),
    [
        (lambda index: OWN.random(3), None, "draws from its own generator, which continues"),
        (None, lambda x: torch.randn(x.shape, generator=SHARED), REMEMBERS),
        (None, lambda x: torch.as_tensor(OWN.normal(size=x.shape)).float(), REMEMBERS),
        (None, lambda x: (torch.manual_seed(0), torch.randn(x.shape))[1], "training_step seeds torch's"),
        (None, lambda x: (np.random.seed(0), 0.0)[1], "training_step seeds NumPy's"),  # noqa: NPY002
    ],
)
def test_draws_that_no_secret_reaches_are_refused(data, step, message):
    class OwnDraws(WithData):
        """The noise changes gradients and not the kind of loss."""

        def training_step(self, batch, batch_idx):
            x = batch[0] * (1.0 + (0.0 if self.draws is None else self.draws(batch[0]) * self.training))
            return self.net[1](x).mean() + 1.0

    with pytest.raises(ValueError, match=message):
        data = Inputs(24, data or (lambda index: [0.0]))
        trainer(DPSGD(NOISE, 1.0, delta=1e-3), epochs=1).fit(OwnDraws(data, 0, step))
