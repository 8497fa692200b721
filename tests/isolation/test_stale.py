"""Averages that callbacks, modules and optimisers keep by step, and put in where the user's fit has none."""

import copy
import re
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_fedq._lightning import pl
from lightning_fedq.training import rehearsal
from tests.isolation.published import CASES, Case
from tests.isolation.test_published import federate, states, tensors

pytestmark = pytest.mark.filterwarnings("ignore")


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class _Ema(pl.Callback):
    """Of all weights by batch, as most write it."""

    def on_train_start(self, trainer, pl_module):
        self.shadow = state(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, tensor in pl_module.state_dict().items():
            self.shadow[name].lerp_(tensor, 0.1)

    def swap(self, trainer, pl_module):
        pl_module.load_state_dict(self.shadow)


class AtTheEnd(_Ema):
    on_train_end = _Ema.swap


class BegunByTheFirstBatch(_Ema):
    shadow: Any = None

    def on_train_start(self, trainer, pl_module):
        """Nothing."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.shadow = self.shadow or state(pl_module)
        super().on_train_batch_end(trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        if self.shadow is not None:
            self.swap(trainer, pl_module)


class ForValidation(_Ema):
    """In and out again."""

    def on_validation_start(self, trainer, pl_module):
        self.kept = state(pl_module)
        self.swap(trainer, pl_module)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.kept)


class InCheckpoints(_Ema):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["state_dict"] = self.shadow


class FlatAtFitEnd(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        self.average = parameters_to_vector(pl_module.parameters()).detach().clone()

    def on_after_backward(self, trainer, pl_module):
        self.average.lerp_(parameters_to_vector(pl_module.parameters()).detach(), 0.2)

    def on_fit_end(self, trainer, pl_module):
        vector_to_parameters(self.average, pl_module.parameters())


class _SwapsOptimizer(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        trainer.optimizers[0].swap()


class _Averaging(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.average = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure=None):
        loss = super().step(closure)
        for mean, p in zip(self.average, self.param_groups[0]["params"], strict=True):
            mean.lerp_(p.detach(), 0.1)
        return loss

    def swap(self):
        for mean, p in zip(self.average, self.param_groups[0]["params"], strict=True):
            p.data.copy_(mean)


class OfTheOptimizer(Case):
    def callbacks(self):
        return [_SwapsOptimizer()]

    def configure_optimizers(self):
        return _Averaging(self.parameters())


class OfTheModule(Case):
    def on_train_start(self):
        self.shadow = state(self)

    def on_train_batch_end(self, *args):
        for name, tensor in self.state_dict().items():
            self.shadow[name].lerp_(tensor, 0.1)

    def on_train_end(self):
        self.load_state_dict(self.shadow)


# ---- and those that use nothing of the sort ---------------------------------------------------------------


class BestValidated(pl.Callback):
    best: Any = (9.9, None)

    def on_validation_end(self, trainer, pl_module):
        found = float(trainer.callback_metrics["val_loss"]), state(pl_module)
        self.best = min(self.best, found, key=lambda pair: pair[0])

    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.best[1])


class Rounded(pl.Callback):
    """Keeps something by batch, and puts in what follows from the weights alone."""

    def on_train_batch_end(self, *args):
        self.batches = getattr(self, "batches", 0) + 1

    def on_train_end(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.data = (64 * parameter.data).round() / 64


class InASubmodule(Case):
    """The cure: it travels."""

    def build(self):
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *args):
        for mean, parameter in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    def on_train_end(self):
        self.net.load_state_dict(self.ema.state_dict())


STALE = [AtTheEnd, BegunByTheFirstBatch, ForValidation, InCheckpoints, FlatAtFitEnd]
FINE = [BestValidated, Rounded]
MODULES = [OfTheOptimizer, OfTheModule, InASubmodule]


def row(kind):
    if kind in MODULES:
        return kind

    class WithCallback(Case):
        def callbacks(self):
            return [kind()]

    return WithCallback


@pytest.mark.parametrize("kind", [*STALE, OfTheOptimizer, OfTheModule])
def test_an_average_that_the_fit_never_gets_is_refused(kind):
    with pytest.raises(ValueError, match=r"loads weights \(such as an average\) that hooks of batches"):
        federate(row(kind), 1)


def test_where_it_is_not_tried_the_run_and_its_page_say_so(monkeypatch, caplog):
    monkeypatch.setattr("lightning_fedq.training.fit.find_fork_obstacle", lambda trainer: "no forks here")
    said = "AtTheEnd.on_train_end were not tried (no forks here), so weights that they set"
    module, fed = federate(row(AtTheEnd), 1)
    assert said in caplog.text
    assert said in fed.unprotected_outputs(module.trainer)
    _, fed = federate(row(pl.Callback), 1)
    assert fed.fit.averages == ""


class Saving(AtTheEnd):
    """Nothing can be written where hooks are tried, so that this one ends before it swaps."""

    def on_train_end(self, trainer, pl_module):
        torch.save(self.shadow, trainer.default_root_dir + "/shadow.pt")
        open(trainer.default_root_dir + "/shadow.txt", "w").close()
        self.swap(trainer, pl_module)


class TwoBatches(AtTheEnd):
    """Fails in the rehearsal alone, which goes on with a second step on a client's one batch."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module)
        if "in_rehearsal" in globals():
            raise RuntimeError("no second batch")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (TwoBatches, r"were not tried \(the rehearsal failed: RuntimeError: no second batch\)"),
        (Saving, r" \(PermissionError: Hooks can't write files.*were not tried \(they raised\)"),
    ],
    ids=["failed", "raised"],
)
def test_an_average_that_could_not_be_tried_is_named(kind, why, monkeypatch, tmp_path):
    ordinary = rehearsal.first_steps

    def rehearse(*args):  # in its fork
        globals()["in_rehearsal"] = True
        return ordinary(*args)

    monkeypatch.setattr("lightning_fedq.training.client_side.first_steps", rehearse)
    monkeypatch.chdir(tmp_path)
    _, fed = federate(row(kind), 1)
    assert re.search(f"{kind.__name__}.on_train_end{why}" if kind is Saving else why, fed.fit.averages)
    assert fed.fit.averages in fed.unprotected_outputs(fed.fit._trainer)


@pytest.mark.parametrize("kind", [*FINE, InASubmodule])
def test_what_follows_from_the_model_ends_as_plain_training(kind):
    after = states(row(kind))[1]
    for name, tensor in tensors(federate(row(kind), 1)[0]):
        torch.testing.assert_close(tensor, after[name], atol=1e-6, rtol=0, msg=name)


for _one in [one for one in CASES if one.__module__ == __name__ or one.__name__ == "WithCallback"]:
    CASES.remove(_one)  # rows of this table alone
