"""Protection by settings of other libraries: Opacus's `PrivacyEngine`, Flower's wrappers and its local mod.

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

from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import check_delta, spent
from lightning_fedq.privacy.losses import GaussianLoss

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
_NO_BOUND = (
    "none: Flower clips to the old norm, moves the norm by a noisy count that is not clamped, and scales the "
    "noise by the new norm, so that noise over clip is random and has no bound"
)
_UNUSED = {"clipped_count_stddev", "initial_clipping_norm", "target_clipped_quantile", "clip_norm_lr"}
_OPACUS = {"noise_multiplier", "sample_rate", "epochs"}
_OPACUS_OPTIONAL = {"poisson_sampling", "max_grad_norm", "secure_mode"}


@dataclass(frozen=True)
class Protection:
    """Protection by some settings, adversary by adversary.

    Args:
        title: The settings in words.
        relations: What may differ between two worlds, one column of figures each.
        rows: Epsilons of one round and of the run for each relation, or why there is none.
        assumptions: Sentences without which the figures do not hold.
    """

    title: str
    relations: tuple[str, ...]
    rows: Mapping[Adversary, tuple[tuple[float, float], ...] | str]
    assumptions: tuple[str, ...]

    def markdown(self, delta: float) -> str:
        """The page."""
        head = "".join(f" {what}: one round | the run |" for what in self.relations)
        lines = [f"# {self.title}", "", f"Epsilon at delta {delta:g}.", "", f"| from whom |{head}"]
        lines.append("| --- |" + " --- | --- |" * len(self.relations))
        for who, found in self.rows.items():
            cells = f" {found} |" + " |" * (2 * len(self.relations) - 1) if isinstance(found, str) else ""
            if not isinstance(found, str):
                cells = "".join(f" {one:.4g} | {run:.4g} |" for one, run in found)
            lines.append(f"| {who.value} |{cells}")
        return "\n".join([*lines, "", *(f"* {sentence}" for sentence in self.assumptions), ""])


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


def _figures(multiplier: float, delta: float, rounds: int) -> tuple[float, float]:
    """Epsilon of one round and of all, of Gaussian noise of this std over the sensitivity."""
    loss = GaussianLoss(multiplier, "noise")
    return spent(loss, delta).epsilon, spent(loss, delta, rounds=rounds).epsilon


def of_flower(settings: Mapping[str, Any], delta: float) -> Protection:
    """Protection by one of Flower's wrappers or its local mod.

    Args:
        settings: `class`, its arguments, and `num_rounds`; for a wrapper also `largest_weight`, the largest
            share that one client has in a weighted mean (default: 1 / num_sampled_clients).
        delta: In (0, 1).

    Raises:
        ValueError: If a setting is missing, not known or out of range.
    """
    check_delta(delta)
    given = dict(settings)
    name = given.pop("class", None)
    if name not in _FLOWER:
        raise ValueError(f"class must be one of {', '.join(_FLOWER)}, got {name!r}")
    local = name == "LocalDpMod"
    optional = set() if local else {"largest_weight"} | (_UNUSED if "Adaptive" in name else set())
    _numbers(given, _FLOWER[name] | {"num_rounds"}, optional)
    rounds = given["num_rounds"]
    if not isinstance(rounds, int):
        raise ValueError(f"num_rounds must be an integer, got {rounds!r}")
    ideal = (
        "the noise is taken as continuous and unpredictable; Flower draws it in floats from NumPy's generator"
    )
    every = "every client is counted in every round; the sampling of clients by the server is not counted"
    if local:
        if given["delta"] >= 1:
            raise ValueError(f"delta must be < 1, got {given['delta']}")
        std = given["sensitivity"] * math.sqrt(2 * math.log(1.25 / given["delta"])) / given["epsilon"]
        ratios = (std / given["clipping_norm"], std / (2 * given["clipping_norm"]))
        clip = given["clipping_norm"]
        words = f"noise of std {std:.3g} on every parameter of updates clipped to {clip:g}"
        note = (
            f"its own epsilon {given['epsilon']:g} is that of a sensitivity of {given['sensitivity']:g}; "
            f"clipping allows {clip:g} against zero, {2 * clip:g} between two updates"
        )
        figures = tuple(_figures(ratio, delta, rounds) for ratio in ratios)
        return Protection(
            f"{name}: {words}", _RELATIONS, dict.fromkeys(Adversary, figures), (note, ideal, every)
        )
    multiplier, count = given["noise_multiplier"], given["num_sampled_clients"]
    weight = given.get("largest_weight", 1 / count)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1 / count <= weight <= 1:
        raise ValueError(
            f"largest_weight must be from 1 / num_sampled_clients = {1 / count:g} to 1, got {weight!r}"
        )
    squares = [((steps * weight * count) / multiplier) ** 2 for steps in (1, 2)]
    notes = [
        f"noise of std {multiplier:g} clips / {count:g} is added to a mean in which no client weighs more "
        f"than {weight:.4g}: Flower weighs by numbers of examples, and by more where fewer clients answer"
    ]
    models: tuple[tuple[float, float], ...] | str = tuple(
        _figures(square**-0.5, delta, rounds) for square in squares
    )
    if "Adaptive" in name:
        models = _NO_BOUND
    rows = {
        who: models if who in _MODELS else "none: the server adds the noise, to what it has seen without"
        for who in Adversary
    }
    title = f"{name}: noise multiplier {multiplier:g}, {count:g} clients a round, {rounds} rounds"
    return Protection(title, _RELATIONS, rows, (*notes, ideal, every))


_RELATIONS = ("an update or zero", "any two updates")


def of_opacus(settings: Mapping[str, Any], delta: float) -> Protection:
    """Protection of one client's samples by Opacus, if every client trains with it.

    Args:
        settings: `noise_multiplier`, `sample_rate` (batch size over samples), `epochs` of one client in all
            rounds, and `poisson_sampling` (default: true).
        delta: In (0, 1).

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
    steps = math.ceil(1 / rate)
    if poisson:
        from lightning_fedq.dpsgd.opacus import SampledGaussianAccountant  # Opacus is an extra

        def epsilon(count: int) -> float:
            accountant = SampledGaussianAccountant()
            accountant.history = [(float(multiplier), float(rate), count)]
            return accountant.get_epsilon(delta)

        figures, relation = ((epsilon(steps), epsilon(steps * epochs)),), "a sample is there or not"
        batch = f"every sample is in a batch with chance {rate:g}, by a secret coin of its own"
    else:
        figures, relation = (_figures(multiplier / 2, delta, epochs),), "a sample is replaced"
        batch = (
            "batches without Poisson sampling: a sample is in one batch an epoch, and nothing is amplified"
        )
    return Protection(
        f"Opacus: noise multiplier {multiplier:g}, {epochs} epochs of {steps} steps (a round is an epoch)",
        (relation,),
        dict.fromkeys(Adversary, figures),
        (
            "one sample of one client is protected, and no client as a whole",
            batch,
            "the noise is taken as continuous and unpredictable; Opacus draws it in floats",
            "nothing else of the data leaves: no losses, no averages of batch normalisation",
        ),
    )
