"""Labels of the samples, and their numbers on each client as a table or a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fedq.data.columns import column, is_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_ENOUGH = 20
"""Smallest number of samples for which labels are checked for being unique identifiers."""

Labels = int | str | Sequence[int] | Tensor | None
"""Source of the labels: an item of every sample, the labels themselves, or None for the usual places."""


def read_labels(dataset: Dataset[Any], labels: Labels = None) -> Tensor:
    """Return one integer label for each sample, `(len(dataset),)` int64.

    Without `labels` the usual places are tried: the last tensor of a `TensorDataset`, the attributes
    `targets` and `labels`, or the column `label` or `labels` of a Hugging Face data set, through any
    `Subset`. Otherwise every sample is read once, and its second item is the label.

    Args:
        dataset: Map-style data set.
        labels: Index or key of a sample's label, or the labels of all samples. None tries the usual places.

    Raises:
        ValueError: If the labels are not one integer for each sample. Also if labels from the usual places
            look like identifiers, since most of them occur once.
    """
    values = _find(dataset, labels)
    if values.dim() != 1 or values.is_floating_point():
        raise ValueError(
            f"labels must be one integer per sample, got {values.dtype} of shape {tuple(values.shape)}. "
            "Use IID() without labels."
        )
    num_samples: int = len(dataset)  # type: ignore[arg-type]
    if len(values) != num_samples:
        raise ValueError(
            f"labels must be one integer per sample, got {len(values)} for {num_samples} samples"
        )
    values = values.long().cpu()
    unique = int((torch.unique(values, return_counts=True)[1] == 1).sum())
    if labels is None and num_samples >= _ENOUGH and 2 * unique > num_samples:
        raise ValueError(
            f"The labels found in {type(dataset).__name__} look like identifiers: {unique} of {num_samples} "
            "occur once. Give the item of the label, e.g. Federated(labels=1), or the labels, or use IID()."
        )
    return values


def _find(dataset: Dataset[Any], labels: Labels) -> Tensor:
    """Return the labels of a data set without checking them."""
    if not isinstance(labels, int | str | None):
        return torch.as_tensor(labels)
    if isinstance(dataset, Subset):
        return _find(dataset.dataset, labels)[torch.as_tensor(dataset.indices)]
    values: Any = None
    if is_table(dataset) and not isinstance(labels, int):
        return torch.as_tensor(column(dataset, _label_column(dataset) if labels is None else labels))
    if labels is None and not isinstance(dataset, TensorDataset):
        values = getattr(dataset, "targets", getattr(dataset, "labels", None))
    item: Any = 1 if labels is None else labels
    try:
        if isinstance(dataset, TensorDataset):
            values = dataset.tensors[-1 if labels is None else int(labels)]
        if values is None:
            values = [int(dataset[index][item]) for index in range(len(dataset))]  # type: ignore[arg-type]
        return torch.as_tensor(values)
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"Found no integer labels in {type(dataset).__name__}. Give the item of the label, e.g. "
            "Federated(labels='label'), or a `targets` attribute, or use IID()."
        ) from error


def _label_column(dataset: Any) -> str:
    """Return the name of the column of labels of a Hugging Face data set.

    Raises:
        ValueError: If there is no column `label` or `labels`.
    """
    names = [name for name in ("label", "labels") if name in dataset.column_names]
    if not names:
        raise ValueError(
            f"Found no column 'label' or 'labels' among {', '.join(dataset.column_names)}. Name the column, "
            "e.g. Federated(labels='fine_label'), or use IID()."
        )
    return names[0]


def has_stored_labels(dataset: Dataset[Any], labels: Labels = None) -> bool:
    """Return whether `read_labels` finds labels without reading every sample."""
    if isinstance(dataset, Subset):
        return has_stored_labels(dataset.dataset, labels)
    if isinstance(dataset, TensorDataset) or not isinstance(labels, int | str | None):
        return True
    if is_table(dataset):
        return labels in dataset.column_names or labels is None  # type: ignore[attr-defined]
    return labels is None and (hasattr(dataset, "targets") or hasattr(dataset, "labels"))


def label_counts(labels: Tensor, clients: Sequence[Tensor]) -> Tensor:
    """Count how many samples of each label each client holds.

    Args:
        labels: Label of each sample, `(num_samples,)` int64, >= 0.
        clients: Sample indices of each client.

    Returns:
        Number of samples, `(clients, labels)` int64.

    Examples:
        >>> label_counts(torch.tensor([0, 1, 1]), [torch.tensor([0, 1]), torch.tensor([2])])
        tensor([[1, 1],
                [0, 1]])
    """
    num_labels = int(labels.max()) + 1
    return torch.stack([torch.bincount(labels[part], minlength=num_labels) for part in clients])


def label_figure(labels: Tensor, clients: Sequence[Tensor]) -> Figure:
    """Draw how many samples of each label each client holds, one column per client and one row per label.

    Args:
        labels: Label of each sample, `(num_samples,)` int64, >= 0.
        clients: Sample indices of each client.

    Returns:
        Matplotlib figure without a window.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = label_counts(labels, clients)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(counts.T.numpy(), aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    axes.set(xlabel="client", ylabel="label", title="Samples of each label that each client holds")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label="samples")
    return figure
