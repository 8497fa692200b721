"""Cures about what was spent and saved: ledgers, journals, checkpoints, budgets, servers of rounds."""

import shutil
from pathlib import Path

import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms import FedAvgM
from lightning_fedq.mechanisms import LDPQ, RotatedAxes
from lightning_fedq.privacy.journal import Entry, Journal
from lightning_fedq.rounds import BudgetSpentError
from tests.cures.rows import dpsgd, fed, fit, row
from tests.digits_run import Classifier
from tests.rounds import test_client_budget as budgets
from tests.rounds.test_engine import DIM, make_engine, run_round

LOG = Path("streams.jsonl")


def journal(*entries):
    """A journal of these rounds, in an empty folder."""
    Path("ledger.jsonl").unlink(missing_ok=True)
    made = Journal(Path("ledger.jsonl"), "m", 3)
    for number in entries:
        made.append(number, 0, "", None, 8)
    return made


def two_writers(one_at_a_time):
    first, second = journal(), Journal(Path("ledger.jsonl"), "m", 3)
    first.append(Entry(0, 0, "", None, 8))
    if one_at_a_time:  # whoever goes on reads first
        second = Journal(Path("ledger.jsonl"), "m", 3)
        assert [entry.round for entry in second.unread()] == [0]
    second.append(Entry(1, 0, "", None, 8))


def private():
    return fed(LDPQ(1.0), seed=None)


def saved(rounds=2):
    """A private run with a checkpoint after every round, and the first one."""
    shutil.rmtree("kept", ignore_errors=True)
    keep = pl.callbacks.ModelCheckpoint("kept", filename="{epoch}", save_top_k=-1)
    fit(private(), keep, enable_checkpointing=True, max_epochs=rounds)
    return Path("kept") / "epoch=0.ckpt"


def resumed(checkpoint):
    fit(private(), ckpt_path=checkpoint, max_epochs=2)


def the_journal():
    return next(Path("kept").glob("ledger-*.jsonl"))


def without_journal(back):
    checkpoint = saved()
    moved = the_journal().rename("elsewhere.jsonl" if not back else Path("kept") / the_journal().name)
    assert back == (moved.parent.name == "kept")
    resumed(checkpoint)


def cut_journal(back):
    """The journal has lost its last charges, or has them again."""
    checkpoint = saved()
    whole = the_journal().read_bytes()
    the_journal().write_bytes(whole[: whole.index(b"\n") + 1])
    if back:
        the_journal().write_bytes(whole)
    resumed(checkpoint)


def weights_only():
    """A new federation from the weights of a checkpoint."""
    module = Classifier()
    module.load_state_dict(torch.load(saved(), weights_only=True)["state_dict"])
    fit(private(), module=module)


def damaged_journal(change, back=False):
    """The journal of a run is not what was written, or is put back."""
    checkpoint = saved()
    whole = the_journal().read_bytes()
    the_journal().write_bytes(whole if back else change(whole))
    resumed(checkpoint)


def cut(whole):
    return whole[: whole.index(b"\n")]


def flipped(whole):
    return whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]


class Other(Classifier):
    """Layers of other names. It takes of a checkpoint what it finds."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.head, self.backbone = nn.Linear(64, 10), nn.Identity()

    def forward(self, inputs):
        return self.head(inputs)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass


def goes_on(module=None, before=None, after=None):
    """A run, and one that goes on from its checkpoint with other settings."""
    fit(fed(**(before or {}))).save_checkpoint("one.ckpt")
    fit(fed(**(after or {})), module=module, ckpt_path="one.ckpt", max_epochs=2)


def restored(weights):
    engine = make_engine()
    engine.load_state_dict({**engine.state_dict(), "weights": weights})


def regrown(mechanism, first):
    """Parameters leave after a round, or before the first one: then the vector is made without them."""
    engine = make_engine(mechanism)
    if first:
        engine.rearrange([torch.zeros(DIM)], [None], None)
    run_round(engine)
    if not first:
        engine.rearrange([torch.zeros(6)], [None], None)


def client(rounds=9, path=LOG, mechanism=budgets.COIN):
    return budgets.client_of(path, budgets.budget_for(rounds), mechanism)


def fresh():
    LOG.unlink(missing_ok=True)
    return LOG


def other_mechanism():
    budgets.answer(budgets.client_of(fresh(), None, LDPQ(5.0)), 0)
    budgets.answer(client(), 1)


def other_terms(path):
    """The first round was of five clients, this one is of six."""
    budgets.answer(client(path=fresh()), 0)
    task = budgets.task_of(1, clients=6)
    client(path=path).answer(task, torch.zeros(budgets.DIM), torch.ones(budgets.DIM))


def overspent(raised, leaves=False):
    one = client(1, fresh())
    budgets.answer(one, 0)
    if not leaves:
        budgets.answer(client(raised), 1)


row(
    "Another process is writing to {}. Let only one run at a time resume from a checkpoint",
    lambda: two_writers(one_at_a_time=False),
    lambda: two_writers(one_at_a_time=True),
    error=RuntimeError,
)
row("{} has {} bytes, but the checkpoint", lambda: cut_journal(back=False), lambda: cut_journal(back=True))
row(
    "{} has lost its first line and all later ones. Put the file back. Without it, load only the weights",
    lambda: damaged_journal(cut),
    lambda: damaged_journal(cut, back=True),
    weights_only,
)
row(
    "{} is damaged at byte {}, so the spending is not known. Put the file back. Without it, load",
    lambda: damaged_journal(flipped),
    lambda: damaged_journal(flipped, back=True),
    weights_only,
)
row(
    "The journal {} of this checkpoint is missing or another run's. Put it next to the",
    lambda: without_journal(back=False),
    lambda: without_journal(back=True),
    weights_only,
    error=FileNotFoundError,
)
row("The model has no {}. Use the checkpoint's own model", lambda: goes_on(module=Other()), goes_on)
row("The state has {} weights", lambda: restored(torch.zeros(3)), lambda: restored(torch.zeros(DIM)))
row(
    "Only one of the state and this federation has a server_optimizer. Use the checkpoint's",
    lambda: goes_on(after={"server_optimizer": FedAvgM}),
    goes_on,
    lambda: goes_on(before={"server_optimizer": FedAvgM}, after={"server_optimizer": FedAvgM}),
)
row(
    "{} needs one vector length for the whole run, but {} coordinates became {}. Freeze or unfreeze",
    lambda: regrown(RotatedAxes(0.5, 1.0), first=False),
    lambda: regrown(RotatedAxes(0.5, 1.0), first=True),
    lambda: regrown(LDPQ(1.0), first=False),
)
row(
    "No round is open. Call start() first",
    lambda: make_engine().finish(),
    lambda: run_round(make_engine()),
    error=RuntimeError,
)
row(
    "This client's log has messages of {}, not of {}. Start a new",
    other_mechanism,
    lambda: budgets.answer(client(path=Path("new.jsonl")), 1),
    error=BudgetSpentError,
)
row(
    "This client's log has messages of {}, but the server asks for {}. Start a new federation",
    lambda: other_terms(LOG),
    lambda: other_terms(Path("new.jsonl")),
    error=BudgetSpentError,
)
row(
    "this client's budget is {}, and after {} messages one more would spend epsilon {}. Raise",
    lambda: overspent(1),
    lambda: overspent(2),
    lambda: overspent(1, leaves=True),
    error=BudgetSpentError,
)


def spent(private):
    fit(private).save_checkpoint(f"{id(private)}.ckpt")
    return f"{id(private)}.ckpt"


def goes_on_from_others(private):
    others = spent(dpsgd())
    fit(private, ckpt_path=others, max_epochs=2)


def has_spent():
    private = dpsgd()
    spent(private)
    return private


row(
    "This DPSGD has spent up to {} steps that the checkpoint does not contain. Use a new DPSGD, and add both",
    lambda: goes_on_from_others(has_spent()),
    lambda: goes_on_from_others(dpsgd()),
)


def of_persons(rows, others):
    fit(dpsgd(rows_per_person=rows), ckpt_path=spent(dpsgd(rows_per_person=others)), max_epochs=2)


row(
    "Earlier steps were charged for {} rows per person, and this DPSGD has {}. Use",
    lambda: of_persons(1, 2),
    lambda: of_persons(2, 2),
    lambda: fit(dpsgd()),
)
