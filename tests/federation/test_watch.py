"""What training leaves behind besides updates."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.federation.watch import Kept, checksum
from tests.callbacks.silent import Silent
from tests.digits_run import Classifier, Digits, make_trainer, weights_of


def fit(module: Any, *callbacks: Any, rounds: int = 2) -> Any:
    fed = Federated(Silent(), 3, seed=1, clients_per_step=1)
    make_trainer(fed, *callbacks, max_epochs=rounds).fit(module, datamodule=Digits(60))
    return module


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


class Keeps(Classifier):
    """Writes something of each batch somewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("codes", torch.zeros(64, dtype=torch.int64))
        self.register_buffer("late", torch.zeros(64))
        self.frozen = nn.Parameter(torch.zeros(64), requires_grad=False)
        self.average = AveragedModel(self.backbone).requires_grad_(False)
        self.run, self.hidden, self.items, self.losses = torch.zeros(64), None, [], []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mean, loss = batch[0].mean(0), super().training_step(batch, batch_idx)
        if self.how == "integers":
            self.codes += (mean > 0).long()
        elif self.how == "late buffer" and batch_idx > 0:
            self.late = self.late + mean
        elif self.how == "data buffer" and batch_idx > 0:
            self.late.data.add_(mean)
        elif self.how == "frozen parameter":
            self.frozen.data = self.frozen.data + mean
        elif self.how == "average":
            self.average.update_parameters(self.backbone)
        elif self.how == "attribute":
            self.run = 0.9 * self.run + mean
        elif self.how == "attribute in place":
            self.run.data.add_(mean)
        elif self.how == "hidden state":
            self.hidden = (mean, mean)
        elif self.how == "list":
            self.items.append({"preds": mean})
        elif self.how == "losses":
            self.losses.append(loss.detach())
        return loss


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "integers",
            "training changed the buffers codes, which no update carries: .* use buffers='local', in which",
        ),
        ("late buffer", "training changed the buffers late, which no update carries"),
        ("data buffer", "training changed the buffers late, which no update carries"),
        (
            "frozen parameter",
            "training changed the parameters frozen, .*; give them to the optimiser, or update",
        ),
        (
            "average",
            "training changed the parameters average.module.weight, .* once a round, in on_train_epoch",
        ),
        ("list", "training put tensors of clients into items of the module, .*; log a metric, keep single"),
    ],
)
def test_what_training_may_not_change(how: str, message: str) -> None:
    module = Keeps(how)
    before = state_of(module)
    with pytest.raises(ValueError, match=message):
        fit(module)
    for name, value in before.items():
        assert torch.equal(module.state_dict()[name], value), name


@pytest.mark.parametrize("how", ["attribute", "attribute in place", "hidden state"])
def test_attributes_are_scratch_of_one_client(how: str) -> None:
    seen = []

    class Watches(Keeps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % 2 == 0:  # two batches a client
                seen.append((self.run.clone(), self.hidden))
            return super().training_step(batch, batch_idx)

    module = Watches(how)
    name = "hidden" if how == "hidden state" else "run"
    with pytest.warns(
        UserWarning, match=f"left tensors in the attribute {name}, .* every client starts with"
    ):
        fit(module)
    assert all(torch.equal(run, torch.zeros(64)) and hidden is None for run, hidden in seen)
    assert torch.equal(module.run, torch.zeros(64)) and module.hidden is None


VALUES: list[Any] = []
"""The average that `Hides` keeps, at a place that nobody looks at."""


class Average:
    """An average in an object that is called."""

    __slots__ = ("values",)

    def __init__(self, values: list[Tensor]) -> None:
        self.values = values

    def __call__(self) -> None:
        """Not looked at."""


def _enclosed(values: list[Tensor]) -> Any:
    return lambda: values


class Hides(Classifier):
    """An average of the weights somewhere in the module, registered nowhere."""

    def __init__(self, how: str, in_place: bool) -> None:
        super().__init__()
        self.in_place, double = in_place, copy.deepcopy(self.backbone)
        VALUES[:] = double.parameters()
        values, arrays = list(VALUES), np.empty(len(VALUES), dtype=object)
        for number, value in enumerate(values):
            arrays[number] = value.detach().numpy()
        self.kept: Any = {
            "modules in a list": [double],
            "modules in a dict": {"teacher": double},
            "modules in a tuple": (double,),
            "tensors in a list": values,
            "arrays in a dict": {"a": [p.detach().numpy() for p in double.parameters()]},
            "arrays of objects": arrays,
            "a partial": functools.partial(print, values),
            "a closure": _enclosed(values),
            "an object": Average(values),
            "an attribute of a hidden module": [nn.Identity()],
            "a hidden module": None,
        }[how]
        if how == "an attribute of a hidden module":
            self.kept[0].average = values
        if how == "a hidden module":
            vars(self)["kept"] = double

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for average, p in zip(VALUES, self.backbone.parameters(), strict=True):
                (average if self.in_place else average.data).lerp_(p, 0.5)


HIDDEN = [
    *("modules in a list", "modules in a dict", "modules in a tuple", "tensors in a list"),
    *("arrays in a dict", "arrays of objects", "a partial", "a closure", "an object", "a hidden module"),
    "an attribute of a hidden module",
]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("how", HIDDEN)
def test_averages_in_containers_are_refused_and_put_back(how: str, in_place: bool) -> None:
    module = Hides(how, in_place)
    before = [value.clone() for value in VALUES]
    with pytest.raises(ValueError, match="training put tensors of clients into kept of the module"):
        fit(module)
    assert all(torch.equal(a, b) for a, b in zip(before, VALUES, strict=True))


def test_a_frozen_network_out_of_sight_and_data_are_welcome() -> None:
    class Teacher(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = [copy.deepcopy(self.backbone)]
            self.loss = functools.partial(nn.functional.cross_entropy, weight=torch.ones(10))
            self.sizes, self.mean = {"data": np.arange(64.0)}, np.arange(64.0)
            self.pair: Any = (copy.deepcopy(self.backbone), torch.zeros(3))
            self.check = lambda scores: self.pair[0](scores)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            wanted = self.teacher[0](batch[0]).argmax(1) + 0 * self.check(batch[0]).argmax(1)
            return self.loss(self.backbone(batch[0]), wanted)

    fit(Teacher())


def test_an_array_in_an_attribute_is_scratch_of_one_client() -> None:
    class Arrays(Classifier):
        mean: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                assert self.run.sum() == 0 and self.mean is None
            self.run += batch[0].mean(0).numpy()
            self.mean = batch[0].mean(0).numpy()
            return super().training_step(batch, batch_idx)

    module = Arrays()
    module.run, module.mean = np.zeros(64), None
    with pytest.warns(UserWarning, match="training left tensors in the attribute"):
        fit(module)
    assert module.run.sum() == 0 and module.mean is None


def test_an_optimizer_that_the_trainer_does_not_know_is_refused() -> None:
    class Own(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.optim.Adam(self.backbone.parameters(), lr=0.1)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.own.step()

    with pytest.raises(ValueError, match="training put tensors of clients into own of the module"):
        fit(Own())


def test_single_numbers_and_metrics_are_left_alone() -> None:
    class Measures(Keeps):
        def __init__(self) -> None:
            super().__init__("losses")
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(10)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.accuracy(self.backbone(batch[0]), batch[1])
            self.log("train_acc", self.accuracy, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    assert len(fit(Measures()).losses) == 2 * 6


def test_a_buffer_changed_in_validation_is_nobodys_update() -> None:
    class Best(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("best", torch.zeros(()))

        def on_validation_epoch_end(self) -> None:
            self.best.copy_(torch.tensor(float(self.current_epoch + 1)))

    assert fit(Best()).best == 2.0


def test_a_reparametrised_weight_is_no_state() -> None:
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="weight_norm"):
        module = Classifier(nn.utils.weight_norm(nn.Linear(64, 10)))
    before = weights_of(module).clone()
    assert torch.equal(weights_of(fit(module)), before)


class OwnAverage(pl.Callback):
    """An average as people write it."""

    def __init__(self, lazily: bool) -> None:
        self.average: Any = None
        self.lazily = lazily

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.lazily:
            self.average = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self.average is None:
            self.average = copy.deepcopy(pl_module.backbone)
        now = dict(self.average.named_parameters() if self.lazily else self.average)
        for average, p in zip(now.values(), pl_module.parameters(), strict=True):
            average.data.mul_(0.9).add_(p.data, alpha=0.1)


@pytest.mark.parametrize("lazily", [False, True])
def test_a_callbacks_own_average_is_refused_by_name(lazily: bool) -> None:
    callback = OwnAverage(lazily)
    with pytest.raises(
        ValueError, match=r"^OwnAverage keeps weights of clients \(.*average.*once a round, in on"
    ):
        fit(Classifier(), callback)


def test_an_average_once_a_round_is_welcome() -> None:
    class Once(OwnAverage):
        on_train_epoch_end = OwnAverage.on_train_batch_end

        def on_train_batch_end(self, *args: Any) -> None:
            pass

    fit(Classifier(), Once(lazily=False))


def test_a_copy_of_what_the_server_sent_is_welcome() -> None:
    class Spies(pl.Callback):
        def __init__(self, of_clients: bool) -> None:
            self.of_clients, self.seen = of_clients, []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, i: int) -> None:
            state = pl_module.state_dict() if not self.of_clients else dict(pl_module.named_parameters())
            self.seen.append({name: value.detach().clone() for name, value in state.items()})

    fit(Classifier(), Spies(False))
    with pytest.raises(ValueError, match="Spies keeps weights of clients"):
        fit(Classifier(), Spies(True))


def test_checksums_see_a_single_bit() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        tensor = torch.zeros(5, 3, dtype=dtype)
        before, kept = checksum(tensor), Kept.of(tensor)
        assert kept.same(tensor, content=True)
        tensor.data[4, 2] = 1
        assert checksum(tensor) != before and not kept.has_values_of(tensor)
        assert kept.put_back() and checksum(tensor) == before
    assert checksum(torch.zeros(3).to_sparse()) is None


def test_checksums_see_an_order_and_values_that_make_up_for_each_other() -> None:
    tensor = torch.arange(10)
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(tensor) != checksum(tensor + torch.tensor([1, -2, 1, 0, 0, 0, 0, 0, 0, 0]))
    assert checksum(torch.tensor([5])) != checksum(torch.tensor([-0x9E3779B1 - 5]))
