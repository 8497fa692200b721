"""Rules of the contract that one real round can check, and the error for a broken rule.

`RoundEngine` checks them in its first round for every mechanism, at almost no cost.
`lightning_fedq.mechanisms.contract_suite.check_mechanism` checks these and all other rules.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedq.mechanisms.interface import (
    Adversary,
    Mechanism,
    Message,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
)
from lightning_fedq.wire.coding import FixedLength


class BrokenContractError(ValueError):
    """Error of a mechanism that breaks a rule of `Mechanism`.

    Args:
        rule: Name of the rule, one of `lightning_fedq.mechanisms.contract_suite.RULES`.
        message: Expected and received value.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def must(condition: bool, rule: str, message: str) -> None:
    """Raise `BrokenContractError` unless the condition holds."""
    if not condition:
        raise BrokenContractError(rule, message)


def check_claims(claims: Sequence[PrivacyClaim]) -> None:
    """Check rule `single_claim_per_adversary`: one claim per adversary, with assumptions or a reason.

    Raises:
        BrokenContractError: If the rule is broken.
    """
    rule, claimed = "single_claim_per_adversary", [claim.adversary for claim in claims]
    missing = [who.name for who in Adversary if who not in claimed]
    twice = sorted({who.name for who in claimed if claimed.count(who) > 1})
    problem = f"claims() has no claim about {', '.join(missing)}. Return NonPrivate('why') if nothing holds."
    must(not missing, rule, problem)
    must(not twice, rule, f"claims() has several claims about {', '.join(twice)}. Return the worst case.")
    for claim in claims:
        about = f"the claim about {claim.adversary.name}"
        if isinstance(claim.loss, NonPrivate):
            must(bool(claim.loss.reason), rule, f"{about} gives no reason why there is no guarantee")
        else:
            must(bool(claim.assumptions), rule, f"{about} has no assumptions. Name keys and randomness.")


def check_message(mechanism: Mechanism, message: Message, context: RoundContext, num_clients: int) -> None:
    """Check rule `integer_symbols`: one row of integers per client, and the number of bits that is sent.

    Raises:
        BrokenContractError: If the rule is broken.
    """
    rule, symbols, code = "integer_symbols", message.symbols, mechanism.code(context)
    integers = not (symbols.is_floating_point() or symbols.is_complex()) and symbols.dtype != torch.bool
    must(integers, rule, f"encode() must return integers, got symbols of {symbols.dtype}")
    shape = tuple(symbols.shape)
    problem = f"encode() of {num_clients} clients must return one row of symbols each, got shape {shape}"
    must(len(shape) == 2 and shape[0] == num_clients, rule, problem)
    count = mechanism.num_symbols(context)
    problem = f"num_symbols() returns {count} symbols a message, but encode() gave {symbols.shape[1]}"
    must(symbols.shape[1] == count, rule, problem)
    for name in ("num_bits", "num_clipped"):
        count = getattr(message, name)
        must(isinstance(count, int) and count >= 0, rule, f"{name} must be an int >= 0, got {count!r}")
    own_codes = type(mechanism).message_code is not Mechanism.message_code
    if isinstance(code, FixedLength) and not own_codes:
        expected = symbols.numel() * code.bits_per_symbol
        length = f"{symbols.numel()} symbols of {code.bits_per_symbol} bits = {expected}"
        problem = f"num_bits must be the bitstream's length, {length}, got {message.num_bits}"
        must(message.num_bits == expected, rule, problem)


def check_decoded(decoded: Tensor, context: RoundContext) -> None:
    """Check rule `decodes_to_the_sum`: one finite float per coordinate of an update.

    Raises:
        BrokenContractError: If the rule is broken.
    """
    rule = "decodes_to_the_sum"
    shape, expected = tuple(decoded.shape), (context.dim,)
    must(shape == expected, rule, f"decode() must return shape {expected}, got {shape}")
    must(decoded.is_floating_point(), rule, f"decode() must return floats, got {decoded.dtype}")
    must(bool(torch.isfinite(decoded).all()), rule, "decode() must return finite numbers")
