"""`examples/leaf.py`: LEAF's format, in small files that are written here."""

import json

import pytest
import torch
from torch import nn

from lightning_fedq import ClientEvaluation
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import make_trainer
from tests.loaded import loaded

leaf = loaded("examples/leaf.py")
LETTERS, LEAFDataModule = leaf.LETTERS, leaf.LEAFDataModule
leaf_clients, letters, read_leaf = leaf.leaf_clients, leaf.letters, leaf.read_leaf


def write(folder, name, users, **more):
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(x) for x, _ in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        **more,
    }
    (folder / name).write_text(json.dumps(content))
    return folder


def images(count, start):
    return [[(start + i) / 100] * 784 for i in range(count)], [(int(start) + i) % 62 for i in range(count)]


def femnist(folder, sizes):
    users = {user: images(size, number) for number, (user, size) in enumerate(sizes.items())}
    first, *rest = users
    write(folder, "all_data_0.json", {first: users[first]})
    return write(folder, "all_data_1.json", {user: users[user] for user in rest}, hierarchies=[])


def test_femnist(tmp_path):
    folder = femnist(tmp_path / "train", {"f2": 3, "f0": 5, "f1": 2})
    clients = leaf_clients(folder, "femnist")
    assert [(user, len(data)) for user, data in clients.items()] == [("f0", 5), ("f1", 2), ("f2", 3)]
    image, label = clients["f0"][1]
    assert (image.shape, image.dtype) == ((1, 28, 28), torch.float32)
    assert float(image.mean()) == pytest.approx(0.02)
    assert label.dtype == torch.int64 and int(label) == 2
    assert list(leaf_clients(folder, "femnist", max_users=2)) == ["f0", "f1"]


LINES = ["First Citizen:\nBefore we proceed any further, hear me speak. All: Speak, speak. First Ci"]


def test_shakespeare(tmp_path):
    text = (LINES[0] * 2)[:81]
    folder = write(tmp_path, "a.json", {"ROMEO": ([text[:80], text[1:81]], [text[80], "}"])})
    data = leaf_clients(folder, "shakespeare")["ROMEO"]
    assert len(LETTERS) == 80 == len(set(LETTERS))
    line, following = data[0]
    assert line.shape == (80,) and line.dtype == torch.int64
    assert "".join(LETTERS[int(letter)] for letter in [*line, following]) == text
    assert int(data[1][1]) == 79
    assert letters(["\n "]).tolist() == [[0, 1]]
    words = r"user ROMEO are not those of 'shakespeare': .*\['é'\] are none of LEAF's 80"
    with pytest.raises(ValueError, match=words):
        leaf_clients(write(tmp_path, "a.json", {"ROMEO": (["é"], ["a"])}), "shakespeare")


def test_files_that_are_no_leaf(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no JSON files in .*preprocess\.sh writes them"):
        read_leaf(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json is not in LEAF's format \(KeyError: 'users'\)"):
        read_leaf(tmp_path)
    write(tmp_path, "a.json", {"u": ([1.0], [1])}, num_samples=[2])
    words = r"user u has 1 inputs, 1 labels and num_samples = 2; the file is damaged"
    with pytest.raises(ValueError, match=words):
        read_leaf(tmp_path)
    write(tmp_path, "a.json", {"u": ([[1.0]], [1])})
    words = "user u are not those of 'femnist': images of FEMNIST have 784 numbers"
    with pytest.raises(ValueError, match=words):
        leaf_clients(tmp_path, "femnist")
    write(tmp_path, "a.json", {"u": ([], [])})
    with pytest.raises(ValueError, match=r"user u of .* has no samples; leave it out of the file"):
        leaf_clients(tmp_path, "numbers")
    write(tmp_path, "a.json", {"u": ([[1.0]], [1])})
    write(tmp_path, "b.json", {"u": ([[1.0]], [1])})
    with pytest.raises(ValueError, match=r"user u is in two files of .*; keep every user's samples in one"):
        read_leaf(tmp_path)
    with pytest.raises(ValueError, match="task must be 'femnist' or 'shakespeare' or 'numbers', got 'mnist'"):
        leaf_clients(tmp_path, "mnist")


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 62))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_federation_of_writers(tmp_path):
    sizes = {"f2": 6, "f0": 8, "f1": 4}
    folders = femnist(tmp_path / "train", sizes), femnist(tmp_path / "test", dict.fromkeys(sizes, 2))
    data = LEAFDataModule(*map(str, folders), batch_size=2)
    assert data.users == ["f0", "f1", "f2"]
    fed = Federated(FedAvg(), 3, seed=0, evaluate_clients=ClientEvaluation(data.test_sets))
    trainer = make_trainer(fed, max_epochs=2)
    trainer.fit(Module(), datamodule=data)
    assert [len(part) for part in fed.client_indices] == [8, 4, 6]
    assert len(fed.client_evaluations[-1].values["global"]["val_acc"]) == 3
    assert "val_acc" in trainer.callback_metrics
    other = femnist(tmp_path / "other", {"z1": 2, "z2": 2})
    with pytest.raises(ValueError, match=r"has no user of .*split the samples of each user, not the users"):
        LEAFDataModule(str(tmp_path / "train"), str(other))
