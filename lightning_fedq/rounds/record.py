"""Record of one round: the numbers that are logged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

SIMULATED = ("clip_rate", "mse", "snr_db", "cosine", "homogeneity", "arrived", "num_non_finite")
"""Numbers that only a simulation knows. Their names in logs and tables begin with `sim_`."""


def metric_name(name: str) -> str:
    """Return the name of a record's number in logs and tables."""
    return f"sim_{name}" if name in SIMULATED else name


@dataclass
class RoundRecord:
    """Numbers of one round.

    Some numbers are diagnostics that only a simulation can compute, and they are not private: `clip_rate`,
    `mse`, `snr_db`, `cosine`, `homogeneity`, `arrived` and `non_finite_clients`.

    Attributes:
        round: Round number from 0, as in the streams. `metrics` and all outputs for people count from 1.
        cohort_size: Clients of the cohort.
        num_received: Clients whose answers arrived. NaN where this number is secret.
        num_dropped: Clients of the cohort that the plan drops.
        uplink_bits: Bits that clients sent. NaN where the cohort size is secret.
        downlink_bits: Bits that the server sent to clients. NaN where the cohort size is secret.
        setup_bits: Bits of key exchange, counted in the first round.
        clip_rate: Share of all update coordinates that encoding clipped.
        radius_min: Smallest quantisation radius of a segment in this round.
        radius_max: Largest quantisation radius of a segment in this round.
        update_norm: l2 norm of the mean update that was applied.
        mse: Mean squared error of the decoded mean against the exact mean of the updates. The exact mean
            contains the updates of Byzantine clients as they reach the encoder.
        snr_db: Signal-to-noise ratio of the decoded mean in dB.
        cosine: Cosine between the decoded mean and the exact mean.
        homogeneity: |mean update|^2 over the mean of |update|^2: the share of the updates' energy along their
            mean.
        arrived: Share of the clipped updates that arrived, over the rounds since the run began or was
            resumed (`rounds.engine`).
        protocol_bits: Bits of `uplink_bits` that are keys, shares and confirmations of secure aggregation.
            The rest are updates.
        non_finite_clients: Clients whose update was not finite and counted as zero.
        aborted: Reason why the round did not change the model. Empty otherwise.
    """

    round: int
    cohort_size: int
    num_received: float
    num_dropped: int
    uplink_bits: float
    downlink_bits: float
    setup_bits: int
    clip_rate: float
    radius_min: float
    radius_max: float
    update_norm: float
    mse: float = math.nan
    snr_db: float = math.nan
    cosine: float = math.nan
    homogeneity: float = math.nan
    arrived: float = field(default=math.nan, compare=False, repr=False)  # begins anew at a resumption
    protocol_bits: int = 0
    non_finite_clients: tuple[int, ...] = field(default=())
    aborted: str = ""

    def metrics(self) -> dict[str, float]:
        """Return every number by its name in logs. `round` counts from 1, and `aborted` is 0 or 1."""
        values = {k: v for k, v in vars(self).items() if k != "non_finite_clients"}
        values |= {"round": self.round + 1}
        # a real server has no clip rate and cannot distinguish a zero update from one that counts as zero
        known = not math.isnan(self.clip_rate)
        values |= {"num_non_finite": len(self.non_finite_clients) if known else math.nan}
        values |= {"aborted": int(bool(self.aborted))}
        return {metric_name(name): value for name, value in values.items()}

    def with_secret_size(self, expected: int) -> RoundRecord:
        """Return a copy without numbers that reveal the size of a secret cohort.

        The size becomes its expectation, and numbers that depend on it become NaN or zero. Values that only a
        simulation knows are also removed.

        Args:
            expected: Expected number of clients in a cohort.
        """
        hidden: dict[str, Any] = dict.fromkeys(("num_received", "uplink_bits", "downlink_bits"), math.nan)
        return replace(self.released(), cohort_size=expected, num_dropped=0, **hidden)

    def released(self) -> RoundRecord:
        """Return a copy without the numbers that only a simulation knows."""
        unknown: dict[str, Any] = {name: math.nan for name in SIMULATED if name != "num_non_finite"}
        return replace(self, **unknown, non_finite_clients=())
