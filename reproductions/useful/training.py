"""One federation on MNIST that is calibrated to a privacy target by the road that a user takes.

Pixels have mean 0 and standard deviation 1 by public constants. A client holds a few images and takes one
step on all of them in a round. Beside the last model the mean of the last half is tested, which costs no
privacy; who reports one of them says how it was chosen (`Run.accuracy`: by validation).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor, nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.datasets import MNISTDataModule, TensorDataModule
from lightning_fedq.data.models import Classifier
from lightning_fedq.functional.flatten import copy_into
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.cohorts import CohortLaw, DisjointOnce, make_cohort_law
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from reproductions.cpa.data import Network, accuracy, network

STACK = 250
VAL_SAMPLES = 10_000
MASKS = SecAgg(simulation="counted", degree="auto", max_colluding_fraction=0.02, max_dropped_fraction=0.02)
"""The server may collude with 2% of the clients, and every claim counts that."""


@lru_cache(maxsize=1)
def _load(root: str, download: bool) -> tuple[Tensor, Tensor, int]:
    return MNISTDataModule(root, download).load()


class ClientMNIST(MNISTDataModule):
    """As many images as the clients will hold; read from disk once a process."""

    def load(self) -> tuple[Tensor, Tensor, int]:
        """See `TensorDataModule.load`."""
        return _load(str(self.root), self.download)


@dataclass(frozen=True)
class Federation:
    """Who trains what, for how long.

    Args:
        root: Folder of the images.
        download: Fetch what is missing.
        kind: "linear" 784-10 (7,850 parameters) or "cnn2" (6,422).
        num_clients: K.
        samples: Images of each client.
        rounds: T.
    """

    root: str
    download: bool
    kind: Network
    num_clients: int
    samples: int
    rounds: int

    @property
    def dim(self) -> int:
        """Parameters of the model."""
        return sum(p.numel() for p in self.network(0).parameters())

    def network(self, seed: int) -> nn.Module:
        """What is trained."""
        return network(self.kind, seed)

    def data(self, seed: int) -> TensorDataModule:
        """As many images as the clients will hold, and those of validation and test."""
        number, held_out = self.samples * self.num_clients, min(VAL_SAMPLES, 60_000 // 5)
        return ClientMNIST(
            self.root, self.download, batch_size=self.samples, num_train=number, num_val=held_out, seed=seed
        )


@dataclass(frozen=True)
class Run:
    """What one run reached.

    Args:
        last: Validation and test accuracy of the last model.
        averaged: Those of the mean of the models of the last half of the rounds.
        epsilon: What a client spent, by the ledger's calibration; infinite without a target.
        update_bits: Of one message, as it was sent, masks included, per parameter.
        all_bits: Of everything that clients sent, the protocol's messages included, likewise.
        all_bytes: Of everything, up and down, a client and round.
        mechanism: As it was calibrated.
        cpu_seconds: Processor time.
    """

    last: tuple[float, float]
    averaged: tuple[float, float]
    epsilon: float
    update_bits: float
    all_bits: float
    all_bytes: tuple[float, float]
    mechanism: str
    cpu_seconds: float

    @property
    def accuracy(self) -> tuple[float, float]:
        """Validation and test accuracy of the model that does better in validation."""
        return max(self.last, self.averaged, key=lambda pair: pair[0])


def train(
    federation: Federation,
    mechanism: Mechanism,
    target: PrivacyTarget | None,
    cohort: CohortLaw | Literal["once"] | None,
    lr: float,
    radius: float,
    seed: int,
    gradient_clip: float | None = None,
    server_optimizer: Any = None,
    masks: SecAgg = MASKS,
    broadcast_bits: int | None = None,
) -> Run:
    """Train one federation and test it.

    Args:
        federation: Who trains what.
        mechanism: Its free parameter is set by the target.
        target: None is a run without privacy.
        cohort: Law of cohorts; "once" asks each client in one round, None everybody in every round.
        lr: Of the one local step.
        radius: Range of mechanisms that clip coordinates.
        seed: Of model, split, data order and coins; the claims are those of the same run with secure keys.
        gradient_clip: Largest norm of a client's gradient, for mechanisms that don't clip.
        server_optimizer: Of the server; None applies the mean.
        masks: How sums are masked, and who colludes.
        broadcast_bits: Of a parameter on its way down; None are floats.
    """
    start = time.process_time()
    gc.collect()  # a Trainer and its data are a cycle: a grid of runs would hold all their tensors
    clients, rounds = federation.num_clients, federation.rounds
    law = DisjointOnce(clients // rounds) if cohort == "once" else make_cohort_law(cohort)
    masked = target is not None and target.against is Adversary.SECAGG_SERVER
    data = federation.data(seed)
    federated = Federated(
        mechanism,
        clients,
        cohort=law,
        local_steps=1,
        clients_per_step=min(STACK, law.cohort_size(clients)),
        ranges=FixedRange(radius),
        secure_aggregation=masks if masked else None,
        seed=seed,
        diagnostics=False,
        privacy=target,
        server_optimizer=server_optimizer,
        broadcast_bits=broadcast_bits,
    )
    model = Classifier(federation.network(seed), lr)
    trainer = pl.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        gradient_clip_val=gradient_clip,
        callbacks=[federated, pl.callbacks.WeightAveraging(avg_fn=tail_from(rounds - max(rounds // 2, 1)))],
    )
    trainer.fit(model, datamodule=data)

    def tested() -> tuple[float, float]:
        return accuracy(model, data.val_set.tensors), accuracy(model, data.test_set.tensors)

    averaged, engine = tested(), federated.engine
    assert engine is not None
    copy_into(engine.weights, list(model.parameters()))
    last = tested()
    found = federated.calibration
    sent = sum(record.uplink_bits for record in federated.records)
    down = sum(record.downlink_bits for record in federated.records)
    answers = sum(record.num_received for record in federated.records)
    return Run(
        last,
        averaged,
        float("inf") if found is None else found.epsilon,
        _update_bits(federated) / engine.weights.numel(),
        sent / answers / engine.weights.numel(),
        (sent / answers / 8, down / answers / 8),
        repr(federated.mechanism),
        time.process_time() - start,
    )


def tail_from(first: int) -> Callable[[Tensor, Tensor, Any], Tensor]:
    """For Lightning's `WeightAveraging`: the mean from round `first` on, until then the model."""

    def follow(average: Tensor, model: Tensor, done: Any) -> Tensor:
        late = int(done) - first
        return model if late <= 0 else average + (model - average) / (late + 1)

    return follow


def _update_bits(federated: Federated) -> float:
    """Bits of one client's update on the wire; behind masks of its masked form, else measured."""
    engine, secagg = federated.engine, federated.server.secure_aggregation
    assert engine is not None
    if secagg is None:
        return sum(r.uplink_bits for r in federated.records) / sum(r.num_received for r in federated.records)
    context = engine.context(engine.planner.plan(0, engine.mechanism))
    return 8.0 * secagg.layout(engine.mechanism, context, PublicRandomness(engine.keys, 0)).num_bytes
