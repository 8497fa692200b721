"""A client's own budget: whatever the server asks, and however often the client is started again."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import LDPQ, FedAvg, PairedCoins, RotatedAxes
from lightning_fedq.mechanisms.interface import Adversary, RoundContext
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.run import ASSUMED
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import (
    BudgetSpentError,
    ClientBudget,
    RoundClient,
    RoundPlanner,
    RoundServer,
    RoundTask,
    StreamLog,
    UsedStreamError,
)
from lightning_fedq.rounds.client import describe_price_terms

DIM, CLIENTS, KEYS = 12, 5, SeededKeys(3)
COIN = LDPQ(0.5)
DELTA = 1e-5


def epsilon_of(rounds):
    """By the accountant itself: what that many messages spend."""
    context = task_of(0).context()
    (claim,) = (claim for claim in COIN.claims(context) if claim.adversary is Adversary.SERVER)
    return spent(claim.loss, DELTA, compositions=claim.compositions, rounds=rounds, slack=claim.slack).epsilon


def task_of(round, attempt=0, mechanism=COIN, clients=CLIENTS):
    server = RoundServer(mechanism, RoundPlanner(clients, 3), KEYS, torch.zeros(DIM), [DIM], AdaptiveRange())
    server.round, server.attempt = round, attempt
    server.start()
    return server.task()


def budget_for(rounds, **options):
    return ClientBudget(PrivacyTarget(epsilon_of(rounds) * 1.0001, DELTA, "server"), CLIENTS, **options)


def client_of(path, budget, mechanism=COIN):
    return RoundClient(0, mechanism, KEYS, StreamLog(path, "client 0"), budget=budget)


def answer(client, round, attempt=0):
    return client.answer(task_of(round, attempt), torch.zeros(DIM), torch.ones(DIM))


def test_no_more_messages_than_agreed(tmp_path):
    """Four are paid for; the server asks on, and the client has used no stream for what it refuses."""
    client = client_of(tmp_path / "streams.jsonl", budget_for(4))
    for round in range(4):
        answer(client, round)
    for round in (4, 5, 1000):
        with pytest.raises(BudgetSpentError, match="after 4 messages one more would spend"):
            answer(client, round)
    assert client.log.charges == 4
    assert len((tmp_path / "streams.jsonl").read_text().splitlines()) == 5  # the header, and four


def test_a_client_that_is_started_again_knows_what_it_has_sent(tmp_path):
    path, budget = tmp_path / "streams.jsonl", budget_for(3)
    for round in range(3):
        answer(client_of(path, budget), round)
    with pytest.raises(BudgetSpentError, match="after 3 messages one more would spend"):
        answer(client_of(path, budget), 3)
    answer(client_of(path, budget_for(4)), 3)  # its owner may raise it


def test_a_server_that_lies_about_the_round_gains_nothing(tmp_path):
    """Rounds told again are refused as such; new numbers, attempts and leaps are new messages."""
    client = client_of(tmp_path / "streams.jsonl", budget_for(3))
    answer(client, 7)
    with pytest.raises(UsedStreamError):
        answer(client, 0)
    answer(client, 7, attempt=1)
    answer(client, 900)
    for round, attempt in ((901, 0), (900, 1), (10**9, 0)):
        with pytest.raises(BudgetSpentError):
            answer(client, round, attempt)
    assert client.log.charges == 3


def test_of_two_processes_at_once_one_may_send(tmp_path):
    """The server sends two rounds that overlap, and there is room for one."""
    path, inner = tmp_path / "streams.jsonl", []

    class Slow(ClientBudget):
        def check(self, mechanism, context, log):
            super().check(mechanism, context, log)
            if not inner:
                inner.append(True)
                answer(client_of(path, budget_for(1)), 0)

    slow = Slow(budget_for(1).target, CLIENTS)
    with pytest.raises(RuntimeError, match="Another process is writing"):
        answer(client_of(path, slow), 1)
    with pytest.raises(BudgetSpentError):
        answer(client_of(path, budget_for(1)), 2)


def test_a_longer_vector_makes_all_messages_longer(tmp_path):
    log = StreamLog(tmp_path / "streams.jsonl", "client 0")
    log.use(0, 0, 10 * DIM, repr(COIN), describe_price_terms(COIN, task_of(0).context(), None))
    budget = budget_for(2)
    with pytest.raises(BudgetSpentError, match="after 1 messages one more would spend"):
        RoundClient(0, COIN, KEYS, log, budget=budget).check(task_of(1), torch.zeros(DIM))


def test_where_a_long_message_does_not_cover_a_short_one_all_have_one_length(tmp_path):
    """RotatedAxes among few axes composes worse: 20 messages of 3 coordinates cost 9.86, of 4,096 9.17."""
    axes, log = RotatedAxes(0.5, 1.0), StreamLog(tmp_path / "streams.jsonl", "client 0")
    budget = ClientBudget(PrivacyTarget(9.5, DELTA, "server"), CLIENTS)
    client = RoundClient(0, axes, KEYS, log, budget=budget)

    def asked(round, dim):
        one = torch.ones(1, dtype=torch.float64)
        task = RoundTask.from_context(RoundContext(round, ((0,), (1,)), (dim,), 0 * one, one))
        client.answer(task, torch.zeros(dim), torch.ones(dim))

    for round in range(3):
        asked(round, 3)
    with pytest.raises(BudgetSpentError, match=r"3 coordinates, but the server asks for .*4096"):
        asked(3, 4096)


def regrouped(task, groups):
    return RoundTask(task.round, task.attempt, groups, task.segments, task.center, task.radius)


def test_the_server_cannot_lower_the_price_of_what_was_sent_by_asking_for_other_groups(tmp_path):
    """Paired messages cost more than those of clients alone, and the server writes the groups."""
    pairs, target = PairedCoins(1.0), PrivacyTarget(37.0, 1e-9, "server_and_partner")
    budget = ClientBudget(target, 4)

    def asked(round, groups):
        client = client_of(tmp_path / "streams.jsonl", budget, pairs)
        task = regrouped(task_of(round, mechanism=pairs, clients=4), groups)
        return client.answer(task, torch.zeros(DIM), torch.ones(DIM))

    for round in range(2):
        asked(round, ((0, 1), (2, 3)))
    for groups in (((0,), (1,), (2,), (3,)), ((0, 1), (2,), (3,))):
        with pytest.raises(BudgetSpentError, match=r"Its group sizes are .*mechanism's are \(2, 2\)"):
            asked(2, groups)
    for groups in (((0,),), ((0, 1),)):
        with pytest.raises(BudgetSpentError, match="log has messages of 4 clients in groups: 2 of 2, but"):
            asked(2, groups)
    with pytest.raises(BudgetSpentError, match="after 2 messages one more would spend"):
        asked(2, ((0, 1), (2, 3)))


def test_messages_of_unknown_terms_are_not_guessed_at(tmp_path):
    log = StreamLog(tmp_path / "streams.jsonl", "client 0")
    log.use(0, 0, DIM, repr(COIN), "")
    with pytest.raises(BudgetSpentError, match="log has messages of unknown terms"):
        RoundClient(0, COIN, KEYS, log, budget=budget_for(9)).check(task_of(1), torch.zeros(DIM))


def test_a_mechanism_without_a_guarantee_sends_nothing(tmp_path):
    with pytest.raises(BudgetSpentError, match=r"after 0 messages one more would spend epsilon inf"):
        answer(client_of(tmp_path / "streams.jsonl", budget_for(10), FedAvg()), 0)


def test_the_partner_counts_where_the_target_says_so():
    """The secret that a pair shares protects from the server, and not from the server with the partner."""
    pair, log = PairedCoins(epsilon_per_coordinate=0.5), StreamLog(None, "client 0")
    context = task_of(0, mechanism=pair, clients=4).context()
    losses = {claim.adversary: claim for claim in pair.claims(context)}
    apart, together = (
        spent(losses[who].loss, DELTA, compositions=losses[who].compositions).epsilon
        for who in (Adversary.SERVER, Adversary.SERVER_AND_PARTNER)
    )
    assert apart < 0.9 * together
    ClientBudget(PrivacyTarget(1.0001 * apart, DELTA, "server"), 4).check(pair, context, log)
    with pytest.raises(BudgetSpentError):
        ClientBudget(PrivacyTarget(1.0001 * apart, DELTA, "server_and_partner"), 4).check(pair, context, log)


@pytest.mark.parametrize(
    "target, options, words",
    [
        (PrivacyTarget(1.0, DELTA, "client"), {}, "can't enforce a budget against a curious client"),
        (PrivacyTarget(1.0, 0.5, "server"), {}, "below 0.2 = 1 / 5 clients"),
    ],
)
def test_what_a_client_cannot_know_is_refused(target, options, words):
    with pytest.raises(ValueError, match=words):
        ClientBudget(target, CLIENTS, **options)


def test_behind_an_active_secure_aggregation_the_fewest_survivors_count():
    """The sum of as few as the clients confirm: more than of all, less than of one message."""
    context = task_of(0).context()
    log = StreamLog(None, "client 0")

    def smallest(fewest):
        sums = replace(ASSUMED, min_survivors=fewest, min_summands=fewest)
        low, high = 0.0, 50.0
        while high - low > 1e-3:
            middle = (low + high) / 2
            try:
                target = PrivacyTarget(middle, DELTA, "secagg_server")
                ClientBudget(target, CLIENTS, sums).check(LDPQ(0.5), context, log)
                high = middle
            except BudgetSpentError:
                low = middle
        return high

    alone = epsilon_of(1)
    assert smallest(5) < smallest(4) <= alone * 1.001
    assert math.isfinite(alone)
