"""Settings of `Federated` for an option of a plan, to paste into a configuration."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import yaml

from lightning_fedq.commands.mechanism_text import parse_call
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.registry import class_path
from lightning_fedq.privacy.cohorts import CohortLaw, Everybody, make_cohort_law
from lightning_fedq.privacy.planning import Option, Problem
from lightning_fedq.secagg import SecAgg

_KNOBS = {"noise_multiplier": "noise", "local_sigma": "sigma"} | dict.fromkeys(
    ("epsilon", "epsilon_per_bit", "epsilon_per_coordinate", "epsilon_per_message"), "ε"
)


def describe_setting(mechanism: Mechanism) -> str:
    """Return the calibrated parameter of a mechanism as text, or ""."""
    values = parse_call(repr(mechanism))[1]
    knobs = (f"{short} {values[name]:.3g}" for name, short in _KNOBS.items() if values.get(name) is not None)
    return next(knobs, "")


def to_yaml(option: Option, problem: Problem, clip_norm: float) -> str:
    """Return the settings of `Federated` for an option as YAML.

    Args:
        option: Option with a mechanism.
        problem: Problem that the option was planned for.
        clip_norm: Norm to which updates are clipped, if the mechanism clips.
    """
    return yaml.safe_dump(federated_settings(option, problem, clip_norm), sort_keys=False)


def _written(mechanism: Mechanism, clip_norm: float) -> dict[str, Any]:
    """Return class path and arguments of a mechanism, converted from updates of norm 1 to `clip_norm`."""
    values = {key: value for key, value in parse_call(repr(mechanism))[1].items() if value is not None}
    if "clip_norm" in values:
        values["clip_norm"] *= clip_norm
    for knob in _KNOBS:
        if knob in values:
            values[knob] = float(f"{values[knob]:.4g}")
    return {"class_path": class_path(type(mechanism)), "init_args": values}


def federated_settings(option: Option, problem: Problem, clip_norm: float) -> dict[str, Any]:
    """Return the settings of `Federated` for an option as a dictionary, see `to_yaml`."""
    assert option.mechanism is not None
    target = problem.target
    settings: dict[str, Any] = {
        "mechanism": _written(option.mechanism, clip_norm),
        "privacy": {
            "epsilon": target.epsilon,
            "delta": target.delta,
            "adversary": target.against.name.lower(),
            "over": target.over,
        },
    }
    if not option.law.rule_name:  # a user-defined cohort rule is already in the configuration
        settings["cohort"] = _cohort(option.law)
    if option.law.secret:
        settings["diagnostics"] = False
    if problem.behind_masks:
        given, default = asdict(problem.secure_aggregation), asdict(SecAgg())
        settings["secure_aggregation"] = {
            name: value for name, value in given.items() if name == "simulation" or value != default[name]
        }
    if problem.dropout_probability:
        settings["dropout_probability"] = problem.dropout_probability
    return settings


def _cohort(law: CohortLaw) -> Any:
    """Return a cohort law as a configuration has it: a size, or a class path with arguments."""
    short = None if isinstance(law, Everybody) else law.size
    if make_cohort_law(short) == law:
        return short
    path = f"{type(law).__module__}.{type(law).__name__}"
    return {"class_path": path, "init_args": parse_call(repr(law))[1]}
