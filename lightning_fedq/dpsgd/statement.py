"""DP-SGD's statement on samples, whoever looks on. Beside the report on clients, never in place of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_fedq.privacy.verdict import NO_GUARANTEE, format_epsilon, verdict


def describe_unit(rows: int) -> str:
    """Say what is counted: whose data the two worlds that are compared differ by.

    Args:
        rows: Rows of one person that are charged for.

    Example:
        >>> describe_unit(1)
        'counted: one row of the training data set, there or not; who stands in k rows pays for k'
    """
    who = "one row" if rows == 1 else f"a person in up to {rows} rows"
    return f"counted: {who} of the training data set, there or not; who stands in k rows pays for k"


@dataclass(frozen=True)
class SampleStatement:
    """The statement on the samples of the data set, or of the client, that has spent most.

    None stands for what is not known, as of a run of which only a checkpoint is left.

    Args:
        data_sets: Data sets with an account of their own: the clients of a federation.
        steps: Steps paid for.
        epsilon: Spent, in nats.
        delta: Delta of the guarantee.
        noise_multiplier: Std of the noise on the summed gradient / `max_grad_norm`.
        max_grad_norm: Norm to which every sample's gradient was clipped.
        sample_rate: Probability with which a sample was in a batch.
        secure: Were batches and noise drawn from the operating system? Where that is not known, nothing is
            guaranteed.
        remarks: Sentences on where the figures come from.
        rows: Rows of one person that are charged for.
    """

    data_sets: int
    steps: int
    epsilon: float
    delta: float
    noise_multiplier: float | None
    max_grad_norm: float | None
    sample_rate: float | None
    secure: bool | None
    remarks: tuple[str, ...] = ()
    rows: int = 1

    @classmethod
    def from_histories(
        cls,
        histories: Mapping[str, Sequence[tuple[float, float, int]]],
        delta: float,
        remarks: tuple[str, ...] = (),
        rows: int = 1,
    ) -> SampleStatement:
        """Say what histories of steps alone tell, without gradient norm and seed.

        Args:
            histories: Noise multiplier, sampling rate and steps, in turn, of every client.
            delta: Delta of the guarantee, in (0, 1).
            remarks: Remarks on the statement, a sentence each.
            rows: Rows of one person that are charged for.
        """
        from lightning_fedq.dpsgd.opacus import SampledGaussianAccountant  # imports Opacus: only here

        accountant = SampledGaussianAccountant(rows)
        worst: tuple[float, tuple[tuple[float, float, int], ...]] = (0.0, ())
        for history in {tuple((nm, q, n) for nm, q, n in own) for own in histories.values()}:
            accountant.history = list(history)
            worst = max(worst, (accountant.get_epsilon(delta), history))
        epsilon, history = worst
        noise_multiplier, sample_rate = history[-1][:2] if history else (None, None)
        steps = sum(steps for _, _, steps in history)
        known = len(histories), steps, epsilon, delta, noise_multiplier
        return cls(*known, None, sample_rate, None, remarks, rows)

    @property
    def verdict(self) -> str:
        """One or two words."""
        if not self.secure:
            return NO_GUARANTEE
        return verdict(self.epsilon)

    @property
    def line(self) -> str:
        """The statement in one line."""
        spent = f"epsilon {format_epsilon(self.epsilon)} over the run at delta {self.delta:g}"
        if self.secure is None:
            spent = f"whether batches and noise came from a seed is not known; if they did not: {spent}"
        elif not self.secure:
            spent = f"batches and noise come from a seed; with DPSGD(seed=None) it would be {spent}"
        return (
            f"one sample (DP-SGD), against everybody who sees messages or models: {self.verdict}, {spent} "
            f"({describe_unit(self.rows)})"
        )

    @property
    def about(self) -> str:
        """Origin of the figures, and what they count on."""
        return " ".join(
            (
                f"The figures are of the account that has spent most; {describe_unit(self.rows)}.",
                "Where a person's rows lie is not known: charged are all of them at the client where that",
                "costs most. Rows that a Subset or a ConcatDataset repeats are seen, copies are not.",
                "Assumed: who takes part and how many samples a client holds are known. Not covered: what",
                "the module logs from training batches, and samples that are mixed before training_step sees",
                "them; and, where Federated has a seed and DPSGD has none, the steps of a process that was",
                "killed.",
                *self.remarks,
            )
        )
