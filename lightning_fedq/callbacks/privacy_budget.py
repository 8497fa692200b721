"""`PrivacyBudget`: a run that stops itself before it has given away more than it may.

For a federation the budget limits the charges of every client in the federation's ledger, each by what
protects it, so no round is opened that would break it, whatever the loop does. For `DPSGD`, alone or inside
the clients, it limits every account's steps in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_warn
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.callbacks.dpsgd import DPSGD
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.target import adversary_named, affordable, check_law
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.training.accounts import full_run
from lightning_fedq.training.client_metrics import log_figure
from lightning_fedq.training.privacy_target import find_spent_client, warn_if_simulated
from lightning_fedq.training.settings import Federation

if TYPE_CHECKING:
    from lightning_fedq.rounds import RoundEngine

_NAMED = 10
"""Clients that an error names."""


class PrivacyBudget(pl.Callback):
    """Privacy budget: stop, fail or warn before any client's epsilon exceeds it.

    Logs what is spent every round.

    Args:
        epsilon: Budget over the run, > 0, in nats; of a client's, between any two of its updates.
        delta: Chance with which the guarantee may fail, below 1 / clients, or 1 / samples with `DPSGD`.
        adversary: Against whom, as a member of `Adversary` or its name in any case. "secagg_server" needs
            `Federated(secure_aggregation=...)`. `DPSGD` alone protects against the outsider, who sees the
            model; inside the clients against everybody.
        on_exhausted: "stop" ends the training after the last round that fits, "raise" fails before the first
            that does not, "warn" goes on.
        unit: Unit of privacy: a "client" (by the mechanism) or a "sample" (by `DPSGD`). None takes
            what there is, and asks where both are.

    Attributes:
        epsilon_spent: Largest epsilon of any client so far.
        affordable: Rounds (or steps, with `DPSGD`) that fit into the budget of the least protected client.

    Raises:
        ValueError: If a setting is out of its range.

    Example:
        >>> budget = PrivacyBudget(8.0, 1e-5, "secagg_server")  # behind Federated in trainer.callbacks
    """

    knows_clients = True
    writes_in_rounds = False

    def __init__(
        self,
        epsilon: float,
        delta: float,
        adversary: Adversary | str,
        on_exhausted: Literal["stop", "raise", "warn"] = "stop",
        unit: Literal["client", "sample"] | None = None,
    ) -> None:
        if not epsilon > 0.0:
            raise ValueError(f"epsilon must be > 0, got {epsilon}")
        if on_exhausted not in ("stop", "raise", "warn"):
            raise ValueError(f"on_exhausted must be 'stop', 'raise' or 'warn', got {on_exhausted!r}")
        if unit not in ("client", "sample", None):
            raise ValueError(f"unit must be 'client', 'sample' or None, got {unit!r}")
        self.epsilon, self.delta, self.unit = epsilon, check_delta(delta), unit
        self.clients_delta = None if unit == "sample" else delta
        self.adversary, self.on_exhausted = adversary_named(adversary), on_exhausted
        self.epsilon_spent, self.affordable = 0.0, 0
        self._warned = False
        self._current_spending: Callable[[], float] = _zero_spending
        self._blocked: Callable[[], str] = str
        self._began = self._counts_samples = self._seeded = self._secret = False
        self._unit = ""

    @property
    def statement(self) -> str:
        """Budget and spending in words.

        "" before the first fit.
        """
        if not self._began:
            return ""
        whose = "data set" if self._counts_samples else "client"
        by = "who never learns who took part, by every client alike"
        if not self._secret:
            by = f"by the {whose} that has spent most{self._unit}"
        return (
            f"Privacy budget: epsilon {format_epsilon(self._current_spending())} of {self.epsilon:g} spent "
            f"at delta {self.delta:g} against {self.adversary.value}, {by}"
            + (", had keys not come from a seed" if self._seeded else "")
            + ("; the run was not to stop there" if self.on_exhausted == "warn" else "")
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find what is affordable, and refuse to go on if it is spent already."""
        federated, dpsgd = _find_callback(trainer, Federation), _find_callback(trainer, DPSGD)
        if federated is None and dpsgd is None:
            raise ValueError(
                "PrivacyBudget has nothing to account for; add Federated or DPSGD to the callbacks"
            )
        self._counts_samples = self._find_unit(federated, dpsgd) == "sample"
        self._each_step = self._counts_samples and federated is None
        if self._counts_samples:
            self._follow_steps(dpsgd)
        else:
            law = federated.planner.law
            check_law("budget", self.adversary, "run", law)
            self._secret = law.secret
            follow = partial(self._follow_rounds, federated, trainer, law.secret)
            follow()
            federated.when_vector_changes(follow)
        self._began, self.epsilon_spent = True, self._current_spending()
        if why := self._blocked():
            self._act_on_exhausted(
                f"the budget of epsilon {self.epsilon:g} at delta {self.delta:g} is spent: {why}; "
                "raise the budget or stop here"
            )

    # ---- what is counted ----------------------------------------------------------------------------

    def _find_unit(self, federated: Federation | None, dpsgd: DPSGD | None) -> str:
        """The unit of the budget: there is one that protects something, or the user has said which."""
        if federated is None or dpsgd is None:
            found = "client" if dpsgd is None else "sample"
            if self.unit not in (None, found):
                raise ValueError(
                    f"nothing here protects a {self.unit}; leave unit out, or add "
                    + ("DPSGD" if found == "client" else "Federated with a private mechanism")
                )
            return found
        if self.unit is None:
            engine = federated.engine
            assert engine is not None
            claims = engine.mechanism.claims(engine.context(engine.next_plan()))
            if not all(isinstance(claim.loss, NonPrivate) for claim in claims):
                raise ValueError(
                    "the mechanism protects clients and DPSGD protects samples; say which of the two the "
                    "budget is about with unit='client' or unit='sample'"
                )
        return self.unit or "sample"

    def _follow_rounds(self, federated: Federation, trainer: pl.Trainer, secret: bool) -> None:
        """Limit what the ledger may charge: released rounds where cohorts are secret, else each client."""
        engine, adversary = federated.engine, self.adversary
        assert engine is not None
        ledger, clients = engine.ledger, engine.planner.num_clients
        delta = check_delta(self.delta, clients, "clients")
        simulated = warn_if_simulated(federated, adversary, "PrivacyBudget")
        self._seeded = federated.seed is not None
        asked = trainer.max_epochs
        horizon = 1 if secret else asked if asked is not None and asked > 0 else 1000
        run = full_run(federated, engine, count_byzantine(trainer, federated.planner), horizon)
        account = Account(run, delta)
        kinds = [range(clients)] if secret else engine.mechanism.protection_groups(clients)
        groups = [(list(kind), None if secret else kind[0]) for kind in kinds]
        limits = torch.empty(clients, dtype=torch.int32)
        for group, client in groups:
            loss = account.claims(client)[adversary].loss
            if isinstance(loss, NonPrivate):
                whom = "" if len(group) == clients else f" for clients {group[:_NAMED]}"
                raise ValueError(
                    f"no budget can be kept against {adversary.value}{whom}: {loss.reason}; "
                    "choose an adversary that the mechanism protects against"
                )
            limits[group] = affordable(account, adversary, self.epsilon, secret=secret, client=client)
        self.affordable = most = int(limits.min())
        if self.on_exhausted != "warn" and secret:  # a privacy target may have set limits, too
            ledger.round_limit = most if ledger.round_limit is None else min(most, ledger.round_limit)
        elif self.on_exhausted != "warn":
            ledger.limits = limits if ledger.limits is None else torch.minimum(limits, ledger.limits)

        def charged() -> torch.Tensor:
            return torch.full((clients,), ledger.rounds) if secret else ledger.charges

        def spent() -> float:
            most = [(int(charged()[group].max()), client) for group, client in groups]
            return max(account.epsilon(adversary, n, secret=secret, client=client) for n, client in most)

        self._current_spending, self._blocked = spent, lambda: _blocked(engine, charged(), limits)
        self._key = "fed/sim_epsilon" if simulated else "fed/epsilon"

    def _follow_steps(self, dpsgd: DPSGD) -> None:
        dpsgd.next_steps()  # refuses a loader without Poisson sampling
        if self._each_step and self.adversary is not Adversary.OUTSIDER:
            raise ValueError(
                f"DPSGD protects samples against whoever sees the model, got {self.adversary.value}; "
                "use Adversary.OUTSIDER"
            )
        accounts = dpsgd.accounts
        check_delta(self.delta, dpsgd.largest_data_set, "samples")
        self._seeded = dpsgd.seed is not None
        if self._seeded:
            rank_zero_warn(
                "DPSGD draws from a seed, so nothing is private; "
                "PrivacyBudget counts what DPSGD(seed=None) would give"
            )
        limits = {who: own.steps_within(self.epsilon, self.delta) for who, own in accounts.items()}
        if self.on_exhausted != "warn":
            for who, account in accounts.items():
                account.step_limit = limits[who]
        self.affordable = min(limits.values())
        unit = "steps" + ("" if self._each_step else " of one client")

        def blocked() -> str:
            if all(accounts[who].steps + steps <= limits[who] for who, steps in dpsgd.next_steps().items()):
                return ""
            done = max(account.steps for account in accounts.values())
            return f"{self.affordable} {unit} fit into it and {done} are done"

        self._current_spending, self._blocked = (lambda: dpsgd.epsilon(self.delta)), blocked
        self._key, self._unit = "dp/epsilon", f" ({dpsgd.unit})"

    # ---- what is done about it ------------------------------------------------------------------------

    def _act_on_exhausted(self, message: str) -> None:
        if self.on_exhausted != "warn":
            raise RuntimeError(message)
        if not self._warned:
            rank_zero_warn(message)
            self._warned = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """With `DPSGD`, stop after the last step that fits."""
        if self._each_step and (why := self._blocked()):
            self._end(trainer, why)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what is spent, and end the training if the next round does not fit."""
        self.epsilon_spent = self._current_spending()
        if not self._counts_samples and not trainer.barebones:
            budgets = [one for one in get_callbacks(trainer) if isinstance(one, PrivacyBudget)]
            several = sum(not one._counts_samples for one in budgets) > 1  # one name would have their mean
            target = _find_callback(trainer, Federation).privacy_target  # whose figure has the short name
            named = several or (target is not None and target.against is not self.adversary)
            key = f"{self._key}_{self.adversary.name.lower()}" if named else self._key
            log_figure(pl_module, key, self.epsilon_spent, prog_bar=True)
            log_figure(pl_module, "fed/delta", self.delta)
        if why := self._blocked():
            self._end(trainer, why)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The next fit has the budget of its own callbacks."""
        if stage == "fit":
            self._remove_limits(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """So has the next one after a fit that failed, which is not torn down."""
        self._remove_limits(trainer)

    @staticmethod
    def _remove_limits(trainer: pl.Trainer) -> None:
        federated = _find_callback(trainer, Federation)
        if federated is not None:
            federated.ledger.limits = federated.ledger.round_limit = None

    def _end(self, trainer: pl.Trainer, reason: str) -> None:
        if self.on_exhausted == "stop":
            trainer.should_stop = True
        elif self.on_exhausted == "warn":
            self._act_on_exhausted(f"the budget of epsilon {self.epsilon:g} is spent: {reason}; going on")


def _find_callback(trainer: pl.Trainer, kind: Any) -> Any:
    """The trainer's callback of a class, or None."""
    return next((callback for callback in get_callbacks(trainer) if isinstance(callback, kind)), None)


def _blocked(engine: RoundEngine, charges: torch.Tensor, limits: torch.Tensor) -> str:
    """Who of the next cohort can't afford the round, or can't afford any at all, in words. "" for nobody."""
    if engine.round == engine.planner.num_rounds:
        return "every client has taken part once"
    never = torch.nonzero(limits == 0).flatten().tolist()
    client = never[0] if never else find_spent_client(engine, charges, limits)
    if client is None:
        return ""
    whose = "" if bool((limits == limits[0]).all()) else f" of client {client}"
    return f"{int(limits[client])} rounds{whose} fit into it and {int(charges[client])} are done"


def _zero_spending() -> float:
    """Spending before the first fit. Not a lambda, so that a new callback can be pickled."""
    return 0.0
