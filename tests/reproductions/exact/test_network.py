"""The tree of section 4.1: what a link carries, and what it decodes to."""

from itertools import pairwise

import pytest

from reproductions.exact.network import exact_network


def test_sums_grow_by_a_bit_a_level_and_masked_links_not_at_all(tmp_path):
    found = exact_network((4, 16), runs=2, out=str(tmp_path / "run"))
    tree = [row for row in found["rows"] if row["leaves"] == 16]
    assert [row["links"] for row in tree] == [16, 8, 4, 2]
    bits = [row["summed_bits"] for row in tree]
    # a sum of two symbols has at most one binary digit more, which is two bits of Elias gamma's
    assert all(a < b <= a + 2.0 for a, b in pairwise(bits))
    assert bits[0] == tree[0]["passed_on_bits"] and tree[3]["passed_on_bits"] == pytest.approx(8 * bits[0])
    assert len({row["masked_bits"] for row in tree}) == 1
    assert found["claims"][0]["held"] is True  # the root's sum decodes as all messages do


@pytest.mark.parametrize("leaves", [2, 12])
def test_leaves_are_checked(leaves):
    with pytest.raises(ValueError, match=rf"leaves must be powers of two from 4 on, got \[{leaves}\]"):
        exact_network((leaves,))
