"""Server optimisers for `Federated(server_optimizer=...)`. Their gradient is minus the mean update.

Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2 (FedAdagrad, FedYogi,
FedAdam), and Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019 (FedAvgM).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


class FedAvgM(SGD):
    """Server optimiser with momentum.

    Args:
        params: Parameters of the global model, which `Federated` passes.
        lr: Learning rate of the server.
        momentum: Momentum, in [0, 1).

    Examples:
        >>> weights = torch.nn.Parameter(torch.zeros(2))
        >>> server = FedAvgM([weights], lr=1.0, momentum=0.9)
        >>> weights.grad = -torch.ones(2)  # minus the mean update
        >>> _ = server.step(), server.step()
        >>> weights.data
        tensor([2.9000, 2.9000])
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)


class _Adaptive(Optimizer):
    """Base of the adaptive server optimisers: m is a running mean of updates, and the subclass defines v.

    m <- beta1 m + (1 - beta1) update, and x <- x + lr m / (sqrt(v) + tau).

    Args:
        params: Parameters of the global model, which `Federated` passes.
        lr: Learning rate of the server, > 0.
        beta1: Decay of m, in [0, 1).
        beta2: Decay of v, in [0, 1). `FedAdagrad` has none.
        tau: Degree of adaptivity, > 0. v begins at tau^2.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        if not lr > 0.0 or not 0.0 <= beta1 < 1.0 or not 0.0 <= beta2 < 1.0 or not tau > 0.0:
            raise ValueError(
                f"expected lr > 0, beta1 and beta2 in [0, 1), tau > 0, got {lr}, {beta1}, {beta2}, {tau}"
            )
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau})

    @staticmethod
    @abstractmethod
    def second(v: Tensor, square: Tensor, beta2: float) -> Tensor:
        """Return the next v."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the parameters by the mean update."""
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                m = state.get("m", torch.zeros_like(x))
                v = state.get("v", torch.full_like(x, group["tau"] ** 2))
                # minus, because the gradient is minus the mean update
                m = group["beta1"] * m - (1.0 - group["beta1"]) * x.grad
                v = self.second(v, m.square(), group["beta2"])
                state["m"], state["v"] = m, v
                x += group["lr"] * m / (v.sqrt() + group["tau"])


class FedAdagrad(_Adaptive):
    """Adaptive server optimiser with v <- v + m^2.

    Args:
        params: Parameters of the global model, which `Federated` passes.
        lr: Learning rate of the server, > 0.
        beta1: Decay of m, in [0, 1).
        tau: Degree of adaptivity, > 0. v begins at tau^2.

    Examples:
        >>> weights = torch.nn.Parameter(torch.zeros(2))
        >>> server = FedAdagrad([weights], lr=0.1)
        >>> weights.grad = -torch.ones(2)  # minus the mean update
        >>> _ = server.step()
        >>> weights.data
        tensor([0.0999, 0.0999])
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3
    ) -> None:
        super().__init__(params, lr, beta1, 0.0, tau)

    @staticmethod
    def second(v: Tensor, square: Tensor, beta2: float) -> Tensor:
        """Return the sum of the squares."""
        return v + square


class FedYogi(_Adaptive):
    """Adaptive server optimiser with v <- v - (1 - beta2) m^2 sign(v - m^2).

    Examples:
        >>> weights = torch.nn.Parameter(torch.zeros(2))
        >>> server = FedYogi([weights], lr=0.1)
        >>> weights.grad = -torch.ones(2)  # minus the mean update
        >>> _ = server.step()
        >>> weights.data
        tensor([0.9050, 0.9050])
    """

    @staticmethod
    def second(v: Tensor, square: Tensor, beta2: float) -> Tensor:
        """Return v after a step to the square. The size of the step does not depend on v."""
        return v - (1.0 - beta2) * square * (v - square).sign()


class FedAdam(_Adaptive):
    """Adaptive server optimiser with v <- beta2 v + (1 - beta2) m^2, without bias correction.

    Examples:
        >>> weights = torch.nn.Parameter(torch.zeros(2))
        >>> server = FedAdam([weights], lr=0.1)
        >>> weights.grad = -torch.ones(2)  # minus the mean update
        >>> _ = server.step()
        >>> weights.data
        tensor([0.9050, 0.9050])
    """

    @staticmethod
    def second(v: Tensor, square: Tensor, beta2: float) -> Tensor:
        """Return a running mean of the squares."""
        return beta2 * v + (1.0 - beta2) * square
