"""A federation's settings as the `Run` that every statement about it takes. The only place that makes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fedq.clients.evaluation import NoisyMean
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.privacy.run import Run, SecureSum, ThreatModel
from lightning_fedq.privacy.target import allowed_dropouts
from lightning_fedq.rounds import RoundEngine, RoundPlanner, RoundServer
from lightning_fedq.secagg import SecAgg

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation


def described(
    planner: RoundPlanner,
    mechanism: Mechanism,
    around: RoundContext | int,
    *,
    rounds: int,
    secure_sum: SecAgg | SecureSum | None,
    plain_sum: bool,
    num_byzantine: int,
    secure_keys: bool,
    charges: Sequence[int] | Tensor | None,
    releases: Run | None,
    broken: str,
) -> Run:
    """Describe a run.

    Args:
        planner: Clients and cohorts.
        around: A round of it, or before there is a server the number of parameters.
        rounds: Rounds of the run.
        secure_sum: Secure aggregation.
        plain_sum: Does the model depend on the messages through their plain sum only?
        num_byzantine: Clients of a cohort, at most, that do not run the protocol.
        secure_keys: Do keys come from the operating system?
        charges: Charges of a run so far; left out where they would tell who was drawn.
        releases: What is released beside the rounds.
        broken: Condition of secret cohorts that the run has not kept, "" for none.
    """
    if isinstance(around, int):
        one = torch.ones(1, dtype=torch.float64)
        around = RoundContext(0, planner.expected(0, mechanism).groups, (around,), 0.0 * one, one)
    sampling = planner.sampling(broken)
    sums = secure_sum.guarantee(planner.cohort_size, rounds) if isinstance(secure_sum, SecAgg) else secure_sum
    return Run(
        mechanism=mechanism,
        context=around,
        rounds=rounds,
        sampling=sampling,
        threat=ThreatModel(
            secure_sum=sums, plain_sum=plain_sum, num_byzantine=num_byzantine, secure_keys=secure_keys
        ),
        charges=None if sampling.secret else charges,
        releases=releases,
    )


def run_to_come(
    federation: Federation, mechanism: Mechanism, dim: int, rounds: int, num_byzantine: int
) -> Run:
    """Run of a federation before there is a server: so many more rounds than its ledger's."""
    return described(
        federation.planner,
        mechanism,
        dim,
        rounds=rounds,
        secure_sum=federation.server.secure_aggregation,
        plain_sum=federation.server.plain_sum,
        num_byzantine=num_byzantine,
        secure_keys=federation.seed is None,
        charges=None,
        releases=releases_of(federation, rounds),
        broken="",
    )


def run_to_charge(server: RoundServer, secagg: SecAgg | None, num_byzantine: int) -> Run:
    """Run of a server's rounds to come, whose terms its ledger holds them to."""
    return described(
        server.planner,
        server.mechanism,
        server.context(server.coming_plan()),
        rounds=server.ledger.rounds,
        secure_sum=secagg,
        plain_sum=server.plain_sum,
        num_byzantine=num_byzantine,
        secure_keys=server.keys.mode != "reproducible",
        charges=None,
        releases=None,
        broken="",
    )


def run_so_far(federation: Federation, engine: RoundEngine, num_byzantine: int) -> Run:
    """Run of a federation, by what its ledger has charged."""
    return replace(
        _charged(engine, federation.server.secure_aggregation, num_byzantine),
        sampling=engine.planner.sampling(why_round_repeated(engine)),
        releases=releases_of(federation, None),
    )


def _charged(server: RoundServer, secagg: SecAgg | None, num_byzantine: int) -> Run:
    run = run_to_charge(server, secagg, max(num_byzantine, server.ledger.num_byzantine))
    charges = None if run.sampling.secret else server.ledger.charges
    return replace(run, context=server.charged_context(server.coming_plan()), charges=charges)


def whole_run(
    federation: Federation, engine: RoundEngine, num_byzantine: int, rounds: int, last: int | None
) -> Run:
    """Run of a federation that has begun, over so many rounds of a client.

    Releases count up to round `last`; None leaves them out.
    """
    return replace(
        run_so_far(federation, engine, num_byzantine),
        rounds=rounds,
        charges=None,
        releases=None if last is None else releases_of(federation, last),
    )


def run_of_server(server: RoundServer, secagg: SecAgg | None) -> Run:
    """Run of real clients, by what the server's ledger has charged."""
    return _charged(server, secagg, 0)


def everybody(planner: RoundPlanner) -> RoundPlanner:
    """Plan of the releases: every client is asked, and waited for."""
    return replace(planner, clients_per_round=None, participation="random", cohort_key=None, deadline=None)


def mechanism_of_release(release: NoisyMean, planner: RoundPlanner, secagg: SecAgg | None) -> Mechanism:
    """Mechanism of a federation's releases, with noise for the dropouts that are to be expected.

    Raises:
        ValueError: If the noise has no room in a sum of integers.
    """
    plain = release.mechanism(planner.num_clients, 0)
    dropped = allowed_dropouts(run_of_releases(planner, plain, secagg, 1, secure_keys=True))
    dropped = max(dropped, min(release.max_dropped, planner.num_clients - 1))
    return release.mechanism(planner.num_clients, dropped)


def releases_of(federation: Federation, rounds: int | None) -> Run | None:
    """Released evaluations of a federation. None where there are none.

    Args:
        rounds: Rounds of the run whose releases are counted, at least those that are charged. None counts
            what is charged.
    """
    settings, ledger = federation.local.evaluate_clients, federation.ledger
    charged = 0 if ledger.beside is None else ledger.beside.most_charged
    planner, secagg = federation.planner, federation.server.secure_aggregation
    if settings is None or settings.release is None:
        if charged:
            ledger.charges_beside("")  # refuses a ledger of another release
        return None
    mechanism = mechanism_of_release(settings.release, planner, secagg)
    ledger.charges_beside(repr(mechanism))
    times = charged if rounds is None else max(charged, settings.times(rounds))
    return run_of_releases(planner, mechanism, secagg, times, secure_keys=federation.seed is None)


def run_of_releases(
    planner: RoundPlanner, mechanism: Mechanism, secagg: SecAgg | None, times: int, *, secure_keys: bool
) -> Run:
    """Some releases, in each of which every client takes part."""
    return described(
        everybody(planner),
        mechanism,
        1,
        rounds=times,
        secure_sum=secagg,
        plain_sum=True,
        num_byzantine=0,
        secure_keys=secure_keys,
        charges=None,
        releases=None,
        broken="",
    )


def why_round_repeated(engine: RoundEngine) -> str:
    """Condition that is broken where a ledger holds other rounds than the finished ones of this server."""
    charged, finished = engine.ledger.rounds, engine.round
    if charged == finished:
        return ""
    return (
        f"S2, one draw a release: {charged} rounds were charged and {finished} are finished, so one was "
        "given up or the ledger holds another training; whether a round begins again may hang on the draw. "
        "Begin a new Federated(cohorts='secret'), and add the epsilons of both"
    )
