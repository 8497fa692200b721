"""What a mechanism may be asked for is declared on `Mechanism`: nobody guesses from attributes."""

import ast
import math
from pathlib import Path

import pytest

from lightning_fedq.mechanisms import CPA, LDPQ, CorBin, FedAvg, GaussianNoise, JoPEQ, PerCoordinateLaplace
from lightning_fedq.mechanisms.interface import Adversary
from tests.one_round import make_context

PACKAGE = Path(__file__).parents[2] / "lightning_fedq"


def guesses(source):
    """Calls of getattr, hasattr, fields and vars on an object that is called a mechanism."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            about = ast.unparse(node.args[0]).split(".")[-1].lstrip("_")
            if node.func.id in ("getattr", "hasattr", "fields", "vars") and about == "mechanism":
                yield ast.unparse(node)


def test_nobody_guesses_what_a_mechanism_has():
    found = {path.name: list(guesses(path.read_text())) for path in PACKAGE.rglob("*.py")}
    forwarded = found.pop("wrapper.py")  # of names that `Mechanism` declares
    assert forwarded == ["getattr(self.mechanism, name)"] * 2
    logged = found.pop("logged_settings.py")  # all parameters, of which none is asked for by its name
    assert logged == ["getattr(mechanism, field.name)", "fields(mechanism)"]
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert list(guesses("getattr(self._mechanism, name)")) == ["getattr(self._mechanism, name)"]


@pytest.mark.parametrize(
    "mechanism",
    [LDPQ(0.5), CorBin(1.0, 5), CPA(2.0, epsilon_scope="bit"), CPA(20.0, epsilon_scope="round")],
    ids=repr,
)
def test_a_liar_leaves_out_the_coin_and_nothing_else(mechanism):
    context = make_context(mechanism, (0, 1), (64,))
    bare = mechanism.without_noise(context)
    assert type(bare) is type(mechanism) and math.isinf(getattr(bare, bare.level))
    assert bare.code(context) == mechanism.code(context)


@pytest.mark.parametrize("mechanism", [FedAvg(), GaussianNoise(1.0, 1.0), JoPEQ(1.0)], ids=repr)
def test_without_a_coin_a_liar_is_told(mechanism):
    """`GaussianNoise` has a field `epsilon`, which is a budget and no coin."""
    with pytest.raises(ValueError, match="has no noise that a Byzantine client could leave out"):
        mechanism.without_noise(make_context(mechanism, (0, 1)))


def test_advice_is_the_mechanism_s_own():
    """Once everybody was given CorBin's."""

    def advice(mechanism, adversary):
        claims = mechanism.claims(make_context(mechanism, (0, 1, 2, 3)))
        return mechanism.advice(next(claim for claim in claims if claim.adversary is adversary))

    assert "shared_bits=0" in advice(CorBin(1.0), Adversary.SERVER)
    assert "shared_bits" not in advice(LDPQ(1.0), Adversary.SERVER)
    assert "secure aggregation" in advice(PerCoordinateLaplace(1.0), Adversary.SERVER)
    assert "secure aggregation" not in advice(PerCoordinateLaplace(1.0), Adversary.SECAGG_SERVER)
    unsummed = CPA(1.0, epsilon_scope="bit")
    assert "secure aggregation" not in advice(unsummed, Adversary.SERVER)
