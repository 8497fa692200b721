"""The vocabulary: what a client sends, what a mechanism is, and what it promises to whom.

Everything here is a frozen value or an abstract method. State (ranges, error feedback, the
ledger) lives in `lightning_fedq.rounds`, randomness comes in as an argument, and the code that
adds claims up to an epsilon is in `lightning_fedq.privacy`, apart from the claims themselves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_fedq.functional.checks import check_fields
from lightning_fedq.privacy.losses import CoinSum as CoinSum
from lightning_fedq.privacy.losses import ConcentratedLoss as ConcentratedLoss
from lightning_fedq.privacy.losses import GaussianLoss as GaussianLoss
from lightning_fedq.privacy.losses import HiddenPair as HiddenPair
from lightning_fedq.privacy.losses import LaplaceLoss as LaplaceLoss
from lightning_fedq.privacy.losses import Loss as Loss
from lightning_fedq.privacy.losses import NonPrivate as NonPrivate
from lightning_fedq.privacy.losses import PmfPairs as PmfPairs
from lightning_fedq.privacy.losses import RenyiLoss as RenyiLoss
from lightning_fedq.privacy.losses import SampledGaussianLoss as SampledGaussianLoss

if TYPE_CHECKING:
    from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
    from lightning_fedq.wire.coding import Code


SMALLEST_RADIUS = 1e-300


@dataclass(frozen=True)
class HandOver:
    """Who takes back whose noise, where clients correlate theirs over rounds (`Mechanism.hands_on`). Public.

    Args:
        since: Round and attempt from which on rounds follow each other without a gap or a repetition.
        before: (client, predecessor) for clients of this round: whose noise of the round before they take
            back. Only predecessors whose message is in that round's sum.
        after: (client, successor) for clients of this round: who takes back their noise in the next one.

    Raises:
        ValueError: If somebody stands twice on one side.
    """

    since: tuple[int, int]
    before: tuple[tuple[int, int], ...] = ()
    after: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for pairs in (self.before, self.after):
            own, others = {client for client, _ in pairs}, {other for _, other in pairs}
            if len(own) != len(pairs) or len(others) != len(pairs):
                raise ValueError(
                    "noise is handed on from one client to one other, so each stands in one pair of a round; "
                    f"got {pairs[:10]}"
                )

    def check(self, round: int, attempt: int, members: frozenset[int]) -> None:
        """Refuse a hand-over that does not belong to a round.

        Raises:
            ValueError: With the cure.
        """
        first, _ = self.since
        repeated = round > first and attempt > 0
        if self.since > (round, attempt) or repeated or (round == first and self.since[1] != attempt):
            raise ValueError(
                f"round {round}, attempt {attempt} is no part of a block of rounds that begins with "
                f"{self.since}: noise that was handed on is taken back once, and a repeated or redrawn round "
                f"begins a new block, since=({round}, {attempt}) and no predecessors"
            )
        if self.before and round == first:
            raise ValueError(f"round {round} is the first of its block, so nobody has handed anything on yet")
        for client, other in (*self.before, *self.after):
            if client not in members or other in members:
                raise ValueError(
                    f"noise goes from a client of one round to one of the next, and client {client} with "
                    f"{other} are not one of this round's cohort and one of another; cohorts that take turns "
                    "(participation='cyclic') are disjoint"
                )


@dataclass(frozen=True)
class RoundContext:
    """Public facts of one round, known to everybody before the first client sends anything.

    Args:
        round: Round number, counted from 0.
        groups: The cohort, cut into the groups that share peer randomness. A pair is a group of
            two, a client on its own a group of one; the order inside a group gives each client's rank.
        segments: Length of each segment (layer) of the flat vector; they sum to `dim`.
        center: `(len(segments),)` float64, centre of each segment's range, in units of the update.
        radius: `(len(segments),)` float64, >= 1e-300, half-width of each segment's range, same units.
        attempt: 0, and one more for every repetition of the same round, so that no stream is
            ever used for two payloads.
        num_corrupt: Clients of the cohort that may tell a server behind secure aggregation all they know,
            their own coins and noise included; which ones is open.
        since: Round and attempt from which on the server's rounds follow each other without a gap or a
            repetition, which its own noise may count on (`Mechanism.separation`); None is this round. Clients
            are not told.
        hand_over: Pairs of clients that hand noise on, for mechanisms that ask (`Mechanism.hands_on`); None
            is a round by itself.

    Raises:
        ValueError: If a client stands in two groups, or shapes, radii or numbers make no sense.
    """

    round: int
    groups: tuple[tuple[int, ...], ...]
    segments: tuple[int, ...]
    center: Tensor
    radius: Tensor
    attempt: int = 0
    num_corrupt: int = 0
    since: tuple[int, int] | None = None
    hand_over: HandOver | None = None

    def __post_init__(self) -> None:
        clients = [client for group in self.groups for client in group]
        if len(set(clients)) != len(clients):
            raise ValueError(f"a client may stand in one group only, got groups {self.groups}")
        if any(size < 1 for size in self.segments) or not self.segments:
            raise ValueError(f"segments must be non-empty with sizes >= 1, got {self.segments}")
        expected = (len(self.segments),)
        if tuple(self.center.shape) != expected or tuple(self.radius.shape) != expected:
            raise ValueError(
                f"center and radius need one value per segment, shape {expected}, "
                f"got {tuple(self.center.shape)} and {tuple(self.radius.shape)}"
            )
        if not bool(torch.isfinite(self.center).all() and torch.isfinite(self.radius).all()):
            raise ValueError("center and radius must be finite; check the range rule and the global model")
        if not 0 <= self.num_corrupt <= len(clients):
            raise ValueError(
                f"num_corrupt must be in [0, cohort size = {len(clients)}], got {self.num_corrupt}"
            )
        if bool((self.radius.double() < SMALLEST_RADIUS).any()):  # float32 has no such number
            smallest = self.radius.min().item()
            raise ValueError(
                f"radius must be > 0 in every segment, {SMALLEST_RADIUS:g} at least, so that 1 / radius is a "
                f"number; got {smallest}; set a floor"
            )
        if self.hand_over is not None:
            self.hand_over.check(self.round, self.attempt, frozenset(clients))

    @cached_property
    def dim(self) -> int:
        """Number of coordinates of an update."""
        return sum(self.segments)

    @cached_property
    def cohort(self) -> tuple[int, ...]:
        """The clients of this round, sorted."""
        return tuple(sorted(client for group in self.groups for client in group))

    @cached_property
    def members(self) -> frozenset[int]:
        """The cohort as a set."""
        return frozenset(self.cohort)

    @cached_property
    def _places(self) -> dict[int, tuple[tuple[int, ...], int]]:
        return {client: (group, rank) for group in self.groups for rank, client in enumerate(group)}

    def place(self, client: int) -> tuple[tuple[int, ...], int]:
        """Return the client's group and its rank in that group.

        Raises:
            KeyError: If the client is not in this round's cohort.
        """
        return self._places[client]

    def expand(self, per_segment: Tensor) -> Tensor:
        """Repeat one value per segment to one value per coordinate, `(dim,)`."""
        sizes = torch.tensor(self.segments, device=per_segment.device)
        return per_segment.repeat_interleave(sizes, output_size=self.dim)


@dataclass(frozen=True)
class Message:
    """Integer symbols of one client or a stack, and their bits on the wire.

    Args:
        symbols: `(dim_on_the_wire,)` integers of one client, or `(clients, dim_on_the_wire)` of a
            stack. Summing over clients is meaningful iff the mechanism is homomorphic.
        num_bits: Total length of the clients' bitstreams, side information included.
        num_clipped: Coordinates that lay outside the declared range and were clipped. A diagnostic
            of the simulation: it is not sent, and it is not private.
    """

    symbols: Tensor
    num_bits: int
    num_clipped: int = 0


class Adversary(Enum):
    """Whom a claim is about: each member is a view of one round, worded for a reader."""

    EAVESDROPPER = "an eavesdropper on one client's uplink"
    SERVER = "the curious server that sees every message"
    SERVER_AND_PARTNER = "the server together with the client's partner (or leaked shared randomness)"
    CLIENT = "a curious client, with its own shared randomness and the released models"
    SECAGG_SERVER = "the server behind secure aggregation, which sees the sum only"
    OUTSIDER = "an outsider who sees only the released models"


class Neighbours(Enum):
    """Neighbouring relation: what may differ between the two worlds that the adversary tells apart."""

    SUBSTITUTION = "one client's update is replaced by any other"
    ZERO_OUT = "one client's update is replaced by zero"


class Unit(Enum):
    """Unit that one loss of a claim is about.

    A message is made of all units, a run of all messages.
    """

    COORDINATE = "coordinate"
    BLOCK = "block"
    MESSAGE = "message"


@dataclass(frozen=True)
class Slack:
    """Distance of a released law from the one that a claim describes, for any input.

    Accountants charge it.

    Args:
        distance: Total variation, >= 0, once `log_ratio` is set aside.
        log_ratio: Largest |ln| of the ratio of the two laws, >= 0.

    Raises:
        ValueError: If a value is negative or not finite.
    """

    distance: float = 0.0
    log_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {value}")


NO_SLACK = Slack()


@dataclass(frozen=True)
class PrivacyClaim:
    """One sentence of a privacy report: this loss, so many times a round, against this adversary.

    Args:
        adversary: The view that the claim is about.
        loss: Loss of one composition, worst case over inputs.
        compositions: How many times `loss` composes per client and round; `dim` for a
            mechanism that treats coordinates independently, 1 for a whole-vector mechanism.
        neighbours: The neighbouring relation.
        assumptions: What has to hold for the claim to be true, in words.
        unit_losses: How many of the losses one unit has a part in, >= 1.
        slack: How far what is released may be from the law that `loss` describes, over one round.
        unit: What the loss is about: one coordinate, one block of them, or the client's whole message.
    """

    adversary: Adversary
    loss: Loss
    compositions: int
    neighbours: Neighbours = Neighbours.SUBSTITUTION
    assumptions: tuple[str, ...] = field(default=())
    unit_losses: int = 1
    slack: Slack = NO_SLACK
    unit: Unit = Unit.MESSAGE

    def __post_init__(self) -> None:
        if self.compositions < 1:
            raise ValueError(f"compositions must be >= 1, got {self.compositions}")
        if not 1 <= self.unit_losses <= self.compositions:
            raise ValueError(
                f"unit_losses must be in [1, compositions = {self.compositions}], got {self.unit_losses}"
            )
        several = self.unit_losses != self.compositions and not isinstance(self.loss, NonPrivate)
        if self.unit is Unit.MESSAGE and several:
            raise ValueError(
                f"{self.compositions} losses make up a message, so one of them is of a smaller unit; "
                "say which: Unit.COORDINATE or Unit.BLOCK"
            )


class AbortedRoundError(Exception):
    """A round that can't be finished, and why. The model stays as it was and the charge stands."""


@dataclass(frozen=True)
class AuditCase:
    """One setting in which the claims of a mechanism are attacked.

    Args:
        mechanism: Mechanism with all its settings.
        concentrated: Does the whole difference lie in one coordinate of very few, so that one encoding is one
            draw? Else every coordinate is a draw.
        title: What tells the case from others of the same mechanism, in a few words.
        num_clients: Size of the cohort; None is three or four, or more where groups are larger.
        num_dropped: How many of the cohort, the last ones, never answer.
        enumerable: Is a symbol a function of one word, so that all words can be counted?
        everybody: Is every client attacked at once, in a cohort of very few coordinates? For a mechanism that
            promises the same of each message, whoever else is there, and sends one symbol.
        to_center: Is the pair an end of the range and its centre, in place of both ends? That is worse where
            what lies in the middle is coupled.
        only_sums: Does it differ from the mechanism's other cases in what is claimed about sums alone?
        dropout_probability: Chance that a client does not answer a round; claims about sums are then those of
            the privacy report.
        fewest_survivors: Clients that confirm a sum behind an active secure aggregation; all others are left
            out, the last ones, and the claims are those of the privacy report.
    """

    mechanism: Mechanism
    concentrated: bool = False
    title: str = ""
    num_clients: int | None = None
    num_dropped: int = 0
    enumerable: bool = False
    everybody: bool = False
    to_center: bool = False
    only_sums: bool = False
    dropout_probability: float = 0.0
    fewest_survivors: int | None = None

    def without_clients(self) -> tuple[AuditCase, ...]:
        """Settings in which clients are missing and the report works that into the claims about sums.

        Each client of eight drops out with a chance of 1/5; and six of eight confirm, the two that a lying
        server leaves out are the last ones, which work alone where others work in groups.
        """
        among = replace(self, num_clients=8, enumerable=False, only_sums=True)
        return (
            replace(among, title="clients drop out", dropout_probability=0.2),
            replace(among, title="an active server", fewest_survivors=6),
        )


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

    def tolerated_dropouts(self, context: RoundContext) -> int | None:
        """Most clients that may stay silent before the claims about the aggregate are void.

        A round with more is aborted. None where claims never rest on a number of answers, or where
        the report itself works dropouts into them.
        """
        return None

    @abstractmethod
    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """Encode one client's update `(dim,)` or a stack `(clients, dim)`, in the order of `rand.clients`.

        Finite floats in any range; what lies outside `context`'s range is clipped and counted.
        """

    @abstractmethod
    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """Estimate the sum of the updates of `clients`.

        Args:
            symbols: `(len(clients), m)`, one message a row; if homomorphic, their sum `(m,)` too.
            clients: Clients that sent them, in that order; those that dropped out are missing.
            context: The round.
            rand: What the server knows.

        Returns:
            `(dim,)` float32, or float64, in units of the update. Where there is a `grid`, only the whole sum
            rounded to it may leave the server.
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
            context: The round.
            clients: Clients that answered; at least one.

        Returns:
            `(len(segments),)` float64 in squared units of the update, or None where it depends on
            the data in a way that has no useful bound.
        """
        return None

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float | None:
        """Expected squared error of the decoded mean, summed over coordinates, for planning a run.

        Args:
            context: The round.
            num_clients: How many of the cohort answer, >= 1.
            homogeneity: |mean update|^2 over the mean |update|^2, in (0, 1].

        Returns:
            In squared units of the update; from `noise_variance` where no more is known, None without it.
        """
        variance = self.noise_variance(context, context.cohort[:num_clients])
        if variance is None:
            return None
        return float(variance @ torch.tensor(context.segments, dtype=torch.float64))

    def longest_update(self, dim: int) -> float | None:
        """Largest l2 norm of an evenly spread update that is not shortened, for planning a run.

        Args:
            dim: Coordinates.

        Returns:
            In units of the update. None where the range of a round clips coordinates.
        """
        return None

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
        """Sizes of the groups of a cohort that share peer randomness.

        They sum to `num_clients`.

        Raises:
            ValueError: If the mechanism can't serve a cohort of this size.
        """
        return (1,) * num_clients

    # ---- a target in place of a knob ------------------------------------------------------------------

    def at_level(self, level: float, context: RoundContext, max_dropped: int) -> Mechanism:
        """The mechanism with its free privacy parameter set, so that a privacy target can look for it.

        Args:
            level: > 0, larger is less private: the epsilon of a unit, or one over a noise multiplier.
            context: A round of the run: cohort, dimension.
            max_dropped: Dropouts that noise which is shared out over the cohort has to allow for.

        Raises:
            ValueError: If there is no such parameter, or it can't be set so.
        """
        raise ValueError(
            f"{type(self).__name__} has no privacy parameter that a target could set; leave the target out"
        )

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

    def counted_pair(self) -> Mechanism | None:
        """Settings in which the audit counts all words of a pair: one coin and one shared word a coordinate.

        None where clients share nothing in pairs.
        """
        return None

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        """Two neighbouring updates of one client, `(dim,)` float64 each, that are hard to tell apart safely.

        Far outside the range on both sides in every coordinate; far outside and zero where a claim is about
        zeroing out. A mechanism that rotates by public randomness returns what its rotation turns into its
        worst case, one that sends some coordinates only may leave the others alike.

        Args:
            client: Client whose update is replaced.
            context: The round.
            public: The streams that the adversary of the claim holds. In place of those that it does not
                hold there are streams of other keys, so a pair that follows them meets nothing.
        """
        neighbours = {claim.neighbours for claim in self.claims(context)}
        center, reach = context.expand(context.center), 4.0 * context.expand(context.radius)
        if neighbours == {Neighbours.SUBSTITUTION}:
            return center + reach, center - reach
        return center + reach, torch.zeros_like(reach)

    def lever(self, client: int, context: RoundContext) -> float | None:
        """Lever of a client that chooses its symbols on a coordinate of the sum, in honest extremes.

        None where nobody has worked it out.
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
