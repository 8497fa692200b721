"""Clients that take part once, with the whole budget in one round, or in turn, every b-th round."""

import pytest
import torch
import yaml

from lightning_fedq import Cyclic, DisjointOnce
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.mechanisms import LDPQ, GaussianNoise, RotatedAxes
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.target import PrivacyTarget
from tests.callbacks.steps import Fails
from tests.configurations import linear_on_digits, written
from tests.described import privacy_report
from tests.digits_run import make_trainer, weights_of
from tests.one_round import make_context
from tests.training.test_privacy_target import Line, loader, trained

SERVER = PrivacyTarget(4.0, 1e-3, "server")


def federation(**settings):
    return Federated(
        **{
            "mechanism": RotatedAxes(1.0, 1.0),
            "num_clients": 20,
            "cohort": DisjointOnce(4),
            "clients_per_step": 1,
            "privacy": SERVER,
            **settings,
        }
    )


def test_the_whole_budget_goes_into_one_round():
    federated = federation()
    trained(federated, rounds=5)
    assert federated.calibration is not None and federated.calibration.charges == 1
    assert 3.99 < federated.calibration.epsilon <= 4.0
    assert federated.mechanism.epsilon_per_message == pytest.approx(
        4.0, abs=0.01
    )  # what delta buys is little
    assert federated.ledger.charges.tolist() == [1] * 20
    assert int(federated.ledger.limits.max()) == 1
    many = federation(cohort=4)
    trained(many, rounds=5)
    assert many.calibration is not None and many.calibration.charges > 1
    assert many.mechanism.epsilon_per_message < 2.0


def test_more_rounds_than_there_are_cohorts_are_refused_with_the_cure():
    federated = federation()
    match = r"6 rounds of 4 clients need 24 clients, got 20. Use DisjointOnce\(3\) or fewer"
    with pytest.raises(ValueError, match=match):
        trained(federated, rounds=6)
    assert federated.ledger.rounds == 0
    with pytest.raises(ValueError, match=r"30 rounds .* got 20. Use fewer rounds"):
        trained(federation(cohort=DisjointOnce(1)), rounds=30)
    with pytest.raises(TypeError, match=r"cohort must be a law such as Cyclic\(10\), .*, got 'twice'"):
        federation(cohort="twice")


def test_a_fit_that_goes_on_counts_the_cohorts_that_have_been_asked():
    federated = federation(privacy=None)
    trainer = trained(federated, rounds=3)
    trainer.fit_loop.max_epochs = 6
    with pytest.raises(ValueError, match="6 rounds of 4 clients need 24"):
        trainer.fit(trainer.lightning_module, loader())
    assert federated.ledger.max_charges == 1


def saving(folder):
    return pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")


def fit(federated, *callbacks, ckpt_path=None):
    """Four rounds, with checkpoints."""
    trainer = make_trainer(federated, *callbacks, max_epochs=4, enable_checkpointing=True)
    trainer.fit(Line(), loader(), ckpt_path=ckpt_path)


def test_a_training_without_a_number_of_rounds_ends_with_the_last_cohort():
    federated = federation(privacy=None, mechanism=LDPQ(1.0))
    trainer = trained(federated, rounds=-1)
    assert len(federated.records) == 5 and trainer.should_stop
    assert federated.ledger.charges.tolist() == [1] * 20


@pytest.mark.filterwarnings("ignore:the keys come from a seed")
def test_a_seeded_run_resumes_to_the_same_end_and_other_participation_is_refused(tmp_path):
    path = tmp_path / "run.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

    first, again = federation(seed=1), federation(seed=1)
    whole = trained(first, rounds=5, callbacks=[Save()])
    resumed = trained(again, rounds=5, ckpt_path=path)
    assert torch.equal(*(weights_of(one.lightning_module) for one in (whole, resumed)))
    assert again.ledger.charges.tolist() == [1] * 20
    with pytest.raises(ValueError, match=r"participation = once \(here random\)"):
        trained(federation(seed=1, cohort=4), rounds=5, ckpt_path=path)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
@pytest.mark.parametrize("spare", [0, 4])
def test_what_was_sent_and_lost_is_not_sent_again_and_the_training_goes_on(tmp_path, spare):
    """With secure keys a repetition would be a second message of clients that have spent all they have."""
    first = federation(num_clients=16 + spare)
    with pytest.raises(KeyError, match="power cut"):
        fit(first, Fails(KeyError("power cut"), 2), saving(tmp_path))
    assert int(first.ledger.charges.sum()) == 12
    again = federation(num_clients=16 + spare)
    with pytest.warns(UserWarning, match="Round 3 was sent and lost, and its clients have spent"):
        fit(again, saving(tmp_path), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert again.ledger.max_charges == 1
    assert [record.round for record in again.records] == [0, 1, 3] + ([4] if spare else [])


def in_turn(**settings):
    return federation(cohort=Cyclic(4), **settings)


@pytest.mark.parametrize(("rounds", "most"), [(5, 1), (6, 2), (12, 3)])
def test_a_budget_pays_for_the_turns_of_a_client(rounds, most):
    federated = in_turn()
    trained(federated, rounds=rounds)
    assert federated.calibration is not None and federated.calibration.charges == most
    assert federated.ledger.max_charges == most
    assert 3.99 < federated.calibration.epsilon <= 4.0
    assert int(federated.ledger.limits.max()) == most


@pytest.mark.parametrize(("clients", "said"), [(20, False), (7, True)])
def test_who_is_left_over_is_said(clients, said, caplog):
    federated = in_turn(num_clients=clients, privacy=None)
    with caplog.at_level("INFO"):
        trained(federated, rounds=3)
    assert ("never asks 3 of 7 clients" in caplog.text) == said
    assert sum(map(bool, federated.ledger.charges)) == (4 if said else 12)


@pytest.mark.parametrize(
    ("law", "rounds", "most", "words"),
    [
        (DisjointOnce(4), 5, 1, "Cohorts are disjoint and public: a client is asked in one round at most"),
        (Cyclic(4), 12, 3, "take turns: a client is asked in 3 rounds at most"),
    ],
)
def test_reports_to_come_and_of_the_end_agree(tmp_path, law, rounds, most, words):
    folder, federated = RunFolder("run", str(tmp_path)), federation(cohort=law)
    trained(federated, rounds=rounds, callbacks=[folder])
    assert words in (tmp_path / "run" / "report.md").read_text()
    context = make_context(federated.mechanism, tuple(range(4)), (5,))
    settings = {"rounds": rounds, "delta": 1e-3, "num_clients": 20, "most_rounds": most}
    to_come = privacy_report(federated.mechanism, context, **settings)
    ended = privacy_report(federated.mechanism, context, charges=federated.ledger.charges, **settings)
    row = ended.row(Adversary.SERVER)
    assert to_come.row(Adversary.SERVER) == row and 3.99 < row.epsilon_run <= 4.0
    assert most > 1 or row.epsilon_run == row.epsilon_round
    assert not any("average" in note for note in to_come.notes)


@pytest.mark.parametrize("turns", [1, 3])
def test_dropouts_make_no_lottery_of_disjoint_cohorts(turns):
    """Who answered has spent all of it, and a report to come says no less than that of the end."""
    mechanism = GaussianNoise(1.0, 1.0)
    context = make_context(mechanism, tuple(range(4)), (5,))
    settings = {"rounds": 12, "delta": 1e-3, "num_clients": 20, "dropout_probability": 0.5}
    to_come = privacy_report(mechanism, context, most_rounds=turns, **settings)
    ended = privacy_report(mechanism, context, most_rounds=turns, charges=[turns] * 20, **settings)
    assert to_come.row(Adversary.SERVER).epsilon_run == ended.row(Adversary.SERVER).epsilon_run
    assert (
        turns > 1 or to_come.row(Adversary.SERVER).epsilon_run == to_come.row(Adversary.SERVER).epsilon_round
    )


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_turns_go_on_after_a_kill_and_the_lost_one_is_charged(tmp_path):
    """The deal comes with the checkpoint, so that nobody comes back before its turn."""
    settings = {"privacy": None, "num_clients": 12, "mechanism": LDPQ(1.0)}
    first, again = in_turn(**settings), in_turn(**settings)
    with pytest.raises(KeyError, match="power cut"):
        fit(first, Fails(KeyError("power cut"), 2), saving(tmp_path))
    fit(again, saving(tmp_path), ckpt_path=tmp_path / "epoch=1.ckpt")
    cohorts = [set(first.planner.cohort(round)) for round in range(4)]
    assert [set(again.planner.cohort(round)) for round in range(4)] == cohorts
    assert cohorts[0] == cohorts[3]
    twice = cohorts[0] | cohorts[2]  # two turns, or one turn that was lost and repeated
    assert [int(charge) for charge in again.ledger.charges] == [1 + (c in twice) for c in range(12)]
    with pytest.raises(ValueError, match=r"participation = cyclic \(here once\)"):
        fit(federation(**settings), ckpt_path=tmp_path / "epoch=1.ckpt")


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_fedq_privacy_counts_turns(tmp_path):
    from lightning_fedq.commands.privacy import report_of_checkpoint, report_of_config

    gaussian = written("mechanisms.GaussianNoise", noise_multiplier=2.0, clip_norm=1.0)
    settings = {"mechanism": gaussian, "num_clients": 20, "cohort": written("Cyclic", size=4)}
    config = tmp_path / "config.yaml"
    callbacks = [written("callbacks.Federated", **settings)]
    config.write_text(yaml.safe_dump(linear_on_digits(400, 12, callbacks=callbacks)))
    of_config = report_of_config(str(config), None, 1e-3, False)
    federated = in_turn(privacy=None, mechanism=GaussianNoise(1.0, 2.0))
    trainer = trained(federated, rounds=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    of_checkpoint = report_of_checkpoint(tmp_path / "one.ckpt", 12, 1e-3, False, None)
    context = make_context(federated.mechanism, tuple(range(4)), (5,))
    three = privacy_report(federated.mechanism, context, rounds=3, delta=1e-3)
    for report in (of_config, of_checkpoint):
        expected = three.row(Adversary.SERVER).epsilon_run
        assert report.row(Adversary.SERVER).epsilon_run == pytest.approx(expected, rel=1e-3)
