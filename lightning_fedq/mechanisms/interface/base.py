"""Interface of a mechanism: `encode` and `decode` run it, `code` gives its bits, `claims` its privacy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_fields
from lightning_fedq.mechanisms.interface.claims import Adversary, Neighbours, PrivacyClaim
from lightning_fedq.mechanisms.interface.context import Message, RoundContext
from lightning_fedq.mechanisms.interface.old_names import MECHANISM_NAMES, refuse_old_names

if TYPE_CHECKING:
    from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
    from lightning_fedq.mechanisms.interface.ranges import RangeRule
    from lightning_fedq.wire.coding import Code


class Mechanism(ABC):
    """Compression and privacy mechanism: updates become integers, and integers of many clients their sum.

    Subclasses are frozen dataclasses of parameters. `decode` gets `PublicRandomness` only, so the type shows
    which randomness the server knows. `encode` may also use randomness that a client shares with its peers,
    and the client's private randomness.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Check parameters with `check_fields` before a subclass's own `__post_init__` reads them.

        Raises:
            TypeError: If the subclass defines a name that has another name since 0.3.0.
        """
        super().__init_subclass__(**options)
        refuse_old_names(cls, MECHANISM_NAMES)
        if (own := vars(cls).get("__post_init__")) is None:
            return

        @wraps(own)
        def checked(self: Mechanism, *args: Any) -> None:
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
    fixed_cohort: ClassVar[bool] = False
    """Whether the noise is divided among the whole cohort before the round.

    If so, a client that does not answer counts as a client that sent zeros, which keeps the distribution of
    the noise. Weights of clients are refused."""
    reuses_noise: ClassVar[bool] = False
    """Whether clients subtract noise that clients of the previous round added.

    If so, each client gets its predecessor and its successor (`RoundContext.hand_over`), and shares a key
    with each of the two."""
    has_exchangeable_clients: ClassVar[bool] = False
    """Whether the released sum depends on the members of the cohort through their updates only.

    If so, a secret draw of the cohort amplifies privacy. False if this is not proven, and if each client has
    its own public streams (codewords, dithers), because these streams reveal the members."""
    has_central_noise: ClassVar[bool] = False
    """Whether a trusted party adds all noise, Gaussian and isotropic, to a sum that determines `decode`.

    Neither the noise nor `decode` may depend on which clients sent messages. Clients may then draw for
    themselves whether they take part. The proof of `PoissonGaussianLoss` needs a claim whose sensitivity is
    twice the longest update."""
    clips_norm: ClassVar[bool] = False
    """Whether `encode` clips every update to the l2 norm `clip_norm`, so that `AdaptiveClip` may change it.

    Claims must rest on this bound alone, and the noise must be measured in units of it."""
    level: ClassVar[str | None] = None
    """Name of the privacy parameter that a target sets: an epsilon, or `noise_multiplier`.

    Override `with_level` if others change with it."""
    unbiased: ClassVar[bool] = True
    """Whether the decoded sum is unbiased for updates inside the range. Biased mechanisms test their bias."""

    @property
    def joint(self) -> bool:
        """Whether `decode` needs the whole cohort at once, because it is not a sum (a vote, a threshold)."""
        return False

    @property
    def separation(self) -> int:
        """Fewest rounds between two participations of a client that the claims assume.

        It is above 1 for noise that is correlated over rounds. If a client comes back earlier, the server
        restarts with fresh noise (`RoundContext.since`).
        """
        return 1

    @property
    def range_rule(self) -> RangeRule | None:
        """Mechanism's own rule for the radius of a round, computed from the plain mean, or None."""
        return None

    def core(self, context: RoundContext) -> tuple[Mechanism, RoundContext, float]:
        """Return the decoder of a round's messages: its mechanism, the round as it sees it, and its unit.

        This is the mechanism itself, unless it wraps another mechanism. A wrapped mechanism may have more
        coordinates than an update, behind the update's, for `range_rule`. Its sum, rounded to its grid and
        multiplied by the unit, is in units of the update.
        """
        return self, context, 1.0

    def tolerated_dropouts(self, context: RoundContext) -> int | None:
        """Return how many clients may drop out before the claims about the sum are void.

        A round with more dropouts is aborted. None if no claim depends on the number of answers, or if the
        privacy report itself accounts for dropouts.
        """
        return None

    @property
    def order_free(self) -> bool:
        """Whether the decoded sum does not depend on how messages are grouped, as a sum of integers does not.

        Messages of clients that train one at a time are then decoded together.
        """
        return self.homomorphic

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
        modular = self.symbol_modulus(context)
        return context.dim if modular is None else modular[1]

    def message_code(self, client: int, context: RoundContext, rand: PublicRandomness) -> Code:
        """Return the code of one client's message, which may depend on its randomness shared with the server.

        `Message.num_bits` is the length of this code's bitstreams. The default is `code`.
        """
        return self.code(context)

    @abstractmethod
    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return exactly one claim per `Adversary`, for one round."""

    def grid(self, context: RoundContext) -> float | None:
        """Return the public grid, in units of the update, to which the released sum is rounded.

        Rounding removes the low bits of floats, which could reveal updates. None if symbols are on a grid
        already.
        """
        return None

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

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        """Return whether one client's `encode` can give these symbols `(m,)` for any update.

        Servers refuse other symbols.

        The default compares with `symbol_range`. A mechanism can be stricter if it knows the client's shared
        randomness.
        """
        if (bounds := self.symbol_range(context, rand)) is None:
            return True
        low, high = (torch.as_tensor(bound) for bound in bounds)
        return not bool(((symbols < low) | (symbols > high)).any())

    def symbol_modulus(self, context: RoundContext) -> tuple[int, int] | None:
        """Return (modulus, number of symbols) if symbols are residues and `decode` takes their sum."""
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

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float | None:
        """Return the expected squared error of the decoded mean, summed over coordinates, for planning a run.

        Args:
            context: Public facts of a round.
            num_clients: Number of clients of the cohort that answer, >= 1.
            homogeneity: |mean update|^2 over the mean |update|^2, in (0, 1].

        Returns:
            Error in squared units of the update. The default is computed from `noise_variance`, and None
            without it.
        """
        variance = self.noise_variance(context, context.cohort[:num_clients])
        if variance is None:
            return None
        return float(variance @ torch.tensor(context.segments, dtype=torch.float64))

    def num_sent(self, dim: int) -> int | None:
        """Return how many of an update's largest coordinates clients send. None: all coordinates.

        Args:
            dim: Number of coordinates of an update.
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

    @property
    def price_grows_with_dim(self) -> bool:
        """Whether a round for a longer vector costs at least as much privacy as one for a shorter vector.

        Accountants charge every round for the longest vector. If this does not cover shorter vectors, the
        length of the vector can't change during the life of a ledger.
        """
        return True

    @property
    def gaussian_error(self) -> bool:
        """Whether the decoded mean's error is exactly Gaussian (or zero) with variance `noise_variance`."""
        return False

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Return the sizes of the groups of a cohort that share peer randomness: pairs, and unpaired clients.

        The sizes sum to `num_clients`. Keys are agreed in pairs.

        Raises:
            ValueError: If the mechanism can't serve a cohort of this size.
        """
        return (1,) * num_clients

    # ---- calibrating the noise to a target epsilon ----------------------------------------------------

    def with_level(self, level: float, context: RoundContext, max_dropped_clients: int) -> Mechanism:
        """Return the mechanism with its free privacy parameter set, for the search of a privacy target.

        Args:
            level: Epsilon of a unit, or one over a noise multiplier, > 0. Larger is less private.
            context: A round of the run, for cohort size and dimension.
            max_dropped_clients: Dropouts for which noise that is divided among the cohort has to allow.

        Raises:
            ValueError: If there is no such parameter, or it can't take this value.
        """
        if self.level is None:
            raise ValueError(
                f"{type(self).__name__} has no privacy parameter that a target could set. "
                "Leave the target out."
            )
        value = 1.0 / level if self.level == "noise_multiplier" else level
        return replace(self, **{self.level: value})  # type: ignore[type-var]

    @classmethod
    def example(cls) -> Mechanism | None:
        """Return the settings with which tables, audits and plans show the class. None takes usual values.

        Usual values are those of `fedq mechanisms` for parameters without a default, for example epsilon 1
        and clip_norm 1. A class with other parameters returns an instance.
        """
        return None

    @classmethod
    def plan_settings(cls, params: int) -> Mapping[str, Mechanism] | None:
        """Return the settings that `fedq plan` ranks, by name, for updates of l2 norm 1.

        A target sets the level.

        Args:
            params: Number of parameters of the model, for mechanisms that clip in another norm.

        Returns:
            Mechanisms by name. None takes the settings of the tables, if a target can set their level and
            `decode` is no vote (`joint`).
        """
        return None

    # ---- attacks on the claims, and advice ------------------------------------------------------------

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        """Return the settings in which the audit attacks the claims. The default is the mechanism itself.

        A claim about a whole vector is attacked twice. In the first case the noise is so small that one of
        `dim` coordinates, with its share of the difference, is about as private as single coordinates usually
        are. In the second case the whole difference is in one coordinate.

        Args:
            dim: Number of coordinates in cases that are not `concentrated`.
        """
        return (AuditCase(self),)

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        """Return two neighbouring updates of one client that are hard to protect, `(dim,)` float64 each.

        The default is far outside the range on both sides in every coordinate. If a claim is about zeroing
        out, the second update is zero. A mechanism that rotates by public randomness returns the updates that
        its rotation turns into its worst case. A mechanism that sends some coordinates only may leave the
        others equal.

        Args:
            client: Client whose update is replaced.
            context: Public facts of the round.
            public: Streams that the adversary of the claim knows. Other streams come from other keys, so a
                pair that is built on them has no effect.
        """
        neighbours = {claim.neighbours for claim in self.claims(context)}
        center, reach = context.expand(context.center), 4.0 * context.expand(context.radius)
        if neighbours == {Neighbours.SUBSTITUTION}:
            return center + reach, center - reach
        return center + reach, torch.zeros_like(reach)

    def influence(self, client: int, context: RoundContext) -> float | None:
        """Return the maximum influence of one client: the largest message over the largest unclipped update.

        It covers every message that a server accepts, including messages of Byzantine clients. An honest
        client has influence 1. It is measured per coordinate if coordinates are clipped, and in the clipped
        norm if whole updates are clipped.

        Returns:
            Influence, at least 1. Infinite if a message can encode any number. None if no bound is known
            before the round.
        """
        return None

    def without_noise(self, context: RoundContext) -> Mechanism:
        """Return the mechanism without the noise that makes messages private, as Byzantine clients run it.

        Raises:
            ValueError: If the noise can't be left out alone.
        """
        raise ValueError(
            f"{type(self).__name__} has no noise that a Byzantine client could leave out. "
            "Use the attack inverted."
        )

    def advice(self, claim: PrivacyClaim) -> str:
        """Return a few words for the privacy report: what would lower the loss of one of the claims."""
        single = (Adversary.EAVESDROPPER, Adversary.SERVER, Adversary.SERVER_AND_PARTNER)
        if self.homomorphic and claim.adversary in single:
            return (
                "more noise or fewer rounds, or secure aggregation, with which the row of its server counts"
            )
        return "more noise or fewer rounds"

    # ---- clients with different protection ------------------------------------------------------------

    def protection_groups(self, num_clients: int) -> tuple[tuple[int, ...], ...]:
        """Return the whole population, 0 to `num_clients` - 1, in groups that have the same `claims_about`.

        Raises:
            ValueError: If the mechanism can't serve such a population.
        """
        return (tuple(range(num_clients)),)

    def claims_about(self, client: int, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return exactly one claim per `Adversary`, for one round in which this client takes part.

        The default is `claims`, which holds for every client of the population.
        """
        return self.claims(context)


@dataclass(frozen=True)
class AuditCase:
    """One setting in which the audit attacks the claims of a mechanism.

    Args:
        mechanism: Mechanism with the settings of this case.
        concentrated: Whether the whole difference is in one of very few coordinates, so that one encoding is
            one draw. Otherwise every coordinate is a draw.
        title: Name that distinguishes the case from others of the same mechanism, in a few words.
        num_clients: Size of the cohort. None takes three or four, or more if groups are larger.
        num_dropped: Number of clients at the end of the cohort that never answer.
        everybody: Whether every client is attacked at once, in a cohort of very few coordinates. For
            mechanisms that send one symbol and claim the same about each message, whatever the other clients
            do.
        to_center: Whether the pair is an end of the range and its centre instead of both ends. This is worse
            if values in the middle are coupled.
        only_sums: Whether only the claims about sums differ from the mechanism's other cases.
        dropout_probability: Probability that a client does not answer a round. The claims about sums are then
            those of the privacy report.
        min_survivors: Number of clients that confirm a sum with secure aggregation against an active server.
            All others, at the end of the cohort, are left out. The claims are those of the privacy report.
    """

    mechanism: Mechanism
    concentrated: bool = False
    title: str = ""
    num_clients: int | None = None
    num_dropped: int = 0
    everybody: bool = False
    to_center: bool = False
    only_sums: bool = False
    dropout_probability: float = 0.0
    min_survivors: int | None = None

    def without_clients(self) -> tuple[AuditCase, ...]:
        """Return cases with missing clients, which the privacy report includes in the claims about sums.

        In the first case each of eight clients drops out with probability 1/5. In the second case six of
        eight clients confirm. The two clients that a lying server leaves out are the last ones, which are
        unpaired if other clients are in groups.
        """
        among = replace(self, num_clients=8, only_sums=True)
        return (
            replace(among, title="clients drop out", dropout_probability=0.2),
            replace(among, title="an active server", min_survivors=6),
        )
