"""Released evaluations: the law of the noise, what is charged, and that every epsilon of a run counts it."""

import json
import math

import pytest
import torch

from lightning_fedq import ClientEvaluation, NoisyMean, PrivacyTarget
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, PrivacyBudget, RunFolder
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.flower.settings import check_deployable
from lightning_fedq.lab.commands.experiment import cost_of
from lightning_fedq.mechanisms import DistributedDiscreteGaussian, FedAvg, GaussianNoise
from lightning_fedq.mechanisms.interface import Adversary, ConcentratedLoss, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.beside import Beside
from lightning_fedq.privacy.losses import GaussianLoss
from lightning_fedq.rounds import RoundPlanner
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.described import run_of_releases
from lightning_fedq.training.release import Releases
from lightning_fedq.training.spending import report_of, view_of
from tests.digits_run import Digits, make_trainer, weights_of
from tests.training.test_client_evaluation import CLIENTS, SAMPLES, Measured, fit

DELTA, RELEASE = 1e-3, NoisyMean("val_acc", std=0.4)
MECHANISM = DistributedDiscreteGaussian(1.0, 2.0, 0.01, bits=16)


def federated(release=RELEASE, every=2, **settings):
    evaluation = ClientEvaluation(0.25, every, release)
    known = {"evaluate_clients": evaluation, "secure_aggregation": SecAgg(), **settings}
    return Federated(known.pop("mechanism", MECHANISM), CLIENTS, **known)


def released(fed):
    return [one.released.mean for one in fed.client_evaluations if one.released is not None]


@pytest.mark.parametrize(
    ("mu", "expected"),
    [(0.268051, (4.0439, 2.0886)), (0.501552, (4.5065, 2.7782)), (1.666031, (9.3320, 8.3441))],
)
def test_gaussian_vectors_of_the_specification(mu, expected):
    """20 evaluations with noise of 5 and of 10 clients beside a training at epsilon 1, 2 and 8."""
    claim = PrivacyClaim(Adversary.OUTSIDER, GaussianLoss(1.0 / mu, ""), 1)
    for std, epsilon in zip((5.0, 10.0), expected, strict=True):
        one = PrivacyClaim(Adversary.OUTSIDER, GaussianLoss(std, ""), 1)
        found = Beside({Adversary.OUTSIDER: one}, 20, "").spent(claim, 1e-5, 1).epsilon
        assert found == pytest.approx(epsilon, abs=2e-3)


def test_concentrated_vector_of_the_specification():
    """30 evaluations with noise of 10 clients beside a training at rho = .108256."""
    claim = PrivacyClaim(Adversary.OUTSIDER, ConcentratedLoss(0.108256, ""), 1)
    one = PrivacyClaim(Adversary.OUTSIDER, ConcentratedLoss(1.0 / 200.0, ""), 1)
    found = Beside({Adversary.OUTSIDER: one}, 30, "").spent(claim, 1e-5, 1)
    assert found.epsilon == pytest.approx(3.2478, abs=1e-4)


def test_the_mechanism_claims_no_less_than_its_noise_and_little_more():
    """Rho of the sum is range^2 / (2 variance), up to the rounding to the grid."""
    for clients, std, low, high in ((1000, 0.01, 0.0, 1.0), (50, 0.2, -1.0, 3.0), (5, 3.0, 0.0, 1.0)):
        release = NoisyMean("x", std, low, high)
        fed = Federated(FedAvg(), clients, evaluate_clients=ClientEvaluation(0.5, 1, release))
        engine = Releases(fed, release).engine
        claims = {c.adversary: c for c in engine.mechanism.claims(engine.context(engine.coming_plan()))}
        loss = claims[Adversary.SECAGG_SERVER].loss
        assert isinstance(loss, ConcentratedLoss)
        ideal = ((high - low) / (std * clients)) ** 2 / 2.0
        assert ideal <= loss.rho <= 1.02 * ideal


@pytest.mark.parametrize("secagg", [None, SecAgg()])
def test_the_noise_has_the_stated_deviation_and_no_bias(secagg):
    """Keys of the system: false alarm 6e-7 of the mean and 4e-6 of the variance, of 300 releases."""
    release = NoisyMean("x", 0.5, low=2.0, high=6.0)
    evaluation = ClientEvaluation(0.5, 1, release)
    fed = Federated(MECHANISM, 6, evaluate_clients=evaluation, secure_aggregation=secagg)
    releases, values = Releases(fed, release), torch.tensor([2.0, 3.0, 6.0, 9.0, -5.0, math.nan])
    count = 300
    means = [one.mean for round in range(count) if (one := releases.release(values, round))]
    exact = (2.0 + 3.0 + 6.0 + 6.0 + 2.0 + 4.0) / 6  # clipped, and no number is the middle
    error = torch.tensor(means, dtype=torch.float64) - exact
    assert len(means) == count and abs(float(error.mean())) < 5 * 0.5 / math.sqrt(count)
    square = float(error.square().sum()) / 0.25
    assert abs(square - count) < 5 * math.sqrt(2 * count)


def test_every_row_of_the_report_counts_it():
    epsilons = []
    for release in (None, RELEASE):
        fed = federated(release)
        _, trainer = fit(fed, rounds=5)
        epsilons.append({row.adversary: row for row in report_of(fed, trainer, DELTA).rows})
    assert fed.ledger.beside is not None and fed.ledger.beside.charges.tolist() == [3] * CLIENTS
    for who, row in epsilons[1].items():
        assert row.epsilon_run > epsilons[0][who].epsilon_run + 0.1
        assert row.epsilon_any_two == row.epsilon_run
        assert row.epsilon_round == epsilons[0][who].epsilon_round
    rho = 5 * (2.0 / 2.0) ** 2 / (2 * CLIENTS) + 3 / (2 * (0.4 * CLIENTS) ** 2)
    behind = epsilons[1]["SECAGG_SERVER"].epsilon_run
    assert behind == pytest.approx(ConcentratedLoss(rho, "").epsilon(DELTA, 1), rel=0.08)
    notes = " ".join(report_of(fed, trainer, DELTA).notes)
    assert "released 3 times beside the rounds" in notes and "that of a round does not" in notes


def test_a_client_that_was_never_in_a_cohort_has_paid_for_releases():
    fed = federated(clients_per_round=3, every=1)
    _, trainer = fit(fed, rounds=1)
    lines = report_of(fed, trainer, DELTA).charged
    assert {line.charges for line in lines} == {0, 1}
    assert all(epsilon > 0.5 for line in lines for epsilon in line.epsilons.values())
    bare = federated(clients_per_round=3, every=1, mechanism=FedAvg(), secure_aggregation=None)
    _, trainer = fit(bare, rounds=1)
    assert all(e > 0.5 for line in report_of(bare, trainer, DELTA).charged for e in line.epsilons.values())


def test_without_masks_the_server_has_seen_every_noisy_value():
    fed = federated(secure_aggregation=None)
    _, trainer = fit(fed, rounds=2)
    report = report_of(fed, trainer, DELTA)
    assert report.row(Adversary.SERVER).epsilon_run > report.row(Adversary.OUTSIDER).epsilon_run + 2.0


def test_nothing_exact_is_logged_and_callbacks_may_watch_what_is_released(tmp_path):
    seen = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append(dict(trainer.callback_metrics))

    stopping = pl.callbacks.EarlyStopping("released/val_acc", mode="max", strict=False, patience=99)
    stopping._check_on_train_epoch_end = True
    kept = pl.callbacks.ModelCheckpoint(
        tmp_path, monitor="released/val_acc", mode="max", every_n_epochs=2, save_on_train_epoch_end=True
    )
    fed = federated()
    fit(fed, rounds=4, more=(stopping, kept, Look()), enable_checkpointing=True)
    assert [("released/val_acc" in one) for one in seen][1::2] == [True, True]
    assert not any(name.startswith("clients/") for one in seen for name in one)
    assert kept.best_model_score == pytest.approx(max(released(fed)))
    assert float(stopping.best_score) == pytest.approx(max(released(fed)))


def test_a_target_is_met_with_the_releases_in_it():
    target = PrivacyTarget(8.0, delta=DELTA, adversary="secagg_server")
    noise = []
    for release in (None, RELEASE):
        fed = federated(release, privacy=target)
        _, trainer = fit(fed, rounds=4)
        noise.append(fed.engine.mechanism.local_sigma)
        assert 7.5 < report_of(fed, trainer, DELTA).row(Adversary.SECAGG_SERVER).epsilon_run <= 8.0
    assert noise[1] > 1.01 * noise[0]
    too_loud = federated(NoisyMean("val_acc", 0.02), privacy=target)
    with pytest.raises(ValueError, match=r"can't meet epsilon 8.*take a larger std in NoisyMean"):
        fit(too_loud, rounds=4)


def test_a_budget_counts_what_is_to_be_released():
    affordable = []
    for release in (None, RELEASE):
        budget = PrivacyBudget(8.0, DELTA, adversary="secagg_server")
        fed = federated(release, every=7)
        fit(fed, rounds=20, more=(budget,))
        affordable.append(budget.affordable)
        assert budget.epsilon_spent <= 8.0
    assert affordable[1] < affordable[0]


def test_no_more_is_released_than_was_counted():
    fed = federated(privacy=PrivacyTarget(8.0, delta=DELTA, adversary="secagg_server"), every=1)
    fit(fed, rounds=2)
    assert len(released(fed)) == 2
    assert fed.ledger.beside is not None
    with pytest.warns(UserWarning, match="counts on 2 releases and they are made"):
        assert fed.fit._evaluator._releases.release(torch.zeros(CLIENTS), 7) is None
    assert fed.ledger.beside.rounds == 2


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning")
def test_a_checkpoint_and_its_journals_know_what_was_released(tmp_path):
    """The report of a checkpoint counts what a run that went on from it has released."""
    fed = federated(every=1)
    keep = pl.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    _, trainer = fit(fed, rounds=3, more=(keep,), enable_checkpointing=True)
    whole = report_of(fed, trainer, DELTA).row(Adversary.SECAGG_SERVER).epsilon_run
    for epoch in (0, 2):  # the journals know the rest
        page = report_of_checkpoint(tmp_path / f"epoch={epoch}.ckpt", None, DELTA, False)
        assert page.row(Adversary.SECAGG_SERVER).epsilon_run == pytest.approx(whole)
    resumed = federated(every=1)
    fit(resumed, rounds=3, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert resumed.ledger.beside is not None
    assert resumed.ledger.beside.charges.tolist() == [5] * CLIENTS  # three, and two again with other noise
    told = report_of_checkpoint(tmp_path / "epoch=0.ckpt", 10, DELTA, False)
    assert "released 10 times" in " ".join(told.notes)
    with pytest.raises(ValueError, match="another federation: release"):
        fit(federated(NoisyMean("val_acc", 0.7)), rounds=3, ckpt_path=tmp_path / "epoch=0.ckpt")


def test_a_release_that_is_interrupted_stays_charged(monkeypatch):
    fed = federated(every=1)
    encode = DistributedDiscreteGaussian.encode

    def fails(self, update, context, rand):
        if context.dim == 1:
            raise KeyboardInterrupt
        return encode(self, update, context, rand)

    monkeypatch.setattr(DistributedDiscreteGaussian, "encode", fails)
    with pytest.raises(BaseException):  # noqa: B017 (Lightning's own, by its version)
        fit(fed, rounds=2)
        raise KeyboardInterrupt
    assert fed.ledger.beside is not None and fed.ledger.beside.charges.tolist() == [1] * CLIENTS
    monkeypatch.undo()
    fit(fed, rounds=1)
    assert fed.ledger.beside.charges.tolist() == [2] * CLIENTS


def test_a_ledger_that_is_handed_on_takes_them_along():
    first = federated(every=1)
    fit(first, rounds=2)
    second = federated(every=1, ledger=first.ledger)
    _, trainer = fit(second, rounds=2)
    assert second.ledger.beside is not None and second.ledger.beside.charges.tolist() == [4] * CLIENTS
    assert "released 4 times" in " ".join(report_of(second, trainer, DELTA).notes)
    with pytest.raises(ValueError, match=r"the ledger has 4 releases .* wants none"):
        fit(federated(None, ledger=first.ledger), rounds=1)


def test_a_deployment_refuses_a_ledger_with_releases():
    """Its report has no account of them."""
    first = federated(every=1)
    fit(first, rounds=1)
    later = Federated(MECHANISM, CLIENTS, ledger=first.ledger)
    with pytest.raises(ValueError, match=r"the ledger has 1 releases .* wants none"):
        check_deployable(later)
    check_deployable(Federated(MECHANISM, CLIENTS))


def test_no_point_of_the_curve_is_below_what_was_spent():
    """Two fits of three rounds release twice each, as often as four rounds would by themselves."""
    fed = federated()
    fit(fed, rounds=3)
    _, trainer = fit(fed, rounds=3)
    report = report_of(fed, trainer, DELTA)
    charged = [(round, round) for round in range(1, 7)]
    found = view_of(fed, trainer, report, None, charged)
    assert found["by_round"][-1] == [6.0, pytest.approx(found["epsilon"])]


def test_with_a_seed_it_is_reproducible():
    runs = []
    for seed in (1, 1, 2):
        fed = federated(seed=seed)
        fit(fed, rounds=2)
        runs.append(released(fed))
    assert runs[0] == runs[1] != runs[2]
    one, other = federated(every=1), federated(every=1)
    fit(one, rounds=2)
    fit(other, rounds=2)
    assert released(one) != released(other)  # two on a grid: equal by chance 8e-8, one would be 3e-4


def test_missing_clients_do_not_weaken_it():
    """As many may be missing as noise is counted for; with more, nothing is released, and it is charged."""
    fed = federated(
        every=1, dropout_probability=0.3, mechanism=GaussianNoise(1.0, 1.0), secure_aggregation=None
    )
    fit(fed, rounds=4)
    engine = fed.fit._evaluator._releases.engine
    allowed = engine.mechanism.max_dropped
    assert 0 < allowed < CLIENTS
    answered = [one.released.num_clients for one in fed.client_evaluations if one.released]
    assert answered and min(answered) >= CLIENTS - allowed
    assert fed.ledger.beside is not None and fed.ledger.beside.rounds == 4


def test_a_sweep_does_not_add_them_up():
    fed = federated()
    trainer = make_trainer(fed, max_epochs=2)
    assert all(
        "released evaluations" in str(claim)
        for claim in cost_of(fed, trainer, Measured(), DELTA).claims.values()
    )


def test_pages_of_a_run_name_it(tmp_path):
    fed = federated(every=1)
    fit(fed, rounds=2, more=(RunFolder("run", str(tmp_path)),))
    page = (tmp_path / "run" / "privacy.md").read_text()
    assert "`released/val_acc`" in page and "released 2 times beside the rounds" in page
    lines = (tmp_path / "run" / "clients" / "evaluation.jsonl").read_text().splitlines()
    assert [json.loads(line)["released/val_acc"] for line in lines] == released(fed)


def test_an_infinite_or_missing_claim_is_not_hidden():
    claim = PrivacyClaim(Adversary.SERVER, GaussianLoss(1.0, ""), 1)
    none = PrivacyClaim(Adversary.SERVER, NonPrivate("it is seen"), 1)
    found = Beside({Adversary.SERVER: none}, 1, "They say:").spent(claim, DELTA, 3)
    assert math.isinf(found.epsilon) and "it is seen" in found.method
    assert Beside({Adversary.SERVER: none}, 0, "").spent(claim, DELTA, 3).epsilon < 20.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"std": 0.0}, "std must be > 0"),
        ({"std": math.inf}, "std must be > 0 and finite"),
        ({"std": 0.1, "low": 1.0}, "low < high is needed"),
        ({"std": 0.1, "high": math.inf}, "low < high is needed"),
    ],
)
def test_numbers_out_of_range(settings, words):
    with pytest.raises(ValueError, match=words):
        NoisyMean("val_acc", **settings)


def test_a_metric_that_nobody_measures_is_refused_before_anything_is_spent():
    fed = federated(NoisyMean("val/acc", 0.4), every=3)
    with pytest.raises(ValueError, match="names 'val/acc', and validation_step logs val_acc, val_loss"):
        fit(fed, rounds=4)
    assert fed.ledger.rounds == 0


def test_the_check_changes_no_weights():
    plain, checked = (
        fit(federated(release, seed=3, mechanism=FedAvg(), secure_aggregation=None))[0]
        for release in (None, RELEASE)
    )
    assert torch.equal(weights_of(plain), weights_of(checked))


def test_digits_are_enough():
    """A trainer without any callback but ours, on a data module of one's own."""
    fed = federated(every=1)
    make_trainer(fed, max_epochs=1).fit(Measured(), datamodule=Digits(SAMPLES, 5))
    assert len(released(fed)) == 1


@pytest.mark.parametrize(("mu", "epsilon"), [(0.268051, 2.26), (1.666031, 8.53)])
def test_figures_of_the_guide(mu, epsilon):
    """20 releases of 1,000 clients at std 0.01, next to a training of epsilon 1 and 8."""
    planner, mechanism = RoundPlanner(1000, 0, 100), NoisyMean("x", 0.01).mechanism(1000, 0)
    releases = run_of_releases(planner, mechanism, SecAgg(), 20, secure_keys=True)
    beside = Beside(Account(releases, 1e-5).claims(), 20, "")
    training = PrivacyClaim(Adversary.SECAGG_SERVER, GaussianLoss(1.0 / mu, ""), 1)
    assert beside.spent(training, 1e-5, 1).epsilon == pytest.approx(epsilon, abs=0.006)
