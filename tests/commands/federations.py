"""Federations that differ in one argument each, of those on which a client's privacy depends."""

import lightning_fedq as fedq
from lightning_fedq._lightning import pl


def first_twenty(round):
    """Clients that are there in every round."""
    return range(20)


LATE = fedq.Deadline(1.0, durations=0.5, spread=0.5)
FEW = fedq.SecAgg(max_colluding_fraction=0.1, max_dropped_fraction=0.1)
FEDERATIONS = {
    "cohort": {"cohort": 20},
    "cohort, once": {"cohort": fedq.DisjointOnce(15)},
    "cohort, in turn": {"cohort": fedq.Cyclic(20)},
    "cohort, secret": {"cohort": fedq.FixedSize(20, secret=True), "diagnostics": False, "local_steps": 1},
    "dropout_probability": {"dropout_probability": 0.2},
    "deadline": {"deadline": LATE, "cohort": 20},
    "deadline, masks": {"deadline": LATE, "secure_aggregation": fedq.SecAgg(threshold=40)},
    "cohort, available": {"cohort": fedq.Available(first_twenty, 20)},
    "secure_aggregation": {"secure_aggregation": FEW, "cohort": 20},
    "secure_aggregation, dropouts": {"secure_aggregation": FEW, "dropout_probability": 0.05},
    "secure_aggregation, a server that lies": {"secure_aggregation": fedq.SecAgg(active=True)},
    "secure_aggregation, liars": {"secure_aggregation": FEW},
    "liars": {"cohort": 20},
    "buffers": {"buffers": "local"},
    "personal_parameters": {"personal_parameters": ["backbone.3.*"]},
    "sends": {"sends": "weights"},
    "broadcast_bits": {"broadcast_bits": 8},
    "statistics": {"statistics": fedq.Statistics(4, 1.0)},
}
OF_NO_WEIGHT = {
    *("mechanism", "num_clients", "privacy", "partition", "labels", "algorithm", "local_epochs"),
    *(
        "local_steps",
        "clients_per_step",
        "ranges",
        "server_lr",
        "server_optimizer",
        "diagnostics",
        "client_metrics",
    ),
    *("check_isolation", "evaluate_clients", "constraints"),
    *("seed", "ledger"),  # nothing is private; no configuration has one
    *("weighting", "aggregator"),  # above: each client once is planned
    "extra_buffers",  # buffers that travel anyway, in the parameters
}


def federation(name, rounds, **more):
    """One of them, of 60 clients with Gaussian noise, and its Trainer."""
    federated = fedq.Federated(fedq.GaussianNoise(1.0, 1.0), 60, **FEDERATIONS[name], **more)
    liars = [fedq.ByzantineClients(fraction=0.2, attack="sign_flip")] if "liars" in name else []
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "accelerator": "cpu"}
    return federated, pl.Trainer(max_epochs=rounds, callbacks=[federated, *liars], **options)
