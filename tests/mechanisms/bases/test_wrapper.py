"""A wrapper hands on every name of the interface, or has it itself: none can be forgotten."""

from dataclasses import dataclass

import pytest

import lightning_fedq as fedq
from lightning_fedq.mechanisms.bases.wrapper import OWN_NAMES, Wrapper, public_names
from tests.one_round import make_context

IN_UNITS = {"encode", "decode", "grid", "noise_variance", "mean_error", "longest_update", "influence"}
"""Names whose values are in units of the update, or contain updates."""


def test_every_name_is_forwarded_or_own():
    """A new name of the interface is forwarded; if its value is in units of the update, it belongs here."""
    names = set(public_names())
    assert names >= OWN_NAMES and IN_UNITS <= OWN_NAMES
    assert {name for name in names if name in vars(Wrapper)} >= names - OWN_NAMES
    assert set(vars(fedq.AdaptiveClip)) >= IN_UNITS, "a wrapper with other units converts them"


@dataclass(frozen=True)
class Renamed(Wrapper):
    """The wrapped mechanism in a round with one coordinate more."""

    def core(self, context):
        return self.mechanism, make_context(self.mechanism, context.cohort, (context.dim, 1)), 1.0

    def encode(self, update, context, rand):
        return self.mechanism.encode(update, self._inner(context), rand)

    def decode(self, symbols, clients, context, rand):
        return self.mechanism.decode(symbols, clients, self._inner(context), rand)

    def claims(self, context):
        return self.mechanism.claims(self._inner(context))


@pytest.mark.parametrize(
    "inner",
    [fedq.LDPQ(1.0), fedq.RotatedCoins(1.0, 1.0), fedq.BandedGaussian(1.0, 1.0, 3), fedq.DRIVE()],
    ids=repr,
)
def test_flags_and_methods_are_those_of_the_wrapped_mechanism(inner):
    context = make_context(inner, range(4), (40,))
    wrapped, longer = Renamed(inner), make_context(inner, range(4), (40, 1))
    for name in ("homomorphic", "fixed_cohort", "unbiased", "joint", "separation", "price_grows_with_dim"):
        assert getattr(wrapped, name) == getattr(inner, name)
    assert wrapped.num_symbols(context=context) == inner.num_symbols(longer)
    assert wrapped.code(context) == inner.code(longer) and wrapped.group_sizes(4) == inner.group_sizes(4)
    assert wrapped.symbol_modulus(context) == inner.symbol_modulus(longer)
