"""Published habits: one client's round is an epoch of the plain training, and the trial refuses none."""

import functools
import itertools
import random
import re
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.reachability import find_reachable
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import make_trainer
from tests.isolation import corpus_batches, corpus_more, published_more  # noqa: F401  (they add their own to CASES)
from tests.isolation.corpus import Training
from tests.isolation.published import CASES, BehindManyInAGlobal, Bfloat, Case, Data
from tests.tried import without_forks

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True)
class Exact(FedAvg):
    """Keeps the updates that it sends."""

    updates: ClassVar[dict[int, Tensor]] = {}

    def encode(self, update, context, rand):
        for client, row in zip(rand.clients, update.reshape(len(rand.clients), -1), strict=True):
            self.updates[client] = row.detach().clone()
        return super().encode(update, context, rand)


def states(kind, epochs=1):
    """The state before and after epochs of plain training, and its Trainer."""
    kind.forget()
    module = kind()
    trainer = make_trainer(*module.callbacks(), max_epochs=epochs, num_sanity_val_steps=0, **kind.flags)
    begin = {}
    ordinary = module.on_train_start

    def note():
        ordinary()
        begin.update({name: t.detach().clone() for name, t in tensors(module)})

    module.on_train_start = note
    trainer.fit(module, datamodule=kind.data())
    return begin, {name: t.detach() for name, t in tensors(module)}, trainer


def tensors(module):
    return [*module.named_parameters(), *module.named_buffers()]


def federate(kind, clients, rounds=1, **settings):
    kind.forget()
    Exact.updates.clear()
    module = kind()
    fed = Federated(Exact(), clients, seed=0, diagnostics=False, **settings)
    trainer = make_trainer(*module.callbacks(), fed, max_epochs=rounds, num_sanity_val_steps=0, **kind.flags)
    trainer.fit(module, datamodule=kind.data())
    return module, fed


def is_more(kind):
    return kind.__module__ == published_more.__name__


def is_outside(kind):
    """May it keep something where only a fork leaves nothing?"""
    return kind.crosses or kind.refused or kind.data is not Data or "Held" in kind.__name__


@pytest.mark.parametrize("kind", [k for k in CASES if not (k.draws or k.begins_late)])
def test_one_client_is_the_plain_training(kind, monkeypatch):
    if not is_outside(kind):
        without_forks(monkeypatch)  # what a rehearsal in this process leaves behind would show
    before, after, _ = states(kind)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            module, fed = federate(kind, 1)
    except (ValueError, TypeError) as error:
        if kind.refused and re.search(kind.refused, str(error)):
            return
        raise
    names = fed.fit.vector.sent
    wanted = torch.cat([(after[name] - before[name]).flatten().double() for name in names])
    got = Exact.updates[0].double()
    assert torch.equal(got, wanted), float((got - wanted).abs().max())
    if kind.said:
        assert any(kind.said in str(one.message) for one in warned)
    for name, tensor in tensors(module):
        if kind.said and not tensor.is_floating_point():
            continue
        torch.testing.assert_close(tensor.double(), after[name].double(), atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("kind", [k for k in CASES if k.rounds > 1])
def test_nor_do_rounds_differ_from_epochs(kind, monkeypatch):
    """Steps, epochs and rates among them; an optimiser with memory is compared for one round, above."""
    without_forks(monkeypatch)
    _, after, plain = states(kind, kind.rounds)
    module, _ = federate(kind, 1, kind.rounds)
    for name, tensor in tensors(module):
        torch.testing.assert_close(tensor.double(), after[name].double(), atol=1e-6, rtol=0, msg=name)
    trainer = module.trainer
    assert trainer.global_step == plain.global_step and trainer.current_epoch == plain.current_epoch
    if kind.__name__ != "WarmupByHand":  # a rate that a client's training sets goes with it
        rates = [[g["lr"] for o in t.optimizers for g in o.param_groups] for t in (trainer, plain)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-12)


def several():
    """All rows; the trial of those whose memory is a client's own takes longest and is slow."""
    for kind in CASES:
        if issubclass(kind, Training):
            continue  # those learn in stacks, below
        if kind.draws:
            yield pytest.param(kind, False, id=kind.__name__)
        slow = pytest.mark.slow if is_more(kind) or not is_outside(kind) else ()
        yield pytest.param(kind, True, id=f"{kind.__name__}-tried", marks=slow)


@pytest.mark.parametrize(("kind", "tried"), list(several()))
def test_three_clients_alone_and_in_stacks(kind, tried, monkeypatch):
    if not tried:
        without_forks(monkeypatch)
    refused = kind.refused or ("update of a client that trains twice" if kind.crosses else "")
    try:
        federate(kind, 3, clients_per_step=1, check_isolation=True)
    except (ValueError, TypeError) as error:
        if refused and re.search(refused, str(error)):
            return
        raise
    assert not kind.crosses
    alone = dict(Exact.updates)
    try:
        federate(kind, 3, clients_per_step=3, check_isolation=False)
    except ValueError as error:
        if "use clients_per_step=1" in str(error):
            return
        raise
    for client, update in alone.items():
        assert differs(Exact.updates[client], update) <= tolerance(kind, update)


def differs(one, other):
    return float((one - other).abs().max())


def tolerance(kind, update):
    """Difference of a client in a stack to itself alone, whose sums are in another order.

    With bf16 each rounds what it multiplies to half a spacing, 2^-8 of its size, so that the two may be one
    spacing apart, of the update's largest entry. PyTorch itself, one sample after the other in place of a
    batch, is .3 to .96 of half a spacing apart here, the stack .6 to .91.
    """
    return float(update.abs().max()) * 2**-7 if kind.flags.get("precision") == "bf16-mixed" else 1e-6


def test_bf16_s_tolerance_finds_one_sample_that_is_left_out():
    class Skips(Bfloat):
        def loss(self, batch):
            each = torch.nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
            return each[1:].sum() / len(each)

    CASES.remove(Skips)
    found = []
    for kind in (Bfloat, Skips):
        federate(kind, 3, clients_per_step=1, check_isolation=False)
        found.append(dict(Exact.updates))
    for client, update in found[0].items():
        assert differs(found[1][client], update) > 10 * tolerance(Bfloat, update)


class _OwnRandom(random.Random):
    """A subclass, as some libraries have."""


class _Scales(Dataset[Any]):
    """Equal samples for all, scaled by what a transform of the data set draws."""

    def __init__(self, draw: Any) -> None:
        self.transforms = [functools.partial(self._scaled, draw)]

    @staticmethod
    def _scaled(draw, sample):
        number = torch.rand((), generator=draw) if isinstance(draw, torch.Generator) else draw.random()
        return sample * float(number)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.transforms[0](torch.ones(6)), index % 2


GENERATORS = {
    "NumPy's": lambda: np.random.default_rng(0),
    "NumPy's old": lambda: np.random.RandomState(0),
    "Python's": lambda: random.Random(0),
    "a subclass": lambda: _OwnRandom(0),
    "torch's": lambda: torch.Generator().manual_seed(0),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_of_transforms_draw_for_each_client_and_round(name):
    class Drawn(Case):
        class data(Data):
            def train_dataloader(self):
                return DataLoader(_Scales(GENERATORS[name]()), batch_size=2)

    CASES.remove(Drawn)
    found = []
    for size in (1, 3):
        federate(Drawn, 3, clients_per_step=size, check_isolation=size == 1 and name == "torch's")
        found.append(dict(Exact.updates))
    federate(Drawn, 3, 2, clients_per_step=1, check_isolation=False)
    of_next_round = Exact.updates[0]
    for client, update in found[0].items():
        torch.testing.assert_close(found[1][client], update, atol=1e-6, rtol=0)
    every = [*found[0].values(), of_next_round]
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(every, 2))


def test_closures_of_classes_are_named():
    net = torch.nn.Linear(6, 3)

    class Closed(Case):
        def build(self):
            self.net = net

        def forward(self, inputs):
            return net(inputs)

    CASES.remove(Closed)
    with pytest.raises(ValueError, match="names net directly: the original Linear"):
        federate(Closed, 1)


def test_where_a_global_has_more_than_is_looked_at_it_is_said(monkeypatch):
    monkeypatch.setattr("lightning_fedq.clients.reachability._MOST", 100)
    with pytest.warns(UserWarning, match="names MANY, but only 100 of its objects were checked"):
        find_reachable([BehindManyInAGlobal.training_step])


ONE_AT_A_TIME = {
    **dict.fromkeys(("MeanTeacher", "Moco"), "training writes into frozen parameters"),
    "SharpnessAware": "is not elementwise",
    "LabelledAndNot": "its own training loaders",
    "Gan": "uses manual optimisation",
    "MemoryOfEpochs": "reads the value of a tensor",
    "WarmupByHand": "overrides optimizer_step",
    "Metrics": "overrides on_train_epoch_end",
    "ReplayBuffer": "keeps tensors in samples",
    "Recurrent": "net.0 (GRU) stores a list of its weights",
    "GradientHooks": "net.0.weight has a gradient hook",
    "OwnCallback": "_ScalesGradients has its own on_after_backward",
    "SparseEmbedding": "table (EmbeddingBag) has sparse gradients",
    "PicturesWithPaths": "strings or objects",
    "PenaltyOfGradients": "calls requires_grad_()",
    "Recomputed": "support saved tensor hooks",
}
"""Why clients of these do not train side by side. All others do, with branches on shapes among them."""


class UntilItLearns(pl.Callback):
    """Ends a fit whose validation loss is below that of the first round."""

    first = last = float("nan")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.last = float(trainer.callback_metrics["val_loss"])
            self.first = self.last if self.first != self.first else self.first
            trainer.should_stop = self.last < self.first


@pytest.mark.parametrize("kind", [k for k in CASES if issubclass(k, Training)])
def test_six_clients_learn_in_stacks_or_say_the_true_reason(kind, caplog):
    federated, learns, module = Federated(FedAvg(), 6, seed=0), UntilItLearns(), kind()
    trainer = make_trainer(*module.callbacks(), federated, learns, max_epochs=8, **kind.flags)
    with warnings.catch_warnings(record=True) as warned, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=kind.data())
    said = [m for m in (*(str(w.message) for w in warned), *caplog.messages) if "one client at a time" in m]
    if kind.__name__ in ONE_AT_A_TIME:
        assert len(said) == 1 and ONE_AT_A_TIME[kind.__name__] in said[0]
    else:
        assert not said and federated.clients_per_step_chosen > 1
    assert learns.last < learns.first


@pytest.mark.parametrize("kind", [k for k in CASES if k.__name__ in ("MeanTeacher", "Moco")])
def test_a_follower_travels_where_a_client_has_one_batch(kind):
    """All of its parameters, though the first step changes none of them."""
    module, federated = federate(kind, 6)
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert frozen <= set(federated.fit.vector.sent)
