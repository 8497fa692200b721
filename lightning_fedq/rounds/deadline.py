"""A time limit of rounds: who takes longer is dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from statistics import NormalDist

from lightning_fedq.keys.randomness import Stream


@dataclass(frozen=True)
class Deadline:
    """Time limit of every round.

    Between real clients it is the time in which they have to answer. In a simulation nobody waits: a client
    needs its `durations` entry times exp(spread z), with z standard normal and new in every round, drawn
    from public randomness. Who needs longer than `seconds` is dropped as if it had not answered.

    Claims about sums then count on the fewest answers that open one, whoever is missing, as they do between
    real clients. So they hold whatever makes a client late. That somebody was late is seen by the server and
    is part of no claim.

    Args:
        seconds: Limit, > 0.
        durations: Seconds that a client needs for a round, > 0: one number for all, or one for each client.
            None is for real clients only.
        spread: Standard deviation of the logarithm of a duration over rounds, >= 0.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If durations are no numbers.

    Example:
        >>> Deadline(60.0, durations=[20.0, 20.0, 90.0], spread=0.3).chance(2) > 0.9
        True
    """

    seconds: float
    durations: float | Sequence[float] | None = None
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, Real) or not 0.0 < self.seconds < math.inf:
            raise ValueError(f"Deadline(seconds=...) must be > 0 and finite, got {self.seconds!r}")
        if not isinstance(self.spread, Real) or not 0.0 <= self.spread < math.inf:
            raise ValueError(f"Deadline(spread=...) must be >= 0 and finite, got {self.spread!r}")
        if self.durations is None:
            return
        one = isinstance(self.durations, Real)
        values = [self.durations] if one else list(self.durations)  # type: ignore[arg-type, list-item]
        if not all(isinstance(value, Real) for value in values):
            raise TypeError(
                f"Deadline(durations=...) must be seconds, one number or one a client, got {self.durations!r}"
            )
        if not values or not all(0.0 < float(value) < math.inf for value in values):  # type: ignore[arg-type]
            raise ValueError(f"Deadline(durations=...) must be > 0 and finite, got {self.durations!r}")
        if not one:
            object.__setattr__(self, "durations", tuple(values))

    def check(self, num_clients: int) -> None:
        """Refuse durations of another number of clients.

        Raises:
            ValueError: With the cure.
        """
        if isinstance(self.durations, tuple) and len(self.durations) != num_clients:
            raise ValueError(
                f"Deadline(durations=...) has {len(self.durations)} entries, and there are {num_clients} "
                "clients; give one for each, or one number for all"
            )

    def chance(self, client: int) -> float:
        """Chance in [0, 1] that a client of a simulation is late in a round."""
        return 0.0 if self.durations is None else 1.0 - self._in_time(client)

    def _in_time(self, client: int) -> float:
        durations = self.durations
        typical = float(durations[client] if isinstance(durations, tuple) else durations)  # type: ignore[arg-type]
        margin = math.log(self.seconds / typical)
        if self.spread == 0.0:
            return 1.0 if margin >= 0.0 else 0.0
        return NormalDist().cdf(margin / self.spread)

    def late(self, clients: Sequence[int], stream: Stream) -> frozenset[int]:
        """Clients of a cohort that are late.

        Args:
            clients: The cohort, in its order.
            stream: Public randomness of the round.
        """
        if self.durations is None:
            return frozenset()
        draws = stream.words(len(clients)).tolist()
        pairs = zip(clients, draws, strict=True)
        return frozenset(client for client, draw in pairs if (draw + 0.5) / 2**32 > self._in_time(client))
