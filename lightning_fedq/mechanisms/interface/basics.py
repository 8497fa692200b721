"""Names of the interface that a new mechanism needs: `encode`, `decode`, `code` for bits, `claims`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_fields
from lightning_fedq.mechanisms.interface.context import Message, RoundContext

if TYPE_CHECKING:
    from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
    from lightning_fedq.mechanisms.interface.claims import PrivacyClaim
    from lightning_fedq.wire.coding import Code


class MechanismBasics(ABC):
    """The twelve names that most mechanisms consist of. Subclasses inherit from `Mechanism`, which has more.

    Subclasses are frozen dataclasses of parameters. `decode` gets `PublicRandomness` only, so the type shows
    which randomness the server knows. `encode` may also use randomness that a client shares with its peers,
    and the client's private randomness.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Check parameters with `check_fields` before a subclass's own `__post_init__` reads them."""
        super().__init_subclass__(**options)
        if (own := vars(cls).get("__post_init__")) is None:
            return

        @wraps(own)
        def checked(self: MechanismBasics, *args: Any) -> None:
            check_fields(self)
            own(self, *args)

        cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Refuse parameters whose types differ from their annotations, see `check_fields`."""
        check_fields(self)

    def __getattr__(self, name: str) -> Any:
        """Explain how to use a mechanism when a Trainer asks it for a callback's hook.

        Raises:
            TypeError: If `name` is a hook of Lightning's callbacks. The message has the line that works.
            AttributeError: If there is no such attribute.
        """
        if name in ("setup", "state_key") or name.startswith("on_"):
            raise self._misplaced("callback")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __ne__(self, other: object) -> bool:
        """Explain how to use a mechanism when a Trainer compares its `strategy` with "auto".

        Raises:
            TypeError: If `other` is "auto". The message has the line that works.
        """
        if isinstance(other, str) and other == "auto":
            raise self._misplaced("strategy")
        return not self == other

    def _misplaced(self, place: str) -> TypeError:
        return TypeError(
            f"{type(self).__name__} is a mechanism, not a {place}. Pass it to the callback Federated: "
            f"Trainer(callbacks=[Federated({self!r}, num_clients=...)])"
        )

    homomorphic: ClassVar[bool]
    """Whether `decode` also accepts the sum of several clients' symbols."""
    unbiased: ClassVar[bool] = True
    """Whether the decoded sum is unbiased for updates inside the range. Biased mechanisms test their bias."""
    level: ClassVar[str | None] = None
    """Name of the privacy parameter that a target sets: an epsilon, or `noise_multiplier`.

    Override `with_level` if others change with it."""

    @abstractmethod
    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """Encode one client's update `(dim,)` or a batch `(clients, dim)`, in the order of `rand.clients`.

        Args:
            update: Finite floats of any size, on the CPU. Values outside the round's range are clipped and
                counted.
            context: Public facts of the round.
            rand: Random streams of these clients.

        Returns:
            Integer symbols of each client and their number of bits.
        """

    @abstractmethod
    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """Estimate the sum of the updates of `clients`.

        Args:
            symbols: `(len(clients), m)`, one message a row. A homomorphic mechanism also takes their sum
                `(m,)`.
            clients: Clients that sent the messages, in the order of the rows, without clients that dropped
                out.
            context: Public facts of the round.
            rand: Random streams that the server knows.

        Returns:
            `(dim,)` float32 or float64, in units of the update. If there is a `grid`, only the whole sum
            rounded to it may leave the server.

        Raises:
            ValueError: If a message has the wrong length, or contains a symbol that no client can send.
        """

    @abstractmethod
    def code(self, context: RoundContext) -> Code:
        """Return the code that turns one client's symbols into bits."""

    def num_symbols(self, context: RoundContext) -> int:
        """Return the number of symbols of a message, which a server needs for reading it.

        It is one symbol per coordinate, unless a mechanism pads, cuts into blocks or rearranges the update.
        """
        return context.dim

    @abstractmethod
    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return exactly one claim per `Adversary`, for one round."""

    def symbol_range(
        self, context: RoundContext, rand: PublicRandomness
    ) -> tuple[int | Tensor, int | Tensor] | None:
        """Return the smallest and the largest symbol that `encode` can give for any update.

        Secure aggregation computes its moduli from this range.

        Returns:
            Two integers for all symbols, or two tensors `(m,)`. None if a fixed-length `code` implies the
            range.
        """
        return None

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor | None:
        """Return a public upper bound on the variance of one coordinate of the decoded mean, per segment.

        Args:
            context: Public facts of the round.
            clients: Clients that answered, at least one.

        Returns:
            `(len(segments),)` float64, in squared units of the update. None if the variance depends on the
            data and has no useful bound.
        """
        return None

    def longest_update(self, dim: int) -> float | None:
        """Return the largest l2 norm of an evenly spread update that is not clipped, for planning a run.

        Returns:
            Norm in units of the update. None if coordinates are clipped, see `clipping_range`.
        """
        return None

    def clipping_range(self, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Return centre and radius of the range that coordinates are clipped to, by segment.

        Returns:
            Two tensors `(len(segments),)`. The distance has no effect if the norm is clipped, see
            `longest_update`.
        """
        whole = self.longest_update(context.dim) is not None
        return (torch.zeros_like(context.center) if whole else context.center), context.radius
