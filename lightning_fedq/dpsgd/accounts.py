"""Sample-level accounts of every client's data under `DPSGD`, across checkpoints and killed processes.

With a seed, a resumed run repeats a step with the same batch and the same noise, so the step is charged once.
Without a seed, a repeated step draws new noise. Charges are then kept, and an open round counts as taken in
full. Rounds that only the ledger knows also count: those of a killed process or of another run. A journal
counts rounds without their price (noise multiplier, sampling rate and steps). They are charged at the present
price, so a run with another price than its checkpoint is refused.

An account has one history. Accounts that have spent nothing take over a checkpoint's history. Accounts that
have spent steps accept only a checkpoint that they wrote, or the one from which they started. Any other
history is refused, because merging two histories could lose a charge.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_fedq.dpsgd.poisson import PoissonBatches

if TYPE_CHECKING:
    from lightning_fedq.dpsgd.accountant import Account

History = list[tuple[float, float, int]]
"""Consecutive charges: noise multiplier, sampling rate and number of steps of each."""


class SampleAccounts:
    """One DP-SGD account for each client. Without a federation, client 0 stands for the whole data set.

    Args:
        rows: Largest number of rows of one person, >= 1. Every account charges for all of them.

    Attributes:
        of_client: Account of each client.
    """

    def __init__(self, rows: int = 1) -> None:
        self._rows = rows
        self.of_client: dict[int, Account] = {}
        self._id = secrets.token_hex(8)
        self._origin: tuple[str, dict[int, History]] = "", {}
        self._histories: dict[int, History] = {}
        self._before_round: dict[int, History] = {}
        self._loaded_prices: list[list[float]] = []
        self._elsewhere: list[int] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy a new identifier, because its charges do not belong to the original's history."""
        vars(self).update(state)
        self._begin_with(self._id, self._now())

    def open(self, batches: PoissonBatches, noise_multiplier: float) -> None:
        """Open the accounts of a fit, and keep all earlier charges.

        Args:
            batches: Poisson batches of each client, which give the sampling rates and the steps per round.
            noise_multiplier: Noise multiplier of the coming steps, > 0.

        Raises:
            ValueError: If the loaded checkpoint had another price per round. The charges of rounds of a
                killed process would then be unknown.
        """
        from lightning_fedq.dpsgd.accountant import Account

        self._batches = batches
        for client in range(len(batches.steps)):
            account = Account(noise_multiplier, batches.sample_rate(client), self._rows)
            if client in self.of_client:
                account.accountant = self.of_client[client].accountant
            if client in self._histories:
                account.accountant.history = self._histories.pop(client)
            self.of_client[client] = account
        prices = zip(self._loaded_prices, self._prices(), strict=True) if self._loaded_prices else ()
        for client, (theirs, own) in enumerate(prices):
            if theirs != own:
                words = "noise multiplier {:.6g}, sampling rate {:.6g} and {:.0f} steps".format
                raise ValueError(
                    f"The checkpoint's rounds of client {client} had {words(*theirs)}, and this fit has "
                    f"{words(*own)}. Keep the checkpoint's noise, batch_size, local_epochs, local_steps and "
                    "limit_train_batches, or load only weights and add both epsilons."
                )

    def history(self, client: int) -> list[list[float]]:
        """Return a client's charges as lists: noise multiplier, sampling rate, steps, and `rows`."""
        return [[*entry, float(self._rows)] for entry in self._now().get(client, [])]

    def go_on(self, client: int, history: Sequence[Sequence[float]]) -> None:
        """Continue a client's account from a stored `history`, as soon as the account is opened.

        Raises:
            ValueError: If the history was charged for another number of rows per person.
        """
        for *_, rows in history:
            self._check_rows(int(rows))
        self._histories[client] = [(noise, rate, int(steps)) for noise, rate, steps, _ in history]

    def _check_rows(self, rows: int) -> None:
        """Refuse charges for another number of rows per person, because their adjacency is another one."""
        if rows != self._rows:
            raise ValueError(
                f"Earlier steps were charged for {rows} rows per person, and this DPSGD has {self._rows}. "
                f"Use DPSGD(rows_per_person={rows}), or load only weights and add both epsilons."
            )

    def _prices(self) -> list[list[float]]:
        """Return each client's price of a round: noise multiplier, sampling rate, steps."""
        return [
            [account.noise_multiplier, account.sample_rate, float(self._batches.steps[client])]
            for client, account in self.of_client.items()
        ]

    def begin_round(self) -> None:
        """Start a round, in which no client has taken a step yet."""
        self._before_round = {}

    def charge(self, client: int) -> int:
        """Charge one step of a client, before its noise is drawn, and return the step's number."""
        account = self.of_client[client]
        if client not in self._before_round:
            self._before_round[client] = list(account.accountant.history)
        return account.charge()

    def charge_elsewhere(self, charges: Sequence[int]) -> bool:
        """Charge rounds that other processes have charged in the ledger, each once. Call between rounds.

        Args:
            charges: `Ledger.charges_elsewhere`: the number of such rounds of each client so far.

        Returns:
            Whether there were new ones.
        """
        known = self._elsewhere or [0] * len(charges)
        lost = [max(int(now) - then, 0) for now, then in zip(charges, known, strict=True)]
        for client, rounds in enumerate(lost):
            account = self.of_client[client]
            for _ in range(rounds * self._batches.steps[client]):  # a limit can't stop steps of the past
                account.accountant.step(
                    noise_multiplier=account.noise_multiplier, sample_rate=account.sample_rate
                )
        self._elsewhere, self._loaded_prices = [a + b for a, b in zip(known, lost, strict=True)], []
        return any(lost)

    def state_dict(
        self, charges: Sequence[int] = (), at_start_of_round: bool = False, round_taken_by: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Return all accounts in plain types.

        Args:
            charges: Rounds that this process has charged to each client, if a journal may know of more
                rounds than this checkpoint. Empty if there is no such journal.
            at_start_of_round: Leave out the open round, which will be repeated bit for bit.
            round_taken_by: Clients for which the open round counts as taken in full.
        """
        histories = self._now()
        if at_start_of_round:
            histories |= self._before_round
        for client in round_taken_by:
            account = self.of_client[client]
            before = self._before_round.get(client, account.accountant.history)
            left = sum(steps for _, _, steps in before) + self._batches.steps[client] - account.steps
            rest = [(account.noise_multiplier, account.sample_rate, left)] if left else []
            histories[client] = account.accountant.history + rest
        plain = {str(client): [list(entry) for entry in history] for client, history in histories.items()}
        elsewhere = self._elsewhere or [0] * len(charges)
        return {
            "id": self._id,
            "rows_per_person": self._rows,
            "histories": plain,
            "charges": [own + others for own, others in zip(charges, elsewhere, strict=False)],
            "prices": self._prices(),
        }

    def _now(self) -> dict[int, History]:
        """Return every client's history, including loaded ones whose account is not opened yet."""
        opened = {client: list(account.accountant.history) for client, account in self.of_client.items()}
        return opened | self._histories

    def load_state_dict(self, state_dict: Mapping[str, Any], repeatable: bool) -> None:
        """Load `state_dict`, from which the accounts continue when they are opened.

        Args:
            state_dict: State that `state_dict` returned.
            repeatable: Whether batches and noise follow from a seed. If so, later steps are repeated bit for
                bit, and the accounts go back to the state. Otherwise they keep all their charges.

        Raises:
            ValueError: If these accounts have spent steps, and they neither wrote the state nor started from
                it. Also if the state was charged for another number of rows per person.
        """
        self._check_rows(state_dict["rows_per_person"])
        own = self._now()
        has_spent, name = any(own.values()), state_dict["id"]
        saved: dict[int, History] = {
            int(client): [(noise, rate, steps) for noise, rate, steps in history]
            for client, history in state_dict["histories"].items()
        }
        is_of_this_run = name == self._id or (name, saved) == self._origin
        if has_spent and not is_of_this_run:
            spent = max(sum(steps for _, _, steps in history) for history in own.values())
            raise ValueError(
                f"This DPSGD has spent up to {spent} steps that the checkpoint does not contain. "
                "Use a new DPSGD, and add both epsilons if an adversary sees both models."
            )
        if not has_spent:
            self._begin_with(name, saved)
            self._elsewhere = list(state_dict["charges"])
        if repeatable or not has_spent:
            self._histories = saved
        self._loaded_prices = state_dict["prices"] if state_dict["charges"] else []

    def _begin_with(self, name: str, histories: dict[int, History]) -> None:
        """Continue from another object's histories under a new identifier, and remember their origin."""
        copies = {client: list(history) for client, history in histories.items()}
        self._origin, self._id = (name, copies), secrets.token_hex(8)
