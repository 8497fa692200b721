"""A client's random numbers are its own: the same alone, and in stacks of any size."""

import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, digits, make_trainer, weights_of


def dropout(scores):
    return nn.functional.dropout(scores, 0.5)


def transposed(scores):
    """A mask is drawn in the order of memory."""
    return nn.functional.dropout(scores.t().contiguous().t(), 0.5)


def feature_dropout(scores):
    return nn.functional.dropout2d(scores[:, :, None, None], 0.5).flatten(1)


def noise(scores):
    return scores + 0.1 * torch.randn_like(scores) + 0.1 * torch.rand(10)


def integers(scores):
    return scores + 0.1 * torch.randint(3, (len(scores), 1)) + 0.1 * torch.randint_like(scores, 5)


def gumbel(scores):
    return nn.functional.gumbel_softmax(scores)


def shuffled(scores):
    return scores + 0.1 * scores[torch.randperm(len(scores))] + 0.1 * scores[torch.randperm(len(scores))]


def coins(scores):
    return (
        scores * torch.bernoulli(torch.full_like(scores, 0.5)) + torch.multinomial(scores.softmax(1), 2).sum()
    )


def attention(scores):
    heads = scores.reshape(1, 1, -1, 10)
    dropped = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
    return dropped.reshape(-1, 10) + nn.functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]


class Random(Classifier):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw, self.optimizer = draw, lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.5)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.draw(self.backbone(inputs)), labels)


def fit(clients_per_step, module, data=None):
    fed = Federated(FedAvg(), 6, seed=0, clients_per_step=clients_per_step)
    make_trainer(fed).fit(module, datamodule=data or Digits(117))
    return fed.clients_per_step_chosen, weights_of(module)


class Late(Random):
    """The rehearsal, and the first steps, draw nothing."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.backbone(inputs)
        scores = self.draw(scores) if self.trainer.current_epoch else scores
        return nn.functional.cross_entropy(scores, labels)


class Jittered(Dataset[Any]):
    """A random transform, as an augmentation is."""

    def __len__(self):
        return 117

    def __getitem__(self, index):
        inputs, labels = digits()
        return inputs[index] + 0.2 * torch.randn(64), labels[index]


class JitteredDigits(Digits):
    def train_set(self):
        return Jittered()


DRAWS = [dropout, transposed, feature_dropout, noise, integers, gumbel, shuffled, coins, attention]


@pytest.mark.parametrize(
    ("draw", "kind", "data"),
    [*((draw, Random, Digits) for draw in DRAWS), (dropout, Late, Digits), (dropout, Random, JitteredDigits)],
)
def test_random_numbers_do_not_depend_on_the_stack(draw, kind, data):
    _, alone = fit(1, kind(draw), data(117))
    for size in (2, 4, 6):
        chosen, weights = fit(size, kind(draw), data(117))
        assert chosen == size
        torch.testing.assert_close(weights, alone, atol=2e-6, rtol=1e-5)


def test_in_place_draws_that_cannot_be_mapped_go_one_client_at_a_time():
    def sampled(scores):
        return torch.distributions.Normal(scores, 0.1, validate_args=False).rsample()

    with pytest.warns(UserWarning, match="draws in place") as caught:
        chosen, weights = fit(4, Random(sampled))
    assert chosen == 1
    assert not any("issue" in str(w.message) for w in caught)
    assert torch.equal(weights, fit(1, Random(sampled))[1])


def test_one_seed_is_one_run():
    """Six times, with dropout, the default `clients_per_step`, and whatever the global seed."""
    runs = []
    for seed in range(3):
        pl.seed_everything(seed)
        runs.append(fit("auto", Random(dropout)))
    assert len({chosen for chosen, _ in runs}) == 1
    assert all(torch.equal(weights, runs[0][1]) for _, weights in runs)


class OwnRandom(random.Random):
    """With something that it holds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.held = [seed]


class OwnState(np.random.RandomState):
    pass


class OwnNumPy(np.random.Generator):
    pass


class OwnTorch(torch.Generator):
    pass


KEPT = {
    "random.Random": lambda: random.Random(1),
    "a subclass": lambda: OwnRandom(1),
    "a subclass of RandomState": lambda: OwnState(1),
    "a subclass of numpy's Generator": lambda: OwnNumPy(np.random.PCG64(1)),
    "a subclass of torch's": lambda: OwnTorch().manual_seed(1),
    "of the operating system": random.SystemRandom,
}


class Keeps(Classifier):
    """Keeps a generator of its own, and draws from it in each step, a Gaussian first."""

    drawn: ClassVar[list[float]] = []

    def __init__(self, draws: Any) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 10))
        self.draws = draws

    def training_step(self, batch, batch_idx):
        draws = self.draws
        if isinstance(draws, torch.Generator):
            self.drawn.append(float(torch.randn((), generator=draws)))
        else:
            self.drawn += [draws.normal() if hasattr(draws, "normal") else draws.gauss(0.0, 1.0)]
            self.drawn += [draws.random()]
        assert getattr(draws, "held", [1]) == [1]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", KEPT)
def test_a_generator_that_a_module_keeps_draws_anew_for_each_client_and_round(kind):
    """Of a subclass all clients had the same draws, in every round."""
    runs = []
    for _ in range(2):
        Keeps.drawn.clear()
        module = Keeps(KEPT[kind]())
        fed = Federated(FedAvg(), 4, seed=1, clients_per_step=1, check_isolation=False)
        make_trainer(fed, max_epochs=2).fit(module, datamodule=Digits(80))
        draws = 16 * (1 if "torch" in kind else 2)  # of both rounds, behind those of the rehearsal
        runs.append(Keeps.drawn[-draws:])
        assert len(set(runs[-1])) == draws
    assert (runs[0] == runs[1]) == (kind != "of the operating system")
