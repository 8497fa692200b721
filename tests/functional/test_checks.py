import math

import pytest

import lightning_fedq as fedq
from lightning_fedq.functional.checks import check_positive


def test_positive_numbers_pass():
    check_positive(sigma=1e-100, epsilon=1e100, rounds=1)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_the_first_other_number_is_named(value):
    with pytest.raises(ValueError, match=f"epsilon must be > 0 and finite, got {value}"):
        check_positive(sigma=1.0, epsilon=value, delta=-1.0)


@pytest.mark.parametrize("value", [1e-200, 5e-324, 1e200])
def test_numbers_without_a_square_are_refused(value):
    with pytest.raises(ValueError, match=r"clip_norm must be in \[1e-100, 1e\+100\], .*. Take another unit"):
        check_positive(clip_norm=value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fedq.SecAgg(max_dropped_fraction="0.1"),
            "max_dropped_fraction of SecAgg must be a number or None, got '0.1'",
        ),
        (lambda: fedq.SecAgg(active="yes"), "active of SecAgg must be True or False, got 'yes'"),
        (
            lambda: fedq.Dirichlet("0.3"),
            r"alpha of Dirichlet must be a number, got '0.3' \(str\); write it without",
        ),
        (lambda: fedq.LabelShards(2.0), r"shards_per_client of LabelShards .* got 2.0 \(float\); 2 will do"),
        (lambda: fedq.FixedRange(None), "radius of FixedRange must be a number, got None"),
        (lambda: fedq.PreviousMinMax(margin="1.1"), "margin of PreviousMinMax must be a number"),
        (lambda: fedq.AdaptiveRange(growth="2"), "growth of AdaptiveRange must be a number"),
        (
            lambda: fedq.RobustAggregation("krum", num_byzantine=1.5),
            "num_byzantine of RobustAggregation must be an",
        ),
    ],
)
def test_what_stands_around_a_mechanism_is_held_to_its_annotations(make, words):
    with pytest.raises(TypeError, match=words):
        make()
