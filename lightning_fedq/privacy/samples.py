"""What DP-SGD protects: one sample, whoever looks on. Beside the report on clients, never in place of it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fedq.privacy.page import format_epsilon

_VACUOUS = 20.0


@dataclass(frozen=True)
class SampleStatement:
    """The statement on the samples of the data set, or of the client, that has spent most.

    Args:
        data_sets: Data sets with an account of their own: the clients of a federation.
        steps: Steps paid for.
        epsilon: Spent, in nats.
        delta: At which.
        noise_multiplier: Std of the noise on the summed gradient / `max_grad_norm`.
        max_grad_norm: Norm to which every sample's gradient was clipped.
        sample_rate: Probability with which a sample was in a batch.
        secure: Were batches and noise drawn from the operating system?
    """

    data_sets: int
    steps: int
    epsilon: float
    delta: float
    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    secure: bool

    @property
    def verdict(self) -> str:
        """One or two words."""
        if not self.secure:
            return "no guarantee"
        return "vacuous" if self.epsilon > _VACUOUS else "usable"

    @property
    def line(self) -> str:
        """The statement in one line."""
        spent = f"epsilon {format_epsilon(self.epsilon)} over the run at delta {self.delta:g}"
        if not self.secure:
            spent = f"batches and noise come from a seed; with DPSGD(seed=None) it would be {spent}"
        return f"one sample (DP-SGD), against everybody who sees messages or models: {self.verdict}, {spent}"

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
                f"| {self.data_sets} | {self.steps} | {self.noise_multiplier:g} | {self.max_grad_norm:g} "
                f"| {self.sample_rate:.3g} |",
                "",
                "The figures are of the account that has spent most. Neighbours: a sample added or removed.",
                "Assumed: every sample belongs to one client; who takes part and how many samples a client",
                "holds are known. Not covered: what the module logs from training batches, and losses that",
                "look at other samples of the batch; and, where Federated has a seed and DPSGD has none, the",
                "steps of a process that was killed.",
                "",
            ]
        )
