"""Privacy claims of one-bit mechanisms, by adversary, from the integer thresholds of the bits.

There is one function for each coupling of the clients' words: independent (LDP-FL), or in pairs through d
shared bits (CorBin). Levels come from the attained thresholds, never from the requested epsilon.

If privacy depends on a client's place in the round (unpaired or in a pair), the claim is the worst of both.
The curious client may be an unpaired client that knows its own bit, so one bit less hides the others than
behind secure aggregation. Clients that collude with the server behind secure aggregation (`num_colluding`)
are curious clients: each knows its bit and its group's shared word, and is in the worst place.

References:
    Salehi et al., CorBin-FL. Exact pairs for replace-one adjacency replace its UCDP theorems.
"""

from collections.abc import Callable

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.divergences import randomized_response_pair
from lightning_fedq.functional.one_bit.privacy import joint_pairs, known_word_pairs, pair_sum_pairs
from lightning_fedq.functional.one_bit.threshold_coin import CoinThresholds
from lightning_fedq.mechanisms.interface import (
    ANY_NUMBER,
    Adversary,
    CoinSum,
    HiddenPair,
    Loss,
    PmfPairs,
    PrivacyClaim,
    RoundContext,
    Slack,
    Unit,
    no_guarantee,
)

ARBITRARY = kind.VIEW("the other clients' updates are arbitrary and known to the adversary")
FRESH = kind.SECRET_KEYS(
    "coins are fresh in every round and attempt and come from keys that the adversary does not hold"
)
FRESH_NOISE = kind.SECRET_KEYS(
    "noise is fresh in every round and attempt and comes from keys that the adversary does not hold"
)
UNIFORM = kind.EQUAL_WEIGHTS(
    "all weights are equal, and a client that did not answer counts as one that sent zeros", kind.DROPOUTS
)
AUTHENTICATED = kind.AUTHENTIC_KEYS(
    "public keys are authenticated and the key agreement is unbroken (computational)"
)
NO_COLLUSION = kind.COLLUSION("the server does not collude with other clients")
SUM_ONLY = kind.SUM_ALONE(
    "secure aggregation reveals nothing but the sum of all bits, with equal weights", kind.EQUAL_WEIGHTS
)
MODELS_ONLY = kind.MODELS_ONLY(
    "only the released models are seen: the sum of all bits, with equal weights, and the server is honest",
    kind.EQUAL_WEIGHTS,
)


def sampler_error(slack: Slack) -> kind.Assumption:
    """Return the statement about a sampler that is not exact, with the slack that is charged."""
    return kind.FLOAT_ERROR(
        f"the sampler is within {slack.distance:.1e} in total variation and {slack.log_ratio:.1e} in "
        "log-ratio of the exact noise in a round, charged to delta and epsilon"
    )


def bounded_collusion(corrupt: int) -> kind.Assumption:
    """Return the assumption that the server colludes with `corrupt` clients at most."""
    return kind.COLLUSION(f"the server colludes with {corrupt} clients at most") if corrupt else NO_COLLUSION


def coin_claims(
    seen: tuple[Loss, Loss, Loss], behind: Callable[[int], Loss], context: RoundContext, shared: bool
) -> tuple[PrivacyClaim, ...]:
    """Return one claim per coordinate for every adversary, with its assumptions.

    Args:
        seen: Losses of one coordinate to an eavesdropper, to the server, and to the server with a partner.
        behind: Function that returns the loss of a sum to an adversary that knows so many clients.
        context: Public facts of the round.
        shared: Whether clients share words, by keys that they agreed on.
    """
    corrupt, keys = context.num_colluding, (AUTHENTICATED,) if shared else ()
    alone, server, partner = seen
    # loss, assumptions and number of colluders
    views: dict[Adversary, tuple[Loss, tuple[str, ...], float | None]] = {
        Adversary.EAVESDROPPER: (alone, (), None),
        Adversary.SERVER: (server, (NO_COLLUSION, *keys), 0 if shared else ANY_NUMBER),
        # apart from the shared words, messages are independent
        Adversary.SERVER_AND_PARTNER: (partner, (), ANY_NUMBER),
        Adversary.CLIENT: (behind(1), (MODELS_ONLY,), 1),
        Adversary.SECAGG_SERVER: (behind(corrupt), (SUM_ONLY, bounded_collusion(corrupt), *keys), corrupt),
        Adversary.OUTSIDER: (behind(0), (MODELS_ONLY, *keys), None),
    }
    claims = []
    for who in Adversary:
        loss, special, colluders = views[who]
        claims.append(
            PrivacyClaim(
                who,
                loss,
                context.dim,
                assumptions=(ARBITRARY, FRESH, *special),
                unit=Unit.COORDINATE,
                colluders=colluders,
            )
        )
    return tuple(claims)


def _bit(coin: CoinThresholds) -> PmfPairs:
    """Return the loss of one randomised bit that the adversary sees."""
    return PmfPairs((randomized_response_pair(*coin.probabilities),), "randomised response on one bit")


def _alone(coin: CoinThresholds, num_coins: int) -> HiddenPair:
    """Return the pair of an unpaired victim's bit, hidden by `num_coins` other bits."""
    one, other = randomized_response_pair(*coin.probabilities)
    return HiddenPair(one, other, max(num_coins, 0))


def _public(context: RoundContext) -> tuple[PrivacyClaim, ...]:
    """Return claims of no guarantee, for an infinite epsilon."""
    reason = "epsilon is infinite: an extreme input determines its bit"
    return no_guarantee(reason, context.dim)


def independent_claims(coin: CoinThresholds, context: RoundContext) -> tuple[PrivacyClaim, ...]:
    """Return the claims of a mechanism whose words are all independent.

    Args:
        coin: Thresholds of the randomised bit.
        context: Public facts of the round. Its cohort gives the number of other bits that hide one.
    """
    if not coin.low:
        return _public(context)
    (low, high), size = coin.probabilities, len(context.cohort)
    bit, note = _bit(coin), "one bit among the independent bits of the others"

    def behind(known: int) -> CoinSum:
        whose = f" except {known} that the adversary knows" if known else ""
        return CoinSum(low, high, (_alone(coin, size - 1 - known),), note + whose)

    return coin_claims((bit, bit, bit), behind, context, shared=False)


def paired_claims(
    coin: CoinThresholds, shared_bits: int | None, context: RoundContext
) -> tuple[PrivacyClaim, ...]:
    """Return the claims of pairs whose words have complementary first `shared_bits` bits.

    Unpaired clients are independent. With one or more shared bits, a server that sees both messages of a pair
    meets outcomes that only one of two inputs can produce. Its pure epsilon is infinite, and the pmfs contain
    the probability of these outcomes.

    Args:
        coin: Thresholds of the randomised bit.
        shared_bits: Number d of shared bits, or None for all bits of the word.
        context: Public facts of the round, with groups of one and of two.
    """
    singles = sum(len(group) == 1 for group in context.groups)
    if shared_bits == 0 or singles == len(context.groups):
        return independent_claims(coin, context)
    if not coin.low:
        return _public(context)
    low, high = coin.probabilities
    bits = None if shared_bits is None or shared_bits >= coin.word_bits else shared_bits
    sums = pair_sum_pairs(low, high, bits)

    def behind(known: int) -> CoinSum:
        """Return the loss of a sum if `known` clients, perhaps the partner, reveal what they know."""
        places = [HiddenPair(p, q, max(singles - known, 0)) for p, q in sums]
        note = "a pair's sum among the bits of the unpaired clients"
        if known:
            coins = max(singles - known + 1, 0)
            places.append(HiddenPair((0.0, 1.0), (1.0, 0.0), coins, high - low))
            note = "the partner knows the shared word and sees the sum"
        if singles:
            places.append(_alone(coin, singles - 1 - known))
        return CoinSum(low, high, tuple(places), note)

    both = PmfPairs(joint_pairs(low, high, bits), "both bits of a pair, worst inputs")
    known_word = PmfPairs(known_word_pairs(low, high, bits), "a bit and its word")
    return coin_claims((_bit(coin), both, known_word), behind, context, shared=True)
