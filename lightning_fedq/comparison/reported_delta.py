"""Delta of a compared run that has neither a privacy target nor a budget, such as a run without privacy."""

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks.trainer_lookup import find_federated
from lightning_fedq.privacy.accounting import check_delta


class ReportedDelta(pl.Callback):
    """Delta at which a run of `fedq compare` reports its epsilons, so that all rows of a table share it.

    Args:
        delta: Delta of the comparison, in (0, 1 / num_clients).

    Raises:
        ValueError: If delta is out of its range. The number of clients is known at the start of a fit.
    """

    knows_clients = True

    def __init__(self, delta: float) -> None:
        self.clients_delta = check_delta(delta)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a delta that the report at the end can't use."""
        if stage == "fit":
            num_clients = find_federated(trainer, "ReportedDelta").clients.num_clients
            check_delta(self.clients_delta, num_clients, "clients")
