"""BatchNorm beside GroupNorm behind private mechanisms: `python benchmarks/batch_norm.py`.

scikit-learn's digits, 479 clients of three images, a CNN of 4,298 parameters, 25 rounds with server momentum.
Test accuracy of the last global model, three runs each; keys are secret, so figures differ from run to run.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

import lightning_fedq as fedq
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import Classifier
from lightning_fedq.mechanisms.interface import Mechanism

CLIENTS, ROUNDS, RUNS = 479, 25, 3
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "GroupNorm": lambda channels: nn.GroupNorm(4, channels),
    "BatchNorm": nn.BatchNorm2d,
}
MECHANISMS: dict[str, tuple[Callable[[], Mechanism], float | None]] = {
    "without privacy": (fedq.FedAvg, None),
    "RotatedCoins, epsilon 8 over the run": (lambda: fedq.RotatedCoins(clip_norm=0.5), 8.0),
    "LDPQ(4)": (lambda: fedq.LDPQ(4.0), None),
}


class Network(nn.Sequential):
    """Three convolutions and a linear layer on images of 8 x 8."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
        for inputs, outputs, stride in ((1, 8, 1), (8, 16, 2), (16, 16, 2)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), norm(outputs), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Scores `(batch, 10)` of images `(batch, ...)` of 64 pixels."""
        return super().forward(images.flatten(1))


def accuracy(norm: str, mechanism: Mechanism, epsilon: float | None) -> float:
    """Test accuracy of one run."""
    torch.manual_seed(0)
    masks = fedq.SecAgg(
        simulation="counted", degree="auto", max_colluding_fraction=0.02, max_dropped_fraction=0.02
    )
    federated = fedq.Federated(
        mechanism,
        num_clients=CLIENTS,
        server_optimizer=fedq.FedAvgM,
        privacy=None if epsilon is None else fedq.PrivacyTarget(epsilon, 1e-5, "secagg_server"),
        secure_aggregation=None if epsilon is None else masks,
    )
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        callbacks=[federated],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = Classifier(Network(NORMS[norm]), lr=0.2), DigitsDataModule(batch_size=16)
    trainer.fit(module, datamodule=data)
    [found] = trainer.test(module, datamodule=data, verbose=False)
    return found["test_acc"]


def main() -> None:
    """Print a row for every mechanism and norm."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    for name, (make, epsilon) in MECHANISMS.items():
        for norm in NORMS:
            found = [accuracy(norm, make(), epsilon) for _ in range(RUNS)]
            print(f"| {name} | {norm} | {' / '.join(f'{value:.3f}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
