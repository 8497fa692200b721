"""Where a federation meets secure aggregation: the sum that the round engine asks for, and early refusals."""

from __future__ import annotations

from torch import Tensor

from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.secagg import Aggregation, SecAgg, model_digest


def secure_sum(
    secagg: SecAgg,
    mechanism: Mechanism,
    context: RoundContext,
    rand: PublicRandomness,
    *,
    session: bytes,
    weights: Tensor,
) -> Aggregation:
    """Open one round. With its first argument bound it is a `rounds.SecureSums`."""
    return Aggregation(secagg, mechanism, context, rand, session=session, model_hash=model_digest(weights))


def check_secure_aggregation(secagg: SecAgg, mechanism: Mechanism, cohort_size: int) -> None:
    """Refuse what can be known before there is a model.

    Raises:
        TypeError: If the mechanism is not homomorphic.
        ValueError: If the cohort does not suit.
    """
    secagg.check(mechanism)
    secagg.rules(cohort_size)


def check_modulus(secagg: SecAgg, engine: RoundEngine) -> None:
    """Refuse what can be known before the first round.

    Raises:
        TypeError: If no bound on the mechanism's symbols is known.
        ValueError: If the explicit modulus is too small.
    """
    context = engine.context(engine.coming_plan())
    rand = PublicRandomness(engine.keys, context.round, context.attempt)
    secagg.layout(engine.mechanism, context, rand)
