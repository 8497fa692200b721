"""Optimisers as people publish them, which keep more than their state."""

from typing import Any

import torch
from torch.optim import SGD, Optimizer


class SAM(Optimizer):
    """Sharpness-aware minimisation as it is published: the momentum is the base optimiser's."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        loss = torch.enable_grad()(closure)()
        old = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(0.05 * p.grad)
        torch.enable_grad()(closure)()
        for p, before in zip(parameters, old, strict=True):
            p.copy_(before)
        self.base_optimizer.step()
        return loss


class Lookahead(SGD):
    """Slow weights in an attribute."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.calls = 0

    def step(self, closure=None):
        loss = super().step(closure)
        self.calls += 1
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=False):
            slow.data.lerp_(p.detach(), 0.5)
        return loss


class Estimates(SGD):
    """An estimate from gradients in the parameter groups, as in D-Adaptation and Prodigy, and one beside."""

    rates = False

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.param_groups[0]["d"], self.param_groups[0]["tensor"] = 0.0, torch.zeros(())
        self.most = 0.0

    def step(self, closure=None):
        loss, group = super().step(closure), self.param_groups[0]
        norm = float(sum(p.grad.square().sum() for p in group["params"]))
        self.most = group["d"] = max(group["d"], norm)
        group["tensor"].fill_(norm)
        group["late"] = [torch.full((), norm)]
        if self.rates:
            group["lr"] = 0.1 / (1.0 + norm)
        return loss
