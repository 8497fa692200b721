"""Rules of a mechanism that one real round shows, and the error that names a broken one.

`RoundEngine` checks them in its first round, whatever mechanism it was given. They cost next to nothing;
`lightning_fedq.mechanisms.contract_suite.check_mechanism` checks these and all others.
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
    """A mechanism that does not do what `Mechanism` says.

    Args:
        rule: Name of the rule, one of `lightning_fedq.mechanisms.contract_suite.RULES`.
        message: What was wanted and what came.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def must(condition: bool, rule: str, message: str) -> None:
    """Raise `BrokenContractError` unless the condition holds."""
    if not condition:
        raise BrokenContractError(rule, message)


def check_claims(claims: Sequence[PrivacyClaim]) -> None:
    """Rule `single_claim_per_adversary`: each of them once, with assumptions or a reason for nothing.

    Raises:
        BrokenContractError: If it is broken.
    """
    rule, found = "single_claim_per_adversary", [claim.adversary for claim in claims]
    missing = [who.name for who in Adversary if who not in found]
    twice = sorted({who.name for who in found if found.count(who) > 1})
    must(
        not missing,
        rule,
        f"claims() says nothing about {', '.join(missing)}; NonPrivate('why') if nothing holds",
    )
    must(not twice, rule, f"claims() speaks more than once about {', '.join(twice)}; give the worst case")
    for claim in claims:
        about = f"the claim about {claim.adversary.name}"
        if isinstance(claim.loss, NonPrivate):
            must(bool(claim.loss.reason), rule, f"{about} gives no reason why there is no guarantee")
        else:
            must(bool(claim.assumptions), rule, f"{about} names no assumptions: whose keys, fresh when?")


def check_message(mechanism: Mechanism, message: Message, context: RoundContext, num_clients: int) -> None:
    """Rule `integer_symbols`: one row of integers a client, and bits that are counted on the wire.

    Raises:
        BrokenContractError: If it is broken.
    """
    rule, symbols, code = "integer_symbols", message.symbols, mechanism.code(context)
    integers = not (symbols.is_floating_point() or symbols.is_complex()) and symbols.dtype != torch.bool
    must(integers, rule, f"encode() must return integers, got symbols of {symbols.dtype}")
    shaped = symbols.dim() == 2 and len(symbols) == num_clients
    must(
        shaped,
        rule,
        f"encode() of a stack of {num_clients} clients must return one row of symbols each, "
        f"got shape {tuple(symbols.shape)}",
    )
    count = mechanism.num_symbols(context)
    told = f"num_symbols() says {count} symbols a message, encode() gave {symbols.shape[1]}"
    must(symbols.shape[1] == count, rule, told)
    for name in ("num_bits", "num_clipped"):
        count = getattr(message, name)
        must(isinstance(count, int) and count >= 0, rule, f"{name} must be an int >= 0, got {count!r}")
    own_codes = type(mechanism).message_code is not Mechanism.message_code
    if isinstance(code, FixedLength) and not own_codes:
        expected = symbols.numel() * code.bits_per_symbol
        must(
            message.num_bits == expected,
            rule,
            f"num_bits must be the length of the stream, {symbols.numel()} symbols of "
            f"{code.bits_per_symbol} bits = {expected}, got {message.num_bits}",
        )


def check_decoded(decoded: Tensor, context: RoundContext) -> None:
    """Rule `decodes_to_the_sum`: as many finite floats as an update has coordinates.

    Raises:
        BrokenContractError: If it is broken.
    """
    rule = "decodes_to_the_sum"
    must(
        tuple(decoded.shape) == (context.dim,),
        rule,
        f"decode() must return shape {(context.dim,)}, got {tuple(decoded.shape)}",
    )
    must(decoded.is_floating_point(), rule, f"decode() must return floats, got {decoded.dtype}")
    must(bool(torch.isfinite(decoded).all()), rule, "decode() returned numbers that are not finite")
