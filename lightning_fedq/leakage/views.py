"""Adversary's views: what each adversary can decode from the messages that a mechanism really sent.

Every view ends in an estimate of a mean of some clients' updates, by the mechanism's own decoder. Adversaries
other than the server also get the public randomness that decoding needs, which can only help them. A group (a
CorBin pair) is attacked as a whole. Its members' errors cancel in its sum, so the sum reveals more about both
than one uplink message reveals about one. The server also has each message of the group, hence `shares`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedq.keys.randomness import ClientRandomness, Keys, PublicRandomness
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext


@dataclass(frozen=True)
class Observation:
    """Estimate of a mean update, as one adversary sees it.

    Args:
        update: `(dim,)` mean over `clients`, in units of the update.
        clients: Clients whose updates are in the view, the victim among them.
        shares: `(clients, dim)` message of each client, decoded separately. None where only the sum is
            observed, or there is one client.
        share_weight: Weight of the squared deviations of `shares` from their mean, where the mean has weight
            1. It is the ratio of the precisions that the mechanism declares.
    """

    update: Tensor
    clients: tuple[int, ...]
    shares: Tensor | None = None
    share_weight: float = 1.0


def observe(
    mechanism: Mechanism,
    updates: Tensor,
    context: RoundContext,
    keys: Keys,
    adversary: Adversary,
    victim: int,
) -> Observation:
    """Encode a round, and decode the part of it that one adversary observes.

    An eavesdropper decodes the victim's message. The server decodes the victim's group, jointly and message
    by message. With the victim's partners, the server also subtracts their updates. Behind secure
    aggregation, and from the released model, only the sum of the cohort is observed. A curious client
    subtracts its own update from that sum.

    Args:
        mechanism: Mechanism that encodes the updates.
        updates: `(cohort, dim)` updates, in the order of `context.cohort`.
        context: Round of the updates.
        keys: Source of all randomness.
        adversary: Adversary whose view is returned.
        victim: Client that the adversary attacks.

    Raises:
        ValueError: If the victim is not in the cohort.
    """
    cohort = context.cohort
    if victim not in cohort:
        raise ValueError(f"the victim {victim} is not in the cohort {cohort}")
    rand = ClientRandomness(keys, cohort, context.round, context.attempt)
    symbols = mechanism.encode(updates, context, rand).symbols
    group, _ = context.place(victim)
    clients, known = _sees(adversary, cohort, group, victim)
    rows = [cohort.index(client) for client in clients]
    public = PublicRandomness(keys, context.round, context.attempt)
    total = mechanism.decode(symbols[rows], clients, context, public)
    for client in known:
        total = total - updates[cohort.index(client)].to(total)
    rest = tuple(client for client in clients if client not in known)
    if adversary is not Adversary.SERVER or len(rest) < 2 or mechanism.joint:
        return Observation(total / len(rest), rest)
    each = [
        mechanism.decode(symbols[row : row + 1], (client,), context, public)
        for row, client in zip(rows, rest, strict=True)
    ]
    return Observation(total / len(rest), rest, torch.stack(each), _share_weight(mechanism, context, rest))


def _share_weight(mechanism: Mechanism, context: RoundContext, clients: tuple[int, ...]) -> float:
    """Return v (k - 1) / (k (u - v)), or 1 / k if it is unknown.

    v is the variance of the mean of k clients, and u that of one client.
    """
    sizes, k = torch.tensor(context.segments, dtype=torch.float64), len(clients)
    found = [mechanism.noise_variance(context, some) for some in (clients, clients[:1])]
    if found[0] is None or found[1] is None:
        return 1.0 / k
    mean, one = (float((variance.double().cpu() * sizes).sum()) for variance in found if variance is not None)
    return mean * (k - 1) / (k * (one - mean)) if one > mean > 0.0 else 1.0 / k


def _sees(
    adversary: Adversary, cohort: tuple[int, ...], group: tuple[int, ...], victim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the clients whose messages are summed, and the clients whose updates the adversary knows."""
    others = tuple(client for client in group if client != victim)
    if adversary is Adversary.EAVESDROPPER:
        return (victim,), ()
    if adversary is Adversary.SERVER:
        return group, ()
    if adversary is Adversary.SERVER_AND_PARTNER:
        return group, others
    if adversary is Adversary.CLIENT:
        return cohort, (others or tuple(c for c in cohort if c != victim))[:1]
    return cohort, ()
