import pytest
import torch

from lightning_fedq.data.models import CNN2, MLP, Linear

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


@pytest.mark.parametrize(
    "build", [lambda: Linear(0), lambda: MLP(64, hidden=(0,)), lambda: CNN2(num_classes=0)]
)
def test_sizes_must_be_positive(build):
    with pytest.raises(ValueError, match=r"must be >= 1, got 0"):
        build()


def test_an_activation_is_named():
    """Hidden layers get it, and another name is refused with the names that there are."""
    assert [type(layer).__name__ for layer in MLP(64, hidden=(3, 2), activation="tanh")][2::2] == [
        "Tanh",
        "Tanh",
    ]
    with pytest.raises(ValueError, match="activation must be one of \\['relu', 'tanh'\\], got 'gelu'"):
        MLP(64, activation="gelu")
