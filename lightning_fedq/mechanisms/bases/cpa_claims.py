"""Privacy claims of CPA: randomised response on every bit, whatever the adversary knows beside it.

The paper states epsilon for a round; it holds for a bit, and the bits of a message are functions of the same
update, so they compose. Which blocks a message holds is drawn from public randomness, never from the update:
it needs no privacy, buys no amplification, and only lowers the number of bits.
"""

from __future__ import annotations

from lightning_fedq.functional.divergences import randomized_response_pair
from lightning_fedq.functional.one_bit.threshold_coin import CoinThresholds
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PmfPairs, PrivacyClaim, Unit

_KNOWN = "codewords and dither may be known to the adversary"
_DRAWN = "which blocks are sent may be known to the adversary too; it is drawn without looking at the update"
_SPECIAL = {
    Adversary.SECAGG_SERVER: (
        "messages can't be summed before decoding, so there is no secure aggregation: "
        "the claim is that of the server that sees every message",
    ),
    Adversary.CLIENT: ("by post-processing: that others hide a client is not used",),
    Adversary.OUTSIDER: ("by post-processing: that others hide a client is not used",),
}


def bit_claims(
    coin: CoinThresholds,
    num_bits: int,
    stages: int,
    block_length: int,
    some_blocks: bool,
    anonymity_set_size: int,
) -> tuple[PrivacyClaim, ...]:
    """Claims for messages of `num_bits` bits, for every value of word, dither and choice of blocks.

    Args:
        coin: The coin of every bit.
        num_bits: Bits of one message, all of them functions of one update.
        stages: How many of them are of one block.
        block_length: Coordinates of a block.
        some_blocks: Does a message hold some blocks only?
        anonymity_set_size: What the paper calls k, to say that it is no guarantee where there is no coin.
    """
    if not coin.low:
        reason = NonPrivate(
            "epsilon is infinite: a bit is a function of the update and of what the server knows; "
            f"an anonymity set of {anonymity_set_size} is no guarantee"
        )
        return tuple(PrivacyClaim(adversary, reason, num_bits) for adversary in Adversary)
    loss = PmfPairs(
        (randomized_response_pair(*coin.probabilities),),
        "randomised response on one bit, all bits of a message",
    )
    everywhere = (ARBITRARY, FRESH, _KNOWN, *((_DRAWN,) if some_blocks else ()))
    return tuple(
        PrivacyClaim(
            who,
            loss,
            num_bits,
            assumptions=(*everywhere, *_SPECIAL.get(who, ())),
            unit_losses=stages,
            unit=Unit.COORDINATE if block_length == 1 else Unit.BLOCK,
        )
        for who in Adversary
    )
