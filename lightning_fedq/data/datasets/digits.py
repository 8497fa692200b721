"""The 1,797 handwritten digits of 8 x 8 pixels that are part of scikit-learn, without a download."""

import torch
from torch import Tensor

from lightning_fedq.data.datasets.tensors import TensorDataModule


class DigitsDataModule(TensorDataModule):
    """Handwritten digits as float images `(1, 8, 8)` in [-1, 1].

    There are 1,150 images for training, 288 for validation and 359 for testing.

    Args:
        batch_size: Number of samples per training batch, >= 1.
        num_train: Number of training samples to use, >= 1. None uses all.
        seed: Seed of the random split.
    """

    def __init__(self, batch_size: int = 16, num_train: int | None = None, seed: int = 0) -> None:
        super().__init__(batch_size, pooled=True, num_train=num_train, num_val=None, seed=seed)

    def load(self) -> tuple[Tensor, Tensor, int]:
        from sklearn.datasets import load_digits  # importing scikit-learn takes a second

        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32).div(8).sub(1).view(-1, 1, 8, 8)
        return images, torch.tensor(digits.target, dtype=torch.int64), 0
