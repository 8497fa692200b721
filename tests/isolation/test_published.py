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

from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.reached import reached_by
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import make_trainer
from tests.isolation import published_more
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


def states(kind):
    """The state before and after an epoch of plain training."""
    kind.forget()
    module = kind()
    trainer = make_trainer(*module.callbacks(), max_epochs=1, num_sanity_val_steps=0, **kind.flags)
    begin = {}
    ordinary = module.on_train_start

    def note():
        ordinary()
        begin.update({name: t.detach().clone() for name, t in tensors(module)})

    module.on_train_start = note
    trainer.fit(module, datamodule=kind.data())
    return begin, {name: t.detach() for name, t in tensors(module)}


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


DECIDES = frozenset(
    """
    EmaOfTorch EmaInDictionary LoraParametrization LoraByForwardPatch CountsSamples LongChain NumpyView
    TeacherNamedThatFollows SamplerOfEpochs ClockOfTheTrainerNamed ScriptedPart GraphModule ReplacedLayer
    ById ParametersOutsideOfModules ReloadsEachEpoch ComplexWeights SlotsAndWeak SingleDispatch CachedMethod
    ByIdGlobally RowsOfABuffer Functional PropertyWithSetter StepInBackward NumpyDoubles ImportedInside
    Dropout SamplesWithReplacement AugmentsInWorkers Mixup MixupOfTorch GeneratorOfAFunction NegativeSamples
    Shuffles GlobalConfigHeld GlobalListHeld OwnBatches Threads ModuleInAGlobal RunningGenerator
    """.split()  # noqa: SIM905
)
"""With these every line of the package runs that any row runs (counted by coverage, forks included).

They and what is refused run by default. The other rows are habits that go the same ways: `make test-slow`.
"""


def decides(kind):
    """Marks of a row."""
    return () if kind.__name__ in DECIDES or kind.refused or kind.said else pytest.mark.slow


@pytest.mark.parametrize("kind", [pytest.param(k, marks=decides(k)) for k in CASES if not k.draws])
def test_one_client_is_the_plain_training(kind, monkeypatch):
    if is_more(kind):
        without_forks(monkeypatch)
    before, after = states(kind)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            module, fed = federate(kind, 1)
    except (ValueError, TypeError) as error:
        if kind.refused and re.search(kind.refused, str(error)):
            return
        raise
    names = fed.fit.vector.travelling
    wanted = torch.cat([(after[name] - before[name]).flatten().double() for name in names])
    got = Exact.updates[0].double()
    assert torch.equal(got, wanted), float((got - wanted).abs().max())
    if kind.said:
        assert any(kind.said in str(one.message) for one in warned)
    for name, tensor in tensors(module):
        if kind.said and not tensor.is_floating_point():
            continue
        torch.testing.assert_close(tensor.double(), after[name].double(), atol=1e-6, rtol=0, msg=name)


def several():
    """All rows; the trial of those whose memory is a client's own takes longest and is slow."""
    for kind in CASES:
        if kind.draws:
            yield pytest.param(kind, False, id=kind.__name__, marks=decides(kind))
        outside = kind.crosses or kind.refused or kind.data is not Data or "Held" in kind.__name__
        slow = pytest.mark.slow if is_more(kind) or not outside else decides(kind)
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
    with pytest.raises(ValueError, match="names net past it: the original Linear"):
        federate(Closed, 1)


def test_where_a_global_has_more_than_is_looked_at_it_is_said(monkeypatch):
    monkeypatch.setattr("lightning_fedq.clients.reached._MOST", 100)
    with pytest.warns(UserWarning, match="names MANY, and 100 of its objects were looked at"):
        reached_by([BehindManyInAGlobal.training_step])


def test_there_are_so_many():
    assert len(CASES) >= 120
