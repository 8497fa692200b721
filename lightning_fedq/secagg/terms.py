"""Terms of a round that every party knows beforehand and nobody takes from the server."""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.checks import check_fields
from lightning_fedq.keys.randomness import PublicRandomness, pack_fields
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.privacy.collusion import Colluders
from lightning_fedq.privacy.run import SecureSum
from lightning_fedq.secagg.graph import (
    CORRECTNESS_BITS,
    GRINDING_BITS,
    correctness_log2,
    default_threshold,
    safe_threshold,
    security_log2,
    smallest_graph,
    wanted_log2,
)
from lightning_fedq.secagg.layout import Layout, modular_layout, sum_layout
from lightning_fedq.wire.coding import FixedLength


@dataclass(frozen=True)
class Terms:
    """One attempt at one round, as every party must know it. Made by `SecAgg.terms`.

    Args:
        session: Names the federation, 32 bytes or less.
        attempt: Earlier attempts at this round.
        cohort: The clients that were asked, sorted.
        degree: Neighbours of a client; at least len(cohort) - 1 is the complete graph.
        threshold: Shares that open a secret.
        min_survivors: Smallest number of clients with which anybody goes on, at any stage.
        active: Sign keys, and confirm who survived, because the server is not trusted to tell.
        min_messages: Smallest number of messages whose sum is opened, because of the noise that it must hold.
    """

    session: bytes
    round: int
    attempt: int
    cohort: tuple[int, ...]
    layout: Layout
    degree: int
    threshold: int
    min_survivors: int
    active: bool
    min_messages: int = 0

    @property
    def min_summands(self) -> int:
        """Messages without which nobody goes on to open a sum."""
        return max(self.min_survivors, self.min_messages)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand in every message."""
        fields = (self.round, self.attempt, self.degree, self.threshold, self.min_survivors, int(self.active))
        name = "fedq secure aggregation v2" + (f", {self.min_messages} messages" if self.min_messages else "")
        state = pack_fields(name, self.session, *fields, *self.cohort, self.layout.digest)
        return hashlib.sha256(state).digest()

    @cached_property
    def members(self) -> frozenset[int]:
        """The cohort as a set."""
        return frozenset(self.cohort)


@dataclass(frozen=True)
class SecAgg:
    """Secure aggregation around a homomorphic mechanism: the server sees the sum of the symbols only.

    Say how many of the clients may collude and drop out, and the graph is the cheapest that is safe for them,
    and for the cohorts that are drawn: with 2% of each, keys and shares take 0.9 kB of each of 1,000 clients
    in a round, if they are all that there are. Unsaid, everybody shares with everybody, which is safe for
    nearly half of a cohort and takes 36 kB, 3.8 kB of each of 100.

    With the complete graph a server together with fewer than `threshold` clients of the cohort learns no
    more than the sum over the others. A sparse graph makes the cost of a client independent of the cohort,
    and then security is statistical: 2^-50 an attempt at a round, 2^-40 for a run of up to 1,024 of them, for
    corrupt clients and dropouts up to the fractions stated. Reports say what it is in their run.

    Args:
        threshold: Shares that open a secret, of the degree + 1 that there are. None takes the smallest number
            that is safe: more than half, and more than two thirds if `active`; or above that, where a sparse
            graph can then be smaller.
        degree: Neighbours of a client, even; "auto" takes the smallest number that is safe for the fractions
            below, which is everybody where they are not both stated; None is everybody.
        max_corrupt: Fraction of the clients that may collude with the server, in [0, 1).
        max_dropout: Fraction of the clients that may drop out, in [0, 1). The round is given up beyond that.
            Both fractions are required with a number of neighbours; with the complete graph they are checked
            against the threshold.
        active: The server may lie: keys are signed and survivors confirmed. Needs identities (Ed25519).
        run: "masked" really runs the protocol in a simulation; "accounted" only counts its bits, and whoever
            runs the simulation sees every message.
        modulus: Explicit modulus, for all coordinates; None takes the smallest power of two that can't wrap.

    References:
        Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017.
        Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS 2020.

    Example:
        >>> SecAgg().rules(10, 10)
        (9, 6, 6)
        >>> SecAgg(max_corrupt=0.1, max_dropout=0.1).rules(1000, 1000)
        (52, 31, 900)
        >>> SecAgg(max_corrupt=0.1, max_dropout=0.1).rules(20000, 1000)  # may hold more than its share
        (56, 34, 900)
    """

    threshold: int | None = None
    degree: int | Literal["auto"] | None = "auto"
    max_corrupt: float | None = None
    max_dropout: float | None = None
    active: bool = False
    run: Literal["masked", "accounted"] = "masked"
    modulus: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.threshold is not None and self.threshold < 2:
            raise ValueError(
                f"threshold must be >= 2, or one client opens every secret, got {self.threshold}"
            )
        if isinstance(self.degree, int) and (self.degree < 2 or self.degree % 2):
            raise ValueError(
                "degree must be even, as neighbours stand on both sides of a ring, and >= 2, "
                f"got {self.degree}"
            )
        for name, value in (("max_corrupt", self.max_corrupt), ("max_dropout", self.max_dropout)):
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        if self.max_corrupt is None or self.max_dropout is None:
            if isinstance(self.degree, int):
                raise ValueError(
                    "a sparse graph needs max_corrupt and max_dropout: its security hangs on them"
                )
            object.__setattr__(self, "degree", None)  # safe for nearly half of the clients

    @property
    def statement(self) -> str:
        """Words on what the server may do, for a privacy report, which says itself whether masks run."""
        if self.active:
            return (
                "for a server that may lie about who dropped out (active), with identities that it does not "
                "control"
            )
        return "for a server that follows the protocol (semi-honest)"

    def guarantee(self, num_clients: int, cohort: int, rounds: int, num_byzantine: int = 0) -> SecureSum:
        """Return the guarantee about the sums of a run, for a `Run`.

        A lying server may declare all but `min_survivors` dropped, and choose whom.

        Args:
            num_clients: Clients of the federation.
            cohort: Clients of a round.
            rounds: Attempts at rounds, those that were given up included.
            num_byzantine: Clients of a cohort, at most, that do not run the protocol and may hand out their
                shares. The graph is made without them, as no client knows of them; the chance counts them.

        Raises:
            ValueError: See `rules`.
        """
        colluders, rules = self._rules(num_clients, cohort)
        counted, settings = replace(colluders, byzantine=num_byzantine), repr(self)
        opened = min(self._opened_log2(counted, *rules) + GRINDING_BITS * self.active, 0.0)
        if (
            colluders.num_in_federation and num_clients > cohort
        ):  # earlier versions made the graph for a cohort's share
            graph = "{} neighbours, {} shares open a secret".format(*rules)
            settings += f" with {graph}, for {colluders.num_in_federation} colluders of {num_clients} clients"
        return SecureSum(
            colluders=counted,
            opened_log2=opened,
            min_survivors=rules[2] if self.active else None,
            min_summands=rules[2],
            ran=self.run == "masked",
            settings=settings,
            statement=self.statement + self._chance(opened, rounds, rules[0] < cohort - 1, rules[1]),
        )

    def _opened_log2(self, colluders: Colluders, degree: int, threshold: int, survivors: int) -> float:
        """log2 of the chance that an attempt shows more than its sum, at each roster that a server tries."""
        if self.active and 2 * survivors - colluders.cohort <= colluders.law[0][-1]:
            return 0.0  # two lists of survivors overlap in so many, who could confirm both
        return security_log2(colluders, degree, threshold, self._dropped(colluders.cohort))

    def _dropped(self, cohort: int) -> int:
        """Dropouts that are allowed for, rounded down: more than the fraction must not be missing."""
        return math.floor((self.max_dropout or 0.0) * cohort)

    def _chance(self, opened: float, rounds: int, sparse: bool, threshold: int) -> str:
        """Chance that a run shows more than its sums, in words. Nothing where it can't."""
        if opened == -math.inf:
            return ""
        tries = max(rounds, 1)
        if sparse:
            how = f"draws a graph of neighbours, and the chance that any of {tries} shows more than its sum"
        else:
            how = f"has a cohort, and the chance that {threshold} of any of {tries} collude, who open all,"
        below = _below(-opened - math.log2(tries))
        lying = ", if the server tries at most 2^80 rosters for each" if self.active else ""
        return f"; each attempt at a round {how} is {below}{lying}"

    def rules(self, num_clients: int, cohort: int) -> tuple[int, int, int]:
        """Return (degree, threshold, min_survivors) for cohorts of so many of the clients, all checked.

        Raises:
            ValueError: If the cohort is below 2, the threshold can't be met, or the graph is not safe.
        """
        return self._rules(num_clients, cohort)[1]

    def _rules(self, num_clients: int, cohort: int) -> tuple[Colluders, tuple[int, int, int]]:
        """The colluders that all of a run counts, and what is made for them."""
        if not 2 <= cohort <= num_clients:
            raise ValueError(
                f"secure aggregation needs a cohort of 2 or more to hide in, got {cohort} of {num_clients}"
            )
        colluders = Colluders(self.max_corrupt or 0.0, num_clients, cohort, chosen=self.active)
        dropped, rules = self._dropped(cohort), self._graph(colluders)
        degree, threshold, survivors = rules
        holders = degree + 1
        if not holders // 2 < threshold <= holders:
            raise ValueError(
                f"threshold must be in [{holders // 2 + 1}, {holders}], more than half of the {holders} "
                f"holders of a secret in a cohort of {cohort}, got {threshold}"
            )
        if self.max_dropout is not None and cohort - dropped < survivors:
            raise ValueError(
                f"{survivors} of {cohort} clients must survive, which {dropped} dropouts do not leave; "
                "lower max_dropout or the threshold"
            )
        # what the complete graph risks is paid for by the account
        wanted = wanted_log2(self.active) if degree < cohort - 1 else -1
        if self._opened_log2(colluders, *rules) > wanted:
            self._refuse(colluders, rules)
        if correctness_log2(cohort, degree, threshold, dropped) > -CORRECTNESS_BITS:
            raise ValueError(
                f"{dropped} dropouts of {cohort} lose the sum with probability above "
                f"2^-{CORRECTNESS_BITS} at degree {degree} and threshold {threshold}; raise degree, "
                "lower threshold, or use degree='auto'"
            )
        return colluders, rules

    def _refuse(self, colluders: Colluders, rules: tuple[int, int, int]) -> NoReturn:
        """Say why it is not safe, with the most colluders that are, and what the complete graph gives."""

        def too_many(known: int) -> bool:
            fewer = replace(colluders, fraction=known / colluders.clients)
            return self._opened_log2(fewer, *self._graph(fewer)) > wanted_log2(self.active)

        most = bisect_left(range(colluders.num_in_federation), True, key=too_many) - 1
        complete = replace(self, degree=None, threshold=None)
        whole = complete._graph(colluders)
        opened = complete._opened_log2(colluders, *whole)
        wanted = f"2^{wanted_log2(self.active)}" if rules[0] < colluders.cohort - 1 else "1/2"
        cures = [f"keep max_corrupt <= {most} / {colluders.clients}"] if most >= 0 else []
        cures += ["raise them, or use degree='auto'"] if isinstance(self.degree, int) else []
        known, clients, size = colluders.num_in_federation, colluders.clients, colluders.cohort
        raise ValueError(
            f"{known} corrupt clients of {clients} could see more than the sum of a cohort of {size}, with "
            f"probability above {wanted} a round, at degree {rules[0]} and threshold {rules[1]} (complete "
            f"graph, threshold {whole[1]}: {'0' if opened == -math.inf else _below(-opened)}); "
            f"{'; or '.join(cures)}"
        )

    def _graph(self, colluders: Colluders) -> tuple[int, int, int]:
        """Degree, threshold and survivors, safe or not where they are given."""
        size, threshold, dropped = colluders.cohort, self.threshold, self._dropped(colluders.cohort)
        if self.degree == "auto":
            degree, threshold = smallest_graph(colluders, dropped, threshold)
        else:
            degree = size - 1 if self.degree is None else min(self.degree, size - 1)
        if threshold is None and self.max_dropout is not None:
            threshold = safe_threshold(colluders, degree, dropped)
        if threshold is None:
            threshold = default_threshold(degree + 1, self.active)
        survivors = threshold if self.degree is None else max(threshold, size - dropped)
        if self.active:
            # more than two thirds: two lists share more than a third
            survivors = max(survivors, default_threshold(size, True))
        return degree, threshold, survivors

    def layout(self, mechanism: Mechanism, context: RoundContext, rand: PublicRandomness) -> Layout:
        """Choose the moduli for one round of a mechanism.

        The range of a symbol comes from the mechanism (`symbol_modulus`, `symbol_range`), or else from the
        width of its fixed-length code, in which it must fit anyway.

        Raises:
            TypeError: If the mechanism is not homomorphic or no bound on its symbols is known.
            ValueError: If the explicit modulus is too small.
        """
        self.check(mechanism)
        size = len(context.cohort)
        modular, bounded = mechanism.symbol_modulus(context), mechanism.symbol_range(context, rand)
        if modular is not None:
            modulus, count = modular
            if self.modulus not in (None, modulus):
                raise ValueError(
                    f"{type(mechanism).__name__} sums modulo {modulus}, got modulus={self.modulus}; "
                    "leave it out"
                )
            return modular_layout(count, modulus)
        if bounded is not None:
            low, high = (_bound(bound) for bound in bounded)
            sizes = (bound.size for bound in (low, high) if not isinstance(bound, int))
            return sum_layout(next(sizes, mechanism.num_symbols(context)), low, high, size, self.modulus)
        code = mechanism.code(context)
        if not isinstance(code, FixedLength):
            raise TypeError(
                f"the symbols of {type(mechanism).__name__} have no known bound, so no modulus is safe; "
                "give it a symbol_range(context, rand)"
            )
        half = 1 << code.bits_per_symbol - 1
        bounds = (-half, half - 1) if code.signed else (0, 2 * half - 1)
        return sum_layout(mechanism.num_symbols(context), *bounds, size, self.modulus)

    def check(self, mechanism: Mechanism) -> None:
        """Refuse a mechanism whose messages can't be decoded from their sum.

        Raises:
            TypeError: If the mechanism is not homomorphic.
            ValueError: If a server that may lie would choose who knows whose noise.
        """
        if self.active and mechanism.hands_on:
            raise ValueError(
                f"{type(mechanism).__name__} hands noise on to clients whom the server names, and one that "
                "lies would name those who collude with it; use SecAgg(), for a server that follows the "
                "protocol, or DistributedDiscreteGaussian"
            )
        if not mechanism.homomorphic:
            raise TypeError(
                f"{type(mechanism).__name__} is not homomorphic: the sum of its messages does not decode; "
                f"leave out secure_aggregation or choose a homomorphic mechanism, got {mechanism}"
            )

    def terms(
        self,
        session: bytes,
        round: int,
        attempt: int,
        cohort: Sequence[int],
        layout: Layout,
        num_clients: int,
        max_silent: int | None = None,
    ) -> Terms:
        """Fix one attempt at one round.

        Args:
            attempt: Earlier attempts at this round.
            cohort: The clients that are asked.
            num_clients: Clients of the federation, of whom the cohort was drawn.
            max_silent: `Mechanism.tolerated_dropouts`: with more clients missing no sum is opened. None does
                not count.

        Raises:
            ValueError: If a client is named twice or the cohort does not suit (`rules`).
        """
        # id + 1 is a client's point, in 64 bits
        if len(set(cohort)) != len(cohort) or any(not 0 <= client < 2**64 - 1 for client in cohort):
            raise ValueError("clients must be distinct integers in [0, 2^64 - 1)")
        rules = self.rules(num_clients, len(cohort))
        wanted = 0 if max_silent is None else len(cohort) - max_silent
        members = tuple(sorted(cohort))
        return Terms(session, round, attempt, members, layout, *rules, self.active, max(wanted, 0))


def _below(bits: float) -> str:
    """A chance of at most 2^-bits, in words."""
    power = math.floor(10 * bits) / 10
    return f"below 2^-{power:g}" if power > 0.0 else "up to 1"


def _bound(bound: int | Tensor) -> int | NDArray[np.int64]:
    if isinstance(bound, int):
        return bound
    array: NDArray[np.int64] = bound.detach().cpu().numpy().astype(np.int64)
    return int(array) if array.ndim == 0 else array
