"""Statistics that clients make before they train stand in the trial of isolation."""

from typing import Any, ClassVar

import pytest

from tests.training.test_statistics import Net, fit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Leaks(Net):
    """One client's data are in what another says: of its statistics, or of its training."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, into: str) -> None:
        super().__init__()
        self.into = into
        Leaks.seen.clear()

    def client_statistics(self, batches):
        found = super().client_statistics(batches)
        Leaks.seen.append(found)
        return found + (0.1 * Leaks.seen[0] if self.into == "statistics" else 0.0)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 + Leaks.seen[0].sum()) if self.into == "training" and Leaks.seen else loss


@pytest.mark.parametrize("into", ["statistics", "training"])
def test_the_trial_of_isolation_looks_at_statistics(into):
    with pytest.raises(ValueError, match=r"Data of client \d+ changed results"):
        fit(Leaks(into), check_isolation=True)
    fit(Net(), check_isolation=True)
