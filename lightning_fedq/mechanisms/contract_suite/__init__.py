"""Contract suite of mechanisms: `check_mechanism` checks any mechanism, also yours, against every rule.

A rule is a function of a mechanism that raises `BrokenContractError` with the rule's name. `RULES` lists
them. All draws come from seeded streams, so a mechanism always passes or never. Rules about distributions
allow for chance. The probability that a correct mechanism fails any of them, over fresh seeds, is below 1e-3.

    from lightning_fedq.mechanisms.contract_suite import RULES, check_mechanism

    def test_contract():
        check_mechanism(MyMechanism(epsilon=1.0))

or, one test a rule:

    @pytest.mark.parametrize("rule", RULES)
    def test_contract(rule):
        RULES[rule](MyMechanism(epsilon=1.0))
"""

from collections.abc import Iterable

from lightning_fedq.mechanisms.contract import BrokenContractError
from lightning_fedq.mechanisms.contract_suite import encoding as encoding, laws as laws
from lightning_fedq.mechanisms.contract_suite.manual_round import (
    RULES,
    Rule,
    decode,
    encode,
    golden_symbols,
    make_context,
)
from lightning_fedq.mechanisms.interface import Mechanism

__all__ = [
    "RULES",
    "BrokenContractError",
    "Rule",
    "check_mechanism",
    "decode",
    "encode",
    "golden_symbols",
    "make_context",
]


def check_mechanism(mechanism: Mechanism, rules: Iterable[str] | None = None) -> None:
    """Check a mechanism against the contract. It takes some seconds.

    Args:
        mechanism: Mechanism with settings as they would be used. Errors are easier to detect with little
            noise.
        rules: Names of rules. None checks all of `RULES`.

    Raises:
        BrokenContractError: If rules are broken. The message has the expected and received values of each
            rule.
        ValueError: If there is no such rule.

    Examples:
        >>> from lightning_fedq.mechanisms import LDPQ
        >>> check_mechanism(LDPQ(epsilon_per_coordinate=1.0))
    """
    names = tuple(RULES) if rules is None else tuple(rules)
    if unknown := [name for name in names if name not in RULES]:
        raise ValueError(f"there is no rule {', '.join(unknown)}. Choose from {', '.join(RULES)}.")
    broken: list[BrokenContractError] = []
    for name in names:
        try:
            RULES[name](mechanism)
        except BrokenContractError as error:
            if error.rule not in [other.rule for other in broken]:
                broken.append(error)
        except Exception as error:  # a mechanism of another package may raise any exception
            raised = BrokenContractError(name, f"raised {type(error).__name__}: {error}")
            raised.__cause__ = error
            broken.append(raised)
    if broken:
        lines = "\n".join(f"  {error}" for error in broken)
        text = f"{mechanism!r} breaks {len(broken)} of {len(names)} rules of the contract:\n{lines}"
        raise BrokenContractError(", ".join(error.rule for error in broken), text) from broken[0]
