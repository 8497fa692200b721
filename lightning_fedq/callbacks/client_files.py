"""Files of a run folder about single clients, which a simulation has because it plays them.

They lie in `clients/`, apart from what a server would have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fedq.reports.runs import write_atomically

if TYPE_CHECKING:
    from lightning_fedq.training.client_evaluation import EvaluatedClients

EVALUATION = "evaluation"
"""Name of the file about held-out samples: a line of JSON a measured round."""
HOLDINGS = "holdings"
"""Name of the table of who holds what."""


def add_evaluation(folder: Path, measured: EvaluatedClients) -> None:
    """Add what models score on every client's held-out samples.

    Args:
        folder: The folder `clients` of a run; it is made if need be.
        measured: Measurements after a round.
    """
    folder.mkdir(exist_ok=True)
    with (folder / f"{EVALUATION}.jsonl").open("a") as file:
        file.write(json.dumps(measured.plain()) + "\n")


def write_holdings(
    folder: Path, sizes: Sequence[int], held_out: Sequence[int], counts: Tensor | None
) -> None:
    """Write who holds what: a table with a row for each client.

    Args:
        folder: The folder `clients` of a run; it is made if need be.
        sizes: Samples that each client trains on.
        held_out: Samples that each client keeps out of it; empty if nobody does.
        counts: `(clients, labels)` samples of each label; None where labels are not at hand.
    """
    folder.mkdir(exist_ok=True)
    labels = [] if counts is None else [f"label_{label}" for label in range(counts.shape[1])]
    lines = [",".join(["client", "samples", *(["held_out"] if held_out else []), *labels])]
    for client, size in enumerate(sizes):
        of_labels = [] if counts is None else counts[client].tolist()
        lines.append(",".join(map(str, [client, size, *held_out[client : client + 1], *of_labels])))
    write_atomically(folder / f"{HOLDINGS}.csv", "\n".join(lines) + "\n")
