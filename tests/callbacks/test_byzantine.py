import json
import math

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation
from lightning_fedq.callbacks import Federated, PrivacyBudget, RunFolder
from lightning_fedq.callbacks.byzantine import ByzantineClients, max_influence
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import CPA, LDPQ, MVU, FedAvg, JoPEQ
from lightning_fedq.mechanisms.interface import Adversary, RoundContext
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from tests.described import privacy_report
from tests.digits_run import Classifier, Digits, make_trainer
from tests.one_round import decode, make_context

CLIENTS, DIM = 10, 2000


def trainer_of(federated, *others, epochs=3):
    return make_trainer(federated, *others, max_epochs=epochs)


def run(byzantine, mechanism=None, epochs=3, **kwargs):
    """Validation accuracy after a short digits run."""
    torch.manual_seed(0)
    federated = Federated(mechanism or FedAvg(), CLIENTS, seed=0, clients_per_step=4, **kwargs)
    trainer = trainer_of(federated, byzantine, epochs=epochs)
    trainer.fit(Classifier(), datamodule=Digits())
    return trainer.callback_metrics["val_acc"].item(), federated, trainer


class _Trainer:
    """Just enough of a trainer for the callback to find its federation."""

    def __init__(self, federated):
        self.callbacks, self.barebones = [federated], False


def bare_engine(mechanism):
    return RoundEngine(
        mechanism, RoundPlanner(CLIENTS, 0), SeededKeys(0), torch.zeros(DIM), (DIM,), FixedRange(1.0)
    )


def attacked_round(
    attack, mechanism=None, fraction=0.3, updates=None, stack=4, kind=ByzantineClients, **kwargs
):
    """One round of a bare engine with liars: the engine, the callback and the updates."""
    federated = Federated(mechanism or FedAvg(), CLIENTS, seed=0)
    federated.engine = engine = bare_engine(federated.mechanism)
    byzantine = kind(fraction, attack, **kwargs)
    byzantine.on_fit_start(_Trainer(federated), None)
    if updates is None:
        updates = torch.rand(CLIENTS, DIM, generator=torch.Generator().manual_seed(0)) - 0.3
    plan = engine.start()
    for first in range(0, CLIENTS, stack):
        clients = plan.survivors[first : first + stack]
        engine.receive(clients, updates[list(clients)].clone())
    engine.finish()
    return engine, byzantine, updates


def expected_mean(byzantine, updates, lie):
    rows = updates.clone()
    liars = sorted(byzantine.byzantine)
    honest = [c for c in byzantine._plan.survivors if c not in byzantine.byzantine]
    rows[liars] = lie(updates[liars], updates[honest])
    return rows.mean(0)


@pytest.mark.parametrize("stack", [1, 4, 10])
def test_updates_are_turned_around_whatever_the_stacks(stack):
    engine, byzantine, updates = attacked_round("sign_flip", scale=2.0, stack=stack)
    assert len(byzantine.byzantine) == 3
    expected = expected_mean(byzantine, updates, lambda own, honest: -2.0 * own)
    torch.testing.assert_close(engine.weights, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mechanism", [LDPQ(0.5), CPA(0.5, epsilon_scope="bit")], ids=["LDPQ", "CPA"])
@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize(
    ("attack", "mean"),
    [
        ("inverted", -1.0),
        ("inverted_without_coin", -1 / math.tanh(0.25)),
        ("flip", 0.0),
        ("ones", 1 / math.tanh(0.25) / 0.5),
    ],
)
def test_wire_attacks_have_their_mean(attack, mean, stack, mechanism):
    """Everybody sends .5; the mean is .7 * .5 + .3 * .5 * (what a liar counts for): cpa.md section 8."""
    value = 0.5
    if attack == "ones" and isinstance(mechanism, CPA):
        mean = -mean  # N = 2: the one Hadamard word is +1 at the lower point
    updates = torch.full((CLIENTS, DIM), value)
    engine, _, _ = attacked_round(attack, mechanism, updates=updates, stack=stack)
    expected = value * (0.7 + 0.3 * mean)
    error = engine.weights.std().item() / math.sqrt(DIM)
    assert abs(engine.weights.mean().item() - expected) < 5 * error  # 16 cases: 1e-5


@pytest.mark.parametrize("attack", ["ones", "flip", "inverted", "inverted_without_coin"])
@pytest.mark.parametrize(
    "budget",
    [
        {"epsilon_scope": "round"},
        {"epsilon_scope": "total", "rounds": 3},
        {"blocks_per_round": 5, "epsilon_scope": "bit"},
    ],
)
def test_wire_attacks_on_messages_of_some_blocks(attack, budget):
    """A liar without a coin still sends as many blocks as everybody else, and no more."""
    mechanism = CPA(epsilon=30.0, stages=2, **budget)
    engine, _, _ = attacked_round(attack, mechanism)
    context = engine.context(engine.planner.plan(0, mechanism))
    sent = mechanism.blocks_sent(context)
    assert sent == mechanism.without_noise(context).blocks_sent(context) < DIM
    assert engine.total_uplink_bits == CLIENTS * 2 * sent and torch.isfinite(engine.weights).all()


@pytest.mark.parametrize(
    ("words", "levels", "mean"), [("balanced", 2, 0.0), ("balanced", 4, 0.0), ("hadamard", 4, -1.0)]
)
def test_ones_are_noise_for_words_of_either_sign_and_a_push_for_hadamard_words(words, levels, mean):
    """Every Hadamard word is +1 at point 0, so "ones" is a vote for point 0, worth 1/c of an honest one."""
    dim = 100_000
    mechanism = CPA(epsilon=0.5, levels=levels, words=words, epsilon_scope="bit")
    context = make_context(mechanism, (0,), (dim,))
    estimate = decode(mechanism, torch.ones(1, dim, dtype=torch.uint8), (0,), context).double()
    error = estimate.std() / math.sqrt(dim)
    assert abs(estimate.mean() - mean / math.tanh(0.25)) < 5 * error  # 3 cases: 2e-6


def test_levers_are_known_or_not_told():
    context = RoundContext(0, ((0,), (1,)), (50,), torch.zeros(1).double(), torch.ones(1).double())
    coth = 1 / math.tanh(0.25)
    assert max_influence(LDPQ(0.5), context) == pytest.approx(coth)
    assert max_influence(CPA((2.0, 0.5), epsilon_scope="bit"), context) == pytest.approx(
        1 + coth, rel=1e-6
    )  # the longest of all
    assert max_influence(CPA(0.5, blocks_per_round=5, epsilon_scope="bit"), context) == pytest.approx(
        10 * (1 + coth), rel=1e-6
    )
    assert max_influence(MVU(0.5, 1, 1), context) == pytest.approx(coth, rel=1e-3)
    assert max_influence(JoPEQ(0.5), context) == pytest.approx(1.5 * math.sqrt(33))


def test_no_liars_change_nothing():
    for attack in ("sign_flip", "inverted"):
        engine, byzantine, updates = attacked_round(attack, LDPQ(epsilon_per_coordinate=1.0), fraction=0.0)
        plain = bare_engine(LDPQ(epsilon_per_coordinate=1.0))
        plain.start()
        plain.receive(range(CLIENTS), updates.clone())
        plain.finish()
        assert not byzantine.byzantine
        torch.testing.assert_close(engine.weights, plain.weights)


def test_an_abandoned_round_leaves_nothing_behind():
    engine, byzantine, updates = attacked_round("sign_flip")
    start = engine.weights
    engine.start()
    engine.receive(range(4), updates[:4].clone())
    engine.abandon()
    engine.start()
    engine.receive(range(CLIENTS), updates.clone())
    record = engine.finish()
    assert record.num_received == CLIENTS
    torch.testing.assert_close(engine.weights - start, expected_mean(byzantine, updates, lambda own, _: -own))


def test_liars_break_the_mean_and_not_a_robust_rule():
    """Two of ten send minus ten times their update; digits, 3 rounds: .79, .10, .80 and .70 measured."""
    liars = lambda fraction: ByzantineClients(fraction, "sign_flip", scale=10.0)  # noqa: E731
    honest, *_ = run(liars(0.0))
    broken, *_ = run(liars(0.2))
    saved, federated, trainer = run(liars(0.2), aggregator=RobustAggregation("multi_krum", num_byzantine=2))
    median, *_ = run(liars(0.2), aggregator=RobustAggregation("median"))
    assert honest > 0.7 and broken < 0.3 and saved > 0.7 and median > 0.6
    assert trainer.callback_metrics["byzantine/num_byzantine"].item() == 2
    assert federated.engine.tampering is None  # taken off again


def test_the_lever_is_logged():
    _, _, trainer = run(ByzantineClients(0.2, "inverted"), LDPQ(epsilon_per_coordinate=0.5), epochs=1)
    assert trainer.callback_metrics["byzantine/lever"].item() == pytest.approx(4.083, abs=1e-3)


def test_a_rule_that_withstands_too_few_warns():
    with pytest.warns(
        UserWarning, match="trimmed_mean of 10 rows tolerates 1 Byzantine clients, but 3 are expected"
    ):
        run(
            ByzantineClients(0.3, "sign_flip"),
            epochs=1,
            aggregator=RobustAggregation("trimmed_mean", num_byzantine=1),
        )


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"fraction": 1.0, "attack": "ones"}, r"fraction must be in \[0, 1\), got 1.0"),
        ({"fraction": -0.1, "attack": "ones"}, r"fraction must be in \[0, 1\)"),
        ({"fraction": 0.1, "attack": "nap"}, "attack must be one of"),
        ({"fraction": 0.1, "attack": "sign_flip", "scale": math.nan}, "scale must be finite"),
    ],
)
def test_arguments_are_checked(kwargs, match):
    with pytest.raises(ValueError, match=match):
        ByzantineClients(**kwargs)


def test_attacks_that_do_not_fit_are_refused():
    federated = Federated(FedAvg(), CLIENTS, seed=0)
    with pytest.raises(ValueError, match="must come after Federated"):
        ByzantineClients(0.1, "sign_flip").on_fit_start(_Trainer(federated), None)


def test_a_run_that_fails_leaves_no_liars_behind():
    class Fails(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            raise RuntimeError("boom")

    federated = Federated(FedAvg(), CLIENTS, seed=0, clients_per_step=4)
    with pytest.raises(RuntimeError, match="boom"):
        trainer_of(federated, ByzantineClients(0.2, "sign_flip"), Fails()).fit(
            Classifier(), datamodule=Digits()
        )
    assert federated.engine.tampering is None


# ---- what is claimed among liars ---------------------------------------------------------------------------


def test_liars_count_in_report_budget_and_checkpoint(tmp_path):
    """A claim behind the sum counts the honest coins only, wherever it is made."""
    limit = PrivacyBudget(1e6, 1e-5, "outsider", on_exhausted="warn")
    federated = Federated(LDPQ(0.5), CLIENTS, clients_per_step=5)
    others = ByzantineClients(0.8, "ones"), limit, RunFolder("run", str(tmp_path))
    trainer = trainer_of(federated, *others, epochs=2)
    trainer.fit(Classifier(), datamodule=Digits(60))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = json.loads((tmp_path / "run" / "privacy.json").read_text())
    outsider = next(row for row in saved["rows"] if row["adversary"] == "OUTSIDER")
    engine = federated.engine
    context, charges = engine.context(engine.planner.plan(0, engine.mechanism)), [2] * CLIENTS
    settings = {"rounds": 2, "delta": 1e-5, "charges": charges}
    none, eight = (privacy_report(LDPQ(0.5), context, num_byzantine=n, **settings) for n in (0, 8))
    expected = eight.row(Adversary.OUTSIDER).epsilon_run
    assert expected > 1.5 * none.row(Adversary.OUTSIDER).epsilon_run
    assert outsider["epsilon_run"] == pytest.approx(expected) == pytest.approx(limit.epsilon_spent)
    assert "8 clients lie" in (tmp_path / "run" / "report.md").read_text()
    read = report_of_checkpoint(tmp_path / "last.ckpt", None, 1e-5, secagg=False)
    assert read.row(Adversary.OUTSIDER).epsilon_run == pytest.approx(expected)
