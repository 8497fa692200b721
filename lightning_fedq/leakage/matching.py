"""An attacker with a list of candidates, and what every attack on a gradient is given.

`Matching` does not reconstruct: it asks which of its candidates explains the gradient best, so it needs a
list, and finds the truth under far more noise than attacks that search inputs. Those of the literature (DLG,
iDLG, Inverting Gradients) are in the repository, `reproductions/leakage/inversion.py`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fedq.leakage.gradients import LocalSteps, Loss


class OutOfTimeError(RuntimeError):
    """An attempt was given up because its time was over. It says nothing about the leakage."""


@dataclass(frozen=True)
class Problem:
    """Gradient inversion problem: all that the attacker holds.

    Args:
        model: Architecture and weights that the client started from, in evaluation mode.
        loss: Mean loss of scores and labels; it must take soft labels for `DLG`.
        gradient: `(dim,)` observed gradient of the mean loss, summed over the local steps.
        shape: Shape of the batch of inputs, `(batch, ...)`; of several clients one after the other.
        labels: `(batch,)`, or None where the attacker does not know them.
        low: Smallest value of an input.
        high: Largest.
        candidates: `(n, ...)` inputs, the truth among them, with
        candidate_labels: `(n,)` and
        candidate_gradients: `(n, dim)`, for `Matching`, and their
        gram: `(n, n)` inner products.
        steps: What the client did with its batch.
        shares: `(clients, dim)` each client's own observed gradient, where there are several; with
        share_weight: the weight of their squared deviations from the mean, 1 being that of the mean.
        deadline: `time.perf_counter()` at which a search gives up.
    """

    model: nn.Module
    loss: Loss
    gradient: Tensor
    shape: tuple[int, ...]
    labels: Tensor | None
    low: float
    high: float
    candidates: Tensor
    candidate_labels: Tensor
    candidate_gradients: Tensor
    gram: Tensor
    steps: LocalSteps
    shares: Tensor | None = None
    share_weight: float = 1.0
    deadline: float = math.inf

    def check_time(self) -> None:
        """Give up when the time is over.

        Raises:
            OutOfTimeError: If it is.
        """
        if time.perf_counter() > self.deadline:
            raise OutOfTimeError("an attempt takes longer than its time")


class Attack(ABC):
    """Children are frozen dataclasses of settings."""

    @abstractmethod
    def invert(self, problem: Problem, generator: torch.Generator) -> Tensor:
        """Return the inputs that the attacker believes in, `problem.shape`."""

    def check(self, problem: Problem) -> None:  # noqa: B027 (nothing to refuse unless a child says so)
        """Refuse what can't be attacked, before any attempt.

        Raises:
            ValueError: With the limit, the cost or the layer.
        """


@dataclass(frozen=True)
class Matching(Attack):
    """The candidates whose mean gradient has the largest cosine with the observed one. First gradients only.

    Several samples are picked one by one, then each is exchanged for the best given the others. Where the
    messages of several clients are seen, their samples are chosen together, by the squared distance to the
    mean and to each of them: the likelihood of Gaussian errors of the variances that the mechanism declares.

    Args:
        passes: How often each is exchanged; one sample needs none.
    """

    passes: int = 3

    def invert(self, problem: Problem, generator: torch.Generator) -> Tensor:
        gradients, observed = problem.candidate_gradients, problem.gradient.to(problem.candidate_gradients)
        if problem.shares is not None:
            return problem.candidates[_match_shares(problem, problem.shares.to(gradients), self.passes)]
        inner, gram = gradients @ observed, problem.gram
        chosen: list[int] = []

        def best() -> int:
            """The candidate that, added to the chosen ones, points most nearly where the observation does."""
            squares = gram.diag() + 2.0 * gram[:, chosen].sum(1) + gram[chosen][:, chosen].sum()
            cosine = (inner + inner[chosen].sum()) / squares.clamp(min=1e-30).sqrt()
            cosine[chosen] = -math.inf
            return int(cosine.argmax())

        for _ in range(problem.shape[0]):
            chosen.append(best())
        for _ in range(self.passes * problem.shape[0] if problem.shape[0] > 1 else 0):
            chosen.pop(0)
            chosen.append(best())
        return problem.candidates[chosen]


def _match_shares(problem: Problem, shares: Tensor, passes: int) -> list[int]:
    """Candidates of each client, one client after the other, nearest to the mean and to all shares.

    With a_k the mean gradient of client k's candidates it minimises |m - mean a|^2 + w sum_k |d_k - (a_k -
    mean a)|^2, in one candidate at a time given the others. It starts from every candidate in turn for the
    first sample, so that two clients with one sample each are searched in full.
    """
    gradients, gram = problem.candidate_gradients, problem.gram
    clients, per, w = len(shares), problem.shape[0] // len(shares), problem.share_weight
    mean, away = problem.gradient.to(gradients), shares - shares.mean(0)
    # sum_k of a_k: a quadratic form with the matrix (1 - w k) / k^2 ones + w identity in the clients
    form = torch.full((clients, clients), 1.0 / clients**2 - w / clients, dtype=torch.float64)
    form += w * torch.eye(clients, dtype=torch.float64)
    toward = (gradients @ (mean / clients + w * away).T).double() / per  # (n, clients)
    inner, count = gram.double() / per**2, clients * per
    owner = [slot // per for slot in range(count)]

    def place(chosen: list[int], slot: int) -> int:
        """The best candidate for one slot, the others as they are. -1 marks those that are empty."""
        own = owner[slot]
        cost = form[own, own] * inner.diag() - 2.0 * toward[:, own]
        for other, candidate in enumerate(chosen):
            if other != slot and candidate >= 0:
                cost = cost + 2.0 * form[own, owner[other]] * inner[:, candidate]
        return int(cost.argmin())

    def total(chosen: list[int]) -> float:
        weights = form[owner][:, owner]
        pulled = sum(float(toward[c, k]) for c, k in zip(chosen, owner, strict=True))
        return float((weights * inner[chosen][:, chosen]).sum()) - 2.0 * pulled

    best: list[int] = []
    for first in range(len(gradients)):
        chosen = [first] + [-1] * (count - 1)
        for slot in range(1, count):
            chosen[slot] = place(chosen, slot)
        for _ in range(passes if count > 2 else 0):
            for slot in range(count):
                chosen[slot] = place(chosen, slot)
        if not best or total(chosen) < total(best):
            best = chosen
    return best
