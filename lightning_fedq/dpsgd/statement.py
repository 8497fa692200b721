"""DP-SGD's statement on samples, whoever looks on. Beside the report on clients, never in place of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_fedq.privacy.verdict import NO_GUARANTEE, format_epsilon, verdict


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
        neighbours: What differs between the two worlds that are compared.
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
    neighbours: str = "one sample is added or removed"

    @classmethod
    def of_histories(
        cls,
        histories: Mapping[str, Sequence[tuple[float, float, int]]],
        delta: float,
        remarks: tuple[str, ...] = (),
    ) -> SampleStatement:
        """Say what histories of steps alone tell, without gradient norm and seed.

        Args:
            histories: Noise multiplier, sampling rate and steps, in turn, of every client.
            delta: Delta of the guarantee, in (0, 1).
            remarks: Remarks on the statement, a sentence each.
        """
        from lightning_fedq.dpsgd.opacus import SampledGaussianAccountant  # imports Opacus: only here

        accountant = SampledGaussianAccountant()
        worst: tuple[float, tuple[tuple[float, float, int], ...]] = (0.0, ())
        for history in {tuple((nm, q, n) for nm, q, n in own) for own in histories.values()}:
            accountant.history = list(history)
            worst = max(worst, (accountant.get_epsilon(delta), history))
        epsilon, history = worst
        noise_multiplier, sample_rate = history[-1][:2] if history else (None, None)
        steps = sum(steps for _, _, steps in history)
        return cls(len(histories), steps, epsilon, delta, noise_multiplier, None, sample_rate, None, remarks)

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
            f"({self.neighbours})"
        )

    def to_markdown(self) -> str:
        """A section of its own."""
        return "\n".join(
            [
                "",
                "## One sample of a client's data",
                "",
                f"{self.line[0].upper()}{self.line[1:]}.",
                "",
                "| accounts | steps | noise multiplier | gradient norm | sampling rate |",
                "| --- | --- | --- | --- | --- |",
                f"| {self.data_sets} | {self.steps} | {_figure(self.noise_multiplier, 'g')} "
                f"| {_figure(self.max_grad_norm, 'g')} | {_figure(self.sample_rate, '.3g')} |",
                "",
                f"The figures are of the account that has spent most. Neighbours: {self.neighbours}.",
                "Assumed: every sample belongs to one client; who takes part and how many samples a client",
                "holds are known. Not covered: what the module logs from training batches, and samples that",
                "are mixed before training_step sees them; and, where Federated has a seed and DPSGD has",
                "none, the steps of a process that was killed.",
                *self.remarks,
                "",
            ]
        )


def _figure(value: float | None, form: str) -> str:
    return "not known" if value is None else format(value, form)
