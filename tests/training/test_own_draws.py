"""Clients that draw for themselves: laws of draws, noise and divisor of a round, what is refused."""

import json
import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

import lightning_fedq as fedq
from lightning_fedq.cli import main
from lightning_fedq.keys.randomness import PublicRandomness, RootKeys, SeededKeys
from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import GaussianLoss, GaussianSumLoss, PoissonGaussianLoss
from lightning_fedq.privacy.report_file import from_json
from lightning_fedq.privacy.sampled import secret_epsilon
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.rounds.running_sum import RunningSum
from lightning_fedq.training.accounts import make_report
from tests.described import page as markdown
from tests.training.test_privacy_target import Line, loader
from tests.training.test_secret_cohorts import Kept, fitted, plain, trainer_of

ADDER = fedq.BandedGaussian(1.0, 2.0, band=1)


def own(mechanism=ADDER, clients=20, size=4, **settings):
    given = {"cohort": fedq.Poisson(size), "diagnostics": False} | settings
    return fedq.Federated(mechanism, clients, **given)


def planner(clients=12, size=3):
    return RoundPlanner(clients, 7, fedq.Poisson(size))


def drawn(plan, rounds):
    """`(rounds, clients)`, who is there."""
    there = np.zeros((rounds, plan.num_clients), dtype=np.int64)
    for round in range(rounds):
        there[round, plan.cohort(round)] = 1
    return there


# ---- the laws of the draws; every test of a law fails once in a million runs ---------------------------


def test_coins_are_independent_of_each_other_over_clients_and_rounds():
    there = drawn(planner(), 6000)
    assert there.mean(0) == pytest.approx(np.full(12, 0.25), abs=5.5 * math.sqrt(0.25 * 0.75 / 6000))
    centred = (there - 0.25) / math.sqrt(0.25 * 0.75)
    across, over = centred.T @ centred / 6000, centred[1:].T @ centred[:-1] / 5999
    worst = max(np.abs(across - np.diag(np.diag(across))).max(), np.abs(over).max())
    assert worst < 6.2 / math.sqrt(6000)  # 210 products of standard variables
    sizes = np.bincount(there.sum(1), minlength=13)[:9]
    expected = 6000 * stats.binom.pmf(np.arange(9), 12, 0.25)
    assert ((sizes - expected) ** 2 / expected).sum() < stats.chi2.isf(1e-6, 8)


def test_draws_do_not_follow_from_the_seed_and_are_the_same_when_asked_again():
    one, two = (planner(1000, 100) for _ in range(2))
    assert one.cohort(0) != two.cohort(0) and one.cohort(0) == one.cohort(0)
    public = PublicRandomness(SeededKeys(7), 0).public("cohort").choice(1000, 100)
    assert set(one.cohort(0)) != set(public)
    assert len(one.plan(0, ADDER).cohort) == len(one.cohort(0)) != 0
    assert len(one.expected(0, ADDER).cohort) == 100
    assert one.expected(0, ADDER).cohort == two.expected(0, ADDER).cohort


@pytest.mark.parametrize("fault", ["", "divisor by answers", "noise missing when empty"])
def test_noise_and_divisor_are_the_same_whoever_is_there(fault, monkeypatch):
    """What is released, times the expected cohort, less the sum, is noise of one std, round for round."""
    if fault == "divisor by answers":
        monkeypatch.setattr(RunningSum, "total_weight", lambda self: float(max(len(self.received), 1)))
    if fault == "noise missing when empty":
        whole = RunningSum.mean
        monkeypatch.setattr(
            RunningSum, "mean", lambda self, plan: whole(self, plan) if self.received else None
        )
    dim, plan = 2000, planner(6, 2)
    engine = RoundEngine(
        ADDER, plan, RootKeys(), torch.zeros(dim), (dim,), fedq.FixedRange(1.0), diagnostics=False
    )
    stds, sizes = [], []
    for _ in range(220):
        before, cohort = engine.weights.clone(), engine.start().cohort
        sent = torch.full((len(cohort), dim), 0.9 / math.sqrt(dim))
        if cohort:
            engine.receive(cohort, sent)
        engine.finish()
        noise = 2.0 * (engine.weights - before) - sent.sum(0)
        stds.append(float(noise.std()) / 4.0)  # std over two clips is 2
        sizes.append(len(cohort))
    assert len(set(sizes)) > 3 and 0 in sizes  # false alarm: (1 - (2/3)^6)^220, 2e-9
    right = all(abs(std - 1.0) < 6.0 / math.sqrt(2 * dim) for std in stds)
    assert right == (fault == "")


# ---- the account -----------------------------------------------------------------------------------------

POISSON = [  # noise over two clips, chance, rounds, delta, epsilon
    (1.0, 0.01, 100, 1e-5, 0.34443),
    (1.0, 0.1, 100, 1e-5, 4.36864),
    (2.0, 0.1, 100, 1e-5, 1.99007),
    (0.5, 0.01, 1000, 1e-5, 2.84382),
    (1.0, 0.001, 3000, 1e-6, 0.20979),
    (0.5, 0.001, 3000, 1e-6, 0.47990),
    (4.0, 0.1, 1000, 1e-5, 3.33923),
    (2.0, 0.5, 10, 1e-5, 3.31277),
    (0.3, 0.001, 100, 1e-6, 1.39259),
    (1.0, 0.25, 1, 1e-5, 1.08095),
    (0.5, 0.1, 10, 1e-5, 3.4343),
    (1.0, 0.1, 10, 1e-5, 1.2529),
    (0.25, 0.1, 10, 1e-5, 12.9855),
    # between both roundings of a grid of the losses themselves: .89478 and .89490, .22838 and .22939
    (0.5, 0.01, 100, 1e-5, 0.8951),
    (0.5, 0.001, 1000, 1e-5, 0.2289),
]


def epsilon_of(law, noise, rounds, delta):
    return secret_epsilon(
        GaussianLoss(noise),
        delta,
        law=law,
        num_clients=1000,
        rounds=rounds,
        neighbours=Neighbours.SUBSTITUTION,
    )


@pytest.mark.parametrize(("noise", "chance", "rounds", "delta", "epsilon"), POISSON)
def test_poisson_vectors(noise, chance, rounds, delta, epsilon):
    size = round(1000 * chance)
    found = epsilon_of(fedq.Poisson(size), noise, rounds, delta)
    assert found == pytest.approx(epsilon, rel=4e-4)
    assert found < epsilon_of(fedq.FixedSize(size, secret=True), noise, rounds, delta)


@pytest.mark.parametrize("m", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("chance", [1e-3, 0.2, 0.9, 1.0])
def test_a_poisson_round_is_the_integral_of_its_pair(m, chance):
    y = np.linspace(-14.0, 14.0, 200_001)
    p, q = ((1 - chance) * stats.norm.pdf(y) + chance * stats.norm.pdf(y, mean) for mean in (m, -m))
    places = np.array([-3.0, -0.4, 0.0, 0.1, 1.0, 4.0])
    exact = [np.maximum(p - math.exp(e) * q, 0.0).sum() * (y[1] - y[0]) for e in places]
    assert PoissonGaussianLoss(0.5 / m, chance).curve(places) == pytest.approx(exact, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("noise", "chance"), [(0.0, 0.1), (math.inf, 0.1), (1.0, 0.0), (1.0, 1.1)])
def test_senseless_poisson_losses_are_refused(noise, chance):
    with pytest.raises(ValueError, match=r"Expected noise_multiplier > 0 and chance in \(0, 1\]"):
        PoissonGaussianLoss(noise, chance)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": GaussianSumLoss(1.0, "", 4)}, "GaussianSumLoss with 1 compositions"),
        ({"compositions": 5}, "with 5 compositions"),
        ({"law": fedq.Cyclic(4)}, r"Cyclic\(size=4\) has no secret draw"),
        ({"law": fedq.FixedSize(4)}, r"FixedSize\(size=4, secret=False\) has no secret draw"),
        ({"law": fedq.Available(lambda round: range(9), 4)}, "has no secret draw"),
        ({"law": fedq.Everybody()}, "has no secret draw"),
        ({"neighbours": Neighbours.ZERO_OUT}, "secret cohorts need a claim"),
    ],
)
def test_other_losses_and_draws_have_no_account(change, words):
    given = {"loss": GaussianLoss(1.0), "law": fedq.Poisson(4)}
    given |= {"num_clients": 20, "rounds": 3, "neighbours": Neighbours.SUBSTITUTION} | change
    with pytest.raises(ValueError, match=words):
        secret_epsilon(given.pop("loss"), 1e-5, **given)


# ---- a training ------------------------------------------------------------------------------------------


def test_a_training_states_the_theorem():
    federated = own()
    report = make_report(federated, fitted(federated, rounds=5), 1e-3)
    row, exact = report.secret, spent(PoissonGaussianLoss(2.0, 0.2), 1e-3, rounds=5)
    assert row.epsilon_run == pytest.approx(exact.epsilon, rel=1e-8)
    assert row.epsilon_run < report.row(Adversary.OUTSIDER).epsilon_run
    assert "every client with probability 4/20, 5 rounds" in row.method
    stated = " ".join(row.assumptions)
    assert "uniform draw of fixed size" not in stated and "independently of all others" in stated
    assert "S11: noise is the adder's alone" in stated
    page = markdown(report)
    assert "Every client draws for itself" in page and "take turns" not in page


def test_targets_and_budgets_are_kept():
    federated = own(privacy=fedq.PrivacyTarget(2.0, 1e-3, "outsider"))
    report = make_report(federated, fitted(federated, rounds=7), 1e-3)
    assert 1.98 < report.secret.epsilon_run <= 2.0 and federated.ledger.limits is None
    federated = own(fedq.BandedGaussian(1.0, 1.0, band=1))
    budget = fedq.PrivacyBudget(2.0, 1e-3, "outsider")
    trainer = fitted(federated, budget, rounds=50)
    assert federated.ledger.rounds == budget.affordable == 12
    assert make_report(federated, trainer, 1e-3).secret.epsilon_run == pytest.approx(budget.epsilon_spent)
    assert budget.epsilon_spent <= 2.0


def write_all(sizes, path, capsys, monkeypatch):
    """All that a run lets out, if so many clients draw its rounds."""
    monkeypatch.setattr(RoundPlanner, "cohort", lambda self, round, attempt=0: list(range(sizes[round])))
    federated, logger = own(), Kept()
    folder, bar = fedq.RunFolder("run", path, show=True), fedq.RoundProgressBar(interval=0.0)
    trainer = trainer_of(federated, folder, bar, rounds=len(sizes), logger=logger, enable_progress_bar=True)
    capsys.readouterr()
    trainer.fit(Line(), loader())
    trainer.save_checkpoint(path / "run.ckpt")
    assert main(["report", str(folder.path), "--out", str(path / "page.html")]) == 0
    names = ("update_norm", "radius_min", "radius_max")
    follows = {*names, *(f"fed/{name}" for name in names)}

    def public(value):
        if isinstance(value, dict):
            return {key: public(item) for key, item in value.items() if key not in follows | {"name"}}
        return [public(item) for item in value] if isinstance(value, list) else value

    table = [line.split(",") for line in (folder.path / "metrics.csv").read_text().splitlines()]
    columns = [index for index, name in enumerate(table[0]) if name not in follows]
    checkpoint = torch.load(path / "run.ckpt", weights_only=False)
    inner = checkpoint["callbacks"]
    inner.pop(next(key for key in inner if key.startswith("RunFolder")))
    screen = "".join(capsys.readouterr())
    return {
        "log": public(logger.lines),
        "records": [
            {k: v for k, v in record.metrics().items() if k not in follows and v == v}
            for record in federated.records
        ],
        "shown": {k: float(v) for k, v in trainer.callback_metrics.items() if k not in follows},
        "table": [[row[index] for index in columns] for row in table],
        "summary": public(json.loads((folder.path / "summary.json").read_text())),
        # the released model's hash is as public as the model
        "privacy": re.sub(r"model sha256 \| \w+", "", (folder.path / "privacy.md").read_text()),
        "details": re.sub(
            r"model sha256 \| \w+", "", markdown(from_json((folder.path / "privacy.json").read_text()))
        ),
        "files": sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.suffix != ".html"),
        "checkpoint": {key: plain(value) for key, value in checkpoint.items() if key != "state_dict"},
        "steps": trainer.global_step,
        "screen": [line.partition(",")[0] for line in screen.splitlines() if line.startswith("round")],
    }


def test_what_a_run_lets_out_is_the_same_whoever_and_however_many_took_part(tmp_path, capsys, monkeypatch):
    few, many = (
        write_all(sizes, tmp_path / str(sum(sizes)), capsys, monkeypatch) for sizes in ([0, 1, 0], [4, 7, 20])
    )
    for name in few:
        assert few[name] == many[name], name
    assert few["steps"] > 0 and len(few["screen"]) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 20}, "S1, .*size below 20"),
        ({"mechanism": fedq.BandedGaussian(1.0, 1.0, band=2)}, "needs 2 rounds between"),
        ({"mechanism": fedq.GaussianNoise(1.0, 1.0)}, "S11, .*GaussianNoise.*BandedGaussian"),
        ({"mechanism": fedq.DistributedDiscreteGaussian(1.0, 1.0, 0.01)}, "S11, .*secret=True"),
        ({"mechanism": fedq.RotatedCoins(1.0)}, "S11, .*RotatedCoins"),
        ({"mechanism": fedq.AggregateGaussian(1.0, 1.0)}, "S11, .*AggregateGaussian"),
        ({"mechanism": fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 1.0))}, "S11, .*AdaptiveClip"),
    ],
)
def test_each_condition_is_refused_by_name_with_the_cure(settings, words):
    with pytest.raises(ValueError, match=words):
        own(**settings)


def test_a_round_that_was_given_up_voids_the_claim(monkeypatch):
    federated = own()
    monkeypatch.setattr(RoundPlanner, "cohort", lambda self, round, attempt=0: [1, 2])
    trainer = trainer_of(federated)
    finish = RoundEngine.finish

    def fails(self):
        if self.round == 1:
            raise ArithmeticError("a client's")
        return finish(self)

    monkeypatch.setattr(RoundEngine, "finish", fails)
    with pytest.raises(ArithmeticError):
        trainer.fit(Line(), loader())
    row = make_report(federated, trainer, 1e-3).secret
    assert row.verdict == "no guarantee" and "S2" in row.reason and math.isinf(row.epsilon_run)


@pytest.mark.parametrize("clients_per_step", [1, 3, "auto"])
def test_clients_train_side_by_side_however_many_there_are(clients_per_step, monkeypatch):
    """With next to no noise the model of rounds of 0, 1 and 7 clients is that of clients one by one."""
    sizes, models = [3, 0, 1, 7], []
    monkeypatch.setattr(RoundPlanner, "cohort", lambda self, round, attempt=0: list(range(sizes[round])))
    for steps in (clients_per_step, 1):
        federated = own(fedq.BandedGaussian(2.0, 1e-3, band=1), clients_per_step=steps)
        federated.set_plan_seed(5)  # the same data and orders for both
        torch.manual_seed(0)
        module = Line()
        fitted(federated, rounds=4, module=module)
        models.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.allclose(models[0], models[1], atol=0.02)
