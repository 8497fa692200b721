import math

import pytest
import torch
from fedq_sqkr import SQKR

from lightning_fedq.audit import audit, audit_cases
from lightning_fedq.mechanisms.contract_suite import RULES, encode, golden_symbols, make_context
from lightning_fedq.mechanisms.interface import Adversary


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mechanism", [SQKR(8.0, 4.0, bits=3), SQKR(8.0, 1.0)], ids=repr)
def test_contract(mechanism, rule):
    RULES[rule](mechanism)


def test_golden_symbols():
    """A change breaks recorded runs, and clients of another version."""
    assert golden_symbols(SQKR(8.0, 4.0, bits=3)) == "a86454ae465d3c4d"


def test_a_message_has_k_bits_whatever_the_update():
    mechanism = SQKR(1.0, 4.0, bits=3)
    context = make_context(mechanism, range(5), (1000,))
    message = encode(mechanism, torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)), context)
    assert message.num_bits == 15 and message.symbols.shape == (5, 1)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 15.0])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_the_response_keeps_epsilon_and_no_more_than_it_needs(epsilon, bits):
    mechanism = SQKR(1.0, epsilon, bits)
    claims = mechanism.claims(make_context(mechanism, (0, 1)))
    assert {claim.adversary for claim in claims} == set(Adversary)
    assert epsilon - 0.01 < claims[0].loss.pure_epsilon <= epsilon
    truth = mechanism.true_words / 2**32
    assert math.log(truth * (2**bits - 1) / (1.0 - truth)) == pytest.approx(claims[0].loss.pure_epsilon)


@pytest.mark.parametrize(
    ("settings", "match"), [({"bits": 0}, r"bits must be in \[1, 8\]"), ({"epsilon": 0.0}, "epsilon <= 15")]
)
def test_senseless_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        SQKR(**{"clip_norm": 1.0, "epsilon": 1.0, **settings})


class Unrandomised(SQKR):
    """Sends the true symbol always, and claims what the response would give."""

    true_words = 2**32

    def claims(self, context):
        return SQKR(self.clip_norm, self.epsilon, self.bits).claims(context)


def test_the_audit_sees_a_response_that_is_left_out():
    """At 1e-3, the right one is refuted with that chance over fresh seeds."""
    honest, planted = SQKR(1.0, 1.0, bits=2), Unrandomised(1.0, 1.0, bits=2)
    for mechanism, refuted in ((honest, False), (planted, True)):
        (case,) = audit_cases(mechanism, 1024)
        findings = audit(case, 300, alpha=1e-3)
        assert any(finding.alarm for finding in findings) is refuted
