"""A class that defines a flag by its old name is refused, because nobody would read the flag."""

import pytest

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.flower.settings import is_per_client
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.old_names import CALLBACK_NAMES, MECHANISM_NAMES, REMOVED_NAMES
from tests.digits_run import Classifier, Digits, make_trainer


@pytest.mark.parametrize(("old", "new"), MECHANISM_NAMES.items())
def test_mechanisms(old, new):
    with pytest.raises(TypeError, match=f"^Mine defines {old}. Rename it to {new}.$"):
        type("Mine", (FedAvg,), {old: True})
    assert hasattr(Mechanism, new)


@pytest.mark.parametrize("name", REMOVED_NAMES)
def test_mechanisms_with_names_that_are_gone(name):
    with pytest.raises(TypeError, match=f"^Mine defines {name}, which nobody reads. "):
        type("Mine", (FedAvg,), {name: lambda self, dim: ()})
    assert not hasattr(Mechanism, name)


@pytest.mark.parametrize(("old", "new"), CALLBACK_NAMES.items())
def test_callbacks_in_a_simulation_and_at_a_real_client(old, new):
    mine = type("Mine", (pl.Callback,), {old: True})()
    trainer = make_trainer(fedq.Federated(FedAvg(), num_clients=2, seed=0), mine)
    with pytest.raises(TypeError, match=f"^Mine defines {old}. Rename it to {new}.$"):
        trainer.fit(Classifier(), datamodule=Digits())
    with pytest.raises(TypeError, match=f"Rename it to {new}"):
        is_per_client(mine)


def test_a_flag_of_one_object():
    mine = pl.Callback()
    vars(mine)[next(iter(CALLBACK_NAMES))] = True
    with pytest.raises(TypeError, match="Callback defines"):
        is_per_client(mine)
