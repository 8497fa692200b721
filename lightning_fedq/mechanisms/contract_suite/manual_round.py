"""One round by hand: contexts, messages and sums of a mechanism, and the list of rules."""

import hashlib
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import combinations

import torch
from torch import Tensor

from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.contract import BrokenContractError as BrokenContractError
from lightning_fedq.mechanisms.interface import Mechanism, Message, RoundContext, group_clients

Rule = Callable[[Mechanism], None]

RULES: dict[str, Rule] = {}
"""Every rule of the contract by name. The first line of its docstring is the requirement."""

SEGMENTS = (40, 24)
CLIENTS = (11, 3, 8, 0, 5, 7, 2)
COHORTS = (((6, 1, 4), (1, 4, 6)), ((6, 1, 4), (1, 4)), ((2,), (2,)))
"""Cohorts and the clients that answer: an odd cohort, a group that lost a client, an unpaired client."""
LAW_SEGMENTS, LAW_ROUNDS = (700, 400), 60
STANDARD_ERRORS = 5.0
"""Threshold that Student's t with 59 degrees of freedom exceeds with probability 6e-6, two-sided."""


def make_context(
    mechanism: Mechanism,
    clients: Sequence[int],
    segments: Sequence[int] = (5, 3),
    radius: float | Sequence[float] = 1.0,
    center: float | Sequence[float] = 0.0,
    round: int = 0,
    attempt: int = 0,
) -> RoundContext:
    """Return a round whose groups are `clients` in the given order, split as the mechanism requires.

    Args:
        mechanism: Mechanism whose `group_sizes` split the cohort.
        clients: Cohort.
        segments: Length of each segment.
        radius: Radius of the range, for all segments or one each.
        center: Centre of the range, for all segments or one each.
        round: Round number.
        attempt: Number of earlier attempts at the round.
    """

    def per_segment(value: float | Sequence[float]) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64).expand(len(segments)).clone()

    groups = group_clients(mechanism, clients)
    return RoundContext(round, groups, tuple(segments), per_segment(center), per_segment(radius), attempt)


def encode(
    mechanism: Mechanism,
    updates: Tensor,
    context: RoundContext,
    clients: Sequence[int] | None = None,
    seed: int = 0,
) -> Message:
    """Encode the batch of `clients` (default: the sorted cohort) with streams of one seed."""
    clients = context.cohort if clients is None else clients
    rand = ClientRandomness(SeededKeys(seed), clients, context.round, context.attempt)
    return mechanism.encode(updates, context, rand)


def decode(
    mechanism: Mechanism, symbols: Tensor, clients: Sequence[int], context: RoundContext, seed: int = 0
) -> Tensor:
    """Decode messages with public randomness of one seed."""
    public = PublicRandomness(SeededKeys(seed), context.round, context.attempt)
    return mechanism.decode(symbols, clients, context, public)


def golden_symbols(mechanism: Mechanism) -> str:
    """Return a fingerprint of a mechanism's messages: 16 hex digits of SHA-256 over symbols and bitstreams.

    It covers three clients, 64 coordinates in two segments, and fixed seeds. A changed fingerprint is a
    breaking change: recorded runs can't be repeated, and clients of two versions can't take part in one
    round.
    """
    context = make_context(mechanism, (5, 1, 3), SEGMENTS, radius=(1.0, 2.0), round=7)
    updates = torch.linspace(-1, 1, context.dim).expand(3, -1)
    message = encode(mechanism, updates, context, seed=42)
    public = PublicRandomness(SeededKeys(42), 7)
    digest = hashlib.sha256(message.symbols.to(torch.int64).numpy().tobytes())
    for client, row in zip(context.cohort, message.symbols, strict=True):
        digest.update(mechanism.message_code(client, context, public).pack(row))
    return digest.hexdigest()[:16]


class _UnmetError(Exception):
    """Error of a rule whose name the rule's function has."""


def must(condition: bool, message: str) -> None:
    """Refuse the mechanism unless a condition holds. The message has expected and received value."""
    if not condition:
        raise _UnmetError(message)


def rule(function: Rule) -> Rule:
    """Add a function to the list of rules. Its name is the rule's, also in errors of `must`."""

    @wraps(function)
    def checked(mechanism: Mechanism) -> None:
        try:
            function(mechanism)
        except _UnmetError as unmet:
            raise BrokenContractError(function.__name__, str(unmet)) from None

    RULES[function.__name__] = checked
    return checked


def inside(mechanism: Mechanism, context: RoundContext, updates: Tensor) -> Tensor:
    """Move updates to the centre of the range, or else to zero, until no coordinate counts as clipped."""
    middle = context.expand(context.center).float()
    for base in (middle, torch.zeros_like(middle)):
        rows = updates
        for _ in range(40):
            if encode(mechanism, rows, context).num_clipped == 0:
                return rows
            rows = base + 0.5 * (rows - base)
    message = "num_clipped must be 0 for updates near the centre or near zero"
    raise BrokenContractError("clips_and_counts", message)


def even_updates(num_clients: int, dim: int) -> Tensor:
    """Return uniform updates in +-0.9, the same for every mechanism."""
    generator = torch.Generator().manual_seed(5)
    return 0.9 * (2.0 * torch.rand(num_clients, dim, generator=generator) - 1.0)


def standard(mechanism: Mechanism) -> tuple[RoundContext, Tensor]:
    """Return a round of seven clients and two segments, and updates of which no coordinate is clipped."""
    context = make_context(mechanism, CLIENTS, SEGMENTS, radius=(1.0, 2.0), center=(0.1, -0.2))
    return context, inside(mechanism, context, even_updates(len(CLIENTS), context.dim))


def draws(mechanism: Mechanism) -> bool:
    """Return whether another seed gives other messages.

    It encodes 64 clients, so that a difference shows even with few bits per client.
    """
    context = make_context(mechanism, range(64), (64,))
    updates = torch.full((64, 64), 0.1)  # not zero, because a centred dither sends zero as zero
    one, other = (encode(mechanism, updates, context, seed=seed).symbols for seed in (0, 1))
    return not torch.equal(one, other)


def server_draws(mechanism: Mechanism) -> bool:
    """Return whether other seeds, rounds and attempts all decode the same messages to other sums."""
    contexts = [
        make_context(mechanism, range(64), (64,), round=r, attempt=a) for r, a in ((0, 0), (1, 0), (0, 1))
    ]
    symbols = encode(mechanism, torch.full((64, 64), 0.1), contexts[0]).symbols
    sums = [decode(mechanism, symbols, range(64), context) for context in contexts]
    sums.append(decode(mechanism, symbols, range(64), contexts[0], seed=1))
    return not any(torch.equal(one, other) for one, other in combinations(sums, 2))
