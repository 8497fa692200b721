"""What no message shows reaches nothing that is released: ranges, plans, records, models, checkpoints.

One client's update is changed in a way that leaves every message as it is, bit for bit: by what an encoder
clips away, or before a double that sends zeros whatever it is given. All that the server releases, keeps or
plans with must then stay bit for bit too. There is no chance in it: the keys are seeded.
"""

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import LDPQ, FedAvg, RandomK, TopK
from lightning_fedq.mechanisms.bases.scaled import ScaledLevels
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange, PreviousMinMax
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.training import population
from tests.audit import plants
from tests.audit.engine_plays import Uplink
from tests.contract.test_mechanisms import ROWS
from tests.digits_run import Classifier, Digits, make_trainer
from tests.rounds.test_halves import Alone

CLIENTS, VICTIM, SEGMENTS, ROUNDS = 4, 1, (40, 24), 3
NOT_RELEASED = ("mse", "snr_db", "cosine", "homogeneity", "arrived", "clip_rate", "non_finite_clients")
"""Diagnostics that only a simulation knows; `docs/threat_model.md` says where they go."""


class SendsZeros(LDPQ):
    """A double: whatever it is given, it sends what a zero update gives."""

    def encode(self, update, context, rand):
        return super().encode(torch.zeros_like(update), context, rand)


class Messages(Uplink):
    """Keeps every message."""

    def send(self, clients, values, message, context, rand):
        self.messages.append((tuple(clients), message.symbols.clone(), message.num_bits))
        return message


def flat(value):
    """Nested state as comparable plain data."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flat(item) for item in value]
    return repr(value)


def play(engine_class, mechanism, rule, factor, size=1e3):
    """Messages, and all that is released; the victim's update is `factor` times as long as the others'."""
    generator = torch.Generator().manual_seed(3)
    dim = sum(SEGMENTS)
    engine = engine_class(
        mechanism,
        (Alone if mechanism.reuses_noise else RoundPlanner)(CLIENTS, 0),
        SeededKeys(0),
        torch.randn(dim, generator=generator),
        SEGMENTS,
        rule,
    )
    engine.tampering = wire = Messages()
    released = []
    for _ in range(ROUNDS):
        plan = engine.start()
        context = engine.context(plan)
        updates = torch.randn(CLIENTS, dim, generator=generator).sign() * size
        updates[list(plan.survivors).index(VICTIM)] *= factor
        engine.receive(plan.survivors, updates)
        record = vars(engine.finish())
        kept = {name: value for name, value in record.items() if name not in NOT_RELEASED}
        state = {name: value for name, value in engine.state_dict().items() if name != "ledger"}
        released.append(flat([plan, context.center, context.radius, kept, state]))
    return flat(wire.messages), released


SHOWN = FedAvg | ScaledLevels | TopK | RandomK
"""FedAvg sends every bit of an update, and compressors without privacy its norm or floats of it."""


@pytest.mark.parametrize(
    ("mechanism", "factor", "rule"),
    [
        (SendsZeros(1.0), 1e-4, AdaptiveRange()),
        (SendsZeros(1.0), 1e-4, PreviousMinMax()),
        (LDPQ(1.0), 1024.0, PreviousMinMax()),
        *((row, 1024.0, AdaptiveRange()) for row in ROWS if not isinstance(row, SHOWN)),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_what_no_message_shows_changes_nothing_that_is_released(mechanism, factor, rule):
    """Updates are far outside of every range, and powers of two scale without rounding."""
    messages, released = play(RoundEngine, mechanism, rule, 1.0)
    again, others = play(RoundEngine, mechanism, rule, factor)
    assert messages == again, "the test itself is wrong: the messages differ"
    assert released == others


@pytest.mark.parametrize("plant", plants.EXACT_MEAN_LEAKS, ids=lambda plant: plant.__name__)
def test_an_engine_that_looks_at_exact_updates_is_caught(plant):
    """E: the next range, the plan or a record follows from what the clients did not send."""
    options = {"mechanism": SendsZeros(1.0), "rule": AdaptiveRange(), "size": 0.7}  # within growth and shrink
    assert play(plant, factor=1.0, **options)[1] != play(plant, factor=1e-4, **options)[1]
    assert play(RoundEngine, factor=1.0, **options)[1] == play(RoundEngine, factor=1e-4, **options)[1]


# ---- a whole training ----------------------------------------------------------------------------------


class Scaled(pl.Callback):
    """The victim's update is `factor` times as long when it reaches the encoder."""

    def __init__(self, factor):
        self.factor = factor

    def on_train_start(self, trainer, pl_module):
        engine = next(c for c in trainer.callbacks if isinstance(c, Federated)).engine
        engine.transform = self._transform

    def _transform(self, clients, updates):
        if VICTIM in clients:
            updates[list(clients).index(VICTIM)] *= self.factor
        return updates


def train(folder, factor, epochs=2):
    """The checkpoint of a short training, without what only a simulation knows."""
    fed = Federated(SendsZeros(1.0), CLIENTS, seed=0, ranges=AdaptiveRange(), local_steps=1)
    trainer = make_trainer(fed, Scaled(factor), max_epochs=epochs)
    trainer.fit(Classifier(), datamodule=Digits(40))
    trainer.save_checkpoint(folder / f"{factor}.ckpt")
    saved = torch.load(folder / f"{factor}.ckpt", weights_only=True)
    (name,) = [name for name in saved["callbacks"] if name.startswith("Federated")]
    state = saved["callbacks"][name]
    state["engine"].pop("ledger")  # holds random names of its own
    for record in state["records"]:
        for diagnostic in NOT_RELEASED:
            record.pop(diagnostic, None)
    return flat(saved)


def test_the_checkpoint_of_a_training_shows_no_more_than_the_messages(tmp_path):
    assert train(tmp_path, 1.0) == train(tmp_path, 64.0)


@pytest.mark.parametrize("plant", plants.EXACT_MEAN_LEAKS, ids=lambda plant: plant.__name__)
def test_the_checkpoint_of_a_planted_training_does(plant, tmp_path, monkeypatch):
    monkeypatch.setattr(population, "RoundEngine", plant)
    assert train(tmp_path, 1.0) != train(tmp_path, 64.0)
