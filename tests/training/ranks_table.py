"""Run some features over ranks, as a program: FOLDER DEVICES NODES FEATURE-NUMBERS|all."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch

from tests.training.ranks_features import FEATURES, run


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder, devices, nodes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", 0))))
    chosen = (
        list(FEATURES) if sys.argv[4] == "all" else [list(FEATURES)[int(n)] for n in sys.argv[4].split(",")]
    )
    found = {}
    for name in chosen:
        try:
            found[name] = run(FEATURES[name], folder / str(list(FEATURES).index(name)), devices, nodes)
        except BaseException:
            print(f"rank {rank} ended in {name!r}", flush=True)
            traceback.print_exc()
            raise
        (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
