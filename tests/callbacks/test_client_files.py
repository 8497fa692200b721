"""Who holds what, as a table in the folder of a run."""

import csv
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_fedq import ClientEvaluation
from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.data import LabelShards, QuantitySkew
from lightning_fedq.mechanisms import LDPQ
from tests.digits_run import Classifier, Digits, digits, make_trainer


class Plain(Dataset[Any]):
    """Labels are in the samples only."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        inputs, labels = digits()
        return inputs[index], int(labels[index])


class WithoutLabels(Digits):
    def train_set(self):
        return Plain()


def run(folder, data, **settings):
    fed = Federated(LDPQ(epsilon=1.0), 4, **settings)
    made = RunFolder("run", str(folder), show=False)
    make_trainer(fed, made, max_epochs=1).fit(Classifier(), datamodule=data)
    return fed, folder / "run"


def rows(folder):
    return list(csv.DictReader((folder / "clients" / "holdings.csv").read_text().splitlines()))


def test_who_holds_which_labels_and_what_is_held_out(tmp_path):
    settings = {"partition": LabelShards(2), "evaluate_clients": ClientEvaluation(0.2)}
    fed, folder = run(tmp_path, Digits(80, 5), **settings)
    table = rows(folder)
    assert len(table) == 4 and len(table[0]) == 3 + 10
    for client, row in enumerate(table):
        held = digits()[1][fed.client_indices[client]]
        assert int(row["client"]) == client and int(row["samples"]) == 16 and int(row["held_out"]) == 4
        counts = [int(row[f"label_{label}"]) for label in range(10)]
        assert counts == torch.bincount(held, minlength=10).tolist()
    assert "clients/holdings.csv" in (folder / "privacy.md").read_text()
    assert not list(folder.glob("holdings*")), "apart from what a server would have"


def test_without_labels_at_hand(tmp_path):
    fed, folder = run(tmp_path, WithoutLabels(batch_size=5), partition=QuantitySkew(0.5, least=2))
    table = rows(folder)
    assert [list(row) for row in table] == [["client", "samples"]] * 4
    assert [int(row["samples"]) for row in table] == [len(part) for part in fed.client_indices]
    assert "How many samples every client holds: clients/holdings.csv" in " ".join(
        (folder / "privacy.md").read_text().split()
    )
