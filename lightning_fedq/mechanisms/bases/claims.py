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
    Unit,
    no_guarantee,
)

ARBITRARY = kind.VIEW("the other clients' updates are arbitrary and known to the adversary")
FRESH = kind.SECRET_KEYS(
    "coins are fresh in every round and attempt and come from keys that the adversary does not hold"
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


def bounded_collusion(corrupt: int) -> kind.Assumption:
    """Return the assumption that the server colludes with `corrupt` clients at most."""
    return kind.COLLUSION(f"the server colludes with {corrupt} clients at most") if corrupt else NO_COLLUSION


def coin_claims(
    losses: dict[Adversary, Loss], context: RoundContext, shared: bool
) -> tuple[PrivacyClaim, ...]:
    """Return one claim per coordinate for every adversary, with its assumptions.

    Args:
        losses: Loss of one coordinate, by adversary.
        context: Public facts of the round.
        shared: Whether clients share words, by keys that they agreed on.
    """
    keys = (AUTHENTICATED,) if shared else ()
    corrupt = context.num_colluding
    colluding = bounded_collusion(corrupt)
    special = {
        Adversary.EAVESDROPPER: (),
        Adversary.SERVER: (NO_COLLUSION, *keys),
        Adversary.SERVER_AND_PARTNER: (),
        Adversary.CLIENT: (MODELS_ONLY,),
        Adversary.SECAGG_SERVER: (SUM_ONLY, colluding, *keys),
        Adversary.OUTSIDER: (MODELS_ONLY, *keys),
    }
    colluders = {
        Adversary.SERVER: 0 if shared else ANY_NUMBER,
        Adversary.SERVER_AND_PARTNER: ANY_NUMBER,  # apart from the shared words, messages are independent
        Adversary.CLIENT: 1,
        Adversary.SECAGG_SERVER: corrupt,
    }
    return tuple(
        PrivacyClaim(
            who,
            losses[who],
            context.dim,
            assumptions=(ARBITRARY, FRESH, *special[who]),
            unit=Unit.COORDINATE,
            colluders=colluders.get(who),
        )
        for who in Adversary
    )


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

    losses: dict[Adversary, Loss] = {
        Adversary.EAVESDROPPER: bit,
        Adversary.SERVER: bit,
        Adversary.SERVER_AND_PARTNER: bit,
        Adversary.CLIENT: behind(1),
        Adversary.SECAGG_SERVER: behind(context.num_colluding),
        Adversary.OUTSIDER: behind(0),
    }
    return coin_claims(losses, context, shared=False)


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

    losses: dict[Adversary, Loss] = {
        Adversary.EAVESDROPPER: _bit(coin),
        Adversary.SERVER: PmfPairs(joint_pairs(low, high, bits), "both bits of a pair, worst inputs"),
        Adversary.SERVER_AND_PARTNER: PmfPairs(known_word_pairs(low, high, bits), "a bit and its word"),
        Adversary.CLIENT: behind(1),
        Adversary.SECAGG_SERVER: behind(context.num_colluding),
        Adversary.OUTSIDER: behind(0),
    }
    return coin_claims(losses, context, shared=True)
