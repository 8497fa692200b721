"""Checks of the conditions (S1, S2, ...) for secret cohorts, before the training and before every round.

Without any one of these conditions, there is a counterexample in which the amplified epsilon is false
(`privacy.sampled`). A run that breaks a condition is refused.
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

_SECRET_DRAW = "S1, a secret draw"
_NO_MEMORY = "S5, clients without memory"
_NO_OUTPUT = "S8, no other output that depends on the draw"


def check_settings(
    planner: RoundPlanner,
    local: Local,
    server: Server,
    seed: int | None,
    target: PrivacyTarget | None,
    has_ledger: bool,
) -> None:
    """Refuse settings that reveal the draw of the cohorts, or that rule out amplification.

    Args:
        seed: Seed of the keys. None draws secret keys.
        has_ledger: Was the ledger of another federation given?

    Raises:
        ValueError: If a condition is broken. The message names it.
    """
    algorithm, law = local.algorithm, planner.law
    if seed is not None:
        _refuse(_SECRET_DRAW, f"seed={seed} reveals every cohort", "Use seed=None")
    if target is not None:
        check_law("target", target.against, target.over, law)
    if why := find_secrecy_obstacle(planner.sampling(), server.plain_sum, 0):
        raise ValueError(f"Secret cohorts need {why}, or known cohorts")
    if law.own_draws:
        _check_independent_draws(law, server)
    if algorithm is not None and algorithm.remembers:
        what = f"clients of {type(algorithm).__name__} keep vectors from round to round"
        _refuse(_NO_MEMORY, what, "Use FedProx, or no algorithm")
    if local.buffers == "local":
        _refuse(_NO_MEMORY, "buffers='local' stay with every client", "Use buffers='share' or 'frozen'")
    if local.personal_parameters:
        what = f"personal_parameters={local.personal_parameters!r} stay with every client"
        _refuse(_NO_MEMORY, what, "Leave personal_parameters out")
    if local.evaluate_clients is not None:
        _refuse(_NO_OUTPUT, "evaluate_clients writes metrics of clients", "Leave evaluate_clients out")
    if local.check_isolation is False:
        _refuse(_NO_MEMORY, "check_isolation=False does not look for memory", "Leave check_isolation out")
    if server.diagnostics:
        _refuse(_NO_OUTPUT, "diagnostics use the exact mean of the cohort", "Use diagnostics=False")
    if local.client_metrics not in (None, "none"):
        what = f"client_metrics={local.client_metrics!r} writes metrics of the drawn clients"
        _refuse(_NO_OUTPUT, what, "Use client_metrics='none'")
    if has_ledger:
        what = "the ledger is another federation's"
        cure = "Leave ledger out, and add the epsilons of both trainings"
        _refuse("S9, a ledger of this training only", what, cure)


def _check_independent_draws(law: CohortLaw, server: Server) -> None:
    """Refuse settings that reveal the number of clients in a round, or need to know it."""
    fixed = f"FixedSize({law.size}, secret=True)"
    if server.secure_aggregation is not None:
        _refuse(
            "S11, a server that adds noise to the sum of any number of clients",
            f"{law} with secure aggregation, which reveals dropouts and opens no sum of few clients",
            f"Leave secure_aggregation out, or use {fixed}",
        )
    if server.sends != "updates":
        _refuse(
            "S11, a divisor that does not depend on the cohort",
            f"{law} with sends={server.sends!r}, whose sum is a model only if no client is missing",
            f"Use sends='updates', or {fixed}",
        )


def check_processes(trainer: pl.Trainer) -> None:
    """Refuse several processes, before they communicate.

    Raises:
        ValueError: If there are several. The message names the condition.
    """
    # for Lightning, each of our ranks has world_size 1, but the strategy knows their number
    processes = max(trainer.world_size, getattr(trainer.strategy, "num_ranks", 1))
    if processes > 1:
        _refuse(_SECRET_DRAW, f"{processes} processes would know it", "Use devices=1")


def check_run(federated: Any, trainer: pl.Trainer) -> None:
    """Refuse a fit that reveals the draw, or rules out amplification. Called before every round.

    Raises:
        ValueError: If a condition is broken. The message names it.
    """
    engine: RoundEngine = federated.engine
    data = federated.fit.population.partitioned_data
    if why := find_repeated_round(engine):
        raise ValueError(f"Secret cohorts need {why}")
    if federated.planner.law.own_draws:
        _check_independent_fit(federated)
    if count_byzantine(trainer, federated.planner) or engine.tampering is not None:
        what = "some clients are Byzantine"
        _refuse("S4, clients that run the protocol", what, "Leave ByzantineClients out")
    if engine.transform is not None or federated.batch_rule is not None:
        what = "a callback changes updates, or draws batches from its state of every client"
        _refuse(_NO_MEMORY, what, "Leave it out")
    if data.own_loaders or data.holds_streams:
        what = "streams and clients' own loaders continue where they stopped"
        _refuse(_NO_MEMORY, what, "Use one dataset and a partition")
    if engine.ledger.limits is not None or engine.ledger.budget_limits is not None:
        what = "the ledger limits the charges of every client"
        cure = "Use PrivacyBudget(adversary='outsider'), or none"
        _refuse("S5, clients without limits of their own", what, cure)
    if any(isinstance(callback, pl.callbacks.Timer) for callback in get_callbacks(trainer)):
        what = "max_time ends the run by a clock, which depends on the clients drawn"
        _refuse("S6, an end that depends on released models only", what, "Use max_epochs")
    scales = getattr(trainer.precision_plugin, "scaler", None)
    if scales or not trainer.lightning_module.automatic_optimization:
        what = "with manual optimisation or 16-mixed precision, steps or loss scales depend on the cohort"
        _refuse(_NO_OUTPUT, what, "Use automatic optimisation and 32-true")
    if not data.schedule.has_equal_batches:
        what = "clients have different numbers of batches, so the duration of a round reveals the cohort"
        _refuse(_NO_OUTPUT, what, "Set local_steps")
    if has_revealing_lengths(engine):
        what = f"messages of {type(engine.mechanism).__name__} have lengths that depend on updates"
        _refuse(_NO_OUTPUT, what, "Use a fixed code, or secure aggregation")
    for callback in get_callbacks(trainer):
        if getattr(callback, "follows_clients", False):
            what = f"{type(callback).__name__} writes values computed from the drawn clients' data"
            _refuse(_NO_OUTPUT, what, "Leave it out")


def _check_independent_fit(federated: Any) -> None:
    """Refuse settings of a fit that reveal whether any client took part in a round."""
    if federated.fit.population.limit:
        what = "the number of clients decides whether fast_dev_run cuts a round"
        _refuse(_NO_OUTPUT, what, "Use max_epochs=1")
    if names := federated.fit.vector.members.counters:
        what = f"counters in the model ({', '.join(names[:3])}) do not change in a round without clients"
        cure = "Use buffers='frozen', or layers without counters, such as GroupNorm"
        _refuse(_NO_OUTPUT, what, cure)


def check_claim(federated: Any, trainer: pl.Trainer) -> None:
    """Refuse a mechanism whose claim a secret draw does not amplify. Called before the first round.

    Raises:
        ValueError: If the row of secret cohorts in the privacy report has no guarantee, with its reason.
    """
    report: PrivacyReport = make_report(federated, trainer, choose_delta(federated, trainer), "planned")
    row = report.secret
    if row is not None and row.verdict == NO_GUARANTEE:
        raise ValueError(row.reason)


def _refuse(condition: str, setting: str, cure: str) -> NoReturn:
    raise ValueError(f"Secret cohorts need {condition}: {setting}. {cure}, or use known cohorts")
