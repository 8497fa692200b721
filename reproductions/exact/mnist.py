"""MNIST at a client-level (epsilon, delta): aggregate Gaussian behind SecAgg, against no compression.

The paper's point in one run: the aggregate Gaussian's compression error *is* the Gaussian noise that the
budget asks for, so a model trained with it should be as good as one trained with the same noise on
uncompressed floats. The reference is central Gaussian noise of the std that the budget asks for over
this many rounds, added to the exact mean of the clipped updates. A logistic regression, all clients in every
round, substitution of one client, IID data. Both promise (epsilon, delta) to an outsider who sees the models,
and nothing to the server: it holds the dithers, or the exact sum. What float64 may have done to the law is
charged to the aggregate Gaussian's epsilon (the reference is exact arithmetic). Runs from a seed are
reproducible and so not private at all; the epsilon is that of the same run with keys from the system.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.datasets import MNISTDataModule
from lightning_fedq.data.models import Classifier, Linear
from lightning_fedq.data.models.initial import seeded
from lightning_fedq.functional.clip import unit_ball_factors
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms import AggregateGaussian, FedAvg
from lightning_fedq.mechanisms.bases.calibration import gaussian_noise_multiplier
from lightning_fedq.mechanisms.interface import Adversary, GaussianLoss, RoundContext
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.reports.runs import Row, fresh_folder
from lightning_fedq.secagg import SecAgg
from reproductions.bench import Claim, ImageData, quiet_trainer
from reproductions.exact.claims import finish


@dataclass(frozen=True)
class ClippedFloats(FedAvg):
    """Uncompressed updates, clipped in l2; what a server that adds the noise itself would receive.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
    """

    clip_norm: float = 1.0

    def encode(self, update: Tensor, context: RoundContext, rand: Any) -> Any:
        """Clip, then send floats."""
        rows = update.reshape(-1, context.dim)
        factors, _ = unit_ball_factors(rows.double(), self.clip_norm, 2)
        clipped = rows * (factors.view(-1, 1) * self.clip_norm).to(rows)
        return super().encode(clipped.reshape(update.shape), context, rand)


class CentralNoise(pl.Callback):
    """Add N(0, sigma^2) to the global model after every round; stands behind `Federated` in the list.

    Args:
        federated: Whose model.
        sigma: Standard deviation, in units of the weights.
        seed: Of the noise.
    """

    def __init__(self, federated: Federated, sigma: float, seed: int) -> None:
        self.federated, self.sigma = federated, sigma
        self.generator, self.rounds = torch.Generator().manual_seed(seed), 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After a round; a hook by batches would rule stacks of clients out."""
        if len(self.federated.records) == self.rounds:
            return
        self.rounds += 1
        perturb(self.federated, pl_module, self.sigma, self.generator)


def perturb(federated: Federated, module: Any, sigma: float, generator: torch.Generator) -> None:
    """Add Gaussian noise to the global model, in the server's copy and in the module's."""
    assert federated.engine is not None
    weights = federated.engine.weights
    weights += sigma * torch.randn(len(weights), generator=generator, dtype=weights.dtype)
    with torch.no_grad():
        start = 0
        for parameter in module.parameters():
            part = weights[start : start + parameter.numel()]
            parameter.copy_(part.view_as(parameter))
            start += parameter.numel()


GRAPH: dict[str, Any] = {"degree": "auto", "max_colluding_fraction": 0.05, "max_dropped_fraction": 0.05}
"""A sparse graph: on the complete one, 500 clients' shares outweigh a model of 7,850 parameters."""


@dataclass(frozen=True)
class _Setting:
    data: ImageData
    num_clients: int
    rounds: int
    samples: int
    clip_norm: float
    multiplier: float
    learning_rate: float
    epsilon: float
    delta: float
    secagg: Literal["counted", "masked"]


def _run(kind: str, setting: _Setting, seed: int) -> Row:
    """One training; the row holds accuracy and bits of one message per parameter, as sent."""
    images = MNISTDataModule(setting.data.root, setting.data.download, 4, True, setting.samples, 2000, seed)
    model = Classifier(seeded(Linear(), seed), setting.learning_rate, 0.0)
    secagg, spent_epsilon = None, math.inf
    mechanism: AggregateGaussian | ClippedFloats = ClippedFloats(setting.clip_norm)
    if kind == "aggregate":
        mechanism = AggregateGaussian(setting.clip_norm, setting.multiplier, entropy_code="elias")
        secagg = SecAgg(simulation=setting.secagg, **GRAPH)
    federated = Federated(
        mechanism,
        setting.num_clients,
        clients_per_step=25,
        secure_aggregation=secagg,
        diagnostics=False,
        seed=seed,
    )
    callbacks: list[pl.Callback] = [federated]
    if kind == "gaussian":
        sigma = 2.0 * setting.multiplier * setting.clip_norm / setting.num_clients
        callbacks.append(CentralNoise(federated, sigma, seed))
        spent_epsilon = spent(GaussianLoss(setting.multiplier), setting.delta, rounds=setting.rounds).epsilon
    trainer = quiet_trainer(setting.rounds, callbacks)
    trainer.fit(model, datamodule=images)
    accuracy = float(trainer.test(model, datamodule=images, verbose=False)[0]["test_acc"])
    dim = sum(parameter.numel() for parameter in model.parameters())
    messages = len(federated.records) * setting.num_clients
    sent = sum(record.uplink_bits for record in federated.records)
    masked = 32.0
    if secagg is not None:
        engine = federated.engine
        assert engine is not None
        context = engine.context(engine.planner.plan(0, mechanism))
        layout = secagg.layout(mechanism, context, PublicRandomness(engine.keys, 0))
        masked = 8.0 * layout.num_bytes / dim
        claim = next(c for c in mechanism.claims(context) if c.adversary is Adversary.OUTSIDER)
        spending = spent(claim.loss, setting.delta, rounds=len(federated.records), slack=claim.slack)
        spent_epsilon = spending.epsilon
    return {
        "kind": float(("none", "gaussian", "aggregate").index(kind)),
        "seed": seed,
        "accuracy": accuracy,
        "bits_per_parameter": sent / messages / dim,
        "update_bits": masked,
        "epsilon": spent_epsilon,
    }


def exact_mnist(
    data: ImageData = ImageData(),  # noqa: B008 (frozen)
    epsilon: float = 8.0,
    delta: float = 1e-5,
    num_clients: int = 500,
    rounds: int = 12,
    samples: int = 10_000,
    clip_norm: float = 3.0,
    learning_rate: float = 0.5,
    secagg: Literal["counted", "masked"] = "counted",
    seeds: Sequence[int] = (0, 1, 2),
    out: str = "runs/exact-mnist",
) -> dict[str, Any]:
    """MNIST at a client-level budget: aggregate Gaussian behind SecAgg against uncompressed Gaussian noise.

    Args:
        data: Where MNIST is.
        epsilon: Budget of one client over the run, towards an outsider, under substitution.
        delta: Of the budget.
        num_clients: Clients, all in every round.
        rounds: Rounds, one local epoch each.
        samples: Training samples that the clients hold together.
        clip_norm: Largest l2 norm of an update.
        learning_rate: Of the clients' SGD.
        secagg: Whether the secure aggregation really runs or its bits are only counted; the sums are equal.
        seeds: One training of each kind per seed.
        out: Folder of table and picture.
    """
    if len(seeds) < 2:
        raise ValueError(f"seeds needs two or more values to tell noise from a difference, got {list(seeds)}")
    folder, rows = fresh_folder(Path(out)), list[Row]()
    multiplier = gaussian_noise_multiplier(epsilon, delta, rounds)
    setting = _Setting(
        data, num_clients, rounds, samples, clip_norm, multiplier, learning_rate, epsilon, delta, secagg
    )
    for kind in ("none", "gaussian", "aggregate"):
        for seed in seeds:
            rows.append(_run(kind, setting, seed))
            print(f"{kind}, seed {seed}: test accuracy {rows[-1]['accuracy']:.4f}", flush=True)
    settings = {
        **{name: value for name, value in vars(setting).items() if name != "data"},
        "kind": "0 clipped floats without noise, 1 clipped floats with central noise, 2 aggregate Gaussian",
        "seeds": list(seeds),
    }
    return finish(folder, settings, rows, _claims(rows, epsilon), _draw(rows))


def _column(rows: Sequence[Row], kind: float, name: str) -> Tensor:
    return torch.tensor([row[name] for row in rows if row["kind"] == kind], dtype=torch.float64)


def _claims(rows: Sequence[Row], budget: float) -> list[Claim]:
    plain, gaussian, aggregate = (_column(rows, kind, "accuracy") for kind in (0.0, 1.0, 2.0))
    difference = float(aggregate.mean() - gaussian.mean())
    # 10,000 test images: independent tests of one model differ by sqrt(2 p (1 - p) / 10^4) and seeds on top
    rate = float(gaussian.mean())
    spread = math.sqrt(float(aggregate.var() + gaussian.var()) / len(aggregate) + 2e-4 * rate * (1.0 - rate))
    bits, update = (float(_column(rows, 2.0, n).mean()) for n in ("bits_per_parameter", "update_bits"))
    epsilon = float(_column(rows, 2.0, "epsilon").max())
    return [
        Claim(
            "with a client-level guarantee that counts what floats do",
            f"epsilon {epsilon:.4f} towards an outsider, a budget of {budget:g}",
            epsilon <= budget,
            (76,),
        ),
        Claim(
            "the aggregate Gaussian trains as well as the Gaussian mechanism without compression",
            f"{100 * float(aggregate.mean()):.2f}% against {100 * rate:.2f}% ({100 * difference:+.2f} "
            f"points, standard error {100 * spread:.2f}); without noise {100 * float(plain.mean()):.2f}%",
            abs(difference) < 3.0 * spread,
            (76,),
        ),
        Claim(
            "at fewer bits than floats",
            f"a masked update takes {update:.2f} bits a parameter, all of the protocol's messages up "
            f"{bits:.2f}, against 32",
            bits < 32.0,
        ),
    ]


def _draw(rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for kind, name in enumerate(("no noise, floats", "Gaussian, floats", "aggregate Gaussian, SecAgg")):
        bits, accuracy = (_column(rows, float(kind), c) for c in ("bits_per_parameter", "accuracy"))
        axes.plot(bits.tolist(), accuracy.tolist(), "o", label=name)
    axes.set(xlabel="bits per parameter and round", ylabel="test accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
