"""Assumptions of privacy claims: sentences with their kind, which names the responsible party.

A kind is made here only. `COLLUSION("the server colludes with 9 clients at most")` makes an assumption of it.
The table of SECURITY.md is made from the kinds (`python docs/generate.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Kind of assumption.

    Args:
        term: The field's term. If it ends in a colon, reports print the sentence behind it, because the
            sentence has a number.
        who: Responsible party: the library, you or nobody. "" for statements about the adversary's view,
            where nothing has to hold.
        duty: What the party does, for SECURITY.md.
    """

    term: str
    who: str
    duty: str = ""

    def __call__(self, sentence: str, *others: Kind) -> Assumption:
        """Return a sentence of this kind, and perhaps of others."""
        return Assumption(sentence, (self, *others))


class Assumption(str):
    """Sentence that has to hold for a claim.

    Attributes:
        kinds: Kinds of the sentence. Plain text in the claim of a mechanism has none.
    """

    kinds: tuple[Kind, ...]

    def __new__(cls, sentence: str, kinds: Iterable[Kind] = ()) -> Assumption:
        """Make a sentence of some kinds."""
        made = super().__new__(cls, sentence)
        made.kinds = tuple(kinds)
        return made


VIEW = Kind(
    "what the adversary is given", "", "Nothing has to hold. The sentence states what the adversary knows"
)
SECRET_KEYS = Kind(
    "secret keys, fresh randomness",
    "library; you: no machine is copied, restored or forked",
    'Library: keys of the operating system, or "no guarantee" with a seed. No stream serves two messages '
    "(journal, log of streams, attempts). You: nobody copies, restores or forks a machine while it runs, "
    "and key folders stay complete. Over Flower: `fedq flower client`",
)
TRUSTED_CODE = Kind(
    "trusted code at each site",
    "you, at each site",
    "You, at each site: `fedq flower client`, or trust in everyone who can start runs and in the machine of "
    "the SuperLink. A server cannot check it",
)
HONEST_COINS = Kind(
    "other clients run their coins",
    "nobody can check; you say how many lie",
    "Nobody can check it. You declare how many clients are Byzantine (`ByzantineClients`), and their "
    "randomness counts as known",
)
MODELS_ONLY = Kind(
    "only the released models are seen",
    "you: an honest server keeps all else to itself",
    "You: the server follows the protocol and keeps messages, dithers, logs, checkpoints and run folders "
    "secret",
)
SUM_ALONE = Kind(
    "secure aggregation shows the sum alone",
    "library, if masks run; you: active=True where the server may lie",
    "Library: `SecAgg` runs, or the report says that it did not. `active=True` protects against a lying "
    "server, over Flower only if clients run their own code",
)
AUTHENTIC_KEYS = Kind(
    "authenticated public keys",
    "you: identities= and directory=",
    "You: `identities=` and `directory=` from a source that the server does not control. Otherwise the "
    "server relays keys and could substitute its own. The key agreement (X25519) is computational",
)
COLLUSION = Kind(
    "bounded collusion:",
    "nobody can check; you say how many",
    "Nobody can check it. You declare the number (`SecAgg(max_colluding_fraction=...)`). Without a "
    "declaration, the report assumes that no client colludes",
)
SETTLED_COLLUDERS = Kind(
    "colluders settled before the draw",
    "nobody can check",
    "Nobody can check it. The colluding clients are fixed before the draw of a cohort is known. If cohorts "
    "are public, an attacker can corrupt clients after the draw, and then any number of a cohort may "
    "collude. Neither the noise nor the masks protect against that",
)
DROPOUTS = Kind(
    "bounded dropout:",
    "library; you: simulated dropouts do not hang on data",
    "Library: a round with fewer answers is aborted, and clients open a sum of fewer answers to nobody. You: "
    "simulated dropouts are independent of the data",
)
EQUAL_WEIGHTS = Kind(
    "equal weights", "library", "Library: a weighted mean has the claim of a server that sees every message"
)
FLOAT_ERROR = Kind(
    "floating point error, charged",
    "library",
    "Library: bounded and charged ([floating-point error](docs/float_error.md)), on IEEE 754 arithmetic",
)
NOISE_IN_ORDER = Kind(
    "noise handed on once and in order",
    "library; you: no client's folder is put back",
    "Library: clients refuse a round that comes too soon, an early second attempt, and an algorithm that "
    "feeds noise back. You: no client's folder is restored from an old copy",
)
SECRET_SELECTION = Kind(
    "secrecy of who was asked", "you", "You: members of the federation tell nobody who was asked"
)
TRUSTED_SERVER = Kind(
    "trusted server adds the noise", "you", "You: a server that is trusted with the updates"
)
SECRET_SAMPLE = Kind(
    "secrecy of the sample: its conditions S1, S2, ...",
    "library; you: S6, S8 and S9",
    "Library: one process, a key that is never written, and no ledger in checkpoints. Several ranks and "
    "Flower are refused, and with `Poisson` (S11) all mechanisms without noise of a trusted server. You: "
    "S6, S8 and S9, so that nothing else reveals the draw",
)
KINDS = tuple(value for value in tuple(globals().values()) if isinstance(value, Kind))
"""All kinds above, in their order."""
_BY_TERM = {kind.term: kind for kind in KINDS}


def kinds_of(sentence: str) -> tuple[Kind, ...]:
    """Return the kinds of an assumption. Plain text is its own kind, and you are responsible.

    Examples:
        >>> [kind.term for kind in kinds_of(COLLUSION("the server colludes with 9 clients at most"))]
        ['bounded collusion:']
        >>> kinds_of("our sensor draws true random bits")[0].who
        'you'
    """
    return getattr(sentence, "kinds", ()) or (Kind(sentence, "you"),)


def with_terms(sentence: str, terms: Iterable[str]) -> str:
    """Return a sentence with the kinds of these terms, as a report's file has them.

    Raises:
        ValueError: If a term is unknown and is not the sentence itself.
    """
    terms = tuple(terms)
    if terms == (sentence,):
        return sentence
    if unknown := [term for term in terms if term not in _BY_TERM]:
        raise ValueError(f"there is no kind of assumption {unknown[0]!r}")
    return Assumption(sentence, (_BY_TERM[term] for term in terms))
