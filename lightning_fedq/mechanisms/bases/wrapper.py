"""Base of mechanisms that wrap another mechanism and hand most of the interface on to it."""

from abc import update_abstractmethods
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.mechanisms.interface.basics import MechanismBasics
from lightning_fedq.wire.coding import Code

OWN_NAMES = frozenset(
    {
        "core",  # defines the inner round
        *("encode", "decode", "claims", "claims_about"),  # with an assumption, or a unit, of the wrapper
        *("grid", "noise_variance", "mean_error", "longest_update", "clipping_range", "influence"),
        *("range_rule", "clips_norm", "has_central_noise"),  # about the range, the clip and noise of a round
        *("level", "with_level", "without_noise", "example"),  # about the parameters of the wrapper
        *("code", "worst_pair"),
    }
)
"""Names that mean the wrapper: they are in its own units, about its own parameters, or keep their default."""


@dataclass(frozen=True)
class Wrapper(Mechanism):
    """Mechanism around `mechanism`, which encodes and decodes the round that `core` returns.

    Every public name of `Mechanism` reads that of the wrapped mechanism, for its own round, except those in
    `OWN_NAMES`. A subclass must define `core`, and every own name whose value is in units of the update.
    """

    mechanism: Mechanism

    def _inner(self, context: RoundContext) -> RoundContext:
        """Return the round as the wrapped mechanism sees it."""
        return self.core(context)[1]

    def code(self, context: RoundContext) -> Code:
        return self.mechanism.code(self._inner(context))

    def with_level(self, level: float, context: RoundContext, max_dropped_clients: int) -> Mechanism:
        # sets the level of the wrapped mechanism, in its own round
        inner = self.mechanism.with_level(level, self._inner(context), max_dropped_clients)
        return replace(self, mechanism=inner)

    def without_noise(self, context: RoundContext) -> Mechanism:
        return replace(self, mechanism=self.mechanism.without_noise(self._inner(context)))


def _forwarded(name: str) -> Any:
    """Return the property or the method `name` of the wrapped mechanism."""
    declared = getattr(Mechanism, name, None)
    if not callable(declared):  # a flag or a property
        return property(lambda self: getattr(self.mechanism, name), doc=f"`{name}` of the wrapped mechanism.")

    @wraps(declared)
    def method(self: Wrapper, *arguments: Any, **named: Any) -> Any:
        def inner(value: Any) -> Any:
            return self._inner(value) if isinstance(value, RoundContext) else value

        own = getattr(self.mechanism, name)
        return own(*map(inner, arguments), **{key: inner(value) for key, value in named.items()})

    return method


def public_names() -> list[str]:
    """Return the names of the mechanism interface."""
    declared = {*dir(Mechanism), *MechanismBasics.__annotations__}
    return sorted(name for name in declared if not name.startswith("_"))


for _name in public_names():
    if _name not in OWN_NAMES:
        setattr(Wrapper, _name, _forwarded(_name))
update_abstractmethods(Wrapper)  # type: ignore[type-abstract]
