"""Who was charged how often: one small counter per client, charged before anything leaves it.

A charge names the stream that it pays for, (round, attempt). Streams of a client must come in ascending
order, so no stream is ever paid for twice and none carries two payloads: a repeated round is a new attempt,
and is charged again. Counting is all that the ledger does; what a charge costs follows from the mechanism's
claims (`accounting`), and a ledger of another mechanism or another federation is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch


class Ledger:
    """Counts the rounds that every client was charged for; three integers a client.

    Args:
        num_clients: Clients 0 to num_clients - 1.
        mechanism: What is charged for, as text; a saved ledger is only taken back for the same.

    Raises:
        ValueError: If num_clients < 1.
    """

    def __init__(self, num_clients: int, mechanism: str) -> None:
        if num_clients < 1:
            raise ValueError(f"num_clients must be >= 1, got {num_clients}")
        self.num_clients, self.mechanism = num_clients, mechanism
        self.charges = torch.zeros(num_clients, dtype=torch.int32)
        self.limit: int | None = None
        """Charges after which a client is charged no more; a budget sets it."""
        self._streams = torch.full((num_clients, 2), -1, dtype=torch.int64)
        self._payloads = torch.zeros(num_clients, dtype=torch.int64)

    @property
    def most_charged(self) -> int:
        """Charges of the client that was charged most often."""
        return int(self.charges.max())

    def charge(self, clients: Sequence[int], round: int, attempt: int = 0) -> None:
        """Charge some clients for one stream each; call it before they encode anything.

        Args:
            clients: Whom, each once.
            round: Round number, >= 0.
            attempt: Attempt at this round, >= 0.

        Raises:
            ValueError: If a client is unknown or named twice.
            RuntimeError: If a client was charged for this stream, or a later one, before, or its limit
                is reached.
        """
        rows = torch.tensor(sorted(set(clients)), dtype=torch.int64)
        outside = bool(((rows < 0) | (rows >= self.num_clients)).any())
        if len(rows) != len(clients) or outside:
            raise ValueError(
                f"clients must be distinct and in [0, {self.num_clients}), got {tuple(clients)[:10]}"
            )
        last = self._streams[rows]
        used = (last[:, 0] > round) | ((last[:, 0] == round) & (last[:, 1] >= attempt))
        if bool(used.any()):
            raise RuntimeError(
                f"round {round}, attempt {attempt} was charged before for {rows[used].tolist()[:10]}; "
                "a stream serves one payload. Abandon the round, so that the next start is a new attempt"
            )
        if self.limit is not None and len(rows) and int(self.charges[rows].max()) >= self.limit:
            raise RuntimeError(
                f"the privacy budget allows {self.limit} rounds of one client and round {round} would be one "
                "more; raise the budget, or stop the training here"
            )
        self._streams[rows] = torch.tensor([round, attempt])
        self._payloads[rows] = 0
        self.charges[rows] += 1

    def seal(self, client: int, round: int, attempt: int, payload: bytes) -> None:
        """Tie a client's stream to the message that it serves; sending the same bytes again is fine.

        Args:
            client: Who sends.
            round: Round number.
            attempt: Attempt at this round.
            payload: The message, as it goes on the wire.

        Raises:
            RuntimeError: If the stream was not charged, or serves another payload already.
        """
        if self._streams[client].tolist() != [round, attempt]:
            raise RuntimeError(
                f"round {round}, attempt {attempt} is not the stream that client {client} was charged for; "
                "charge it before it sends"
            )
        # 63 bits of SHA-256; 0 means none yet
        digest = int.from_bytes(hashlib.sha256(payload).digest()[:8], "big") >> 1 | 1
        if int(self._payloads[client]) not in (0, digest):
            raise RuntimeError(
                f"round {round}, attempt {attempt} of client {client} serves another payload already; "
                "send the same bytes again, or start a new attempt"
            )
        self._payloads[client] = digest

    def state_dict(self) -> dict[str, Any]:
        """Everything, in tensors and plain types."""
        return {
            "mechanism": self.mechanism,
            "charges": self.charges.clone(),
            "streams": self._streams.clone(),
            "payloads": self._payloads.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: If the state is of another federation.
        """
        if state["mechanism"] != self.mechanism or len(state["charges"]) != self.num_clients:
            raise ValueError(
                f"the ledger is of {len(state['charges'])} clients of {state['mechanism']}, this federation "
                f"has {self.num_clients} with {self.mechanism}; resume with the checkpoint's own federation"
            )
        self.charges = state["charges"].clone()
        self._streams = state["streams"].clone()
        self._payloads = state["payloads"].clone()
