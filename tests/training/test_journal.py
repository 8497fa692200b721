"""Where the journal lies, who finds it again, and what is refused without it."""

import pytest

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.journal import Entry, Journal
from lightning_fedq.training.checkpoints import find_journal
from tests.callbacks.steps import Fails
from tests.callbacks.test_federated_resume import ROUNDS, federation, fit, latest, module, pytestmark  # noqa: F401
from tests.callbacks.test_federated_resume_killed import journal_lines
from tests.digits_run import Digits, make_trainer
from tests.training.test_unfreezing import TwoLayers


def lost_round(folder, **settings):
    """A run of all rounds, of which the last ones have lost their checkpoints; return the first."""
    fit(folder, 4, **{"seed": None, **settings})
    first, *later = sorted(folder.glob("*.ckpt"))
    for path in later:
        path.unlink()
    return first


def test_a_folder_can_be_moved_with_its_journal(tmp_path):
    lost_round(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "moved")
    _, again = fit(tmp_path / "again", 4, resume=latest(tmp_path / "moved"), seed=None)
    assert again.engine is not None and again.engine.ledger.max_charges == ROUNDS + ROUNDS - 1
    assert len(again.records) == ROUNDS
    assert journal_lines(tmp_path / "moved") == 2 * ROUNDS - 1
    assert not list((tmp_path / "again").glob("ledger-*.jsonl"))


def test_a_checkpoint_elsewhere_finds_the_journal_where_it_was_written(tmp_path):
    lost_round(tmp_path / "old").rename(tmp_path / "copied-step=1.ckpt")
    _, again = fit(tmp_path / "again", 4, resume=tmp_path / "copied-step=1.ckpt", seed=None)
    assert again.engine is not None and again.engine.ledger.max_charges == 2 * ROUNDS - 1


def test_without_its_journal_a_checkpoint_is_refused_and_with_a_seed_not(tmp_path):
    for seed in (None, 3):
        checkpoint = lost_round(tmp_path / str(seed), seed=seed)
        next((tmp_path / str(seed)).glob("ledger-*.jsonl")).unlink()
        if seed is None:
            with pytest.raises(FileNotFoundError, match="of this checkpoint is missing or another run's"):
                fit(tmp_path / "again", 4, resume=checkpoint, seed=seed)
        else:
            _, again = fit(tmp_path / "again", 4, resume=checkpoint, seed=seed)
            assert again.engine is not None and again.engine.ledger.max_charges == ROUNDS


def test_a_budget_counts_what_a_killed_run_had_sent(tmp_path):
    checkpoint = lost_round(tmp_path)
    limit = fedq.PrivacyBudget(1e9, 1e-5, Adversary.EAVESDROPPER)
    _, again = fit(tmp_path, 4, limit, resume=checkpoint, seed=None)
    assert again.engine is not None
    spent = limit.epsilon_spent
    limit = fedq.PrivacyBudget(0.99 * spent, 1e-5, Adversary.EAVESDROPPER)
    with pytest.raises(RuntimeError, match="is spent"):
        fit(tmp_path, 4, limit, resume=checkpoint, seed=None)


def test_without_checkpoints_there_is_no_journal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fed = federation(4)
    make_trainer(fed, max_epochs=1, default_root_dir=tmp_path).fit(module(), datamodule=Digits(120))
    assert fed.engine is not None and fed.engine.ledger.journal is None
    assert not list(tmp_path.iterdir())


def test_a_journal_of_another_federation_beside_the_checkpoint_is_refused(tmp_path):
    checkpoint = lost_round(tmp_path)
    path = next(tmp_path.glob("ledger-*.jsonl"))
    path.unlink()
    Journal(path, "FedAvg()", 6)
    with pytest.raises(ValueError, match="is the journal of another federation"):
        fit(tmp_path, 4, resume=checkpoint, seed=None)


@pytest.mark.parametrize("target", [None, fedq.PrivacyTarget(3e4, 1e-5, "server")])
def test_a_killed_round_of_an_unfrozen_vector_is_charged_at_its_length(tmp_path, target):
    """The checkpoint knows 90 coordinates, the round that was lost had 610: all charges count 610.

    It is lost when parameters have joined and the first client has answered for them.
    """

    def federated():
        return fedq.Federated(fedq.LDPQ(1.0), 4, clients_per_step=1, privacy=target)

    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_exception=False)
    first = federated()
    trainer = make_trainer(
        first, keep, Fails(KeyboardInterrupt(), 1, 1), max_epochs=3, enable_checkpointing=True
    )
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(TwoLayers(), datamodule=Digits(80))
    assert first.ledger.dim == 610
    checkpoint = tmp_path / "epoch=0.ckpt"
    server = report_of_checkpoint(checkpoint, None, 1e-5, secagg=False)
    assert server.rounds == 2 and server.dim == 610

    again = federated()
    trainer = make_trainer(again, max_epochs=3)
    if target is None:
        trainer.fit(TwoLayers(change_at=9), datamodule=Digits(80), ckpt_path=checkpoint)
        assert again.ledger.dim == 610 and again.ledger.max_charges == 4
    else:  # four rounds of 90 coordinates would be within the target
        with pytest.raises(RuntimeError, match="The privacy budget allows"):
            trainer.fit(TwoLayers(change_at=9), datamodule=Digits(80), ckpt_path=checkpoint)


def test_a_journal_elsewhere_is_found_by_the_names_that_it_was_charged_under(tmp_path):
    """A checkpoint names a path, and anybody may have written it: another run's charges stay its own."""
    journal = Journal(tmp_path / "there" / "ledger-0.jsonl", "LDPQ(1.0)", 3)
    recorded, checkpoint = str(journal.path), tmp_path / "last.ckpt"
    assert find_journal(recorded, checkpoint, {"mine"}) == journal.path  # nothing is charged in it
    journal.append(Entry(0, 0, "", None, 4, ledger="mine", number=1))
    assert find_journal(recorded, checkpoint, {"mine", ""}) == journal.path
    assert find_journal(recorded, checkpoint, {"other", ""}) is None
    assert journal.path.stat().st_mode & 0o777 == 0o600
