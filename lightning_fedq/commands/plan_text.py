"""Texts of `fedq plan`: the table of options, advice by the verdict on the best one, and ways out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.commands.plan_settings import describe_setting
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.cohorts import DisjointOnce
from lightning_fedq.privacy.planning import (
    COSTLY,
    GOOD,
    Option,
    Problem,
    best_option,
    recommended,
    verdict_on,
)
from lightning_fedq.privacy.run import ASSUMED, ThreatModel
from lightning_fedq.privacy.target import planned_charges
from lightning_fedq.privacy.verdict import format_epsilon

if TYPE_CHECKING:
    from lightning_fedq.callbacks import Federated


def print_options(console: Console, problem: Problem, found: Sequence[Option]) -> None:
    """Print the problem, the table of possible options and an explanation of its columns."""
    target = problem.target
    whom = target.against.value + (" who never learns who took part" if problem.law.secret else "")
    drawn = f", {problem.cohort:,} a round by {problem.law}" if problem.cohort < problem.clients else ""
    console.print(
        f"epsilon {target.epsilon:g} at delta {target.delta:g} over the {target.over}, against "
        f"{whom}. {problem.clients:,} clients{drawn}, {problem.params:,} "
        f"parameters, {problem.rounds} rounds{_trust(problem)}.",
        highlight=False,
    )
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("mechanism", "setting", "bits", "R", "verdict", "good from"):
        # a narrow terminal folds the names, so no figure is cut
        table.add_column(heading, no_wrap=heading != "mechanism", overflow="fold")
    for option in found:
        if option.mechanism is None:
            continue
        name = option.name + (", once each" if isinstance(option.law, DisjointOnce) else "")
        needed = "" if option.clients_needed is None else _short(option.clients_needed)
        ratio = "" if option.ratio is None else f"{option.ratio:.2g}"
        bits = f"{option.bits:.2g}" if option.bits < 0.1 else f"{option.bits:.1f}"
        table.add_row(name, describe_setting(option.mechanism), bits, ratio, option.verdict, needed)
    console.print(table)
    console.print(
        "bits: bits of one message per parameter"
        + (", masked, without keys and shares of the protocol" if problem.behind_masks else "")
        + ".  "
        "good from: number of clients from which R is good.  R: noise-to-signal ratio of the whole run, the "
        "squared error of the mean divided by its squared length. Up to 0.1 no accuracy is lost, and above 4 "
        "the model learns nothing. All updates are as long as the clipping norm in every round, and their "
        "similarity is assumed "
        f"(--homogeneity {problem.homogeneity:g}).",
        highlight=False,
    )


def describe_advice(problem: Problem, found: Sequence[Option], rows: Mapping[str, Mechanism]) -> str:
    """Return advice by the verdict on the best row: an option to take, or ways out if none is good.

    Args:
        problem: Target and sizes.
        found: Options by error, the smallest first. At least one is possible.
        rows: Mechanisms of the options before their calibration, by name.
    """
    least, best = found[0], recommended(found)
    assert best is not None
    if best.ratio is None or least.ratio is None:
        return f"Take {best.name}. R is not known for any option."
    ways_out = "\n".join(("", *_ways_out(problem, found, rows[least.name])))
    if least.verdict == "do not":
        return (
            f"Take none of these: {least.name} has the smallest R, {least.ratio:.2g}, and a model would "
            f"learn mostly noise. Ways out:{ways_out}"
        )
    text = f"Take {best.name}, which has the smallest error."
    if best is not least:
        text = (
            f"Take {best.name}: {best.bits:.2g} bits and R {best.ratio:.2g}, about as good as {least.name} "
            f"with {least.bits:.2g} bits and R {least.ratio:.2g}."
        )
    if least.verdict == "poor":
        return f"{text} The model will lose much accuracy. Ways out:{ways_out}"
    return text


def _ways_out(problem: Problem, found: Sequence[Option], row: Mechanism) -> Iterator[str]:
    """Yield three ways to a useful model at this epsilon, with numbers.

    Args:
        row: Mechanism of the option with the smallest R, before its calibration.
    """
    yield _inside_sites(problem)
    needed = [(option.clients_needed, option.name) for option in found if option.clients_needed is not None]
    if needed:
        count, name = min(needed)
        yield f"  * More clients: R is {GOOD:g} ({verdict_on(GOOD)}) from about {_short(count)} with {name}."
    else:
        yield "  * More clients: no number was found that is enough."
    yield _fewer(problem, found[0], row)


_SITE_ROWS, _SITE_BATCH, _SITE_DELTA = 1000, 100, 1e-5
"""Rows, expected batch size and largest delta of the site whose noise multiplier the advice computes."""


def opacus_noise(epsilon: float, delta: float, rate: float, steps: int, tolerance: float = 0.01) -> float:
    """Return the noise multiplier that Opacus's accountant finds: noise std divided by l2 sensitivity.

    Args:
        epsilon: Budget, > 0, in nats.
        delta: Delta of the budget, in (0, 1).
        rate: Sampling rate of one step.
        steps: Number of steps, >= 1.
        tolerance: Largest error of epsilon.
    """
    from opacus.accountants.utils import get_noise_multiplier  # slow import, and only needed here

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other orders would give a little less noise
        noise = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            epsilon_tolerance=tolerance,
            accountant="rdp",
        )
    return float(noise)


def _inside_sites(problem: Problem) -> str:
    """Return advice on DP-SGD, which protects rows of few large sites."""
    epsilon, delta = problem.target.epsilon, min(problem.target.delta or _SITE_DELTA, _SITE_DELTA)
    steps = problem.rounds * _SITE_ROWS // _SITE_BATCH
    noise = opacus_noise(epsilon, delta, _SITE_BATCH / _SITE_ROWS, steps)
    return (
        "  * Few large sites: DPSGD protects each row instead of each client. A site of "
        f"{_SITE_ROWS:,} rows with batches of {_SITE_BATCH} takes noise_multiplier {noise:.2f} for epsilon "
        f"{epsilon:g} per row at delta {delta:g} (docs/guides/dp_sgd.md)."
    )


def _fewer(problem: Problem, least: Option, row: Mechanism) -> str:
    """Return advice on training fewer parameters with the same clients, since R falls with their number."""
    assert least.ratio is not None
    params = problem.params * COSTLY / least.ratio
    while params >= 1.1:
        params /= 1.1
        smaller, _ = best_option(least.name, row, replace(problem, params=math.floor(params)))
        if smaller.ratio is not None and smaller.ratio <= COSTLY:
            return (
                f"  * Fewer parameters: with {math.floor(params):,} of them, {least.name} has R "
                f"{smaller.ratio:.2g} ({smaller.verdict}). For example, train a head on fixed features "
                "(docs/guides/useful_epsilon.md)."
            )
    return "  * Fewer parameters: no number of them is small enough."


def describe_other_settings(clip_norm: float, federated: Federated | None) -> str:
    """Return a text on the clip norm and server optimiser, which affect accuracy but are not in the table."""
    if federated is None:
        return (
            "The table does not set clip_norm (0.5 in the demo) and the server's optimiser "
            "(lightning_fedq.algorithms.FedAvgM in the demo and the benchmark)."
        )
    optimiser = federated.server.server_optimizer
    # the optimiser is a class or a partial of a class; jsonargparse puts the class into a partial's arguments
    parts = (optimiser, getattr(optimiser, "func", None), *getattr(optimiser, "args", ()))
    kind = next((part for part in parts if isinstance(part, type)), optimiser)
    name = "none, the mean itself" if kind is None else getattr(kind, "__name__", str(kind))
    return f"Your configuration has clip_norm {clip_norm:g}, server optimiser {name}."


def print_impossible(console: Console, found: Sequence[Option], why: bool) -> None:
    """Print the mechanisms that are not possible, in one line or with their reasons."""
    impossible = [option for option in found if option.mechanism is None]
    if why:
        for option in impossible:
            console.print(f"  not possible: {option.name}: {option.reason}", highlight=False, soft_wrap=True)
    elif impossible:
        names = "; ".join(option.name for option in impossible)
        console.print(f"\nnot possible (--why prints reasons): {names}", highlight=False, soft_wrap=True)


def describe_known_cohorts(problem: Problem, mechanism: Mechanism) -> str:
    """Return a text on the epsilon of a mechanism for secret cohorts if the adversary knows the cohorts.

    This epsilon is much larger, because there is no privacy amplification by subsampling.
    """
    threat = ThreatModel(secure_sum=ASSUMED, plain_sum=True, num_byzantine=0, secure_keys=True)
    run = replace(problem.run(mechanism), threat=threat)
    charges = planned_charges(run, secret=False)
    account = Account(run, check_delta(problem.target.delta, problem.clients, "clients"))
    adversaries = (Adversary.OUTSIDER, Adversary.SECAGG_SERVER, Adversary.SERVER)
    epsilons = (account.epsilon(who, charges, secret=False) for who in adversaries)
    outsider, secagg, server = map(format_epsilon, epsilons)
    return (
        f"It has epsilon {outsider} against an outsider who learns who took "
        f"part, {secagg} against a server behind secure aggregation and {server} against a server that sees "
        f"messages. These hold for a client that is drawn {charges} times."
    )


def _trust(problem: Problem) -> str:
    """Return sentences on the assumed collusion, dropouts, stragglers, Byzantine clients and weights."""
    words, secagg = "", problem.secure_aggregation
    if problem.target.against is Adversary.SECAGG_SERVER and secagg.max_colluding_fraction:
        words += f". {secagg.max_colluding_fraction:.2%} of the clients may collude with the server"
    if problem.behind_masks and secagg.active:
        words += ". The server may lie about who dropped out"
    if problem.dropout_probability:
        words += f". {problem.dropout_probability:.2%} of the clients drop out"
    if problem.may_be_silent:
        words += ". Late clients are dropped, and claims assume the fewest answers that open a sum"
    if problem.num_byzantine:
        words += (
            f". {problem.num_byzantine:,} clients are Byzantine, and R leaves out their effect on the mean"
        )
    if not problem.plain_sum:
        words += (
            ". The mean is weighted or of a robust rule, so noise of other clients does not count, and R is "
            "that of a plain mean"
        )
    return words


def _short(number: int) -> str:
    """Return a number with commas, or from 10,000 on in scientific notation."""
    if number < 10_000:
        return f"{number:,}"
    return f"{number:.1e}".replace("e+0", "e").replace("e+", "e")
