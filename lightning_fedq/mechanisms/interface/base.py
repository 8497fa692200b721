"""The interface of a mechanism: two methods that run, one that says what is sent, one that promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_fields
from lightning_fedq.mechanisms.interface.claims import Adversary, Neighbours, PrivacyClaim
from lightning_fedq.mechanisms.interface.context import Message, RoundContext

if TYPE_CHECKING:
    from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
    from lightning_fedq.mechanisms.interface.ranges import RangeRule
    from lightning_fedq.wire.coding import Code


class Mechanism(ABC):
    """Compression and privacy mechanism: updates to integers, integers of many clients to their sum.

    Children are frozen dataclasses of parameters. `decode` is handed `PublicRandomness` only, so
    that the type says what the server knows; `encode` may also use what the client shares with its
    peers and its own private coins.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Have the parameters checked before a child's own `__post_init__` looks at them."""
        super().__init_subclass__(**options)
        if (own := vars(cls).get("__post_init__")) is None:
            return

        @wraps(own)
        def checked(self: Mechanism, *args: Any) -> None:
            check_fields(self)
            own(self, *args)

        cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Refuse parameters of another kind than their annotations say, see `check_fields`."""
        check_fields(self)

    def __getattr__(self, name: str) -> Any:
        """Say where a mechanism belongs when a Trainer asks it for a callback's hook.

        Raises:
            TypeError: If `name` is a hook of Lightning's callbacks, with the line that works.
            AttributeError: If there is no such attribute.
        """
        if name in ("setup", "state_key") or name.startswith("on_"):
            raise self._misplaced("callback")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __ne__(self, other: object) -> bool:
        """Say where a mechanism belongs when a Trainer asks whether its `strategy` is other than "auto".

        Raises:
            TypeError: If `other` is "auto", with the line that works.
        """
        if isinstance(other, str) and other == "auto":
            raise self._misplaced("strategy")
        return not self == other

    def _misplaced(self, place: str) -> TypeError:
        return TypeError(
            f"{type(self).__name__} is a mechanism and no {place}; Federated is the callback that takes it: "
            f"Trainer(callbacks=[Federated({self!r}, num_clients=...)])"
        )

    homomorphic: ClassVar[bool]
    """May `decode` be given the sum of several clients' symbols?"""
    fixed_cohort: ClassVar[bool] = False
    """Is the noise shared out over the whole cohort in advance? Then a client that did not answer counts as
    one that sent zeros, so that the law of the noise stays what it was, and weights are refused."""
    hands_on: ClassVar[bool] = False
    """Do clients take back noise of the round before? Then each is told whose (`RoundContext.hand_over`), and
    shares a key with that client and with the one who comes after it."""
    alike_clients: ClassVar[bool] = False
    """Does what is released depend on who takes part through updates only, given all that outsiders know? A
    secret draw of the cohort then amplifies. False where it is not shown, and where streams that everybody
    knows are a client's own (codewords, dithers): they tell who was drawn."""
    noise_of_adder: ClassVar[bool] = False
    """Is all noise that of a trusted adder, Gaussian and isotropic, in a sum that `decode` alone depends on,
    and does neither follow who has sent? Then clients may draw for themselves whether they take part."""
    clips_norm: ClassVar[bool] = False
    """Does `encode` hold every update to the l2 norm `clip_norm`, do claims rest on that alone, and is noise
    measured in it? Then `AdaptiveClip` may move it."""
    level: ClassVar[Literal["epsilon", "noise_multiplier"] | None] = None
    """Free privacy parameter, which a target sets. Another `with_level` where more goes with it."""
    unbiased: ClassVar[bool] = True
    """Is the decoded sum right on average, for updates inside the range? One that is not tests its bias."""

    @property
    def joint(self) -> bool:
        """Must `decode` see the whole cohort at once, because it is no sum (a vote, a threshold)?"""
        return False

    @property
    def separation(self) -> int:
        """Rounds from one of a client to its next that claims count on, where noise is correlated over
        rounds. The server begins with fresh noise (`RoundContext.since`) where somebody comes back earlier.
        """
        return 1

    @property
    def range_rule(self) -> RangeRule | None:
        """Rule for the radius of a round, where the mechanism brings its own, which reads the plain mean."""
        return None

    def core(self, context: RoundContext) -> tuple[Mechanism, RoundContext, float]:
        """Decoder of a round's messages: the mechanism, the round as it sees it, and its unit.

        Itself, unless a mechanism stands around another. That one then may have coordinates behind those of
        an update, for `range_rule`; its sum, rounded to its grid, times the unit is in units of the update.
        """
        return self, context, 1.0

    def tolerated_dropouts(self, context: RoundContext) -> int | None:
        """Most clients that may stay silent before the claims about the aggregate are void.

        A round with more is aborted. None where claims never rest on a number of answers, or where
        the report itself works dropouts into them.
        """
        return None

    @property
    def order_free(self) -> bool:
        """Is the decoded sum the same in whatever parts messages come, as one of integers is? Then those of
        clients that train one at a time are decoded together."""
        return self.homomorphic

    @abstractmethod
    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """Encode one client's update `(dim,)` or a stack `(clients, dim)`, in the order of `rand.clients`.

        Finite floats in any range, on the CPU as all tensors here; what lies outside `context`'s range is
        clipped and counted.
        """

    @abstractmethod
    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """Estimate the sum of the updates of `clients`.

        Args:
            symbols: `(len(clients), m)`, one message a row; if homomorphic, their sum `(m,)` too.
            clients: Clients that sent them, in that order; those that dropped out are missing.

        Returns:
            `(dim,)` float32, or float64, in units of the update. Where there is a `grid`, only the whole sum
            rounded to it may leave the server.

        Raises:
            ValueError: If a message has the wrong length, or holds a symbol that is never sent.
        """

    @abstractmethod
    def code(self, context: RoundContext) -> Code:
        """Return the code that turns one client's symbols into the bits on the wire."""

    def num_symbols(self, context: RoundContext) -> int:
        """Length of a message, in symbols, which a server must know to read one: one a coordinate unless
        padded, cut into blocks, or otherwise arranged."""
        modular = self.symbol_modulus(context)
        return context.dim if modular is None else modular[1]

    def message_code(self, client: int, context: RoundContext, rand: PublicRandomness) -> Code:
        """Return the code of one client's message, which may condition on what it shares with the server.

        `Message.num_bits` is the length of this code's streams; `code` unless a mechanism has a better one.
        """
        return self.code(context)

    @abstractmethod
    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return exactly one claim per `Adversary`, for one round."""

    def grid(self, context: RoundContext) -> float | None:
        """Public grid, in units of the update, that the decoded sum of all clients is rounded to before it is
        released, so that the low bits of floats say nothing; None where symbols lie on a grid already."""
        return None

    def symbol_range(
        self, context: RoundContext, rand: PublicRandomness
    ) -> tuple[int | Tensor, int | Tensor] | None:
        """Smallest and largest symbol, for all or `(m,)`, that `encode` can give whatever the update.

        Secure aggregation takes its moduli from it; None where a fixed-length `code` says it all.
        """
        return None

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        """Can one client's `encode` give these symbols `(m,)`, for any update? Servers refuse all others.

        By `symbol_range`, unless a mechanism can say more of a client whose shared randomness is known.
        """
        if (bounds := self.symbol_range(context, rand)) is None:
            return True
        low, high = (torch.as_tensor(bound) for bound in bounds)
        return not bool(((symbols < low) | (symbols > high)).any())

    def symbol_modulus(self, context: RoundContext) -> tuple[int, int] | None:
        """Modulus and number of symbols, where symbols are residues and `decode` takes their modular sum."""
        return None

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor | None:
        """Public upper bound on the variance of one coordinate of the decoded mean, per segment.

        Args:
            clients: Clients that answered; at least one.

        Returns:
            `(len(segments),)` float64 in squared units of the update, or None where it depends on
            the data in a way that has no useful bound.
        """
        return None

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float | None:
        """Expected squared error of the decoded mean, summed over coordinates, for planning a run.

        Args:
            num_clients: How many of the cohort answer, >= 1.
            homogeneity: |mean update|^2 over the mean |update|^2, in (0, 1].

        Returns:
            In squared units of the update; from `noise_variance` where no more is known, None without it.
        """
        variance = self.noise_variance(context, context.cohort[:num_clients])
        if variance is None:
            return None
        return float(variance @ torch.tensor(context.segments, dtype=torch.float64))

    def num_sent(self, dim: int) -> int | None:
        """Coordinates that the server gets of an update, where they are the largest. None: all.

        Args:
            dim: Coordinates of an update.
        """
        return None

    def longest_update(self, dim: int) -> float | None:
        """Largest l2 norm of an evenly spread update that is not shortened, for planning a run.

        Returns:
            In units of the update. None where coordinates are clipped, see `clipping_range`.
        """
        return None

    def clipping_range(self, context: RoundContext) -> tuple[Tensor, Tensor]:
        """Centre around which values are clipped, and how far coordinates may lie from it, by segment.

        Returns:
            `(len(segments),)` each. No distance counts where the norm is clipped, see `longest_update`.
        """
        whole = self.longest_update(context.dim) is not None
        return (torch.zeros_like(context.center) if whole else context.center), context.radius

    @property
    def covers_shorter(self) -> bool:
        """Does a round cost the more, the longer the vector, so that its charge covers shorter vectors?

        Accounts let every charge count as one of the longest vector. Where that is not so, the length of the
        vector can't change while a ledger lives.
        """
        return True

    @property
    def gaussian_error(self) -> bool:
        """Is the error of the decoded mean exactly Gaussian (or zero), its variance `noise_variance`?"""
        return False

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Sizes of the groups of a cohort that share peer randomness: pairs, and clients alone.

        They sum to `num_clients`. Keys are agreed in pairs.

        Raises:
            ValueError: If the mechanism can't serve a cohort of this size.
        """
        return (1,) * num_clients

    # ---- a target in place of a knob ------------------------------------------------------------------

    def with_level(self, level: float, context: RoundContext, max_dropped: int) -> Mechanism:
        """The mechanism with its free privacy parameter set, so that a privacy target can look for it.

        Args:
            level: > 0, larger is less private: the epsilon of a unit, or one over a noise multiplier.
            context: A round of the run: cohort, dimension.
            max_dropped: Dropouts that noise which is shared out over the cohort has to allow for.

        Raises:
            ValueError: If there is no such parameter, or it can't be set so.
        """
        if self.level is None:
            raise ValueError(
                f"{type(self).__name__} has no privacy parameter that a target could set; "
                "leave the target out"
            )
        value = level if self.level == "epsilon" else 1.0 / level
        return replace(self, **{self.level: value})  # type: ignore[type-var]

    @classmethod
    def example(cls) -> Mechanism | None:
        """Settings that tables, audits and plans show the class by. None takes usual values.

        Usual values are those of `fedq mechanisms` for parameters without a default: epsilon 1, clip_norm 1
        and so on. A class with other parameters gives an instance.
        """
        return None

    @classmethod
    def plan_settings(cls, params: int) -> Mapping[str, Mechanism] | None:
        """Settings that `fedq plan` ranks, by name, for updates of l2 norm 1. A target sets one.

        None takes the settings of tables, if a target can set one of them and `decode` is no vote (`joint`).

        Args:
            params: Parameters of the model, for what clips in another norm.
        """
        return None

    # ---- how it is attacked, and what helps -----------------------------------------------------------

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        """Settings in which the audit attacks these claims. Itself, unless claims are about whole vectors.

        A claim about a whole vector is attacked twice: with so little noise that one of `dim` coordinates,
        which holds its share of the difference, is about as private as single coordinates usually are; and
        with the whole difference in one coordinate.

        Args:
            dim: Coordinates of the cases that are not `concentrated`.
        """
        return (AuditCase(self),)

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        """Two neighbouring updates of one client, `(dim,)` float64 each, that are hard to tell apart safely.

        Far outside the range on both sides in every coordinate; far outside and zero where a claim is about
        zeroing out. A mechanism that rotates by public randomness returns what its rotation turns into its
        worst case, one that sends some coordinates only may leave the others alike.

        Args:
            client: Client whose update is replaced.
            public: The streams that the adversary of the claim holds. In place of those that it does not
                hold there are streams of other keys, so a pair that follows them meets nothing.
        """
        neighbours = {claim.neighbours for claim in self.claims(context)}
        center, reach = context.expand(context.center), 4.0 * context.expand(context.radius)
        if neighbours == {Neighbours.SUBSTITUTION}:
            return center + reach, center - reach
        return center + reach, torch.zeros_like(reach)

    def lever(self, client: int, context: RoundContext) -> float | None:
        """Most that one message adds to the decoded sum, over the largest update that is not clipped.

        Of all symbols that a server accepts, whoever chose them: what one liar moves where an honest client
        moves 1. Per coordinate where coordinates are clipped, in the norm that is clipped where whole updates
        are. Infinite where a message can say any number; None where no bound is known before the round.
        """
        return None

    def without_noise(self, context: RoundContext) -> Mechanism:
        """The mechanism as a Byzantine client runs it, without the coin that makes its messages private.

        Raises:
            ValueError: If there is no coin that could be left out alone.
        """
        raise ValueError(
            f"{type(self).__name__} has no coin that a Byzantine client could skip; use inverted"
        )

    def advice(self, claim: PrivacyClaim) -> str:
        """Advice that would lower the loss of one of the claims, a few words for the privacy report."""
        single = (Adversary.EAVESDROPPER, Adversary.SERVER, Adversary.SERVER_AND_PARTNER)
        if self.homomorphic and claim.adversary in single:
            return (
                "more noise or fewer rounds; with secure aggregation the row of the server behind it counts"
            )
        return "more noise or fewer rounds"

    # ---- clients that are protected differently -------------------------------------------------------

    def protection_groups(self, num_clients: int) -> tuple[tuple[int, ...], ...]:
        """The whole population, 0 to `num_clients` - 1, in groups that `claims_about` treats alike.

        Raises:
            ValueError: If the mechanism can't serve such a population.
        """
        return (tuple(range(num_clients)),)

    def claims_about(self, client: int, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Exactly one claim per `Adversary`, for one round in which this client takes part.

        `claims`, which holds for every client of the population, unless clients are protected differently.
        """
        return self.claims(context)


@dataclass(frozen=True)
class AuditCase:
    """One setting in which the claims of a mechanism are attacked.

    Args:
        concentrated: Does the whole difference lie in one coordinate of very few, so that one encoding is one
            draw? Else every coordinate is a draw.
        title: What tells the case from others of the same mechanism, in a few words.
        num_clients: Size of the cohort; None is three or four, or more where groups are larger.
        num_dropped: How many of the cohort, the last ones, never answer.
        everybody: Is every client attacked at once, in a cohort of very few coordinates? For a mechanism that
            promises the same of each message, whoever else is there, and sends one symbol.
        to_center: Is the pair an end of the range and its centre, in place of both ends? That is worse where
            what lies in the middle is coupled.
        only_sums: Does it differ from the mechanism's other cases in what is claimed about sums alone?
        dropout_probability: Chance that a client does not answer a round; claims about sums are then those of
            the privacy report.
        min_survivors: Clients that confirm a sum behind an active secure aggregation; all others are left
            out, the last ones, and the claims are those of the privacy report.
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
        """Settings in which clients are missing and the report works that into the claims about sums.

        Each client of eight drops out with a chance of 1/5; and six of eight confirm, the two that a lying
        server leaves out are the last ones, which work alone where others work in groups.
        """
        among = replace(self, num_clients=8, only_sums=True)
        return (
            replace(among, title="clients drop out", dropout_probability=0.2),
            replace(among, title="an active server", min_survivors=6),
        )
