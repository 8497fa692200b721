"""Checkpoints that no checkpoint callback writes name a journal, and no kill makes a charge forgotten."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.privacy.journal import Entry, Journal
from lightning_fedq.privacy.ledger import Ledger
from tests.callbacks.test_federated_resume import Interrupted, federation, module
from tests.callbacks.test_federated_resume_killed import Point, journal_lines
from tests.digits_run import Digits, fitted, make_trainer

ROUNDS = 6
pytestmark = pytest.mark.filterwarnings("ignore:another run of this federation:UserWarning")


class SavesItself(pl.Callback):
    """The user's own: a checkpoint after every second round, as Ray's callback writes them."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch % 2:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def run(folder, *callbacks, resume=None, fed=None, start=None, **settings):
    """A fit with secret keys that writes only what its callbacks save. Returns its Federated."""
    fed = fed or federation(4, seed=None, local_epochs=1)
    values = {"max_epochs": ROUNDS, "enable_checkpointing": False, "default_root_dir": folder, **settings}
    fitted(start or module(), fed, *callbacks, data=Digits(60), ckpt_path=resume, **values)
    return fed


def die(root, point):
    """Train in `root` until SIGKILL at a point; what a process of its own does, torchrun's worker for one."""
    (point := POINTS[point]).arm()
    run(Path(root), SavesItself(Path(root)))


POINTS = {
    "before any save": Point(Ledger, "charge", 2, "after"),
    "as a save begins": Point(pl.Trainer, "save_checkpoint", 2),
    "as the journal is opened": Point(Journal, "_create", 1, "after"),
    "in a save": Point(pl.strategies.Strategy, "save_checkpoint", 2),
    "after a save": Point(pl.Trainer, "save_checkpoint", 2, "after"),
    "a round after a save": Point(Ledger, "charge", 6, "after"),
}


def killed(folder, name):
    """Rounds that were charged, and may have been sent, in a process that was killed."""
    folder.mkdir(exist_ok=True)
    code = "import sys; from tests.training.test_journal_at_save import die; die(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder), name],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    return {"before any save": 2, "as the journal is opened": 2, "a round after a save": 6}.get(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", POINTS)
def test_no_kill_makes_a_charge_forgotten(tmp_path, name):
    """What was charged before the kill is in what the resumed run states.

    Where nobody has saved yet it begins anew, and its page is that of the second run.
    """
    sent = killed(tmp_path, name)
    last = max(tmp_path.glob("*.ckpt"), default=None)
    again = run(tmp_path, SavesItself(tmp_path), resume=last)
    done = 0 if last is None else int(last.stem) + 1
    assert (last is None) == (name in ("before any save", "as the journal is opened"))
    assert again.ledger.rounds == (0 if last is None else sent - done) + ROUNDS
    assert report_of_checkpoint(tmp_path / "5.ckpt", None, 1e-5, secagg=False).rounds == again.ledger.rounds


def test_a_round_after_the_last_checkpoint_is_paid_for(tmp_path):
    """The findings' case: 8 rounds were sent where 6 were stated."""
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, SavesItself(tmp_path), Interrupted(8, ZeroDivisionError()))
    assert journal_lines(tmp_path) == 2  # the third and fourth; the first two stand in the checkpoint
    again = run(tmp_path, resume=tmp_path / "1.ckpt")
    assert again.ledger.max_charges == 4 + ROUNDS - 2


def test_a_checkpoint_by_hand_after_the_fit_names_a_journal(tmp_path):
    fed = federation(4, seed=None, local_epochs=1)
    trainer = make_trainer(fed, max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(module(), datamodule=Digits(60))
    trainer.save_checkpoint(tmp_path / "hand.ckpt")
    assert journal_lines(tmp_path) == 0
    assert run(tmp_path, resume=tmp_path / "hand.ckpt", max_epochs=2).ledger.max_charges == 2
    assert journal_lines(tmp_path) == 1


def test_a_checkpoint_that_names_no_journal_is_refused_with_secret_keys_and_with_a_seed_not(tmp_path):
    for seed in (None, 3):
        folder = tmp_path / str(seed)
        run(folder, SavesItself(folder), fed=federation(4, seed=seed, local_epochs=1), max_epochs=2)
        state = torch.load(folder / "1.ckpt", weights_only=False)
        (own,) = (found for found in state["callbacks"].values() if "federation" in found)
        own["engine"]["ledger"]["journal"] = ""
        torch.save(state, folder / "1.ckpt")
        settings = {"resume": folder / "1.ckpt", "fed": federation(4, seed=seed, local_epochs=1)}
        if seed is None:
            with pytest.warns(UserWarning, match="names no journal, so this report does not count"):
                report_of_checkpoint(folder / "1.ckpt", None, 1e-5, secagg=False)
            with pytest.raises(ValueError, match="names no journal, so later charges are not known"):
                run(folder, **settings)
            start = module()
            start.load_state_dict(state["state_dict"])  # the cure: the weights alone
            assert run(folder, start=start).ledger.max_charges == ROUNDS
        else:
            assert run(folder, **settings).ledger.max_charges == ROUNDS


def test_a_folder_elsewhere_is_said_when_a_checkpoint_is_made(tmp_path, monkeypatch):
    fed = federation(4, seed=None, local_epochs=1)
    trainer = fitted(module(), fed, data=Digits(60), max_epochs=1, default_root_dir=tmp_path)
    monkeypatch.setattr(pl.Trainer, "default_root_dir", "s3://bucket/runs")
    with pytest.warns(UserWarning, match=r"No journal is kept, because default_root_dir=s3://bucket/runs"):
        trainer.save_checkpoint(tmp_path / "hand.ckpt")


@pytest.mark.filterwarnings("default:another run of this federation:UserWarning")
def test_a_restart_that_does_not_resume_says_so_and_counts_both(tmp_path):
    """torchrun --max-restarts with no ckpt_path: the folder of the second run tells of both."""
    run(tmp_path, SavesItself(tmp_path), max_epochs=4)  # journal of rounds 3 and 4
    folder = fedq.RunFolder("second", str(tmp_path / "runs"))
    with pytest.warns(UserWarning, match="Another run of this federation charged 2 rounds"):
        again = run(tmp_path, folder, max_epochs=3)
    assert again.ledger.max_charges == again.ledger.rounds == 5
    page = (tmp_path / "runs" / "second" / "privacy.md").read_text()
    assert "5 rounds" in page


def test_a_journal_of_another_federation_or_of_other_terms_is_not_counted(tmp_path):
    Journal(tmp_path / "ledger-1.jsonl", "FedAvg()", 6).append(Entry(0, 0, "", None, 4))
    assert run(tmp_path, max_epochs=1).ledger.rounds == 1
    other = Journal(tmp_path / "ledger-2.jsonl", "CorBin(epsilon_per_coordinate=5.0, shared_bits=5)", 6)
    other.append(Entry(0, 0, "", None, 4, terms='{"clients": "real"}', ledger="x", number=1))
    with pytest.warns(UserWarning, match="is not counted: Rounds of these clients were charged with"):
        assert run(tmp_path, max_epochs=1).ledger.rounds == 1


def test_counting_a_journal_beside_changes_nothing_in_it(tmp_path):
    """Another process may be writing it."""
    journal = Journal(tmp_path / "ledger-0.jsonl", "m", 3)
    journal.append(Entry(0, 0, "", (1,), 8, ledger="x", number=1))
    with journal.path.open("ab") as file:
        file.write(b'{"round": 1, ')
    before = journal.path.read_bytes()
    ledger = Ledger(3, "m")
    ledger.folders = frozenset({tmp_path})
    assert ledger.scan_journals() == {journal.path: 1}
    assert ledger.scan_journals() == {}  # as a second fit does
    assert ledger.charges.tolist() == [0, 1, 0] and ledger.rounds == 1
    assert journal.path.read_bytes() == before


def test_two_fits_of_one_federation_count_what_lies_beside_once(tmp_path):
    run(tmp_path, SavesItself(tmp_path), max_epochs=4)  # a journal of rounds 3 and 4
    fed = run(tmp_path, max_epochs=1)
    assert run(tmp_path, fed=fed, max_epochs=1).ledger.rounds == 2 + 1 + 1
