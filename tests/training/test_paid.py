"""What the same clients have paid is the union of all charges, and no statement is below it."""

import itertools
import json
import math
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shutil import copytree

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq import cli
from lightning_fedq._lightning import pl
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.document import headline
from lightning_fedq.privacy.journal import Journal
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.report_file import from_json
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.training.accounts import make_report
from lightning_fedq.training.checkpoints import journal_folders
from lightning_fedq.training.user_messages import describe_outcome
from tests.callbacks.steps import EndsAfter
from tests.digits_run import Classifier, Digits, make_trainer
from tests.training.beside import ROUNDS

CLIENTS, DELTA = 4, 1e-5
NOISE = fedq.GaussianNoise(1.0, 1.0)
pytestmark = [
    pytest.mark.filterwarnings("ignore:another run of this federation:UserWarning"),
    pytest.mark.filterwarnings("ignore:The ledger has rounds of a killed process:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]


def union(*folders):
    """Charges of all journals in some folders, by ledger and number, each with its clients."""
    found = {}
    for path in (path for folder in folders for path in folder.glob("ledger-*.jsonl")):
        mechanism = json.loads(path.read_text().splitlines()[0])["mechanism"]
        for entry in Journal(path, mechanism, CLIENTS).unread(mend=False):
            found[entry.ledger, entry.number] = entry.clients or range(CLIENTS)
    return found


# ---- of a ledger -----------------------------------------------------------------------------------------


class Process:
    """A ledger and the folders that it sees; what was in a journal that it has seen stays known."""

    def __init__(self, folder, state=None, number=0):
        self.ledger, self.home, self.known = Ledger(CLIENTS, "m"), folder, {}
        path, position = folder / f"ledger-{number:08x}.jsonl", 0
        if state is not None:
            self.ledger.load_state_dict(state["ledger"])
            recorded, position = self.ledger.recorded
            path, self.known = folder / Path(recorded).name, dict(state["known"])
        self.ledger.keep(Journal(path, "m", CLIENTS, position), repeatable=False)
        self.ledger.folders = journal_folders(self.ledger, folder / "a.ckpt")

    def check(self):
        self.ledger.scan_journals()
        self.known |= union(*self.ledger.folders)
        wanted = [sum(client in clients for clients in self.known.values()) for client in range(CLIENTS)]
        assert self.ledger.charges.tolist() == wanted and self.ledger.rounds == len(self.known)


@pytest.mark.parametrize("seed", range(40))
def test_a_ledger_is_the_union_whoever_begins_is_killed_copied_and_resumed(tmp_path, seed):
    draw, folders, saved = random.Random(seed), [tmp_path / "0", tmp_path / "1"], []
    running = [Process(folders[0])]
    for number in range(60):
        one = draw.choice(running)
        action = draw.choice(["charge"] * 4 + ["save", "begin", "kill", "copy", "resume"])
        if action == "charge":
            one.ledger.charge(draw.sample(range(CLIENTS), 2), number)
        elif action == "save":
            one.check()
            saved.append((one.home, {"ledger": one.ledger.state_dict(), "known": dict(one.known)}))
        elif action == "kill" and len(running) > 1:
            running.remove(one)
        elif action == "copy" and saved:
            home, state = draw.choice(saved)
            there = tmp_path / str(len(folders))
            folders.append(copytree(home, there))
            saved.append((there, state))
        elif action == "resume" and saved:
            running.append(Process(*draw.choice(saved)))
        else:
            running.append(Process(draw.choice(folders), number=number))
        for process in running:
            process.check()


# ---- of a training ---------------------------------------------------------------------------------------


class Killed(pl.Callback):
    """The process is killed in a round, after its charge."""

    knows_clients, writes_in_rounds = True, False

    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == self.epoch:
            raise KeyboardInterrupt


class KilledInside(Killed):
    """The process is killed in a round, while its clients train."""

    on_train_batch_end = pl.Callback.on_train_batch_end

    def on_clients_done(self, trainer, done, expected):
        if trainer.callbacks[0].ledger.rounds == self.epoch + 1:
            raise KeyboardInterrupt


def fit(folder, rounds, *callbacks, resume=None, federated=None):
    keep = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_exception=False)
    federated = federated or fedq.Federated(fedq.GaussianNoise(clip_norm=1.0, noise_multiplier=3.0), CLIENTS)
    trainer = make_trainer(federated, keep, *callbacks, max_epochs=rounds, enable_checkpointing=True)
    try:
        trainer.fit(Classifier(), datamodule=Digits(60), ckpt_path=resume)
    except (KeyboardInterrupt, SystemExit):
        return federated, trainer, None
    return federated, trainer, max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)


def said(federated, trainer, checkpoint, budget):
    """Rounds of a client that page, terminal and command say; loggers and budget agree with the page."""
    page = make_report(federated, trainer, DELTA)
    line = next(
        line for line in describe_outcome(federated, trainer) if line.startswith("privacy: No target")
    )
    command = report_of_checkpoint(checkpoint, None, DELTA, secagg=False)
    logged = float(trainer.callback_metrics["fed/epsilon"])
    server = page.row(Adversary.SERVER).epsilon
    assert budget.epsilon_spent == pytest.approx(server) and logged == pytest.approx(server, rel=1e-6)
    assert command.row(Adversary.SERVER).epsilon == server
    terminal = int(line.split(" over ")[1].split()[0])
    return {page.rounds, command.rounds, terminal, federated.ledger.max_charges}


@pytest.mark.parametrize("seed", range(3))
def test_no_statement_is_below_the_union(tmp_path, seed):
    draw, folders, saved = random.Random(seed), [tmp_path / "a"], []
    for _ in range(4):
        action = draw.choice(["begin", "resume", "kill", "copy"]) if saved else "begin"
        folder, path, done = draw.choice(saved) if saved else (folders[0], None, 0)
        if action == "copy":
            folder = copytree(folder, tmp_path / f"copy{len(folders)}")
            folders.append(folder)
            path = folder / path.name
        resume = None if action == "begin" else path
        rounds = 2 if resume is None else done + 2
        budget = fedq.PrivacyBudget(100.0, DELTA, "server")
        killed = [Killed(rounds - 1)] if action == "kill" else []
        federated, trainer, last = fit(folder, rounds, budget, *killed, resume=resume)
        if last is None:
            continue
        charges = union(*{folder, *([] if resume is None else [written(resume)])})
        assert said(federated, trainer, last, budget) == {len(charges)}
        saved.append((folder, last, rounds))


def written(checkpoint):
    """The folder in which the journal of a checkpoint was written."""
    callbacks = torch.load(checkpoint, weights_only=True)["callbacks"].values()
    (own,) = (state for state in callbacks if "federation" in state)
    return Path(own["engine"]["ledger"]["journal"]).parent


def limited(kind):
    """A federation that may spend three rounds, and its callbacks."""
    if kind == "target":
        return fedq.Federated(fedq.LDPQ(1.0), CLIENTS, privacy=fedq.PrivacyTarget(2.0, DELTA, "server")), []
    mechanism = fedq.GaussianNoise(clip_norm=1.0, noise_multiplier=2.0)
    return fedq.Federated(mechanism, CLIENTS), [fedq.PrivacyBudget(4.0, DELTA, "server")]


def test_a_budget_holds_over_a_restart_that_does_not_resume(tmp_path):
    """3.71 of 4 was said to be spent where the page said 5.54. The refusal names the journal."""
    for again in (False, True):
        federated, callbacks = limited("budget")
        if not again:
            fit(tmp_path, 3, *callbacks, federated=federated)
            continue
        (first,) = tmp_path.glob("ledger-*.jsonl")
        words = rf"3 rounds fit into it, and 3 are done\..* here \(another run charged 3 rounds: {first}\)"
        with pytest.raises(RuntimeError, match=words):
            fit(tmp_path, 3, *callbacks, federated=federated)
        assert federated.ledger.charges.tolist() == [3] * CLIENTS


def outcome(federated, trainer):
    return next(line for line in describe_outcome(federated, trainer) if "Asked for" in line)


def test_a_target_in_a_used_folder_goes_on_with_a_warning_and_is_not_met(tmp_path):
    """A script with a fixed folder runs again; the third run is resumed, and the limit of its own holds."""
    folder = tmp_path / "checkpoints"
    for again in range(3):
        federated, _ = limited("target")
        journals = list(folder.glob("ledger-*.jsonl"))
        if not again:
            _, trainer, _ = fit(folder, 3, federated=federated)
            assert "NOT met" not in outcome(federated, trainer)
            before = make_report(federated, trainer, DELTA).asked.spent
            continue
        with pytest.warns(UserWarning) as caught:
            _, trainer, last = fit(folder, 3, federated=federated)
        (warning,) = [str(w.message) for w in caught if "has spent" in str(w.message)]
        assert all(str(path) in warning for path in journals) and "ledger=" in warning
        assert f"has spent {before:.4g} of epsilon 2 at" in warning and "another folder" in warning
        assert federated.ledger.max_charges == 3 + 3 * again
        report = make_report(federated, trainer, DELTA)
        assert not report.asked.met and report.asked.spent > before + 0.5
        before = report.asked.spent
        assert f"NOT met, {format_epsilon(before)} spent over" in outcome(federated, trainer)
        assert float(trainer.callback_metrics["fed/epsilon"]) == pytest.approx(before)
    resumed, _ = limited("target")
    with pytest.raises(ValueError, match=r"calibrated for 3 rounds"):
        fit(folder, 4, federated=resumed, resume=last)


@pytest.mark.parametrize("copied", [False, True])
def test_a_target_that_was_stopped_goes_on_beside_other_runs(tmp_path, copied):
    """Beside another run's three rounds, or beside a copy of its own folder that went on."""
    folder = tmp_path / "one"
    if not copied:
        fit(folder, 3, federated=limited("target")[0])
    _, _, last = fit(folder, 3, EndsAfter(2), federated=limited("target")[0])
    if copied:
        other = copytree(folder, tmp_path / "two")
        fit(folder, 3, federated=limited("target")[0], resume=last)
        last = other / last.name
        folder = other
    federated, _ = limited("target")
    with pytest.warns(UserWarning, match="Another run of this federation has spent"):
        _, trainer, _ = fit(folder, 3, federated=federated, resume=last)
    assert trainer.current_epoch == 3
    assert federated.ledger.max_charges == (2 + 1 + 1 if copied else 3 + 3)
    assert "NOT met" in outcome(federated, trainer)


def test_the_account_of_samples_counts_copies_and_what_ran_beside_it(tmp_path):
    """A copied folder's runs count each other, also the rounds that ended after the last own one."""
    folder = tmp_path / "one"
    first = fedq.DPSGD(2.0, 1.0, delta=1e-3)
    _, _, last = fit(folder, 2, first, federated=fedq.Federated(fedq.FedAvg(), CLIENTS))
    copied = copytree(folder, tmp_path / "two")
    stated, own = [], fedq.DPSGD(2.0, 1.0, delta=1e-3)
    federated, _, _ = fit(folder, 5, own, federated=fedq.Federated(fedq.FedAvg(), CLIENTS), resume=last)
    steps_of_round = own.accounts[0].steps // 5
    other = fedq.DPSGD(2.0, 1.0, delta=1e-3)
    *_, path = fit(
        copied, 5, other, federated=fedq.Federated(fedq.FedAvg(), CLIENTS), resume=copied / last.name
    )
    stated = other.statement()
    assert stated.steps == (5 + 3) * steps_of_round
    page = report_of_checkpoint(path, None, 1e-3, secagg=False)
    assert page.samples.steps == stated.steps and page.samples.epsilon == stated.epsilon
    federated.ledger.folders |= {copied}
    assert own.statement().steps == stated.steps and federated.ledger.rounds == 8


def test_a_budget_of_samples_holds_beside_another_run(tmp_path):
    budget = fedq.PrivacyBudget(2.5, 1e-3, "server", unit="sample")
    for again in (False, True):
        private = fedq.DPSGD(2.0, 1.0, delta=1e-3)
        federated = fedq.Federated(fedq.FedAvg(), CLIENTS)
        if again:
            words = r"and 4 are done\..* \(another run charged 2 rounds: .*ledger-"
            with pytest.raises(RuntimeError, match=words):
                fit(tmp_path, 3, private, budget, federated=federated)
        else:
            fit(tmp_path, 3, private, budget, federated=federated)
        assert budget.epsilon_spent == pytest.approx(private.epsilon(1e-3)) and budget.epsilon_spent <= 2.5


# ---- dropouts and an early stop ------------------------------------------------------------------------


def dropping(kind):
    """A federation whose clients drop out, its callbacks, the adversary and what is logged of it."""
    settings = {"num_clients": 20, "dropout_probability": 0.3}
    if kind == "target":
        target = fedq.PrivacyTarget(8.0, DELTA, "outsider")
        return fedq.Federated(fedq.GaussianNoise(1.0, 1.0), privacy=target, **settings), []
    mechanism = fedq.LDPQ(1.0) if kind == "LDPQ" else fedq.GaussianNoise(1.0, 2.0)
    return fedq.Federated(mechanism, **settings), [fedq.PrivacyBudget(1000.0, DELTA, "outsider")]


@pytest.mark.parametrize("kind", ["target", "budget", "LDPQ"])
@pytest.mark.parametrize("stop", [True, False])
def test_loggers_page_and_command_say_one_number_of_a_run_with_dropouts(tmp_path, kind, stop):
    """Stopped after 3 of 6 rounds, loggers paid for dropouts in 6 rounds, the page in 3: 5.315 and 4.671."""
    federated, callbacks = dropping(kind)
    callbacks += [EndsAfter(3)] if stop else []
    _, trainer, last = fit(tmp_path, 6, *callbacks, federated=federated)
    page = make_report(federated, trainer, DELTA).row(Adversary.OUTSIDER).epsilon
    assert trainer.current_epoch == (3 if stop else 6) and 0 < page < 1000
    assert float(trainer.callback_metrics["fed/epsilon"]) == pytest.approx(page, rel=1e-6)
    assert report_of_checkpoint(last, None, DELTA, secagg=False).row(Adversary.OUTSIDER).epsilon == page
    if kind != "target":
        assert callbacks[0].epsilon_spent == pytest.approx(page)


# ---- rounds to come --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn_thrice(tmp_path_factory):
    """A checkpoint after 6 rounds of 10 of 60 clients, of whom one was drawn three times."""
    folder = tmp_path_factory.mktemp("drawn")
    federated = fedq.Federated(fedq.GaussianNoise(1.0, 3.0), 60, cohort=10)
    *_, path = fit(folder, 6, federated=federated)
    saved = torch.load(path, weights_only=True)
    (own,) = (state for state in saved["callbacks"].values() if "federation" in state)
    charges = own["engine"]["ledger"]["charges"]
    charges[:] = 1
    charges[:3] = torch.tensor([3, 0, 0])
    assert charges.sum() == 60 == own["engine"]["ledger"]["rounds"] * 10
    torch.save(saved, path)
    return path


def command(path, out, *words):
    """What `fedq privacy CKPT ...` writes of each adversary."""
    cli.main(["privacy", str(path), *words, "--out", str(out)])
    return from_json((out / "privacy.json").read_text())


FIGURES = {8: 2.639, 10: 2.864, 15: 3.311, 20: 3.679, 30: 4.302}


def test_the_command_adds_a_lottery_of_the_rounds_to_come_to_the_charges(drawn_thrice, tmp_path, capsys):
    """It said 3.125, 2.47, 2.899, 3.267, 3.900: the lottery of all rounds forgot who was drawn."""
    for rounds, epsilon in FIGURES.items():
        page = command(drawn_thrice, tmp_path, "--rounds", str(rounds))
        assert page.row(Adversary.SERVER).epsilon_run == pytest.approx(epsilon, abs=6e-4)
        assert format_epsilon(epsilon) in capsys.readouterr().out


@pytest.mark.parametrize(
    "law", [5, fedq.Cyclic(5), fedq.DisjointOnce(5), fedq.Available(lambda r: range(8), 5)]
)
@pytest.mark.parametrize("dropouts", [0.0, 0.2])
def test_the_law_holds_for_every_law_of_cohorts(tmp_path, law, dropouts):
    settings = {"cohort": law, "dropout_probability": dropouts}
    federated = fedq.Federated(fedq.GaussianNoise(1.0, 3.0), 20, **settings)
    _, trainer, path = fit(tmp_path, 2, federated=federated)
    last = 4 if isinstance(law, fedq.DisjointOnce) else 9
    pages = [
        report_of_checkpoint(path, rounds, DELTA, secagg=False) for rounds in (None, *range(2, last + 1))
    ]
    rows = [[row.epsilon for row in page.rows] for page in pages]
    assert rows[0] == rows[1] == [row.epsilon for row in make_report(federated, trainer, DELTA).rows]
    for before, after in itertools.pairwise(rows):
        assert all(one <= other for one, other in zip(before, after, strict=True))


# ---- two processes ---------------------------------------------------------------------------------------


def test_two_processes_in_one_folder_count_each_other_from_their_next_round_on(tmp_path):
    words = [sys.executable, "-m", "tests.training.beside", str(tmp_path)]
    runs = [
        subprocess.Popen([*words, *names], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True)
        for names in (("one", "two"), ("two", "one"))
    ]
    said = [json.loads(run.communicate(timeout=240)[0].splitlines()[-1]) for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert len(union(tmp_path)) == 2 * ROUNDS
    for one in said:
        # in a round: own rounds with this one, and the other's of all rounds before
        assert all(2 * before + 1 <= count for before, count in enumerate(one["counted"]))
        assert one["rounds"] == one["charges"] == 2 * ROUNDS
        assert one["steps"] == 2 * ROUNDS * 2  # two steps a round
    assert said[0]["epsilon"] == said[1]["epsilon"] == said[0]["budget"] == said[1]["budget"]


# ---- a run that ended early ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["budget", "target", "warns", "nothing"])
def test_a_run_that_ended_early_names_the_limit_that_holds_at_any_end(tmp_path, kind):
    """A smaller epsilon of fewer rounds is for a number of rounds that was fixed before."""
    mechanism, settings, budgets = fedq.GaussianNoise(1.0, 2.0), {}, []
    if kind == "target":
        settings = {"privacy": fedq.PrivacyTarget(8.0, DELTA, "server")}
    elif kind != "nothing":
        budgets = [fedq.PrivacyBudget(7.5, DELTA, "server", "warn" if kind == "warns" else "stop")]
    federated = fedq.Federated(mechanism, CLIENTS, **settings)
    folder = fedq.RunFolder("run", tmp_path, show=False)
    _, trainer, _ = fit(tmp_path / "ckpt", 6, EndsAfter(3), *budgets, folder, federated=federated)
    limit = {
        "budget": "the budget of epsilon 7.5 at delta 1e-05 against the server that sees every message",
        "target": "the target of epsilon 8",
    }.get(kind, "the epsilon of all rounds that were asked for")
    terminal = " ".join(describe_outcome(federated, trainer))
    files = [" ".join((tmp_path / "run" / name).read_text().split()) for name in ("privacy.md", "report.md")]
    read = from_json((tmp_path / "run" / "privacy.json").read_text())
    for text in (terminal, *files, headline(read)):
        assert "ended by a stop after round 3 of 6" in text
        assert "is for a number of rounds that was fixed beforehand" in text
        assert f"If released outputs decided when to end, {limit} holds instead" in text


# ---- secret cohorts --------------------------------------------------------------------------------------


def test_a_budget_with_secret_cohorts_says_what_the_page_says_over_restarts(tmp_path):
    """No journal may name their cohorts: a run is not resumed, repeated or restarted under one epsilon."""

    def begin(rounds, *callbacks, federated=None, resume=None):
        law = fedq.FixedSize(2, secret=True)
        settings = {"cohort": law, "diagnostics": False, "clients_per_step": 1}
        federated = federated or fedq.Federated(NOISE, 20, **settings)
        budget = fedq.PrivacyBudget(5.0, 1e-3, "outsider")
        trainer = make_trainer(federated, budget, *callbacks, max_epochs=rounds)
        with suppress(SystemExit):
            trainer.fit(Classifier(), datamodule=Digits(60), ckpt_path=resume)
        return federated, budget, trainer

    federated, budget, trainer = begin(3)
    page = make_report(federated, trainer, 1e-3)
    three = budget.epsilon_spent
    assert three == pytest.approx(page.secret.epsilon) and 0 < three < 5 and page.rounds == 3
    assert "other runs" in budget.statement and any("S9" in text for text in page.secret.assumptions)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="can't resume"):
        begin(5, resume=tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"S2, .*add the epsilons"):
        begin(3, federated=federated)  # a second model of the same clients
    assert federated.ledger.rounds == 3
    for each, ended in ((Killed(1), three), (KilledInside(1), math.inf)):  # after a round, and in it
        killed, budget, trainer = begin(3, each)
        page = make_report(killed, trainer, 1e-3)
        spent = budget._current_spending()
        assert spent == pytest.approx(page.secret.epsilon)
        assert spent == math.inf if ended == math.inf else 0 < spent < three
    assert killed.ledger.rounds == 2
    again, budget, trainer = begin(3)
    assert again.ledger.rounds == 3 and budget.epsilon_spent == pytest.approx(three)
