"""Terms of a round of secure aggregation, which every party knows beforehand and not from the server."""

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
    """Terms of one attempt at one round, which all parties must have in common. `SecAgg.terms` makes them.

    Args:
        session: Name of the federation, at most 32 bytes.
        round: Number of the round.
        attempt: Number of earlier attempts at this round.
        cohort: Clients that were asked, sorted.
        layout: Ranges and moduli of a message.
        degree: Neighbours of a client. The graph is complete from len(cohort) - 1 on.
        threshold: Shares that open a secret.
        min_survivors: Smallest number of clients with which a party continues, at any stage.
        active: Whether keys are signed and survivors confirmed, because the server may lie.
        min_messages: Smallest number of messages whose sum is opened. A sum of fewer would contain too little
            noise.
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
        """Smallest number of messages whose sum a party helps to open."""
        return max(self.min_survivors, self.min_messages)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the terms, 32 bytes. The first half is in the header of every message."""
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

    Set `max_colluding_fraction` and `max_dropped_fraction`, and `SecAgg` chooses the cheapest graph that is
    safe for these fractions and for the cohorts that are drawn. With 2% each and a cohort of all 1,000
    clients, keys and shares take 0.9 kB a client and round. Without the fractions every client shares with
    every other client. This is safe for nearly half of a cohort, and takes 36 kB a client in a cohort of
    1,000 and 3.8 kB in a cohort of 100.

    With the complete graph, a server that colludes with fewer than `threshold` clients of the cohort learns
    only the sum over the others. With a sparse graph, the traffic of a client does not grow with the cohort,
    and security is statistical. It then fails with probability at most 2^-50 an attempt at a round, and 2^-40
    a run of up to 1,024 attempts, for corrupt clients and dropouts up to the stated fractions. Privacy
    reports state the probability of their run.

    Args:
        threshold: Shares that open a secret, out of degree + 1. None takes the smallest safe number, which is
            more than half, or more than two thirds if `active`. With a sparse graph it can be higher, if the
            degree is then smaller.
        degree: Neighbours of a client, an even number. "auto" takes the smallest number that is safe for
            `max_colluding_fraction` and `max_dropped_fraction`. None is the complete graph, as is "auto"
            without both fractions.
        max_colluding_fraction: Fraction of the clients that may collude with the server, in [0, 1). Required
            if `degree` is a number. With the complete graph it is checked against the threshold.
        max_dropped_fraction: Fraction of the clients that may drop out, in [0, 1). The round is aborted
            beyond that. Required and checked like `max_colluding_fraction`.
        active: Whether the server may lie. Clients then sign their keys and confirm the list of survivors,
            for which they need identities (Ed25519).
        simulation: "masked" runs the protocol in a simulation. "counted" only counts its bits, so the person
            who runs the simulation can see every message.
        modulus: Modulus for all coordinates. None takes the smallest power of two at which sums can't wrap.

    References:
        Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017.
        Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS 2020.

    Examples:
        >>> SecAgg().rules(10, 10)
        (9, 6, 6)
        >>> masks = SecAgg(max_colluding_fraction=0.1, max_dropped_fraction=0.1)
        >>> masks.rules(1000, 1000)
        (52, 31, 900)
        >>> masks.rules(20000, 1000)  # a cohort may have more than 10%
        (56, 34, 900)
    """

    threshold: int | None = None
    degree: int | Literal["auto"] | None = "auto"
    max_colluding_fraction: float | None = None
    max_dropped_fraction: float | None = None
    active: bool = False
    simulation: Literal["masked", "counted"] = "masked"
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
        for name in ("max_colluding_fraction", "max_dropped_fraction"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        if self.max_colluding_fraction is None or self.max_dropped_fraction is None:
            if isinstance(self.degree, int):
                raise ValueError(
                    "a sparse graph needs max_colluding_fraction and max_dropped_fraction: "
                    "its security depends on them"
                )
            object.__setattr__(self, "degree", None)  # complete graph, safe for nearly half of the clients

    @property
    def statement(self) -> str:
        """Assumption about the server, in words, for a privacy report.

        The report itself states whether masks run.
        """
        if self.active:
            return (
                "for a server that may lie about who dropped out (active), with identities that it does not "
                "control"
            )
        return "for a server that follows the protocol (semi-honest)"

    def guarantee(self, num_clients: int, cohort: int, rounds: int, num_byzantine: int = 0) -> SecureSum:
        """Return the guarantee about the sums of a run, for a `Run`.

        If the server may lie, it may declare all clients except `min_survivors` dropped, and choose them. So
        the guarantee of an active run has `min_survivors`.

        Args:
            num_clients: Clients of the federation.
            cohort: Clients of a round.
            rounds: Attempts at rounds, including aborted attempts.
            num_byzantine: Largest number of clients of a cohort that do not run the protocol and may reveal
                their shares. Clients don't know it, so the graph does not take it into account. The
                probability does.

        Raises:
            ValueError: If the cohort is below 2, the threshold can't be met, or the graph is not safe.
        """
        colluders, rules = self._rules(num_clients, cohort)
        counted, settings = replace(colluders, byzantine=num_byzantine), repr(self)
        opened = min(self._opened_log2(counted, *rules) + GRINDING_BITS * self.active, 0.0)
        # earlier versions chose the graph for the expected number of colluders in a cohort
        if colluders.num_in_federation and num_clients > cohort:
            graph = "{} neighbours, {} shares open a secret".format(*rules)
            settings += f" with {graph}, for {colluders.num_in_federation} colluders of {num_clients} clients"
        return SecureSum(
            colluders=counted,
            opened_log2=opened,
            min_survivors=rules[2] if self.active else None,
            min_summands=rules[2],
            ran=self.simulation == "masked",
            settings=settings,
            statement=self.statement + self._chance(opened, rounds, rules[0] < cohort - 1, rules[1]),
        )

    def _opened_log2(self, colluders: Colluders, degree: int, threshold: int, survivors: int) -> float:
        """Return log2 of the probability that an attempt shows more than its sum, per roster tried."""
        if self.active and 2 * survivors - colluders.cohort <= colluders.law[0][-1]:
            # two lists of survivors may have only corrupt clients in common, who could confirm both lists
            return 0.0
        return security_log2(colluders, degree, threshold, self._dropped(colluders.cohort))

    def _dropped(self, cohort: int) -> int:
        """Return the number of dropouts that a cohort tolerates, rounded down."""
        return math.floor((self.max_dropped_fraction or 0.0) * cohort)

    def _chance(self, opened: float, rounds: int, sparse: bool, threshold: int) -> str:
        """Return, in words, the probability that a run shows more than its sums. Empty if it is 0.

        `privacy/assumptions.json` looks for parts of these words.
        """
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
        """Return the checked (degree, threshold, min_survivors) for a cohort.

        Args:
            num_clients: Clients of the federation.
            cohort: Clients of a round.

        Raises:
            ValueError: If the cohort is below 2, the threshold can't be met, or the graph is not safe.
        """
        return self._rules(num_clients, cohort)[1]

    def _rules(self, num_clients: int, cohort: int) -> tuple[Colluders, tuple[int, int, int]]:
        """Return the colluders of a cohort, and the checked (degree, threshold, min_survivors) for them."""
        if not 2 <= cohort <= num_clients:
            raise ValueError(
                f"secure aggregation needs a cohort of 2 or more to hide in, got {cohort} of {num_clients}"
            )
        colluders = Colluders(self.max_colluding_fraction or 0.0, num_clients, cohort, chosen=self.active)
        dropped, rules = self._dropped(cohort), self._graph(colluders)
        degree, threshold, survivors = rules
        holders = degree + 1
        if not holders // 2 < threshold <= holders:
            raise ValueError(
                f"threshold must be in [{holders // 2 + 1}, {holders}]: more than half of the {holders} "
                f"holders of a secret (cohort of {cohort}), got {threshold}"
            )
        if self.max_dropped_fraction is not None and cohort - dropped < survivors:
            raise ValueError(
                f"{survivors} of {cohort} clients must survive, which {dropped} dropouts do not leave. "
                "Lower max_dropped_fraction or the threshold."
            )
        # the privacy account charges the failure probability of the complete graph, so any below 1/2 will do
        wanted = wanted_log2(self.active) if degree < cohort - 1 else -1
        if self._opened_log2(colluders, *rules) > wanted:
            self._refuse(colluders, rules)
        if correctness_log2(cohort, degree, threshold, dropped) > -CORRECTNESS_BITS:
            raise ValueError(
                f"{dropped} dropouts of {cohort} lose the sum with probability above "
                f"2^-{CORRECTNESS_BITS} at degree {degree} and threshold {threshold}. Raise degree, "
                "lower threshold, or use degree='auto'."
            )
        return colluders, rules

    def _refuse(self, colluders: Colluders, rules: tuple[int, int, int]) -> NoReturn:
        """Raise an error that states the failure probability, that of the complete graph, and cures.

        One cure is the largest number of colluders for which the settings are safe.
        """

        def too_many(known: int) -> bool:
            fewer = replace(colluders, fraction=known / colluders.clients)
            return self._opened_log2(fewer, *self._graph(fewer)) > wanted_log2(self.active)

        largest = bisect_left(range(colluders.num_in_federation), True, key=too_many) - 1
        complete = replace(self, degree=None, threshold=None)
        whole = complete._graph(colluders)
        opened = complete._opened_log2(colluders, *whole)
        wanted = f"2^{wanted_log2(self.active)}" if rules[0] < colluders.cohort - 1 else "1/2"
        cures = [f"keep max_colluding_fraction <= {largest} / {colluders.clients}"] if largest >= 0 else []
        cures += ["raise degree and threshold, or use degree='auto'"] if isinstance(self.degree, int) else []
        known, clients, size = colluders.num_in_federation, colluders.clients, colluders.cohort
        raise ValueError(
            f"{known} corrupt clients of {clients} could see more than the sum of a cohort of {size}. The "
            f"probability is above {wanted} a round, at degree {rules[0]} and threshold {rules[1]} (complete "
            f"graph, threshold {whole[1]}: {'0' if opened == -math.inf else _below(-opened)}). "
            f"Cures: {', or '.join(cures)}"
        )

    def _graph(self, colluders: Colluders) -> tuple[int, int, int]:
        """Return (degree, threshold, min_survivors). Values that the user set are not checked."""
        size, threshold, dropped = colluders.cohort, self.threshold, self._dropped(colluders.cohort)
        if self.degree == "auto":
            degree, threshold = smallest_graph(colluders, dropped, threshold)
        else:
            degree = size - 1 if self.degree is None else min(self.degree, size - 1)
        if threshold is None and self.max_dropped_fraction is not None:
            threshold = safe_threshold(colluders, degree, dropped)
        if threshold is None:
            threshold = default_threshold(degree + 1, self.active)
        survivors = threshold if self.degree is None else max(threshold, size - dropped)
        if self.active:
            # with more than two thirds each, two lists have more than a third of the cohort in common
            survivors = max(survivors, default_threshold(size, True))
        return degree, threshold, survivors

    def layout(self, mechanism: Mechanism, context: RoundContext, rand: PublicRandomness) -> Layout:
        """Choose the moduli for one round of a mechanism.

        The range of a symbol comes from the mechanism (`symbol_modulus`, `symbol_range`). Without either, it
        comes from the width of the mechanism's fixed-length code, which every symbol must fit.

        Args:
            mechanism: Homomorphic mechanism.
            context: The round, with its cohort.
            rand: Public randomness of the round, on which symbol ranges may depend.

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
                    f"{type(mechanism).__name__} sums modulo {modulus}, got modulus={self.modulus}. "
                    "Leave modulus out."
                )
            return modular_layout(count, modulus)
        if bounded is not None:
            low, high = (_bound(bound) for bound in bounded)
            sizes = (bound.size for bound in (low, high) if not isinstance(bound, int))
            return sum_layout(next(sizes, mechanism.num_symbols(context)), low, high, size, self.modulus)
        code = mechanism.code(context)
        if not isinstance(code, FixedLength):
            raise TypeError(
                f"The symbols of {type(mechanism).__name__} have no known bound, so no modulus is safe. "
                "Give the mechanism a method symbol_range(context, rand)."
            )
        half = 1 << code.bits_per_symbol - 1
        bounds = (-half, half - 1) if code.signed else (0, 2 * half - 1)
        return sum_layout(mechanism.num_symbols(context), *bounds, size, self.modulus)

    def check(self, mechanism: Mechanism) -> None:
        """Check that a mechanism's messages can be decoded from their sum, and that it suits the server.

        Raises:
            TypeError: If the mechanism is not homomorphic.
            ValueError: If clients hand noise to clients whom the server names, and the server may lie. It
                could then name clients that collude with it, who would know the noise of honest clients.
        """
        if self.active and mechanism.reuses_noise:
            raise ValueError(
                f"{type(mechanism).__name__} hands noise on to clients whom the server names, and a lying "
                "server names colluders. Use SecAgg(), for a server that follows the protocol, or "
                "DistributedDiscreteGaussian."
            )
        if not mechanism.homomorphic:
            raise TypeError(
                f"{type(mechanism).__name__} is not homomorphic: the sum of its messages does not decode. "
                f"Leave out secure_aggregation or choose a homomorphic mechanism, got {mechanism}"
            )

    def round_terms(
        self,
        mechanism: Mechanism,
        context: RoundContext,
        rand: PublicRandomness,
        session: bytes,
        num_clients: int,
    ) -> Terms:
        """Return the terms of one round of a mechanism, which all parties must compute alike.

        Args:
            mechanism: Homomorphic mechanism of the round.
            context: Context of the round.
            rand: Public random streams of the round.
            session: Name of the round's session, at most 32 bytes.
            num_clients: Number of clients in the federation.

        Raises:
            TypeError: If the mechanism is not homomorphic.
            ValueError: If the cohort does not suit, or the modulus is too small.
        """
        layout, silent = self.layout(mechanism, context, rand), mechanism.tolerated_dropouts(context)
        place = context.round, context.attempt, context.cohort
        return self.terms(session, *place, layout, num_clients, silent)

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
        """Make the terms of one attempt at one round.

        Args:
            session: Name of the federation, at most 32 bytes.
            round: Number of the round.
            attempt: Number of earlier attempts at this round.
            cohort: Clients that are asked.
            layout: Ranges and moduli of a message.
            num_clients: Clients of the federation, from which the cohort was drawn.
            max_silent: Largest number of missing clients with which a sum is opened
                (`Mechanism.tolerated_dropouts`). None sets no limit.

        Raises:
            ValueError: If a client is named twice or the cohort does not suit (`rules`).
        """
        # a client's shares are at the point id + 1, which has 64 bits
        if len(set(cohort)) != len(cohort) or any(not 0 <= client < 2**64 - 1 for client in cohort):
            raise ValueError("clients must be distinct integers in [0, 2^64 - 1)")
        rules = self.rules(num_clients, len(cohort))
        wanted = 0 if max_silent is None else len(cohort) - max_silent
        members = tuple(sorted(cohort))
        return Terms(session, round, attempt, members, layout, *rules, self.active, max(wanted, 0))


def _below(bits: float) -> str:
    """Return a probability of 2^-bits in words, rounded up: "below 2^-40" or "up to 1"."""
    power = math.floor(10 * bits) / 10
    return f"below 2^-{power:g}" if power > 0.0 else "up to 1"


def _bound(bound: int | Tensor) -> int | NDArray[np.int64]:
    """Return a bound of the symbols as an int, or as a NumPy array if it differs between coordinates."""
    if isinstance(bound, int):
        return bound
    array: NDArray[np.int64] = bound.detach().cpu().numpy().astype(np.int64)
    return int(array) if array.ndim == 0 else array
