"""Which of a client's trainings have failed: for its site alone, since the server may not be told."""

from lightning_fedq.flower.store import Store


class Failures:
    """Trainings that a client was asked for in this process, and those that failed.

    Where something is claimed a zero update goes out in the place of one that failed, and the round counts
    it: whether a training fails may follow from the data. So nobody but the site can find out.

    Attributes:
        asked: Trainings.
        failed: Those that have failed.
    """

    def __init__(self) -> None:
        self.asked = self.failed = 0
        self._last_error = ""

    def add(self, round: int, error: Exception, message: bool, store: Store | None) -> None:
        """Note one, in the client's folder, too, where it has one.

        Args:
            round: Its round, from 0.
            message: Does the server hear that it failed?
            store: The client's folder.
        """
        self.failed += 1
        words = f"{type(error).__name__}: {error}"
        server = "knows" if message else "does not know"
        self._last_error = f"and the server {server}; the last one, in round {round + 1}: {words}"
        if store is not None:
            store.append("failed", {"round": round + 1, "error": words, "server_knows": message})

    def line(self) -> str:
        """Number of them, and the last one's error. "" if there are none."""
        return (
            f"{self.failed} of {self.asked} trainings have failed here, {self._last_error}"
            if self.failed
            else ""
        )
