"""Rules about the distribution of messages: noise for every kind of update, and fresh noise.

Cohorts of 4 and 201 clients send all kinds of updates (`updates`) in four rounds. Claims about messages
are compared with the frequencies of all outputs. The audit (`fedq audit`) does the same with more draws,
closer bounds, and for sums.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from lightning_fedq.functional.trade_off import binomial_bounds
from lightning_fedq.keys.randomness import ClientRandomness, Keys, SeededKeys
from lightning_fedq.mechanisms.contract_suite.encoding import ExchangedKeys
from lightning_fedq.mechanisms.contract_suite.manual_round import make_context, must, rule
from lightning_fedq.mechanisms.contract_suite.updates import ZERO, PlayedUpdate, played_updates
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, Neighbours, NonPrivate, PrivacyClaim

_COHORTS, _ROUNDS, _SEGMENTS = (4, 201), (0, 1, 2, 1000), (50, 46)
_CONSECUTIVE = 64
"""Number of rounds in a row that are searched for repeated noise."""
_ALPHA = 1e-5
"""Probability that one of the rules here fails for a correct mechanism."""


@dataclass(frozen=True)
class _Sent:
    """Messages of one client per group in several rounds.

    Args:
        place: Description of the cohort.
        updates: Kinds of updates.
        labels: `(clients,)`, kind of update that each client sends in every round.
        symbols: `(rounds, clients, m)` messages.
        independent: `(rounds, clients, m)` messages of the same updates with other private and shared keys of
            the clients.
    """

    place: str
    updates: tuple[PlayedUpdate, ...]
    labels: Tensor
    symbols: Tensor
    independent: Tensor


@lru_cache(maxsize=2)
def _sent(mechanism: Mechanism) -> tuple[_Sent, ...]:
    """Return the messages of every cohort that the mechanism can serve."""
    found = []
    for clients in _COHORTS:
        try:
            context = make_context(mechanism, range(clients), _SEGMENTS)
        except ValueError:  # the mechanism has settings for another number of clients
            continue
        updates = played_updates(mechanism, context)
        # clients of one group share randomness, so one of them is a draw
        first = [group[0] for group in context.groups]
        group_of = {client: number for number, group in enumerate(context.groups) for client in group}
        kinds = len(updates)
        for shift in range(0, kinds, len(first)):
            labels = torch.tensor([(group_of[client] + shift) % kinds for client in range(clients)])
            rows = torch.stack([updates[label].values for label in labels])
            both = [
                torch.stack([_symbols(mechanism, rows, round, keys)[first] for round in _ROUNDS])
                for keys in (SeededKeys(0), ExchangedKeys("peer", "private"))
            ]
            found.append(_Sent(f"{clients} clients", updates, labels[first], *both))
    return tuple(found)


def _symbols(mechanism: Mechanism, rows: Tensor, round: int, keys: Keys) -> Tensor:
    """Return the messages `(clients, m)` of clients 0, 1, ... in a round."""
    context = make_context(mechanism, range(len(rows)), _SEGMENTS, round=round)
    message = mechanism.encode(rows.clone(), context, ClientRandomness(keys, range(len(rows)), round))
    return message.symbols.to(torch.int64)


def _message_claim(mechanism: Mechanism) -> PrivacyClaim | None:
    """Return the claim about one message, or None if there is none that frequencies can contradict."""
    context = make_context(mechanism, range(_COHORTS[0]), _SEGMENTS)
    claims = {claim.adversary: claim for claim in mechanism.claims(context)}
    for adversary in (Adversary.EAVESDROPPER, Adversary.SERVER):
        if not isinstance(claims[adversary].loss, NonPrivate):
            return claims[adversary]
    return None


def _epsilons(claim: PrivacyClaim) -> list[tuple[float, float]]:
    """Return the tested epsilons of one symbol, each with the delta that the claim allows."""
    pure = claim.loss.pure_epsilon
    tested = [pure] if math.isfinite(pure) else [0.0, 1.0, 3.0]
    deltas = claim.loss.curve(torch.tensor(tested, dtype=torch.float64).numpy())
    return [(min(epsilon, 700.0), float(delta)) for epsilon, delta in zip(tested, deltas, strict=True)]


@rule
def noise_for_every_input(mechanism: Mechanism) -> None:
    """No output is impossible or rare for one update and frequent for another, beyond the claim."""
    claim = _message_claim(mechanism)
    if claim is None:
        return
    tested, zero_out = _epsilons(claim), claim.neighbours is not Neighbours.SUBSTITUTION
    counted: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for part in _sent(mechanism):
        for round, symbols in zip(_ROUNDS, part.symbols, strict=True):
            labels = part.labels[:, None].expand_as(symbols)
            counted.setdefault(f"{part.place}, round {round}", []).append((labels.ravel(), symbols.ravel()))
    updates = played_updates(mechanism, make_context(mechanism, range(_COHORTS[0]), _SEGMENTS))
    kinds, is_zero = len(updates), torch.tensor([update.name == ZERO for update in updates])
    for place, messages in counted.items():
        labels, symbols = (torch.cat(parts) for parts in zip(*messages, strict=True))
        outputs, index = torch.unique(symbols, return_inverse=True)
        size = len(outputs)
        hits = torch.bincount(labels * size + index, minlength=kinds * size).reshape(kinds, size)
        draws = hits.sum(1, keepdim=True)
        low, high = _bounds(hits, draws, _ALPHA / (2.0 * kinds * size * len(counted)))
        for epsilon, allowed in tested:
            excess = low[:, None] - math.exp(epsilon) * high[None] - allowed  # (one, other, output)
            if zero_out:
                excess[~(is_zero[:, None] | is_zero[None])] = -1.0
            place_of = int(excess.argmax())
            one, other, output = place_of // (kinds * size), place_of // size % kinds, place_of % size
            if excess[one, other, output] <= 0.0:
                continue
            shares = [f"{float(hits[kind, output] / draws[kind, 0]):.4f}" for kind in (one, other)]
            bound = math.log(float(low[one, output] / high[other, output]))
            said = f"epsilon {epsilon:.3g}" + (f" and delta {allowed:.3g}" if allowed > 1e-12 else "")
            must(
                False,
                f"with {place}, update '{updates[one].name}' gives symbol {int(outputs[output])} with "
                f"frequency {shares[0]}, and update '{updates[other].name}' with frequency {shares[1]}. "
                f"This is epsilon {bound:.3g} or more, and the claim is {said}. Add the same noise to all.",
            )


def _bounds(hits: Tensor, draws: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return lower and upper bounds of probabilities, each wrong with probability at most `alpha`."""
    low, high = binomial_bounds(hits.numpy(), draws.numpy(), alpha)
    return torch.from_numpy(low), torch.from_numpy(high)


def _distances(mechanism: Mechanism) -> list[tuple[str, Tensor, Tensor]]:
    """Return which symbols agree in two of 64 rounds, by the distance of the rounds."""
    try:
        updates = played_updates(mechanism, make_context(mechanism, range(_COHORTS[0]), _SEGMENTS))
    except ValueError:
        return []
    rows = torch.stack([updates[label].values for label in (0, 1, 2, 3)])
    sent, other = (
        torch.stack([_symbols(mechanism, rows, round, keys) for round in range(_CONSECUTIVE)])
        for keys in (SeededKeys(0), ExchangedKeys("peer", "private"))
    )
    found = []
    for apart in range(1, _CONSECUTIVE):
        what, later = f"{_COHORTS[0]} clients, rounds {apart} apart", sent[apart:]
        found.append((what, later == sent[:-apart], later == other[:-apart]))
    return found


@rule
def noise_is_never_reused(mechanism: Mechanism) -> None:
    """Symbols of an update that is sent again, or by another client, agree by chance only."""
    if _message_claim(mechanism) is None:
        return
    tests: list[tuple[str, Tensor, Tensor]] = []
    for part in _sent(mechanism):
        sent, other = part.symbols, part.independent
        for one, two in combinations(range(len(_ROUNDS)), 2):
            what = f"{part.place}, rounds {_ROUNDS[one]} and {_ROUNDS[two]}"
            tests.append((what, sent[one] == sent[two], sent[one] == other[two]))
        for label in torch.unique(part.labels).tolist():
            same = part.labels == label
            ones, twos = (part_of[0][same] for part_of in (sent, other))
            if not (half := len(ones) // 2):
                continue
            what = f"{part.place}, two clients with the update '{part.updates[label].name}'"
            tests.append((what, ones[:half] == ones[half : 2 * half], ones[:half] == twos[half : 2 * half]))
    tests += _distances(mechanism)
    for what, agree, by_chance in tests:
        hits = torch.stack([agree.sum(), by_chance.sum()])
        low, high = _bounds(hits, torch.tensor([agree.numel(), by_chance.numel()]), 0.5 * _ALPHA / len(tests))
        shares = [f"{float(part.double().mean()):.2%}" for part in (agree, by_chance)]
        must(
            bool(low[0] <= high[1]),
            f"with {what}, {shares[0]} of all symbols are equal, and {shares[1]} would be "
            "with fresh noise. Draw noise from rand.private(client, purpose) of this round only.",
        )
