"""Designs that are found by a search are the same on every CPU: a server decodes what clients encode."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy._core._multiarray_umath import __cpu_features__

from lightning_fedq.mechanisms.mvu import solve_mvu

ROOT = Path(__file__).parents[2]


def said() -> list[str]:
    """How many features of the CPU numpy uses, and a digest of designs."""
    digest = hashlib.sha256()
    for input_bits, output_bits, epsilon in ((2, 2, 1.0), (3, 3, 3.5), (3, 3, 5.0)):
        design = solve_mvu(input_bits, output_bits, epsilon)
        digest.update(design.counts.tobytes() + design.outputs.tobytes())
    return [str(sum(__cpu_features__.values())), digest.hexdigest()]


def test_designs_are_the_same_without_the_newest_instructions() -> None:
    """Numpy's exp has another last digit there, and its sort another order of equal values."""
    features = np.show_config(mode="dicts")["SIMD Extensions"]
    command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import said; print(*said())"]
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(features["found"])}
    few, others = subprocess.check_output(command, text=True, env=environment, cwd=ROOT).split()
    many, ours = said()
    assert int(few) < int(many) or not features["found"]
    assert others == ours
