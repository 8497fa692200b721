import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from lightning_fedq.data.models import Classifier, Linear


def test_logs_loss_and_accuracy(monkeypatch):
    model, logged = Classifier(Linear(4, 3)), {}
    monkeypatch.setattr(model, "log", lambda name, value, **_: logged.update({name: value}))
    inputs, labels = torch.eye(4), torch.tensor([0, 1, 2, 0])
    loss = model.training_step((inputs, labels), 0)
    model.validation_step((inputs, labels), 0)
    model.test_step((inputs, labels), 0)
    scores = model(inputs)
    assert torch.equal(loss, cross_entropy(scores, labels))
    assert set(logged) == {
        f"{stage}_{what}" for stage in ("train", "val", "test") for what in ("loss", "acc")
    }
    assert logged["val_acc"] == (scores.argmax(1) == labels).float().mean()
    assert torch.equal(model.predict_step((inputs, labels), 0), scores.argmax(1))


def test_a_stack_trains_under_vmap(monkeypatch):
    models = [Classifier(Linear(4, 3)) for _ in range(2)]
    parameters, _ = stack_module_state(models)
    meta = Classifier(Linear(4, 3))
    monkeypatch.setattr(meta, "log", lambda *_, **__: None)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = meta

        def forward(self, batch):
            return self.module.training_step(batch, 0)

    batch = torch.randn(2, 5, 4), torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]])
    prefixed = {f"module.{name}": value for name, value in parameters.items()}
    losses = vmap(lambda p, b: functional_call(Step(), p, (b,)))(prefixed, batch)
    for model, loss, inputs, labels in zip(models, losses, *batch, strict=True):
        torch.testing.assert_close(loss, cross_entropy(model(inputs), labels))


def test_optimizer_is_sgd_with_the_given_settings():
    optimizer = Classifier(Linear(4), lr=0.3, momentum=0.5, weight_decay=0.01).configure_optimizers()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.5, 0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be > 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be > 0, got nan"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"weight_decay": -1.0}, "weight_decay must be >= 0"),
    ],
)
def test_hyperparameters_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Classifier(Linear(4), **settings)
