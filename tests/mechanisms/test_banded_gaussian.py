"""Noise of a trusted server that is correlated over rounds: its law, its claims, and when it begins anew."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq import Cyclic, DisjointOnce
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import BandedGaussian
from lightning_fedq.mechanisms.banded_gaussian import NOISE_STD, coefficients, fresh_noise
from lightning_fedq.mechanisms.contract_suite import check_mechanism
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.secagg import SecAgg
from tests.callbacks.test_participation import in_turn
from tests.described import privacy_report
from tests.digits_run import weights_of
from tests.one_round import encode, make_context
from tests.training.test_privacy_target import trained


def matrix(band, rounds):
    """C, in units of its first coefficient."""
    c = np.array(coefficients(band)) / coefficients(band)[0]
    return sum(np.diag(np.full(rounds - i, c[i]), -i) for i in range(min(band, rounds)))


# ---- the matrix ------------------------------------------------------------------------------------------


def rms_of_prefix_sums(band, rounds, participations):
    """Noise of a model, root mean square over the rounds, where a run's sensitivity is 1 a clipped update."""
    c = matrix(band, rounds)
    inverse = np.linalg.inv(c)
    squares = (np.tri(rounds) @ inverse) ** 2
    return math.sqrt(squares.sum() / rounds * participations) * float(np.linalg.norm(c[:, 0]))


def test_the_noise_of_a_model_is_that_of_the_literature():
    """Cohorts of a tenth that come back every tenth of 100 rounds; and everybody in each, a tenth of it."""
    assert rms_of_prefix_sums(1, 100, 10) == pytest.approx(22.5, abs=0.05)
    assert rms_of_prefix_sums(10, 100, 10) == pytest.approx(9.6, abs=0.05)
    assert rms_of_prefix_sums(1, 100, 100) / 10 == pytest.approx(7.1, abs=0.05)


def test_coefficients_are_those_of_the_root_of_the_prefix_sums():
    exact = [math.comb(2 * i, i) / 4**i for i in range(40)]
    assert np.abs(np.array(coefficients(40)) / 64 - exact).max() <= 2.0**-7
    square = matrix(40, 40) @ matrix(40, 40)
    assert np.abs(square - np.tri(40)).max() < 0.1  # but for the rounding of the coefficients


@pytest.mark.parametrize("band", [1, 2, 3, 4])
def test_no_pattern_of_participation_moves_more_than_is_charged(band):
    """All subsets of eight rounds, all signs: k |c|^2 bounds those with the separation, and no others."""
    c = matrix(band, 8)
    one = float(np.square(np.array(coefficients(band)) / coefficients(band)[0]).sum())
    beyond = 0
    for size in range(1, 9):
        for rounds in itertools.combinations(range(8), size):
            signs = np.array(list(itertools.product((-1.0, 1.0), repeat=size)))
            worst = float(np.square(c[:, rounds] @ signs.T).sum(0).max())
            apart = min(np.diff(rounds), default=band)
            if apart >= band:
                assert worst <= size * one + 1e-12
            else:
                beyond += worst > size * one + 1e-12
    assert (beyond > 0) == (band > 1)


# ---- the noise -------------------------------------------------------------------------------------------


def rounds_of(mechanism, keys, rounds, dim=200, start=0):
    """w of a block, `(rounds, dim)`."""
    found = []
    for round in range(start, start + rounds):
        context = replace(make_context(mechanism, (0, 1), (dim,), round=round), since=(start, 0))
        found.append(mechanism.noise(context, PublicRandomness(keys, round)).astype(np.int64))
    return np.stack(found)


@pytest.mark.parametrize("band", [1, 3, 10])
def test_the_noise_of_all_rounds_is_the_inverse_of_the_matrix_times_fresh_noise(band):
    mechanism, keys = BandedGaussian(1.0, 1.0, band), SeededKeys(1)
    w = rounds_of(mechanism, keys, 25, start=4)
    z = np.stack([fresh_noise(PublicRandomness(keys, 4 + r).server("noise"), 200) for r in range(25)])
    exact = np.linalg.inv(matrix(band, 25)) @ (z / 64.0)
    # each row is rounded to the grid, by 1/2 at most, and the rounding goes on like noise
    most = 0.5 * np.abs(np.linalg.inv(matrix(band, 25))).sum(1).max() + 1e-6
    assert np.abs(w - exact).max() <= most < 1.6
    assert np.abs(exact).max() > 1e5
    for r in range(25):
        back = sum(c * w[r - i] for i, c in enumerate(coefficients(band)) if i <= r)
        assert np.abs(back - z[r]).max() <= 32


def test_rounds_that_are_asked_for_in_another_order_have_the_same_noise():
    mechanism, keys = BandedGaussian(1.0, 1.0, 4), SeededKeys(2)
    forward = rounds_of(mechanism, keys, 9)
    for round in (8, 3, 3, 7, 0, 8):
        context = replace(make_context(mechanism, (0, 1), (200,), round=round), since=(0, 0))
        assert np.array_equal(mechanism.noise(context, PublicRandomness(keys, round)), forward[round])
    assert not np.array_equal(rounds_of(mechanism, SeededKeys(3), 1)[0], forward[0])
    assert not np.array_equal(rounds_of(mechanism, keys, 9, start=1)[:8], forward[1:])


def test_fresh_noise_is_gaussian_and_independent():
    z = fresh_noise(PublicRandomness(SeededKeys(0), 0).server("noise"), 40_000) / NOISE_STD
    assert stats.kstest(z, stats.norm.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.025


def test_a_repeated_round_is_no_part_of_the_block_that_it_left():
    mechanism = BandedGaussian(1.0, 1.0, 2)
    context = replace(make_context(mechanism, (0, 1), (5,), round=3, attempt=1), since=(0, 0))
    with pytest.raises(ValueError, match="Begin a new block at a repeated round"):
        mechanism.noise(context, PublicRandomness(SeededKeys(0), 3, 1))
    cured = replace(context, since=(3, 1))
    assert mechanism.noise(cured, PublicRandomness(SeededKeys(0), 3, 1)).shape == (5,)


def test_keeps_the_contract_with_a_band():
    check_mechanism(BandedGaussian(clip_norm=8.0, noise_multiplier=0.05, band=4))


# ---- claims ----------------------------------------------------------------------------------------------


def report_of_turns(mechanism):
    """Of 100 rounds of 100 of 1,000 clients, ten turns each."""
    context, run = make_context(mechanism, range(100), (7850,)), {"rounds": 100, "delta": 1e-5}
    return privacy_report(mechanism, context, **run, num_clients=1000, most_rounds=10)


def test_claims_are_towards_those_who_see_models_and_compose_to_one_gaussian():
    mechanism = BandedGaussian(1.0, 3.0, 10)
    claims = mechanism.claims(make_context(mechanism, range(4), (7850,)))
    finite = {claim.adversary for claim in claims if not isinstance(claim.loss, NonPrivate)}
    assert finite == {Adversary.OUTSIDER, Adversary.CLIENT}
    report = report_of_turns(mechanism)
    mu = math.sqrt(10) / 3.0

    def delta(epsilon):
        low, high = -epsilon / mu - mu / 2, -epsilon / mu + mu / 2
        return float(stats.norm.cdf(high) - math.exp(epsilon) * stats.norm.cdf(low))

    spent = report.row(Adversary.OUTSIDER).epsilon_run
    assert delta(spent) <= 1e-5 <= delta(spent - 2e-3)
    assert report.row(Adversary.SERVER).verdict == "no guarantee"


def test_cohorts_that_come_back_too_early_are_refused_with_the_cure():
    mechanism = BandedGaussian(1.0, 1.0, 4)
    with pytest.raises(ValueError, match=r"Use Cyclic\(5\) or fewer, or a"):
        Federated(mechanism, 20, cohort=4)
    with pytest.raises(ValueError, match=r"this plan has 3. Use .*5.* a band of 3"):
        Federated(mechanism, 20, cohort=Cyclic(6))
    with pytest.raises(ValueError, match=r"this plan has 1\. Use a band of 1"):
        Federated(mechanism, 3)
    for law in (DisjointOnce(5), Cyclic(5)):
        Federated(mechanism, 20, cohort=law)


# ---- what the server releases, and when it begins anew ---------------------------------------------------


class Early(RoundPlanner):
    """A planner that promises more than it keeps: everybody is there in every second round."""

    @property
    def separation(self):
        return 99

    def cohort(self, round, attempt=0):
        return [round % 2, 2 + round % 2]


def engine_of(mechanism, planner, dim, keys=None):
    keys = keys or SeededKeys(5)
    return RoundEngine(mechanism, planner, keys, torch.zeros(dim), (dim,), FixedRange(1.0), diagnostics=False)


def play(engine, updates=None):
    """One round in which everybody sends this update (zeros), and the sum that is released."""
    before, plan = engine.weights, engine.start()
    update = torch.zeros_like(before) if updates is None else updates
    engine.receive(plan.survivors, update.repeat(len(plan.survivors), 1))
    record = engine.finish()
    return ((engine.weights - before) * record.num_received).double().numpy()


def largest_mu(engine, rounds, client):
    """How well all that is released tells two updates of a client apart, in stds, and in how many rounds.

    The noise is measured: the covariance over 30,000 coordinates of what is released of updates of zero. The
    best test of all linear ones, for the worst signs of the client's updates.
    """
    released = np.stack([play(engine) for _ in range(rounds)])
    precision = np.linalg.inv(np.cov(released))
    there = [r for r in range(rounds) if client in engine.planner.cohort(r)]
    worst = 0.0
    for signs in itertools.product((-1.0, 1.0), repeat=len(there)):
        moved = np.zeros(rounds)
        moved[there] = 2.0 * np.array(signs)
        worst = max(worst, float(moved @ precision @ moved))
    return math.sqrt(worst), len(there)


class SensitivityOfOneRow(BandedGaussian):
    """What a participation moves in its own row counts, and not in those that follow."""

    @property
    def _length(self):
        return float(coefficients(self.band)[0])


def measured_and_claimed(mechanism):
    """The largest mu of a client in eight rounds of cohorts that take turns, and the mu of the claim."""
    engine = engine_of(mechanism, RoundPlanner(2 * mechanism.band, 0, Cyclic(2)), 30_000)
    claims = mechanism.claims(engine.context(engine.next_plan()))
    outsider = next(claim for claim in claims if claim.adversary is Adversary.OUTSIDER)
    mu, turns = largest_mu(engine, 8, engine.planner.cohort(0)[0])
    assert turns == math.ceil(8 / mechanism.band) == int(engine.ledger.max_charges)
    return mu, math.sqrt(turns) / outsider.loss.noise_multiplier


@pytest.mark.parametrize("band", [1, 2, 3, 4])
def test_released_models_tell_what_is_claimed_and_no_more(band):
    mu, claimed = measured_and_claimed(BandedGaussian(1.0, 1.0, band))
    assert mu == pytest.approx(claimed, rel=0.02)
    mu, claimed = measured_and_claimed(SensitivityOfOneRow(1.0, 1.0, band))
    assert (mu > 1.05 * claimed) == (band > 1)


def test_a_band_longer_than_the_separation_is_caught(monkeypatch):
    """The plant: without a new block where somebody is early, more is told than the ledger charges."""
    monkeypatch.setattr(RoundEngine, "_has_early_client", lambda *_: False)
    engine = engine_of(BandedGaussian(1.0, 1.0, 5), Early(4, 0, Cyclic(2)), 30_000)
    mu, turns = largest_mu(engine, 8, 0)
    assert turns == 4 == int(engine.ledger.charges[0])
    assert mu > 1.2 * math.sqrt(4)


def test_where_somebody_is_early_the_noise_begins_anew():
    engine = engine_of(BandedGaussian(1.0, 1.0, 5), Early(4, 0, Cyclic(2)), 30_000)
    mu, turns = largest_mu(engine, 8, 0)
    assert turns == 4 and mu <= 1.02 * math.sqrt(4)


def test_dropouts_are_zeros_and_the_noise_of_the_sum_stays():
    mechanism = BandedGaussian(1.0, 0.5, 2)
    planner = RoundPlanner(40, 3, Cyclic(20), dropout_probability=0.3)
    engine = engine_of(mechanism, planner, 3000)
    update = torch.full((3000,), 0.5 / math.sqrt(3000))
    for round in range(4):
        noise = mechanism.sigma * 64 / NOISE_STD * rounds_of(mechanism, engine.keys, round + 1, 3000)[-1]
        answers = len(planner.plan(round, mechanism).survivors)
        assert answers < 20
        assert np.allclose(play(engine, update), answers * update.double().numpy() + noise, atol=2e-4)


def test_an_update_is_clipped_and_rounds_toward_zero():
    mechanism = BandedGaussian(2.0, 1.0, 4)
    context = make_context(mechanism, (0, 1), (50,))
    update = torch.linspace(-3, 4, 50)
    message = encode(mechanism, torch.stack([update, 0.01 * update]), context)
    norms = message.symbols.double().norm(dim=1) / mechanism._steps
    assert 0.999 < norms[0] <= 1.0 and message.num_clipped == 50
    assert float(norms[1]) == pytest.approx(0.005 * float(update.norm()), rel=1e-3)
    rand = PublicRandomness(SeededKeys(0), 0)
    assert mechanism.can_send(message.symbols[0], 0, context, rand)
    low, high = mechanism.symbol_range(context, rand)
    assert low <= int(message.symbols.min()) and int(message.symbols.max()) <= high
    liar = torch.full((50,), high // 2, dtype=torch.int32)  # in range everywhere, and 3.5 times too long
    assert not mechanism.can_send(liar, 0, context, rand)
    end = torch.zeros(50, dtype=torch.int32).index_fill(0, torch.tensor(7), high)
    assert mechanism.can_send(end, 0, context, rand)


# ---- as a user meets it ----------------------------------------------------------------------------------


def federation(**settings):
    target = PrivacyTarget(4.0, 1e-3, "outsider")
    return in_turn(**{"mechanism": BandedGaussian(1.0, 1.0, 5), "privacy": target, **settings})


def test_a_target_sets_the_noise_for_the_turns_of_a_client(tmp_path):
    federated, folder = federation(), RunFolder("banded", str(tmp_path))
    trained(federated, rounds=12, callbacks=[folder])
    assert federated.calibration is not None and federated.calibration.charges == 3
    assert 3.99 < federated.calibration.epsilon <= 4.0
    assert federated.ledger.max_charges == 3
    independent = federation(mechanism=BandedGaussian(1.0, 1.0, 1))
    trained(independent, rounds=12)
    assert federated.mechanism.noise_multiplier == pytest.approx(independent.mechanism.noise_multiplier)
    page = (tmp_path / "banded" / "report.md").read_text()
    assert "the server is trusted: it adds the noise, and knows it" in page
    assert "rounds are at least 5 apart" in page


def test_what_a_plan_counts_is_what_stays_of_the_noise_in_a_model():
    """A round's share in the last model's squared error, of 2,000 rounds."""
    mechanism, dim = BandedGaussian(1.0, 1.0, 10), 7
    context = make_context(mechanism, range(5), (dim,))
    planned = mechanism.mean_error(context, 5, 0.3)
    inverse = np.linalg.inv(matrix(10, 2000))
    last = float(np.square(inverse.sum(0)).sum()) * (mechanism.sigma / 5) ** 2 * dim / 2000
    assert planned == pytest.approx(last, rel=0.02)
    assert planned < 0.2 * float(mechanism.noise_variance(context, range(5)).sum()) * dim


def test_it_runs_behind_masks():
    federated = federation(secure_aggregation=SecAgg(simulation="masked"), privacy=None)
    trained(federated, rounds=6)
    assert len(federated.records) == 6 and not any(record.aborted for record in federated.records)


@pytest.mark.filterwarnings("ignore:the keys come from a seed")
def test_a_seeded_run_resumes_to_the_same_end(tmp_path):
    path = tmp_path / "run.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 6:
                trainer.save_checkpoint(path)

    class SaveAndFail(Save):
        """Nothing is sent after the checkpoint, which would be paid for."""

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 7:
                raise ZeroDivisionError

    whole = trained(federation(seed=1), rounds=10, callbacks=[Save()])
    resumed = trained(federation(seed=1), rounds=10, ckpt_path=path)
    assert torch.equal(weights_of(whole.lightning_module), weights_of(resumed.lightning_module))
    secure = federation(seed=None)
    with pytest.raises(ZeroDivisionError):
        trained(secure, rounds=10, callbacks=[SaveAndFail()])
    again = federation(seed=None)
    trained(again, rounds=10, ckpt_path=path)
    assert again.engine is not None and again.engine._since == (7, 0)
