"""Who has paid for which steps, after checkpoints, open rounds and processes that were killed."""

import copy

import pytest
import torch

from lightning_fedq.data.batches import LocalWork
from lightning_fedq.dpsgd.accountant import SampledGaussianAccountant
from lightning_fedq.dpsgd.accounts import SampleAccounts
from lightning_fedq.dpsgd.poisson import PoissonBatches
from lightning_fedq.dpsgd.statement import SampleStatement
from lightning_fedq.privacy.document import sample_table
from tests.dpsgd.test_poisson import stream

HELD = [torch.arange(20), torch.arange(20, 60)]
"""Two clients, of two and four batches."""


def opened(state=None, local_epochs=1, noise=1.0, repeatable=False):
    accounts = SampleAccounts()
    if state is not None:
        accounts.load_state_dict(state, repeatable)
    return reopened(accounts, noise, local_epochs)


def reopened(accounts, noise=1.0, local_epochs=1):
    accounts.open(PoissonBatches(LocalWork(HELD, 10, False, True, local_epochs, None), stream), noise)
    return accounts


def steps(accounts):
    return [account.steps for account in accounts.of_client.values()]


def spend(accounts, *clients):
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
        accounts.load_state_dict(state, repeatable)
        assert steps(reopened(accounts)) == expected


def states(accounts):
    """What is saved and opened of accounts, but for their names."""
    return [account.accountant.history for account in accounts.of_client.values()]


def refused(accounts, state):
    """Is a state refused, whatever is repeatable, and nothing changed by that?"""
    for repeatable in (False, True):
        before = accounts.state_dict()
        with pytest.raises(ValueError, match=r"that the checkpoint does not contain. Use a new DPSGD"):
            accounts.load_state_dict(state, repeatable)
        assert accounts.state_dict() == before
    return True


@pytest.mark.parametrize("noise", [0.3, 20.0])
@pytest.mark.parametrize("steps_of_others", [1, 5, 9])
def test_a_history_of_others_is_refused_whatever_its_price_and_length(noise, steps_of_others):
    others, own = opened(noise=noise), opened(noise=0.3)
    spend(others, *[0] * steps_of_others)
    spend(own, *[0] * 5)
    assert refused(own, others.state_dict())
    assert states(reopened(own, noise=0.3)) == [[(0.3, 0.5, 5)], []]
    fresh = opened(others.state_dict(), noise=noise)
    assert states(fresh) == states(others)


def test_accounts_go_on_from_their_own_past_and_from_what_they_began_with():
    first = opened()
    spend(first, 0, 1)
    early = first.state_dict()
    spend(first, 0, 0, 1)
    late = first.state_dict()
    second = opened(early)
    spend(second, 0)
    own = second.state_dict()
    spend(second, 1)
    for state in (early, own, second.state_dict()):
        second.load_state_dict(state, repeatable=False)
        assert steps(reopened(second)) == [2, 2]
    assert refused(second, late)  # the first went on without it
    assert refused(first, own)  # as it did
    third = opened(own)
    assert refused(third, early)
    for state, then in ((own, [2, 1]), (early, [1, 1])):  # with a seed, each is gone back to
        second.load_state_dict(state, repeatable=True)
        assert steps(reopened(second)) == then


def test_a_copy_goes_its_own_way():
    first = opened()
    spend(first, 0, 0)
    early = first.state_dict()
    spend(first, 0)
    at_the_copy = first.state_dict()
    copied = copy.deepcopy(first)
    spend(copied, 0)
    spend(first, 0)
    assert states(first) == states(copied)
    assert refused(first, copied.state_dict())
    assert refused(copied, first.state_dict())
    assert refused(copied, early)
    copied.load_state_dict(at_the_copy, repeatable=False)  # what it began with
    assert steps(reopened(copied)) == [4, 0]


def test_rounds_of_others_are_paid_for_once():
    accounts = opened()
    spend(accounts, 0, 0, 1, 1, 1, 1)
    again = opened(accounts.state_dict(charges=[1, 1]))
    assert again.charge_elsewhere([3, 2])
    assert steps(again) == [2 + 2 * 2, 4 + 4]
    assert not again.charge_elsewhere([3, 2])
    assert steps(again) == [6, 8]
    assert not opened(accounts.state_dict(charges=[1, 1])).charge_elsewhere([1, 1])
    assert opened().charge_elsewhere([2, 0]), "another run's, beside which this one begins"


def test_a_checkpoint_knows_which_rounds_of_others_are_paid_for():
    first = opened()
    first.charge_elsewhere([1, 0])
    spend(first, 0, 0)
    state = first.state_dict(charges=[1, 0])  # of its own
    assert state["charges"] == [2, 0] and steps(first) == [4, 0]
    for _ in range(2):  # its own past: nothing that it has spent since is forgotten or paid for twice
        spend(first, 0, 0)
        first.load_state_dict(state, repeatable=False)
        assert not reopened(first).charge_elsewhere([1, 0])
    assert steps(first) == [8, 0]
    again = opened(state)
    assert again.charge_elsewhere([2 + 1, 0]) and steps(again) == [4 + 2, 0]
    assert opened(again.state_dict(charges=[0, 0])).charge_elsewhere([3, 0]) is False


def test_lost_rounds_have_one_price():
    accounts = opened()
    spend(accounts, 0)
    state = accounts.state_dict(charges=[1, 1])
    for other, said in (({"local_epochs": 2}, "1, .* 0.5 and 4"), ({"noise": 3.0}, "3, .* 0.5 and 2")):
        message = (
            rf"client 0 had noise multiplier 1, sampling rate 0.5 and 2 .* has .* multiplier {said} steps"
        )
        with pytest.raises(ValueError, match=message):
            opened(state, **other)
    # nothing can be lost where the ledger has no journal
    assert steps(opened(accounts.state_dict(), local_epochs=2)) == [1, 0]


# ---- what is said of samples: worst account, unknown settings, and nothing too strong ------------------
def epsilon_of(*history):
    accountant = SampledGaussianAccountant()
    accountant.history = list(history)
    return accountant.get_epsilon(1e-5)


def test_of_several_histories_the_one_that_spent_most_counts():
    changed = [(2.0, 0.1, 3), (1.0, 0.25, 2)]
    said = SampleStatement.from_histories({"0": [(1.0, 0.05, 9)], "1": changed, "2": []}, 1e-5, ("Why.",))
    assert said.epsilon == epsilon_of(*changed) > epsilon_of((1.0, 0.05, 9))
    assert (said.data_sets, said.steps, said.noise_multiplier, said.sample_rate) == (3, 5, 1.0, 0.25)
    assert said.verdict == "no guarantee"
    assert sample_table(said).rows == (("3", "5", "1", "not known", "0.25"),) and said.about.endswith(" Why.")


def test_before_the_first_step_nothing_is_spent():
    said = SampleStatement.from_histories({"0": [], "1": []}, 1e-5)
    assert (said.epsilon, said.steps, said.verdict) == (0.0, 0, "no guarantee")
    assert sample_table(said).rows == (("2", "0", "not known", "not known", "not known"),)


@pytest.mark.parametrize(
    ("secure", "epsilon", "verdict", "words"),
    [
        (True, 3.0, "good", "good, epsilon 3 over the run at delta 1e-05"),
        (True, 21.0, "vacuous", "vacuous, epsilon 21 over"),
        (False, 3.0, "no guarantee", "come from a seed (DPSGD(seed=None) would have epsilon 3"),
        (
            None,
            3.0,
            "no guarantee",
            "at delta 1e-05 if batches and noise did not come from a seed, which is unknown",
        ),
    ],
)
def test_only_noise_that_surely_has_no_seed_guarantees_anything(secure, epsilon, verdict, words):
    said = SampleStatement(1, 1, epsilon, 1e-5, 1.0, 1.0, 0.1, secure)
    assert said.verdict == verdict and words in said.line
