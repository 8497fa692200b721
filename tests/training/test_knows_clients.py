"""Callbacks that work on rounds say so themselves, wherever their class stands."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import lightning_fedq
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import PrivacyBudget, ReloadBest
from lightning_fedq.clients.hooks import has_user_hook, knows_clients, trains_with_clients


def test_every_callback_of_the_package_says_it_where_its_hooks_are():
    found = {
        one
        for module in pkgutil.walk_packages(lightning_fedq.__path__, "lightning_fedq.")
        for one in vars(importlib.import_module(module.name)).values()
        if inspect.isclass(one) and issubclass(one, pl.Callback) and one.__module__ == module.name
    }
    assert len(found) >= 15
    assert not [kind for kind in found if not kind.knows_clients]
    hooks = ("on_train_batch_start", "on_train_batch_end")
    own = {kind for kind in found if "knows_clients" in vars(kind)}
    assert not [kind for kind in found - own if set(hooks) & set(vars(kind))]


class Mine(PrivacyBudget):
    """A user's subclass, with a hook of batches of its own."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass


class Watches(pl.Callback):
    """A user's callback that looks at batches."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass


def moved(kind):
    """The class as if it stood in another package."""
    return type(kind.__name__, kind.__bases__, {**vars(kind), "__module__": "elsewhere.callbacks"})


def test_a_moved_callback_is_still_the_fits():
    callback = moved(ReloadBest)()
    assert type(callback).__module__ == "elsewhere.callbacks"
    assert knows_clients(callback) and not trains_with_clients(callback)
    budget = moved(PrivacyBudget)(8.0, 1e-5, "outsider")
    assert knows_clients(budget) and not has_user_hook(budget)


def test_a_users_subclass_is_the_fits_and_its_hook_the_users():
    callback = Mine(8.0, 1e-5, "outsider")
    assert knows_clients(callback) and not trains_with_clients(callback) and has_user_hook(callback)


@pytest.mark.parametrize("module", ["mine", "lightning_fedq", "lightning_fedq.callbacks.mine"])
def test_a_users_callback_of_batches_is_copied_whatever_its_module_is_called(module, monkeypatch):
    monkeypatch.setattr(Watches, "__module__", module)
    assert trains_with_clients(Watches()) and has_user_hook(Watches())
    monkeypatch.setattr(Watches, "knows_clients", True, raising=False)
    assert not trains_with_clients(Watches())
