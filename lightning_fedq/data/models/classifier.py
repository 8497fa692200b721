"""An ordinary LightningModule for classification, without any federated learning."""

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy

from lightning_fedq._lightning import pl


class Classifier(pl.LightningModule):
    """Classifier with cross entropy, accuracy and SGD for any backbone.

    It logs `train_loss`, `train_acc`, `val_loss`, `val_acc`, `test_loss` and `test_acc`. Accuracy is a
    function, not a metric object, so that several clients can train in one step under `torch.func.vmap`.

    Args:
        backbone: Module that maps inputs `(batch, ...)` to class scores `(batch, num_classes)`.
        lr: Learning rate of the clients' SGD, > 0.
        momentum: Momentum of the clients' SGD, in [0, 1). The momentum buffer is zero at the start of every
            round.
        weight_decay: L2 penalty of the clients' SGD, >= 0.

    Raises:
        ValueError: If a hyperparameter is out of its range.
    """

    def __init__(
        self, backbone: nn.Module, lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__()
        if not lr > 0:
            raise ValueError(f"lr must be > 0, got {lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be >= 0, got {weight_decay}")
        self.backbone = backbone
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the class scores `(batch, num_classes)`."""
        scores: Tensor = self.backbone(inputs)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy of one batch."""
        return self._step(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log validation loss and accuracy."""
        self._step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log test loss and accuracy."""
        self._step(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the most likely class of every sample, `(batch,)`."""
        labels: Tensor = self(batch[0]).argmax(1)
        return labels

    def _step(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        """Return the mean cross entropy of a batch, and log loss and accuracy of the stage."""
        inputs, labels = batch
        scores = self(inputs)
        loss = nn.functional.cross_entropy(scores, labels)
        accuracy = multiclass_accuracy(
            scores.detach(), labels, num_classes=scores.shape[-1], average="micro", validate_args=False
        )
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}_acc", accuracy, on_step=False, on_epoch=True, prog_bar=stage != "train")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(
            self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
