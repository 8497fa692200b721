"""Files in the format of LEAF: FEMNIST, Shakespeare, and others of users with their own samples.

A client is a user; validation is on all users' test files:

    data = LEAFDataModule("data/train", "data/test", task="femnist", batch_size=20, max_users=100)
    fed = Federated(FedAvg(), num_clients=100, evaluate_clients=ClientEvaluation(data.test_sets))

A folder holds JSON files with `users`, `num_samples` and `user_data`, which maps a user to lists "x" and "y"
(Caldas et al., LEAF: A Benchmark for Federated Settings, 2018; https://github.com/TalwalkarLab/leaf). LEAF's
own scripts download the data and write these files; nothing is downloaded here.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, TensorDataset

from lightning_fedq.data import FederatedDataModule

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare, in the order of their numbers."""
Task = Literal["femnist", "shakespeare", "numbers"]
_SIDE = 28


def read_leaf(folder: str | Path, max_users: int | None = None) -> dict[str, tuple[list[Any], list[Any]]]:
    """Read all JSON files of a folder.

    Args:
        folder: Folder with the files, such as `data/train`; or one file.
        max_users: Most users to read, in the order of their names; None reads all.

    Returns:
        By user, in the order of their names, the lists "x" and "y".

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a file is of another format, or a user is in two files.
    """
    path = Path(folder)
    files = [path] if path.is_file() else sorted(path.glob("*.json"))
    if not files:
        raise FileNotFoundError(
            f"there are no JSON files in {path}; LEAF's preprocess.sh writes them to data/train and data/test"
        )
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for file in files:
        for user, samples in _users_of(file).items():
            if user in found:
                raise ValueError(f"user {user} is in two files of {path}; keep every user's samples in one")
            found[user] = samples
    users = sorted(found)[:max_users]
    return {user: found[user] for user in users}


def _users_of(file: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    try:
        content = json.loads(file.read_text())
        users, data = content["users"], content["user_data"]
        found = {str(user): (list(data[user]["x"]), list(data[user]["y"])) for user in users}
        counts = content.get("num_samples", [len(x) for x, _ in found.values()])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is not in LEAF's format ({type(error).__name__}: {error}): it needs users, and "
            "user_data with x and y of each"
        ) from error
    for (user, (inputs, labels)), count in zip(found.items(), counts, strict=False):
        if not len(inputs) == len(labels) == count:
            raise ValueError(
                f"{file}: user {user} has {len(inputs)} inputs, {len(labels)} labels and num_samples = "
                f"{count}; the file is damaged"
            )
    return found


def letters(words: Sequence[str]) -> Tensor:
    """Numbers of characters, `(len(words), length)` int64.

    Args:
        words: Strings of one length.

    Raises:
        ValueError: If a character is none of `LETTERS`, or lengths differ.

    Example:
        >>> letters(["ab", "cd"])
        tensor([[53, 54],
                [55, 56]])
    """
    number = {letter: index for index, letter in enumerate(LETTERS)}
    if len({len(word) for word in words}) > 1:
        raise ValueError(f"strings must have one length, got {sorted({len(word) for word in words})}")
    unknown = sorted({letter for word in words for letter in word} - number.keys())
    if unknown:
        raise ValueError(
            f"characters {unknown} are none of LEAF's 80; clean the text, or read it as another task"
        )
    return torch.tensor([[number[letter] for letter in word] for word in words], dtype=torch.int64)


def _femnist(inputs: list[Any], labels: list[Any]) -> TensorDataset:
    pixels = torch.tensor(inputs, dtype=torch.float32)
    if pixels.shape[1:] != (_SIDE * _SIDE,):
        raise ValueError(
            f"images of FEMNIST have {_SIDE * _SIDE} numbers, got shape {tuple(pixels.shape[1:])}"
        )
    return TensorDataset(pixels.view(-1, 1, _SIDE, _SIDE), torch.tensor(labels, dtype=torch.int64))


def _shakespeare(inputs: list[Any], labels: list[Any]) -> TensorDataset:
    return TensorDataset(letters(inputs), letters(labels)[:, 0])


def _numbers(inputs: list[Any], labels: list[Any]) -> TensorDataset:
    return TensorDataset(torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels))


_MAKE: dict[str, Callable[[list[Any], list[Any]], TensorDataset]] = {
    "femnist": _femnist,
    "shakespeare": _shakespeare,
    "numbers": _numbers,
}


def leaf_clients(folder: str | Path, task: Task, max_users: int | None = None) -> dict[str, TensorDataset]:
    """Read a folder as one data set for each user.

    Args:
        folder: Folder with the files; or one file.
        task: "femnist": images `(1, 28, 28)` float32 and one of 62 classes. "shakespeare": 80 characters as
            numbers `(80,)` int64 and the number of the next one. "numbers": whatever lists of numbers.
        max_users: Most users to read, in the order of their names; None reads all.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the task is unknown, or a file is of another format; naming the user.
    """
    if task not in _MAKE:
        raise ValueError(f"task must be {' or '.join(map(repr, _MAKE))}, got {task!r}")
    made = {}
    for user, (inputs, labels) in read_leaf(folder, max_users).items():
        if not inputs:
            raise ValueError(f"user {user} of {folder} has no samples; leave it out of the file")
        try:
            made[user] = _MAKE[task](inputs, labels)
        except (ValueError, TypeError) as error:
            raise ValueError(f"the samples of user {user} are not those of {task!r}: {error}") from error
    return made


class LEAFDataModule(FederatedDataModule):
    """Data of LEAF: every user is a client, and validation is on all users' test files.

    Args:
        train: Folder of the training files.
        test: Folder of the test files; None has no validation and no test.
        task: What the samples are, see `leaf_clients`.
        batch_size: Samples per local batch, >= 1.
        max_users: Most users, in the order of their names; None takes all.

    Attributes:
        users: Names of the users, in the order of the clients.
        test_sets: Test data of each client, in their order; None where a user has none.

    Raises:
        ValueError: If there are test files of no user that trains.
    """

    def __init__(
        self,
        train: str,
        test: str | None = None,
        *,
        task: Task = "femnist",
        batch_size: int = 20,
        max_users: int | None = None,
    ) -> None:
        clients = leaf_clients(train, task, max_users)
        tests = {} if test is None else leaf_clients(test, task)
        self.users = list(clients)
        self.test_sets = [tests.get(user) for user in self.users]
        known = [one for one in self.test_sets if one is not None]
        if test is not None and not known:
            raise ValueError(f"{test} has no user of {train}; split the samples of each user, not the users")
        whole: Any = ConcatDataset(known) if known else None
        super().__init__(clients=clients, batch_size=batch_size, val=whole, test=whole)
