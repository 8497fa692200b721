"""Who has paid for which steps, after checkpoints, open rounds and processes that were killed."""

import pytest
import torch

from lightning_fedq.data.batches import LocalWork
from lightning_fedq.sample_level.accounts import SampleAccounts
from lightning_fedq.sample_level.poisson import PoissonBatches
from tests.sample_level.test_poisson import stream

HELD = [torch.arange(20), torch.arange(20, 60)]
"""Two clients, of two and four batches."""


def opened(state=None, local_epochs=1, noise=1.0, repeatable=False) -> SampleAccounts:
    accounts = SampleAccounts()
    if state is not None:
        accounts.load_state_dict(state)
    work = LocalWork(HELD, 10, False, True, local_epochs, None)
    accounts.open(PoissonBatches(work, stream), noise, repeatable)
    return accounts


def steps(accounts) -> list[int]:
    return [account.steps for account in accounts.of_client.values()]


def spend(accounts, *clients) -> None:
    accounts.begin_round()
    for client in clients:
        accounts.charge(client)


def test_a_step_is_paid_for_by_its_client_and_has_the_next_number():
    accounts = opened()
    assert [accounts.charge(client) for client in (0, 1, 1, 0, 1)] == [0, 0, 1, 1, 2]
    assert accounts.of_client[0].accountant.history == [(1.0, 0.5, 2)]
    assert accounts.of_client[1].accountant.history == [(1.0, 0.25, 3)]
    assert steps(opened(accounts.state_dict())) == [2, 3]


def test_an_open_round_is_left_out_where_it_is_repeated_and_counts_in_full_where_not():
    accounts = opened()
    spend(accounts, 0, 0, 1, 1, 1, 1)
    spend(accounts, 0, 0, 1)
    assert steps(opened(accounts.state_dict(at_start_of_round=True), repeatable=True)) == [2, 4]
    assert steps(opened(accounts.state_dict(round_taken_by=(0, 1)))) == [4, 8]
    assert steps(opened(accounts.state_dict(round_taken_by=(1,)))) == [4, 8]
    assert steps(accounts) == [4, 5]


def test_a_process_that_goes_on_forgets_nothing_unless_it_repeats_everything():
    for repeatable, expected in ((False, [2, 0]), (True, [1, 0])):
        accounts = opened(repeatable=repeatable)
        spend(accounts, 0)
        state = accounts.state_dict()
        spend(accounts, 0)
        accounts.load_state_dict(state)
        work = LocalWork(HELD, 10, False, True, 1, None)
        accounts.open(PoissonBatches(work, stream), 1.0, repeatable)
        assert steps(accounts) == expected


def test_lost_rounds_are_paid_for_once():
    accounts = opened()
    spend(accounts, 0, 0, 1, 1, 1, 1)
    again = opened(accounts.state_dict(charges=[1, 1]))
    assert again.charge_lost_rounds([3, 2])
    assert steps(again) == [2 + 2 * 2, 4 + 4]
    assert not again.charge_lost_rounds([3, 2])
    assert steps(again) == [6, 8]
    assert not opened(accounts.state_dict(charges=[1, 1])).charge_lost_rounds([1, 1])


def test_lost_rounds_have_one_price():
    accounts = opened()
    spend(accounts, 0)
    state = accounts.state_dict(charges=[1, 1])
    for other, said in (({"local_epochs": 2}, "1, .* 0.5 and 4"), ({"noise": 3.0}, "3, .* 0.5 and 2")):
        message = (
            rf"client 0 had noise multiplier 1, sampling rate 0.5 and 2 .* here .* multiplier {said} steps"
        )
        with pytest.raises(ValueError, match=message):
            opened(state, **other)
    # nothing can be lost where the ledger has no journal
    assert steps(opened(accounts.state_dict(), local_epochs=2)) == [1, 0]
