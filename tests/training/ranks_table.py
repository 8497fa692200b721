"""Run some features over ranks, as a program: FOLDER DEVICES NODES FEATURE-NUMBERS|all and words.

Words are "engine", whose environment says who this is and does not listen, as Ray's, and "joined", where
processes have joined a default group on the same port before.
"""

import importlib
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_fedq._lightning import pl
from tests.training.ranks_features import FEATURES, run


class Engine(importlib.import_module(f"{pl.__name__}.plugins.environments").LightningEnvironment):
    """Environment of processes that an engine has started, whatever the Trainer was told."""

    creates_processes_externally = True

    def world_size(self):
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self):
        return int(os.environ["RANK"])

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass


def table(folder, devices, nodes, chosen, written=None, **trainer):
    """What each of these features has found, written to a file after each."""
    found = {}
    for name in chosen:
        place = folder / str(list(FEATURES).index(name))
        found[name] = run(FEATURES[name], place, devices, nodes, **trainer)
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
    engine = {"strategy": "fedq_clients", "plugins": [Engine()]} if "engine" in sys.argv else {}
    if "joined" in sys.argv:
        dist.init_process_group("gloo")
    try:
        table(folder, devices, nodes, chosen, folder / f"rank-{rank}.json", **engine)
    except BaseException:
        print(f"rank {rank} has ended", flush=True)
        traceback.print_exc()
        raise


if __name__ == "__main__":
    main()
