"""Sample-level privacy statement of DP-SGD. It is reported next to the client-level privacy report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_fedq.privacy.assumptions import SECRET_KEYS
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, format_epsilon, verdict


def describe_unit(rows: int) -> str:
    """Describe the adjacency: the data that are added or removed between two neighbouring data sets.

    Args:
        rows: Rows of one person that the account charges for, >= 1.

    Examples:
        >>> describe_unit(1)
        'unit: one row of the training data set, added or removed (a person in k rows: rows_per_person=k)'
    """
    unit = "one row" if rows == 1 else f"a person in up to {rows} rows"
    return f"unit: {unit} of the training data set, added or removed (a person in k rows: rows_per_person=k)"


@dataclass(frozen=True)
class SampleStatement:
    """Privacy statement on the samples of the client, or data set, with the largest epsilon.

    A value of None is unknown, for instance in a report that is made from a checkpoint.

    Args:
        data_sets: Number of accounts: one for each client of a federation, otherwise 1.
        steps: Number of steps that the account has charged.
        epsilon: Epsilon spent at `delta`, in nats.
        delta: Delta of the guarantee, in (0, 1).
        noise_multiplier: Standard deviation of the noise on the summed gradient, divided by `max_grad_norm`.
        max_grad_norm: L2 norm to which each per-sample gradient was clipped.
        sample_rate: Probability with which a step draws a sample.
        secure: Whether batches and noise were drawn from the operating system, rather than from a seed. If
            this is unknown (None), nothing is guaranteed.
        remarks: Sentences on the origin of the figures.
        rows: Rows of one person that the account charges for, >= 1.
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
        """Build a statement from histories of charges, without knowing the gradient norm and the seed.

        Args:
            histories: Charges of each client: noise multiplier, sampling rate and steps of each.
            delta: Delta of the guarantee, in (0, 1).
            remarks: Remarks on the statement, a sentence each.
            rows: Rows of one person that the accounts charge for, >= 1.
        """
        from lightning_fedq.dpsgd.accountant import SampledGaussianAccountant  # imports Opacus: only here

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
        """Verdict on the epsilon in one or two words. It is "no guarantee" unless `secure`."""
        if not self.secure:
            return NO_GUARANTEE
        return verdict(self.epsilon)

    @property
    def is_useful(self) -> bool:
        """Whether the epsilon excludes anything. False unless `secure`."""
        return self.verdict not in (NO_GUARANTEE, VACUOUS)

    @property
    def promise(self) -> str:
        """The guarantee in one sentence, for a statement that `is_useful`."""
        who = "Each row" if self.rows == 1 else f"Each person in up to {self.rows} rows"
        return (
            f"{who} of a client's training data has epsilon {format_epsilon(self.epsilon)} at delta "
            f"{self.delta:g} over the run ({self.verdict}), against anybody who sees messages or models"
        )

    @property
    def line(self) -> str:
        """The statement in one line."""
        spent = f"epsilon {format_epsilon(self.epsilon)} over the run at delta {self.delta:g}"
        if self.secure is None:
            spent = f"{spent} if batches and noise did not come from a seed, which is unknown"
        elif not self.secure:
            spent = f"batches and noise come from a seed (DPSGD(seed=None) would have {spent})"
        return (
            "one sample (DP-SGD), against any adversary who sees messages or models: "
            f"{self.verdict}, {spent} ({describe_unit(self.rows)})"
        )

    @property
    def assumptions(self) -> tuple[tuple[str, str], ...]:
        """Assumptions of the guarantee and who sees to each."""
        person = "is one row" if self.rows == 1 else f"has at most {self.rows} rows"
        return (
            ("secret batches and noise", SECRET_KEYS.who),
            (f"each person {person} of all clients' data", "you, with rows_per_person"),
            ("nothing else depends on training batches", "library; you: metrics and code of the module"),
        )

    @property
    def about(self) -> str:
        """Origin, assumptions and limits of the figures, in sentences."""
        return " ".join(
            (
                f"The figures are of the account with the largest epsilon ({describe_unit(self.rows)}).",
                "All rows of a person are charged at the client where they cost most.",
                "Rows that indices repeat are refused, and equal rows also, unless count_equal_rows is",
                "False. Short or coarse rows of a TensorDataset count as different rows: fewer than 32 whole",
                "numbers, or only -1, 0 and 1. So do samples that can't be pickled.",
                "The participating clients and their numbers of samples count as public.",
                "Not covered: metrics that the module logs from training batches, and samples that are mixed",
                "before training_step. If Federated has a seed and DPSGD has none, steps of a killed process",
                "are not covered either.",
                *self.remarks,
            )
        )
