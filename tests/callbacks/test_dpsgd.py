"""DP-SGD on an untouched module: its steps, its sampling, what it spends, what it leaves behind."""

import copy
import math

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq.callbacks import DPSGD, PrivacyBudget
from lightning_fedq.data.loader import ClientBatches
from lightning_fedq.mechanisms.interface import Adversary
from tests.callbacks.test_privacy import trainer
from tests.digits_run import fitted, weights_of
from tests.dpsgd.test_poisson import batches_of


def samples(size=200):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1))


class Classifier(pl.LightningModule):
    """Knows nothing of privacy."""

    def __init__(self, batch_size: int = 20, normalise: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = torch.nn.BatchNorm1d(8) if normalise else torch.nn.Identity()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), middle, torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.batch_size, self.seen = batch_size, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(len(x))
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=self.batch_size, shuffle=True)

    def accuracy(self):
        x, y = samples().tensors
        return (self.net(x).argmax(1) == y).float().mean().item()


def dpsgd(noise=1.0, seed=None, **settings):
    return DPSGD(noise, 1.0, delta=1e-3, seed=seed, **settings)


def test_it_learns_and_says_what_it_spent():
    module, private = Classifier(), dpsgd(seed=1)
    run = fitted(module, private, max_epochs=8)
    assert module.accuracy() > 0.8
    assert len(private.accountant) == 80
    assert len(set(module.seen)) > 3  # other rounds draw other batches
    epsilon = private.accountant.get_epsilon(1e-3)
    assert 2.0 < epsilon < 8.0
    assert float(run.callback_metrics["dp/epsilon"]) == pytest.approx(epsilon, rel=1e-6)


def test_it_stops_itself_when_the_budget_is_spent():
    module, private = Classifier(), dpsgd()
    budget = PrivacyBudget(2.0, 1e-3, Adversary.OUTSIDER)
    run = fitted(module, budget, private, max_epochs=100)
    assert run.current_epoch < 100
    spent = private.accountant.get_epsilon(1e-3)
    assert spent <= 2.0
    assert len(private.accountant) == budget.affordable
    assert len(private.accountant) % 10 != 0  # in mid-epoch
    private.accountant.step(noise_multiplier=1.0, sample_rate=private.accounts[0].sample_rate)
    assert private.accountant.get_epsilon(1e-3) > 2.0


def test_a_resumed_run_remembers_what_it_spent(tmp_path):
    fitted(Classifier(), dpsgd(), max_epochs=2).save_checkpoint(tmp_path / "two.ckpt")
    again = dpsgd()
    trainer(again, epochs=3).fit(Classifier(), ckpt_path=tmp_path / "two.ckpt")
    assert len(again.accountant) == 30
    with pytest.raises(RuntimeError, match="is spent"):
        trainer(dpsgd(), PrivacyBudget(1.0, 1e-3, Adversary.OUTSIDER), epochs=4).fit(
            Classifier(), ckpt_path=tmp_path / "two.ckpt"
        )


def test_what_this_process_has_spent_since_the_checkpoint_stays_spent(tmp_path):
    private = dpsgd()
    fitted(Classifier(), private, max_epochs=2).save_checkpoint(tmp_path / "two.ckpt")
    trainer(private, epochs=4).fit(Classifier(), ckpt_path=tmp_path / "two.ckpt")
    root = private._root
    trainer(private, epochs=3).fit(Classifier(), ckpt_path=tmp_path / "two.ckpt")
    assert len(private.accountant) == 20 + 20 + 10
    assert private._root != root


@pytest.mark.parametrize("seed", [None, 1])
def test_a_checkpoint_of_others_is_refused_by_a_callback_that_has_spent(tmp_path, seed):
    fitted(Classifier(), dpsgd(0.5, seed), max_epochs=1).save_checkpoint(tmp_path / "loud.ckpt")
    private = dpsgd(20.0, seed)
    trainer(private, epochs=2).fit(Classifier())
    with pytest.raises(
        ValueError, match=r"has spent up to 20 steps that the checkpoint does not contain. Use a new"
    ):
        trainer(private, epochs=2).fit(Classifier(), ckpt_path=tmp_path / "loud.ckpt")
    assert [(noise, number) for noise, _, number in private.accountant.history] == [(20.0, 20)]
    fresh = dpsgd(20.0, seed)
    trainer(fresh, epochs=2).fit(Classifier(), ckpt_path=tmp_path / "loud.ckpt")
    assert [(noise, number) for noise, _, number in fresh.accountant.history] == [(0.5, 10), (20.0, 10)]


def test_a_copy_of_the_callback_draws_noise_of_its_own():
    """The same noise on other gradients would leave, in the difference, no noise at all."""
    private = dpsgd(20.0)
    ends = []
    for callback in (private, copy.deepcopy(private), private):
        module = Classifier(batch_size=200)
        trainer(callback, epochs=1).fit(module)
        ends.append(weights_of(module))
    std = 0.3 * 20.0 / 200
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (ends[i] - ends[j]).std().item() > 0.5 * 2**0.5 * std


def test_resuming_with_a_seed_ends_bit_identically(tmp_path):
    whole = Classifier()
    trainer(dpsgd(seed=5), epochs=4).fit(whole)
    fitted(Classifier(), dpsgd(seed=5), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    rest = Classifier()
    trainer(dpsgd(seed=5), epochs=4).fit(rest, ckpt_path=tmp_path / "half.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))


def test_nothing_is_left_on_the_module():
    module = Classifier()
    untouched = {name: set(vars(layer)) for name, layer in module.named_modules()}
    run = fitted(module, dpsgd(), max_epochs=1)
    assert all(not vars(p) for p in module.parameters())
    for name, layer in module.net.named_modules():
        assert set(vars(layer)) == untouched["net" + (f".{name}" if name else "")]
    assert module.train_dataloader().batch_size == 20
    assert isinstance(run.strategy.optimizers[0], torch.optim.SGD)
    trainer(dpsgd(), epochs=1).fit(module)  # hooks go on a second time


def test_the_first_step_is_clipping_averaging_and_noise():
    """With noise of 1e-6 the step is the mean of clipped gradients, computed here without Opacus."""
    module, reference = Classifier(), Classifier()
    private = DPSGD(1e-6, 0.5, delta=1e-3, seed=2)
    trainer(private, epochs=1, max_steps=1).fit(module)
    x, y = samples()[
        batches_of(200, 20, lambda client, s: private._stream("batch", client, s)).draw_samples(0, 0)
    ]
    total = torch.zeros_like(weights_of(reference))
    for i in range(len(x)):
        loss = torch.nn.functional.cross_entropy(reference.net(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(reference.parameters()))
        flat = torch.cat([g.reshape(-1) for g in grads])
        total += min(1.0, 0.5 / flat.norm().item()) * flat
    expected = weights_of(reference) - 0.3 * total / 20
    torch.testing.assert_close(weights_of(module), expected, atol=2e-6, rtol=1e-4)


def test_noise_has_the_stated_std():
    """10,000 weights, gradients that are zero: 6 standard errors, false alarm below 1e-8."""

    class Constant(Classifier):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 1500)

        def training_step(self, batch, batch_idx):
            return 1.0 + 0.0 * self.net(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=20.0)  # undoes the division by the batch size

    module = Constant()
    before = weights_of(module)
    trainer(DPSGD(0.7, 2.0, delta=1e-3), epochs=1, max_steps=1).fit(module)
    noise = weights_of(module) - before
    assert abs(noise.std().item() / 1.4 - 1) < 6 / math.sqrt(2 * noise.numel())
    assert abs(noise.mean().item()) < 6 * 1.4 / math.sqrt(noise.numel())


def test_samples_that_are_not_finite_count_as_zero():
    class Exploding(Classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            x = torch.where(x[:, :1] > 1.0, torch.inf, x)
            return torch.nn.functional.cross_entropy(self.net(x), y)

    module, private = Exploding(), dpsgd()
    trainer(private, epochs=1).fit(module)
    assert private.num_non_finite > 0
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_empty_batches_are_steps_with_noise_alone():
    module, private = Classifier(batch_size=1), dpsgd(seed=4)
    before = [p.detach().clone() for p in module.parameters()]
    trainer(private, epochs=1, limit_train_batches=30).fit(module)
    assert len(private.accountant) == 30
    assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    empty = ClientBatches(samples(), torch.utils.data.default_collate)[torch.tensor([], dtype=torch.int64)]
    assert empty[0].shape == (1, 6)
    assert not empty[0].any()


def test_a_loader_given_to_fit_is_refused():
    for callbacks in ([dpsgd()], [PrivacyBudget(1.0, 1e-3, Adversary.OUTSIDER), dpsgd()]):
        with pytest.raises(ValueError, match="draws its own batches"):
            trainer(*callbacks, epochs=1).fit(Classifier(), DataLoader(samples(), batch_size=20))


def test_delta_is_checked_against_the_number_of_samples():
    with pytest.raises(ValueError, match="delta must be > 0 and below"):
        trainer(DPSGD(1.0, 1.0, delta=0.01), epochs=1).fit(Classifier())
