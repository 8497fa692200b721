"""Measured leakage and utility loss of a mechanism beside every bound of the paper, sound or not.

The model behind total variation is stated with it: the unprotected update is N(mean, s^2 I), s^2 the variance
of one sample's update over the candidates, and the mechanism's noise is Gaussian of the variance that it
declares. With a finite data set the true distance is 1. Not differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_fedq.leakage.estimate import LeakageEstimate
from lightning_fedq.leakage.gradients import trainable
from lightning_fedq.leakage.study import Study
from lightning_fedq.leakage.total_variation import isotropic_tv
from lightning_fedq.mechanisms.fedavg import FedAvg
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from reproductions.optimal.bounds import (
    Bound,
    free_lunch_bounds,
    leakage_bounds,
    near_optimal_gap,
    optimality_holds,
    paper_sufficient,
    paper_trade_off_bound,
    trade_off_bound,
    utility_bounds,
    utility_factor,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TV_MODEL = "update N(mean, s^2 I), s^2 from the candidates' updates; declared noise taken as Gaussian"


class Check(NamedTuple):
    """A bound, what was measured, and whether it held."""

    bound: Bound
    measured: float
    holds: bool


@dataclass(frozen=True)
class TradeOff:
    """One mechanism's place between leakage and utility.

    Args:
        unprotected: What the attack finds in the update itself; its leakage is C1.
        protected: Result of the attack behind the mechanism.
        utility_loss: Trace of the declared noise covariance: the exact expected growth of the squared
            distance to the optimum, for noise independent of the update; NaN where none is declared.
        tv: Total variation under `TV_MODEL`; NaN where no noise is declared.
        c2: Constant that follows from the larger xi of the two estimates.
        c5: Measured bias over `tv`; NaN where no noise is declared.
        c6: Largest squared distance to the optimum, the noise's second moment included.
        checks: Every bound; empty where no noise is declared.
        optimal: Whether the condition of Theorem 6.14 holds, which is algebra on an unsound theorem.
    """

    name: str
    unprotected: LeakageEstimate
    protected: LeakageEstimate
    utility_loss: float
    tv: float
    c2: float
    c5: float
    c6: float
    checks: tuple[Check, ...]
    optimal: bool

    @property
    def violations(self) -> tuple[Check, ...]:
        """Sound bounds that did not hold: there must be none."""
        return tuple(check for check in self.checks if check.bound.sound and not check.holds)

    @property
    def counter_examples(self) -> tuple[Check, ...]:
        """Printed bounds that this run refutes: their condition is met, their conclusion fails."""
        refuted = (c for c in self.checks if not c.bound.sound and not c.holds)
        return tuple(check for check in refuted if check.bound.applies)


def way_to_optimum(study: Study, steps: int = 200) -> Tensor:
    """From the model's weights to where gradient descent on the candidates ends, a stand-in for W*. `(dim,)`.

    Args:
        study: Model, candidates and learning rate.
        steps: Full-batch steps, >= 1.
    """
    with torch.enable_grad():
        named = {n: p.detach().clone() for n, p in study.model.named_parameters() if p.requires_grad}
        start = {name: value.clone() for name, value in named.items()}
        for _ in range(steps):
            leaves = {name: value.requires_grad_() for name, value in named.items()}
            value = study.loss(functional_call(study.model, leaves, (study.inputs,)), study.labels)
            slopes: Sequence[Tensor] = torch.autograd.grad(value, list(leaves.values()))
            named = {
                name: (leaf - study.learning_rate * slope).detach()
                for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
            }
    return torch.cat([(named[name] - start[name]).reshape(-1) for name in named])


def bias_factor(bias: float, tv: float) -> float:
    """C5, the bias over the distance in total variation. NaN at a distance of 0, where it is undefined.

    Args:
        bias: Distance of the mean update's end from the optimum; noise of mean zero leaves it as it is.
        tv: Total variation between the laws with and without noise.
    """
    return bias / tv if tv > 0.0 else math.nan


def trade_off(
    name: str,
    study: Study,
    mechanism: Mechanism,
    adversary: Adversary,
    generator: torch.Generator,
    attempts: int = 200,
) -> TradeOff:
    """Measure leakage with and without the mechanism, and check every bound against it.

    Args:
        generator: Random generator of the attempts.
        attempts: Attempts of each of the two measurements.
    """
    plain = study.run(FedAvg(), adversary, attempts, generator, kept=1).estimate
    leak = study.run(mechanism, adversary, attempts, generator, kept=1).estimate
    variance = mechanism.noise_variance(study.context(mechanism), (0,))
    c2 = max(plain.c2, leak.c2)
    way = way_to_optimum(study)
    distance = float(way.norm())
    if variance is None:
        return TradeOff(name, plain, leak, math.nan, math.nan, c2, math.nan, math.nan, (), False)
    sizes = torch.tensor(study.segments, dtype=torch.float64)
    noise, dim = float((variance.double().cpu() * sizes).sum()), int(sizes.sum())
    moments = study.moments
    spread = study.learning_rate**2 * moments.scatter / moments.num_samples
    tv = isotropic_tv(dim, noise / spread)
    c6 = (distance + study.largest_norm) ** 2 + noise
    size = math.sqrt(sum(float(p.detach().square().sum()) for p in trainable(study.model)))
    # the paper's constants, measured: C3 the size that the distorted parameters typically have, C4 the
    # distance of their mean from the optimum, which is the bias too, and C5 that over TV
    bias = float((way + study.learning_rate * study.gradients.mean(0)).norm())
    c5 = bias_factor(bias, tv)
    paper_c6 = utility_factor(
        size + study.largest_norm + math.sqrt(noise), bias, 0.0 if math.isnan(c5) else c5
    )
    c1, measured, total = plain.leakage, leak.leakage, spread + noise
    checks = [Check(bound, measured, bound.holds(measured)) for bound in leakage_bounds(c1, c2, tv)]
    # Lemma 6.6 at the largest gap that it certifies; limits on the safe side, so that chance refutes nothing
    ceiling = plain.leakage_limits[1]
    lemma = paper_sufficient(ceiling, max(ceiling - tv, 0.0), min(tv + 1e-12, 1.0))
    checks.append(Check(lemma, measured, lemma.holds(leak.leakage_limits[0])))
    checks += [Check(bound, noise, bound.holds(noise)) for bound in utility_bounds(c6, paper_c6, tv, total)]
    for bound, factor in (
        (trade_off_bound(c1, c2, tv), c6),
        (paper_trade_off_bound(c1, c2, paper_c6, tv, total), paper_c6),
    ):
        both = measured + c2 / factor * noise
        checks.append(Check(bound, both, bound.holds(both)))
    gap = near_optimal_gap(dim, math.sqrt(noise / dim), tv)
    if gap > 0.0:
        lower = free_lunch_bounds(c1, max(plain.xi, leak.xi), 1.0, gap, noise)
        checks += [Check(bound, measured, bound.holds(measured)) for bound in lower]
    optimal = optimality_holds(c1, c2, paper_c6, total)
    return TradeOff(name, plain, leak, noise, tv, c2, c5, c6, tuple(checks), optimal)


def to_markdown(results: Sequence[TradeOff]) -> str:
    """A page with one section a run: estimates with limits, and every bound with its verdict."""
    lines = ["# Leakage against utility: bounds and what was measured", ""]
    lines += ["Leakage is sqrt(JS) of one attack's belief. It is not differential privacy.", ""]
    lines += [f"Total variation: {TV_MODEL}. With a finite data set the true value is 1.", ""]
    for result in results:
        (a, b), (c, d) = result.unprotected.leakage_limits, result.protected.leakage_limits
        lines += [
            f"## {result.name}",
            "",
            f"C1 {result.unprotected.leakage:.3f} [{a:.3f}, {b:.3f}], leakage {result.protected.leakage:.3f} "
            f"[{c:.3f}, {d:.3f}], {result.protected.attempts} attempts; TV {result.tv:.3g}, "
            f"utility loss {result.utility_loss:.3g}, C2 {result.c2:.3g}, C5 {result.c5:.3g}, "
            f"C6 {result.c6:.3g}; condition of Theorem 6.14: "
            f"{'holds' if result.optimal else 'does not hold'} (no merit either way)",
            "",
        ]
        if not result.checks:
            lines += ["The mechanism declares no noise variance: no bound can be computed.", ""]
            continue
        lines += [
            "| bound | value | measured | proven | held | remark |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for bound, measured, holds in result.checks:
            remark = "vacuous: says nothing here" if bound.vacuous else "" if bound.sound else bound.note
            proven, held = ("yes" if verdict else "**no**" for verdict in (bound.sound, holds))
            if not bound.applies:
                held, remark = "-", "its own condition C2 TV <= C1 is not met"
            lines.append(
                f"| {bound.name} | {bound.value:.3g} | {measured:.3g} | {proven} | {held} | {remark} |"
            )
        lines.append("")
    return "\n".join(lines)


def plot_trade_off(points: Sequence[dict[str, Any]], monitor: str) -> Figure:
    """Draw measured leakage with its limits against a metric, each point labelled with its proven epsilon.

    Args:
        points: `name`, `leakage`, `leakage_low`, `leakage_high`, `epsilon` (words) and the metric.
        monitor: Name of the metric.
    """
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

    figure = Figure(figsize=(7.5, 5.0), layout="constrained")
    axes, labels = figure.subplots(), list[tuple[Annotation, float, float]]()
    for point in points:
        x, y = point["leakage"], point[monitor]
        sides = [[max(x - point["leakage_low"], 0.0)], [max(point["leakage_high"] - x, 0.0)]]
        axes.errorbar(x, y, xerr=sides, fmt="o", capsize=3)
        words = f"{point['name']}\n{point['epsilon']}"
        labels.append((axes.annotate(words, (x, y), (0, 0), textcoords="offset points", fontsize=7), x, y))
    axes.set(xlabel="measured leakage sqrt(JS), with 95% limits (a lower bound)", ylabel=monitor)
    axes.grid(alpha=0.3)
    axes.margins(0.12)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    for label, x, y in labels:  # towards the middle of the frame, so that none crosses it
        beside, above = x < (left + right) / 2, y < (low + high) / 2
        label.set_position((6 if beside else -6, 6 if above else -6))
        label.set(ha="left" if beside else "right", va="bottom" if above else "top")
    return figure
