"""Data sets that a rank opens, and peak memory with many clients.

`python benchmarks/shards.py turn|open CLIENTS COHORT ROUNDS RANKS`: data sets of 20 samples of 100 numbers,
opened by turn (`ClientData`) or all at once, a linear model, `CorBin`, four clients side by side.
"""

import resource
import sys
import time

import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

import lightning_fedq as fedq

FEATURES, SAMPLES = 100, 20
opened = set()


def shard(client):
    opened.add(client)
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(10, (SAMPLES,), generator=generator))


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 10)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main():
    how, (clients, cohort, rounds, ranks) = sys.argv[1], map(int, sys.argv[2:6])
    before, begun = peak(), time.process_time()
    one = shard if how == "open" else lambda client: fedq.ClientData(lambda: shard(client), SAMPLES)
    data = fedq.FederatedDataModule(clients=[one(client) for client in range(clients)], batch_size=10)
    federated = fedq.Federated(fedq.CorBin(1.0), clients, cohort=cohort, clients_per_step=4, seed=0)
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar")}
    several = {"strategy": "fedq_clients", "devices": ranks} if ranks > 1 else {}
    trainer = pl.Trainer(
        max_epochs=rounds,
        callbacks=[federated],
        accelerator="cpu",
        enable_model_summary=False,
        **quiet,
        **several,
    )
    trainer.fit(Net(), datamodule=data)
    said = f"{how}: rank {trainer.global_rank} opened {len(opened)} of {clients} data sets"
    seconds = time.process_time() - begun
    print(f"{said}, {peak() - before} MiB over imports, {seconds:.1f} CPU s", flush=True)


if __name__ == "__main__":
    main()
