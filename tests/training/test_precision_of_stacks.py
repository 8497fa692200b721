"""Stacks in 16 bits: where 32 bits have them, and by what was measured where not."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.stack_trial import Rehearsal, _judge_difference
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, digits, make_trainer, weights_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined", "ignore:.*AMP with fp16 is not supported on CPU"
)
PRECISIONS = ("bf16-true", "bf16-mixed", "16-mixed", "16-true")
FINEST = {"16-true": 2**-10}
"""Spacing of the weights' own numbers, or of the products'; bfloat16's is 2^-7."""


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.tokens, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, inputs):
        return self.head(self.layers(self.tokens(inputs.view(-1, 8, 8))).mean(1))


def convolutions(norm):
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
    net = (nn.Unflatten(1, (1, 8, 8)), first, norm(8), nn.ReLU(), second, norm(8))
    return nn.Sequential(*net, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def perceptron():
    hidden = [layer for width in (64, 32, 32) for layer in (nn.Linear(width, 32), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(32, 10))


NETS = {
    "perceptron": perceptron,
    "attention": Attends,
    "batch norm": lambda: convolutions(nn.BatchNorm2d),
    "group norm": lambda: convolutions(lambda width: nn.GroupNorm(2, width)),
    "instance norm": lambda: convolutions(lambda width: nn.InstanceNorm2d(width, affine=True)),
}


def fit(precision, net, clients_per_step, kind=Classifier):
    torch.manual_seed(1)
    inputs, labels = digits()
    module = kind(net(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    fed = Federated(FedAvg(), 8, seed=0, clients_per_step=clients_per_step)
    loader = DataLoader(TensorDataset(inputs[:80], labels[:80]), batch_size=10)
    make_trainer(precision=precision, max_steps=0).fit(module, loader)  # rounds the weights
    before = weights_of(module).float()
    make_trainer(fed, max_epochs=1, precision=precision).fit(module, loader)
    return fed.clients_per_step_chosen, before, weights_of(module).float() - before


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sixteen_bits_stack_where_32_do(precision, name):
    """One step of each client: the mean of eight, apart by what rounding a product or a weight makes."""
    stacked, alone = (fit(precision, NETS[name], size) for size in (8, 1))
    assert stacked[0] == 8 and alone[0] == 1
    largest, spacing = float(alone[2].abs().max()), FINEST.get(precision, 2**-7)
    of_weights = spacing * alone[1].abs() if "true" in precision else 0.0
    assert largest > 0.0
    assert bool(((stacked[2] - alone[2]).abs() <= 8 * spacing * largest + of_weights).all())


class OwnDraws(Classifier):
    def __init__(self, *args):
        super().__init__(*args)
        self.draws = torch.Generator().manual_seed(0)

    def training_step(self, batch, batch_idx):
        scales = torch.rand(64, generator=self.draws)
        return nn.functional.cross_entropy(self.backbone(batch[0] * scales.to(batch[0])), batch[1])


DRAWS = torch.Generator().manual_seed(0)


class DrawsOfAGlobal(Classifier):
    def training_step(self, batch, batch_idx):
        scales = torch.rand(64, generator=DRAWS)
        return nn.functional.cross_entropy(self.backbone(batch[0] * scales.to(batch[0])), batch[1])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (OwnDraws, r"draws from a separate random generator \(draws\)"),
        (
            DrawsOfAGlobal,
            r"gradient of backbone\.weight differs between a stack and the client alone.*the largest entry",
        ),
    ],
)
def test_what_is_no_rounding_is_said_as_it_was_measured(kind, why, precision):
    with pytest.warns(UserWarning, match=f"one client at a time.*{why}"):
        found = fit(precision, lambda: nn.Linear(64, 10), 8, kind)
    assert found[0] == 1


def test_a_generator_that_nothing_draws_from_is_no_reason():
    class Holds(Classifier):
        def __init__(self, *args):
            super().__init__(*args)
            self.draws = torch.Generator().manual_seed(0)

    assert fit("bf16-mixed", NETS["perceptron"], 8, Holds)[0] == 8


@pytest.mark.parametrize(
    ("narrow", "wide", "stacks"),
    [(0.01, None, True), (0.1, 0.01, True), (0.1, 0.03, False), (0.1, "fails", True), (0.3, "fails", False)],
)
def test_thirty_two_bits_tell_rounding_from_the_rest(narrow, wide, stacks):
    def tried(in_32_bits):
        if in_32_bits and wide == "fails":
            raise TypeError("a step for 16 bits")
        return Rehearsal(None, 5, wide if in_32_bits else narrow, "net.weight", True)

    found = _judge_difference(tried)
    assert (found.obstacle is None) == stacks
    assert stacks or f"{narrow} of the largest" in found.obstacle


def test_in_32_bits_nothing_is_put_down_to_rounding():
    found = _judge_difference(
        lambda in_32_bits: Rehearsal(None, 5, 0.0 if in_32_bits else 0.03, "net.weight")
    )
    assert "net.weight differs between a stack and the client alone, by 0.03 of the" in found.obstacle


class Half(Classifier):
    """Written for 16 bits."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.backbone(batch[0].bfloat16()), batch[1])


def test_a_step_that_takes_16_bits_only_is_compared_in_these():
    assert fit("bf16-true", NETS["perceptron"], 8, Half)[0] == 8
