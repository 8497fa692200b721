"""One value of every sample: a column, or what a function says of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

By = int | str | Callable[[Any], Any] | Sequence[Any] | Tensor
"""Where values are: an item of every sample, a function of a sample, or the values themselves."""


def check_column(by: object) -> None:
    """Refuse what says no value of a sample.

    Raises:
        TypeError: With what would.
    """
    if isinstance(by, bool) or not (isinstance(by, int | str) or callable(by) or hasattr(by, "__len__")):
        raise TypeError(
            "by must be an index or key of a sample's item, a function of a sample, or one value for each "
            f"sample, got {by!r}"
        )


def in_words(by: Any) -> str:
    """Where values are, in words that are the same in another process."""
    if callable(by):
        return str(getattr(by, "__qualname__", type(by).__name__))
    return repr(by) if isinstance(by, int | str | None) else f"<{len(by)} values>"


def is_table(dataset: object) -> bool:
    """Is this a Hugging Face `datasets.Dataset`? By what it can do, as the package may be missing."""
    return all(hasattr(dataset, name) for name in ("column_names", "with_format", "features"))


def as_tensors(dataset: Any) -> Any:
    """Give a Hugging Face data set without a format that of torch, whose rows are tensors.

    Its rows are Python lists otherwise, which torch's collation would transpose.
    """
    plain = is_table(dataset) and dataset.format["type"] is None
    return dataset.with_format("torch") if plain else dataset


def column(dataset: Any, name: str) -> list[Any]:
    """A column of a Hugging Face dataset as Python values, whatever its format.

    Raises:
        ValueError: If there is no such column.
    """
    if name not in dataset.column_names:
        raise ValueError(f"the data set has no column {name!r}, but {', '.join(dataset.column_names)}")
    return list(dataset.with_format(None)[name])


def read_column(dataset: Dataset[Any], by: By, what: str) -> list[Any]:
    """Return one value a sample.

    A function, and an item of a data set that is no table of tensors or columns, reads every sample once.

    Args:
        dataset: Map-style data set.
        by: Index or key of an item of a sample, a function of a sample, or the values of all samples.
        what: Rule that asks, for messages.

    Raises:
        ValueError: If there is no such item, or not one value a sample.
    """
    num_samples: int = len(dataset)  # type: ignore[arg-type]
    if not isinstance(by, int | str) and not callable(by):
        found = by.tolist() if hasattr(by, "tolist") else list(by)
        if len(found) != num_samples:
            raise ValueError(f"{what} needs one value a sample, got {len(found)} for {num_samples} samples")
        return found
    if isinstance(dataset, Subset):
        inner = dataset.dataset
        if isinstance(inner, TensorDataset) or is_table(inner):
            whole = read_column(inner, by, what)
            return [whole[index] for index in dataset.indices]
    if isinstance(by, str) and is_table(dataset):
        return column(dataset, by)
    if isinstance(by, int) and isinstance(dataset, TensorDataset):
        try:
            return _plain(dataset.tensors[by], by, what)
        except IndexError as error:
            raise ValueError(f"{what}: samples have {len(dataset.tensors)} items, got by={by}") from error
    read: Any = by if callable(by) else lambda sample: sample[by]
    try:
        return [_scalar(read(dataset[index]), by, what) for index in range(num_samples)]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{what} found no item {by!r} in the samples of {type(dataset).__name__} "
            f"({type(error).__name__}: {error}); say which item holds it, or give a function of a sample"
        ) from error


def _plain(values: Tensor, by: Any, what: str) -> list[Any]:
    if values.dim() != 1:
        raise ValueError(
            f"{what} needs one value a sample, and item {by!r} is of shape {tuple(values.shape[1:])}"
        )
    return values.tolist()


def _scalar(value: Any, by: Any, what: str) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{what} needs one value a sample, and {by!r} gives shape {tuple(value.shape)}")
        return value.item()
    return value.item() if hasattr(value, "item") else value


def number_groups(values: Sequence[Any]) -> tuple[Tensor, list[Any]]:
    """Number the distinct values in their order, of several types in that of their words.

    Args:
        values: One value a sample.

    Returns:
        `(num_samples,)` int64 numbers, and the distinct values.
    """
    try:
        distinct = sorted(set(values))
    except TypeError:
        distinct = sorted(set(values), key=lambda value: (type(value).__name__, repr(value)))
    number = {value: index for index, value in enumerate(distinct)}
    return torch.tensor([number[value] for value in values], dtype=torch.int64), distinct
