import pytest
import torch

from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PrivacyClaim, RoundContext

ONES = torch.ones(2, dtype=torch.float64)


def context(**changes):
    arguments = {"round": 0, "groups": ((3, 1), (2,)), "segments": (2, 3), "center": 0 * ONES, "radius": ONES}
    return RoundContext(**{**arguments, **changes})


def test_what_a_context_knows():
    ctx = context()
    assert ctx.dim == 5
    assert ctx.cohort == (1, 2, 3)
    assert ctx.place(1) == ((3, 1), 1)
    assert ctx.expand(torch.tensor([1.0, 2.0])).tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    with pytest.raises(KeyError):
        ctx.place(0)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"groups": ((1, 2), (2,))}, "one group only"),
        ({"segments": ()}, "segments must be non-empty"),
        ({"segments": (2, 0)}, "sizes >= 1"),
        ({"center": torch.zeros(3)}, "one value per segment"),
        ({"radius": torch.ones(1)}, "one value per segment"),
        ({"radius": torch.tensor([1.0, torch.nan])}, "must be finite"),
        ({"center": torch.tensor([1.0, torch.inf])}, "must be finite"),
        ({"radius": torch.tensor([1.0, 0.0])}, "radius must be at least 1e-300 in every segment, got 0.0"),
        ({"radius": 9.9e-301 * ONES}, "radius must be at least 1e-300 in every segment, got 9.9e-301"),
        ({"radius": 5e-324 * ONES}, "radius must be at least 1e-300 in every segment"),
    ],
)
def test_a_senseless_context_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        context(**changes)


def test_a_claim_composes_at_least_once():
    with pytest.raises(ValueError, match="compositions must be >= 1, got 0"):
        PrivacyClaim(Adversary.SERVER, NonPrivate("why"), 0)
