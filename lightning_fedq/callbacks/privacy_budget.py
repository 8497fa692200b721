"""`PrivacyBudget`: stop a run before any client's epsilon exceeds a budget.

For a federation the budget limits the charges of every client in the ledger, each by its own mechanism. So no
round that would exceed the budget is opened, whatever the training loop does. For `DPSGD`, alone or inside
the clients, it limits the steps of every account in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_warn
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.callbacks.dpsgd import DPSGD
from lightning_fedq.callbacks.trainer_lookup import find_callback
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.target import adversary_named, affordable, check_law
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.training.accounts import find_repeated_round, full_run
from lightning_fedq.training.client_metrics import log_figure
from lightning_fedq.training.privacy_target import find_spent_client, warn_if_simulated
from lightning_fedq.training.settings import Federation

if TYPE_CHECKING:
    from lightning_fedq.rounds import RoundEngine

_NAMED = 10
"""Largest number of clients that an error names."""
_MANY_ROUNDS = 1000
"""Assumed number of rounds of a Trainer without a limit, for mechanisms that hand noise on."""


class PrivacyBudget(pl.Callback):
    """Privacy budget, which stops the training, fails or warns before any client's epsilon exceeds it.

    It logs the spent epsilon every round.

    Args:
        epsilon: Privacy bound: any set of outcomes is at most e^epsilon times as likely for one of two inputs
            as for the other, plus delta. It is the budget of the run, > 0. For clients it is under
            replace-one adjacency: one client's updates replaced by any others.
        delta: Additive slack in the bound of epsilon, below one divided by the number of protected units.
            Units are clients, or samples with `DPSGD`.
        adversary: Adversary of the guarantee, as a member of `Adversary` or its name in upper or lower case.
            "secagg_server" needs `Federated(secure_aggregation=...)`. `DPSGD` alone protects against the
            outsider, who sees the model. Inside the clients it protects against every adversary.
        on_exhausted: Action when the budget is spent. "stop" ends the training after the last round that
            fits. "raise" fails before the first round that does not fit. "warn" continues.
        unit: Unit of privacy: "client" (protected by the mechanism) or "sample" (protected by `DPSGD`). None
            takes the one that is protected, and refuses if both are.

    Attributes:
        epsilon_spent: Largest epsilon of any client so far.
        affordable: Number of rounds (of steps with `DPSGD`) that fit into the budget of the least protected
            client.

    Raises:
        ValueError: If a setting is out of its range.

    Examples:
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
        self._current_spending: Callable[[], float] = float  # a class can be pickled, unlike a lambda
        self._blocked: Callable[[], str] = str
        self._began = self._counts_samples = self._seeded = self._secret = False
        self._unit = ""

    @property
    def statement(self) -> str:
        """Budget and spent epsilon in words. "" before the first fit."""
        if not self._began:
            return ""
        owner = "data set" if self._counts_samples else "client"
        spender = "who never learns the cohorts, by every client in this run, other runs not counted"
        if not self._secret:
            spender = f"by the {owner} with the largest epsilon{self._unit}"
        return (
            f"Privacy budget: epsilon {format_epsilon(self._current_spending())} of {self.epsilon:g} spent "
            f"at delta {self.delta:g} against {self.adversary.value}, {spender}"
            + (", if keys had not come from a seed" if self._seeded else "")
            + (". The budget did not limit the run" if self.on_exhausted == "warn" else "")
        )

    @property
    def limit_in_words(self) -> str:
        """Budget of clients that limited the last fit and was kept, in words. Otherwise ""."""
        spent = self._current_spending()
        if not self._began or self._counts_samples or self.on_exhausted == "warn" or spent > self.epsilon:
            return ""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g} against {self.adversary.value}"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compute how many rounds or steps fit into the budget, and refuse to start if it is spent."""
        federated, dpsgd = find_callback(trainer, Federation), find_callback(trainer, DPSGD)
        if federated is None and dpsgd is None:
            raise ValueError(
                "PrivacyBudget has nothing to account for. Add Federated or DPSGD to the callbacks."
            )
        self._counts_samples = self._find_unit(federated, dpsgd) == "sample"
        self._each_step = self._counts_samples and federated is None
        if self._counts_samples:
            self._follow_steps(dpsgd)
        else:
            check_law("budget", self.adversary, "run", federated.planner.law)
            self._secret = federated.planner.law.secret
            follow = partial(self._follow_rounds, federated, trainer)
            follow()
            federated.when_vector_changes(follow)
        self._began, self.epsilon_spent = True, self._current_spending()
        if why := self._blocked():
            others = "" if federated is None else federated.ledger.other_journals
            self._act_on_exhausted(
                f"The budget of epsilon {self.epsilon:g} at delta {self.delta:g} is spent: {why}. "
                f"Raise the budget, or stop here{others}."
            )

    # ---- what is counted ----------------------------------------------------------------------------

    def _find_unit(self, federated: Federation | None, dpsgd: DPSGD | None) -> str:
        """Return the unit of the budget: the one that is protected, or the user's choice if both are."""
        if federated is None or dpsgd is None:
            protected = "client" if dpsgd is None else "sample"
            if self.unit not in (None, protected):
                raise ValueError(
                    f"No callback protects a {self.unit}. Leave unit out, or add "
                    + ("DPSGD." if protected == "client" else "Federated with a private mechanism.")
                )
            return protected
        if self.unit is None:
            engine = federated.started_engine
            claims = engine.mechanism.claims(engine.context(engine.next_plan()))
            if not all(isinstance(claim.loss, NonPrivate) for claim in claims):
                raise ValueError(
                    "The mechanism protects clients, and DPSGD protects samples. "
                    "Choose the unit of the budget by unit='client' or unit='sample'."
                )
        return self.unit or "sample"

    def _follow_rounds(self, federated: Federation, trainer: pl.Trainer) -> None:
        """Limit the charges of the ledger: each client's, or all released rounds if cohorts are secret."""
        engine, adversary, secret = federated.started_engine, self.adversary, self._secret
        ledger, clients = engine.ledger, engine.planner.num_clients
        delta = check_delta(self.delta, clients, "clients")
        simulated = warn_if_simulated(federated, adversary, "PrivacyBudget")
        self._seeded = federated.seed is not None
        asked, byzantine = federated.count_rounds(trainer), count_byzantine(trainer, federated.planner)
        rounds = ledger.rounds + (asked if asked is not None and asked > 0 else _MANY_ROUNDS)
        account = Account(full_run(federated, engine, byzantine, rounds), delta)
        # clients of one kind have the same claims, which are asked about the first of them
        kinds = [range(clients)] if secret else engine.mechanism.protection_groups(clients)
        groups = [(list(kind), None if secret else kind[0]) for kind in kinds]
        limits = self._affordable_charges(account, groups, clients)
        self.affordable = int(limits.min())
        if self.on_exhausted != "warn" and secret:  # keep limits of other budgets or a target
            own, other = self.affordable, ledger.round_limit
            ledger.round_limit = own if other is None else min(own, other)
        elif self.on_exhausted != "warn":
            known = ledger.budget_limits
            ledger.budget_limits = limits if known is None else torch.minimum(limits, known)

        def charged() -> torch.Tensor:
            return torch.full((clients,), ledger.rounds) if secret else ledger.charges

        def spent() -> float:
            if secret and find_repeated_round(engine):
                return math.inf  # no account of the draw holds, as in the report
            rounds = [(int(charged()[group].max()), client) for group, client in groups]
            paid = replace(account, run=replace(account.run, rounds=ledger.rounds))
            return max(paid.epsilon(adversary, n, secret=secret, client=client) for n, client in rounds)

        self._current_spending, self._blocked = spent, lambda: _blocked(engine, charged(), limits)
        self._key = "fed/sim_epsilon" if simulated else "fed/epsilon"

    def _affordable_charges(
        self, account: Account, groups: Sequence[tuple[list[int], int | None]], num_clients: int
    ) -> torch.Tensor:
        """Return how many charges of each client fit into the budget, `(num_clients,)`.

        Args:
            groups: Clients with the same claims, each with the client to ask about. None asks about all.

        Raises:
            ValueError: If the mechanism does not protect some clients against the adversary.
        """
        limits = torch.empty(num_clients, dtype=torch.int32)
        for group, client in groups:
            loss = account.claims(client)[self.adversary].loss
            if isinstance(loss, NonPrivate):
                whom = "" if len(group) == num_clients else f" for clients {group[:_NAMED]}"
                raise ValueError(
                    f"No budget can be kept against {self.adversary.value}{whom}: {loss.reason}. "
                    "Choose an adversary that the mechanism protects against."
                )
            limits[group] = affordable(
                account, self.adversary, self.epsilon, secret=self._secret, client=client
            )
        return limits

    def _follow_steps(self, dpsgd: DPSGD) -> None:
        """Limit the steps of each account of `DPSGD`."""
        dpsgd.next_steps()  # refuses a loader without Poisson sampling
        if self._each_step and self.adversary is not Adversary.OUTSIDER:
            raise ValueError(
                f"DPSGD alone protects samples against the outsider, got {self.adversary.value}. "
                "Use Adversary.OUTSIDER."
            )
        accounts = dpsgd.accounts
        check_delta(self.delta, dpsgd.largest_data_set, "samples")
        self._seeded = dpsgd.seed is not None
        if self._seeded:
            rank_zero_warn(
                "DPSGD draws from a seed, so nothing is private. "
                "PrivacyBudget counts as for DPSGD(seed=None)."
            )
        limits = {
            client: account.steps_within(self.epsilon, self.delta) for client, account in accounts.items()
        }
        if self.on_exhausted != "warn":
            for client, account in accounts.items():
                account.step_limit = limits[client]
        self.affordable = min(limits.values())
        unit = "steps" + ("" if self._each_step else " of one client")

        def blocked() -> str:
            if all(accounts[k].steps + steps <= limits[k] for k, steps in dpsgd.next_steps().items()):
                return ""
            done = max(account.steps for account in accounts.values())
            return f"{self.affordable} {unit} fit into it, and {done} are done"

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
            budgets = [callback for callback in get_callbacks(trainer) if isinstance(callback, PrivacyBudget)]
            # Lightning would log the mean of several budgets under one name
            several = sum(not budget._counts_samples for budget in budgets) > 1
            # the epsilon of the privacy target has the short name
            target = find_callback(trainer, Federation).privacy_target
            is_named = several or (target is not None and target.against is not self.adversary)
            key = f"{self._key}_{self.adversary.name.lower()}" if is_named else self._key
            log_figure(pl_module, key, self.epsilon_spent, prog_bar=True)
            log_figure(pl_module, "fed/delta", self.delta)
        if why := self._blocked():
            self._end(trainer, why)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove the limits, because the next fit may have other budgets."""
        federated = find_callback(trainer, Federation)
        if stage == "fit" and federated is not None:
            ledger = federated.ledger
            ledger.limits = ledger.budget_limits = ledger.round_limit = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Remove the limits after a failed fit, for which Lightning calls no `teardown`."""
        self.teardown(trainer, pl_module, "fit")

    def _end(self, trainer: pl.Trainer, reason: str) -> None:
        if self.on_exhausted == "stop":
            trainer.should_stop = True
        elif self.on_exhausted == "warn":
            self._act_on_exhausted(
                f"The budget of epsilon {self.epsilon:g} is spent: {reason}. The training goes on."
            )


def _blocked(engine: RoundEngine, charges: torch.Tensor, limits: torch.Tensor) -> str:
    """Return why the next round does not fit into the budget, or "" if it does.

    Args:
        engine: Engine of the federation.
        charges: Charged rounds of each client, `(num_clients,)`.
        limits: Rounds of each client that fit into the budget, `(num_clients,)`. A client with limit 0 blocks
            the run even if it is not in the next cohort.
    """
    if engine.round == engine.planner.num_rounds:
        return "every client has taken part once"
    never = torch.nonzero(limits == 0).flatten().tolist()
    client = never[0] if never else find_spent_client(engine, charges, limits)
    if client is None:
        return ""
    whose = "" if bool((limits == limits[0]).all()) else f" of client {client}"
    return f"{int(limits[client])} rounds{whose} fit into it, and {int(charges[client])} are done"
