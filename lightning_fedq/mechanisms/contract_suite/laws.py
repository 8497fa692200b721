"""Rules about the distribution of errors, ranges, neighbours, and configuration files."""

import ast
import pickle
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml
from jsonargparse import ArgumentParser
from torch import Tensor

from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.contract_suite.manual_round import (
    COHORTS,
    LAW_ROUNDS,
    LAW_SEGMENTS,
    STANDARD_ERRORS,
    decode,
    encode,
    even_updates,
    inside,
    make_context,
    must,
    rule,
    standard,
)
from lightning_fedq.mechanisms.interface import Mechanism, Neighbours, RoundContext


@lru_cache(maxsize=4)
def _simulated(
    mechanism: Mechanism, clients: tuple[int, ...], answered: tuple[int, ...]
) -> tuple[RoundContext, Tensor, Tensor]:
    """Return context, exact mean `(dim,)` and decoded means `(rounds, dim)` of updates inside the range."""
    contexts = [
        make_context(mechanism, clients, LAW_SEGMENTS, radius=(1.0, 2.0), center=(0.1, -0.2), round=r)
        for r in range(LAW_ROUNDS)
    ]
    dim, cohort = contexts[0].dim, sorted(clients)
    updates = even_updates(len(cohort), dim)
    for context in contexts:
        updates = inside(mechanism, context, updates)
    rows = updates[[cohort.index(client) for client in answered]]
    means = []
    for context in contexts:
        symbols = encode(mechanism, rows, context, answered).symbols
        means.append(decode(mechanism, symbols, answered, context).double() / len(answered))
    return contexts[0], rows.double().mean(0), torch.stack(means)


def _directions(exact: Tensor) -> dict[str, Tensor]:
    """Return unit vectors along which a bias shows, by name: a wrong scale, offset, curve or layer."""
    units = {"along the update": exact, "along ones": torch.ones_like(exact)}
    for what, order in (("values", exact.argsort()), ("coordinates", torch.arange(len(exact)))):
        for number, part in enumerate(order.chunk(8), 1):
            units[f"over part {number} of 8 of the {what}"] = torch.zeros_like(exact).index_fill(0, part, 1.0)
    return {name: vector / vector.norm() for name, vector in units.items()}


@rule
def unbiased(mechanism: Mechanism) -> None:
    """The decoded mean is unbiased in 60 rounds, for odd cohorts, unpaired clients and broken groups."""
    if not mechanism.unbiased:
        return
    for clients, answered in COHORTS:
        _, exact, means = _simulated(mechanism, clients, answered)
        for name, direction in _directions(exact).items():
            along = (means - exact) @ direction
            error = along.std() / LAW_ROUNDS**0.5 + 1e-6 * means.abs().max()  # float32 output
            score = float(along.mean().abs() / error)
            must(
                score <= STANDARD_ERRORS,
                f"with {len(answered)} of {len(clients)} clients, the mean is off by "
                f"{along.mean().item():.3g} {name}, {score:.1f} standard errors. "
                "Set unbiased = False if the bias is intended.",
            )


@rule
def noise_bound_holds(mechanism: Mechanism) -> None:
    """`noise_variance`, if any, is at least the variance that 60 rounds prove (lower confidence limit)."""
    for clients, answered in COHORTS:
        context, _, means = _simulated(mechanism, clients, answered)
        bound = mechanism.noise_variance(context, answered)
        if bound is None:
            return
        shape = tuple(bound.shape)
        must(shape == (2,), f"noise_variance() needs one value a segment, got {shape}")
        squares = (means - means.mean(0)).square() * (LAW_ROUNDS / (LAW_ROUNDS - 1))
        for segment, part in enumerate(torch.split(squares, list(LAW_SEGMENTS), 1)):
            by_round = part.mean(1)
            proven = by_round.mean() - STANDARD_ERRORS * by_round.std() / LAW_ROUNDS**0.5
            rounding = (1e-6 * means.abs().max()) ** 2  # float32 output
            must(
                bool(proven <= bound[segment] + rounding),
                f"with {len(answered)} of {len(clients)} clients, the variance of segment {segment} is at "
                f"least {proven.item():.4g}, but the bound is {bound[segment].item():.4g}",
            )


@rule
def any_float_type(mechanism: Mechanism) -> None:
    """Updates of any float type are encoded like float32 updates of the same values."""
    context, updates = standard(mechanism)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        rows = updates.to(dtype)
        expected = encode(mechanism, rows.float(), context).symbols
        same = torch.equal(encode(mechanism, rows, context).symbols, expected)
        must(same, f"updates of {dtype} must give the symbols of float32")


@rule
def clips_and_counts(mechanism: Mechanism) -> None:
    """Values outside the range are clipped and counted, or decoded at their size, apart from bias."""
    context = make_context(mechanism, (1,), (64,))
    ones = torch.ones(1, 64)
    far, farther = (encode(mechanism, size * ones, context) for size in (2.0**80, 2.0**100))
    if far.num_clipped == 0:
        total = decode(mechanism, far.symbols, (1,), context)
        least = 0.5 if mechanism.unbiased else 0.0  # rounding may be as coarse as the update is long
        arrived = least < float(total.mean()) / 2.0**80 < 1.5
        must(arrived, "an update of 2^80 in each coordinate must count as clipped, or be decoded at its size")
        return
    must(far.num_clipped <= 64, f"num_clipped must be at most 64, got {far.num_clipped}")
    same = torch.equal(far.symbols, farther.symbols)
    must(same, "clipped updates of 2^80 and 2^100 in each coordinate must give the same symbols")
    inside, outside = (encode(mechanism, size * ones, context).num_clipped for size in (0.999, 1.001))
    if inside == 0 and outside > 0:  # the range ends there, for this direction
        same = torch.equal(far.symbols, encode(mechanism, ones, context).symbols)
        must(same, "an update far outside must give the symbols of the end of the range")


@rule
def each_segment_has_its_range(mechanism: Mechanism) -> None:
    """A mechanism that reads the range of one segment reads that of each segment for its own symbols."""
    segments, clients = (96, 160), (4, 9, 2, 7)
    updates = even_updates(len(clients), sum(segments))

    def symbols(
        radius: Sequence[float] = (1.0, 1.0), center: Sequence[float] = (0.0, 0.0)
    ) -> tuple[Tensor, ...]:
        context = make_context(mechanism, clients, segments, radius, center)
        sent = encode(mechanism, updates, context).symbols
        return torch.split(sent, list(segments), 1) if sent.shape[1] == sum(segments) else (sent, sent)

    before = symbols()
    for what, ordinary, other in (("radius", 1.0, 2.0**-6), ("center", 0.0, 8.0)):
        first, second = (symbols(**{what: values}) for values in ((other, ordinary), (ordinary, other)))
        reads = [not torch.equal(first[0], before[0]), not torch.equal(second[1], before[1])]
        changes_nothing = all(map(torch.equal, (*first, *second), (*before, *before)))
        for segment in (0, 1):
            must(
                reads[segment] or changes_nothing,
                f"the {what} of segment {segment + 1} of 2 does not change its own symbols. "
                "Use `context.expand(context.radius)` and `context.expand(context.center)`.",
            )


@rule
def two_neighbours(mechanism: Mechanism) -> None:
    """`worst_pair` gives two different finite updates. The second is zero if a claim is about zeroing out."""
    context = make_context(mechanism, (4, 9, 2, 7), (5, 3), radius=(1.0, 2.0), center=(0.5, 0.0))
    high, low = mechanism.worst_pair(9, context, PublicRandomness(SeededKeys(0), 0))
    for update in (high, low):
        shaped = tuple(update.shape) == (8,) and update.dtype == torch.float64
        must(shaped, f"updates must be (dim,) float64, got {tuple(update.shape)} {update.dtype}")
        must(bool(torch.isfinite(update).all()), "updates of the pair must be finite")
    must(bool((high != low).any()), "updates of the pair must differ")
    if any(claim.neighbours is Neighbours.ZERO_OUT for claim in mechanism.claims(context)):
        must(not bool(low.any()), "the second update must be zero, as a claim is about zeroing out")


@rule
def influence_is_at_least_1(mechanism: Mechanism) -> None:
    """`influence` is None or at least 1, because an honest client can move the sum by its largest update."""
    context = make_context(mechanism, (4, 9))
    for client in (4, 9):
        influence = mechanism.influence(client, context)
        good = influence is None or influence >= 1.0 - 1e-12
        must(good, f"influence() must be None or >= 1, got {influence}")


@rule
def pickles(mechanism: Mechanism) -> None:
    """A mechanism can be pickled, and the copy is equal."""
    must(pickle.loads(pickle.dumps(mechanism)) == mechanism, "the unpickled copy must be equal")


@rule
def builds_from_yaml(mechanism: Mechanism) -> None:
    """A configuration builds the mechanism from its class and parameters, plain values or mechanisms."""
    text = yaml.safe_dump({"mechanism": _configured(mechanism)})
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--mechanism", type=Mechanism)
    with TemporaryDirectory() as folder:
        path = Path(folder, "mechanism.yaml")
        path.write_text(text)
        built = parser.instantiate(parser.parse_args([f"--config={path}"])).mechanism
    must(built == mechanism, f"settings in YAML must build it, got {built!r}:\n{text}")


def _configured(value: object) -> object:
    """Return a mechanism as class path and arguments, and any other value unchanged."""
    if not isinstance(value, Mechanism):
        return value
    kind, parameters = type(value), [each for each in fields(value) if each.init]  # type: ignore[arg-type]
    arguments = {field.name: _configured(getattr(value, field.name)) for field in parameters}
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}


@rule
def reads_back_from_its_repr(mechanism: Mechanism) -> None:
    """Checkpoints store a mechanism as its `repr`: a call by keyword, with plain values or mechanisms."""
    try:
        built = _read(ast.parse(repr(mechanism), mode="eval").body, mechanism)
    except (SyntaxError, ValueError):
        built = None
    must(built is not None, f"repr must be Name(parameter=value, ...) of plain values, got {mechanism!r}")
    must(built == mechanism, f"{mechanism!r} reads back as {built!r}")


def _read(node: ast.expr, like: object) -> object:
    """Return the value of an expression. A call makes an object of the type of `like`."""
    if not isinstance(like, Mechanism):
        return ast.literal_eval(node)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("not a call by keyword")
    return type(like)(**{str(k.arg): _read(k.value, getattr(like, str(k.arg))) for k in node.keywords})
