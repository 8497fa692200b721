"""Who is left out, of those who may have lied: one liar goes alone, and few honest ones with several."""

from itertools import combinations, product

from lightning_fedq.flower.disputes import Disputes
from lightning_fedq.flower.store import Store


def disputes(*pairs):
    found = Disputes()
    for one, other in pairs:
        found.between(one, other)
    return found


def test_one_liar_never_has_an_honest_client_left_out():
    """Whomever it cheats or accuses: all its disputes have it on one side."""
    for count in range(6):
        for met in combinations(range(1, 6), count):
            found = disputes(*((0, other) for other in met)).left_out
            assert found == ({0} if count > 1 else set())


def test_liars_that_agree_have_few_honest_clients_left_out():
    """Any disputes of 2 liars with 5 honest clients: at most c^2 / 2 = 2 go, and only with two accusers."""
    pairs = list(product((0, 1), range(2, 7)))
    for chosen in product((False, True), repeat=len(pairs)):
        found = disputes(*(pair for pair, taken in zip(pairs, chosen, strict=True) if taken)).left_out
        assert len(found - {0, 1}) <= 2


def test_what_is_explained_counts_no_more_and_proofs_count_at_once():
    found = disputes((0, 1), (0, 2), (3, 1))
    assert found.left_out == {0} and found.of(1) == {3}
    found.prove(3)
    assert found.left_out == {0, 3} and found.of(1) == set()


def test_what_is_known_is_known_after_a_restart(tmp_path):
    before = Disputes(Store(tmp_path))
    before.between(0, 1)
    before.between(2, 0)
    before.prove(4)
    after = Disputes(Store(tmp_path))
    assert after.left_out == before.left_out == {0, 4}
    assert after.of(1) == before.of(1)
    after.between(1, 3)
    after.between(1, 2)
    assert Disputes(Store(tmp_path)).left_out == after.left_out and 1 in after.left_out
