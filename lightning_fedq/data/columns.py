"""Read one value of every sample: a column of a data set, an item of a sample, or a function of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

By = int | str | Callable[[Any], Any] | Sequence[Any] | Tensor
"""Source of one value per sample: an item of the sample, a function of it, or the values themselves."""


def check_column(by: object) -> None:
    """Refuse an object that is no source of values (`By`).

    Raises:
        TypeError: If `by` is none of the types of `By`.
    """
    if isinstance(by, bool) or not (isinstance(by, int | str) or callable(by) or hasattr(by, "__len__")):
        raise TypeError(
            "by must be an index or key of an item, a function of a sample, or one value per sample, "
            f"got {by!r}"
        )


def in_words(by: Any) -> str:
    """Describe a source of values in words that are equal in all processes."""
    if callable(by):
        return str(getattr(by, "__qualname__", type(by).__name__))
    return repr(by) if isinstance(by, int | str | None) else f"<{len(by)} values>"


def is_table(dataset: object) -> bool:
    """Return whether this is a Hugging Face `datasets.Dataset`, judged by its methods.

    The package itself may not be installed.
    """
    return all(hasattr(dataset, name) for name in ("column_names", "with_format", "features"))


def as_tensors(dataset: Any) -> Any:
    """Set the torch format of a Hugging Face data set that has no format. Return others unchanged.

    Without a format its rows are Python lists, which torch's collation would transpose.
    """
    plain = is_table(dataset) and dataset.format["type"] is None
    return dataset.with_format("torch") if plain else dataset


def column(dataset: Any, name: str) -> list[Any]:
    """Return a column of a Hugging Face data set as Python values, independently of its format.

    Raises:
        ValueError: If there is no such column.
    """
    if name not in dataset.column_names:
        raise ValueError(f"The data set has no column {name!r}. It has {', '.join(dataset.column_names)}.")
    return list(dataset.with_format(None)[name])


def read_column(dataset: Dataset[Any], by: By, what: str) -> list[Any]:
    """Return one value for each sample.

    Columns of a Hugging Face data set and tensors of a `TensorDataset` are read directly. Otherwise every
    sample is read once.

    Args:
        dataset: Map-style data set.
        by: Index or key of an item of a sample, a function of a sample, or the values of all samples.
        what: Name of the partition that needs the values, for messages.

    Raises:
        ValueError: If there is no such item, or if there is not exactly one value for each sample.
    """
    num_samples: int = len(dataset)  # type: ignore[arg-type]
    if not isinstance(by, int | str) and not callable(by):
        values = by.tolist() if hasattr(by, "tolist") else list(by)
        if len(values) != num_samples:
            raise ValueError(
                f"{what} needs one value per sample, got {len(values)} for {num_samples} samples"
            )
        return values
    if isinstance(dataset, Subset):
        inner = dataset.dataset
        if isinstance(inner, TensorDataset) or is_table(inner):
            whole = read_column(inner, by, what)
            return [whole[index] for index in dataset.indices]
    if isinstance(by, str) and is_table(dataset):
        return column(dataset, by)
    if isinstance(by, int) and isinstance(dataset, TensorDataset):
        try:
            items = dataset.tensors[by]
        except IndexError as error:
            raise ValueError(f"{what}: samples have {len(dataset.tensors)} items, got by={by}") from error
        if items.dim() != 1:
            shape = tuple(items.shape[1:])
            raise ValueError(f"{what} needs one value per sample, but item {by!r} has shape {shape}")
        return items.tolist()
    read: Any = by if callable(by) else lambda sample: sample[by]
    try:
        return [_scalar(read(dataset[index]), by, what) for index in range(num_samples)]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{what} found no item {by!r} in the samples of {type(dataset).__name__} "
            f"({type(error).__name__}: {error}). Give the index or key of an item, or a function of a sample."
        ) from error


def _scalar(value: Any, by: Any, what: str) -> Any:
    """Return a value of one sample as a Python value."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{what} needs one value per sample, but {by!r} has shape {tuple(value.shape)}")
    return value.item() if hasattr(value, "item") else value


def number_groups(values: Sequence[Any]) -> tuple[Tensor, list[Any]]:
    """Number the distinct values in ascending order. Values of several types are ordered by type and text.

    Args:
        values: One value for each sample.

    Returns:
        Number of each sample's value, `(num_samples,)` int64, and the distinct values in order.
    """
    try:
        distinct = sorted(set(values))
    except TypeError:
        distinct = sorted(set(values), key=lambda value: (type(value).__name__, repr(value)))
    number = {value: index for index, value in enumerate(distinct)}
    return torch.tensor([number[value] for value in values], dtype=torch.int64), distinct
