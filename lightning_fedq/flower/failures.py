"""Failed trainings of a client, counted for its site only, since the server may not learn of them."""

from lightning_fedq.flower.store import Store


class Failures:
    """Number of trainings in this process, and of those that failed.

    Under a privacy claim, a client sends a zero update in place of a failed training, and the round counts
    it. Whether a training fails may depend on the data, so only the site can find out.

    Attributes:
        asked: Number of trainings that the server asked for.
        failed: Number of trainings that failed.
    """

    def __init__(self) -> None:
        self.asked = self.failed = 0
        self._last_error = ""

    def add(self, round: int, error: Exception, message: bool, store: Store | None) -> None:
        """Count a failed training, and add it to the client's folder if there is one.

        Args:
            round: Index of the round, from 0.
            error: Error of the training.
            message: Whether the server is told of the failure.
            store: Folder of the client, or None.
        """
        self.failed += 1
        words = f"{type(error).__name__}: {error}"
        server = "knows" if message else "does not know"
        self._last_error = f"and the server {server}. The last one, in round {round + 1}: {words}"
        if store is not None:
            store.append("failed", {"round": round + 1, "error": words, "server_knows": message})

    def line(self) -> str:
        """Return the number of failures and the last error as text, or "" if there are none."""
        if not self.failed:
            return ""
        return f"{self.failed} of {self.asked} trainings have failed here, {self._last_error}"
