"""Data sets of clients one behind the other, those of known size opened in their client's turn."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from lightning_fedq.data.columns import as_tensors
from lightning_fedq.data.generator_turns import generators_in


class ClientData(Dataset[Any]):
    """A client's data set with a size that is known, opened when its client's turn comes, closed after it.

    Who holds what follows from the sizes, so nothing is read before the first batch, and each of several
    ranks opens its own clients' only. The data set that `load` returns is closed by its `close()`, if it has
    one, and forgotten.

    Args:
        load: Opens the data set: a function without arguments. It is called again in every round, and in
            every worker process of the loader.
        size: Number of samples, >= 1.

    Raises:
        ValueError: If the size is not positive; when it is opened, if there is another number of samples, or
            if it draws from a random generator of its own, which would begin anew each time.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> site = ClientData(lambda: TensorDataset(torch.arange(3)), size=3)
        >>> len(site), site[2]
        (3, (tensor(2),))
    """

    def __init__(self, load: Callable[[], Any], size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}; leave clients without samples out")
        self.load, self.size = load, size
        self._opened: Any = None

    def __len__(self) -> int:
        """Number of samples."""
        return self.size

    def __getitem__(self, index: int) -> Any:
        """One sample, of the data set that is open from then on."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened[index]

    def _open(self) -> Any:
        data = as_tensors(self.load())
        if len(data) != self.size:
            raise ValueError(
                f"{self.load} opened a data set of {len(data)} samples where ClientData(size={self.size}) "
                "was said; give the size of each client's data as it is"
            )
        if held := generators_in(data):
            raise ValueError(
                f"{self.load} opened a data set that holds a {type(held[0]).__name__} of its own, which "
                "begins anew each time that it is opened; draw from torch's default generator, or give the "
                "data set itself in place of ClientData"
            )
        return data

    def close(self) -> None:
        """Close the data set, and forget it."""
        data, self._opened = self._opened, None
        getattr(data, "close", lambda: None)()

    def __getstate__(self) -> dict[str, Any]:
        """State without what is open, for a worker process."""
        return {**vars(self), "_opened": None}


class ClientDatasets(ConcatDataset[Any]):
    """The data sets of all clients, one behind the other.

    Of those that are opened by turn, the ones of the clients in the present batch are open.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]]) -> None:
        super().__init__(datasets)
        self._open = set[int]()

    def close_unused(self, indices: Sequence[int]) -> None:
        """Close data sets that are open and hold none of these samples, which are read next."""
        now = {bisect_right(self.cumulative_sizes, index) for index in indices}
        now = {client for client in now if isinstance(self.datasets[client], ClientData)}
        for client in self._open - now:
            self.datasets[client].close()  # type: ignore[attr-defined]
        self._open = now

    @property
    def clients(self) -> list[range]:
        """The indices of each client's samples."""
        return [range(*bounds) for bounds in pairwise([0, *self.cumulative_sizes])]
