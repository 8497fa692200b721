"""Each attack finds what it must without noise; what can't be attacked is refused by name."""

import pytest
import torch
from torch import nn

from lightning_fedq.leakage import Matching
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary
from reproductions.leakage.inversion import DLG, Analytic, InvertingGradients, iDLG, infer_labels
from tests.leakage.settings import generator, linear, mlp, study

VIEW = Adversary.EAVESDROPPER


@pytest.mark.parametrize(
    "attack, model, batch, attempts, hits",
    [
        (Analytic(), linear(), 1, 10, 10),
        (Analytic(), mlp(nn.ReLU()), 1, 10, 10),
        (Matching(), mlp(), 1, 10, 10),
        (DLG(60), mlp(), 1, 3, 3),
        (iDLG(60), mlp(), 1, 3, 3),
        (iDLG(80), mlp(nn.Tanh()), 2, 2, 1),
        (InvertingGradients(150), mlp(), 1, 2, 2),
    ],
    ids=repr,
)
def test_an_unprotected_update_is_recovered(attack, model, batch, attempts, hits):
    """Deterministic for a fixed seed; searches may end in a local minimum, hence the 1 of 2."""
    found = study(attack=attack, model=model, batch_size=batch).run(FedAvg(), VIEW, attempts, generator())
    assert found.estimate.hits >= hits
    assert found.psnr > 15


def test_labels_of_a_batch_are_read_off_a_linear_layer():
    """The true classes have the most negative bias gradients: 20 of 20 single samples."""
    setting = study(labels_known=False)
    for row in range(20):
        problem = setting._problem(setting.gradients[row], setting.labels[row : row + 1])
        assert problem.labels is None
        assert infer_labels(problem).tolist() == [int(setting.labels[row])]


def test_idlg_without_labels():
    setting = study(attack=iDLG(60), model=mlp(), labels_known=False)
    assert setting.run(FedAvg(), VIEW, 3, generator()).estimate.hits == 3


def test_a_search_moves_under_any_noise():
    """Under any noise the search has to leave its start: else the noise would seem to protect."""
    setting = study(attack=iDLG(20), model=mlp())
    gradient = setting.gradients[0] + 40.0 * torch.randn(setting.gradients[0].shape, generator=generator(5))
    problem = setting._problem(gradient, setting.labels[:1])
    start = problem.low + 2.0 * torch.rand(problem.shape, generator=generator(6))
    assert (setting.attack.invert(problem, generator(6)) - start).abs().mean() > 0.05


def test_attacks_leave_no_trace():
    """No gradient in `.grad`, no global random number, no change of the weights."""
    model = mlp()
    before = [parameter.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    for attack in (DLG(3), InvertingGradients(3), Matching()):
        study(attack=attack, model=model).run(FedAvg(), VIEW, 1, generator())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        return slope * 2


class Once(nn.Module):
    def forward(self, inputs):
        return _Once.apply(inputs)


def test_refusals():
    with pytest.raises(ValueError, match="iterations must be >= 1"):
        iDLG(0)
