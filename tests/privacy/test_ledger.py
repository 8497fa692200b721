"""Charges come first, once per stream, and survive a checkpoint."""

import copy
import io
import random
from pathlib import Path

import pytest
import torch

from lightning_fedq import Cyclic, FixedSize
from lightning_fedq.keys.randomness import RootKeys, SeededKeys
from lightning_fedq.mechanisms import LDPQ, BandedGaussian
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.journal import Journal
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import RoundEngine, RoundPlanner


def engine(num_clients=6, epsilon=1.0, **planner):
    start = torch.zeros(8), [8], FixedRange(1.0)
    return RoundEngine(LDPQ(epsilon), RoundPlanner(num_clients, 0, **planner), SeededKeys(0), *start)


def play(server, rounds):
    for _ in range(rounds):
        plan = server.start()
        server.receive(plan.survivors, torch.full((len(plan.survivors), 8), 0.1))
        server.finish()


@pytest.mark.parametrize(("round", "attempt"), [(1, 1), (1, 0), (0, 7)])
def test_a_stream_is_paid_for_once_and_in_order(round, attempt):
    ledger = Ledger(3, "m")
    ledger.charge([0, 1], 1, attempt=1)
    with pytest.raises(RuntimeError, match=r"was already charged for clients \[1\]"):
        ledger.charge([1, 2], round, attempt)
    assert ledger.charges.tolist() == [1, 1, 0]


def test_a_new_attempt_is_charged_again():
    ledger = Ledger(2, "m")
    ledger.charge([0], 4)
    ledger.charge([0], 4, attempt=1)
    assert ledger.charges.tolist() == [2, 0]


@pytest.mark.parametrize("clients", [[2], [-1], [0, 0]])
def test_unknown_or_repeated_clients_are_refused(clients):
    with pytest.raises(ValueError, match="clients must be different numbers in"):
        Ledger(2, "m").charge(clients, 0)


def test_a_ledger_needs_clients():
    with pytest.raises(ValueError, match="num_clients must be >= 1"):
        Ledger(0, "m")


def test_state_is_plain_and_loads_under_weights_only():
    ledger = Ledger(3, "m")
    ledger.charge([2], 5)
    buffer = io.BytesIO()
    torch.save(ledger.state_dict(), buffer)
    buffer.seek(0)
    restored = Ledger(3, "m")
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    assert restored.charges.tolist() == [0, 0, 1]
    with pytest.raises(RuntimeError, match="was already charged"):
        restored.charge([2], 5)


def test_another_federation_is_refused():
    state = Ledger(3, "m").state_dict()
    with pytest.raises(ValueError, match="Resume with the checkpoint's federation"):
        Ledger(4, "m").load_state_dict(state)
    with pytest.raises(ValueError, match="Resume with the checkpoint's federation"):
        Ledger(3, "other").load_state_dict(state)


# ---- in the engine ---------------------------------------------------------------------------------------


def test_the_engine_charges_the_cohort_before_anybody_answers():
    server = engine(6, law=FixedSize(4))
    plan = server.start()
    assert sorted(server.ledger.charges.nonzero().flatten().tolist()) == sorted(plan.cohort)
    assert server.ledger.max_charges == 1


def test_the_engine_refuses_to_start_a_round_twice():
    server = engine()
    server.start()
    with pytest.raises(RuntimeError, match="Abandon the round"):
        server.start()
    server.abandon()
    server.start()
    assert server.ledger.charges.tolist() == [2] * 6


@pytest.mark.parametrize(
    ("mechanism", "planner"),
    [(LDPQ(0.5), RoundPlanner(6, 0)), (BandedGaussian(1.0, 1.0, 3), RoundPlanner(6, 0, Cyclic(2)))],
)
def test_of_servers_that_take_turns_each_has_streams_of_its_own(mechanism, planner):
    """An old state put back, and another server with the same clients in between: no stream is used twice."""
    ledger = Ledger(6, repr(mechanism))

    def begun():
        start = torch.zeros(8), [8], FixedRange(1.0)
        return RoundEngine(mechanism, planner, RootKeys(), *start, ledger=ledger)

    first = begun()
    before = first.state_dict()
    play(first, 1)
    after, second = first.state_dict(), begun()
    first.load_state_dict(before)
    with pytest.raises(RuntimeError, match="round 0, attempt 0 was already charged"):
        first.start()
    play(second, 4)
    first.load_state_dict(after)
    play(first, 2)  # whatever the other one has come to
    play(second, 1)
    assert int(ledger.charges.sum()) == 8 * planner.cohort_size and ledger.rounds == 8


def test_a_checkpoint_in_mid_round_charges_the_repeated_round_again():
    server = engine()
    play(server, 2)
    server.start()
    resumed = engine()
    resumed.load_state_dict(server.state_dict())
    assert resumed.ledger.charges.tolist() == [3] * 6
    resumed.start()
    assert resumed.ledger.charges.tolist() == [4] * 6


@pytest.mark.parametrize("killed_after", range(20))
def test_a_run_killed_between_rounds_ends_bit_identically(killed_after):
    straight = engine(law=FixedSize(3), dropout_probability=0.3)
    play(straight, 20)
    first = engine(law=FixedSize(3), dropout_probability=0.3)
    play(first, killed_after)
    second = engine(law=FixedSize(3), dropout_probability=0.3)
    second.load_state_dict(first.state_dict())
    play(second, 20 - killed_after)
    assert torch.equal(second.weights, straight.weights)
    assert torch.equal(second.ledger.charges, straight.ledger.charges)


def test_another_epsilon_cannot_take_over_a_checkpoint():
    state = engine(epsilon=1.0).state_dict()
    with pytest.raises(ValueError, match="Resume with the checkpoint's federation"):
        engine(epsilon=2.0).load_state_dict(state)


# ---- with a journal --------------------------------------------------------------------------------------


def journal(path, clients=6, mechanism="LDPQ(epsilon_per_coordinate=1.0)", position=0):
    return Journal(path, mechanism, clients, position)


def kept(path, repeatable=False, **planner):
    """An engine whose ledger has a journal."""
    server = engine(**planner)
    server.ledger.keep(journal(path), repeatable)
    return server


def lines(path):
    return len(path.read_text().splitlines()) - 1


def test_a_charge_is_on_the_disk_before_it_counts(tmp_path):
    path = tmp_path / "ledger.jsonl"
    server = kept(path, repeatable=True)
    server.start()
    assert lines(path) == 1
    server.receive(server.plan.survivors, torch.full((6, 8), 0.1))
    server.finish()
    server.start()
    assert lines(path) == 2


def test_nothing_is_charged_where_the_journal_cannot_be_written(tmp_path):
    server = kept(tmp_path / "ledger.jsonl", repeatable=True)
    server.ledger.journal.append = lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        server.start()
    assert server.plan is None and server.ledger.max_charges == 0


def resumed(state, path, repeatable, **planner):
    server = engine(**planner)
    server.load_state_dict(state)
    recorded, position = server.ledger.recorded
    assert recorded == str(path)
    server.ledger.keep(journal(path, position=position), repeatable)
    return server


def test_keys_from_a_seed_repeat_a_killed_round_and_pay_for_it_once(tmp_path):
    straight, path = engine(), tmp_path / "ledger.jsonl"
    play(straight, 6)
    first = kept(path, repeatable=True)
    play(first, 2)
    state = first.state_dict()
    play(first, 2)
    first.start()  # killed in round 4, the checkpoint is of round 2
    second = resumed(state, path, repeatable=True)
    play(second, 4)
    assert second.ledger.charges.tolist() == straight.ledger.charges.tolist() == [6] * 6
    assert torch.equal(second.weights, straight.weights)
    assert lines(path) == 6


def test_keys_from_a_seed_never_repeat_a_stream_from_another_model(tmp_path):
    """Resumed with another learning rate, say: what follows differs, so it takes new streams."""
    path = tmp_path / "ledger.jsonl"
    first = kept(path, repeatable=True)
    state = first.state_dict()
    play(first, 3)
    second = resumed(state, path, repeatable=True)
    second.weights += 1.0
    plan = second.start()
    assert second.attempt == 1
    second.receive(plan.survivors, torch.zeros(6, 8))
    second.finish()
    assert lines(path) == 4


def test_keys_from_the_system_pay_for_what_was_lost_and_for_its_repetition(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = kept(path, law=FixedSize(3))
    play(first, 2)
    state = first.state_dict()
    play(first, 2)
    first.start()
    lost = first.ledger.charges.clone()
    second = resumed(state, path, repeatable=False, law=FixedSize(3))
    assert torch.equal(second.ledger.charges, lost) and second.ledger.rounds == 5
    play(second, 4)
    assert second.ledger.rounds == 9 == lines(path)
    # once more from the same old checkpoint: both futures were sent
    third = resumed(state, path, repeatable=False, law=FixedSize(3))
    assert torch.equal(third.ledger.charges, second.ledger.charges)
    # and a run that is still alive takes in what the other one sends
    play(third, 1)
    play(second, 1)
    assert second.ledger.rounds == 11 == int(second.ledger.charges.sum()) // 3


def test_the_limit_counts_what_was_lost(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = kept(path)
    state = first.state_dict()
    play(first, 3)
    second = resumed(state, path, repeatable=False)
    second.ledger.limits = torch.full((6,), 4)
    play(second, 1)
    with pytest.raises(RuntimeError, match="The privacy budget allows 4 rounds of client"):
        second.start()


@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("joins", ["before the round", "in the open round"])
def test_the_journal_knows_how_long_a_lost_round_was(tmp_path, joins, repeatable):
    """Parameters unfreeze after the checkpoint and the process is killed: all charges count as long."""
    path = tmp_path / "ledger.jsonl"
    first = kept(path, repeatable)
    play(first, 2)
    state = first.state_dict()
    parts = [torch.zeros(8), torch.zeros(5)]
    if joins == "before the round":
        first.rearrange(parts, [0, None], None)
    first.start()
    if joins == "in the open round":
        first.rearrange(parts, [0, None], None)
        assert first.ledger.dim == 8  # nobody has answered
    first.receive([0], torch.zeros(1, 13))
    again = resumed(state, path, repeatable)
    assert again.ledger.dim == 13
    assert again.ledger.rounds == (2 if repeatable else 3)
    assert again.charged_context(again.planner.plan(2, again.mechanism)).dim == 13


def test_a_longer_vector_is_on_the_disk_before_anybody_answers_for_it(tmp_path):
    server = kept(tmp_path / "ledger.jsonl")
    server.start()
    server.rearrange([torch.zeros(8), torch.zeros(5)], [0, None], None)
    sent = []
    server.mechanism = type("Watched", (), {"encode": lambda *_: sent.append(1)})()
    server.ledger.journal._write = lambda data: (_ for _ in ()).throw(OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        server.receive([0], torch.zeros(1, 13))
    assert not sent


def test_a_journal_knows_the_terms_of_what_was_lost(tmp_path):
    """A server that has no checkpoint reads its charges from the journal alone."""
    path = tmp_path / "ledger.jsonl"
    play(kept(path, law=FixedSize(2)), 2)
    other, again = kept(path), kept(path, law=FixedSize(2))
    assert other.ledger.rounds == again.ledger.rounds == 2
    with pytest.raises(ValueError, match=r"clients_per_round = 2 \(here 6\)"):
        other.start()
    play(again, 1)
    assert lines(path) == 3


# ---- copies, processes and their checkpoints --------------------------------------------------------------


class Known:
    """A ledger beside the set of charges that it must know of, each with its clients."""

    def __init__(self, ledger: Ledger, charges: set) -> None:
        self.ledger, self.charges = ledger, charges

    def read(self, written, position):
        path = str(self.ledger.journal.path)
        self.charges |= {charge for end, charge in written.setdefault(path, []) if end > position}

    def check(self):
        wanted = [sum(client in clients for _, clients in self.charges) for client in range(4)]
        assert self.ledger.charges.tolist() == wanted and self.ledger.rounds == len(self.charges)


def step(draw, number, ledgers, states, written, folder):
    """One random thing that processes do: charge, save, resume, begin, copy."""
    one = draw.choice(ledgers)
    action = draw.choice(["charge"] * 4 + ["save"] * 2 + ["load", "resume", "begin", "copy"])
    if action == "charge":
        if one.ledger.journal is not None:
            position = one.ledger.journal.position
            one.ledger.free_attempt(number, 0, "")
            one.read(written, position)
        clients = tuple(sorted(draw.sample(range(4), draw.randint(1, 4))))
        one.ledger.charge(clients, number)
        one.charges.add((number, clients))
        if one.ledger.journal is not None:
            entry = one.ledger.journal.position, (number, clients)
            written.setdefault(str(one.ledger.journal.path), []).append(entry)
    elif action == "save":
        states.append((one.ledger.state_dict(), set(one.charges)))
    elif action == "begin" or (action == "resume" and not states):
        ledgers.append(Known(Ledger(4, "m"), set()))
        if draw.random() < 0.5:
            ledgers[-1].ledger.keep(Journal(folder / f"{number}.jsonl", "m", 4), repeatable=False)
    elif action == "copy":
        ledgers.append(Known(copy.deepcopy(one.ledger), set(one.charges)))
    elif states:
        state, charges = draw.choice(states)
        if action == "resume":
            one = Known(Ledger(4, "m"), set())
            ledgers.append(one)
        one.ledger.load_state_dict(state)
        one.charges |= charges
        path, position = one.ledger.recorded
        if one.ledger.journal is None and path:
            one.ledger.keep(Journal(Path(path), "m", 4, position), repeatable=False)
            one.read(written, position)


@pytest.mark.parametrize("seed", range(30))
def test_every_charge_is_known_once_whoever_resumes_whose_checkpoint(tmp_path, seed):
    draw, states, written = random.Random(seed), [], {}
    ledgers = [Known(Ledger(4, "m"), set())]
    for number in range(60):
        step(draw, number, ledgers, states, written, tmp_path)
        for one in ledgers:
            one.check()


def test_lines_that_are_known_are_not_decoded_again(tmp_path, monkeypatch):
    """1,000 lines of 10^5 clients took 13 s at the first look and 5 s at every resume: now 1 and .1 s."""
    clients, cohort = 10_000, range(0, 10_000, 2)
    first = Ledger(clients, "m")
    first.keep(Journal(tmp_path / "ledger-1.jsonl", "m", clients), repeatable=False)
    for round in range(30):
        first.charge(cohort, round)
    decoded = []
    named = Journal._named
    monkeypatch.setattr(Journal, "_named", lambda self, written: decoded.append(1) or named(self, written))
    second = Ledger(clients, "m")
    second.keep(Journal(tmp_path / "ledger-2.jsonl", "m", clients), repeatable=False)
    second.folders = frozenset([tmp_path])
    assert second.scan_journals() == {(tmp_path / "ledger-1.jsonl").resolve(): 30}
    assert len(decoded) == 30 and torch.equal(second.charges, first.charges)
    assert second.scan_journals() == {} and len(decoded) == 30
    resumed = Ledger(clients, "m")
    resumed.load_state_dict(second.state_dict())  # reads the whole file from its start
    resumed.keep(Journal(tmp_path / "ledger-1.jsonl", "m", clients), repeatable=False)
    assert len(decoded) == 30 and torch.equal(resumed.charges, first.charges)
    first.charge(cohort, 30)
    assert second.scan_journals() == {(tmp_path / "ledger-1.jsonl").resolve(): 1}
    resumed.scan_journals()
    assert len(decoded) == 32 and resumed.rounds == second.rounds == 31


def test_a_journal_that_is_refused_is_named_at_every_look(tmp_path):
    first = Ledger(4, "m")
    first.keep(Journal(tmp_path / "ledger-1.jsonl", "m", 4), repeatable=False)
    first.charge(range(4), 0)
    first.charge(range(4), 1)
    path = (tmp_path / "ledger-1.jsonl").resolve()
    header, one, other = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + one + other.replace(b'"round": 1', b'"round": 2'))
    second = Ledger(4, "m")
    second.folders = frozenset([tmp_path])
    for _ in range(2):
        assert "damaged" in second.scan_journals()[path]
    assert second.rounds == 1  # the lines before it count
