"""Federated logistic regression on scikit-learn's digits: 20 clients, one private bit a parameter.

python examples/quickstart.py
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner

CLIENTS, ROUNDS, STEPS, SEED = 20, 40, 5, 0


def train_locally(weights: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A few steps of gradient descent on one client's data; returns its update, local - global."""
    local = weights.clone().requires_grad_()
    for _ in range(STEPS):
        loss = cross_entropy(images @ local[:640].view(64, 10) + local[640:], labels)
        (gradient,) = torch.autograd.grad(loss, local)
        local = (local - 0.5 * gradient).detach().requires_grad_()
    return (local - weights).detach()


def main() -> float:
    """Train, print a line a few times, and return the accuracy on held-out digits."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16.0
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    held_out, shares = order[:297], order[297:].view(CLIENTS, -1)

    engine = RoundEngine(
        CorBin(epsilon_per_coordinate=1.0, shared_bits=5),
        RoundPlanner(CLIENTS, SEED, dropout_probability=0.1),
        SeededKeys(SEED),  # reproducible, not private; RootKeys() takes keys from the system
        weights=torch.zeros(650),
        segments=(640, 10),
        ranges=FixedRange(0.1),
        server_lr=0.5,
    )
    for round in range(ROUNDS):
        plan = engine.start()
        for client in plan.survivors:
            share = shares[client]
            update = train_locally(engine.weights, images[share], labels[share])
            engine.receive([client], update[None])
        record = engine.finish()
        scores = images[held_out] @ engine.weights[:640].view(64, 10) + engine.weights[640:]
        accuracy = (scores.argmax(1) == labels[held_out]).float().mean().item()
        if round % 10 == 9:
            print(f"round {round + 1}: accuracy {accuracy:.3f}, {record.uplink_bits} bits")
    return accuracy


if __name__ == "__main__":
    main()
