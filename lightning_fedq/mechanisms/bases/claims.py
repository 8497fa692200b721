"""Privacy claims of one-bit mechanisms, view by view, from the integers that they compare.

One function per way in which the clients' words hang together: not at all (LDP-FL), or in pairs through
d shared bits (CorBin).
Levels come from the attained thresholds, never from the epsilon that was asked for.

Where the worst client of the round depends on its place (alone or in a pair), the claim is the worst of both.
The curious client may also be a client that works alone and knows its own coin, so one coin less hides
the others than behind secure aggregation. Clients that collude with the server behind it (`num_corrupt`) are
curious clients: each knows its coin and the word that its group shares, and stands where that is worst.

References:
    Salehi et al., CorBin-FL; its UCDP theorems are replaced by exact pairs, for substitution of one update.
"""

from lightning_fedq.functional.divergences import randomized_response_pair
from lightning_fedq.functional.one_bit.privacy import joint_pairs, known_word_pairs, pair_sum_pairs
from lightning_fedq.functional.one_bit.threshold_coin import CoinThresholds
from lightning_fedq.mechanisms.interface import (
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

ARBITRARY = "the other clients' updates are arbitrary and known to the adversary"
FRESH = "coins are fresh in every round and attempt and come from keys that the adversary does not hold"
AUTHENTICATED = "public keys are authenticated and the key agreement is unbroken (computational)"
NO_COLLUSION = "the server does not collude with other clients"
SUM_ONLY = "secure aggregation reveals nothing but the sum of all bits, with equal weights"
MODELS_ONLY = (
    "only the released models are seen: the sum of all bits, with equal weights; the server is honest"
)


def coin_claims(
    losses: dict[Adversary, Loss], context: RoundContext, shared: bool
) -> tuple[PrivacyClaim, ...]:
    """One claim a coordinate for every adversary, with what it rests on.

    Args:
        shared: Do clients share words, by keys that they agreed on?
    """
    keys = (AUTHENTICATED,) if shared else ()
    corrupt = context.num_corrupt
    colluding = f"the server colludes with {corrupt} clients at most" if corrupt else NO_COLLUSION
    special = {
        Adversary.EAVESDROPPER: (),
        Adversary.SERVER: (NO_COLLUSION, *keys),
        Adversary.SERVER_AND_PARTNER: (),
        Adversary.CLIENT: (MODELS_ONLY,),
        Adversary.SECAGG_SERVER: (SUM_ONLY, colluding, *keys),
        Adversary.OUTSIDER: (MODELS_ONLY, *keys),
    }
    return tuple(
        PrivacyClaim(
            who, losses[who], context.dim, assumptions=(ARBITRARY, FRESH, *special[who]), unit=Unit.COORDINATE
        )
        for who in Adversary
    )


def _bit(coin: CoinThresholds) -> PmfPairs:
    return PmfPairs((randomized_response_pair(*coin.probabilities),), "randomised response on one bit")


def _alone(coin: CoinThresholds, num_coins: int) -> HiddenPair:
    one, other = randomized_response_pair(*coin.probabilities)
    return HiddenPair(one, other, max(num_coins, 0))


def _public(context: RoundContext) -> tuple[PrivacyClaim, ...]:
    reason = "epsilon is infinite: the coin has no noise that an input could not force"
    return no_guarantee(reason, context.dim)


def independent_claims(coin: CoinThresholds, context: RoundContext) -> tuple[PrivacyClaim, ...]:
    """Claims of a mechanism whose words are all independent.

    Args:
        context: The round; its cohort says how many coins hide one.
    """
    if not coin.low:
        return _public(context)
    (low, high), size = coin.probabilities, len(context.cohort)
    bit, note = _bit(coin), "one bit among the independent bits of the others"

    def behind(known: int) -> CoinSum:
        whose = f" but {known} that the adversary knows" if known else ""
        return CoinSum(low, high, (_alone(coin, size - 1 - known),), note + whose)

    losses: dict[Adversary, Loss] = {
        Adversary.EAVESDROPPER: bit,
        Adversary.SERVER: bit,
        Adversary.SERVER_AND_PARTNER: bit,
        Adversary.CLIENT: behind(1),
        Adversary.SECAGG_SERVER: behind(context.num_corrupt),
        Adversary.OUTSIDER: behind(0),
    }
    return coin_claims(losses, context, shared=False)


def paired_claims(
    coin: CoinThresholds, shared_bits: int | None, context: RoundContext
) -> tuple[PrivacyClaim, ...]:
    """Claims of pairs whose words have complementary first `shared_bits` bits. Clients alone are independent.

    With one or more shared bits, a server that sees both messages of a pair meets outcomes that only one of
    two inputs can produce: its pure epsilon is infinite, and the mass of those outcomes is in the pmfs.

    Args:
        shared_bits: d, or None for all bits of the word.
        context: The round; groups of one and of two.
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
        """The sum, and what `known` clients know: one of them may be the victim's partner."""
        places = [HiddenPair(p, q, max(singles - known, 0)) for p, q in sums]
        note = "a pair's sum among the bits of the clients that work alone"
        if known:
            coins = max(singles - known + 1, 0)
            places.append(HiddenPair((0.0, 1.0), (1.0, 0.0), coins, high - low))
            note = "the partner knows the shared word and sees the sum"
        if singles:
            places.append(_alone(coin, singles - 1 - known))
        return CoinSum(low, high, tuple(places), note)

    losses: dict[Adversary, Loss] = {
        Adversary.EAVESDROPPER: _bit(coin),
        Adversary.SERVER: PmfPairs(joint_pairs(low, high, bits), "both bits of a pair, worst vertices"),
        Adversary.SERVER_AND_PARTNER: PmfPairs(known_word_pairs(low, high, bits), "a bit and its word"),
        Adversary.CLIENT: behind(1),
        Adversary.SECAGG_SERVER: behind(context.num_corrupt),
        Adversary.OUTSIDER: behind(0),
    }
    return coin_claims(losses, context, shared=True)
