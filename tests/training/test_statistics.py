"""Rounds of statistics: the noise of a round, its charge, and nothing twice."""

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.mechanisms.interface.ranges import PreviousMinMax
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import RoundEngine, RoundPlanner, Statistics
from lightning_fedq.training.accounts import make_report
from tests.contract.test_mechanisms import ROWS
from tests.digits_run import Classifier, Digits, digits, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
GAUSSIAN = fedq.GaussianNoise(clip_norm=0.5, noise_multiplier=1.0)
FOUR = Statistics(4, 0.3)


class Net(Classifier):
    """Keeps the mean of four quarters of its images."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def client_statistics(self, batches):
        images = torch.cat([images for images, _ in batches])
        return images.view(-1, 4, 16).mean((0, 2)) - 0.3

    def on_statistics(self, mean):
        self.mean.copy_(mean + 0.3)
        self.calls += 1


class Plain(Net):
    client_statistics = on_statistics = None


def fit(net, *callbacks, rounds=3, mechanism=GAUSSIAN, ckpt_path=None, **settings):
    given = {"cohort": 10, "statistics": FOUR, **settings}
    federated = fedq.Federated(mechanism, 20, **given)
    trainer = make_trainer(federated, *callbacks, max_epochs=rounds, enable_checkpointing=bool(callbacks))
    trainer.fit(net, datamodule=Digits(400), ckpt_path=ckpt_path)
    return federated, trainer


BOUND, WEIGHTS = 0.4, 3.0 + torch.linspace(0.0, 1.0, 61)


def released(mechanism, seed, vectors, target="updates", **server):
    """One round of statistics of twenty clients. Returns the engine."""
    turns = (fedq.Cyclic(10),) if mechanism.separation > 1 else ()
    planner, statistics = RoundPlanner(20, seed, *turns), Statistics(4, BOUND)
    args = mechanism, planner, SeededKeys(seed), WEIGHTS, [40, 21], PreviousMinMax()
    engine = RoundEngine(*args, statistics=statistics, diagnostics=False, target=target, **server)
    plan = engine.start()
    engine.receive_statistics(plan.survivors, vectors[list(plan.survivors)])
    engine.finish()
    return engine, list(plan.survivors)


@pytest.mark.parametrize("mechanism", [row for row in ROWS if row.unbiased], ids=repr)
def test_the_mean_is_right_but_for_the_noise_of_a_round(mechanism):
    """Of updates and of weights far from 0. Both limits fail with chance 1e-5 for all rows at most, were the
    160 errors apart from each other and normal: t beyond 5.5, and a mean square beyond its mean by 6 of its
    standard deviations."""
    vectors = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)) * 0.05 + 0.1
    vectors[0] *= 20  # one client beyond the bound
    held = (vectors / (vectors.norm(dim=1, keepdim=True) / BOUND).clamp(min=1.0)).double()
    errors, squares = [], []
    for seed in range(40):
        engine, there = released(mechanism, seed, vectors.clone(), ("updates", "weights")[seed % 2])
        assert torch.equal(engine.weights, WEIGHTS)
        errors.append(engine.statistic - held[there].mean(0))
        if engine.statistic_std:
            squares.append((errors[-1] / engine.statistic_std).square())
    error = torch.stack(errors)
    assert abs(error.mean()) < 5.5 * error.std() / math.sqrt(error.numel()) + 1e-6
    if squares:
        assert torch.stack(squares).mean() < 1.0 + 6.0 * math.sqrt(2.0 / error.numel())
    if mechanism.gaussian_error and squares:
        assert torch.stack(squares).mean() > 1.0 - 6.0 * math.sqrt(2.0 / error.numel())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200, 1e30])
@pytest.mark.parametrize("target", ["updates", "weights"])
def test_a_vector_that_is_no_number_counts_as_zeros_and_its_client_is_named(target, bad):
    vectors = torch.full((20, 4), 0.1).double()
    vectors[3, 1] = bad
    engine, _ = released(fedq.SubtractiveDither(bits=16), 0, vectors, target)
    expected = torch.full((4,), 0.1 * 19 / 20).double()
    if bad == 1e30:  # as long as the bound
        expected[1] += BOUND / 20
        assert not engine.non_finite
    else:
        assert engine.non_finite == [3]
    torch.testing.assert_close(engine.statistic, expected, atol=1e-4, rtol=0.0)


def test_of_several_rounds_it_is_the_mean_and_the_noise_is_less():
    engine, _ = released(GAUSSIAN, 0, torch.zeros(20, 4))
    one = engine.statistic_std
    engine.statistics = Statistics(4, BOUND, rounds=2)
    engine.start()
    assert engine.statistic is None
    engine.abort("for this test")
    engine.finish()
    assert len(engine.released) == 1 and engine.statistic_std == one  # what is released counts
    engine.released *= 4
    assert engine.statistic_std == pytest.approx(one / 2)


def test_without_noise_it_is_the_mean_of_the_clients():
    federated, _ = fit(net := Net(), mechanism=fedq.FedAvg(), cohort=None)
    torch.testing.assert_close(net.mean, digits()[0][:400].view(-1, 4, 16).mean((0, 2)))
    assert net.calls == 1 and [record.round for record in federated.records] == [0, 1, 2]


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        (GAUSSIAN, {"cohort": fedq.Cyclic(10)}),
        (fedq.RotatedCoins(clip_norm=0.5, epsilon_per_bit=0.5), {"secure_aggregation": fedq.SecAgg()}),
        (fedq.CorBin(epsilon_per_coordinate=0.1), {}),
    ],
    ids=repr,
)
def test_it_is_charged_as_a_round_against_everybody(mechanism, settings):
    settings = {"rounds": 4, "mechanism": mechanism, "seed": None, "check_isolation": False, **settings}
    pl.seed_everything(1, verbose=False)
    one, trainer = fit(Net(), **settings)
    other, plain = fit(Plain(), statistics=None, **settings)
    assert one.ledger.rounds == other.ledger.rounds == 4
    if settings.get("cohort"):
        assert one.ledger.charges.tolist() == other.ledger.charges.tolist() == [2] * 20
    rows, others = (make_report(*run, 1e-5).rows for run in ((one, trainer), (other, plain)))
    one.ledger._get_charges(one.ledger._id)[1][:] = other.ledger.charges  # cohorts are drawn
    rows = make_report(one, trainer, 1e-5).rows
    assert len({row.adversary for row in rows}) == len(rows) == len(Adversary)
    assert [(row.adversary, row.epsilon) for row in rows] == [(row.adversary, row.epsilon) for row in others]
    assert "4 numbers of each client's data (`client_statistics`)" in one.unprotected_outputs(trainer)
    assert "`client_statistics`" not in other.unprotected_outputs(plain)


class Counted(Net):
    """Its hook fails, or is of another shape or no number, at the n-th client that is asked."""

    asked: ClassVar[list[int]] = []

    def __init__(self, how: Any, at: int = 0) -> None:
        super().__init__()
        self.how, self.at = how, at
        Counted.asked.clear()

    def client_statistics(self, batches):
        Counted.asked.append(1)
        found = super().client_statistics(batches)
        return self.how(found) if len(Counted.asked) > self.at else found


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda found: found[:3], "Use the same size in both"),
        (lambda found: found / 0, "not finite"),
        (lambda found: {}["a key"], "a key"),
    ],
)
def test_it_is_tried_on_one_client_before_anybody_is_charged(how, words):
    ledger = Ledger(20, repr(GAUSSIAN))
    with pytest.raises((ValueError, KeyError), match=words):
        fit(Counted(how), ledger=ledger)
    assert ledger.rounds == 0


def test_a_client_whose_hook_fails_later_is_as_in_training():
    """It fails alone in a simulation: the fit ends with the user's own error, and the round is charged."""
    ledger = Ledger(20, repr(GAUSSIAN))
    with pytest.raises(KeyError, match="a key"):
        fit(Counted(lambda found: {}["a key"], at=5), ledger=ledger)
    assert ledger.rounds == 1


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_run_in_which_no_statistic_is_released_ends_with_words(rounds):
    class Aborts(pl.Callback):
        knows_clients = True

        def on_clients_done(self, trainer, done, expected):
            if trainer.current_epoch < rounds and done == expected:
                federated.engine.abort("too few for this test")

    net = Net()
    federated = fedq.Federated(GAUSSIAN, 20, cohort=10, statistics=Statistics(4, 0.3, rounds))
    with pytest.raises(RuntimeError, match=f"None of {rounds} rounds .* too few for this test"):
        make_trainer(federated, Aborts(), max_epochs=4).fit(net, datamodule=Digits(400))
    assert net.calls == 0 and federated.ledger.rounds == rounds


@pytest.mark.parametrize("law", [fedq.FixedSize(10, secret=True), fedq.Poisson(10)])
def test_secret_cohorts_tell_nobody_who_was_asked(law, caplog):
    mechanism = fedq.BandedGaussian(0.5, 2.0, band=1)
    settings = {"cohort": law, "seed": None, "diagnostics": False}
    with caplog.at_level("INFO"):
        federated, trainer = fit(net := Net(), mechanism=mechanism, **settings)
    assert net.calls == 1 and "4 numbers released, noise of" in caplog.text
    assert math.isnan(federated.records[0].clip_rate) and federated.records[0].non_finite_clients == ()
    plain, other = fit(Plain(), mechanism=mechanism, **{**settings, "statistics": None})
    secret, expected = make_report(federated, trainer, 1e-3).secret, make_report(plain, other, 1e-3).secret
    assert secret.epsilon_run == expected.epsilon_run < math.inf


def test_own_draws_divide_by_the_expected_size_so_a_vector_is_centred():
    """The mean of a poisson cohort errs by who is there times the vector, and by nothing of a centred one."""
    settings = {"cohort": fedq.Poisson(10), "seed": None}
    settings |= {"mechanism": fedq.BandedGaussian(0.5, 1e-3, band=1), "rounds": 2}

    class Far(Net):
        def client_statistics(self, batches):
            list(batches)
            return torch.full((4,), 0.1)

    class Centred(Far):
        def client_statistics(self, batches):
            return super().client_statistics(batches) - 0.1

    far, centred = (
        [(fit(net := kind(), diagnostics=False, **settings) and net.mean) - 0.3 for _ in range(6)]
        for kind in (Far, Centred)
    )
    # ten of twenty are expected: the number there has a standard deviation of 2.2; noise is 0.0005 at most
    # the six draws are all of ten clients with chance 3e-5
    assert max((one - 0.1).abs().max() for one in far) > 0.005
    assert max(one.abs().max() for one in centred) < 0.005


class AtTheStart(pl.callbacks.Checkpoint):
    knows_clients = True

    def __init__(self, folder: Path) -> None:
        self.dirpath = str(folder)

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(Path(self.dirpath) / "start.ckpt")


class DiesInTheFirstRound(pl.Callback):
    knows_clients = True

    def on_clients_done(self, trainer, done, expected):
        if trainer.current_epoch == 0 and done >= 5:
            raise ValueError("killed")


@pytest.mark.parametrize("seed", [None, 3])
def test_what_is_lost_is_charged_and_what_is_released_stays(tmp_path, seed):
    with pytest.raises(ValueError, match="killed"):
        fit(Net(), AtTheStart(tmp_path), DiesInTheFirstRound(), seed=seed)
    federated, _ = fit(net := Net(), AtTheStart(tmp_path), seed=seed, ckpt_path=str(tmp_path / "start.ckpt"))
    assert net.calls == 1
    assert federated.ledger.rounds == (3 if seed is not None else 4)  # new keys, and another charge
    if seed is not None:
        assert torch.equal(net.mean, fit(whole := Net(), seed=seed) and whole.mean)


def test_a_resumed_run_releases_nothing_again(tmp_path):
    keep = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    first, _ = fit(net := Net(), keep, rounds=2)
    keep = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    second, _ = fit(resumed := Net(), keep, rounds=4, ckpt_path=str(tmp_path / "last.ckpt"))
    assert resumed.calls == 0 and torch.equal(resumed.mean, net.mean)
    assert torch.equal(first.engine.statistic, second.engine.statistic) and second.ledger.rounds == 4


def test_a_second_fit_of_the_federation_releases_nothing_again():
    federated, _ = fit(net := Net(), rounds=2)
    make_trainer(federated, max_epochs=1).fit(net, datamodule=Digits(400))
    assert net.calls == 1 and federated.engine.round == 3


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_updates_tell_is_not_said_of_statistics(rounds, monkeypatch):
    """All clients' statistics point one way, and are no updates that noise drowns: training is looked at."""
    looked = []
    see = lambda self, record: looked.append(record.round)  # noqa: E731
    monkeypatch.setattr("lightning_fedq.training.privacy_target.CalibratedTarget.check_direction", see)
    monkeypatch.setattr("lightning_fedq.training.fit.warn_of_noise", lambda record, last: see(None, record))
    target = fedq.PrivacyTarget(50.0, 1e-5, Adversary.SERVER)
    for privacy, expected in ((target, [2] if rounds == 2 else [1, 2]), (None, [rounds])):
        looked.clear()
        fit(Net(), mechanism=GAUSSIAN, privacy=privacy, statistics=Statistics(4, 0.3, rounds))
        assert looked == expected
