"""Study of one attack on the messages that a mechanism really sends: counts, errors and pictures.

In every attempt, a few clients draw samples from the candidates. They take one or a few steps of gradient
descent on them from the same model, and send their updates through the mechanism. The attacker decodes its
view and looks for the first sample of client 0. One step is the attacker's best case. Several steps, all on
the same batch, are simulated by the attacker.
"""

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lightning_fedq.functional.checks import check_at_least
from lightning_fedq.keys.randomness import Keys, SeededKeys
from lightning_fedq.leakage.batch_sampling import GradientMoments
from lightning_fedq.leakage.estimate import LeakageEstimate
from lightning_fedq.leakage.gradients import LocalSteps, Loss, batch_gradient, sample_gradients, trainable
from lightning_fedq.leakage.matching import Attack, OutOfTimeError, Problem
from lightning_fedq.leakage.views import Observation, observe
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext, group_clients


@dataclass(frozen=True)
class StudyResult:
    """Result of one attack on one adversary's view of one mechanism.

    Args:
        mechanism: Mechanism with its parameters, in words.
        adversary: Adversary whose view was attacked.
        attack: Attack with its parameters, in words.
        estimate: Counts of the attack, and the leakage that follows.
        psnr: Mean peak signal-to-noise ratio over the attempts, in dB.
        seconds: Time of all attempts together, in seconds.
        truth: `(kept, ...)` originals of the first attempts.
        found: `(kept, ...)` reconstructions of these originals.
    """

    mechanism: str
    adversary: Adversary
    attack: str
    estimate: LeakageEstimate
    psnr: float
    seconds: float
    truth: Tensor
    found: Tensor


@dataclass(frozen=True)
class Study:
    """Setting of an attack: model, data, and the definition of a hit.

    Args:
        model: Global model, in evaluation mode.
        loss: Mean loss of scores and labels.
        inputs: `(n, ...)` candidates. The prior is uniform on them.
        labels: `(n,)` labels of the candidates.
        learning_rate: Learning rate of the clients' steps, > 0.
        attack: Attack to run.
        batch_size: Number of samples of each client.
        cohort_size: Number of clients of a round.
        labels_known: Whether the attacker knows the labels of the samples.
        threshold: Largest squared error of a hit, as a fraction of the candidates' variance. The truth must
            also be the candidate nearest to the reconstruction.
        local_steps: Number of steps of each client on its batch, >= 1.

    Raises:
        ValueError: If a number is out of its range, or the attack can't work on this problem.
    """

    model: nn.Module
    loss: Loss
    inputs: Tensor
    labels: Tensor
    learning_rate: float
    attack: Attack
    batch_size: int = 1
    cohort_size: int = 2
    labels_known: bool = True
    threshold: float = 0.3
    local_steps: int = 1

    def __post_init__(self) -> None:
        needed = self.batch_size * self.cohort_size
        if self.batch_size < 1 or self.cohort_size < 1 or 2 * needed > len(self.inputs):
            raise ValueError(
                f"{self.cohort_size} clients with {self.batch_size} samples need at least {2 * needed} "
                f"candidates, got {len(self.inputs)}"
            )
        if not self.threshold > 0:
            raise ValueError(f"threshold must be > 0, got {self.threshold}")
        _ = self.steps
        if self.model.training:
            raise ValueError("the model must be in evaluation mode (model.eval()), got training mode")
        first = torch.arange(self.batch_size)
        self.attack.check(self._problem(self.gradients[first].mean(0), self.labels[first]))

    @cached_property
    def gradients(self) -> Tensor:
        """`(n, dim)` gradient of every candidate, summed over the steps of a client with no other data."""
        return sample_gradients(self.model, self.loss, self.inputs, self.labels, self.steps)

    @cached_property
    def gram(self) -> Tensor:
        """`(n, n)` inner products of the gradients."""
        return self.gradients @ self.gradients.T

    @property
    def steps(self) -> LocalSteps:
        """Local steps of a client on its batch."""
        return LocalSteps(self.learning_rate, self.local_steps)

    @property
    def segments(self) -> tuple[int, ...]:
        """Sizes of the model's parameters."""
        return tuple(parameter.numel() for parameter in trainable(self.model))

    @property
    def largest_norm(self) -> float:
        """Largest l2 norm of an update of one candidate, which is a clipping norm that clips nothing."""
        return self.learning_rate * float(self.gradients.norm(dim=1).max())

    @property
    def moments(self) -> GradientMoments:
        """Moments of the gradients, for a client that has all candidates."""
        return GradientMoments.from_gradients(self.gradients, len(self.gradients))

    def context(self, mechanism: Mechanism, round: int = 0) -> RoundContext:
        """Return a round of clients 0, 1, ... with the smallest range that holds every candidate's update."""
        groups = group_clients(mechanism, range(self.cohort_size))
        largest = self.learning_rate * self.gradients.abs().amax(0).double().cpu()
        parts = torch.split(largest, list(self.segments))
        radius = torch.stack([part.max() for part in parts]).clamp(min=1e-12)
        return RoundContext(round, groups, self.segments, torch.zeros_like(radius), radius)

    def run(
        self,
        mechanism: Mechanism,
        adversary: Adversary,
        attempts: int,
        generator: torch.Generator,
        *,
        keys: Keys | None = None,
        seconds: float = math.inf,
        confidence: float = 0.95,
        kept: int = 8,
    ) -> StudyResult:
        """Attack `attempts` rounds, or as many as fit into `seconds`.

        Args:
            mechanism: Mechanism that encodes the updates.
            adversary: Adversary whose view is attacked.
            attempts: Largest number of attempts, >= 1.
            generator: Random generator for the clients' samples and the starts of searches.
            keys: Source of the mechanism's randomness. None draws a seed from the generator.
            seconds: Time limit in seconds. An attempt that does not end within it is stopped and does not
                count.
            confidence: Confidence of the estimate's limits.
            kept: Number of originals and reconstructions to keep.

        Raises:
            ValueError: If `attempts` is below 1, no attempt ends in time, or there are too few candidates for
                the view.
        """
        check_at_least(1, attempts=attempts)
        if keys is None:
            keys = SeededKeys(int(torch.randint(2**62, (1,), generator=generator)))
        # searches have a separate generator, so that with one seed every attack gets the same samples
        starts = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        context = self.context(mechanism)
        variance = self.inputs.flatten(1).double().var(0, correction=0).mean().item()
        value_range = (self.inputs.max() - self.inputs.min()).item()
        start, hits, noises, truths, founds, rows = time.perf_counter(), 0, [], [], [], 1
        for attempt in range(attempts):
            if attempt and time.perf_counter() - start > seconds * attempt / (attempt + 1):
                break  # another attempt of average length would exceed the time limit
            chosen = torch.randperm(len(self.inputs), generator=generator)
            chosen = chosen[: self.batch_size * self.cohort_size].reshape(self.cohort_size, -1)
            updates = self._updates(chosen)
            seen = observe(mechanism, updates, replace(context, round=attempt), keys, adversary, 0)
            try:
                found = self._attack(seen, chosen, starts, start + seconds)
            except OutOfTimeError:
                break
            truth = self.inputs[chosen[0, 0]]
            rows = self.batch_size * (1 if seen.shares is not None else len(seen.clients))
            errors = mean_square_errors(found[None], self.inputs)[0]
            place = int(chosen[0, 0])
            hits += int(errors.argmin()) == place and errors[place].item() <= self.threshold * variance
            noises.append(psnr(found[None], truth[None], value_range).item())
            if attempt < kept:
                truths.append(truth)
                founds.append(found)
        if not noises:
            raise ValueError(
                f"one attempt takes longer than {seconds:.3g} s. Allow more time, or use Matching."
            )
        # a view with several samples gives a guess several chances, so there are effectively fewer candidates
        estimate = LeakageEstimate(hits, len(noises), max(len(self.inputs) // rows, 2), confidence)
        return StudyResult(
            repr(mechanism),
            adversary,
            repr(self.attack),
            estimate,
            sum(noises) / len(noises),
            time.perf_counter() - start,
            torch.stack(truths),
            torch.stack(founds),
        )

    def _updates(self, chosen: Tensor) -> Tensor:
        """Return `(clients, dim)` updates of clients with the candidates `chosen`, `(clients, batch)`."""
        if self.local_steps == 1 or self.batch_size == 1:
            return -self.learning_rate * self.gradients[chosen].mean(1)
        rows = [
            batch_gradient(self.model, self.loss, self.inputs[indices], self.labels[indices], self.steps)
            for indices in chosen
        ]
        return -self.learning_rate * torch.stack(rows)

    def _problem(self, gradient: Tensor, labels: Tensor) -> Problem:
        """Return the problem of an attacker that observes this gradient of samples with these labels."""
        return Problem(
            self.model,
            self.loss,
            gradient,
            (len(labels), *self.inputs.shape[1:]),
            labels if self.labels_known else None,
            self.inputs.min().item(),
            self.inputs.max().item(),
            self.inputs,
            self.labels,
            self.gradients,
            self.gram,
            self.steps,
        )

    def _attack(
        self, seen: Observation, chosen: Tensor, generator: torch.Generator, deadline: float
    ) -> Tensor:
        """Attack an observation, and return the reconstruction of client 0's first sample.

        If only a mean is observed, rows have no order, and the best order is used. If each message is
        observed, the attacker knows the client of a row, and only the order within a batch is free.
        """
        indices = chosen[list(seen.clients)].reshape(-1)
        gradient = (-seen.update / self.learning_rate).to(self.gradients)
        problem = replace(self._problem(gradient, self.labels[indices]), deadline=deadline)
        if seen.shares is not None:
            shares = (-seen.shares / self.learning_rate).to(self.gradients)
            problem = replace(problem, shares=shares, share_weight=seen.share_weight)
        found = self.attack.invert(problem, generator)
        if seen.shares is not None:
            first = seen.clients.index(0) * self.batch_size
            return in_order(found[first : first + self.batch_size], self.inputs[chosen[0]])[0]
        place = int((indices == chosen[0, 0]).nonzero()[0])
        return in_order(found, self.inputs[indices])[place]


def mean_square_errors(found: Tensor, truth: Tensor) -> Tensor:
    """Return `(a, b)` mean squared errors of all pairs of rows of `(a, ...)` and `(b, ...)`."""
    rows, others = found.flatten(1).double(), truth.flatten(1).double()
    return (rows[:, None] - others[None]).square().mean(2)


def in_order(found: Tensor, truth: Tensor) -> Tensor:
    """Reorder the rows of a reconstruction so that the total squared error is least.

    A batch has no order.
    """
    _, columns = linear_sum_assignment(mean_square_errors(truth, found).cpu().numpy())
    return found[torch.as_tensor(columns, device=found.device)]


def psnr(found: Tensor, truth: Tensor, value_range: float) -> Tensor:
    """Return the peak signal-to-noise ratio of each row, `(n,)` in dB, at most 100.

    Args:
        found: `(n, ...)` reconstructions.
        truth: `(n, ...)` originals.
        value_range: Largest value minus smallest value of an input.
    """
    error = (found - truth).flatten(1).double().square().mean(1)
    return (10.0 * torch.log10(value_range**2 / error.clamp(min=1e-30))).clamp(max=100.0)
