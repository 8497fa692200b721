"""A mechanism that is given where a callback or a strategy belongs: the answer is the line that works."""

import pickle
from copy import deepcopy

import pytest
import pytorch_lightning as pl

from lightning_fedq.cli import main
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import Classifier, Linear
from lightning_fedq.mechanisms import LDPQ, CorBin


def test_among_the_callbacks():
    trainer = pl.Trainer(callbacks=[CorBin(4.0)], logger=False, enable_checkpointing=False)
    words = r"callbacks=\[Federated\(CorBin\(epsilon_per_coordinate=4.0, shared_bits=5\)"
    with pytest.raises(TypeError, match=words):
        trainer.fit(Classifier(Linear(in_features=64)), DigitsDataModule())


def test_as_the_strategy():
    words = r"not a strategy.*callbacks=\[Federated\(CorBin\(epsilon_per_coordinate=4.0"
    with pytest.raises(TypeError, match=words):
        pl.Trainer(strategy=CorBin(4.0))
    assert CorBin(4.0) != CorBin(5.0) and CorBin(4.0) != "CorBin" and not CorBin(4.0) != CorBin(4.0)  # noqa: SIM202


def test_a_name_that_nobody_has_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="'LDPQ' object has no attribute 'wrong'"):
        getattr(LDPQ(1.0), "wrong")  # noqa: B009
    assert not hasattr(LDPQ(1.0), "__array__")
    assert deepcopy(LDPQ(1.0)) == pickle.loads(pickle.dumps(LDPQ(1.0))) == LDPQ(1.0)


@pytest.mark.parametrize("flag", ["callbacks+", "strategy"])
def test_by_flags(flag, capsys):
    try:
        assert main(["fit", "digits_fedavg", f"--trainer.{flag}=lightning_fedq.CorBin"]) == 2
    except SystemExit as error:
        assert error.code == 2
    cure = "--trainer.callbacks+=lightning_fedq.Federated --trainer.callbacks.mechanism=lightning_fedq.CorBin"
    assert cure in capsys.readouterr().err
