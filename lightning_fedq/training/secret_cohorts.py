"""Conditions under which cohorts stay secret, checked by name before anything is trained.

Each of them has a counterexample: without it the amplified epsilon is false (`privacy.sampled`). A run that
breaks one is refused, with the cure; none is weakened in silence.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_fedq._lightning import get_callbacks, pl
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.privacy.cohorts import CohortLaw
from lightning_fedq.privacy.report import PrivacyReport
from lightning_fedq.privacy.sampled import find_secrecy_obstacle
from lightning_fedq.privacy.target import PrivacyTarget, check_law
from lightning_fedq.privacy.verdict import NO_GUARANTEE
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.training.accounts import choose_delta, find_repeated_round, make_report
from lightning_fedq.training.settings import Local, Server
from lightning_fedq.training.user_messages import has_revealing_lengths


def check_settings(
    planner: RoundPlanner,
    local: Local,
    server: Server,
    seed: int | None,
    target: PrivacyTarget | None,
    has_ledger: bool,
) -> None:
    """Refuse settings under which the draw could be told, or does not amplify.

    Raises:
        ValueError: Naming the condition, with the cure.
    """
    algorithm, law = local.algorithm, planner.law
    if seed is not None:
        _refuse("S1, a secret draw", f"whoever knows seed={seed} knows every cohort", "use seed=None")
    if target is not None:
        check_law("target", target.against, target.over, law)
    if why := find_secrecy_obstacle(planner.sampling(), server.plain_sum, 0):
        raise ValueError(f"secret cohorts need {why}, or known cohorts")
    if law.own_draws:
        _check_independent_draws(law, server)
    if algorithm is not None and algorithm.remembers:
        what = f"clients of {type(algorithm).__name__} keep vectors from round to round"
        _refuse("S5, clients without memory", what, "use FedProx, or no algorithm")
    if local.buffers == "local":
        what = "buffers='local' stay with every client"
        _refuse("S5, clients without memory", what, "use buffers='share' or 'frozen'")
    if local.patterns:
        what = f"local={local.patterns!r} stay with every client"
        _refuse("S5, clients without memory", what, "leave local out")
    if local.evaluate_clients is not None:
        what = "evaluate_clients writes what clients measure"
        _refuse("S8, nothing else that depends on the draw", what, "leave evaluate_clients out")
    if local.check_isolation is False:
        what = "check_isolation=False does not look for any"
        _refuse("S5, clients without memory", what, "leave check_isolation out")
    if server.diagnostics:
        what = "diagnostics compare with the exact mean of the cohort"
        _refuse("S8, nothing else that depends on the draw", what, "use diagnostics=False")
    if local.client_metrics not in (None, "none"):
        what = f"client_metrics={local.client_metrics!r} writes what the drawn clients log"
        _refuse("S8, nothing else that depends on the draw", what, "use client_metrics='none'")
    if has_ledger:
        _refuse(
            "S9, a ledger of this one training",
            "a ledger was handed on",
            "leave ledger out, and add the epsilons of both trainings",
        )


def _check_independent_draws(law: CohortLaw, server: Server) -> None:
    """Refuse what shows how many clients take part, or needs to know it."""
    fixed = f"FixedSize({law.size}, secret=True)"
    if server.secure_aggregation is not None:
        _refuse(
            "S11, noise of an adder who sees the sum of whoever is there",
            f"{law} with secure aggregation, which opens no sum of few and shows who is missing",
            f"leave secure_aggregation out, or use {fixed}",
        )
    if server.target != "updates":
        _refuse(
            "S11, a divisor that does not follow who is there",
            f"{law} with target={server.target!r}, whose sum is a model only if all its summands are there",
            f"use target='updates', or {fixed}",
        )


def check_processes(trainer: pl.Trainer) -> None:
    """Refuse several processes. Before they talk to each other.

    Raises:
        ValueError: Naming the condition, with the cure.
    """
    # to Lightning, a rank of ours is alone: its strategy knows better
    processes = max(trainer.world_size, getattr(trainer.strategy, "num_ranks", 1))
    if processes > 1:
        _refuse("S1, a secret draw", f"{processes} processes would know it", "use devices=1")


def check_run(federated: Any, trainer: pl.Trainer) -> None:
    """Refuse a fit in which the draw could be told, or does not amplify. Before every round.

    Raises:
        ValueError: Naming the condition, with the cure.
    """
    engine: RoundEngine = federated.engine
    held = federated.fit.population.partitioned_data
    if why := find_repeated_round(engine):
        raise ValueError(f"secret cohorts need {why}")
    if federated.planner.law.own_draws:
        _check_independent_fit(federated)
    if count_byzantine(trainer, federated.planner) or engine.tampering is not None:
        _refuse("S4, clients that run the protocol", "some of them lie", "leave ByzantineClients out")
    if engine.transform is not None or federated.batch_rule is not None:
        what = "a callback changes updates or draws batches by what it keeps of every client"
        _refuse("S5, clients without memory", what, "leave it out")
    if held.reads_streams:
        what = "loaders of clients' own, and streams, go on where they were left"
        _refuse("S5, clients without memory", what, "give one dataset and a partition")
    if engine.ledger.limits is not None:
        what = "the ledger limits the charges of every client"
        _refuse(
            "S5, clients without a limit of their own",
            what,
            "use PrivacyBudget(adversary='outsider'), or none",
        )
    if any(isinstance(callback, pl.callbacks.Timer) for callback in get_callbacks(trainer)):
        what = "max_time ends the run by a clock that clients move"
        _refuse("S6, an end that depends on released models only", what, "use max_epochs")
    if not trainer.lightning_module.automatic_optimization or getattr(
        trainer.precision_plugin, "scaler", None
    ):
        what = "manual optimisation and 16-mixed precision let steps and loss scales follow the cohort"
        _refuse("S8, nothing else that depends on the draw", what, "use automatic optimisation and 32-true")
    if not held.schedule.has_equal_batches:
        what = "clients have different numbers of batches, so how long a round takes tells of who was drawn"
        _refuse("S8, nothing else that depends on the draw", what, "set local_steps")
    if has_revealing_lengths(engine):
        what = f"messages of {type(engine.mechanism).__name__} have lengths that depend on updates"
        _refuse("S8, nothing else that depends on the draw", what, "take a fixed code, or secure aggregation")
    for callback in get_callbacks(trainer):
        if getattr(callback, "follows_clients", False):
            what = f"{type(callback).__name__} writes what follows from the data of the drawn clients"
            _refuse("S8, nothing else that depends on the draw", what, "leave it out")


def _check_independent_fit(federated: Any) -> None:
    """Refuse what shows whether anybody took part in a round."""
    if federated.fit.population.limit:
        what = "fast_dev_run cuts rounds, and which one it cuts hangs on how many take part"
        _refuse("S8, nothing else that depends on the draw", what, "use max_epochs=1")
    if names := federated.fit.vector.members.counters:
        what = f"counters in the model ({', '.join(names[:3])}) stand still in a round of nobody"
        cure = "use buffers='frozen', or layers that count nothing, such as GroupNorm"
        _refuse("S8, nothing else that depends on the draw", what, cure)


def check_claim(federated: Any, trainer: pl.Trainer) -> None:
    """Refuse a mechanism without a claim that a secret draw amplifies. Before the first round.

    Raises:
        ValueError: Naming the condition, with the cure.
    """
    report: PrivacyReport = make_report(federated, trainer, choose_delta(federated, trainer), "planned")
    row = report.secret
    if row is not None and row.verdict == NO_GUARANTEE:
        raise ValueError(row.reason)


def _refuse(condition: str, setting: str, cure: str) -> NoReturn:
    raise ValueError(f"secret cohorts need {condition}: {setting}; {cure}, or known cohorts")
