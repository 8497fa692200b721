from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fedq.data.labels import label_counts, label_figure, read_labels

LABELS = torch.tensor([2, 0, 1, 2])


class Pairs(Dataset[Any]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if not 0 <= index < 4:
            raise IndexError
        return "x", int(LABELS[index])


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(torch.zeros(4, 3), LABELS), Pairs(targets=LABELS.tolist()), Pairs(labels=LABELS), Pairs()],
    ids=["tensors", "targets", "labels", "items"],
)
def test_finds_labels_where_datasets_keep_them(dataset):
    assert read_labels(dataset).tolist() == [2, 0, 1, 2]
    assert read_labels(Subset(Subset(dataset, [3, 1, 0]), [1, 2])).tolist() == [0, 2]


def test_an_id_is_no_label():
    ids = TensorDataset(torch.zeros(40, 3), torch.arange(40) % 4, torch.arange(40))
    message = r"labels found in TensorDataset look like identifiers: 40 of 40 .* Federated\(labels=1\)"
    with pytest.raises(ValueError, match=message):
        read_labels(ids)
    assert torch.equal(read_labels(ids, 1), torch.arange(40) % 4)
    assert torch.equal(read_labels(Subset(ids, [5, 6]), 1), torch.tensor([1, 2]))


def test_labels_that_the_user_points_at():
    rows = [{"x": torch.zeros(2), "label": index % 3} for index in range(6)]
    assert read_labels(rows, "label").tolist() == [0, 1, 2, 0, 1, 2]
    assert read_labels(rows, [5, 4, 3, 2, 1, 0]).tolist() == [5, 4, 3, 2, 1, 0]
    with pytest.raises(ValueError, match=r"no integer labels in list. Give the item"):
        read_labels(rows, "labell")
    with pytest.raises(ValueError, match="got 2 for 6 samples"):
        read_labels(rows, [0, 1])
    pairs = TensorDataset(torch.zeros(6, 2), torch.arange(6) % 3)
    for wrong in (3, "label"):
        with pytest.raises(ValueError, match=r"no integer labels in TensorDataset. Give the item"):
            read_labels(pairs, wrong)


def test_counts_and_picture():
    clients = [torch.tensor([0, 3]), torch.tensor([1, 2])]
    assert label_counts(LABELS, clients).tolist() == [[0, 0, 2], [1, 1, 0]]
    figure = label_figure(LABELS, clients)
    image = figure.axes[0].images[0].get_array()
    assert image is not None and image.tolist() == [[0, 1], [0, 1], [2, 0]]
