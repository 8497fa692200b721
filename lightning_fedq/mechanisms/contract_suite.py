"""Contract suite of mechanisms: `check_mechanism` holds any mechanism, yours too, against every rule.

A rule is a function of a mechanism that raises `BrokenContractError` with its own name; `RULES` lists them.
All draws come from seeded streams, so a mechanism passes always or never. Rules about laws compare with what
chance allows; the probability that a right mechanism fails all of them together, over fresh seeds, is below
1e-3.

    from lightning_fedq.mechanisms.contract_suite import RULES, check_mechanism

    def test_contract():
        check_mechanism(MyMechanism(epsilon=1.0))

or, one test a rule:

    @pytest.mark.parametrize("rule", RULES)
    def test_contract(rule):
        RULES[rule](MyMechanism(epsilon=1.0))
"""

from __future__ import annotations

import ast
import hashlib
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml
from jsonargparse import ArgumentParser
from torch import Tensor

from lightning_fedq.functional.exact_error.dither import round_to_grid
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanism import Adversary, Mechanism, Message, Neighbours, NonPrivate, RoundContext
from lightning_fedq.mechanisms.contract import BrokenContractError as BrokenContractError
from lightning_fedq.mechanisms.contract import check_claims, check_decoded, check_message, must
from lightning_fedq.wire.coding import UndecodableError

Rule = Callable[[Mechanism], None]

RULES: dict[str, Rule] = {}
"""Every rule of the contract by name; the first line of its docstring says what it wants."""

_SEGMENTS = (40, 24)
_CLIENTS = (11, 3, 8, 0, 5, 7, 2)
_COHORTS = (((6, 1, 4), (1, 4, 6)), ((6, 1, 4), (1, 4)), ((2,), (2,)))
"""Who is there and who answers: an odd cohort, a group that lost a client, a lone client."""
_LAW_SEGMENTS, _LAW_ROUNDS = (640, 384), 60
_STANDARD_ERRORS = 5.0
"""Student's t with 59 degrees of freedom exceeds it with chance 6e-6, either way."""


# ---- one round by hand ---------------------------------------------------------------------------------


def context_of(
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
        round: Its number.
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
    context = context_of(mechanism, (5, 1, 3), _SEGMENTS, radius=(1.0, 2.0), round=7)
    updates = torch.linspace(-1, 1, context.dim).expand(3, -1)
    message = encode(mechanism, updates, context, seed=42)
    public = PublicRandomness(SeededKeys(42), 7)
    digest = hashlib.sha256(message.symbols.to(torch.int64).numpy().tobytes())
    for client, row in zip(context.cohort, message.symbols, strict=True):
        digest.update(mechanism.message_code(client, context, public).pack(row))
    return digest.hexdigest()[:16]


# ---- the suite ---------------------------------------------------------------------------------------------


def check_mechanism(mechanism: Mechanism, rules: Iterable[str] | None = None) -> None:
    """Hold a mechanism against the contract. Some seconds.

    Args:
        mechanism: With settings as they would be used. Where it draws little noise, errors show better.
        rules: Names of rules; None is all of `RULES`.

    Raises:
        BrokenContractError: Which rules are broken, each with what was wanted and what came.
        ValueError: If there is no such rule.

    Example:
        >>> from lightning_fedq.mechanisms import LDPQ
        >>> check_mechanism(LDPQ(epsilon=1.0))
    """
    names = tuple(RULES) if rules is None else tuple(rules)
    if unknown := [name for name in names if name not in RULES]:
        raise ValueError(f"there is no rule {', '.join(unknown)}; the rules are {', '.join(RULES)}")
    broken: list[BrokenContractError] = []
    for name in names:
        try:
            RULES[name](mechanism)
        except BrokenContractError as error:
            if error.rule not in [other.rule for other in broken]:
                broken.append(error)
        except Exception as error:  # whatever a mechanism of another package may raise
            told = BrokenContractError(name, f"raised {type(error).__name__}: {error}")
            told.__cause__ = error
            broken.append(told)
    if broken:
        lines = "\n".join(f"  {error}" for error in broken)
        text = f"{mechanism!r} breaks {len(broken)} of {len(names)} rules of the contract:\n{lines}"
        raise BrokenContractError(", ".join(error.rule for error in broken), text) from broken[0]


def _rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def _inside(mechanism: Mechanism, context: RoundContext, updates: Tensor) -> Tensor:
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


def _updates(num_clients: int, dim: int) -> Tensor:
    """In +-0.9, the same for every mechanism."""
    generator = torch.Generator().manual_seed(5)
    return 0.9 * (2.0 * torch.rand(num_clients, dim, generator=generator) - 1.0)


def _standard(mechanism: Mechanism) -> tuple[RoundContext, Tensor]:
    context = context_of(mechanism, _CLIENTS, _SEGMENTS, radius=(1.0, 2.0), center=(0.1, -0.2))
    return context, _inside(mechanism, context, _updates(len(_CLIENTS), context.dim))


def _draws(mechanism: Mechanism) -> bool:
    """Does another seed give other messages? Of 64 clients, so that few bits each do."""
    context = context_of(mechanism, range(64), (64,))
    updates = torch.full((64, 64), 0.1)  # not zero: a centred dither sends zero as zero
    one, other = (encode(mechanism, updates, context, seed=seed).symbols for seed in (0, 1))
    return not torch.equal(one, other)


def _server_draws(mechanism: Mechanism) -> bool:
    """Do other seeds, rounds and attempts all decode the same messages to other sums?"""
    contexts = [
        context_of(mechanism, range(64), (64,), round=r, attempt=a) for r, a in ((0, 0), (1, 0), (0, 1))
    ]
    symbols = encode(mechanism, torch.full((64, 64), 0.1), contexts[0]).symbols
    sums = [decode(mechanism, symbols, range(64), context) for context in contexts]
    sums.append(decode(mechanism, symbols, range(64), contexts[0], seed=1))
    return not any(torch.equal(one, other) for one, other in combinations(sums, 2))


@_rule
def frozen_dataclass(mechanism: Mechanism) -> None:
    """A mechanism is a frozen, hashable dataclass of parameters."""
    rule, kind = "frozen_dataclass", type(mechanism)
    frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    must(frozen, rule, f"{kind.__name__} must be a dataclass with frozen=True; state lives in the engine")
    hash(mechanism)


@_rule
def keeps_no_state(mechanism: Mechanism) -> None:
    """A round leaves a mechanism as it was, what `cached_property` keeps aside."""
    kept = {
        name
        for base in type(mechanism).__mro__
        for name, value in vars(base).items()
        if isinstance(value, cached_property)
    }

    def state(anything: object) -> dict[str, str]:
        return {name: repr(value) for name, value in vars(anything).items() if name not in kept}

    before = state(mechanism)
    context, updates = _standard(mechanism)
    symbols = encode(mechanism, updates, context).symbols
    decode(mechanism, symbols, context.cohort, context)
    mechanism.claims(context)
    changed = [name for name, value in state(mechanism).items() if before.get(name) != value]
    must(
        not changed,
        "keeps_no_state",
        f"a round has changed {', '.join(changed)}; a mechanism is its parameters, state lives in the engine",
    )


@_rule
def groups_cover_the_cohort(mechanism: Mechanism) -> None:
    """`group_sizes` cuts a cohort of any size into groups of at least one client."""
    for size in (1, 2, 3, 7, 10):
        sizes = mechanism.group_sizes(size)
        good = sum(sizes) == size and min(sizes) >= 1
        must(good, "groups_cover_the_cohort", f"group_sizes({size}) must sum to {size}, got {sizes}")


@_rule
def one_claim_per_adversary(mechanism: Mechanism) -> None:
    """`claims` says something about every adversary, once."""
    for clients in (_CLIENTS, (3,), (5, 2)):
        context = context_of(mechanism, clients, _SEGMENTS)
        claims = mechanism.claims(context)
        check_claims(claims)
        units = (1, context.dim, mechanism.num_symbols(context))
        for claim in claims:
            must(
                claim.compositions in units,
                "one_claim_per_adversary",
                f"losses a message must be one of {units} (message, coordinates, symbols), got "
                f"{claim.compositions} for {claim.adversary.name}",
            )


@_rule
def integer_symbols(mechanism: Mechanism) -> None:
    """`encode` returns one row of integers a client, and counts the bits of the wire."""
    context, updates = _standard(mechanism)
    check_message(mechanism, encode(mechanism, updates, context), context, len(updates))


@_rule
def decodes_to_the_sum(mechanism: Mechanism) -> None:
    """`decode` returns finite floats, one a coordinate: float32, or float64 where there is a grid."""
    context, updates = _standard(mechanism)
    total = decode(mechanism, encode(mechanism, updates, context).symbols, context.cohort, context)
    check_decoded(total, context)
    wanted = torch.float32 if mechanism.grid(context) is None else torch.float64
    must(total.dtype == wanted, "decodes_to_the_sum", f"decode() must return {wanted}, got {total.dtype}")


@_rule
def same_streams_same_message(mechanism: Mechanism) -> None:
    """Messages follow from update, round and streams: nothing else is drawn."""
    context, updates = _standard(mechanism)
    first, second = (encode(mechanism, updates, context) for _ in range(2))
    same = torch.equal(first.symbols, second.symbols) and first.num_bits == second.num_bits
    must(same, "same_streams_same_message", "two calls of encode() with the same streams differ")


@_rule
def fresh_coins(mechanism: Mechanism) -> None:
    """Another client, round, attempt or seed draws other coins. Who draws none promises nothing."""
    rule = "fresh_coins"
    if not _draws(mechanism):
        claims = mechanism.claims(context_of(mechanism, (4, 9), _SEGMENTS))
        private = [claim.adversary for claim in claims if not isinstance(claim.loss, NonPrivate)]
        if _server_draws(mechanism):  # then it is trusted
            private = [who for who in private if who not in (Adversary.OUTSIDER, Adversary.CLIENT)]
        names = ", ".join(who.name for who in private)
        told = f"64 messages are the same whatever the seed, yet claims are made about {names}"
        must(not private, rule, told)
        return
    updates = torch.full((64, 64), 0.1)
    context = context_of(mechanism, range(64), (64,))
    symbols = encode(mechanism, updates, context).symbols
    must(bool((symbols != symbols[:1]).any()), rule, "64 clients with equal updates send equal messages")
    for what, other in (
        ("round", context_of(mechanism, range(64), (64,), round=1)),
        ("attempt", context_of(mechanism, range(64), (64,), attempt=1)),
    ):
        again = encode(mechanism, updates, other).symbols
        must(not torch.equal(symbols, again), rule, f"another {what} repeats the coins of 64 messages")


class _Exchanged(SeededKeys):
    """Keys of one seed, some kinds of which are those of another. The federation keeps its name."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(0)
        self._other, self._kinds = SeededKeys(1), kinds

    def public(self) -> bytes:
        """See `Keys.public`. Its first half names the federation in the address of every stream."""
        own = super().public()
        return own[:16] + self._other.public()[16:] if "public" in self._kinds else own

    def members(self) -> bytes:
        """See `Keys.members`."""
        return self._other.members() if "members" in self._kinds else super().members()

    def client(self, client: int) -> bytes:
        """See `Keys.client`."""
        return self._other.client(client) if "client" in self._kinds else super().client(client)

    def peer(self, group: tuple[int, ...]) -> bytes:
        """See `Keys.peer`."""
        return self._other.peer(group) if "peer" in self._kinds else super().peer(group)

    def private(self, client: int) -> bytes:
        """See `Keys.private`."""
        return self._other.private(client) if "private" in self._kinds else super().private(client)


@_rule
def streams_are_whose_they_are(mechanism: Mechanism) -> None:
    """Messages hang on streams that the server lacks, and on others only where `decode` reads them too.

    Of 64 clients, streams of one kind are exchanged and all others stay. Where something is claimed against a
    server, streams that groups share must change messages, and private ones too, unless a group's shared
    words are all there is and nothing is claimed against who knows them. What the server knows may change
    messages only if it changes how they are decoded.
    """
    rule, context = "streams_are_whose_they_are", context_of(mechanism, range(64), (64,))
    claims = {claim.adversary: claim.loss for claim in mechanism.claims(context)}
    if all(isinstance(claims[who], NonPrivate) for who in (Adversary.SERVER, Adversary.SECAGG_SERVER)):
        return
    updates = torch.full((64, 64), 0.1)

    def message(keys: SeededKeys) -> Tensor:
        return mechanism.encode(updates, context, ClientRandomness(keys, range(64), 0)).symbols

    before = message(SeededKeys(0))
    in_groups = max(mechanism.group_sizes(64)) > 1
    hidden = ["peer"] if in_groups else []
    if not in_groups or math.isfinite(claims[Adversary.SERVER_AND_PARTNER].pure_epsilon):
        hidden.append("private")
    for kind in hidden:
        changes = not torch.equal(message(_Exchanged(kind)), before)
        told = f"other {kind} streams give the same messages, so what should hide them comes from elsewhere"
        must(changes, rule, told)
    for kind in ("public", "members", "client"):
        keys = _Exchanged(kind)
        if torch.equal(message(keys), before):
            continue
        known = (PublicRandomness(each, 0) for each in (SeededKeys(0), keys))
        sums = [mechanism.decode(before, range(64), context, public) for public in known]
        told = (
            f"other {kind} streams give other messages that are decoded as before, so that the server knows "
            "of a coin what it does not need; take it from rand.private, or rand.peer"
        )
        must(not torch.equal(*sums), rule, told)


@_rule
def stack_equals_rows(mechanism: Mechanism) -> None:
    """A stack of clients is encoded as each of them alone would be."""
    rule = "stack_equals_rows"
    context, updates = _standard(mechanism)
    updates = 3.0 * updates  # so that some are clipped
    stack = encode(mechanism, updates, context)
    single = [encode(mechanism, updates[i : i + 1], context, [c]) for i, c in enumerate(context.cohort)]
    flat = [encode(mechanism, updates[i], context, [c]) for i, c in enumerate(context.cohort)]
    rows = torch.cat([message.symbols for message in single])
    must(torch.equal(stack.symbols, rows), rule, "symbols of a stack differ from those of its rows alone")
    alike = all(torch.equal(one.symbols, two.symbols[0]) for one, two in zip(flat, single, strict=True))
    must(alike, rule, "an update (dim,) must give symbols (m,), the row of the stack (1, dim)")
    for name in ("num_bits", "num_clipped"):
        whole, parts = getattr(stack, name), sum(getattr(message, name) for message in single)
        must(whole == parts, rule, f"{name} of a stack is {whole}, that of its rows {parts} in all")


@_rule
def sum_decodes_like_its_parts(mechanism: Mechanism) -> None:
    """Decoded parts add up to the decoded whole, and a homomorphic one reads the sum of symbols."""
    rule = "sum_decodes_like_its_parts"
    context, updates = _standard(mechanism)
    symbols, cohort = encode(mechanism, updates, context).symbols, context.cohort
    together = decode(mechanism, symbols, cohort, context)
    if not mechanism.joint:
        parts = torch.stack(
            [decode(mechanism, symbols[i : i + 1], [c], context).double() for i, c in enumerate(cohort)]
        )
        # float32 output: half an ulp for each part and the sum
        allowed = 2.0**-22 * (parts.abs().sum(0) + together.abs())
        error = (together.double() - parts.sum(0)).abs()
        worst = int((error - allowed).argmax())
        must(
            bool((error <= allowed).all()),
            rule,
            f"coordinate {worst} is {together[worst].item():g} of all messages together, and "
            f"{parts.sum(0)[worst].item():g} as the sum of its parts",
        )
    if (grid := mechanism.grid(context)) is not None:
        rounded = round_to_grid(together, grid)
        raw = bool((rounded - together).abs().max() > grid / 10)
        must(raw, rule, "decode() must not round to its grid: that is done once, to the sum of all clients")
    if mechanism.homomorphic:
        summed = decode(mechanism, symbols.sum(0, dtype=torch.int64), cohort, context)
        must(torch.equal(summed, together), rule, "the sum of all symbols decodes to something else")


@_rule
def bits_are_those_of_the_stream(mechanism: Mechanism) -> None:
    """`num_bits` is the length of streams that unpack to the symbols, and other bytes are refused."""
    rule = "bits_are_those_of_the_stream"
    context, updates = _standard(mechanism)
    message, public = encode(mechanism, updates, context), PublicRandomness(SeededKeys(0), context.round)
    total = 0
    for client, symbols in zip(context.cohort, message.symbols, strict=True):
        code = mechanism.message_code(client, context, public)
        bits, stream = code.num_bits(symbols), code.pack(symbols)
        must(len(stream) == (bits + 7) // 8, rule, f"a stream of {bits} bits is {len(stream)} bytes long")
        same = torch.equal(code.unpack(stream, len(symbols)).to(symbols), symbols)
        must(same, rule, f"the stream of client {client} unpacks to other symbols")
        for other in (b"", stream[:-1], stream + b"\xff", bytes(len(stream))):
            try:
                code.unpack(other, len(symbols))
            except Exception as error:
                named = isinstance(error, UndecodableError)
                must(
                    named, rule, f"unpack of other bytes raises {type(error).__name__}, not UndecodableError"
                )
        total += bits
    must(
        message.num_bits == total,
        rule,
        f"num_bits must be {total}, the streams' length, got {message.num_bits}",
    )


@_rule
def symbols_lie_in_their_range(mechanism: Mechanism) -> None:
    """Symbols keep to `symbol_range` and `symbol_modulus`, and servers take them."""
    rule = "symbols_lie_in_their_range"
    context, updates = _standard(mechanism)
    public = PublicRandomness(SeededKeys(0), context.round)
    for name, rows in (("ordinary", updates), ("huge", 2.0**100 * updates)):
        symbols = encode(mechanism, rows, context).symbols.to(torch.int64)
        if (modulus := mechanism.symbol_modulus(context)) is not None:
            size, count = modulus
            must(symbols.shape[1] == count, rule, f"a message has {symbols.shape[1]} symbols, not {count}")
            inside = bool(((symbols >= 0) & (symbols < size)).all())
            must(inside, rule, f"symbols of {name} updates are no residues modulo {size}")
        if (ends := mechanism.symbol_range(context, public)) is not None:
            low, high = (torch.as_tensor(end) for end in ends)
            inside = bool(((symbols >= low) & (symbols <= high)).all())
            must(inside, rule, f"symbols of {name} updates leave symbol_range")
        for client, row in zip(sorted(context.cohort), symbols, strict=True):
            can = mechanism.can_send(row, client, context, public)
            must(can, rule, f"a server would refuse symbols of {name} updates (can_send)")


@lru_cache(maxsize=4)
def _simulated(
    mechanism: Mechanism, clients: tuple[int, ...], answered: tuple[int, ...]
) -> tuple[RoundContext, Tensor, Tensor]:
    """Context, exact mean `(dim,)` and decoded means `(rounds, dim)` of updates inside the range."""
    contexts = [
        context_of(mechanism, clients, _LAW_SEGMENTS, radius=(1.0, 2.0), center=(0.1, -0.2), round=r)
        for r in range(_LAW_ROUNDS)
    ]
    dim, cohort = contexts[0].dim, sorted(clients)
    updates = _updates(len(cohort), dim)
    for context in contexts:
        updates = _inside(mechanism, context, updates)
    rows = updates[[cohort.index(client) for client in answered]]
    means = []
    for context in contexts:
        symbols = encode(mechanism, rows, context, answered).symbols
        means.append(decode(mechanism, symbols, answered, context).double() / len(answered))
    return contexts[0], rows.double().mean(0), torch.stack(means)


def _directions(exact: Tensor) -> dict[str, Tensor]:
    """Unit vectors in which a bias shows, by name: a wrong scale, an offset, a wrong curve, a wrong layer."""
    found = {"along the update": exact, "along ones": torch.ones_like(exact)}
    for what, order in (("values", exact.argsort()), ("coordinates", torch.arange(len(exact)))):
        for number, part in enumerate(order.chunk(8), 1):
            found[f"over part {number} of 8 of the {what}"] = torch.zeros_like(exact).index_fill(0, part, 1.0)
    return {name: vector / vector.norm() for name, vector in found.items()}


@_rule
def unbiased(mechanism: Mechanism) -> None:
    """The decoded mean is right on average: odd cohorts, lone clients, groups that lost one. 60 rounds."""
    if not mechanism.unbiased:
        return
    for clients, answered in _COHORTS:
        _, exact, means = _simulated(mechanism, clients, answered)
        for name, direction in _directions(exact).items():
            along = (means - exact) @ direction
            error = along.std() / _LAW_ROUNDS**0.5 + 1e-6 * means.abs().max()  # float32 output
            score = float(along.mean().abs() / error)
            must(
                score <= _STANDARD_ERRORS,
                "unbiased",
                f"with {len(answered)} of {len(clients)} clients, the mean is off by "
                f"{along.mean().item():.3g} {name}, {score:.1f} standard errors; a mechanism "
                "that is meant to be biased says unbiased = False",
            )


@_rule
def noise_bound_holds(mechanism: Mechanism) -> None:
    """`noise_variance`, where there is one, is not exceeded by what can be proven of 60 rounds."""
    for clients, answered in _COHORTS:
        context, _, means = _simulated(mechanism, clients, answered)
        bound = mechanism.noise_variance(context, answered)
        if bound is None:
            return
        shape = tuple(bound.shape)
        must(shape == (2,), "noise_bound_holds", f"noise_variance() needs one value a segment, got {shape}")
        squares = (means - means.mean(0)).square() * (_LAW_ROUNDS / (_LAW_ROUNDS - 1))
        for segment, part in enumerate(torch.split(squares, list(_LAW_SEGMENTS), 1)):
            by_round = part.mean(1)
            proven = by_round.mean() - _STANDARD_ERRORS * by_round.std() / _LAW_ROUNDS**0.5
            rounding = (1e-6 * means.abs().max()) ** 2  # float32 output
            must(
                bool(proven <= bound[segment] + rounding),
                "noise_bound_holds",
                f"with {len(answered)} of {len(clients)} clients, the variance of segment {segment} is at "
                f"least {proven.item():.4g}, the bound is {bound[segment].item():.4g}",
            )


@_rule
def any_float_type(mechanism: Mechanism) -> None:
    """Updates of any float type are encoded as float32 ones of the same values."""
    context, updates = _standard(mechanism)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        rows = updates.to(dtype)
        expected = encode(mechanism, rows.float(), context).symbols
        same = torch.equal(encode(mechanism, rows, context).symbols, expected)
        must(same, "any_float_type", f"updates of {dtype} give other symbols than the same values in float32")


@_rule
def devices_agree(mechanism: Mechanism) -> None:
    """Symbols are the same on every device, and stay there. A GPU is tried where there is one."""
    context, updates = _standard(mechanism)
    here = encode(mechanism, updates, context).symbols
    mean = decode(mechanism, here, context.cohort, context)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        there = encode(mechanism, updates.to(device), context).symbols
        must(there.device.type == device, "devices_agree", f"symbols left {device} for {there.device}")
        must(torch.equal(there.cpu(), here), "devices_agree", f"symbols on {device} are others")
        found = decode(mechanism, there, context.cohort, context)
        must(
            found.device.type == device, "devices_agree", f"the decoded sum left {device} for {found.device}"
        )
        close = torch.allclose(found.cpu(), mean, rtol=1e-5, atol=1e-5 * float(mean.abs().max()))
        must(close, "devices_agree", f"the decoded sum on {device} is another")


@_rule
def clips_and_counts(mechanism: Mechanism) -> None:
    """Values outside the range are clipped and counted, or arrive at their own size on average."""
    rule, context = "clips_and_counts", context_of(mechanism, (1,), (64,))
    ones = torch.ones(1, 64)
    far, farther = (encode(mechanism, size * ones, context) for size in (2.0**80, 2.0**100))
    if far.num_clipped == 0:
        total = decode(mechanism, far.symbols, (1,), context)
        arrived = 0.5 < float(total.mean()) / 2.0**80 < 1.5  # rounding may be as coarse as the update is long
        must(
            arrived,
            rule,
            "an update of 2^80 in each coordinate is not counted as clipped, and does not arrive",
        )
        return
    must(far.num_clipped <= 64, rule, f"{far.num_clipped} of 64 coordinates were clipped")
    must(
        torch.equal(far.symbols, farther.symbols),
        rule,
        "updates of 2^80 and 2^100 in each coordinate are clipped to the same one, but symbols differ",
    )
    inside, outside = (encode(mechanism, size * ones, context).num_clipped for size in (0.999, 1.001))
    if inside == 0 and outside > 0:  # the range ends there, for this direction
        same = torch.equal(far.symbols, encode(mechanism, ones, context).symbols)
        must(same, rule, "an update far outside is sent as another one than that at the end of the range")


@_rule
def each_segment_has_its_range(mechanism: Mechanism) -> None:
    """Who reads the range of one segment reads that of each, and for the segment's own symbols."""
    rule, segments, clients = "each_segment_has_its_range", (96, 160), (4, 9, 2, 7)
    updates = _updates(len(clients), sum(segments))

    def symbols(
        radius: Sequence[float] = (1.0, 1.0), center: Sequence[float] = (0.0, 0.0)
    ) -> tuple[Tensor, ...]:
        context = context_of(mechanism, clients, segments, radius, center)
        found = encode(mechanism, updates, context).symbols
        return torch.split(found, list(segments), 1) if found.shape[1] == sum(segments) else (found, found)

    before = symbols()
    for what, ordinary, other in (("radius", 1.0, 2.0**-6), ("center", 0.0, 8.0)):
        first, second = (symbols(**{what: values}) for values in ((other, ordinary), (ordinary, other)))
        reads = [not torch.equal(first[0], before[0]), not torch.equal(second[1], before[1])]
        anything = [
            any(not torch.equal(one, two) for one, two in zip(found, before, strict=True))
            for found in (first, second)
        ]
        for segment in (0, 1):
            must(
                reads[segment] or not any(anything),
                rule,
                f"the {what} of segment {segment + 1} of 2 does not change its symbols, but one of the two "
                "changes some; take `context.expand(context.radius)` and `context.expand(context.center)`",
            )


@_rule
def two_neighbours(mechanism: Mechanism) -> None:
    """`worst_pair` gives two different finite updates. Zero is the second if a claim is about zeroing out."""
    rule = "two_neighbours"
    context = context_of(mechanism, (4, 9, 2, 7), (5, 3), radius=(1.0, 2.0), center=(0.5, 0.0))
    high, low = mechanism.worst_pair(9, context, PublicRandomness(SeededKeys(0), 0))
    for update in (high, low):
        shaped = tuple(update.shape) == (8,) and update.dtype == torch.float64
        must(shaped, rule, f"updates must be (dim,) float64, got {tuple(update.shape)} {update.dtype}")
        must(bool(torch.isfinite(update).all()), rule, "an update of the pair is not finite")
    must(bool((high != low).any()), rule, "both updates are the same: nothing could be told apart")
    if any(claim.neighbours is Neighbours.ZERO_OUT for claim in mechanism.claims(context)):
        must(not bool(low.any()), rule, "a claim is about zeroing out, so the second update must be zero")


@_rule
def lever_is_at_least_one(mechanism: Mechanism) -> None:
    """`lever` is None or at least 1: an honest client can move the sum by its own extreme."""
    context = context_of(mechanism, (4, 9))
    for client in (4, 9):
        lever = mechanism.lever(client, context)
        good = lever is None or lever >= 1.0 - 1e-12
        must(good, "lever_is_at_least_one", f"lever() must be None or >= 1, got {lever}")


@_rule
def pickles(mechanism: Mechanism) -> None:
    """A mechanism goes to other processes and comes back equal."""
    must(pickle.loads(pickle.dumps(mechanism)) == mechanism, "pickles", "it comes back as another one")


@_rule
def builds_from_yaml(mechanism: Mechanism) -> None:
    """A configuration names the class and its parameters, all of them plain values."""
    kind = type(mechanism)
    arguments = asdict(mechanism)  # type: ignore[call-overload]
    text = yaml.safe_dump(
        {"mechanism": {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}}
    )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--mechanism", type=Mechanism)
    with TemporaryDirectory() as folder:
        path = Path(folder, "mechanism.yaml")
        path.write_text(text)
        built = parser.instantiate(parser.parse_args([f"--config={path}"])).mechanism
    must(built == mechanism, "builds_from_yaml", f"its settings in YAML build {built!r}:\n{text}")


@_rule
def reads_back_from_its_repr(mechanism: Mechanism) -> None:
    """Checkpoints hold a mechanism as its `repr`: a call with plain values by keyword."""
    rule = "reads_back_from_its_repr"
    try:
        call = ast.parse(repr(mechanism), mode="eval").body
        plain = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
        values = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords} if plain else None  # type: ignore[attr-defined]
    except (SyntaxError, ValueError):
        values = None
    must(
        values is not None,
        rule,
        f"repr must be Name(parameter=value, ...) of plain values, got {mechanism!r}",
    )
    assert values is not None
    built = type(mechanism)(**values)
    must(built == mechanism, rule, f"{mechanism!r} reads back as {built!r}")
