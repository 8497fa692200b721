"""A privacy target through real fits: calibrated, kept, resumed, and never overspent."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.planning import Problem, plan, planned_noise
from lightning_fedq.training.privacy_target import _format_ratio
from tests.callbacks.steps import EndsAfter
from tests.described import Setting, allowed_dropouts, calibrate, planned_charges
from tests.digits_run import make_trainer, weights_of
from tests.one_round import make_context

TARGET = fedq.PrivacyTarget(8.0, 1e-5, "secagg_server")


class Line(pl.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(samples=20, width=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, width, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=1)


def trained(federated, rounds=3, ckpt_path=None, width=4, callbacks=()):
    trainer = make_trainer(federated, *callbacks, max_epochs=rounds)
    module = Line(width)
    trainer.fit(module, loader(width=width), ckpt_path=ckpt_path)
    return trainer


# RotatedCoins are calibrated in seconds, once for the same rounds, clients and target
def federation(mechanism=None, privacy=TARGET, clients=20, **settings):
    settings = {"secure_aggregation": fedq.SecAgg(), **settings}
    return fedq.Federated(mechanism or fedq.RotatedCoins(1.0), clients, privacy=privacy, **settings)


def spent_by(federated, adversary, rounds, secure=True, dim=5):
    mechanism = federated.mechanism
    context = make_context(mechanism, tuple(range(federated.planner.cohort_size)), (dim,))
    drops = federated.planner.dropout_probability
    setting = Setting(context, rounds, 1e-5, dropout_probability=drops, secure_aggregation=secure)
    return setting.spent(setting.claims(mechanism)[adversary], rounds).epsilon


def test_a_run_ends_at_its_target():
    federated = federation()
    trained(federated, rounds=3)
    assert federated.mechanism.epsilon_per_bit > 0.0
    found = spent_by(federated, Adversary.SECAGG_SERVER, 3)
    assert 7.97 < found <= 8.0
    assert federated.calibration.epsilon == pytest.approx(found)
    words = "epsilon 8 at delta 1e-05 against the server behind secure aggregation, run: RotatedCoins("
    assert words in federated.calibrated_target.statement
    assert federated.ledger.max_charges == 3 and int(federated.ledger.limits.min()) == 3


@pytest.mark.parametrize(
    ("mechanism", "against"),
    [
        (fedq.LDPQ(1.0), "secagg_server"),
        (fedq.GaussianNoise(1.0, 1.0), "server"),
        (fedq.DistributedDiscreteGaussian(1.0, 1.0, 0.1), "outsider"),
    ],
    ids=repr,
)
def test_every_mechanism_with_a_parameter_is_calibrated(mechanism, against):
    federated = federation(mechanism, fedq.PrivacyTarget(2.0, 1e-5, against))
    trained(federated, rounds=2)
    assert 1.99 < spent_by(federated, fedq.PrivacyTarget(2.0, 1e-5, against).against, 2) <= 2.0


def test_a_target_for_one_round_sets_no_limit():
    noise, target = fedq.GaussianNoise(1.0, 1.0), fedq.PrivacyTarget(1.0, 1e-5, "outsider", over="round")
    federated = federation(noise, target)
    trained(federated, rounds=2)
    assert 0.98 < spent_by(federated, Adversary.OUTSIDER, 1) <= 1.0
    assert federated.ledger.limits is None


def test_a_second_fit_is_not_paid_for():
    federated = federation()
    trained(federated, rounds=3)
    with pytest.raises(ValueError, match="for 3 rounds, but 3 are charged and the Trainer wants 2 more"):
        trained(federated, rounds=2)
    assert federated.ledger.max_charges == 3


def test_rounds_that_are_repeated_end_the_run_before_it_is_overspent():
    """A round that fails is charged; the one more that would be needed at the end is not begun."""

    class Fails(pl.Callback):
        def __init__(self):
            self.rounds = []

        def on_train_epoch_start(self, trainer, pl_module):
            ledger = federated.ledger  # an attempt before this one, as if it had to be repeated
            ledger.charge(range(ledger.num_clients), trainer.current_epoch, attempt=-1)
            self.rounds.append(trainer.current_epoch)

    federated, fails = federation(fedq.LDPQ(1.0), clients_per_step=1), Fails()
    trained(federated, rounds=4, callbacks=[fails])
    assert federated.ledger.max_charges <= 4 and len(fails.rounds) == 2


@pytest.mark.filterwarnings("ignore:the keys come from a seed")
def test_a_resumed_run_keeps_what_was_found_and_refuses_others(tmp_path):
    path = tmp_path / "run.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    first = federation(seed=1, clients=4, mechanism=fedq.RotatedCoins(1.0))
    whole = trained(first, rounds=3, callbacks=[Save()])
    again = federation(seed=1, clients=4)
    resumed = trained(again, rounds=3, ckpt_path=path)
    assert again.mechanism == first.mechanism and again.calibration == first.calibration
    assert torch.equal(*(weights_of(one.lightning_module) for one in (whole, resumed)))
    beyond = federation(first.mechanism, privacy=None, seed=1, clients=4)
    trained(beyond, rounds=5, ckpt_path=path)
    assert beyond.ledger.max_charges == 5, "the cure: the same noise, and what all rounds spend"
    weights = tmp_path / "weights.ckpt"
    whole.save_checkpoint(weights, weights_only=True)
    with pytest.raises(ValueError, match=r"contains weights only.*ModelCheckpoint.*'state_dict'"):
        trained(federation(seed=1, clients=4), rounds=3, ckpt_path=weights)
    other = fedq.PrivacyTarget(2.0, 1e-5, "secagg_server")
    plain = {"privacy": None, "mechanism": fedq.LDPQ(1.0)}
    coins = r"asked = RotatedCoins.*clip_stds=4\.5.*here RotatedCoins.*clip_stds=3\.0"
    for words, rounds, settings in (
        (r"calibrated for 3 rounds, but the Trainer wants 5\. Keep max_epochs", 5, {}),
        ("has another privacy target: target = PrivacyTarget", 3, {"privacy": other}),
        (coins, 3, {"mechanism": fedq.RotatedCoins(1.0, clip_stds=3.0)}),
        ("The checkpoint is of another federation: mechanism =", 3, plain),
    ):
        with pytest.raises(ValueError, match=words):
            trained(federation(seed=1, clients=4, **settings), rounds=rounds, ckpt_path=path)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"secure_aggregation": None},
            "can't be private against the server behind secure aggregation here: secure aggregation is off",
        ),
        (
            {"mechanism": fedq.FedAvg(), "secure_aggregation": None},
            "FedAvg has no privacy parameter that a target could set",
        ),
    ],
    ids=str,
)
def test_what_can_not_be_is_refused_before_the_first_round(settings, match):
    federated = federation(**settings)
    with pytest.raises(ValueError, match=match):
        trained(federated)
    assert federated.ledger.rounds == 0


def test_a_delta_that_is_too_large_for_the_clients_is_refused_at_once():
    with pytest.raises(ValueError, match=r"delta must be > 0 and below 0\.05 = 1 / 20 clients"):
        federation(privacy=fedq.PrivacyTarget(8.0, 0.06, "outsider"))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "delta is missing. Choose one below 1 / clients, such as 1e-5"),
        ({"delta": 2.0}, "delta must be > 0 and below 1"),
        ({"delta": 1e-5, "epsilon": -1.0}, "epsilon must be > 0 and finite"),
        ({"delta": 1e-5, "adversary": "nobody"}, "adversary must be one of eavesdropper, .*got 'nobody'"),
        ({"delta": 1e-5, "over": "week"}, "over of PrivacyTarget must be one of run, round, got 'week'"),
    ],
)
def test_targets_that_make_no_sense(settings, match):
    with pytest.raises(ValueError, match=match):
        fedq.PrivacyTarget(**{"epsilon": 8.0, **settings})


# ---- what is planned for -----------------------------------------------------------------------------------


def setting_of(mechanism, clients=20, **settings):
    return Setting(make_context(mechanism, tuple(range(clients)), (100,)), 10, 1e-5, **settings)


def test_dropouts_and_lying_servers_are_allowed_for():
    mechanism = fedq.RotatedCoins(1.0)
    setting = setting_of(mechanism, dropout_probability=0.1, secure_aggregation=True)
    dropped = allowed_dropouts(setting)
    assert 5 <= dropped <= 8  # 2 expected
    found = calibrate(TARGET, mechanism, setting, 10).mechanism
    assert found.max_dropped_clients == dropped
    all_answer = setting_of(mechanism, secure_aggregation=True)
    assert found.epsilon_per_bit < calibrate(TARGET, mechanism, all_answer, 10).mechanism.epsilon_per_bit
    lying = setting_of(mechanism, secure_aggregation=True, min_survivors=14)
    assert calibrate(TARGET, mechanism, lying, 10).mechanism.max_dropped_clients == 6


def test_what_would_be_possible_is_said():
    hopeless = fedq.LDPQ(1.0)
    with pytest.raises(ValueError, match=r"LDPQ can't meet epsilon 1e-09 .* still spend \S+. Use fewer"):
        calibrate(fedq.PrivacyTarget(1e-9, 1e-12, "server"), hopeless, setting_of(hopeless), 10)
    trusted = fedq.AggregateGaussian(1.0, 1.0)
    with pytest.raises(
        ValueError,
        match=r"against the server that sees every message here: .*. It could be against an outsider",
    ):
        calibrate(fedq.PrivacyTarget(8.0, 1e-5, "server"), trusted, setting_of(trusted), 10)


def test_clients_are_drawn_as_often_as_is_planned_for():
    assert planned_charges(30, 20, 20) == 30
    planned = planned_charges(50, 10, 1000)
    draws = torch.distributions.Binomial(50, torch.tensor(0.01)).sample((200, 1000)).max(1).values
    assert 4 <= planned <= 7
    assert float((draws > planned).float().mean()) < 0.06  # 1% expected, and 200 runs: 5 standard errors


# ---- what happens to a run that is not as it was calibrated for -----------------------------------------


@pytest.mark.filterwarnings("ignore:the keys come from a seed")
@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"cohort": 8}, r"clients_per_round = 16 \(here 8\)"),
        ({"dropout_probability": 0.3}, r"dropout_probability = 0.0 \(here 0.3\)"),
        ({"secure_aggregation": None}, r"secure_aggregation = SecAgg.* \(here None\)"),
    ],
    ids=str,
)
def test_a_smaller_cohort_more_dropouts_and_no_masks_are_refused_when_a_run_goes_on(tmp_path, changed, match):
    path = tmp_path / "run.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(path)

    settings = {"seed": 1, "clients": 20, "cohort": 16}
    trained(federation(**settings), rounds=1, callbacks=[Save()])
    again = federation(**{**settings, **changed})
    with pytest.raises(ValueError, match=match):
        trained(again, rounds=1, ckpt_path=path)
    assert again.ledger.rounds == 0


def test_a_cohort_that_shrinks_in_memory_is_paid_for_fewer_rounds():
    """What an epsilon hangs on is read again at every fit: the ledger stops before it is overspent."""
    federated = federation(clients=20)
    trained(federated, rounds=3)
    kept, engine = federated.calibrated_target, federated.engine
    assert int(engine.ledger.limits.max()) == 3
    engine.planner = federated.planner = replace(federated.planner, law=fedq.FixedSize(12))
    trainer = pl.Trainer(callbacks=[federated], logger=False, enable_checkpointing=False, accelerator="cpu")
    kept.limit(engine, federated, trainer)
    assert int(engine.ledger.limits.max()) == 1


@pytest.mark.parametrize(
    ("mechanism", "clients", "target", "words"),
    [
        (fedq.RotatedCoins(3.0), 2000, TARGET, "no visible loss"),
        (fedq.LDPQ(1.0), 20, fedq.PrivacyTarget(0.1, 1e-5, "server"), "do not"),
        (fedq.GaussianNoise(0.1, 1.0), 20, fedq.PrivacyTarget(8.0, 1e-5, "server"), "do not"),
    ],
)
def test_the_start_of_a_fit_says_what_the_plan_would(mechanism, clients, target, words, caplog):
    """The same R, whatever the norm that the mechanism clips to."""
    secagg = fedq.SecAgg(simulation="counted") if target.against is Adversary.SECAGG_SERVER else None
    federated = fedq.Federated(mechanism, clients, seed=1, privacy=target, secure_aggregation=secagg)
    kept = federated.calibrated_target
    with caplog.at_level("INFO"):
        kept.calibration = kept.calibrate(federated, 7850, 30, 0)
        cohort = federated.planner.cohort_size
        said = _format_ratio(planned_noise(kept.calibration.mechanism, cohort, 7850, 30))
    unit = replace(mechanism, clip_norm=1.0) if hasattr(mechanism, "clip_norm") else mechanism
    (option,) = plan(Problem(clients, 7850, 30, target), {"it": unit})
    if option.law == fedq.Everybody():
        assert f"R = {option.ratio:.3g} ({option.verdict})" in said
    assert f"({words})" in said


# ---- a ledger that is handed on ----------------------------------------------------------------------------


def aimed(epsilon=8.0, **settings):
    target = fedq.PrivacyTarget(epsilon, 1e-5, "secagg_server", **settings.pop("target", {}))
    return fedq.Federated(
        fedq.RotatedCoins(1.0), 20, secure_aggregation=fedq.SecAgg(), privacy=target, **settings
    )


def test_a_ledger_of_other_settings_is_refused_when_the_mechanism_is_known_and_the_cure_works():
    first = aimed()
    trained(first, 3, callbacks=(EndsAfter(1),))
    with pytest.raises(ValueError, match=r"charged 1 rounds of a client for RotatedCoins.* less those 1,"):
        trained(aimed(ledger=first.ledger), 3)
    with pytest.raises(ValueError, match="The ledger is of 20 clients"):
        fedq.Federated(fedq.RotatedCoins(1.0), 10, privacy=TARGET, ledger=first.ledger)
    second = aimed(ledger=first.ledger)
    trained(second, 3 - 1)
    assert second.mechanism == first.mechanism and second.ledger is first.ledger
    assert first.ledger.max_charges == 3
    alone = aimed()
    trained(alone, 1)
    assert alone.ledger.max_charges == 1
