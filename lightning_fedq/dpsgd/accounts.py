"""Sample-level accounts of every client's data under `DPSGD`, through checkpoints and killed processes.

Streams from a seed repeat a step with the same batch and the same noise, so that it is paid for once. Streams
from the operating system do not: there, what was spent stays spent, an open round counts as taken in full,
and so do rounds that the ledger has from elsewhere: of a process that was killed, or of another run. A
journal counts rounds and does not price them: they count at the present price, and a run goes on with rounds
of its checkpoint's price or not at all.

One account has one history. Accounts that have spent nothing go on from a checkpoint's; others only from a
checkpoint of their own past: one that they wrote, or the one that they began with. Any other history is
refused, because adding it up or leaving either out could forget a charge.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_fedq.dpsgd.poisson import PoissonBatches

if TYPE_CHECKING:
    from lightning_fedq.dpsgd.opacus import Account

History = list[tuple[float, float, int]]
"""Noise multiplier, sampling rate and number of steps, in turn."""


class SampleAccounts:
    """An account for everybody who holds data. Client 0 where nobody has dealt them out.

    Args:
        rows: Rows of one person that every account charges for, at any one client.

    Attributes:
        of_client: The accounts.
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
        """Give a copy a name of its own, so that what it spends is no part of the original's history."""
        vars(self).update(state)
        self._begin_with(self._id, self._now())

    def open(self, batches: PoissonBatches, noise_multiplier: float) -> None:
        """Open the accounts of a fit. What was spent before stays spent.

        Args:
            batches: Number of batches of the steps to come.
            noise_multiplier: Noise multiplier of the steps to come.

        Raises:
            ValueError: If rounds of a killed process may have had another price.
        """
        from lightning_fedq.dpsgd.opacus import Account

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
                    f"rounds of client {client} had {words(*theirs)}, here they have {words(*own)}, and what "
                    "the rounds of a killed process have spent would be unknown; resume with the noise, "
                    "batch_size, local_epochs, local_steps and limit_train_batches of the checkpoint, or "
                    "load only its weights: what is spent from then on comes on top"
                )

    def history(self, client: int) -> list[list[float]]:
        """Charges of a client, in plain numbers, each with the rows of a person where these are several."""
        rows = [float(self._rows)] * (self._rows > 1)
        return [[*entry, *rows] for entry in self._now().get(client, [])]

    def go_on(self, client: int, history: Sequence[Sequence[float]]) -> None:
        """Let a client's account, once it is opened, go on from what was kept elsewhere."""
        for *_, rows in ([*entry, 1][:4] for entry in history):
            self._check_rows(int(rows))
        self._histories[client] = [(noise, rate, int(steps)) for noise, rate, steps, *_ in history]

    def _check_rows(self, rows: int) -> None:
        """Refuse charges for persons with another number of rows, which are about other neighbours."""
        if rows != self._rows:
            raise ValueError(
                f"what was spent before is charged for persons with up to {rows} rows, and this DPSGD counts "
                f"{self._rows}; use DPSGD(rows_per_person={rows}), or load only the weights: what is spent "
                "from then on comes on top"
            )

    def _prices(self) -> list[list[float]]:
        """Price of a round for every client: noise multiplier, sampling rate, steps."""
        return [
            [account.noise_multiplier, account.sample_rate, float(self._batches.steps[client])]
            for client, account in self.of_client.items()
        ]

    def begin_round(self) -> None:
        """Nobody has taken a step of this round."""
        self._before_round = {}

    def charge(self, client: int) -> int:
        """Pay for one step of a client, before its noise is drawn, and return its number."""
        account = self.of_client[client]
        if client not in self._before_round:
            self._before_round[client] = list(account.accountant.history)
        return account.charge()

    def charge_elsewhere(self, charges: Sequence[int]) -> bool:
        """Pay, once, for rounds that others have charged these clients for. Between rounds.

        Args:
            charges: By client, `Ledger.charges_elsewhere`.

        Returns:
            Whether there was such a round.
        """
        known = self._elsewhere or [0] * len(charges)
        lost = [max(int(now) - then, 0) for now, then in zip(charges, known, strict=True)]
        for client, rounds in enumerate(lost):
            for _ in range(rounds * self._batches.steps[client] if rounds else 0):
                self.of_client[client].charge()
        self._elsewhere, self._loaded_prices = [a + b for a, b in zip(known, lost, strict=True)], []
        return any(lost)

    def state_dict(
        self, charges: Sequence[int] = (), at_start_of_round: bool = False, round_taken_by: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Every account, in plain types.

        Args:
            charges: Charges of this process, by client, where a journal may know more than this checkpoint.
            at_start_of_round: Leave out the open round, which will be repeated bit for bit.
            round_taken_by: Clients for whom the open round counts as taken in full.
        """
        histories = self._now()
        if at_start_of_round:
            histories |= self._before_round
        for client in round_taken_by:
            histories[client] = self._after_round(client)
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
        """Every client's history, what was loaded included."""
        opened = {client: list(account.accountant.history) for client, account in self.of_client.items()}
        return opened | self._histories

    def _after_round(self, client: int) -> History:
        """A client's history once it has taken all its steps of the open round."""
        account = self.of_client[client]
        before = sum(steps for _, _, steps in self._before_round.get(client, account.accountant.history))
        left = before + self._batches.steps[client] - account.steps
        rest = [(account.noise_multiplier, account.sample_rate, left)] if left else []
        history: History = account.accountant.history + rest
        return history

    def load_state_dict(self, state_dict: Mapping[str, Any], repeatable: bool) -> None:
        """Load `state_dict`: these accounts go on from it when they are opened.

        Args:
            state_dict: State that `state_dict` returned.
            repeatable: Do batches and noise follow from a seed? Then what came after a state of their own
                past is repeated bit for bit, so they go back to it. Else what was spent stays spent.

        Raises:
            ValueError: If these accounts have spent steps, and the state is not of their own past, or if it
                is about persons with another number of rows.
        """
        self._check_rows(state_dict.get("rows_per_person", 1))
        name, own = state_dict.get("id") or secrets.token_hex(8), self._now()  # 0.1.0 gave no names
        theirs: dict[int, History] = {
            int(client): [(nm, rate, steps) for nm, rate, steps in history]
            for client, history in state_dict["histories"].items()
        }
        if any(own.values()) and name != self._id and (name, theirs) != self._origin:
            spent = max(sum(steps for _, _, steps in history) for history in own.values())
            raise ValueError(
                f"this DPSGD has spent up to {spent} steps on a data set, which are no part of the "
                "checkpoint's history, and an account has one history; give the Trainer a new DPSGD, which "
                "goes on from the checkpoint's: what this one has spent comes on top for whoever sees both "
                "models"
            )
        if not any(own.values()):
            self._begin_with(name, theirs)
            self._elsewhere = list(state_dict["charges"])
        if repeatable or not any(own.values()):
            self._histories = theirs
        self._loaded_prices = state_dict["prices"] if state_dict["charges"] else []

    def _begin_with(self, name: str, histories: dict[int, History]) -> None:
        """Go on from others' history, under a name of one's own."""
        kept = {client: list(history) for client, history in histories.items()}
        self._origin, self._id = (name, kept), secrets.token_hex(8)
