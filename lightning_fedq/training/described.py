"""A federation's settings as the `Run` that every statement about it takes. The only place that makes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.privacy.run import Run, SecureSum, ThreatModel
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
        broken: Condition of secret cohorts that the run has not kept, "" for none.
    """
    if isinstance(around, int):
        one = torch.ones(1, dtype=torch.float64)
        around = RoundContext(0, planner.expected(0, mechanism).groups, (around,), 0.0 * one, one)
    sampling = planner.sampling(broken)
    if isinstance(secure_sum, SecAgg):
        size = planner.cohort_size
        secure_sum = secure_sum.guarantee(planner.num_clients, size, rounds, num_byzantine)
    return Run(
        mechanism=mechanism,
        context=around,
        rounds=rounds,
        sampling=sampling,
        threat=ThreatModel(
            secure_sum=secure_sum, plain_sum=plain_sum, num_byzantine=num_byzantine, secure_keys=secure_keys
        ),
        charges=None if sampling.secret else charges,
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
        broken="",
    )


def run_so_far(federation: Federation, engine: RoundEngine, num_byzantine: int) -> Run:
    """Run of a federation, by what its ledger has charged."""
    num_byzantine = max(num_byzantine, engine.ledger.num_byzantine)
    rounds, charges = engine.ledger.paid
    run = run_to_charge(engine, federation.server.secure_aggregation, num_byzantine)
    return replace(
        run,
        rounds=rounds,
        context=engine.charged_context(engine.coming_plan()),
        charges=None if run.sampling.secret else charges,
        sampling=engine.planner.sampling(why_round_repeated(engine)),
    )


def whole_run(federation: Federation, engine: RoundEngine, num_byzantine: int, rounds: int) -> Run:
    """Run of a federation that has begun, over so many rounds of a client."""
    return replace(run_so_far(federation, engine, num_byzantine), rounds=rounds, charges=None)


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
