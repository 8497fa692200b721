"""Settings of other libraries as a `Run`: Opacus's `PrivacyEngine`, Flower's wrappers and its local mod.

From the noise that is added and the clipping that bounds an update, never from an epsilon that is stated.
The noise is taken as ideal and continuous: both draw it in floats.

References:
    Flower 1.x, `server.strategy.dp_fixed_clipping`, `dp_adaptive_clipping` and `client.mod.localdp_mod`.
    Opacus 1.x, `privacy_engine`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_fedq.dpsgd.statement import SampleStatement
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import (
    Adversary,
    GaussianLoss,
    Neighbours,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
)
from lightning_fedq.privacy.accounting import check_delta, spent
from lightning_fedq.privacy.run import Run

_MODELS = (Adversary.CLIENT, Adversary.OUTSIDER)
_FIXED = {"noise_multiplier", "clipping_norm", "num_sampled_clients"}
_ADAPTIVE = {"noise_multiplier", "num_sampled_clients"}
_FLOWER = {
    "LocalDpMod": {"clipping_norm", "sensitivity", "epsilon", "delta"},
    "DifferentialPrivacyServerSideFixedClipping": _FIXED,
    "DifferentialPrivacyClientSideFixedClipping": _FIXED,
    "DifferentialPrivacyServerSideAdaptiveClipping": _ADAPTIVE,
    "DifferentialPrivacyClientSideAdaptiveClipping": _ADAPTIVE,
}
_AT_THE_SERVER = "the server adds the noise, to what it has seen without"
_NO_BOUND = (
    "Flower clips to the old norm, moves the norm by a noisy count that is not clamped, and scales the noise "
    "by the new norm, so that noise over clip is random and has no bound"
)
_IDEAL = (
    "the noise is taken as continuous and unpredictable; Flower draws it in floats from NumPy's generator"
)
_EVERY = "every client is counted in every round; the sampling of clients by the server is not counted"
_UNUSED = {"clipped_count_stddev", "initial_clipping_norm", "target_clipped_quantile", "clip_norm_lr"}
_OPACUS = {"noise_multiplier", "sample_rate", "epochs"}
_OPACUS_OPTIONAL = {"poisson_sampling", "max_grad_norm", "secure_mode"}


@dataclass(frozen=True, repr=False)
class NoisedElsewhere(FedAvg):
    """Floats that another library clips and noises, in its own code, for vectors of any length.

    Args:
        words: What it does.
        messages: Loss of an update against zero, towards who sees messages.
        models: The same towards who sees released models only.
        assumptions: Sentences without which it does not hold.
    """

    words: str
    messages: GaussianLoss | NonPrivate
    models: GaussianLoss | NonPrivate
    assumptions: tuple[str, ...] = ()

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        return tuple(
            PrivacyClaim(
                who,
                self.models if who in _MODELS else self.messages,
                1,
                Neighbours.ZERO_OUT,
                self.assumptions,
            )
            for who in Adversary
        )

    def __repr__(self) -> str:
        """In words."""
        return self.words


def _run(mechanism: NoisedElsewhere, rounds: int, num_clients: int) -> Run:
    """Every client takes part in every round. What weights do to the mean is in the claims."""
    one = torch.ones(1, dtype=torch.float64)
    groups = tuple((client,) for client in range(num_clients))
    return Run.ideal(mechanism, RoundContext(0, groups, (1,), 0.0 * one, one), rounds, None)


def _numbers(settings: Mapping[str, Any], wanted: set[str], optional: set[str]) -> None:
    """Refuse a key that is missing, not known or no number."""
    if missing := sorted(wanted - settings.keys()):
        raise ValueError(
            f"the settings need {', '.join(missing)}, got {', '.join(sorted(settings)) or 'none'}"
        )
    if unknown := sorted(settings.keys() - wanted - optional):
        known = ", ".join(sorted(wanted | optional))
        raise ValueError(f"the settings have {', '.join(unknown)}, which is not known here; known: {known}")
    for name in wanted:
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(
                f"{name} must be a number > 0, got {value!r} (YAML takes 1.0e-5, and 1e-5 for text)"
            )


def run_of_flower(settings: Mapping[str, Any]) -> Run:
    """Run to come with one of Flower's wrappers or its local mod.

    Args:
        settings: `class`, its arguments, and `num_rounds`; for a wrapper also `largest_weight`, the largest
            share that one client has in a weighted mean (default: 1 / num_sampled_clients).

    Raises:
        ValueError: If a setting is missing, not known or out of range.
    """
    given = dict(settings)
    name = given.pop("class", None)
    if name not in _FLOWER:
        raise ValueError(f"class must be one of {', '.join(_FLOWER)}, got {name!r}")
    local = name == "LocalDpMod"
    optional = set() if local else {"largest_weight"} | (_UNUSED if "Adaptive" in name else set())
    _numbers(given, _FLOWER[name] | {"num_rounds"}, optional)
    rounds = given["num_rounds"]
    for whole in ("num_rounds", "num_sampled_clients"):
        if not isinstance(given.get(whole, 1), int):
            raise ValueError(f"{whole} must be an integer, got {given[whole]!r}")
    if local:
        if given["delta"] >= 1:
            raise ValueError(f"delta must be < 1, got {given['delta']}")
        clip = given["clipping_norm"]
        std = given["sensitivity"] * math.sqrt(2 * math.log(1.25 / given["delta"])) / given["epsilon"]
        words = f"{name}: noise of std {std:.3g} on every parameter of updates clipped to {clip:g}"
        note = (
            f"its own epsilon {given['epsilon']:g} is that of a sensitivity of {given['sensitivity']:g}; "
            f"clipping allows {clip:g} against zero, {2 * clip:g} between two updates"
        )
        loss = GaussianLoss(std / clip)
        return _run(NoisedElsewhere(words, loss, loss, (note, _IDEAL, _EVERY)), rounds, 1)
    multiplier, count = given["noise_multiplier"], given["num_sampled_clients"]
    weight = given.get("largest_weight", 1 / count)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1 / count <= weight <= 1:
        raise ValueError(
            f"largest_weight must be from 1 / num_sampled_clients = {1 / count:g} to 1, got {weight!r}"
        )
    note = (
        f"noise of std {multiplier:g} clips / {count:g} is added to a mean in which no client weighs more "
        f"than {weight:.4g}: Flower weighs by numbers of examples, and by more where fewer clients answer"
    )
    models = NonPrivate(_NO_BOUND) if "Adaptive" in name else GaussianLoss(multiplier / (weight * count))
    words = f"{name}: noise multiplier {multiplier:g}"
    mechanism = NoisedElsewhere(words, NonPrivate(_AT_THE_SERVER), models, (note, _IDEAL, _EVERY))
    return _run(mechanism, rounds, count)


def run_of_opacus(settings: Mapping[str, Any], delta: float) -> tuple[Run, SampleStatement]:
    """Run to come if every client trains with Opacus, which protects no client, and its samples' statement.

    Args:
        settings: `noise_multiplier`, `sample_rate` (batch size over samples), `epochs` of one client in all
            rounds, and `poisson_sampling` (default: true).
        delta: In (0, 1), of the statement.

    Raises:
        ValueError: If a setting is missing, not known or out of range.
    """
    check_delta(delta)
    _numbers(settings, _OPACUS, _OPACUS_OPTIONAL)
    multiplier, rate, epochs = (settings[name] for name in ("noise_multiplier", "sample_rate", "epochs"))
    poisson = settings.get("poisson_sampling", True)
    if rate > 1 or not isinstance(epochs, int) or not isinstance(poisson, bool):
        raise ValueError(
            "sample_rate must be <= 1, epochs an integer and poisson_sampling true or false, got "
            f"{rate!r}, {epochs!r} and {poisson!r}"
        )
    steps = epochs * math.ceil(1 / rate)
    remarks = (
        "The noise is taken as continuous; Opacus draws it in floats. Nothing else of the data may leave: no",
        "losses, no averages of batch normalisation.",
    )
    if poisson:
        history = [(float(multiplier), float(rate), steps)]
        samples = SampleStatement.of_histories({"client": history}, delta, remarks)
    else:  # a sample is in one batch an epoch, and nothing is amplified
        epsilon = spent(GaussianLoss(multiplier / 2), delta, rounds=epochs).epsilon
        samples = SampleStatement(
            1,
            steps,
            epsilon,
            delta,
            multiplier,
            None,
            rate,
            None,
            remarks,
            "one sample is replaced by another",
        )
    reason = NonPrivate("Opacus protects one sample of a client, and no client as a whole")
    words = f"Opacus: noise multiplier {multiplier:g}, {epochs} epochs of {steps // epochs} steps"
    return _run(NoisedElsewhere(words, reason, reason), epochs, 1), samples
