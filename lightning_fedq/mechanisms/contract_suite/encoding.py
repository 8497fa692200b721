"""Rules about the class of a mechanism and about its messages."""

import math
from dataclasses import is_dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_fedq.functional.exact_error.dither import round_to_grid
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.contract import check_claims, check_decoded, check_message
from lightning_fedq.mechanisms.contract_suite.manual_round import (
    CLIENTS,
    SEGMENTS,
    decode,
    draws,
    encode,
    make_context,
    must,
    rule,
    server_draws,
    standard,
)
from lightning_fedq.mechanisms.interface import (
    NO_SLACK,
    Adversary,
    GaussianLoss,
    LaplaceLoss,
    Mechanism,
    NonPrivate,
)
from lightning_fedq.wire.coding import UndecodableError


@rule
def frozen_dataclass(mechanism: Mechanism) -> None:
    """A mechanism is a frozen, hashable dataclass of parameters."""
    kind = type(mechanism)
    frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    must(frozen, f"{kind.__name__} must be a dataclass with frozen=True, as the engine has all state")
    hash(mechanism)


@rule
def keeps_no_state(mechanism: Mechanism) -> None:
    """A round does not change a mechanism, except for values of `cached_property`."""

    def state(anything: object) -> dict[str, str]:
        kind, held = type(anything), vars(anything)
        own = [name for name in held if not isinstance(getattr(kind, name, None), cached_property)]
        return {name: repr(held[name]) for name in own}

    before = state(mechanism)
    context, updates = standard(mechanism)
    symbols = encode(mechanism, updates, context).symbols
    decode(mechanism, symbols, context.cohort, context)
    mechanism.claims(context)
    changed = [name for name, value in state(mechanism).items() if before.get(name) != value]
    must(
        not changed,
        f"a round must not change the mechanism, but changed {', '.join(changed)}. The engine has all state.",
    )


@rule
def groups_cover_the_cohort(mechanism: Mechanism) -> None:
    """`group_sizes` cuts a cohort of any size into groups of at least one client."""
    for size in (1, 2, 3, 7, 10):
        sizes = mechanism.group_sizes(size)
        good = sum(sizes) == size and min(sizes) >= 1
        must(good, f"group_sizes({size}) must sum to {size}, got {sizes}")


@rule
def claims_go_with_encode(mechanism: Mechanism) -> None:
    """A class that overrides `encode` also defines `claims`, in the same class or in a later subclass."""
    order = type(mechanism).__mro__
    sends, claims = (
        next(place for place, kind in enumerate(order) if name in vars(kind)) for name in ("encode", "claims")
    )
    promised = mechanism.claims(make_context(mechanism, CLIENTS, SEGMENTS))
    must(
        claims <= sends or all(isinstance(claim.loss, NonPrivate) for claim in promised),
        f"{order[sends].__name__} defines encode(), but {order[claims].__name__} defines claims(). Define "
        "claims next to encode: with `single_message_claims` if messages are changed, or "
        f"`claims = {order[claims].__name__}.claims` if their distribution is the same.",
    )


@rule
def continuous_noise_has_slack(mechanism: Mechanism) -> None:
    """A claim about Gaussian or Laplace noise states its distance from floats, as slack or in words.

    No computer draws a continuous distribution. Noise on a grid that is added to values off the grid reveals
    their low bits.
    """
    for claim in mechanism.claims(make_context(mechanism, CLIENTS, SEGMENTS)):
        stated = claim.slack != NO_SLACK or any("float" in text for text in claim.assumptions)
        must(
            stated or not isinstance(claim.loss, (GaussianLoss, LaplaceLoss)),
            f"the claim about {claim.adversary.name} has a continuous distribution and no slack. Put values "
            "on a grid and state Slack (`functional.noise.grid_noise`), or claim the drawn distribution.",
        )


@rule
def single_claim_per_adversary(mechanism: Mechanism) -> None:
    """`claims` has exactly one claim per adversary."""
    for clients in (CLIENTS, (3,), (5, 2)):
        context = make_context(mechanism, clients, SEGMENTS)
        claims = mechanism.claims(context)
        check_claims(claims)
        units = (1, context.dim, mechanism.num_symbols(context))
        for claim in claims:
            must(
                claim.compositions in units,
                f"compositions must be one of {units} (message, coordinates, symbols), got "
                f"{claim.compositions} for {claim.adversary.name}",
            )


@rule
def integer_symbols(mechanism: Mechanism) -> None:
    """`encode` returns one row of integers per client, and counts the bits that are sent."""
    context, updates = standard(mechanism)
    check_message(mechanism, encode(mechanism, updates, context), context, len(updates))


@rule
def decodes_to_the_sum(mechanism: Mechanism) -> None:
    """`decode` returns a finite float per coordinate: float32, or float64 for grids and float sums."""
    context, updates = standard(mechanism)
    total = decode(mechanism, encode(mechanism, updates, context).symbols, context.cohort, context)
    check_decoded(total, context)
    floats = mechanism.order_free and not mechanism.homomorphic
    wanted = torch.float64 if floats or mechanism.grid(context) is not None else torch.float32
    must(total.dtype == wanted, f"decode() must return {wanted}, got {total.dtype}")


@rule
def same_streams_same_message(mechanism: Mechanism) -> None:
    """Update, round and streams determine a message. Nothing else is drawn."""
    context, updates = standard(mechanism)
    first, second = (encode(mechanism, updates, context) for _ in range(2))
    same = torch.equal(first.symbols, second.symbols) and first.num_bits == second.num_bits
    must(same, "two calls of encode() with the same streams differ")


@rule
def fresh_coins(mechanism: Mechanism) -> None:
    """Another client, round, attempt or seed gives other messages, or else nothing is claimed."""
    if not draws(mechanism):
        claims = mechanism.claims(make_context(mechanism, (4, 9), SEGMENTS))
        private = [claim.adversary for claim in claims if not isinstance(claim.loss, NonPrivate)]
        if server_draws(mechanism):  # the server is then trusted
            private = [who for who in private if who not in (Adversary.OUTSIDER, Adversary.CLIENT)]
        names = ", ".join(who.name for who in private)
        problem = f"64 messages are the same for all seeds, but there are claims about {names}"
        must(not private, problem)
        return
    updates = torch.full((64, 64), 0.1)
    context = make_context(mechanism, range(64), (64,))
    symbols = encode(mechanism, updates, context).symbols
    must(bool((symbols != symbols[:1]).any()), "64 clients with equal updates send equal messages")
    for what in ("round", "attempt"):
        other = make_context(mechanism, range(64), (64,), **{what: 1})
        again = encode(mechanism, updates, other).symbols
        must(not torch.equal(symbols, again), f"another {what} repeats 64 messages")


class ExchangedKeys(SeededKeys):
    """Keys of seed 0, with some kinds of keys from seed 1. The federation keeps its name.

    Args:
        kinds: Kinds of keys from seed 1: "public", "members", "client", "peer" and "private".
    """

    def __init__(self, *kinds: str) -> None:
        super().__init__(0)
        self._other, self._kinds = SeededKeys(1), kinds

    def public(self) -> bytes:
        # the first half of the key is the federation's name, which every stream's address contains
        own = super().public()
        return own[:16] + self._other.public()[16:] if "public" in self._kinds else own

    def members(self) -> bytes:
        return self._other.members() if "members" in self._kinds else super().members()

    def client(self, client: int) -> bytes:
        return self._other.client(client) if "client" in self._kinds else super().client(client)

    def peer(self, group: tuple[int, ...]) -> bytes:
        return self._other.peer(group) if "peer" in self._kinds else super().peer(group)

    def private(self, client: int) -> bytes:
        return self._other.private(client) if "private" in self._kinds else super().private(client)


@rule
def streams_are_whose_they_are(mechanism: Mechanism) -> None:
    """Messages depend on streams that the server lacks, and on others only if `decode` also reads them.

    The rule exchanges streams of one kind for 64 clients and keeps all others. If there is a claim against a
    server, streams that groups share must change messages. Private streams must also change them, unless a
    group's shared words are the only randomness and nothing is claimed against adversaries that know them.
    Streams that the server knows may change messages only if they change decoding.
    """
    context = make_context(mechanism, range(64), (64,))
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
        changes = not torch.equal(message(ExchangedKeys(kind)), before)
        problem = f"other {kind} streams give the same messages, so their noise comes from other randomness"
        must(changes, problem)
    for kind in ("public", "members", "client"):
        keys = ExchangedKeys(kind)
        if torch.equal(message(keys), before):
            continue
        known = (PublicRandomness(each, 0) for each in (SeededKeys(0), keys))
        sums = [mechanism.decode(before, range(64), context, public) for public in known]
        problem = (
            f"other {kind} streams change messages but not their decoding, so the server knows the noise. "
            "Take it from rand.private or rand.peer."
        )
        must(not torch.equal(*sums), problem)


@rule
def stack_equals_rows(mechanism: Mechanism) -> None:
    """A batch of clients is encoded as each of them alone would be."""
    context, updates = standard(mechanism)
    updates = 3.0 * updates  # clips some updates
    stack = encode(mechanism, updates, context)
    single = [encode(mechanism, updates[i : i + 1], context, [c]) for i, c in enumerate(context.cohort)]
    flat = [encode(mechanism, updates[i], context, [c]) for i, c in enumerate(context.cohort)]
    rows = torch.cat([message.symbols for message in single])
    must(torch.equal(stack.symbols, rows), "symbols of a batch differ from those of its rows alone")
    alike = all(torch.equal(one.symbols, two.symbols[0]) for one, two in zip(flat, single, strict=True))
    must(alike, "an update (dim,) must give symbols (m,), the row of the batch (1, dim)")
    for name in ("num_bits", "num_clipped"):
        whole, parts = getattr(stack, name), sum(getattr(message, name) for message in single)
        must(whole == parts, f"{name} of a batch is {whole}, but that of its rows {parts} in all")


@rule
def sum_decodes_like_its_parts(mechanism: Mechanism) -> None:
    """Decoded parts add up to the decoded whole, and homomorphic mechanisms decode the sum of symbols."""
    context, updates = standard(mechanism)
    symbols, cohort = encode(mechanism, updates, context).symbols, context.cohort
    together = decode(mechanism, symbols, cohort, context)
    if not mechanism.joint:
        alone = [decode(mechanism, symbols[i : i + 1], [c], context) for i, c in enumerate(cohort)]
        parts = torch.stack(alone).double()
        # float32 output allows half an ulp for each part and the sum
        allowed = 2.0**-22 * (parts.abs().sum(0) + together.abs())
        error = (together.double() - parts.sum(0)).abs()
        worst = int((error - allowed).argmax())
        must(
            bool((error <= allowed).all()),
            f"coordinate {worst} is {together[worst].item():g} for all messages together, but "
            f"{parts.sum(0)[worst].item():g} as the sum of its parts",
        )
    if (grid := mechanism.grid(context)) is not None:
        rounded = round_to_grid(together, grid)
        raw = bool((rounded - together).abs().max() > grid / 10)
        must(raw, "decode() must not round to its grid, as the engine rounds the sum of all clients")
    if mechanism.homomorphic:
        summed = decode(mechanism, symbols.sum(0, dtype=torch.int64), cohort, context)
        must(torch.equal(summed, together), "the sum of all symbols must decode to the same sum")


@rule
def bits_are_those_of_the_stream(mechanism: Mechanism) -> None:
    """`num_bits` is the length of bitstreams that unpack to the symbols, and other bytes are refused."""
    context, updates = standard(mechanism)
    message, public = encode(mechanism, updates, context), PublicRandomness(SeededKeys(0), context.round)
    total = 0
    for client, symbols in zip(context.cohort, message.symbols, strict=True):
        code = mechanism.message_code(client, context, public)
        bits, stream = code.num_bits(symbols), code.pack(symbols)
        must(len(stream) == (bits + 7) // 8, f"a stream of {bits} bits has {len(stream)} bytes")
        same = torch.equal(code.unpack(stream, len(symbols)).to(symbols), symbols)
        must(same, f"the stream of client {client} must unpack to its symbols")
        for other in (b"", stream[:-1], stream + b"\xff", bytes(len(stream))):
            try:
                code.unpack(other, len(symbols))
            except Exception as error:
                named = isinstance(error, UndecodableError)
                must(named, f"unpack of other bytes raises {type(error).__name__}, not UndecodableError")
        total += bits
    problem = f"num_bits must be the bitstreams' length {total}, got {message.num_bits}"
    must(message.num_bits == total, problem)


@rule
def symbols_lie_in_their_range(mechanism: Mechanism) -> None:
    """Symbols are within `symbol_range` and `symbol_modulus`, and servers accept them."""
    context, updates = standard(mechanism)
    public = PublicRandomness(SeededKeys(0), context.round)
    for name, rows in (("ordinary", updates), ("huge", 2.0**100 * updates)):
        symbols = encode(mechanism, rows, context).symbols.to(torch.int64)
        if (modulus := mechanism.symbol_modulus(context)) is not None:
            size, count = modulus
            must(symbols.shape[1] == count, f"messages must have {count} symbols, got {symbols.shape[1]}")
            inside = bool(((symbols >= 0) & (symbols < size)).all())
            must(inside, f"symbols of {name} updates must be residues modulo {size}")
        if (ends := mechanism.symbol_range(context, public)) is not None:
            low, high = (torch.as_tensor(end) for end in ends)
            inside = bool(((symbols >= low) & (symbols <= high)).all())
            must(inside, f"symbols of {name} updates must be within symbol_range")
        for client, row in zip(sorted(context.cohort), symbols, strict=True):
            can = mechanism.can_send(row, client, context, public)
            must(can, f"can_send() refuses symbols of {name} updates")
