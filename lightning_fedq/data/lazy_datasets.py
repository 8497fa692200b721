"""Concatenated data sets of the clients, which may be opened only while their client trains."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from lightning_fedq.data.columns import as_tensors
from lightning_fedq.data.generator_turns import generators_in


class ClientData(Dataset[Any]):
    """Data set of one client with a known size, which is open only while the client trains.

    The partition follows from the sizes, so nothing is read before the first batch. Each of several ranks
    opens the data sets of its own clients only. After the client's turn the data set is closed by its
    `close()`, if it has one, and dropped.

    Args:
        load: Function without arguments that opens and returns the data set. It is called in every round,
            and in every worker process of the loader.
        size: Number of samples of the data set, >= 1.

    Raises:
        ValueError: If the size is not positive. When the data set is opened: if it has another number of
            samples, or if it has a separate random generator, which would restart each time.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> site = ClientData(lambda: TensorDataset(torch.arange(3)), size=3)
        >>> len(site), site[2]
        (3, (tensor(2),))
    """

    def __init__(self, load: Callable[[], Any], size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}. Leave clients without samples out.")
        self.load, self.size = load, size
        self._opened: Any = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.size

    def __getitem__(self, index: int) -> Any:
        """Return one sample. Open the data set if it is closed."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened[index]

    def _open(self) -> Any:
        """Open the data set, and check its size and its generators."""
        data = as_tensors(self.load())
        if len(data) != self.size:
            raise ValueError(
                f"{self.load} opened a data set of {len(data)} samples, but ClientData(size={self.size}) was "
                "given. Give the true size of each client's data."
            )
        if held := generators_in(data):
            raise ValueError(
                f"{self.load} opened a data set with a {type(held[0]).__name__}, which restarts each time. "
                "Draw from torch's default generator, or give the data set itself in place of ClientData."
            )
        return data

    def close(self) -> None:
        """Close the data set and drop it."""
        data, self._opened = self._opened, None
        getattr(data, "close", lambda: None)()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open data set, for a worker process."""
        return {**vars(self), "_opened": None}


class ClientDatasets(ConcatDataset[Any]):
    """Concatenation of the data sets of all clients.

    `ClientData` sets are open only while their clients are in the present batch.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]]) -> None:
        super().__init__(datasets)
        self._open = set[int]()

    def close_unused(self, indices: Sequence[int]) -> None:
        """Close open data sets that contain none of the samples with these indices, which are read next."""
        now = {bisect_right(self.cumulative_sizes, index) for index in indices}
        now = {client for client in now if isinstance(self.datasets[client], ClientData)}
        for client in self._open - now:
            self.datasets[client].close()  # type: ignore[attr-defined]
        self._open = now

    @property
    def clients(self) -> list[range]:
        """Sample indices of each client."""
        return [range(*bounds) for bounds in pairwise([0, *self.cumulative_sizes])]
