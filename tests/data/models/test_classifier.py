import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_fedq.data.models import CNN2, MLP, Classifier, Linear
from lightning_fedq.data.models.initial import seeded
from lightning_fedq.functional.flatten import flatten


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


# ---- backbones -----------------------------------------------------------------------------------------
CASES = [
    (Linear(64), (1, 8, 8), 650),
    (Linear(), (1, 28, 28), 7850),
    (MLP(64), (1, 8, 8), 4810),
    (MLP(64, hidden=(54,), activation="tanh"), (1, 8, 8), 4060),
    (MLP(64, hidden=(32, 16)), (1, 8, 8), 64 * 32 + 32 + 32 * 16 + 16 + 170),
    (CNN2(), (1, 28, 28), 20490),
    (CNN2(image_size=8), (1, 8, 8), 6090),
]


@pytest.mark.parametrize(("model", "shape", "size"), CASES, ids=lambda value: type(value).__name__)
def test_scores_and_documented_size(model, shape, size):
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == size


@pytest.mark.parametrize("model", [case[0] for case in CASES], ids=lambda model: type(model).__name__)
def test_no_stateful_buffers(model):
    assert not list(model.buffers())


def test_an_activation_is_named():
    """Hidden layers get it, and another name is refused with the names that there are."""
    layers = [type(layer).__name__ for layer in MLP(64, hidden=(3, 2), activation="tanh")]
    assert layers[2::2] == ["Tanh", "Tanh"]
    with pytest.raises(ValueError, match="activation must be one of \\['relu', 'tanh'\\], got 'gelu'"):
        MLP(64, activation="gelu")


# ---- initial -------------------------------------------------------------------------------------------
def test_the_same_seed_gives_the_same_model_and_touches_no_global_generator():
    state = torch.random.get_rng_state()
    model = CNN2()
    torch.random.set_rng_state(state)
    first = flatten(list(seeded(model, 3).parameters()))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, flatten(list(seeded(CNN2(), 3).parameters())))
    assert not torch.equal(first, flatten(list(seeded(CNN2(), 4).parameters())))


def test_weights_follow_the_law_and_biases_are_zero():
    model = seeded(torch.nn.Linear(600, 500), 0)
    bound = (6 / 600) ** 0.5
    assert model.weight.abs().max() <= bound
    # variance bound^2 / 3 over 3e5 draws: relative standard error 0.0016, five of them
    assert abs(float(model.weight.detach().var()) / (bound**2 / 3) - 1) < 0.008
    assert not model.bias.any()
