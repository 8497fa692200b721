import math

import pytest

from lightning_fedq.functional.checks import check_positive


def test_positive_numbers_pass():
    check_positive(sigma=1e-100, epsilon=1e100, rounds=1)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_the_first_other_number_is_named(value):
    with pytest.raises(ValueError, match=f"epsilon must be > 0 and finite, got {value}"):
        check_positive(sigma=1.0, epsilon=value, delta=-1.0)


@pytest.mark.parametrize("value", [1e-200, 5e-324, 1e200])
def test_numbers_without_a_square_are_refused(value):
    with pytest.raises(ValueError, match=r"clip_norm must be in \[1e-100, 1e\+100\], .*; take another unit"):
        check_positive(clip_norm=value)
