"""One attack, many attempts, on what a mechanism really sends: counts, errors and pictures.

In every attempt a few clients draw samples from the candidates, take one or a few steps of gradient descent
on them from the same model, and send their updates through the mechanism; the attacker decodes its view and
looks for the first sample of client 0. One step is the attacker's best case; several, all on the same batch,
it simulates.
"""

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_fedq.keys.randomness import Keys, SeededKeys
from lightning_fedq.leakage.batch_sampling import GradientMoments
from lightning_fedq.leakage.estimate import LeakageEstimate
from lightning_fedq.leakage.gradients import LocalSteps, Loss, batch_gradient, sample_gradients, trainable
from lightning_fedq.leakage.likeness import in_order, mean_square_errors, psnr
from lightning_fedq.leakage.matching import Attack, OutOfTimeError, Problem
from lightning_fedq.leakage.views import Observation, observe
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext


@dataclass(frozen=True)
class StudyResult:
    """Result of one attack on one view of one mechanism.

    Args:
        mechanism: Its parameters, in words.
        attack: Its parameters, in words.
        psnr: Mean over the attempts, in dB.
        seconds: Time of all attempts together.
        truth: `(kept, ...)` originals of the first attempts.
        found: Their reconstructions.
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
    """The setting of an attack: model, data, and what counts as a hit.

    Args:
        model: The global model, in evaluation mode.
        loss: Mean loss of scores and labels.
        inputs: `(n, ...)` candidates; the prior is uniform on them.
        labels: `(n,)`.
        learning_rate: Learning rate of the clients' steps, > 0.
        batch_size: Samples of each client.
        cohort_size: Clients of a round.
        labels_known: Does the attacker know the labels of the samples?
        threshold: A reconstruction counts if its squared error is below this share of the candidates'
            variance, and the truth is the candidate nearest to it.
        local_steps: Steps of each client on its batch, >= 1.

    Raises:
        ValueError: If a number is out of its range, or the attack can't work here.
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
                f"{self.cohort_size} clients with {self.batch_size} samples each need at least {2 * needed} "
                f"candidates, got {len(self.inputs)}"
            )
        if not self.threshold > 0:
            raise ValueError(f"threshold must be > 0, got {self.threshold}")
        _ = self.steps
        if self.model.training:
            raise ValueError("the model must be in evaluation mode (model.eval()): dropout hides gradients")
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
        """Largest l2 norm of an update: a clipping norm that clips nothing."""
        return self.learning_rate * float(self.gradients.norm(dim=1).max())

    @property
    def moments(self) -> GradientMoments:
        """Moments of the gradients, for a client that holds all candidates."""
        return GradientMoments.from_gradients(self.gradients, len(self.gradients))

    def context(self, mechanism: Mechanism, round: int = 0) -> RoundContext:
        """A round of clients 0, 1, ... whose range just holds every candidate's update."""
        groups, start = [], 0
        for size in mechanism.group_sizes(self.cohort_size):
            groups.append(tuple(range(start, start + size)))
            start += size
        largest = self.learning_rate * self.gradients.abs().amax(0).double().cpu()
        radius = torch.stack([part.max() for part in torch.split(largest, list(self.segments))]).clamp(
            min=1e-12
        )
        return RoundContext(round, tuple(groups), self.segments, torch.zeros_like(radius), radius)

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
            attempts: >= 1.
            generator: Chooses the clients' samples and the searches' starts.
            keys: Source of the mechanism's coins; None draws a seed from the generator.
            seconds: Time limit. An attempt that does not end within it is given up and does not count.
            confidence: Confidence of the estimate's limits.
            kept: How many originals and reconstructions to keep.

        Raises:
            ValueError: If attempts is not >= 1, not one attempt ends in time, or there are too few
                candidates for the view.
        """
        if attempts < 1:
            raise ValueError(f"attempts must be >= 1, got {attempts}")
        if keys is None:
            keys = SeededKeys(int(torch.randint(2**62, (1,), generator=generator)))
        # a generator of its own for the searches: one seed then gives every attack the same samples
        starts = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        context = self.context(mechanism)
        variance = self.inputs.flatten(1).double().var(0, correction=0).mean().item()
        start, hits, noises, truths, founds, rows = time.perf_counter(), 0, [], [], [], 1
        for attempt in range(attempts):
            if attempt and time.perf_counter() - start > seconds * attempt / (attempt + 1):
                break  # one more of average length would not fit
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
            noises.append(psnr(found[None], truth[None], self._range).item())
            if attempt < kept:
                truths.append(truth)
                founds.append(found)
        if not noises:
            raise ValueError(f"one attempt takes longer than {seconds:.3g} s; allow more, or use Matching")
        # several samples in one view: a guess finds the truth that much more often
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

    @property
    def _range(self) -> float:
        return (self.inputs.max() - self.inputs.min()).item()

    def _updates(self, chosen: Tensor) -> Tensor:
        """`(clients, dim)` updates of clients that hold the candidates `chosen`, `(clients, batch)`."""
        if self.local_steps == 1 or self.batch_size == 1:
            return -self.learning_rate * self.gradients[chosen].mean(1)
        rows = [
            batch_gradient(self.model, self.loss, self.inputs[own], self.labels[own], self.steps)
            for own in chosen
        ]
        return -self.learning_rate * torch.stack(rows)

    def _problem(self, gradient: Tensor, labels: Tensor) -> Problem:
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
        """Invert what is seen. Of the rows in their best order return that of client 0's first sample.

        Where each message is seen, the attacker says whose a row is; within a batch there is no order.
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
