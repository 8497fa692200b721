"""Sample-level accounts of every client's data under `DPSGD`, through checkpoints and killed processes.

Streams from a seed repeat a step with the same batch and the same noise, so that it is paid for once. Streams
from the operating system do not: there, what was spent stays spent, an open round counts as taken in full,
and so do rounds that only the ledger's journal knows. The journal counts rounds and does not price them, so
such a run goes on with rounds of the checkpoint's price or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_fedq.sample_level.poisson import PoissonBatches

if TYPE_CHECKING:
    from lightning_fedq.privacy.sgd import Account

History = list[tuple[float, float, int]]
"""Noise multiplier, sampling rate and number of steps, in turn."""


class SampleAccounts:
    """An account for everybody who holds data. Client 0 where nobody has dealt them out.

    Attributes:
        of_client: The accounts.
    """

    def __init__(self) -> None:
        self.of_client: dict[int, Account] = {}
        self._histories: dict[int, History] = {}
        self._before_round: dict[int, History] = {}
        self._loaded_steps: dict[int, int] = {}
        self._loaded_prices: list[list[float]] = []
        self._charges: list[int] = []

    def open(self, batches: PoissonBatches, noise_multiplier: float, repeatable: bool) -> None:
        """Open the accounts of a fit. What was spent before stays spent.

        Args:
            batches: Of the steps to come.
            noise_multiplier: Of the steps to come.
            repeatable: Do batches and noise follow from a seed?

        Raises:
            ValueError: If rounds of a killed process may have had another price.
        """
        from lightning_fedq.privacy.sgd import Account

        self._batches = batches
        for client in range(len(batches.steps)):
            account = Account(noise_multiplier, batches.sample_rate(client))
            old, loaded = self.of_client.get(client), self._histories.get(client)
            if old is not None:
                account.accountant = old.accountant
            # without a seed, what this process has spent since it wrote the checkpoint is spent
            if loaded is not None and (repeatable or account.steps < self._loaded_steps[client]):
                account.accountant.history = loaded
            self.of_client[client] = account
        self._histories = {}
        if self._charges:
            self._check_prices()

    def _prices(self) -> list[list[float]]:
        """Price of a round for every client: noise multiplier, sampling rate, steps."""
        return [
            [account.noise_multiplier, account.sample_rate, float(self._batches.steps[client])]
            for client, account in self.of_client.items()
        ]

    def _check_prices(self) -> None:
        for client, (theirs, own) in enumerate(zip(self._loaded_prices, self._prices(), strict=True)):
            if theirs != own:
                words = "noise multiplier {:.6g}, sampling rate {:.6g} and {:.0f} steps".format
                raise ValueError(
                    f"rounds of client {client} had {words(*theirs)}, here they have {words(*own)}, and what "
                    "the rounds of a killed process have spent would be unknown; resume with the noise, "
                    "batch_size, local_epochs, local_steps and limit_train_batches of the checkpoint, or "
                    "load only its weights: what is spent from then on comes on top"
                )

    def begin_round(self) -> None:
        """Nobody has taken a step of this round."""
        self._before_round = {}

    def charge(self, client: int) -> int:
        """Pay for one step of a client, before its noise is drawn, and return its number."""
        account = self.of_client[client]
        self._before_round.setdefault(client, list(account.accountant.history))
        return account.charge()

    def charge_lost_rounds(self, charges: Sequence[int]) -> bool:
        """Pay, once, for what the ledger's journal knows and the checkpoint does not.

        Args:
            charges: The ledger's, by client.

        Returns:
            Whether there was such a round.
        """
        loaded, self._charges = self._charges, []
        lost = [int(now) - then for now, then in zip(charges, loaded, strict=True)] if loaded else []
        for client, rounds in enumerate(lost):
            account = self.of_client[client]
            paid = self._loaded_steps[client] + rounds * self._batches.steps[client]
            for _ in range(paid - account.steps):
                account.charge()
        return any(lost)

    def state_dict(
        self,
        charges: Sequence[int] = (),
        at_start_of_round: bool = False,
        round_taken_by: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Every account, in plain types.

        Args:
            charges: The ledger's, where its journal may know more than this checkpoint.
            at_start_of_round: Leave out the open round, which will be repeated bit for bit.
            round_taken_by: Clients for whom the open round counts as taken in full.
        """
        histories = {c: account.accountant.history for c, account in self.of_client.items()} | self._histories
        if at_start_of_round:
            histories |= self._before_round
        histories |= {client: self._after_round(client) for client in round_taken_by}
        plain = {str(client): [list(entry) for entry in history] for client, history in histories.items()}
        return {"histories": plain, "charges": list(charges), "prices": self._prices()}

    def _after_round(self, client: int) -> History:
        """A client's history once it has taken all its steps of the open round."""
        account = self.of_client[client]
        before = sum(steps for _, _, steps in self._before_round.get(client, account.accountant.history))
        left = before + self._batches.steps[client] - account.steps
        rest = [(account.noise_multiplier, account.sample_rate, left)] if left else []
        history: History = account.accountant.history + rest
        return history

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict`.

        The accounts go on from it when they are opened.
        """
        self._charges, self._loaded_prices = state_dict["charges"], state_dict["prices"]
        self._histories = {
            int(client): [(nm, rate, steps) for nm, rate, steps in history]
            for client, history in state_dict["histories"].items()
        }
        self._loaded_steps = {
            client: sum(steps for _, _, steps in history) for client, history in self._histories.items()
        }
