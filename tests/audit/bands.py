"""Audit of noise that is correlated over rounds: all that is released of a client's rounds, taken together.

A bench of single rounds sees rows of the noise one by one. Here a real engine plays several rounds, with
cohorts that take turns as far apart as the band wants, and with everybody in every round, who come back too
early. Updates are zeros, so what is released is noise, and its covariance over rounds is measured over many
coordinates. Of all linear tests the best one tells a client's two updates apart by mu standard deviations,
for the worst signs of its rounds: that may not exceed what the claim composes to, but for `_ROOM`.
"""

import itertools
import math

import numpy as np
import torch

from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.interface import Adversary, GaussianLoss, Mechanism
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.cohorts import Cyclic
from lightning_fedq.rounds import RoundEngine, RoundPlanner

_COORDINATES = 30_000
_ROUNDS = 8
_ROOM = 1.05
"""A quadratic form in a covariance over so many coordinates errs by 0.8%: six standard errors."""


class _Early(RoundPlanner):
    """Promises that nobody comes back early, and asks everybody in every round."""

    @property
    def separation(self) -> int:
        return 1 << 20


def audit_band(mechanism: Mechanism, clip_norm: float, seed: int = 0) -> list[str]:
    """Return what contradicts the outsider's claim over several rounds.

    Args:
        mechanism: Mechanism whose noise the server adds, `separation` rounds of which hang together.
        clip_norm: Half of what a client can move.
        seed: Seed of the keys.
    """
    apart = mechanism.separation
    planners: dict[str, RoundPlanner] = {"everybody in every round": _Early(2, seed)}
    if apart > 1:
        planners["cohorts that take turns"] = RoundPlanner(2 * apart, seed, Cyclic(2))
    differs = []
    for name, planner in planners.items():
        start = torch.zeros(_COORDINATES)
        keys, ranges = SeededKeys(seed), FixedRange(1.0)
        engine = RoundEngine(mechanism, planner, keys, start, (_COORDINATES,), ranges, diagnostics=False)
        client = planner.plan(0, mechanism).cohort[0]
        context = engine.context(engine.next_plan())
        claim = {c.adversary: c for c in mechanism.claims(context)}[Adversary.OUTSIDER]
        if not isinstance(claim.loss, GaussianLoss):
            raise TypeError(f"the claim over rounds must be a Gaussian's, got {type(claim.loss).__name__}")
        released, there = [], []
        for _ in range(_ROUNDS):
            before, plan = engine.weights, engine.start()
            there.append(client in plan.cohort)
            engine.receive(plan.survivors, torch.zeros(len(plan.survivors), _COORDINATES))
            record = engine.finish()
            released.append(((engine.weights - before) * record.num_received).double().numpy())
        precision = np.linalg.inv(np.cov(np.stack(released)))
        turns = [r for r in range(_ROUNDS) if there[r]]
        worst = 0.0
        for signs in itertools.product((-1.0, 1.0), repeat=len(turns)):
            moved = np.zeros(_ROUNDS)
            moved[turns] = 2.0 * clip_norm * np.array(signs)
            worst = max(worst, float(moved @ precision @ moved))  # mu^2 of the best linear test
        found, claimed = math.sqrt(worst), math.sqrt(len(turns)) / claim.loss.noise_multiplier
        if found > _ROOM * claimed:
            differs.append(
                f"{type(mechanism).__name__}, band {apart}, {name}: {len(turns)} rounds of a client are told "
                f"apart by {found:.3g} standard deviations, {claimed:.3g} are claimed"
            )
    return differs
