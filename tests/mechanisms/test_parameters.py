"""Parameters of another kind are refused when a mechanism is made, whatever the mechanism, with the cure."""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

import numpy as np
import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq.commands.mechanism_row import example
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.registry import installed

WRONG = {
    float: ["4", [1.0], True, torch.tensor(1.0), 1j],
    int: ["4", 5.5, 4.0, True, torch.tensor(4)],
    bool: ["no", 1, None],
}
"""Values that no parameter of the kind may take."""


def cases():
    for kind in installed().values():
        hints = get_type_hints(kind)
        for field in (each for each in fields(kind) if each.init):
            alternatives = get_args(hints[field.name]) or (hints[field.name],)
            for wanted in set(WRONG).intersection(alternatives):
                for value in WRONG[wanted]:
                    yield pytest.param(kind, field.name, value, id=f"{kind.__name__}-{field.name}-{value!r}")


@pytest.mark.parametrize(("kind", "name", "value"), list(cases()))
def test_no_parameter_takes_a_value_of_another_kind(kind, name, value):
    settings = vars(example(kind)) | {name: value}
    with pytest.raises(TypeError, match=f"{name} of {kind.__name__} must be ") as told:
        kind(**settings)
    assert repr(value) in str(told.value)


LEVEL, BITS = "epsilon_per_coordinate of LDPQ", "shared_bits of CorBin"
SCALAR, NUMBERS = "must be a number", "must be a number or a tuple of numbers"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fedq.LDPQ("4"), rf"{LEVEL} {SCALAR}, got '4' \(str\); write it without quotes"),
        (lambda: fedq.LDPQ(torch.tensor(1.0)), rf"{LEVEL} {SCALAR}, got tensor\(1.\) \(Tensor\); its .item"),
        (lambda: fedq.CorBin(1.0, 5.5), rf"{BITS} must be an integer or None, got 5.5 \(float\)$"),
        (lambda: fedq.CorBin(1.0, shared_bits=5.0), r"got 5.0 \(float\); 5 will do"),
        (lambda: fedq.CPA((1.0, "2"), epsilon_scope="bit"), rf"{NUMBERS}, got \(1.0, '2'\)"),
        (lambda: fedq.CPA([1.0], epsilon_scope="bit"), rf"{NUMBERS}, got \[1.0\] \(list\); a tuple"),
        (
            lambda: fedq.RotatedCoins(1.0, 1.0, paired=1),
            r"paired of RotatedCoins must be True or False, got 1 \(int",
        ),
    ],
)
def test_the_cure_is_told(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_numbers_of_numpy_become_pythons():
    """A checkpoint holds a mechanism as its `repr`, and `np.float64(1.0)` is no plain value there."""
    assert repr(fedq.LDPQ(np.linspace(0.5, 1.0, 2)[1])) == repr(fedq.LDPQ(1.0))
    assert repr(fedq.CorBin(np.float32(0.5), np.int64(3))) == repr(fedq.CorBin(0.5, 3))
    made, plain = (fedq.CPA(levels, epsilon_scope="bit") for levels in ((np.float64(2.0), 1.0), (2.0, 1.0)))
    assert repr(made) == repr(plain)
    assert repr(fedq.LDPQ(1)) == "LDPQ(epsilon_per_coordinate=1)", "what was recorded so before stays"


@dataclass(frozen=True)
class _Own(fedq.GaussianNoise):
    """With a check of its own that does not ask its base."""

    mode: Literal["a", "b"] = "a"

    def __post_init__(self):
        assert self.mode in "ab"


@dataclass(frozen=True)
class _Unreadable(fedq.LDPQ):
    """With an annotation that nobody can read: it is not checked, what is inherited is."""

    more: "NoSuchName | None" = None  # noqa: F821


def test_mechanisms_of_other_packages_are_checked_too():
    with pytest.raises(TypeError, match=r"clip_norm of _Own must be a number, got None$"):
        _Own(None, 1.0)
    with pytest.raises(ValueError, match="mode of _Own must be one of a, b, got 3"):
        _Own(1.0, 1.0, mode=3)
    with pytest.raises(TypeError, match="epsilon_per_coordinate of _Unreadable must be a number, got '1'"):
        _Unreadable("1")
    assert isinstance(_Unreadable(1.0, more=object()), Mechanism)


def test_huge_levels_of_a_coin_are_the_largest():
    assert fedq.LDPQ(1e300).coin == fedq.LDPQ(50.0).coin
