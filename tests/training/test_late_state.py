"""State that training first writes after the rehearsal travels by a pattern, or stops the run."""

import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Federated trains one client at a time")


class MeanTeacher(Classifier):
    """A teacher that follows its student from the sixth batch of a run on."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(64, 10).requires_grad_(False)
        self.teacher.load_state_dict(self.backbone.state_dict())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step >= 6:
            with torch.no_grad():
                for own, student in zip(self.teacher.parameters(), self.backbone.parameters(), strict=True):
                    own.lerp_(student, 0.1)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * (self.backbone(batch[0]) - self.teacher(batch[0])).square().mean()


class LateQueue(Classifier):
    """Keys of late batches in a buffer, every third one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 10))

    def training_step(self, batch, batch_idx):
        if batch_idx % 3 == 2:
            with torch.no_grad():
                self.queue.copy_(self.backbone(batch[0])[:4])
        return super().training_step(batch, batch_idx) + 1e-3 * self.queue.mean()


LATE = {MeanTeacher: ["teacher.*"], LateQueue: ["queue"]}


def run(module, clients, rounds=2, **settings):
    fed = Federated(FedAvg(), clients, seed=0, **settings)
    make_trainer(fed, max_epochs=rounds).fit(module, datamodule=Digits(80 * clients, 10, shuffle=False))
    return fed


@pytest.mark.parametrize("kind", list(LATE))
@pytest.mark.parametrize("clients", [1, 2])
def test_is_refused_with_a_cure(kind, clients):
    with pytest.raises(
        ValueError, match=rf"changed {LATE[kind][0].strip('.*')}.*clients don't send.*extra_buffers="
    ):
        run(kind(), clients)


@pytest.mark.parametrize("kind", list(LATE))
def test_one_client_is_the_plain_training(kind):
    plain, ours = kind(), kind()
    make_trainer(max_epochs=2).fit(plain, datamodule=Digits(80, 10, shuffle=False))
    fed = run(ours, 1, extra_buffers=LATE[kind])
    for (name, one), other in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)
    assert len(fed.engine.weights) == 650 + (650 if kind is MeanTeacher else 40), "it is charged"
