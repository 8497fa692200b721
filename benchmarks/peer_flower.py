"""Flower's simulation on a workload: FedAvg over Ray actors, one per CPU core.

Ray imports this module in its actors, so an actor reads the data once and keeps it.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from workloads import Clock, Federation, Workload, load, workload


@cache
def held() -> tuple[Workload, Federation]:
    """The workload and its data, as `run` announced them in the environment."""
    name, clients = os.environ["FEDQ_BENCH_WORKLOAD"], int(os.environ["FEDQ_BENCH_CLIENTS"])
    return workload(name, clients), load(os.environ["FEDQ_BENCH_DATA"])


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    job, data = held()
    client = int(context.node_config["partition-id"])
    images, labels = data.images[client], data.labels[client]
    model = job.architecture()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr)
    for x, y in zip(images.split(job.batch_size), labels.split(job.batch_size), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    )
    return Message(content=content, reply_to=message)


def run(job: Workload, data_path: str, rounds: int, clock: Clock) -> nn.Module:
    """Train `rounds` rounds and return the model; nothing is evaluated."""
    os.environ.update(
        FEDQ_BENCH_WORKLOAD=job.name, FEDQ_BENCH_CLIENTS=str(job.num_clients), FEDQ_BENCH_DATA=data_path
    )
    model = job.model()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=job.num_clients,
            min_available_nodes=job.num_clients,
        )

        # Flower calls this before the first round and after every round.
        result = strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            num_rounds=rounds,
            evaluate_fn=lambda server_round, arrays: clock.mark(),
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app,
        client_app,
        num_supernodes=job.num_clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return model
