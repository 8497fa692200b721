"""Time limit of a round: clients that take longer (stragglers) are dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from statistics import NormalDist

from lightning_fedq.keys.randomness import Stream


@dataclass(frozen=True)
class Deadline:
    """Time limit of every round.

    With real clients, it is the time in which a client must answer. A simulation does not wait: a client's
    simulated time is its `durations` entry times exp(spread z). Here z is standard normal, drawn for every
    round from public randomness. A client whose time exceeds `seconds` is dropped as if it had not answered.

    With a deadline, privacy claims about sums assume only the smallest number of answers that opens a sum, as
    with real clients. The claims therefore hold for any cause of delay. The server sees which clients were
    late, and no claim covers this fact.

    Args:
        seconds: Time limit of a round in seconds, > 0.
        durations: Seconds that a client needs for a round, > 0: one number for all clients, or one number per
            client. None is for real clients only.
        spread: Standard deviation of the logarithm of a client's duration over rounds, >= 0.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If `durations` contains a value that is not a number.

    Examples:
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
        scalar = isinstance(self.durations, Real)
        values = [self.durations] if scalar else list(self.durations)  # type: ignore[arg-type, list-item]
        if not all(isinstance(value, Real) for value in values):
            raise TypeError(
                f"Deadline(durations=...) must be one number, or one per client, got {self.durations!r}"
            )
        if not values or not all(0.0 < float(value) < math.inf for value in values):  # type: ignore[arg-type]
            raise ValueError(f"Deadline(durations=...) must be > 0 and finite, got {self.durations!r}")
        if not scalar:
            object.__setattr__(self, "durations", tuple(values))

    def check(self, num_clients: int) -> None:
        """Check that there is one duration per client.

        Raises:
            ValueError: If `durations` has entries for another number of clients.
        """
        if isinstance(self.durations, tuple) and len(self.durations) != num_clients:
            raise ValueError(
                f"Deadline(durations=...) has {len(self.durations)} entries for {num_clients} clients. "
                "Give one entry per client, or one number for all."
            )

    def chance(self, client: int) -> float:
        """Return the probability in [0, 1] that a simulated client is late in a round."""
        return 0.0 if self.durations is None else 1.0 - self._in_time(client)

    def _in_time(self, client: int) -> float:
        """Return the probability that a simulated client answers within the limit."""
        durations = self.durations
        typical = float(durations[client] if isinstance(durations, tuple) else durations)  # type: ignore[arg-type]
        margin = math.log(self.seconds / typical)
        if self.spread == 0.0:
            return 1.0 if margin >= 0.0 else 0.0
        return NormalDist().cdf(margin / self.spread)

    def late(self, clients: Sequence[int], stream: Stream) -> frozenset[int]:
        """Draw the clients of a cohort that are late. The set is empty for real clients.

        Args:
            clients: The cohort, in its order.
            stream: Public randomness of the round.
        """
        if self.durations is None:
            return frozenset()
        draws = stream.words(len(clients)).tolist()
        pairs = zip(clients, draws, strict=True)
        return frozenset(client for client, draw in pairs if (draw + 0.5) / 2**32 > self._in_time(client))
