"""What one round leaves behind: its numbers, ready to log."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class RoundRecord:
    """What happened in one round; numbers only, ready to log.

    `mse`, `snr_db`, `cosine` and `clip_rate` compare with the exact mean of the updates as they reach the
    encoder, lies included: they are diagnostics that only a simulation can know, and they are not private.
    `aborted` is the reason why a round left the model as it was; empty otherwise.
    """

    round: int
    cohort_size: int
    num_received: int
    num_dropped: int
    uplink_bits: int
    downlink_bits: int
    setup_bits: int
    clip_rate: float
    radius_min: float
    radius_max: float
    update_norm: float
    mse: float = math.nan
    snr_db: float = math.nan
    cosine: float = math.nan
    non_finite_clients: tuple[int, ...] = field(default=())
    aborted: str = ""

    def metrics(self) -> dict[str, float]:
        """Every number, by name; `aborted` is 0 or 1."""
        values = {k: v for k, v in vars(self).items() if k != "non_finite_clients"}
        return {
            **values,
            "num_non_finite": len(self.non_finite_clients),
            "aborted": int(bool(self.aborted)),
        }
