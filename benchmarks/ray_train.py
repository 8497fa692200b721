"""Ray Train's workers against one process: `python benchmarks/ray_train.py`, 30 s.

It wants `pip install 'ray[train]'`. Two workers of a local Ray train a federation as its ranks, and end with
one process's weights, bit for bit, or the exit status is 1. A job of its own, for once a week: Ray is no
dependency and not in the suite.
"""

import sys
import tempfile
from importlib.util import find_spec

import torch

NAME = "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"
"""The package that Ray takes: `lightning` where both are there."""


def weights(folder=None, **settings):
    from importlib import import_module

    pl = import_module(NAME)
    import lightning_fedq as fedq
    from lightning_fedq.data.datasets import DigitsDataModule
    from lightning_fedq.data.models import Classifier, Linear
    from lightning_fedq.data.models.initial import seeded

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    federated = fedq.Federated(fedq.CorBin(4.0), 12, seed=0, clients_per_step=3)
    settings = {"max_epochs": 3, "devices": 1, "accelerator": "cpu", "callbacks": [federated], **settings}
    trainer, module = pl.Trainer(**settings, **dict.fromkeys(quiet, False)), Classifier(seeded(Linear(64), 0))
    trainer.fit(module, datamodule=DigitsDataModule(batch_size=8, num_train=120))
    found = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    if folder is not None:
        torch.save(found, f"{folder}/{trainer.global_rank}.pt")
    return found


def worker(config):
    from ray.train.lightning import RayLightningEnvironment

    weights(config["folder"], strategy="fedq_clients", plugins=[RayLightningEnvironment()])


def main():
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    expected = weights()
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        scale, run = ScalingConfig(num_workers=2), RunConfig(storage_path=folder)
        TorchTrainer(worker, train_loop_config={"folder": folder}, scaling_config=scale, run_config=run).fit()
        same = [torch.equal(expected, torch.load(f"{folder}/{rank}.pt")) for rank in range(2)]
    print(f"Ray {ray.__version__}, {NAME}: two workers end as one process, bit for bit: {same}")
    sys.exit(int(not all(same)))


if __name__ == "__main__":
    main()
