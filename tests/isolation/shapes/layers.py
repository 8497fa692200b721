"""Layers, parameters and buffers."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.isolation.worlds import Shape


class AttributeOfParameter(Shape):
    def begin(self):
        self.net.weight.mean_loss = 1.0

    def scaled(self, loss):
        weight = self.net.weight
        weight.mean_loss = 0.5 * (getattr(weight, "mean_loss", 1.0) + loss.item())
        return loss / weight.mean_loss


class KeepsScale(nn.Module):
    """A parametrisation with a running number."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(scale=1.0)

    def forward(self, weight):
        return weight / self.kept.scale


class Parametrised(Shape):
    def begin(self):
        parametrize.register_parametrization(self.net, "weight", KeepsScale())

    def scaled(self, loss):
        kept = self.net.parametrizations.weight[0].kept
        kept.scale = 0.5 * (kept.scale + 1 + loss.item())
        return loss


class TiedWeights(Shape):
    """One parameter under two names, and an attribute that both find."""

    def begin(self):
        self.other = nn.Linear(3, 1)
        self.other.weight = self.net.weight
        self.other.weight.kept = SimpleNamespace(mean=1.0)

    def scaled(self, loss):
        kept = self.net.weight.kept
        kept.mean = 0.5 * (kept.mean + loss.item())
        return loss / kept.mean + 0 * self.other.bias.sum()


class Buffer(Shape):
    """Not in the state dict."""

    def begin(self):
        self.register_buffer("mean", torch.ones(()), persistent=False)

    def scaled(self, loss):
        self.mean = 0.5 * (self.mean + loss.detach())
        return loss / self.mean


class BatchNorm(Shape):
    """Its running statistics divide the loss."""

    def begin(self):
        self.norm = nn.BatchNorm1d(3)

    def loss(self, batch):
        error = nn.functional.mse_loss(self.net(self.norm(batch[0])), batch[1])
        return error / (1 + self.norm.running_mean.detach().abs().sum())


class Teacher(Shape):
    """A frozen layer follows the trained one, as in BYOL, MoCo and mean teachers."""

    def begin(self):
        self.teacher = nn.Linear(3, 1).requires_grad_(False)

    def loss(self, batch):
        with torch.no_grad():
            for own, followed in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.lerp_(followed, 0.5)
        return super().loss(batch) + nn.functional.mse_loss(self.net(batch[0]), self.teacher(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


class TeacherInList(Shape):
    """The same, hidden from the module."""

    def begin(self):
        self.hidden = [nn.Linear(3, 1).requires_grad_(False)]

    def loss(self, batch):
        (teacher,) = self.hidden
        with torch.no_grad():
            for own, followed in zip(teacher.parameters(), self.net.parameters(), strict=True):
                own.copy_(0.5 * (own + followed))
        return super().loss(batch) + nn.functional.mse_loss(self.net(batch[0]), teacher(batch[0]))


class FrozenByData(Shape):
    """A frozen parameter is written through `.data`."""

    def begin(self):
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def scaled(self, loss):
        self.scale.data = 0.5 * (self.scale.data + loss.item())
        return loss / self.scale


class ParameterAssignedAnew(Shape):
    """As weight clipping is often written. The optimiser goes on with the old one."""

    refused = r"\bnet\b"

    def on_train_batch_end(self, *args):
        self.net.weight = nn.Parameter(self.net.weight.detach().clamp(-0.3, 0.3))


class SubmoduleAdded(Shape):
    """Keeps a number in a layer that training makes."""

    def scaled(self, loss):
        if not hasattr(self, "extra"):
            self.extra = nn.Flatten()
            self.extra.mean = 1.0
        extra = self.extra
        extra.mean = 0.5 * (extra.mean + loss.item())
        return loss / extra.mean


class Gradients(Shape):
    """Gradients are kept on purpose: their running mean is what steps."""

    def on_after_backward(self):
        for parameter in self.parameters():
            last = getattr(parameter, "last", None)
            parameter.last = parameter.grad.clone()
            if last is not None:
                parameter.grad.add_(last)
