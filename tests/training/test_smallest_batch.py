"""A last batch that is too small for the training is known before the first round."""

import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.data import FederatedDataModule, QuantitySkew
from lightning_fedq.mechanisms import FedAvg
from tests.cures.rows_data import part
from tests.digits_run import Classifier, Digits, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Federated trains one client at a time"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


class Pairs(Classifier):
    """A loss of the two halves of a batch."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) < 2:
            raise RuntimeError("pairs need two samples")
        return super().training_step(batch, batch_idx)


class Spread(Classifier):
    """A loss with a standard deviation, which is NaN of one sample."""

    def training_step(self, batch, batch_idx):
        return self.backbone(batch[0]).std(0).sum() + super().training_step(batch, batch_idx)


def normed():
    torch.manual_seed(0)
    return Classifier(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)))


def run(module, data, **settings):
    fed = Federated(FedAvg(), **{"num_clients": 5, "seed": 0, **settings})
    make_trainer(fed, max_epochs=2).fit(module, datamodule=data)
    return fed.records


@pytest.mark.parametrize("module", [normed, Pairs, Spread])
def test_is_refused_by_name_with_the_cure(module):
    """48 samples in batches of 4: clients 3 and 4 hold nine, and the last batch of each is one sample."""
    told = r"The last batch of clients 3, 4 has 1 of 4 samples, .* Use drop_last=True"
    with pytest.raises(ValueError, match=told):
        run(module(), Digits(48, 4))
    assert len(run(module(), Digits(48, 4, drop_last=True))) == 2
    assert len(run(module(), Digits(48, 5))) == 2
    assert len(run(module(), Digits(48, 4), num_clients=4)) == 2


def test_of_clients_that_are_drawn_late():
    with pytest.raises(ValueError, match=r"clients 3, 4 has 1 of 4"):
        run(normed(), Digits(48, 4), cohort=1)


def test_whatever_deals_out():
    with pytest.raises(ValueError, match=r"has 1 of 4 samples"):
        run(normed(), Digits(48, 4), partition=QuantitySkew(0.2))


def test_of_data_sets_of_their_own():
    own = [part(8), part(9, 8), part(8, 17)]
    with pytest.raises(ValueError, match=r"The last batch of clients 1 has 1 of 4 samples"):
        run(normed(), FederatedDataModule(clients=own, batch_size=4), num_clients=3)
    assert run(normed(), FederatedDataModule(clients=own, batch_size=3), num_clients=3)


def test_what_can_take_one_sample_is_not_refused():
    assert len(run(Classifier(), Digits(48, 4))) == 2
    assert len(run(normed(), Digits(48, 4), buffers="frozen")) == 2


def test_another_error_is_the_user_s_own():
    class Wrong(Classifier):
        def training_step(self, batch, batch_idx):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(Wrong(), Digits(48, 4))
