"""Attack by matching gradients with a list of candidates, and the interface of attacks on gradients.

`Matching` does not reconstruct inputs. It returns the candidates that explain the gradient best, so it needs
a list of candidates. It finds the truth under far more noise than attacks that search over inputs. Those of
the literature (DLG, iDLG, Inverting Gradients) are in the repository, in
`reproductions/leakage/inversion.py`.
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
    """Error of an attempt that was stopped at its deadline. It says nothing about the leakage."""


@dataclass(frozen=True)
class Problem:
    """Gradient inversion problem: everything that the attacker knows.

    Args:
        model: Architecture and weights from which the client started, in evaluation mode.
        loss: Mean loss of scores and labels. It must take soft labels for `DLG`.
        gradient: `(dim,)` observed gradient of the mean loss, summed over the local steps.
        shape: Shape of the batch of inputs, `(batch, ...)`. Batches of several clients follow one another.
        labels: `(batch,)` labels, or None where the attacker does not know them.
        low: Smallest value of an input.
        high: Largest value of an input.
        candidates: `(n, ...)` inputs, the truth among them.
        candidate_labels: `(n,)` labels of the candidates.
        candidate_gradients: `(n, dim)` gradients of the candidates, for `Matching`.
        gram: `(n, n)` inner products of `candidate_gradients`.
        steps: Local steps of the client on its batch.
        shares: `(clients, dim)` observed gradient of each client, where there are several.
        share_weight: Weight of the squared deviations of `shares` from their mean, where the mean has weight
            1.
        deadline: Value of `time.perf_counter()` at which a search stops.
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
        """Check that the deadline has not passed.

        Raises:
            OutOfTimeError: If it has passed.
        """
        if time.perf_counter() > self.deadline:
            raise OutOfTimeError("an attempt takes longer than its time limit")


class Attack(ABC):
    """Attack on an observed gradient. Subclasses are frozen dataclasses of settings."""

    @abstractmethod
    def invert(self, problem: Problem, generator: torch.Generator) -> Tensor:
        """Return the inputs that the attacker believes in, of shape `problem.shape`."""

    def check(self, problem: Problem) -> None:  # noqa: B027 (by default, every problem is accepted)
        """Check that the attack can handle the problem, before any attempt.

        Raises:
            ValueError: If it can't, with the limit, the cost or the layer.
        """


@dataclass(frozen=True)
class Matching(Attack):
    """Attack that returns the candidates whose mean gradient has the largest cosine with the observed one.

    It uses first-order gradients only. Several samples are picked one by one, then each is replaced by the
    best candidate given the others. If messages of several clients are observed, their samples are chosen
    jointly. The criterion is then the squared distance to the mean and to each message, which is the
    likelihood of Gaussian errors with the variances that the mechanism declares.

    Args:
        passes: Number of times that each sample is replaced. One sample needs none.
    """

    passes: int = 3

    def invert(self, problem: Problem, generator: torch.Generator) -> Tensor:
        gradients, observed = problem.candidate_gradients, problem.gradient.to(problem.candidate_gradients)
        if problem.shares is not None:
            return problem.candidates[_match_shares(problem, problem.shares.to(gradients), self.passes)]
        inner, gram = gradients @ observed, problem.gram
        chosen: list[int] = []

        def best() -> int:
            """Return the candidate that, added to the chosen ones, has the largest cosine with the
            observation.
            """
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
    """Return the candidates of each client that are nearest to the mean and to all shares.

    They are in the order of the clients.

    Let a_k be the mean gradient of client k's candidates, m the observed mean, d_k the deviation of client
    k's share from the shares' mean, and w the weight. The function minimises |m - mean a|^2 + w sum_k |d_k -
    (a_k - mean a)|^2. One candidate at a time is replaced by the best one, given the others. Every candidate
    is tried as the start of the first sample, so two clients with one sample each are searched exhaustively.
    """
    gradients, weight = problem.candidate_gradients, problem.share_weight
    clients, num_slots = len(shares), problem.shape[0]
    batch_size = num_slots // clients
    owner = [slot // batch_size for slot in range(num_slots)]
    # the objective is a quadratic form in a_1, ..., a_k with the matrix (1 - w k) / k^2 ones + w identity
    form = torch.full((clients, clients), 1.0 / clients**2 - weight / clients, dtype=torch.float64)
    form += weight * torch.eye(clients, dtype=torch.float64)
    # and its linear part; a candidate's gradient counts as one of a batch
    deviations = shares - shares.mean(0)
    pull = problem.gradient.to(gradients) / clients + weight * deviations
    toward = (gradients @ pull.T).double() / batch_size  # (n, clients)
    inner = problem.gram.double() / batch_size**2

    def place(chosen: list[int], slot: int) -> int:
        """Return the best candidate for one slot, given the other slots. A slot of -1 is empty."""
        client = owner[slot]
        cost = form[client, client] * inner.diag() - 2.0 * toward[:, client]
        for other, candidate in enumerate(chosen):
            if other != slot and candidate >= 0:
                cost = cost + 2.0 * form[client, owner[other]] * inner[:, candidate]
        return int(cost.argmin())

    def total(chosen: list[int]) -> float:
        """Return the objective of some candidates, up to a constant."""
        weights = form[owner][:, owner]
        pulled = sum(float(toward[c, k]) for c, k in zip(chosen, owner, strict=True))
        return float((weights * inner[chosen][:, chosen]).sum()) - 2.0 * pulled

    best: list[int] = []
    for first in range(len(gradients)):
        chosen = [first] + [-1] * (num_slots - 1)
        for slot in range(1, num_slots):
            chosen[slot] = place(chosen, slot)
        for _ in range(passes if num_slots > 2 else 0):
            for slot in range(num_slots):
                chosen[slot] = place(chosen, slot)
        if not best or total(chosen) < total(best):
            best = chosen
    return best
