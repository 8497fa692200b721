"""Calibrate a federation's mechanism to its privacy target when a fit starts, and keep the solution.

The number of rounds comes from the Trainer, cohort size and dropouts from the planner, the number of corrupt
clients from secure aggregation and `ByzantineClients`, and the dimension from the module. The mechanism is
calibrated once, in the first fit. Later and resumed fits keep the solution, and are refused if it does not
cover their rounds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext
from lightning_fedq.privacy.planning import GOOD, SWAMPED, planned_noise, verdict_on
from lightning_fedq.privacy.run import Run
from lightning_fedq.privacy.target import (
    Calibration,
    PrivacyTarget,
    affordable,
    calibrate,
    make_account,
    spent_on,
)
from lightning_fedq.rounds import RoundEngine, RoundRecord
from lightning_fedq.training.accounts import NoiseWarning, full_run, planned_run
from lightning_fedq.training.settings import Federation

_ONE_DIRECTION, _FEW_CLIENTS = 0.5, 10
"""Share of the updates' energy along their mean above which to warn, and the fewest clients for a warning."""


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f". Noise-to-signal ratio R = {ratio:.3g} ({verdict_on(ratio)})"


def warn_if_simulated(federated: Federation, against: Adversary, whose: str) -> bool:
    """Warn that a privacy limit assumes secure keys or masks that this run lacks. Return whether it does.

    Args:
        against: Adversary of the limit.
        whose: What has the limit, in words, such as "the privacy target".
    """
    secagg, why = federated.server.secure_aggregation, []
    if federated.seed is not None:
        why.append(("The keys come from a seed, so nothing is private", "secure keys (seed=None)"))
    if against is Adversary.SECAGG_SERVER and secagg is not None and secagg.simulation == "counted":
        masks = "Masking is accounted for only, so this process sees every message"
        why.append((masks, "SecAgg(simulation='masked')"))
    for what, cure in why:
        rank_zero_warn(f"{what}. {whose} is computed as if the run had {cure}")
    return bool(why)


def find_spent_client(engine: RoundEngine, charges: Tensor, limits: Tensor) -> int | None:
    """Return the first client of the next cohort that has no charges left. None if every client has some.

    Args:
        charges: Rounds charged, `(num_clients,)`.
        limits: Largest number of rounds that may be charged, `(num_clients,)`.
    """
    cohort = sorted(engine.planner.plan(engine.round, engine.mechanism).cohort)
    spent = (charges[cohort] >= limits[cohort]).nonzero().flatten().tolist()
    return cohort[spent[0]] if spent else None


class CalibratedTarget:
    """Privacy target of a federation through all of its fits, with its solution.

    Args:
        privacy_target: Mechanism as the user gave it, before calibration.
    """

    def __init__(self, target: PrivacyTarget, privacy_target: Mechanism) -> None:
        self.target, self.asked = target, privacy_target
        self.calibration: Calibration | None = None
        self._warned, self._colluders, self._secret = False, 0, False

    def calibrate(self, federated: Federation, dim: int, rounds: int, num_byzantine: int) -> Calibration:
        """Find the mechanism that meets the target for `dim` parameters and `rounds` rounds.

        Raises:
            ValueError: If no mechanism meets the target. The message says what is possible.
        """
        rounds = rounds if self.target.over == "run" else 1
        run = planned_run(federated, self.asked, dim, rounds, num_byzantine)
        self._secret = run.sampling.law.secret
        if self.target.against is Adversary.SECAGG_SERVER:
            self._colluders = make_account(self.target, run).num_colluding - num_byzantine
        return calibrate(self.target, run)

    def begin(
        self, federated: Federation, trainer: pl.Trainer, dim: int, saved: dict[str, Any] | None
    ) -> None:
        """Set the federation's mechanism: calibrate it in the first fit, restore it in later ones.

        Args:
            dim: Number of coordinates of an update.
            saved: Solution in a checkpoint, see `state_dict`. None if the fit does not resume.

        Raises:
            ValueError: If the target can't be met, the Trainer has no number of rounds, or it has more rounds
                than the mechanism was calibrated for.
        """
        rounds = federated.count_rounds(trainer)
        if self.target.over == "run" and (rounds is None or rounds < 1):
            raise ValueError(
                "A privacy target over the run needs a number of rounds, got "
                f"Trainer(max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}). Set one of them, "
                "or use PrivacyTarget(over='round')"
            )
        wanted = max(rounds or 1, 1)
        before = self.calibration
        if saved is not None:
            self.calibration = self._restored(saved, federated, dim)
        elif before is None:
            charged = federated.ledger.max_charges  # not 0 if the ledger comes from an earlier federation
            byzantine = count_byzantine(trainer, federated.planner)
            self.calibration = self.calibrate(federated, dim, charged + wanted, byzantine)
            self._check_charged(federated, charged, wanted)
            ratio = planned_noise(self.solution.mechanism, federated.planner.cohort_size, dim, wanted)
            rank_zero_info(f"Privacy target: {self.statement}{_format_ratio(ratio)}")
            if ratio is not None and ratio > SWAMPED:
                self._warn_of_noise(federated, ratio)
        self._check_rounds(federated, wanted, is_repeated=saved is None and before is not None)
        warn_if_simulated(federated, self.target.against, "The privacy target")
        federated.mechanism = self.solution.mechanism
        if not federated.ledger.rounds:  # no round was charged for the mechanism as the user gave it
            federated.ledger.mechanism = repr(federated.mechanism)

    def _check_charged(self, federated: Federation, charged: int, setting: int) -> None:
        """Refuse a ledger that has charged rounds for another mechanism than the calibrated one.

        The charges of an earlier training count for a new calibration only if the mechanism stays the same.
        """
        ledger, found = federated.ledger, repr(self.solution.mechanism)
        if not charged or ledger.mechanism == found:
            return
        self.calibration = None
        rounds = "a round" if self.target.over == "round" else f"{charged + setting} rounds"
        raise ValueError(
            f"The ledger charged {charged} rounds of a client for {ledger.mechanism}, but {self.target} "
            f"over {rounds} needs {found}. Set max_epochs to the calibrated rounds less those {charged}, or "
            "leave ledger out and add the epsilons of both"
        )

    @property
    def solution(self) -> Calibration:
        """Calibration of a fit that has started."""
        assert self.calibration is not None
        return self.calibration

    @property
    def statement(self) -> str:
        """The calibrated mechanism and what it spends, in words. "" before the first fit."""
        found = self.calibration
        if found is None:
            return ""
        per = "round" if self.target.over == "round" else f"{found.charges} rounds of a client"
        per = f"{found.charges} released rounds" if self._secret else per
        among = f", with {self._colluders} of a cohort colluding" if self._colluders else ""
        return f"{self.target}{among}: {found.mechanism!r}, which spends {found.epsilon:.4g} over {per}"

    def _warn_of_noise(self, federated: Federation, ratio: float) -> None:
        """Warn before the first round that the model will hardly learn, and say how many clients it takes."""
        sums = self.target.against in (Adversary.SECAGG_SERVER, Adversary.OUTSIDER, Adversary.CLIENT)
        clients = math.ceil(federated.planner.cohort_size * (ratio / GOOD) ** (0.5 if sums else 1.0))
        rank_zero_warn(
            f"This run can hardly learn: at {self.target} its noise-to-signal ratio R is {ratio:.3g} "
            f"(good: up to {GOOD:g}). Use about {clients:,} clients a round, fewer parameters or a larger "
            "epsilon (`fedq plan` ranks the options)",
            category=NoiseWarning,
        )

    def _check_rounds(self, federated: Federation, rounds: int, is_repeated: bool) -> None:
        if self.target.over == "round":
            return
        ledger = federated.ledger
        done = ledger.rounds if self._secret else int(ledger.limited_charges.max())
        done = done if is_repeated else 0
        if done + rounds > self.solution.rounds:
            spent = f"{done} are charged and " if done else ""
            raise ValueError(
                f"The mechanism was calibrated for {self.solution.rounds} rounds, but {spent}the Trainer "
                f"wants {rounds}{' more' if done else ''}. Keep max_epochs, begin a new Federated, or resume "
                f"without privacy= with {self.solution.mechanism!r}"
            )

    def limit(self, engine: RoundEngine, federated: Federation, trainer: pl.Trainer) -> None:
        """Limit the ledger's charges to what the target allows. Repeated when the trained vector changes.

        Charges of another run in the same folder do not stop this one, but count in what is reported. So a
        script that trains anew in a fixed folder goes on, with a warning.

        Raises:
            ValueError: If the target is exceeded because more parameters are trained than at calibration.
        """
        byzantine = count_byzantine(trainer, federated.planner)
        run = full_run(federated, engine, byzantine, self.solution.rounds)
        if self.target.over == "round":
            self._check_still_met(run, "a round now spends")
            return
        if self._secret:  # all released rounds count, and not the charges of single clients
            self._check_still_met(run, f"{self.solution.rounds} rounds now spend")
            engine.ledger.round_limit = self.solution.rounds
            return
        account, against, epsilon = make_account(self.target, run), self.target.against, self.target.epsilon
        max_charges = affordable(account, against, epsilon, secret=False, at_least=self.solution.charges)
        engine.ledger.limits = torch.full((engine.planner.num_clients,), max_charges, dtype=torch.int32)
        engine.ledger.spares_other_runs = True
        if others := engine.ledger.max_charges_of_other_runs:
            spent = account.epsilon(against, others, secret=False)
            rank_zero_warn(
                f"Another run of this federation has spent {spent:.4g} of {self.target} "
                f"({', '.join(engine.ledger.other_runs)}), which counts in the report of this run. Use "
                "another folder for other clients, or Federated(ledger=...) if the target should cover both"
            )

    def _check_still_met(self, run: Run, whose: str) -> None:
        """Refuse a calibrated mechanism that no longer meets the target.

        Args:
            run: The run with its present number of parameters.
            whose: The rounds and their verb, for the message.
        """
        spent = spent_on(self.target, run, self.solution.rounds)
        if not self.target.is_met(spent):
            raise ValueError(
                f"{whose} {spent:.4g} of {self.target}, because the mechanism was calibrated for fewer "
                "trained parameters. Unfreeze parameters before the fit"
            )

    def skip_spent_rounds(self, engine: RoundEngine) -> None:
        """Skip rounds whose cohort has no budget left. Only where each client takes part once.

        A round that was sent and then lost has spent its cohort's budget, so it can't be repeated. The next
        cohort has its own budget.
        """
        last = engine.planner.num_rounds
        while last is not None and engine.round < last and self._is_spent(engine):
            rank_zero_warn(
                f"Round {engine.round + 1} was sent and lost, and its clients have spent their budget. The "
                "training goes on with the next cohort"
            )
            engine.skip()

    @staticmethod
    def _is_spent(engine: RoundEngine) -> bool:
        """Return whether a client of the next cohort has no charges left."""
        limits, charges = engine.ledger.limits, engine.ledger.limited_charges
        return limits is not None and find_spent_client(engine, charges, limits) is not None

    def check_direction(self, record: RoundRecord) -> None:
        """Warn once if most of the updates' energy lies along one direction, which wastes the clip_norm.

        Only a simulation knows this share. It is `fed/sim_homogeneity`.
        """
        if self._warned or not record.homogeneity > _ONE_DIRECTION or record.num_received < _FEW_CLIENTS:
            return
        self._warned = True
        rank_zero_warn(
            f"Round {record.round + 1}: more than half of the updates' energy lies in one direction "
            "(fed/sim_homogeneity). Standardise inputs with a public mean and standard deviation, unless "
            "clients hold alike data"
        )

    def end_round(self, federated: Federation, trainer: pl.Trainer) -> None:
        """Stop the training if the next cohort can't be charged."""
        engine, last = federated.started_engine, federated.count_rounds(trainer)
        ledger = engine.ledger
        if ledger.limits is None or (last is not None and trainer.current_epoch + 1 >= last > 0):
            return
        if self._is_spent(engine):
            rank_zero_info(f"{self.target} is reached, so the training ends: no further round can be charged")
            trainer.should_stop = True

    # ---- checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the solution in plain types, for a checkpoint."""
        one = torch.ones(1, dtype=torch.float64)
        context = RoundContext(0, ((0,),), (1,), 0.0 * one, one)
        return {
            "target": repr(self.target),
            "asked": repr(self.asked),
            "level": self.solution.level,
            "rounds": self.solution.rounds,
            "charges": self.solution.charges,
            "epsilon": self.solution.epsilon,
            "max_dropped": self.solution.mechanism.tolerated_dropouts(context) or 0,
            "mechanism": repr(self.solution.mechanism),
        }

    def check(self, saved: dict[str, Any] | None) -> None:
        """Refuse a checkpoint of another privacy target.

        Args:
            saved: Solution in the checkpoint, see `state_dict`. None if it was trained without a target.

        Raises:
            ValueError: If the targets differ, or the checkpoint has none.
        """
        if saved is None:
            raise ValueError(
                "The checkpoint was trained without a privacy target. Resume without one, or load its weights"
            )
        own = {"target": repr(self.target), "asked": repr(self.asked)}
        changed = {key: value for key, value in own.items() if saved[key] != value}
        differing = [f"{key} = {saved[key]} (here {value})" for key, value in changed.items()]
        if differing:
            raise ValueError(
                f"The checkpoint has another privacy target: {', '.join(differing)}. Resume with its settings"
            )

    def _restored(self, saved: dict[str, Any], federated: Federation, dim: int) -> Calibration:
        context = planned_run(federated, self.asked, dim, saved["rounds"], 0).context
        mechanism = self.asked.with_level(saved["level"], context, saved["max_dropped"])
        if repr(mechanism) != saved["mechanism"]:
            raise ValueError(
                f"The checkpoint was calibrated to {saved['mechanism']}, but gives {mechanism!r} for "
                f"the {dim} parameters here. Resume with the module of the checkpoint"
            )
        numbers = saved["level"], saved["rounds"], saved["charges"], saved["epsilon"]
        return Calibration(mechanism, *numbers)
