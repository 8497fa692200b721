"""The 1,797 handwritten digits of 8 x 8 pixels that ship with scikit-learn: nothing to download."""

import torch
from torch import Tensor

from lightning_fedq.data.datasets.tensors import TensorDataModule


class DigitsDataModule(TensorDataModule):
    """Digits as `(1, 8, 8)` float images in [-1, 1]. 1,150 for training, 288 for validation, 359 for testing.

    Args:
        batch_size: Samples per training batch.
        num_train: Use only so many training samples; None is all.
        seed: Seed of the split.
    """

    def __init__(self, batch_size: int = 16, num_train: int | None = None, seed: int = 0) -> None:
        super().__init__(batch_size, pooled=True, num_train=num_train, num_val=None, seed=seed)

    def load(self) -> tuple[Tensor, Tensor, int]:
        from sklearn.datasets import load_digits  # a second to import, with all that it brings

        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32).div(8).sub(1).view(-1, 1, 8, 8)
        return images, torch.tensor(digits.target, dtype=torch.int64), 0
