"""Real clients that hand noise on: each takes back that of the client before it, from their keys alone."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_fedq import Cyclic
from lightning_fedq._lightning import pl
from lightning_fedq.flower.cohort import Cohort
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import HandedOnGaussian
from lightning_fedq.mechanisms.interface import HandOver
from lightning_fedq.rounds import RoundClient, RoundTask, StreamLog, UsedStreamError
from lightning_fedq.secagg import SecAgg
from tests.flower.loop import LoopGrid, clients, deploy, deployment, federated

pytestmark = pytest.mark.filterwarnings("ignore:round .* client|node |train. :UserWarning")
LOUD = HandedOnGaussian(clip_norm=0.01, local_sigma=20.0, granularity=0.05, num_cohorts=2)
TURNS = {"cohort": Cyclic(2)}


class Models(pl.Callback):
    """Keeps the global model of every round."""

    def __init__(self) -> None:
        self.steps = []

    def on_train_epoch_end(self, trainer, pl_module):
        engine = next(c for c in trainer.callbacks if hasattr(c, "engine")).engine
        self.steps.append(engine.weights.double().numpy().copy())


def noises(models):
    """What each round has added to the model, nearly all of it noise."""
    return [after - before for before, after in itertools.pairwise(models.steps)]


def test_noise_of_real_clients_cancels_behind_masks(tmp_path):
    """Keys of the operating system: nobody but a pair knows its share, and a model has little noise left."""
    make = lambda: federated(LOUD, secure_aggregation=SecAgg(), seed=None, **TURNS)  # noqa: E731
    models = Models()
    server = deploy(make, 5, tmp_path, callbacks=[models])
    assert not any(record.aborted for record in server.records)
    steps = noises(models)
    for one, other in itertools.pairwise(steps):
        assert np.corrcoef(one, other)[0, 1] < -0.35  # -0.49 from the formula
    assert np.sum(steps, 0).var() < 0.45 * sum(step.var() for step in steps)
    task = server.engine.state_dict()
    assert task["since"] == [0, 0] and len(task["in_last_sum"]) == 2


def test_a_silent_client_hands_nothing_on(tmp_path):
    tolerant = replace(LOUD, max_dropped_clients=1)
    make = lambda: federated(tolerant, seed=None, **TURNS)  # noqa: E731
    seen = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            engine = next(c for c in trainer.callbacks if hasattr(c, "engine")).engine
            seen.append((engine._context.hand_over, tuple(engine._sum.received)))

    trained = []

    def silent(kind, client, reply):
        trained.append(client) if kind == "train" else None
        return None if kind == "train" and len(trained) == 3 else reply

    server = deploy(make, 4, tmp_path, silent, callbacks=[Watch()], timeout=0.5)
    assert [record.num_received for record in server.records] == [2, 1, 2, 2]
    handed = [set(other for _, other in hand_over.before) for hand_over, _ in seen]
    assert handed[0] == set()
    assert handed[1:] == [set(answered) for _, answered in seen[:-1]]


def test_a_server_that_is_started_again_begins_a_new_block(tmp_path):
    make = lambda: federated(LOUD, secure_aggregation=SecAgg(), seed=None, **TURNS)  # noqa: E731
    apps = clients(make, tmp_path)
    deployment(make(), 2, tmp_path).run(LoopGrid(*apps))
    _, server = deployment(make(), 4, tmp_path).run(LoopGrid(*apps))
    assert server.engine.state_dict()["since"] == [2, 0]
    assert not any(record.aborted for record in server.records)


def test_a_client_is_told_keys_of_its_neighbours_and_of_nobody_else(tmp_path, monkeypatch):
    make = lambda: federated(LOUD, secure_aggregation=SecAgg(), seed=None, **TURNS)  # noqa: E731
    asked, whole = [], Cohort.client_requests

    def questions(self):
        asked.append(whole(self))
        return asked[-1]

    monkeypatch.setattr(Cohort, "client_requests", questions)
    deploy(make, 2, tmp_path)
    for fields in asked:
        for client, field in fields.items():
            task = RoundTask.from_bytes(field["task"])
            assert tuple(field["peers"]) == task.neighbours(client) and len(field["peers"]) == 1


# ---- what a client refuses --------------------------------------------------------------------------------


def task_of(round, hand_over, attempt=0):
    zero = torch.zeros(1, dtype=torch.float64)
    return RoundTask(round, attempt, ((0,), (1,)), (4,), zero, zero + 1.0, hand_over)


def client(**options):
    mechanism = replace(LOUD, num_cohorts=3)
    return RoundClient(0, mechanism, SeededKeys(0), StreamLog(None, "client 0"), **options)


def test_a_client_refuses_a_second_attempt_with_the_same_shares_and_answers_the_cure():
    own, update, after = client(), torch.zeros(4), ((0, 2), (1, 3))
    own.answer(task_of(3, HandOver((0, 0), ((0, 4), (1, 5)), after)), update, update)
    with pytest.raises(ValueError, match=r"Begin a new block: since=\(3, 1\) and no predecessors"):
        own.answer(task_of(3, HandOver((0, 0), ((0, 4), (1, 5)), after), 1), update, update)
    with pytest.raises(UsedStreamError, match="but this client has answered round"):
        own.answer(task_of(3, HandOver((3, 0), (), after)), update, update)
    own.answer(task_of(3, HandOver((3, 1), (), after), 1), update, update)


def test_a_client_refuses_a_round_that_comes_too_soon_in_one_block():
    own, update, after = client(), torch.zeros(4), ((0, 2), (1, 3))
    own.answer(task_of(3, HandOver((0, 0), (), after)), update, update)
    early = task_of(5, HandOver((0, 0), (), after))
    for refused in (lambda: own.check(early, update), lambda: own.answer(early, update, update)):
        with pytest.raises(UsedStreamError, match=r"too soon after this client's round 3: .* needs 3 rounds"):
            refused()
    own.answer(task_of(5, HandOver((5, 0), (), after)), update, update)
    own.answer(task_of(8, HandOver((5, 0), (), after)), update, update)


def test_a_task_carries_the_hand_over_and_refuses_a_damaged_one():
    task = task_of(4, HandOver((2, 1), ((0, 4),), ((0, 2), (1, 3))))
    data = task.to_bytes()
    again = RoundTask.from_bytes(data)
    assert again.hand_over == task.hand_over and again.groups == task.groups
    assert again.neighbours(0) == (4, 2) and again.neighbours(1) == (3,) and again.neighbours(7) == ()
    plain = task_of(4, None)
    assert b"since" not in plain.to_bytes() and RoundTask.from_bytes(plain.to_bytes()).hand_over is None
    for bad in (data[:-4], data + b"....", data.replace(b'"before": 1', b'"before": 2')):
        with pytest.raises(ValueError, match="Not the task of a round"):
            RoundTask.from_bytes(bad)
    twice = data[:-8] + data[-16:-8]  # two clients of one successor
    with pytest.raises(ValueError, match="each client may be in one pair"):
        RoundTask.from_bytes(twice)
