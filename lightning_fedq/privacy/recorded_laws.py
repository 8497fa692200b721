"""Laws of cohorts as a checkpoint records them: by name and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fedq.privacy.cohorts import (
    Available,
    CohortLaw,
    Cyclic,
    DisjointOnce,
    Everybody,
    FixedSize,
    Poisson,
    Streams,
)


@dataclass(frozen=True)
class RecordedLaw(CohortLaw):
    """Law of a checkpoint that is known by name only, because the law or its rule is user-defined.

    It is for accounting only. Any client is assumed to take part in every round, so the drawn clients, the
    first ones, stand for any others.

    Args:
        size: Number of clients of a round, >= 1.
        name: Name of the law in the checkpoint.
    """

    size: int
    name: str

    def __repr__(self) -> str:
        return self.name

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        return list(range(self.size))


_WORDS: dict[type[CohortLaw], str] = {
    Everybody: "random",
    FixedSize: "random",
    Available: "random",
    Cyclic: "cyclic",
    DisjointOnce: "once",
    Poisson: "poisson",
}
"""Names in checkpoints. A class that is not in this table, even a subclass of one, has its own name."""


def is_user_defined(law: CohortLaw) -> bool:
    """Return whether a law's class is not one of this module."""
    return type(law) not in _WORDS


def describe_law(law: CohortLaw, clients: int) -> dict[str, str]:
    """Return a law as a checkpoint of a federation of `clients` clients describes it.

    Examples:
        >>> describe_law(Cyclic(10), 60)
        {'clients_per_round': '10', 'participation': 'cyclic'}
    """
    word = _WORDS.get(type(law), f"{type(law).__module__}.{law}")
    rule = {"available": law.rule_name} if law.rule_name else {}
    return {"clients_per_round": str(law.cohort_size(clients)), "participation": word, **rule}


def read_law(words: Mapping[str, str]) -> CohortLaw:
    """Return the law that a checkpoint describes. A user-defined law or rule becomes a `RecordedLaw`.

    Args:
        words: Settings of the checkpoint's federation, with those of `describe_law`.

    Examples:
        >>> read_law({"clients_per_round": "10", "participation": "cyclic"})
        Cyclic(size=10)
        >>> read_law({"clients_per_round": "10", "participation": "hospital.Weekdays(size=10)"})
        hospital.Weekdays(size=10)
    """
    size, word = int(words["clients_per_round"]), words.get("participation", "random")
    kinds = {"random": FixedSize, "cyclic": Cyclic, "once": DisjointOnce}
    if "available" in words:
        return RecordedLaw(size, f"Available({words['available']}, {size})")
    return kinds[word](size) if word in kinds else RecordedLaw(size, word)
