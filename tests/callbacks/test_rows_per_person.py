"""`DPSGD` counts rows: those that indices repeat, persons in several, and what every sentence says of it."""

import logging
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated, RunFolder
from lightning_fedq.commands.privacy import main as privacy
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.data.repeats import max_equal_rows, max_repeats
from lightning_fedq.dpsgd.accountant import SampledGaussianAccountant, mixture_grid, sampled_gaussian_grid
from lightning_fedq.dpsgd.statement import describe_unit
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import GaussianLoss
from tests.digits_run import Classifier, Digits, digits, make_trainer

# ---- the price of a person ---------------------------------------------------------------------------

VECTORS = [  # sampling rate, noise multiplier, steps, delta, epsilon for 1, 2, 3 and 9 rows
    (1 / 36, 1.0, 108, 1e-4, (1.6043, 3.5395, 5.6594, 21.4947)),
    (0.01, 1.0, 1000, 1e-5, (1.8289, 3.9795, 6.3432, 24.3161)),
    (0.02, 2.0, 500, 1e-5, (0.9216, 1.9852, 3.1364, 11.5307)),
    (0.1, 4.0, 100, 1e-5, (0.9830, 2.1211, 3.3560, 12.4411)),
]


def epsilon_of(rows, delta, *history):
    accountant = SampledGaussianAccountant(rows)
    accountant.history = list(history)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "epsilons"), VECTORS)
def test_vectors(rate, noise, steps, delta, epsilons):
    """Of the specification: by dp_accounting on a grid of 1e-3, so that theirs is up to .01 too large."""
    for rows, epsilon in zip((1, 2, 3, 9), epsilons, strict=True):
        assert epsilon_of(rows, delta, (noise, rate, steps)) == pytest.approx(epsilon, rel=7e-4)
    assert epsilon_of(9, delta, (noise, rate, steps)) > 9 * epsilons[0]  # k times epsilon is no bound


def test_one_row_is_what_it_was():
    grids = sampled_gaussian_grid(1.1, 0.02, True, 1e-12), mixture_grid(1.1, 0.02, 1, True, 1e-12)
    one, other = (grid.composed(500, 1e-9).epsilon(1e-5) for grid in grids)
    assert one == pytest.approx(other, rel=1e-3)
    assert epsilon_of(1, 1e-5, (1.0, 0.01, 1000)) == pytest.approx(
        1.8283977486106628, rel=1e-9
    )  # of 0.2.0; FFTs differ by CPU


def test_in_every_batch_all_rows_are_one_shift():
    exact = spent(GaussianLoss(0.5), 1e-5, rounds=9).epsilon
    assert exact <= epsilon_of(4, 1e-5, (2.0, 1.0, 9)) <= exact * 1.002


@pytest.mark.parametrize(("noise", "rate"), [(1e-4, 0.1), (1e-2, 1.0), (1e-4, 1.0), (0.05, 1.0)])
def test_hardly_any_noise_protects_nobody(noise, rate):
    assert epsilon_of(9, 1e-5, (noise, rate, 3)) == math.inf


@pytest.mark.parametrize("removal", [True, False])
@pytest.mark.parametrize(("noise", "rate", "rows"), [(0.9, 0.2, 3), (3.0, 0.01, 40), (1.0, 2.0**-20, 5)])
def test_the_grid_dominates_one_step(noise, rate, rows, removal):
    x = np.linspace(-12 * noise, rows + 12 * noise, 400_001)
    chances = stats.binom.pmf(np.arange(rows + 1), rows, rate)
    mixture = sum(chance * stats.norm.pdf(x, j, noise) for j, chance in enumerate(chances))
    p, q = (mixture, stats.norm.pdf(x, 0, noise))[:: 1 if removal else -1]
    grid = mixture_grid(noise, rate, rows, removal, 1e-12)
    assert grid.masses.sum() + grid.infinite == pytest.approx(1.0, abs=1e-12)
    for epsilon in (0.0, 0.01, 0.1, 0.5, 2.0):
        exact = float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum()) * (x[1] - x[0])
        assert exact - 1e-9 <= grid.delta(epsilon) <= exact * 1.001 + 2e-5


def test_rows_at_two_clients_cost_no_more_than_all_at_one():
    """At any two rates and numbers of steps: of k rows i are at one client, the others at another."""
    for one, other in [
        ((0.5, 2), (0.2, 5)),
        ((1.0, 1), (0.5, 2)),
        ((0.1, 40), (0.1, 40)),
        ((0.3, 30), (0.01, 900)),
    ]:
        for rows in (2, 3):
            whole = max(epsilon_of(rows, 1e-4, (1.0, *client)) for client in (one, other))
            for here in range(1, rows):
                for removal in (True, False):
                    parts = [
                        sampled_gaussian_grid(1.0, rate, removal, 1e-12, count).composed(steps, 1e-9)
                        for (rate, steps), count in zip((one, other), (here, rows - here), strict=True)
                    ]
                    step = max(part.step for part in parts)
                    assert parts[0].on(step).plus(parts[1].on(step)).epsilon(1e-4) <= whole


# ---- rows that indices repeat ------------------------------------------------------------------------


class Unread(Dataset):
    """Rows that may be counted and not read."""

    def __init__(self, size=20):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        raise AssertionError("a sample was read")


class Wrapped(Unread):
    """Nobody can look into it."""

    def __init__(self, inner):
        super().__init__(len(inner))
        self.inner = inner


class Augmented(Subset):
    """A subset of one's own."""


ROWS, TENSORS = Unread(), (torch.zeros(6, 2), torch.zeros(6))
REPEATS = [  # a data set, and how often a row stands in it at most
    (ROWS, 1),
    (Subset(ROWS, [0, 1, 2]), 1),
    (Subset(ROWS, [0, 1, 0, 2, 0]), 3),
    (Subset(ROWS, torch.tensor([0, 1, 1])), 2),
    (Subset(ROWS, [19, -1]), 2),
    (Augmented(ROWS, range(5)), 1),
    (Augmented(ROWS, [4, 4]), 2),
    (Subset(Subset(ROWS, [3, 3, 5]), [0, 1, 2]), 2),
    (Subset(Subset(ROWS, [3, 3, 5]), [1, 2]), 1),
    (ConcatDataset([ROWS, ROWS]), 2),
    (ConcatDataset([ROWS, Unread()]), 1),
    (ConcatDataset([Subset(ROWS, [1, 2]), ConcatDataset([ROWS, Subset(ROWS, [2, 2])])]), 4),
    (Subset(ConcatDataset([ROWS, ROWS]), [0, 20, 39, 19]), 2),
    (Subset(ConcatDataset([ROWS, ROWS]), range(20)), 1),
    (ConcatDataset([TensorDataset(*TENSORS), TensorDataset(*TENSORS)]), 2),
    (ConcatDataset([Wrapped(ROWS), Wrapped(ROWS)]), 1),
    (Subset(Wrapped(ROWS), [7, 7]), 2),
    (Subset(ROWS, ["a", "b", "a"]), 2),
    (Subset(ROWS, []), 0),
]


@pytest.mark.parametrize(("dataset", "most"), REPEATS)
def test_repeats_are_counted_without_reading_a_sample(dataset, most):
    assert max_repeats(dataset, [torch.arange(len(dataset))])[0] == most


def test_only_what_clients_hold_counts_and_at_how_many_of_them():
    twice = ConcatDataset([ROWS, ROWS])
    assert max_repeats(twice, [torch.arange(10), torch.arange(30, 40)]) == (1, 1)
    assert max_repeats(twice, [torch.arange(10), torch.arange(20, 30)]) == (2, 2)
    assert max_repeats(twice, [torch.tensor([0, 20]), torch.tensor([1, 0])]) == (3, 2)


def dpsgd(rows=1, seed=None, noise=1.0):
    return DPSGD(noise, 1.0, delta=1e-4, seed=seed, rows_per_person=rows)


def nine_times():
    inputs, labels = digits()
    data = TensorDataset(inputs[:360], labels[:360])
    return Subset(data, [*range(40)] * 9 + [*range(40, 360)])


def fit(*callbacks, data, model=None, ckpt=None, **settings):
    trainer = make_trainer(*callbacks, **{"max_epochs": 1, **settings})
    model = model or Classifier()
    if not isinstance(data, pl.LightningDataModule):
        data = FederatedDataModule(data, batch_size=20, val=Digits().val_dataloader())
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize("make", [nine_times, lambda: ConcatDataset([Digits(90).train_set()] * 9)])
def test_repeated_rows_are_refused_before_anything_is_charged_or_charged_as_they_are(make):
    private = dpsgd()
    with pytest.raises(ValueError, match=r"one row appears in 9 samples. .*DPSGD\(rows_per_person=9\)"):
        fit(private, data=make())
    assert not private.accounts
    with pytest.raises(
        ValueError, match=r"charges 8 rows per person, .* appears in 9 samples. .*rows_per_person=9"
    ):
        fit(dpsgd(8), data=make())
    paid = dpsgd(9)
    trainer = fit(paid, data=make())
    (entry,) = paid.accountant.history
    assert paid.epsilon(1e-4) == epsilon_of(9, 1e-4, entry) > 5 * epsilon_of(1, 1e-4, entry)
    assert float(trainer.callback_metrics["dp/epsilon"]) == pytest.approx(paid.epsilon(1e-4))


def test_beside_a_federation_a_row_at_two_clients_is_refused_or_charged():
    federated = lambda: Federated(FedAvg(), 3, seed=0)  # noqa: E731
    one, other = (Subset(nine_times(), range(first, 80)) for first in (40, 60))
    sources = FederatedDataModule(clients=[one, other, other], batch_size=20, val=Digits().val_dataloader())
    for data in (nine_times(), sources):
        private, fed = dpsgd(), federated()
        with pytest.raises(ValueError, match=r"appears in . samples of \d clients"):
            fit(fed, private, data=data)
        assert fed.ledger.rounds == 0 and not private.accounts
    paid, fed = dpsgd(9), federated()
    fit(fed, paid, data=nine_times())
    entries = [account.accountant.history[0] for account in paid.accounts.values()]
    assert paid.epsilon(1e-4) == max(epsilon_of(9, 1e-4, entry) for entry in entries)


class Reloads(Digits):
    """Repeats its rows from the second loader on."""

    asked = 0

    def train_dataloader(self):
        self.asked += 1
        inputs, labels = digits()
        data = TensorDataset(inputs[:100], labels[:100])
        again = [*range(50)] * 2 if self.asked > 1 else range(100)
        return DataLoader(Subset(data, again), batch_size=20, shuffle=True)


@pytest.mark.parametrize("around", [(), (Federated(FedAvg(), 1, seed=0),)])
def test_a_reloaded_loader_is_looked_at_too(around):
    private = dpsgd()
    with pytest.raises(ValueError, match="appears in 2 samples"):
        fit(*around, private, data=Reloads(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert private.accounts[0].steps == 5


@pytest.mark.parametrize("rows", [0, -1, 1.5])
def test_nobody_in_less_than_a_row(rows):
    with pytest.raises(ValueError, match="rows_per_person must be a whole number >= 1"):
        dpsgd(rows)


# ---- what is said and kept -----------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "now"), [(2, 1), (1, 2), (3, 2)])
def test_a_checkpoint_about_other_persons_is_refused(kept, now, tmp_path):
    data = Subset(Digits(90).train_set(), range(90))
    fit(dpsgd(kept), data=data).save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=rf"for {kept} rows.*has {now}. Use DPSGD\(rows_per_person={kept}\)"):
        fit(dpsgd(now), data=data, ckpt=tmp_path / "one.ckpt", max_epochs=2)
    own = dpsgd(kept)
    fit(own, data=data, ckpt=tmp_path / "one.ckpt", max_epochs=2)
    assert own.accounts[0].steps == 10


def test_an_account_that_a_client_keeps_says_whom_it_is_about():
    data = Subset(Digits(90).train_set(), range(90))
    for rows in (1, 2):
        paid = dpsgd(rows)
        fit(paid, data=data)
        again = dpsgd(rows)
        again.account = paid.account
        with pytest.raises(ValueError, match="and this DPSGD has 3"):
            dpsgd(3).account = paid.account
        fit(again, data=data)
        assert again.accounts[0].steps == 10 and paid.account[0][3] == rows


@pytest.mark.parametrize("rows", [1, 3])
def test_every_sentence_names_its_unit(rows, tmp_path, caplog, capsys):
    unit, logger = describe_unit(rows), pl.loggers.CSVLogger(tmp_path)
    assert "rows_per_person=k" in unit and (rows == 1 or "up to 3 rows" in unit)
    private, fed = dpsgd(rows), Federated(FedAvg(), 3, seed=0)
    with caplog.at_level(logging.INFO):
        folder = RunFolder("run", tmp_path, show=False)
        settings = {"logger": logger, "default_root_dir": tmp_path}
        trainer = fit(fed, private, folder, data=Digits(90).train_set(), **settings)
    assert any("privacy of a sample" in line and unit in line for line in caplog.messages)
    assert unit in (tmp_path / "run" / "privacy.md").read_text()
    assert unit in (tmp_path / "run" / "report.md").read_text()
    assert unit in str(logger.experiment.hparams)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    capsys.readouterr()
    privacy([str(tmp_path / "one.ckpt")])
    assert unit in " ".join(capsys.readouterr().out.split())


def test_the_end_of_a_fit_without_a_federation_says_it_too(caplog):
    private = dpsgd()
    with caplog.at_level(logging.INFO):
        fit(private, data=Digits(90).train_set())
    (line,) = [line for line in caplog.messages if line.startswith("privacy of one sample")]
    assert describe_unit(1) in line and f"epsilon {private.epsilon(1e-4):.3g}" in line


# ---- rows that wrappers and copies repeat ----------------------------------------------------------------


class Sees(Dataset):
    """A wrapper of any kind, which keeps what it wraps under some name."""

    def __init__(self, inner, name="inner", order=None, change=lambda sample, index: sample):
        setattr(self, name, inner)
        self.name, self.order, self.change = name, order, change

    def __len__(self):
        return len(getattr(self, self.name) if self.order is None else self.order)

    def __getitem__(self, index):
        place = index if self.order is None else self.order[index]
        return self.change(getattr(self, self.name)[place], index)


class OwnSubset(Dataset):
    def __init__(self, dataset, indices):
        self.dataset, self.indices = dataset, indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        inputs, label = self.dataset[self.indices[index]]
        return inputs + 1e-3 * index, label  # so that only the indices tell


def augmented(sample, index):
    inputs, label = sample
    return inputs + 0.1 * torch.rand(()) + float(np.random.rand()), label  # noqa: NPY002


def by_index(sample, index):
    return sample[0] + 1e-3 * index, sample[1]


def people():
    inputs, labels = digits()
    return TensorDataset(inputs[:120], labels[:120])


THRICE = [*range(40)] * 3
HIDDEN = {
    "wrapper .dataset": lambda: Sees(Subset(people(), THRICE), "dataset"),
    "wrapper .dataset, sample changed by its index": lambda: Sees(
        Subset(people(), THRICE), "dataset", change=by_index
    ),
    "wrapper of another name": lambda: Sees(Subset(people(), THRICE)),
    "wrapper with random transforms": lambda: Sees(Subset(people(), THRICE), change=augmented),
    "wrapper of a wrapper": lambda: Sees(Sees(ConcatDataset([Subset(people(), range(40))] * 3)), "dataset"),
    "a subset of one's own": lambda: OwnSubset(people(), THRICE),
    "drawn with replacement": lambda: Sees(people(), "dataset", order=THRICE),
    "a cached list of rows": lambda: list(Subset(people(), THRICE)),
    "copies of rows": lambda: TensorDataset(*(part[THRICE].clone() for part in people().tensors)),
    "a dictionary for each row": lambda: [{"x": x, "y": y} for x, y in Subset(people(), THRICE)],
    "rows as numpy": lambda: [(x.numpy().copy(), int(y), "a") for x, y in Subset(people(), THRICE)],
    "computed of a wrapper": lambda: computed_of(Sees(Subset(people(), THRICE), change=augmented)),
}


def computed_of(source):
    data = TensorDataset(*(torch.stack(part) for part in zip(*source, strict=True)))
    data.rows_of = source
    return data


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("inside", [False, True])
def test_nothing_hides_repeated_rows(name, inside):
    """40 people three times each trained at epsilon 1.046 where a person pays 4.016."""
    data = HIDDEN[name]()
    data = FederatedDataModule(data, batch_size=20, val=Digits().val_dataloader())
    private, federation = dpsgd(), [Federated(FedAvg(), 3, seed=0)] if inside else []
    with pytest.raises(ValueError, match=r"one row appears in 3 samples.*DPSGD\(rows_per_person=3\)"):
        fit(*federation, private, data=data)
    assert not private.accounts


def test_reading_rows_leaves_the_generators_and_finds_no_copies_where_there_are_none():
    state, other = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    data = Sees(people(), change=augmented)
    assert max_equal_rows(data, [torch.arange(60), torch.arange(60, 120)]) == (1, 1)
    assert max_equal_rows(data, [torch.arange(60), torch.arange(59, 120)]) == (2, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == other  # noqa: NPY002


def test_equal_rows_of_different_people_train_where_the_user_says_so():
    private = DPSGD(1.0, 1.0, delta=1e-4, count_equal_rows=False)
    fit(private, data=HIDDEN["copies of rows"]())
    assert private.accounts[0].steps == 6
    with pytest.raises(ValueError, match="appears in 3 samples"):  # indices name the row
        fit(DPSGD(1.0, 1.0, delta=1e-4, count_equal_rows=False), data=HIDDEN["wrapper .dataset"]())


def test_rows_are_read_once_a_fit():
    reads = []

    def count(sample, index):
        reads.append(index)
        return sample

    fit(dpsgd(), data=Sees(people(), change=count), max_epochs=1, reload_dataloaders_every_n_epochs=1)
    first = len(reads)
    assert sorted(set(reads)) == [*range(120)]
    reads.clear()
    fit(dpsgd(), data=Sees(people(), change=count), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert len(reads) < first + 2 * 200  # two more epochs of batches and trials, and no third reading
