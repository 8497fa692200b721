"""Real processes, TLS on: one SuperLink, four SuperNodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.flower.machines import example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with example.Machines(tmp_path_factory.mktemp("machines")) as running:
        yield running


@pytest.mark.parametrize(
    "name, mechanism, secagg",
    [
        ("corbin", "CorBin(epsilon=4.0, shared_bits=5)", False),
        ("ldpq", "LDPQ(epsilon=4.0)", False),
        ("gaussian", "AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05)", False),
        ("cpa", "CPA(epsilon=2.0)", False),
        ("sums", "CorBin(epsilon=4.0, shared_bits=5)", True),
    ],
)
def test_a_deployment_ends_with_the_weights_of_the_simulation(
    machines: Any, name: str, mechanism: str, secagg: bool
) -> None:
    found = example.deploy(machines, mechanism, name, secagg)
    assert found["answers"] == [4, 4]
    assert found["same weights"]
    assert found["bits, deployed"] == found["bits, simulated"]
