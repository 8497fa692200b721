"""Record of one round: its numbers, ready to log."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

SIMULATED = ("clip_rate", "mse", "snr_db", "cosine", "homogeneity", "num_non_finite")
"""Numbers of a round that no real server knows; their names in logs and tables begin with `sim_`."""


def metric_name(name: str) -> str:
    """Name of a record's number in logs and tables."""
    return f"sim_{name}" if name in SIMULATED else name


@dataclass
class RoundRecord:
    """Record of one round.

    Numbers only, ready to log.

    `mse`, `snr_db`, `cosine` and `clip_rate` compare with the exact mean of the updates as they reach the
    encoder, lies included: they are diagnostics that only a simulation can know, and they are not private;
    nor are the clients whose updates were not finite. `homogeneity`, likewise, is |mean update|^2 over the
    mean |update|^2: the share of the updates' energy that lies along their mean.
    `uplink_bits` are all that clients sent; `protocol_bits` of these are keys, shares and confirmations of
    secure aggregation, and the rest are updates.
    `aborted` is the reason why a round left the model as it was; empty otherwise. `round` counts from 0, as
    the streams do; what people read, `metrics` included, counts from 1.
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
    protocol_bits: int = 0
    non_finite_clients: tuple[int, ...] = field(default=())
    aborted: str = ""

    def metrics(self) -> dict[str, float]:
        """Every number, by `metric_name`. `round` from 1, `aborted` 0 or 1."""
        values = {k: v for k, v in vars(self).items() if k != "non_finite_clients"}
        values |= {"round": self.round + 1}
        # a server, which has no clip rate, can't tell a zero update from one that counts as zero
        known = not math.isnan(self.clip_rate)
        values |= {"num_non_finite": len(self.non_finite_clients) if known else math.nan}
        values |= {"aborted": int(bool(self.aborted))}
        return {metric_name(name): value for name, value in values.items()}

    def with_secret_size(self, expected: int) -> RoundRecord:
        """The record of a round of which nobody may learn how many took part: such numbers are NaN.

        Args:
            expected: Clients that a cohort has on average.
        """
        nan = math.nan
        return replace(
            self.released(),
            cohort_size=expected,
            num_received=nan,
            num_dropped=0,
            uplink_bits=nan,
            downlink_bits=nan,
        )

    def released(self) -> RoundRecord:
        """The record without what only a simulation knows."""
        nan = math.nan
        return replace(
            self, clip_rate=nan, mse=nan, snr_db=nan, cosine=nan, homogeneity=nan, non_finite_clients=()
        )
