"""Run some features over ranks, as a program: FOLDER DEVICES NODES FEATURE-NUMBERS|all."""

import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch

from tests.training.ranks_features import FEATURES, run


def table(folder, devices, nodes, chosen, written=None):
    """What each of these features has found, written to a file after each."""
    found = {}
    for name in chosen:
        found[name] = run(FEATURES[name], folder / str(list(FEATURES).index(name)), devices, nodes)
        if written is not None:
            written.write_text(json.dumps(found))
    return found


def main():
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder, devices, nodes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", 0))))
    names = list(FEATURES)
    chosen = names if sys.argv[4] == "all" else [names[int(n)] for n in sys.argv[4].split(",")]
    try:
        table(folder, devices, nodes, chosen, folder / f"rank-{rank}.json")
    except BaseException:
        print(f"rank {rank} has ended", flush=True)
        traceback.print_exc()
        raise


if __name__ == "__main__":
    main()
