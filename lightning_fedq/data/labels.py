"""Who holds which labels: as numbers, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def labels_of(dataset: Dataset[Any]) -> Tensor:
    """Return one integer label a sample, `(len(dataset),)` int64.

    Looked up where datasets usually keep them (the last tensor of a `TensorDataset`, `targets`,
    `labels`, through any `Subset`); else every sample is read once and its second item taken.

    Raises:
        ValueError: If the samples are not (input, integer label, ...).
    """
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, TensorDataset):
        found: Any = dataset.tensors[-1]
    else:
        found = getattr(dataset, "targets", getattr(dataset, "labels", None))
    try:
        if found is None:
            found = [int(dataset[index][1]) for index in range(len(dataset))]  # type: ignore[arg-type]
        labels = torch.as_tensor(found)
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"found no integer labels in {type(dataset).__name__}; give it a `targets` attribute, or "
            "use IID()"
        ) from error
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            f"labels must be one integer a sample, got {labels.dtype} of shape {tuple(labels.shape)}; "
            "use IID()"
        )
    return labels.long().cpu()


def label_counts(labels: Tensor, clients: Sequence[Tensor]) -> Tensor:
    """Count how many samples of each label each client holds.

    Args:
        labels: `(num_samples,)` int64, >= 0.
        clients: Sample indices of each client.

    Returns:
        `(clients, labels)` int64.
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

    counts = label_counts(labels, clients)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(counts.T.numpy(), aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    axes.set(xlabel="client", ylabel="label", title="Samples of each label that each client holds")
    figure.colorbar(image, ax=axes, label="samples")
    return figure
