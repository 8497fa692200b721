"""Lint: no float comparison decides a private coin, and no torch or numpy generator feeds one."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_fedq"
PRIVATE = sorted(
    path
    for part in ("mechanisms", "functional", "secagg", "keys", "privacy", "audit", "rounds")
    for path in (PACKAGE / part).rglob("*.py")
    # tests, an update that a plan makes up to count bits, and QSGD protect nobody
    if path.parent.name != "contract_suite" and path.name not in ("planning.py", "qsgd.py")
)
# `audit/one_run.py` draws the coins of its canaries, which protect nobody; `generator_turns.py` seeds
# what the user's own module draws.
GENERATORS = {"default_rng": {"one_run.py"}, "manual_seed": {"generator_turns.py"}}
FORBIDDEN = {
    *("rand", "randn", "randint", "rand_like", "randn_like", "randperm", "bernoulli", "bernoulli_"),
    *("multinomial", "normal_", "uniform_", "exponential_", "random_"),
    *("default_rng", "RandomState", "manual_seed", "Generator", "SystemRandom"),
}
MODULES = {"random"}


def findings(source, name="x.py"):
    tree = ast.parse(source)
    return [*_generators(tree, name), *_float_coins(tree)]


def _generators(tree, name):
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"line {node.lineno}: import {a.name}" for a in node.names if a.name in MODULES]
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in FORBIDDEN and name not in GENERATORS.get(called, set()):
                found.append(f"line {node.lineno}: {called}(...)")
            if called == "normal" and ast.unparse(node.func).startswith(("torch", "np", "numpy")):
                found.append(f"line {node.lineno}: {called}(...)")
    return found


def _is_uniform(node, names):
    return any(
        (isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "uniforms")
        or (isinstance(part, ast.Name) and part.id in names)
        for part in ast.walk(node)
    )


def _float_coins(tree):
    """Comparisons with a float uniform, directly or through a name of the same function."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _is_uniform(node.value, names):
                names |= {
                    t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name)
                }
        found += [
            f"line {node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(function)
            if isinstance(node, ast.Compare) and _is_uniform(node, names)
        ]
    return found


@pytest.mark.parametrize("path", PRIVATE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_coins_are_integers_from_keyed_streams(path):
    assert findings(path.read_text(), path.name) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ncoin = torch.rand(5) < 0.3",
        "import numpy as np\nbits = np.random.default_rng(0).integers(2)",
        "import random",
        "def f(stream, q):\n    return stream.uniforms(5) < q",
        "def f(stream, q):\n    u = stream.uniforms(5)\n    return u < q",
        "def f(stream, q):\n    u = 2 * stream.uniforms(5)\n    v = u - 1\n    return (v > q).sum()",
        "def f(x):\n    return torch.bernoulli(x)",
        "def f(x):\n    return torch.normal(0, 1, x)",
    ],
)
def test_the_lint_finds_what_it_should(source):
    assert findings(source)


def test_the_lint_leaves_integer_coins_alone():
    assert findings("def f(stream, threshold):\n    return stream.words(5) < threshold") == []
