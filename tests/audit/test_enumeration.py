"""Layer A: every word of short coins and pairs, counted as exact fractions."""

import pytest

from tests.audit.enumeration import enumerate_coin, enumerate_pair


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0])
def test_every_word_of_the_coin_is_as_specified(epsilon):
    assert enumerate_coin(epsilon, 8) == []


@pytest.mark.parametrize("shared_bits", range(7))
def test_every_word_of_a_pair_is_as_specified(shared_bits):
    assert enumerate_pair(1.0, shared_bits) == []
