"""Times a round of the CPA authors' public code, as it is: `cpa.py --authors CHECKOUT` runs this file.

    python benchmarks/peer_cpa_authors.py CHECKOUT --data.root FOLDER [--rounds 2]

Nothing of it is copied or changed: their `main.py` runs in a folder of its own, with a clock around each
round: from `distribute_model` to the end of the aggregation, and to the next round's beginning, with their
evaluation. What a newer environment lacks is put beside it: `numpy.NINF`, and stand-ins for torchinfo and
tensorboardX where they are not installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "fedq-benchmark-result "


def stand_in(name: str, attribute: str, value: object) -> None:
    """Make an empty module with one attribute, where the real one is missing."""
    try:
        __import__(name)
    except ImportError:
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], attribute, value)


class Silent:
    """Takes every call and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def add_scalar(self, *_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--data.root", dest="root", type=Path, required=True)
    parser.add_argument("--num_clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2, help="measured, after one of warm-up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compression", choices=["scalarQ", "nested"], default="scalarQ")
    options = parser.parse_args()
    checkout, root = options.checkout.resolve(), options.root.resolve()

    import numpy as np
    import torch

    torch.set_num_threads(options.threads)
    if not hasattr(np, "NINF"):
        vars(np)["NINF"] = -math.inf  # gone from NumPy 2
    stand_in("torchinfo", "summary", lambda *_: "")
    stand_in("tensorboardX", "SummaryWriter", Silent)
    sys.path.insert(0, str(checkout))
    import CPA
    import federated_utils

    starts: list[float] = []
    ends: list[float] = []

    def starting(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            starts.append(time.process_time())
            return work(*arguments)

        return call

    def ending(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = work(*arguments)
            ends.append(time.process_time())
            return result

        return call

    federated_utils.distribute_model = starting(federated_utils.distribute_model)
    name = "nested" if options.compression == "nested" else "single"
    setattr(CPA.CPA, name, ending(getattr(CPA.CPA, name)))
    settings = {
        "device": "cpu",
        "global_epochs": options.rounds + 2,  # one of warm-up, and one whose end is not seen
        "num_users": options.num_clients,
        "compression": options.compression,
        "exp_name": "benchmark",
    }
    sys.argv = ["main.py", *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").symlink_to(root)
        os.chdir(folder)
        try:
            runpy.run_path(str(checkout / "main.py"), run_name="__main__")
        finally:
            os.chdir(checkout)
    rounds = [
        (end - start, following - start)
        for start, end, following in zip(starts[:-1], ends[:-1], starts[1:], strict=True)
    ]
    print(MARK + json.dumps(rounds[1:]), flush=True)


if __name__ == "__main__":
    main()
