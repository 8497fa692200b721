"""Real processes, TLS on: one SuperLink, four SuperNodes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mechanism, secagg",
    [
        ("CorBin(epsilon=4.0, shared_bits=5)", False),
        ("CorBin(epsilon=4.0, shared_bits=5)", True),
        ("LDPQ(epsilon=4.0)", False),
        ("AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05)", False),
        ("CPA(epsilon=2.0)", False),
    ],
)
def test_a_deployment_ends_with_the_weights_of_the_simulation(
    mechanism: str, secagg: bool, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("deploy_example", ROOT / "examples" / "deploy.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.deploy(mechanism, tmp_path, secagg)
    assert found["same weights"]
    assert found["bits, deployed"] == found["bits, simulated"]
