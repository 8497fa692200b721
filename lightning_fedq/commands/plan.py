"""`fedq plan`: calibrate mechanisms to a target epsilon and rank them by error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from rich.console import Console

from lightning_fedq.commands.mechanism_text import parse_call
from lightning_fedq.commands.options import check_rounds
from lightning_fedq.commands.plan_settings import to_yaml
from lightning_fedq.commands.plan_text import (
    describe_advice,
    describe_known_cohorts,
    describe_other_settings,
    print_impossible,
    print_options,
)
from lightning_fedq.commands.resolver import Resolved, candidates, resolved
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.mechanisms.registry import class_path
from lightning_fedq.privacy.cohorts import Everybody, make_cohort_law
from lightning_fedq.privacy.planning import HOMOGENEITY, Option, Problem, plan, recommended
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds.protocols import check_aggregation
from lightning_fedq.secagg import SecAgg

if TYPE_CHECKING:
    from lightning_fedq._lightning import pl
    from lightning_fedq.callbacks import Federated


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
    """
    check_rounds(rounds)
    target = PrivacyTarget(epsilon, delta, adversary, over)
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
    problem = Problem(**sizes, law=law, target=target, secure_aggregation=secagg, homogeneity=homogeneity)
    if (active or max_colluding_fraction is not None) and not problem.behind_masks:
        raise ValueError(
            f"--active and --max-colluding-fraction do not apply to a target against {target.against.value}. "
            "Omit them, or set --adversary secagg_server."
        )
    params = problem.params
    asked = resolved(mechanisms, params).some() if mechanisms else Resolved(candidates(params), {})
    found, console = _plan(problem, federated, asked), Console()
    if mechanisms and all(option.mechanism is None for option in found):
        raise ValueError(
            "No mechanism is left. " + "; ".join(f"{option.name}: {option.reason}" for option in found)
        )
    print_options(console, problem, found)
    best = recommended(found)
    if best is not None:
        advice = describe_advice(problem, found, asked.rows)
        console.print(f"\n{advice}\n{describe_other_settings(clip_norm, federated)}", highlight=False)
        if problem.law.secret and best.mechanism is not None:
            console.print(f"\n{describe_known_cohorts(problem, best.mechanism)}", highlight=False)
    if config and best is not None:
        anyway = "To try one anyway, paste" if found[0].verdict == "do not" else "Paste"
        console.print(f"\n{anyway} these settings in place of your mechanism:\n", highlight=False)
        print(to_yaml(best, problem, clip_norm), end="")
    print_impossible(console, found, why or bool(mechanisms))
    return int(bool(mechanisms) and any(option.mechanism is None for option in found))


def _print_progress(option: Option) -> None:
    """Print a possible option on standard error at once, since accounting may take seconds per mechanism."""
    if option.mechanism is not None:
        ratio = "unknown" if option.ratio is None else f"{option.ratio:.2g}"
        text = f"noise-to-signal ratio R {ratio}, {option.bits:.2g} bits, {option.verdict}"
        Console(stderr=True, soft_wrap=True).print(f"  {option.name}: {text}", highlight=False)


def _plan(problem: Problem, federated: Federated | None, asked: Resolved) -> tuple[Option, ...]:
    """Return the options by error. Mechanisms that `Federated` would refuse come last.

    Args:
        problem: Target and sizes.
        federated: Callback of the configuration, whose aggregation may refuse mechanisms. None if there is no
            configuration.
        asked: Mechanisms to calibrate, and the names that have none.
    """
    allowed = dict(asked.rows)
    refused = [Option(name, None, reason=why) for name, why in asked.left_out.items()]
    for name, mechanism in () if federated is None else asked.rows.items():
        assert federated is not None
        weighted, rule = federated.server.weighting != "uniform", federated.server.aggregator
        try:
            check_aggregation(mechanism, problem.cohort, weighted, rule, problem.behind_masks)
        except ValueError as error:
            del allowed[name]
            refused.append(Option(name, None, reason=str(error)))
    return (*plan(problem, allowed, on_option=_print_progress), *refused)


def read_sizes(config: str, asking: str = "fedq plan") -> tuple[dict[str, Any], Federated, float]:
    """Return the sizes of a configuration, its `Federated`, and the clip norm of its mechanism (or 1.0).

    Args:
        config: Name or file of a configuration.
        asking: Command that is named in an error.
    """
    from lightning_fedq.callbacks.trainer_lookup import find_federated
    from lightning_fedq.commands.configs import find

    # imports Lightning's command line, needed only here
    from lightning_fedq.commands.run import FedqCLI, configuration_file

    path = find(config)
    try:
        cli = FedqCLI(["--config", str(path)], run=False)
    except ValueError as error:
        if not isinstance(error.__cause__, TypeError):
            raise
        # masks refuse the mechanism, which those that are planned replace, so take one that they accept
        values = yaml.safe_load(path.read_text())
        placeholder = {"class_path": class_path(LDPQ), "init_args": {"epsilon_per_coordinate": 1.0}}
        for callback in (values.get("trainer") or {}).get("callbacks") or ():
            if callback["class_path"].endswith(".Federated"):
                callback["init_args"]["mechanism"] = placeholder
        with configuration_file(values) as replaced:
            cli = FedqCLI(["--config", replaced], run=False)
    federated = find_federated(cli.trainer, asking)
    values = parse_call(repr(federated.mechanism))[1]
    clip = getattr(values.get("mechanism", federated.mechanism), "clip_norm", 1.0)
    return sizes_for(cli.trainer, federated, cli.model), federated, float(clip)


def sizes_for(trainer: pl.Trainer, federated: Federated, model: pl.LightningModule) -> dict[str, Any]:
    """Return the arguments of `Problem` for a planned run, except target and secure aggregation."""
    from lightning_fedq.algorithms.byzantine.counting import count_byzantine

    planner = federated.planner
    everybody = replace(planner, law=Everybody())
    sizes: dict[str, Any] = {
        "clients": planner.num_clients,
        "law": planner.law,
        "params": federated.local.num_coordinates(model),
        "dropout_probability": planner.dropout_probability,
        "may_be_silent": planner.may_be_silent,
        "masked": federated.server.secure_aggregation is not None,
        "plain_sum": federated.server.plain_sum,
        "num_byzantine": count_byzantine(trainer, everybody),
    }
    if rounds := federated.count_rounds(trainer, model):
        sizes["rounds"] = rounds
    return sizes
