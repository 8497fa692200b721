"""`fedq plan`: calibrate mechanisms to a target epsilon and rank them by error."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.commands.mechanism_text import parse_call
from lightning_fedq.commands.options import check_rounds
from lightning_fedq.commands.resolver import Resolved, candidates, resolved
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.mechanisms.registry import class_path
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.cohorts import CohortLaw, DisjointOnce, Everybody, make_cohort_law
from lightning_fedq.privacy.planning import (
    COSTLY,
    GOOD,
    HOMOGENEITY,
    Option,
    Problem,
    plan,
    recommended,
    verdict_on,
)
from lightning_fedq.privacy.run import ASSUMED, ThreatModel
from lightning_fedq.privacy.target import PrivacyTarget, planned_charges
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.plot_style import legend, panels, series
from lightning_fedq.reports.runs import plain_log, save_figure
from lightning_fedq.rounds.protocols import check_aggregation
from lightning_fedq.secagg import SecAgg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fedq._lightning import pl
    from lightning_fedq.callbacks import Federated


_DRAWN = 5
"""Number of mechanisms in the picture."""


def main(
    config: str | None = None,
    *,
    epsilon: float,
    delta: float = 1e-5,
    clients: int | None = None,
    clients_per_round: int | None = None,
    params: int | None = None,
    rounds: int | None = None,
    adversary: Annotated[str, "WHO"] = "secagg_server",
    over: Literal["run", "round"] = "run",
    secret: bool = False,
    active: bool = False,
    max_colluding_fraction: float | None = None,
    dropout_probability: float | None = None,
    homogeneity: float = HOMOGENEITY,
    mechanisms: Annotated[Sequence[str], "NAME"] = (),
    why: bool = False,
    picture: Annotated[Path | None, "FILE"] = None,
) -> int:
    """Calibrate every mechanism to a target epsilon, and rank them by error.

    With a configuration, also print the settings to paste into it.

    Args:
        config: Configuration that sets the clients, the model and the rounds.
        epsilon: Privacy bound: any set of outcomes is at most e^epsilon times as likely for one of two inputs
            as for the other, plus delta. It is the target.
        delta: Additive slack in the bound of epsilon, below one divided by the number of protected units.
        clients: Number of clients of the federation.
        clients_per_round: Number of clients of a cohort (default: all).
        params: Number of parameters of the model.
        rounds: Number of rounds of the run.
        adversary: Adversary that the target is against: eavesdropper, server, server_and_partner,
            client, secagg_server or outsider.
        over: Span that the target covers.
        secret: The outsider never learns who took part (Federated(cohort=FixedSize(..., secret=True))).
        active: The server behind secure aggregation may lie about who dropped out
            (SecAgg(active=True)).
        max_colluding_fraction: Fraction of the clients that may collude with the server behind secure
            aggregation.
        dropout_probability: Probability that a client does not answer (default: 0).
        homogeneity: Similarity of the updates, |mean|^2 divided by the mean |update|^2.
        mechanisms: Mechanisms by row, class or class path (default: all).
        why: Print the reason for each mechanism that is not possible.
        picture: File of a picture with the error against epsilon, bits and clients.
    """
    check_rounds(rounds)
    given: dict[str, Any] = {"clients": clients, "params": params, "rounds": rounds}
    sizes = {**given, "dropout_probability": dropout_probability}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    law = make_cohort_law(clients_per_round)
    clip_norm, secagg, federated = 1.0, SecAgg(), None
    if config:
        from_config, federated, clip_norm = read_sizes(config)
        configured = from_config.pop("law")
        if clients is None:  # the configured cohort size does not fit another number of clients
            law = configured if clients_per_round is None else configured.with_size(clients_per_round)
        sizes, secagg = {**from_config, **sizes}, federated.server.secure_aggregation or SecAgg()
    if active:
        secagg = replace(secagg, active=True)
    if max_colluding_fraction is not None:
        secagg = replace(secagg, max_colluding_fraction=max_colluding_fraction)
    if missing := [f"--{name}" for name in given if name not in sizes]:
        raise ValueError(f"Give {', '.join(missing)}, or name a configuration that sets them")
    law = law.with_secret() if secret else law
    target = PrivacyTarget(epsilon, delta, adversary, over)
    problem = Problem(**sizes, law=law, target=target, secure_aggregation=secagg, homogeneity=homogeneity)
    if (active or max_colluding_fraction is not None) and not problem.behind_masks:
        raise ValueError(
            f"--active and --max-colluding-fraction do not apply to a target against {target.against.value}. "
            "Omit them, or set --adversary secagg_server."
        )
    params = problem.params
    asked = resolved(mechanisms, params).some() if mechanisms else Resolved(candidates(params), {})
    found, console = _plan(problem, federated, _Progress().print_option, asked), Console()
    if mechanisms and all(option.mechanism is None for option in found):
        raise ValueError(
            "No mechanism is left. " + "; ".join(f"{option.name}: {option.reason}" for option in found)
        )
    _print(console, problem, found)
    best = recommended(found)
    if best is not None:
        advice = _advice(problem, found, asked.rows)
        console.print(f"\n{advice}\n{_around(clip_norm, federated)}", highlight=False)
        if problem.law.secret and best.mechanism is not None:
            console.print(f"\n{_known_cohort_text(problem, best.mechanism)}", highlight=False)
    if config and best is not None:
        anyway = "To try one anyway, paste" if found[0].verdict == "do not" else "Paste"
        console.print(f"\n{anyway} these settings in place of your mechanism:\n", highlight=False)
        print(to_yaml(best, problem, clip_norm), end="")
    _print_impossible(console, found, why or bool(mechanisms))
    if picture is not None:
        save_figure(draw(problem, found, asked.rows), picture, twin=True)
        print(picture)
    return int(bool(mechanisms) and any(option.mechanism is None for option in found))


class _Progress:
    """Progress lines on standard error, one per option, since accounting may take seconds per mechanism."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True)

    def print_option(self, option: Option) -> None:
        """Print the name, noise-to-signal ratio and bits of a possible option."""
        if option.mechanism is not None:
            ratio = "unknown" if option.ratio is None else f"{option.ratio:.2g}"
            text = f"noise-to-signal ratio R {ratio}, {option.bits:.2g} bits, {option.verdict}"
            self._console.print(f"  {option.name}: {text}", highlight=False)


def _plan(
    problem: Problem, federated: Federated | None, told: Callable[[Option], None], asked: Resolved
) -> tuple[Option, ...]:
    """Return the options by error. Mechanisms that `Federated` would refuse come last.

    Args:
        problem: Target and sizes.
        federated: Callback of the configuration, whose aggregation may refuse mechanisms. None if there is no
            configuration.
        told: Listener that gets each option when it is calibrated.
        asked: Mechanisms to calibrate, and the names that have none.
    """
    allowed = dict(asked.rows)
    refused = [Option(name, None, reason=why) for name, why in asked.left_out.items()]
    for name, mechanism in asked.rows.items() if federated is not None else ():
        assert federated is not None
        weighted, rule = federated.server.weighting != "uniform", federated.server.aggregator
        try:
            check_aggregation(mechanism, problem.cohort, weighted, rule, problem.behind_masks)
        except ValueError as error:
            del allowed[name]
            refused.append(Option(name, None, reason=str(error)))
    return (*plan(problem, allowed, on_option=told), *refused)


def read_sizes(config: str, asking: str = "fedq plan") -> tuple[dict[str, Any], Federated, float]:
    """Return the sizes of a configuration, its `Federated`, and the clip norm of its mechanism (or 1.0).

    Args:
        config: Name or file of a configuration.
        asking: Command that is named in an error.
    """
    from lightning_fedq.callbacks.trainer_lookup import find_federated
    from lightning_fedq.commands.configs import find
    from lightning_fedq.commands.run import FedqCLI  # imports Lightning's command line, needed only here

    path = find(config)
    try:
        cli = FedqCLI(["--config", str(path)], run=False)
    except ValueError as error:
        if not isinstance(error.__cause__, TypeError):
            raise
        # masks refuse the mechanism, which those that are planned replace
        with tempfile.TemporaryDirectory() as folder:
            replaced = Path(folder) / path.name
            replaced.write_text(_with_placeholder(path.read_text()))
            cli = FedqCLI(["--config", str(replaced)], run=False)
    federated = find_federated(cli.trainer, asking)
    values = parse_call(repr(federated.mechanism))[1]
    clip = getattr(values.get("mechanism", federated.mechanism), "clip_norm", 1.0)
    return sizes_for(cli.trainer, federated, cli.model), federated, float(clip)


def _with_placeholder(text: str) -> str:
    """Return a configuration with a mechanism that masks accept in the place of its own."""
    values = yaml.safe_load(text)
    for callback in (values.get("trainer") or {}).get("callbacks") or ():
        if callback["class_path"].endswith(".Federated"):
            placeholder = {"class_path": class_path(LDPQ), "init_args": {"epsilon_per_coordinate": 1.0}}
            callback["init_args"]["mechanism"] = placeholder
    return yaml.safe_dump(values)


def sizes_for(trainer: pl.Trainer, federated: Federated, model: pl.LightningModule) -> dict[str, Any]:
    """Return the arguments of `Problem` for a planned run, except target and secure aggregation."""
    from lightning_fedq.algorithms.byzantine.counting import count_byzantine
    from lightning_fedq.clients.vector import num_coordinates

    planner, local = federated.planner, federated.local
    params = num_coordinates(model, local.buffers, local.personal_parameters, local.extra_buffers)
    everybody = replace(planner, law=Everybody())
    sizes: dict[str, Any] = {
        "clients": planner.num_clients,
        "law": planner.law,
        "params": params,
        "dropout_probability": planner.dropout_probability,
        "may_be_silent": planner.may_be_silent,
        "masked": federated.server.secure_aggregation is not None,
        "plain_sum": federated.server.plain_sum,
        "num_byzantine": count_byzantine(trainer, everybody),
    }
    if rounds := federated.count_rounds(trainer, model):
        sizes["rounds"] = rounds
    return sizes


def _print(console: Console, problem: Problem, found: Sequence[Option]) -> None:
    """Print the problem, the table of possible options and an explanation of its columns."""
    target = problem.target
    whom = target.against.value + (" who never learns who took part" if problem.law.secret else "")
    console.print(
        f"epsilon {target.epsilon:g} at delta {target.delta:g} over the {target.over}, against "
        f"{whom}. {problem.clients:,} clients{_drawn(problem)}, {problem.params:,} "
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
        table.add_row(name, _setting(option.mechanism), bits, ratio, option.verdict, needed)
    console.print(table)
    console.print(
        "bits: bits of one message per parameter"
        + (", masked, without keys and shares of the protocol" if problem.behind_masks else "")
        + ".  "
        "good from: number of clients from which R is good.  R: noise-to-signal ratio of the whole run, the "
        "squared error of the mean divided by its squared length. Up to 0.1 no accuracy is lost, and above 4 "
        "the model learns nothing. All updates are clipped to the same norm, and their similarity is assumed "
        f"(--homogeneity {problem.homogeneity:g}).",
        highlight=False,
    )


def _advice(problem: Problem, found: Sequence[Option], rows: Mapping[str, Mechanism]) -> str:
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


def _inside_sites(problem: Problem) -> str:
    """Return advice on DP-SGD, which protects rows of few large sites."""
    from opacus.accountants.utils import get_noise_multiplier  # slow import, and only needed here

    epsilon, delta = problem.target.epsilon, min(problem.target.delta or _SITE_DELTA, _SITE_DELTA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other orders would give a little less noise
        noise = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=_SITE_BATCH / _SITE_ROWS,
            steps=problem.rounds * _SITE_ROWS // _SITE_BATCH,
            accountant="rdp",
        )
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
        (smaller,) = plan(replace(problem, params=math.floor(params)), {least.name: row})
        if smaller.ratio is not None and smaller.ratio <= COSTLY:
            return (
                f"  * Fewer parameters: with {math.floor(params):,} of them, {least.name} has R "
                f"{smaller.ratio:.2g} ({smaller.verdict}). For example, train a head on fixed features "
                "(docs/guides/useful_epsilon.md)."
            )
    return "  * Fewer parameters: no number of them is small enough."


def _around(clip_norm: float, federated: Federated | None) -> str:
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


def _print_impossible(console: Console, found: Sequence[Option], why: bool) -> None:
    """Print the mechanisms that are not possible, in one line or with their reasons."""
    impossible = [option for option in found if option.mechanism is None]
    if why:
        for option in impossible:
            console.print(f"  not possible: {option.name}: {option.reason}", highlight=False, soft_wrap=True)
    elif impossible:
        names = "; ".join(option.name for option in impossible)
        console.print(f"\nnot possible (--why prints reasons): {names}", highlight=False, soft_wrap=True)


def _known_cohort_text(problem: Problem, mechanism: Mechanism) -> str:
    """Return a text on the epsilon of a mechanism for secret cohorts if the adversary knows the cohorts.

    This epsilon is much larger, because there is no privacy amplification by subsampling.
    """
    threat = ThreatModel(secure_sum=ASSUMED, plain_sum=True, num_byzantine=0, secure_keys=True)
    run = replace(problem.run(mechanism), threat=threat)
    charges = planned_charges(run, secret=False)
    account = Account(run, check_delta(problem.target.delta, problem.clients, "clients"))
    epsilons = {
        who: account.epsilon(who, charges, secret=False)
        for who in (Adversary.OUTSIDER, Adversary.SECAGG_SERVER, Adversary.SERVER)
    }
    outsider, secagg, server = (format_epsilon(value) for value in epsilons.values())
    return (
        f"It has epsilon {outsider} against an outsider who learns who took "
        f"part, {secagg} against a server behind secure aggregation and {server} against a server that sees "
        f"messages. These hold for a client that is drawn {charges} times."
    )


def _drawn(problem: Problem) -> str:
    """Return a text on the size and law of the cohort, or "" if all clients take part."""
    return f", {problem.cohort:,} a round by {problem.law}" if problem.cohort < problem.clients else ""


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


_KNOBS = {"noise_multiplier": "noise", "local_sigma": "sigma"} | dict.fromkeys(
    ("epsilon", "epsilon_per_bit", "epsilon_per_coordinate", "epsilon_per_message"), "ε"
)


def _setting(mechanism: Mechanism) -> str:
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
    return {
        "class_path": f"{type(law).__module__}.{type(law).__name__}",
        "init_args": parse_call(repr(law))[1],
    }


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
