"""Who holds which labels: as numbers, and as a picture."""

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
"""Of fewer samples nobody can say whether their labels are ids."""

Labels = int | str | Sequence[int] | Tensor | None
"""Where labels are: an item of every sample, or the labels themselves; None looks in the usual places."""


def read_labels(dataset: Dataset[Any], labels: Labels = None) -> Tensor:
    """Return one integer label a sample, `(len(dataset),)` int64.

    Looked up where datasets usually keep them (the last tensor of a `TensorDataset`, `targets`,
    `labels`, through any `Subset`); else every sample is read once and its second item taken.

    Args:
        dataset: Map-style dataset.
        labels: Index or key of a sample's label, or the labels of all samples.

    Raises:
        ValueError: If the samples are not (input, integer label, ...), or what was found looks like an id.
    """
    found = _find(dataset, labels)
    if found.dim() != 1 or found.is_floating_point():
        raise ValueError(
            f"labels must be one integer a sample, got {found.dtype} of shape {tuple(found.shape)}; use IID()"
        )
    num_samples: int = len(dataset)  # type: ignore[arg-type]
    if len(found) != num_samples:
        raise ValueError(f"labels must be one integer a sample, got {len(found)} for {num_samples} samples")
    found = found.long().cpu()
    alone = int((torch.unique(found, return_counts=True)[1] == 1).sum())
    if labels is None and num_samples >= _ENOUGH and 2 * alone > num_samples:
        raise ValueError(
            f"what looks like the labels of {type(dataset).__name__} is a class of its own for {alone} of "
            f"{num_samples} samples, as an id would be; say which item of a sample is its label, e.g. "
            "Federated(labels=1), or give the labels themselves, or use IID()"
        )
    return found


def _find(dataset: Dataset[Any], labels: Labels) -> Tensor:
    if not isinstance(labels, int | str | None):
        return torch.as_tensor(labels)
    if isinstance(dataset, Subset):
        return _find(dataset.dataset, labels)[torch.as_tensor(dataset.indices)]
    found: Any = None
    if is_table(dataset) and not isinstance(labels, int):
        return torch.as_tensor(column(dataset, _label_column(dataset) if labels is None else labels))
    if labels is None and not isinstance(dataset, TensorDataset):
        found = getattr(dataset, "targets", getattr(dataset, "labels", None))
    item: Any = 1 if labels is None else labels
    try:
        if isinstance(dataset, TensorDataset):
            found = dataset.tensors[-1 if labels is None else int(labels)]
        if found is None:
            found = [int(dataset[index][item]) for index in range(len(dataset))]  # type: ignore[arg-type]
        return torch.as_tensor(found)
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"found no integer labels in {type(dataset).__name__}; say which item of a sample is its label, "
            "e.g. Federated(labels='label'), give it a `targets` attribute, or use IID()"
        ) from error


def _label_column(dataset: Any) -> str:
    """Name of the column of labels of a Hugging Face data set."""
    found = [name for name in ("label", "labels") if name in dataset.column_names]
    if not found:
        raise ValueError(
            f"found no column 'label' or 'labels' among {', '.join(dataset.column_names)}; say which column "
            "is the label, e.g. Federated(labels='fine_label'), or use IID()"
        )
    return found[0]


def has_stored_labels(dataset: Dataset[Any], labels: Labels = None) -> bool:
    """Whether `read_labels` finds labels without reading every sample."""
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
        labels: `(num_samples,)` int64, >= 0.
        clients: Sample indices of each client.

    Returns:
        `(clients, labels)` int64.

    Example:
        >>> label_counts(torch.tensor([0, 1, 1]), [torch.tensor([0, 1]), torch.tensor([2])])
        tensor([[1, 1],
                [0, 1]])
    """
    num_labels = int(labels.max()) + 1
    return torch.stack([torch.bincount(labels[part], minlength=num_labels) for part in clients])


def label_figure(labels: Tensor, clients: Sequence[Tensor]) -> Figure:
    """Draw who holds which labels, one column a client, one row a label.

    Args:
        labels: `(num_samples,)` int64, >= 0.
        clients: Sample indices of each client.

    Returns:
        A matplotlib figure that belongs to no window.
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
