"""A Flower app as anybody writes it, and the two lines that make what its clients send private.

    python examples/flower_mod.py       # in Flower's simulation, which needs `pip install 'flwr[simulation]'`

The client is plain PyTorch. `encoding_mod` encodes what its train function returns, `DecodingStrategy`
decodes, and `FedAvg` steps. Keys come from the operating system, so nothing here is reproducible.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

from lightning_fedq import Federated
from lightning_fedq.flower import DecodingStrategy, encoding_mod
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.privacy.page import markdown

CLIENTS, ROUNDS = 4, 3
HOME = Path(tempfile.gettempdir()) / "fedq-flower-mod"

federated = Federated(CorBin(epsilon=4.0, shared_bits=5), num_clients=CLIENTS)


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 10)


def samples(part: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = (torch.from_numpy(found) for found in load_digits(return_X_y=True))
    return images[part::CLIENTS].float() / 16.0, labels[part::CLIENTS]


def home(context: Context) -> Path:
    return HOME / f"client-{context.node_config['partition-id']}"


client = ClientApp(mods=[encoding_mod(federated, home=home)])  # the first line


@client.train()
def train(message: Message, context: Context) -> Message:
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = samples(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(10):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(
        RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message
    )


def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
    """On the server: what clients would measure on their own data would go round the mechanism."""
    net = model()
    net.load_state_dict(OrderedDict(arrays.to_torch_state_dict()))
    images, labels = samples(0)
    return MetricRecord({"accuracy": float((net(images).argmax(1) == labels).double().mean())})


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = DecodingStrategy(FedAvg(fraction_evaluate=0.0), federated, home=HOME / "server")  # the second
    result = strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=ROUNDS, evaluate_fn=evaluate)
    print({round: metrics["accuracy"] for round, metrics in result.evaluate_metrics_serverapp.items()})
    print(markdown(strategy.privacy_report(delta=1e-3)))


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, num_supernodes=CLIENTS)
