"""What `DPSGD` finds out from raw data it finds out once, before a charge; later looks only stop the run."""

import pytest
from torch import nn

from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.dpsgd import loss_reduction
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, fitted, make_trainer


class Loses(Classifier):
    """A loss for each epoch: reduced so, times a factor."""

    def __init__(self, *epochs):
        super().__init__()
        self.epochs = epochs

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        reduction, factor = self.epochs[min(self.trainer.current_epoch, len(self.epochs) - 1)]
        return factor * nn.functional.cross_entropy(self.backbone(inputs), labels, reduction=reduction)


def dpsgd():
    return DPSGD(1.0, 1.0, delta=1e-4, seed=1)


FEDERATIONS = [lambda: (), lambda: (Federated(FedAvg(), 2, seed=0),)]


@pytest.mark.parametrize("around", FEDERATIONS)
@pytest.mark.parametrize("first", ["mean", "sum"])
def test_where_a_later_look_can_not_tell_the_first_answer_stays(around, first):
    private = DPSGD(1.0, 1.0, delta=1e-4)
    model, others = Loses((first, 1.0), ("mean", 0.0), (first, 1.0)), around()
    trainer = fitted(model, *others, private, data=Digits(60), max_epochs=3)
    assert trainer.current_epoch == 3 and private._optimizer.loss_reduction == first
    assert {account.steps for account in private.accounts.values()} == ({9} if others else {18})


@pytest.mark.parametrize("around", FEDERATIONS)
def test_a_contradiction_stops_the_run_before_the_epoch_is_charged(around):
    private, others = DPSGD(1.0, 1.0, delta=1e-4), around()
    trainer = make_trainer(*others, private, max_epochs=3)
    with pytest.raises(ValueError, match=r"was the mean of per-sample losses and is now the sum. Use one"):
        trainer.fit(Loses(("mean", 1.0), ("sum", 1.0)), datamodule=Digits(60))
    assert {account.steps for account in private.accounts.values()} == ({3} if others else {6})
    assert not others or others[0].ledger.rounds == 1


@pytest.mark.parametrize("around", FEDERATIONS)
def test_without_a_first_answer_nobody_is_charged(around):
    private, others = DPSGD(1.0, 1.0, delta=1e-4), around()
    trainer = make_trainer(*others, private)
    with pytest.raises(ValueError, match="can't find the loss reduction, because the loss"):
        trainer.fit(Loses(("mean", 0.0)), datamodule=Digits(60))
    assert not any(account.steps for account in private.accounts.values())
    assert not others or others[0].ledger.rounds == 0


@pytest.mark.parametrize("around", FEDERATIONS)
def test_a_resumed_run_goes_on_with_the_first_answer(around, tmp_path):
    settings = {"default_root_dir": tmp_path}
    first = make_trainer(*around(), dpsgd(), **settings)
    first.fit(Loses(("sum", 1.0)), datamodule=Digits(60))
    first.save_checkpoint(tmp_path / "two.ckpt")
    private = dpsgd()
    again = make_trainer(*around(), private, max_epochs=3, **settings)
    again.fit(Loses(("sum", 0.0)), datamodule=Digits(60), ckpt_path=tmp_path / "two.ckpt")
    assert again.current_epoch == 3 and private.loss_reduction == "sum"
    with pytest.raises(ValueError, match="was the sum of per-sample losses and is now the mean"):
        make_trainer(*around(), dpsgd(), max_epochs=3, **settings).fit(
            Loses(("mean", 1.0)), datamodule=Digits(60), ckpt_path=tmp_path / "two.ckpt"
        )
    fresh = dpsgd()
    make_trainer(*around(), fresh, **settings).fit(Loses(("mean", 1.0)), datamodule=Digits(60))
    assert fresh.loss_reduction == "mean"


@pytest.mark.parametrize(
    ("whole", "alone", "before", "found"),
    [
        (2.0, [1.0, 3.0], None, "mean"),
        (4.0, [1.0, 3.0], None, "sum"),
        (0.0, [0.0, 0.0], "sum", "sum"),
        (0.0, [1.0, -1.0], "sum", "sum"),  # both fit, which does not choose the mean
        (float("nan"), [2.0], "mean", "mean"),
        (float("nan"), [], "mean", "mean"),
        (4.0, [1.0, 3.0], "mean", None),
        (2.0, [1.0, 3.0], "sum", None),
        (0.0, [1.0, -1.0], None, None),
        (7.0, [1.0, 3.0], "mean", None),
        (1.0, [0.0, 0.0], "mean", None),
    ],
)
def test_what_is_found(whole, alone, before, found):
    if found is None:
        with pytest.raises(ValueError, match="loss"):
            loss_reduction._reduction(whole, alone, before)
    else:
        assert loss_reduction._reduction(whole, alone, before) == found
