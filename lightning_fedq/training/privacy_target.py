"""From a privacy target to the setting of a federation, when a fit starts, and what is kept of it.

Rounds come from the Trainer, cohort and dropouts from the planner, corrupt clients from secure aggregation
and `ByzantineClients`, the dimension from the module. A mechanism is calibrated once, in the first fit; later
fits and resumed ones keep what was found, and are refused if it does not pay for them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext
from lightning_fedq.privacy.planning import GOOD, HOMOGENEITY, SWAMPED, relative_error, verdict_on
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
"""Share of the updates' energy along their mean that is warned of, and clients from which on it means it."""


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"; noise over signal R = {ratio:.3g} ({verdict_on(ratio)})"


def warn_if_simulated(federated: Federation, against: Adversary, whose: str) -> bool:
    """Warn that a limit is one of what secure keys or masks would give. Return whether it is.

    Args:
        whose: What has the limit, in words.
    """
    secagg, why = federated.server.secure_aggregation, []
    if federated.seed is not None:
        why.append(("the keys come from a seed, so nothing is private", "secure keys (seed=None)"))
    if against is Adversary.SECAGG_SERVER and secagg is not None and secagg.run == "accounted":
        masks = "masking is accounted for only, so whoever runs this sees every message"
        why.append((masks, "SecAgg(run='masked')"))
    for what, cure in why:
        rank_zero_warn(f"{what}; {whose} counts what {cure} would give")
    return bool(why)


def find_spent_client(engine: RoundEngine, charges: Tensor, limits: Tensor) -> int | None:
    """The first client of the next cohort that has no charge left. None where all have."""
    cohort = sorted(engine.planner.plan(engine.round, engine.mechanism).cohort)
    spent = (charges[cohort] >= limits[cohort]).nonzero().flatten().tolist()
    return cohort[spent[0]] if spent else None


class CalibratedTarget:
    """A federation's target through its fits: what was found for it, and how many charges it pays for.

    Args:
        privacy_target: The mechanism as given by the user.
    """

    def __init__(self, target: PrivacyTarget, privacy_target: Mechanism) -> None:
        self.target, self.asked = target, privacy_target
        self.calibration: Calibration | None = None
        self._warned, self._colluders, self._secret = False, 0, False

    def calibrate(self, federated: Federation, dim: int, rounds: int, num_byzantine: int) -> Calibration:
        """Set the mechanism to the target for so many parameters and rounds.

        Raises:
            ValueError: If it can't be met; with what could be.
        """
        rounds = rounds if self.target.over == "run" else 1
        run = planned_run(federated, self.asked, dim, rounds, num_byzantine)
        self._secret = run.sampling.law.secret
        if self.target.against is Adversary.SECAGG_SERVER:
            self._colluders = make_account(self.target, run).num_corrupt - num_byzantine
        return calibrate(self.target, run)

    def begin(
        self, federated: Federation, trainer: pl.Trainer, dim: int, saved: dict[str, Any] | None
    ) -> None:
        """Set the mechanism: calibrated in the first fit, in a later or resumed one as it was found.

        Raises:
            ValueError: If the target can't be met, there is no number of rounds, or more than is paid for.
        """
        rounds = trainer.max_epochs
        if self.target.over == "run" and (rounds is None or rounds < 1):
            raise ValueError(
                f"a privacy target over the run needs a number of rounds, got Trainer(max_epochs={rounds}); "
                "give one, or PrivacyTarget(over='round')"
            )
        wanted = max(rounds or 1, 1)
        before = self.calibration
        if saved is not None:
            self.calibration = self._restored(saved, federated, dim)
        elif before is None:
            charged = federated.ledger.max_charges  # of a ledger that was handed on
            byzantine = count_byzantine(trainer, federated.planner)
            self.calibration = self.calibrate(federated, dim, charged + wanted, byzantine)
            self._check_charged(federated, charged, wanted)
            ratio = self._noise_over_signal(federated, dim, wanted)
            rank_zero_info(f"privacy target: {self.statement}{_format_ratio(ratio)}")
            if ratio is not None and ratio > SWAMPED:
                self._warn_of_noise(federated, ratio)
        self._check_rounds(federated, wanted, is_repeated=saved is None and before is not None)
        warn_if_simulated(federated, self.target.against, "the privacy target")
        assert self.calibration is not None
        federated.mechanism = self.calibration.mechanism
        if not federated.ledger.rounds:  # nothing is charged for the mechanism as it was given
            federated.ledger.mechanism = repr(federated.mechanism)

    def _check_charged(self, federated: Federation, charged: int, setting: int) -> None:
        """Refuse a ledger whose charges were of another setting than the one that was found."""
        assert self.calibration is not None
        ledger, found = federated.ledger, repr(self.calibration.mechanism)
        if not charged or ledger.mechanism == found:
            return
        self.calibration = None
        rounds = "a round" if self.target.over == "round" else f"{charged + setting} rounds"
        raise ValueError(
            f"the ledger has {charged} rounds of a client charged for {ledger.mechanism}, and {self.target} "
            f"over {rounds} asks for {found}; let max_epochs be the rounds that the first training was "
            f"calibrated for less those {charged}, or leave ledger out, and what the same people have spent "
            "before comes on top of what the new one says"
        )

    @property
    def statement(self) -> str:
        """The solution in words.

        "" before the first fit.
        """
        found = self.calibration
        if found is None:
            return ""
        per = "round" if self.target.over == "round" else f"{found.charges} rounds of a client"
        per = f"{found.charges} released rounds" if self._secret else per
        among = f", of a cohort {self._colluders} may collude" if self._colluders else ""
        return f"{self.target}{among}: {found.mechanism!r}, which spends {found.epsilon:.4g} over {per}"

    def _noise_over_signal(self, federated: Federation, dim: int, rounds: int) -> float | None:
        """R of the whole run, as `fedq plan` counts it. None where it is not known."""
        assert self.calibration is not None
        error = relative_error(self.calibration.mechanism, federated.planner.cohort_size, dim)
        return None if error is None else error / (HOMOGENEITY * rounds)

    def _warn_of_noise(self, federated: Federation, ratio: float) -> None:
        """Say before the first round that the model will not learn, and about how many clients it takes."""
        sums = self.target.against in (Adversary.SECAGG_SERVER, Adversary.OUTSIDER, Adversary.CLIENT)
        clients = math.ceil(federated.planner.cohort_size * (ratio / GOOD) ** (0.5 if sums else 1.0))
        rank_zero_warn(
            f"this run can hardly learn: at {self.target} the noise of all rounds is {ratio:.3g} times the "
            f"signal (R; no loss is seen up to {GOOD:g}). It takes about {clients:,} clients a round, fewer "
            "parameters or a larger epsilon; `fedq plan` ranks what there is",
            category=NoiseWarning,
        )

    def _check_rounds(self, federated: Federation, rounds: int, is_repeated: bool) -> None:
        assert self.calibration is not None
        if self.target.over == "round":
            return
        ledger = federated.ledger
        done = (ledger.rounds if self._secret else ledger.max_charges) if is_repeated else 0
        if done + rounds > self.calibration.rounds:
            spent = f"{done} are charged and " if done else ""
            raise ValueError(
                f"the mechanism was calibrated for {self.calibration.rounds} rounds, {spent}the Trainer "
                "wants "
                f"{rounds}{' more' if done else ''}; keep max_epochs, or begin a new Federated with a target "
                "for all of them; a checkpoint goes on without privacy= and with "
                f"{self.calibration.mechanism!r}, "
                "and the page says what all rounds spend"
            )

    def limit(self, engine: RoundEngine, federated: Federation, trainer: pl.Trainer) -> None:
        """Let the ledger charge nobody beyond the target. Again whenever the trained vector changes.

        Raises:
            ValueError: If a round by itself is beyond it.
        """
        assert self.calibration is not None
        found, over_run = self.calibration, self.target.over == "run"
        byzantine = count_byzantine(trainer, federated.planner)
        run = full_run(federated, engine, byzantine, found.rounds)
        if not over_run or self._secret:
            spent = spent_on(self.target, run, found.rounds)
            if not self.target.is_met(spent):
                whose = f"{found.rounds} rounds now spend" if over_run else "a round now spends"
                raise ValueError(
                    f"{whose} {spent:.4g} of {self.target}, because more parameters are trained than when "
                    "the mechanism was calibrated; unfreeze before the fit"
                )
            if over_run:
                engine.ledger.round_limit = found.rounds
            return
        account = make_account(self.target, run)
        most = affordable(
            account, self.target.against, self.target.epsilon, secret=False, at_least=found.charges
        )
        engine.ledger.limits = torch.full((engine.planner.num_clients,), most, dtype=torch.int32)

    def skip_spent_rounds(self, engine: RoundEngine) -> None:
        """Where clients take part once, a round that was sent and then lost is not repeated.

        The next cohort's budget is its own, so the training goes on with it.
        """
        last = engine.planner.num_rounds
        while last is not None and engine.round < last and self._is_spent(engine):
            rank_zero_warn(
                f"round {engine.round + 1} was sent and lost, and its clients have spent their budget; the "
                "training goes on with the next cohort, without what they sent"
            )
            engine.skip()

    @staticmethod
    def _is_spent(engine: RoundEngine) -> bool:
        """Does someone in the next cohort have no charge left?"""
        limits, charges = engine.ledger.limits, engine.ledger.charges
        return limits is not None and find_spent_client(engine, charges, limits) is not None

    def check_direction(self, record: RoundRecord) -> None:
        """Warn once where one direction eats the clip, which a simulation knows and no real server does."""
        if self._warned or not record.homogeneity > _ONE_DIRECTION or record.num_received < _FEW_CLIENTS:
            return
        self._warned = True
        rank_zero_warn(
            f"round {record.round + 1}: more than half of the updates' energy lies in one direction "
            "(fed/sim_homogeneity, which only a simulation knows) and eats the norm that clients clip to. "
            "Where inputs are not centred, subtract a public mean and divide by a public standard deviation; "
            "where clients hold alike data, this is as it should be"
        )

    def end_round(self, engine: RoundEngine, trainer: pl.Trainer) -> None:
        """End the training where the next cohort can't be charged."""
        ledger, last = engine.ledger, trainer.max_epochs
        if ledger.limits is None or (last is not None and trainer.current_epoch + 1 >= last > 0):
            return
        if self._is_spent(engine):
            rank_zero_info(f"{self.target} is reached: no further round is paid for, the training ends")
            trainer.should_stop = True

    # ---- checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The solution, in plain types."""
        assert self.calibration is not None
        return {
            "target": repr(self.target),
            "asked": repr(self.asked),
            "level": self.calibration.level,
            "rounds": self.calibration.rounds,
            "charges": self.calibration.charges,
            "epsilon": self.calibration.epsilon,
            "max_dropped": self._max_dropped(self.calibration.mechanism),
            "mechanism": repr(self.calibration.mechanism),
        }

    @staticmethod
    def _max_dropped(mechanism: Mechanism) -> int:
        one = torch.ones(1, dtype=torch.float64)
        return mechanism.tolerated_dropouts(RoundContext(0, ((0,),), (1,), 0.0 * one, one)) or 0

    def check(self, saved: dict[str, Any] | None) -> None:
        """Refuse a checkpoint of another target.

        Raises:
            ValueError: With the cure.
        """
        if saved is None:
            raise ValueError(
                "the checkpoint was trained without a privacy target; resume without one, or load its weights"
            )
        own = {"target": repr(self.target), "asked": repr(self.asked)}
        differing = [
            f"{key} = {saved[key]} (here {value})" for key, value in own.items() if saved[key] != value
        ]
        if differing:
            raise ValueError(
                f"the checkpoint is of another privacy target: {', '.join(differing)}; "
                "resume with its settings"
            )

    def _restored(self, saved: dict[str, Any], federated: Federation, dim: int) -> Calibration:
        context = planned_run(federated, self.asked, dim, saved["rounds"], 0).context
        mechanism = self.asked.with_level(saved["level"], context, saved["max_dropped"])
        if repr(mechanism) != saved["mechanism"]:
            raise ValueError(
                f"the checkpoint was calibrated to {saved['mechanism']}, which would be {mechanism!r} for "
                f"the {dim} parameters here; resume with the module of the checkpoint"
            )
        numbers = saved["level"], saved["rounds"], saved["charges"], saved["epsilon"]
        return Calibration(mechanism, *numbers)
