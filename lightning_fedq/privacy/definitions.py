"""Words of privacy statements, each defined once.

The privacy page, the glossary, docstrings and the help of the commands begin an entry with these texts.
`tests/test_definitions.py` compares them.
"""

from __future__ import annotations

EPSILON = (
    "Privacy bound: any set of outcomes is at most e^epsilon times as likely for one of two inputs as for "
    "the other, plus delta"
)
DELTA = "Additive slack in the bound of epsilon, below one divided by the number of protected units"
CLIP_NORM = "Largest norm of an update, to which longer updates are scaled down"
NOISE_MULTIPLIER = "Scale of the noise divided by the sensitivity"
NUM_CLIENTS = "Number of clients of the federation"
SEED = "Number that makes a run reproducible, and not private"

ARGUMENTS = {
    "epsilon": EPSILON,
    "delta": DELTA,
    "clip_norm": CLIP_NORM,
    "noise_multiplier": NOISE_MULTIPLIER,
    "num_clients": NUM_CLIENTS,
    "seed": SEED,
}
"""Definition of each argument that affects privacy, by its name."""
PAGE = {
    "client": "The unit that is protected: a person, a phone or a hospital, with all its data",
    "update": "Local model minus global model",
    "round": "Clients train from the global model and send updates, and the server applies their mean",
    "mechanism": "A method that clips, quantises and randomises an update, and states what this protects",
    "epsilon": EPSILON,
    "delta": DELTA,
    "replace-one adjacency": "Any other updates replace the updates of one client",
    "secure aggregation": "A protocol that reveals the sum of the updates to the server, and nothing else "
    "about them",
    "vacuous": "No meaningful guarantee",
    "seed": SEED,
}
"""Definitions that the privacy page prints: ten words."""
