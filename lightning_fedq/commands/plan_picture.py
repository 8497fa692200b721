"""Picture of a plan: the noise-to-signal ratio of the best mechanisms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_fedq.commands.resolver import candidates
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.privacy.planning import GOOD, Option, Problem, plan, recommended
from lightning_fedq.reports.plot_style import legend, panels, series
from lightning_fedq.reports.runs import plain_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DRAWN = 5
"""Number of mechanisms in the picture."""


def _with_clients(problem: Problem, clients: int) -> Problem:
    """Return the problem with another number of clients and the same fraction of them per round."""
    size = min(max(round(problem.cohort * clients / problem.clients), 1), clients)
    return replace(problem, clients=clients, law=problem.law.with_size(size))


def draw(problem: Problem, found: Sequence[Option], rows: Mapping[str, Mechanism] | None = None) -> Figure:
    """Draw the noise-to-signal ratio R of the best mechanisms against epsilon, bits and clients.

    Args:
        problem: Target and sizes.
        found: Options, sorted by error.
        rows: Mechanisms by the name of their row. None is all installed mechanisms.
    """
    known = [option for option in found if option.ratio is not None]
    advised = recommended(found)
    # the recommended mechanism is always in the picture
    best = known[:_DRAWN] if advised in known[:_DRAWN] else [*known[: _DRAWN - 1], advised] if advised else []
    everybody = candidates(problem.params) if rows is None else rows
    shown = {option.name: everybody[option.name] for option in best}
    target = problem.target
    figure, (left, middle, right) = panels(
        3,
        f"epsilon {target.epsilon:g} against {target.against.value},\n{problem.clients:,} clients, "
        f"{problem.params:,} parameters, {problem.rounds} rounds",
    )
    epsilons = [0.5, 1.0, 2.0, 4.0, 8.0]
    clients = [max(int(problem.clients * factor), 2) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
    by_epsilon = [plan(replace(problem, target=replace(target, epsilon=e)), shown) for e in epsilons]
    by_clients = [plan(_with_clients(problem, n), shown) for n in clients]
    for place, option in enumerate(best):
        for axes, values, plans in ((left, epsilons, by_epsilon), (right, clients, by_clients)):
            ratios = [next(o.ratio for o in options if o.name == option.name) for options in plans]
            axes.plot(
                values, [math.nan if r is None else r for r in ratios], label=option.name, **series(place)
            )
        ratio = math.nan if option.ratio is None else option.ratio
        middle.plot(
            [math.nan if option.bits is None else option.bits], [ratio], label=option.name, **series(place)
        )
    for axes, label in (
        (left, "epsilon"),
        (middle, "bits per parameter, without keys and shares"),
        (right, "clients"),
    ):
        axes.set(xlabel=label, ylabel="R: noise-to-signal ratio", yscale="log")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.05), 1.5 * high)
        if axes is middle:
            axes.set_xlim(left=0.0)
        else:
            plain_log(axes, "x")
        plain_log(axes, "y")
        axes.axhspan(axes.get_ylim()[0], GOOD, color="green", alpha=0.12, label="no visible loss")
    for axes, values in ((left, epsilons), (right, clients)):
        axes.set_xticks(values, [f"{value:,g}" for value in values])
        axes.minorticks_off()
    legend(left)
    return figure
