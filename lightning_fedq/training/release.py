"""Release the mean of what clients measure, in a round of its own: masks, charge and noise as in any.

In a release every client of the federation takes part, whoever was in the round before it. Its charges are in
a ledger of their own, which hangs on the federation's (`Ledger.charges_beside`), and every epsilon of the run
counts both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fedq._lightning import callbacks_of, pl, rank_zero_warn
from lightning_fedq.algorithms.byzantine.counted import num_byzantine_of
from lightning_fedq.clients.evaluation import NoisyMean
from lightning_fedq.keys.randomness import AgreedKeys, Keys, SeededKeys
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.run import Run
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.secagg import Aggregation
from lightning_fedq.training.client_metrics import ClientMetricsChoice, protecting_samples
from lightning_fedq.training.described import everybody, mechanism_of_release, releases_of, run_to_charge
from lightning_fedq.training.journal import keep_journal
from lightning_fedq.training.rank_group import RankGroup
from lightning_fedq.training.settings import check_modulus

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation

_STREAMS = "released evaluations"


@dataclass(frozen=True)
class Released:
    """One release.

    Args:
        metric: Name of the metric.
        mean: Mean over the clients that answered, with noise, in units of the metric.
        num_clients: Clients that answered.
        uplink_bits: Bits that all clients sent for it.
    """

    metric: str
    mean: float
    num_clients: int
    uplink_bits: int

    def metrics(self) -> dict[str, float]:
        """By the names under which it is logged."""
        return {f"released/{self.metric}": self.mean, "released/uplink_bits": float(self.uplink_bits)}


def seeded_keys(planner: RoundPlanner, mechanism: Mechanism) -> SeededKeys:
    """Keys of the releases of a federation with a seed, which are others than its rounds'."""
    return SeededKeys(planner.plan(0, mechanism).stream_seed(_STREAMS))


class Releases:
    """The releases of one fit.

    Args:
        federation: The federation, whose ledger is charged.
        release: What is released.
        ranks: Group of several ranks: rank 0 releases for all of them.
        elsewhere: Makes the server of clients that are on other machines, of mechanism, planner, and all that
            a `RoundServer` takes beside its keys. None plays the clients here.

    Attributes:
        engine: The rounds that release.

    Raises:
        TypeError: If masks have no room for the sum.
        ValueError: If secure aggregation does not suit so many clients, or the ledger has paid for another
            release.
    """

    engine: Any

    def __init__(
        self,
        federation: Federation,
        release: NoisyMean,
        ranks: RankGroup | None = None,
        elsewhere: Callable[..., Any] | None = None,
    ) -> None:
        self._release, self._ranks = release, ranks
        secagg = federation.server.secure_aggregation
        planner = everybody(federation.planner)
        mechanism = mechanism_of_release(release, planner, secagg)
        if secagg is not None:
            secagg.rules(planner.num_clients)
        model = (torch.zeros(1), (1,), FixedRange(1.0))
        ledger = federation.ledger.charges_beside(repr(mechanism))
        if elsewhere is not None:
            self.engine = elsewhere(mechanism, planner, *model, ledger=ledger)
        else:
            keys: Keys = AgreedKeys(range(planner.num_clients))
            if federation.seed is not None:
                keys = seeded_keys(planner, mechanism)
            sums = None if secagg is None else partial(Aggregation, secagg)
            self.engine = RoundEngine(
                mechanism, planner, keys, *model, secure_sums=sums, diagnostics=False, ledger=ledger
            )
        self.engine.agree(run_to_charge(self.engine, secagg, 0))
        if secagg is not None:
            check_modulus(secagg, self.engine)

    @classmethod
    def begin(
        cls,
        federation: Federation,
        trainer: pl.Trainer,
        ranks: RankGroup | None = None,
        elsewhere: Callable[..., Any] | None = None,
    ) -> Releases | None:
        """The releases that a federation's settings ask for, with a journal of their charges."""
        wanted = federation.local.release
        if wanted is None:
            return None
        releases = cls(federation, wanted, ranks, elsewhere)
        keep_journal(trainer, releases.engine.ledger, federation.seed is not None)
        return releases

    def release(self, values: Tensor | None, round: int) -> Released | None:
        """Release the mean of every client's value. None where no more is paid for, or too many were missing.

        Args:
            values: `(clients,)`, in units of the metric. None where clients send them by themselves.
            round: Round of the training after which they were measured.
        """
        ranks = self._ranks
        if ranks is None:
            return self._of_all(values, round)
        # one noise: two ranks that draw their own would release two noisy values of one mean
        mine = (self._of_all(values, round), self.engine.ledger.state_dict()) if ranks.rank == 0 else None
        released, ledger = ranks.broadcast(mine, f"the release after round {round + 1}")
        if ranks.rank:
            self.engine.ledger.follow(ledger)
        return released  # type: ignore[no-any-return]

    def _of_all(self, values: Tensor | None, round: int) -> Released | None:
        engine, release = self.engine, self._release
        limits = engine.ledger.limits
        if limits is not None and bool((engine.ledger.charges >= limits).any()):
            rank_zero_warn(
                f"round {round + 1}: {release.metric} is not released, because the privacy budget counts on "
                f"{int(limits.min())} releases and they are made"
            )
            return None
        engine.round, engine.weights = round, torch.zeros(1)  # so that the model after the step is the mean
        plan = engine.start()
        try:
            if values is not None:
                engine.receive(plan.survivors, release.centred(values)[list(plan.survivors)][:, None])
            record = engine.finish()
        finally:
            engine.abandon()  # of a round that is finished nothing is left to give up
        if record.aborted:
            rank_zero_warn(f"round {round + 1}: {release.metric} is not released: {record.aborted}")
            return None
        mean = release.of_centred(float(engine.weights))
        return Released(release.metric, mean, int(record.num_received), int(record.uplink_bits))


def choice_of(federation: Federation) -> ClientMetricsChoice | None:
    """Where clients' metrics go: as asked for, and by itself nowhere if noisy ones are released."""
    asked = federation.local.client_metrics
    return "local" if asked is None and federation.local.release is not None else asked


def limit_releases(federation: Federation, counted: Run | None) -> None:
    """Let no more be released than an epsilon has counted."""
    kept = federation.ledger.beside
    if kept is None or counted is None or not counted.rounds:
        return
    limits = torch.full((kept.num_clients,), counted.rounds, dtype=torch.int32)
    kept.limits = limits if kept.limits is None else torch.minimum(limits, kept.limits)


def check_release(
    federation: Federation, trainer: Any, choice: ClientMetricsChoice, target: PrivacyTarget | None
) -> None:
    """Refuse what a released evaluation does not go with.

    Raises:
        ValueError: With the cure.
    """
    if federation.local.release is None:
        releases_of(federation, None)  # refuses a ledger of another release
        return
    check_samples(federation, callbacks_of(trainer))
    if num_byzantine_of(trainer, federation.planner):
        raise ValueError(
            "clients that lie are counted in a cohort, and a released evaluation asks everybody; leave "
            "release out of evaluate_clients, or leave out ByzantineClients"
        )
    check_exact(federation, choice)
    if target is not None and target.over == "round":
        raise ValueError(
            "a target over='round' says nothing of what is released between rounds; use over='run', or leave "
            "release out of evaluate_clients"
        )


def check_samples(federation: Federation, callbacks: Sequence[object]) -> None:
    """Refuse releases beside a claim about single samples.

    Raises:
        ValueError: With the cure.
    """
    protects = protecting_samples(callbacks)
    if protects and federation.local.release is not None:
        raise ValueError(
            f"{type(protects[0]).__name__} says what one sample of a client costs, and a released evaluation "
            "is not in it; leave release out of evaluate_clients, or leave the callback out"
        )


def check_exact(federation: Federation, choice: ClientMetricsChoice | None) -> None:
    """Refuse to let out with noise, and without it, too.

    Raises:
        ValueError: With the cure.
    """
    if federation.local.release is not None and choice == "shared" and federation.seed is None:
        raise ValueError(
            "client_metrics='shared' logs what clients measure without noise, and release adds noise to it; "
            "use client_metrics='local', or leave release out of evaluate_clients"
        )
