"""Apple's pfl on a workload: federated averaging on its simulated backend, in one process."""

from __future__ import annotations

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from workloads import Clock, Federation, Workload


class Classifier(nn.Module):
    """The workload's model with the two methods that pfl calls."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(images), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(images, labels).item() * len(labels), len(labels))}


class Marks(TrainingProcessCallback):
    """Stops the clock after every round."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.clock.mark()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.clock.mark()
        return False, Metrics()


def run(job: Workload, data: Federation, rounds: int, clock: Clock) -> nn.Module:
    """Train and return the model. pfl evaluates its clients in round 0, which is warm-up, and never again."""
    model = Classifier(job.model())
    users = {
        i: PyTorchTensorDataset((images, labels), user_id=str(i))
        for i, (images, labels) in enumerate(zip(data.images, data.labels, strict=True))
    }
    population = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(list(users)))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=job.num_clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(population, population, postprocessors=[WeightByUser()]),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        NNTrainHyperParams(local_batch_size=job.batch_size, local_num_epochs=1, local_learning_rate=job.lr),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Marks(clock)],
        send_metrics_to_platform=False,
    )
    return model.net
