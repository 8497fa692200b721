"""One round by hand: contexts, messages and sums of a mechanism, and the list of rules."""

import hashlib
from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.contract import BrokenContractError as BrokenContractError
from lightning_fedq.mechanisms.interface import Mechanism, Message, RoundContext

Rule = Callable[[Mechanism], None]

RULES: dict[str, Rule] = {}
"""Every rule of the contract by name; the first line of its docstring says what it wants."""

SEGMENTS = (40, 24)
CLIENTS = (11, 3, 8, 0, 5, 7, 2)
COHORTS = (((6, 1, 4), (1, 4, 6)), ((6, 1, 4), (1, 4)), ((2,), (2,)))
"""Who is there and who answers: an odd cohort, a group that lost a client, a lone client."""
LAW_SEGMENTS, LAW_ROUNDS = (700, 400), 60
STANDARD_ERRORS = 5.0
"""Student's t with 59 degrees of freedom exceeds it with chance 6e-6, either way."""


def make_context(
    mechanism: Mechanism,
    clients: Sequence[int],
    segments: Sequence[int] = (5, 3),
    radius: float | Sequence[float] = 1.0,
    center: float | Sequence[float] = 0.0,
    round: int = 0,
    attempt: int = 0,
) -> RoundContext:
    """A round whose groups are `clients` in the given order, cut as the mechanism wants.

    Args:
        mechanism: Says how a cohort is cut.
        clients: The cohort.
        segments: Length of each segment.
        radius: Radius of the range, of all segments or one each.
        center: Centre of the range, of all segments or one each.
        attempt: Number of earlier attempts at the round.
    """
    groups, start = [], 0
    for size in mechanism.group_sizes(len(clients)):
        groups.append(tuple(clients[start : start + size]))
        start += size

    def per_segment(value: float | Sequence[float]) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64).expand(len(segments)).clone()

    return RoundContext(
        round, tuple(groups), tuple(segments), per_segment(center), per_segment(radius), attempt
    )


def encode(
    mechanism: Mechanism,
    updates: Tensor,
    context: RoundContext,
    clients: Sequence[int] | None = None,
    seed: int = 0,
) -> Message:
    """Encode the stack of `clients` (the sorted cohort by default) with streams of one seed."""
    clients = context.cohort if clients is None else clients
    rand = ClientRandomness(SeededKeys(seed), clients, context.round, context.attempt)
    return mechanism.encode(updates, context, rand)


def decode(
    mechanism: Mechanism, symbols: Tensor, clients: Sequence[int], context: RoundContext, seed: int = 0
) -> Tensor:
    """Decode with nothing but public randomness."""
    return mechanism.decode(
        symbols, clients, context, PublicRandomness(SeededKeys(seed), context.round, context.attempt)
    )


def golden_symbols(mechanism: Mechanism) -> str:
    """Fingerprint of a mechanism's messages: 16 hex digits of SHA-256 over symbols and bitstreams.

    Three clients, 64 coordinates in two segments, fixed seeds. Where it changes, recorded runs can't be
    repeated and clients of two versions can't talk: a breaking change.
    """
    context = make_context(mechanism, (5, 1, 3), SEGMENTS, radius=(1.0, 2.0), round=7)
    updates = torch.linspace(-1, 1, context.dim).expand(3, -1)
    message = encode(mechanism, updates, context, seed=42)
    public = PublicRandomness(SeededKeys(42), 7)
    digest = hashlib.sha256(message.symbols.to(torch.int64).numpy().tobytes())
    for client, row in zip(context.cohort, message.symbols, strict=True):
        digest.update(mechanism.message_code(client, context, public).pack(row))
    return digest.hexdigest()[:16]


def rule(function: Rule) -> Rule:
    """Put a function into the list of rules, under its name."""
    RULES[function.__name__] = function
    return function


def inside(mechanism: Mechanism, context: RoundContext, updates: Tensor) -> Tensor:
    """The updates, drawn to the centre of the range, or else to zero, until none counts as clipped."""
    middle = context.expand(context.center).float()
    for base in (middle, torch.zeros_like(middle)):
        rows = updates
        for _ in range(40):
            if encode(mechanism, rows, context).num_clipped == 0:
                return rows
            rows = base + 0.5 * (rows - base)
    message = "updates near the centre, and near zero, count as clipped; num_clipped counts what lies outside"
    raise BrokenContractError("clips_and_counts", message)


def even_updates(num_clients: int, dim: int) -> Tensor:
    """In +-0.9, the same for every mechanism."""
    generator = torch.Generator().manual_seed(5)
    return 0.9 * (2.0 * torch.rand(num_clients, dim, generator=generator) - 1.0)


def standard(mechanism: Mechanism) -> tuple[RoundContext, Tensor]:
    """A round of seven clients and two segments, and updates that nothing of is clipped."""
    context = make_context(mechanism, CLIENTS, SEGMENTS, radius=(1.0, 2.0), center=(0.1, -0.2))
    return context, inside(mechanism, context, even_updates(len(CLIENTS), context.dim))


def draws(mechanism: Mechanism) -> bool:
    """Does another seed give other messages? Of 64 clients, so that few bits each do."""
    context = make_context(mechanism, range(64), (64,))
    updates = torch.full((64, 64), 0.1)  # not zero: a centred dither sends zero as zero
    one, other = (encode(mechanism, updates, context, seed=seed).symbols for seed in (0, 1))
    return not torch.equal(one, other)


def server_draws(mechanism: Mechanism) -> bool:
    """Do other seeds, rounds and attempts all decode the same messages to other sums?"""
    contexts = [
        make_context(mechanism, range(64), (64,), round=r, attempt=a) for r, a in ((0, 0), (1, 0), (0, 1))
    ]
    symbols = encode(mechanism, torch.full((64, 64), 0.1), contexts[0]).symbols
    sums = [decode(mechanism, symbols, range(64), context) for context in contexts]
    sums.append(decode(mechanism, symbols, range(64), contexts[0], seed=1))
    return not any(torch.equal(one, other) for one, other in combinations(sums, 2))
