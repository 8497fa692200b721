import torch

from lightning_fedq.data.models import CNN2
from lightning_fedq.data.models.initial import seeded
from lightning_fedq.functional.flatten import flatten


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
