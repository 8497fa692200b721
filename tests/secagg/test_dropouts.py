"""Every pattern of dropouts of six clients: the exact sum of the survivors, or a typed abort."""

import copy
from itertools import combinations

import numpy as np
import pytest

from lightning_fedq.keys.randomness import SeededKeys, Stream
from lightning_fedq.secagg import Stage, ThresholdError
from tests.secagg.play import ACTIVE_STAGES, STAGES, Round, make_inputs, make_terms, total


def _fork_one(party):
    """Copy a state machine and its containers, but not the keys, which never change."""
    twin = copy.copy(party)
    for name, value in vars(party).items():
        if isinstance(value, dict):
            fresh = {k: dict(v) if isinstance(v, dict) else v for k, v in value.items()}
        elif isinstance(value, set):
            fresh = set(value)
        elif isinstance(value, list):
            fresh = [item.copy() if isinstance(item, np.ndarray) else item for item in value]
        else:
            continue
        setattr(twin, name, fresh)
    return twin


def fork(played):
    twin = copy.copy(played)
    twin.server = _fork_one(played.server)
    twin.clients = {c: _fork_one(state) for c, state in played.clients.items()}
    return twin


class Everything:
    """Walks the tree of all patterns; a round that has aborted stands for all its continuations."""

    def __init__(self, active: bool) -> None:
        self.terms = make_terms(active=active)
        self.inputs = make_inputs(self.terms)
        self.stages = ACTIVE_STAGES if active else STAGES
        self.exact = self.aborted = 0
        self.walk(Round(self.terms), 0)

    def walk(self, played, depth):
        stage, here = self.stages[depth], tuple(played.incoming)
        answers = {client: played.answer(stage, client, self.inputs[client]) for client in here}
        for number in range(len(here) + 1):
            for silent in combinations(here, number):
                left = [client for client in here if client not in silent]
                branch = fork(played)
                for client in left:
                    branch.server.receive(answers[client])
                if len(left) < self.terms.min_survivors:
                    with pytest.raises(ThresholdError, match="clients are needed"):
                        branch.server.close()
                    with pytest.raises(Exception, match="not known"):
                        _ = branch.server.total
                    # Each client that is left may fall silent at any later stage, or never.
                    self.aborted += (len(self.stages) - depth) ** len(left)
                    continue
                branch.incoming = branch.server.close()
                if depth + 1 < len(self.stages):
                    self.walk(branch, depth + 1)
                else:
                    expected = total(self.inputs, branch.server.survivors)
                    assert np.array_equal(branch.server.total, expected)
                    self.exact += 1


def test_all_patterns_against_a_curious_server():
    seen = Everything(active=False)
    assert seen.exact + seen.aborted == 5**6
    # 4 of 6 must be left at the end: sum over k >= 4 of C(6, k) 4^(6 - k).
    assert seen.exact == 1 + 6 * 4 + 15 * 4**2


def test_all_patterns_against_an_active_server():
    seen = Everything(active=True)
    assert seen.exact + seen.aborted == 6**6
    assert seen.exact == 1 + 6 * 5


def test_random_patterns_played_from_the_start():
    """The same without forks, on a sparse graph, where one neighbourhood can be too small."""
    stream = Stream(SeededKeys(1).public())
    outcomes = {"exact": 0, "aborted": 0}
    terms = make_terms(9, degree=4, threshold=3, min_survivors=3)
    inputs = make_inputs(terms, 2)
    for _ in range(60):
        draws = stream.uniform_below(9, 9).tolist()
        silent = {client: STAGES[draw] for client, draw in enumerate(draws) if draw < 4}
        played = Round(terms)
        try:
            played.run(inputs, silent)
        except ThresholdError:
            outcomes["aborted"] += 1
            continue
        assert np.array_equal(played.server.total, total(inputs, played.server.survivors))
        late = (Stage.UNMASK, None)
        assert played.server.survivors == tuple(c for c in range(9) if silent.get(c) in late)
        outcomes["exact"] += 1
    assert min(outcomes.values()) >= 10


@pytest.mark.parametrize("num_clients", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("active", [False, True])
def test_small_and_odd_cohorts(num_clients, active):
    terms = make_terms(num_clients, active=active)
    inputs = make_inputs(terms)
    assert np.array_equal(Round(terms).run(inputs).server.total, total(inputs, range(num_clients)))


def test_arrival_order_does_not_matter():
    terms = make_terms()
    inputs = make_inputs(terms)
    results = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        played = Round(terms)
        for stage in STAGES:
            played.step(stage, inputs, order)
        results.append(played.server.total)
    assert np.array_equal(*results)
    assert np.array_equal(results[0], total(inputs, range(6)))
