"""A round: updates in their order, what it leaves when it is given up, and its length."""

import inspect

import pytest
import torch

from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.worker import TrainedStack, group_updates
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.training.round import Rounds
from tests.digits_run import Classifier, Digits, make_trainer


def rows(*sizes):
    clients = iter(range(sum(sizes)))
    for size in sizes:
        own = tuple(next(clients) for _ in range(size))
        yield TrainedStack(
            own, torch.tensor(own, dtype=torch.float32)[:, None].expand(size, 3).clone(), False
        )


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [
        ((1, 1, 1), 0, [(0,), (1,), (2,)]),
        ((1, 1, 1), 9, [(0, 1, 2)]),
        ((1, 1, 1, 1), 8, [(0, 1), (2, 3)]),
        ((1, 2, 1), 99, [(0, 1, 2), (3,)]),
        ((2, 2), 99, [(0, 1), (2, 3)]),
        ((), 99, []),
    ],
)
def test_single_clients_wait_for_each_other_and_stacks_for_nobody(sizes, most, groups):
    found = list(group_updates(rows(*sizes), most))
    assert [clients for clients, _ in found] == groups
    for clients, updates in found:
        assert updates[:, 0].tolist() == list(clients) and updates.shape == (len(clients), 3)


@pytest.fixture(scope="module")
def side():
    federated = Federated(FedAvg(), 3, seed=1, personal_parameters=["backbone.bias"])
    make_trainer(federated, max_epochs=1).fit(Classifier(), datamodule=Digits(60))
    return federated.fit.side


def test_who_is_in_no_sum_goes_on_with_what_it_had(side):
    own = side.vector.personal
    kept = own.committed[0].clone()
    side.begin_round()
    own.keep(0, kept + 1)
    own.keep(1, kept + 2)
    side.worker.states.commit([1])
    assert torch.equal(own.committed[0], kept) and torch.equal(own.committed[1], kept + 2) and not own.pending


def test_a_round_that_is_given_up_leaves_nothing(side):
    kept = {client: row.clone() for client, row in side.vector.personal.committed.items()}
    side.vector.personal.keep(0, kept[0] + 1)
    side.clock.note_not_finite(["backbone.weight"])
    assert side.clock.merged_progress.not_finite == ("backbone.weight",)
    side.begin_round()
    side.worker.states.commit([0])
    assert not side.clock.merged_progress.not_finite
    assert all(torch.equal(side.vector.personal.committed[client], kept[client]) for client in kept)


def test_a_round_is_one_function_that_fits_a_screen():
    assert len(inspect.getsource(Rounds.play_round).splitlines()) <= 45
