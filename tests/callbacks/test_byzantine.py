import json
import math

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation
from lightning_fedq.algorithms.byzantine.attacks import alie_shift
from lightning_fedq.callbacks import Federated, PrivacyBudget, RunFolder
from lightning_fedq.callbacks.byzantine import ByzantineClients, lever_of
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import CPA, LDPQ, MVU, CorBin, FedAvg, JoPEQ
from lightning_fedq.mechanisms.interface import Adversary, RoundContext
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.rounds.running_sum import RunningSum
from tests.described import privacy_report
from tests.digits_run import Classifier, Digits, make_trainer
from tests.one_round import context_of

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


def attacked_round(attack, mechanism=None, fraction=0.3, updates=None, stack=4, **kwargs):
    """One round of a bare engine with liars: the engine, the callback and the updates."""
    federated = Federated(mechanism or FedAvg(), CLIENTS, seed=0)
    engine = RoundEngine(
        federated.mechanism,
        RoundPlanner(CLIENTS, 0),
        SeededKeys(0),
        torch.zeros(DIM),
        (DIM,),
        FixedRange(1.0),
    )
    federated.engine = engine
    byzantine = ByzantineClients(fraction, attack, **kwargs)
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
@pytest.mark.parametrize(
    ("attack", "scale", "lie"),
    [
        ("sign_flip", 2.0, lambda own, honest: -2.0 * own),
        ("constant", 0.7, lambda own, honest: torch.full_like(own, 0.7)),
        ("ipm", 1.5, lambda own, honest: -1.5 * honest.mean(0)),
        ("alie", 1.2, lambda own, honest: honest.mean(0) - 1.2 * honest.std(0, correction=0)),
        ("mimic", 1.0, lambda own, honest: honest[0]),
    ],
)
def test_update_attacks_whatever_the_stacks(attack, scale, lie, stack):
    engine, byzantine, updates = attacked_round(attack, scale=scale, stack=stack)
    assert len(byzantine.byzantine) == 3
    torch.testing.assert_close(engine.weights, expected_mean(byzantine, updates, lie), atol=1e-5, rtol=1e-4)


def test_alie_takes_the_paper_s_shift_at_scale_zero():
    engine, byzantine, updates = attacked_round("alie", scale=0.0)
    lie = lambda own, honest: honest.mean(0) - alie_shift(10, 3) * honest.std(0, correction=0)  # noqa: E731
    torch.testing.assert_close(engine.weights, expected_mean(byzantine, updates, lie), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("attack", "low", "high"), [("random", -0.1, 0.1), ("gaussian", None, None)])
def test_random_attacks_have_their_law(attack, low, high):
    engine, byzantine, updates = attacked_round(attack, scale=0.1)
    clean = expected_mean(byzantine, updates, lambda own, honest: 0 * own if attack == "random" else own)
    noise = (engine.weights - clean) * CLIENTS  # the sum of three liars' noise
    variance = 3 * (0.01 / 3 if attack == "random" else 0.01)
    # 2,000 draws: relative standard error of a variance about 3 %, 5 of them.
    assert noise.var().item() == pytest.approx(variance, rel=0.16)
    if high:
        assert noise.abs().max() <= 3 * high + 1e-6


@pytest.mark.parametrize(
    ("attack", "mean"),
    [
        ("inverted", -1.0),
        ("inverted_without_coin", -1 / math.tanh(0.25)),
        ("flip", 0.0),
        ("ones", 1 / math.tanh(0.25) / 0.5),
    ],
)
def test_wire_attacks_have_their_mean(attack, mean):
    """Everybody sends .5; the mean is .7 * .5 + .3 * .5 * (what a liar counts for): cpa.md section 8."""
    value = 0.5
    engine, _, _ = attacked_round(attack, LDPQ(epsilon=0.5), updates=torch.full((CLIENTS, DIM), value))
    expected = value * (0.7 + 0.3 * mean)
    error = engine.weights.std().item() / math.sqrt(DIM)
    assert abs(engine.weights.mean().item() - expected) < 5 * error  # 4 cases: 2e-6


def test_copied_bits_are_the_partner_s():
    """Liars in pairs send their partner's bits: correlated errors add up instead of cancelling."""
    errors = {}
    for attack, fraction in (("sign_flip", 0.0), ("copied", 0.4)):
        updates = torch.zeros(CLIENTS, DIM)
        engine, _, _ = attacked_round(attack, CorBin(epsilon=3.0, shared_bits=None), fraction, updates)
        errors[attack] = engine.weights.square().mean().item()
    assert errors["copied"] > 3 * errors["sign_flip"]


@pytest.mark.parametrize(
    "mechanism",
    [
        CPA(epsilon=1.0, levels=4),
        CPA(epsilon=30.0, epsilon_scope="round"),
        MVU(epsilon=0.5),  # its design has 2 outputs on a wire of 2 bits
        JoPEQ(epsilon=1.0),
    ],
)
def test_garbage_is_of_the_right_length_and_decodes(mechanism):
    engine, _, _ = attacked_round("garbage", mechanism)
    assert torch.isfinite(engine.weights).all() and engine.weights.any()


@pytest.mark.parametrize("stack", [1, 4])
def test_garbage_that_is_no_number_is_refused_as_from_a_wire(stack):
    """Random bits of floats: nobody's NaN gets into the mean, and who sent one counts as dropped."""
    engine, byzantine, updates = attacked_round("garbage", FedAvg(), stack=stack)
    honest = [client for client in range(CLIENTS) if client not in byzantine.byzantine]
    assert len(honest) < CLIENTS
    assert torch.allclose(engine.weights, updates[honest].mean(0))


@pytest.mark.parametrize("how", ["weights", "median"])
def test_a_stack_with_one_bad_message_is_taken_but_for_that_one(how):
    """Nothing of the stack is in the sum twice: it is tried together, and then one by one."""
    context, weights = context_of(FedAvg(), range(4), (DIM,)), torch.tensor([1.0, 2.0, 3.0, 4.0])
    rule = RobustAggregation("median") if how == "median" else None
    total = RunningSum(
        FedAvg(),
        context,
        PublicRandomness(SeededKeys(0), 0),
        torch.zeros(DIM),
        None if rule else weights,
        rule,
        None,
    )
    rows = torch.rand(4, DIM)
    rows[2, 5] = math.nan
    symbols = rows.view(torch.int32)
    assert list(total.add_from_liars(symbols, range(4))) == [0, 1, 3] and total.received == [0, 1, 3]
    if how == "median":
        assert len(total._rows) == 3
    else:
        expected = (weights[[0, 1, 3], None] * rows[[0, 1, 3]]).double().sum(0)
        assert torch.allclose(total._decoded, expected)


@pytest.mark.parametrize("attack", ["ones", "flip", "inverted", "inverted_without_coin", "copied"])
@pytest.mark.parametrize(
    "budget", [{"epsilon_scope": "round"}, {"epsilon_scope": "total", "rounds": 3}, {"blocks_per_round": 5}]
)
def test_wire_attacks_on_messages_of_some_blocks(attack, budget):
    """A liar without a coin still sends as many blocks as everybody else, and no more."""
    mechanism = CPA(epsilon=30.0, stages=2, **budget)
    engine, _, _ = attacked_round(attack, mechanism)
    context = engine.context(engine.planner.plan(0, mechanism))
    sent = mechanism.blocks_sent(context)
    assert sent == mechanism.without_noise(context).blocks_sent(context) < DIM
    assert engine.total_uplink_bits == CLIENTS * 2 * sent and torch.isfinite(engine.weights).all()


def test_levers_are_known_or_not_told():
    context = RoundContext(0, ((0,), (1,)), (50,), torch.zeros(1).double(), torch.ones(1).double())
    coth = 1 / math.tanh(0.25)
    assert lever_of(LDPQ(0.5), context) == pytest.approx(coth)
    assert lever_of(CPA((2.0, 0.5)), context) == pytest.approx(1 + coth, rel=1e-6)  # the longest of all
    assert lever_of(CPA(0.5, blocks_per_round=5), context) == pytest.approx(10 * (1 + coth), rel=1e-6)
    assert lever_of(MVU(0.5, 1, 1), context) == pytest.approx(coth, rel=1e-3)
    assert lever_of(JoPEQ(0.5), context) == pytest.approx(1.5 * math.sqrt(33))


def test_no_liars_change_nothing():
    for attack in ("sign_flip", "inverted", "alie"):
        engine, byzantine, updates = attacked_round(attack, LDPQ(epsilon=1.0), fraction=0.0)
        plain = RoundEngine(
            LDPQ(epsilon=1.0),
            RoundPlanner(CLIENTS, 0),
            SeededKeys(0),
            torch.zeros(DIM),
            (DIM,),
            FixedRange(1.0),
        )
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


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_label_flip_changes_the_liars_labels_only(clients_per_step, monkeypatch):
    seen = {}
    flip = ByzantineClients.on_train_batch_start

    def flip_and_look(self, trainer, pl_module, batch, batch_idx):
        """In the hook itself: a callback with one of its own would rule stacks out."""
        flip(self, trainer, pl_module, batch, batch_idx)
        clients = trainer.home.callbacks[0].training_clients
        assert len(clients) <= clients_per_step
        labels = batch[1] if len(clients) > 1 else batch[1][None]
        for row, client in enumerate(clients):
            seen.setdefault(client, []).append(labels[row].clone())

    monkeypatch.setattr(ByzantineClients, "on_train_batch_start", flip_and_look)
    labels = {}
    for fraction in (0.0, 0.3):
        seen = {}
        torch.manual_seed(0)
        federated = Federated(FedAvg(), CLIENTS, seed=0, clients_per_step=clients_per_step)
        byzantine = ByzantineClients(fraction, "label_flip", num_classes=10)
        trainer_of(federated, byzantine, epochs=1).fit(Classifier(), datamodule=Digits())
        assert federated.clients_per_step_chosen == clients_per_step
        labels[fraction] = {client: torch.cat(parts) for client, parts in seen.items()}
    assert len(byzantine.byzantine) == 3 and set(labels[0.3]) == set(range(CLIENTS))
    for client, flipped in labels[0.3].items():
        plain = labels[0.0][client]
        assert torch.equal(flipped, 9 - plain if client in byzantine.byzantine else plain)


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
    _, _, trainer = run(ByzantineClients(0.2, "inverted"), LDPQ(epsilon=0.5), epochs=1)
    assert trainer.callback_metrics["byzantine/lever"].item() == pytest.approx(4.083, abs=1e-3)


def test_a_rule_that_withstands_too_few_warns():
    with pytest.warns(
        UserWarning, match="trimmed_mean of 10 rows withstands 1 Byzantine clients, 3 are expected"
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
        ({"fraction": 0.1, "attack": "label_flip"}, "num_classes goes with label_flip"),
        ({"fraction": 0.1, "attack": "ones", "num_classes": 3}, "num_classes goes with label_flip"),
        ({"fraction": 0.1, "attack": "constant", "scale": math.nan}, "scale must be finite"),
    ],
)
def test_arguments_are_checked(kwargs, match):
    with pytest.raises(ValueError, match=match):
        ByzantineClients(**kwargs)


def test_attacks_that_do_not_fit_are_refused():
    federated = Federated(FedAvg(), CLIENTS, seed=0)
    with pytest.raises(ValueError, match="must come after Federated"):
        ByzantineClients(0.1, "mimic").on_fit_start(_Trainer(federated), None)


def test_alie_with_liars_in_the_majority_by_chance():
    for fraction in (0.5, 0.9):
        engine, _, _ = attacked_round("alie", scale=0.0, fraction=fraction)
        assert torch.isfinite(engine.weights).all()


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
    assert "8 clients lie" in (tmp_path / "run" / "privacy.md").read_text()
    read = report_of_checkpoint(tmp_path / "last.ckpt", None, 1e-5, secagg=False)
    assert read.row(Adversary.OUTSIDER).epsilon_run == pytest.approx(expected)
