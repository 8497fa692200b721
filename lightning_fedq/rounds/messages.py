"""Wire messages of a round: the server's task, a client's answer, and how answers are refused.

An answer is one packed message in a frame that says whose it is and of which attempt at which round:

    magic "FQUP" | federation, 16 | round u64 | attempt u32 | client u64 | the packed message | tag, 16

The tag is HMAC-SHA256 under a stream that the client shares with the server, so a corrupted, forged or
replayed answer is told from a valid one; with keys from a seed it is a checksum only, as everything is.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.interface import HandOver, RoundContext

_HEADER = struct.Struct(">4s16sQIQ")
_MAGIC = b"FQUP"
_TASK = b"FQTK"
_LENGTH = struct.Struct(">I")
_TAG_BYTES = 16
_PURPOSE = "answer tag"
FRAME_BYTES = _HEADER.size + _TAG_BYTES
"""What the frame adds to a packed message."""


class RefusedMessageError(ValueError):
    """A client's message that the server refuses. Nothing has changed, and others may go on answering.

    Args:
        reason: What was wanted and what came.
        client: Client that the message names; None if it can't be read that far.
    """

    def __init__(self, reason: str, client: int | None = None) -> None:
        self.client = client
        super().__init__(reason if client is None else f"client {client}: {reason}")


class MalformedMessageError(RefusedMessageError):
    """A message of the wrong length or content: truncated, padded, or symbols that nobody can send."""


class ForeignMessageError(RefusedMessageError):
    """A message of another federation."""


class LateMessageError(RefusedMessageError):
    """A message of another round or attempt: late, or replayed."""


class UnexpectedMessageError(RefusedMessageError):
    """A message of a client that is not in the round's cohort."""


class RepeatedMessageError(RefusedMessageError):
    """A second message of a client that has answered."""


class ForgedMessageError(RefusedMessageError):
    """A message whose tag does not verify: corrupted, or from somebody without the client's key."""


@dataclass(frozen=True)
class RoundTask:
    """Task of one attempt at one round, from the server to its clients. All of it is public.

    Args:
        round: Round number, from 0.
        attempt: Earlier attempts at this round.
        groups: The cohort in the mechanism's groups.
        segments: Length of each segment of the flat vector.
        center: `(len(segments),)` float64, see `RoundContext`.
        radius: `(len(segments),)` float64, see `RoundContext`.
        hand_over: Pairs of clients that hand noise on, where clients correlate theirs over rounds.
    """

    round: int
    attempt: int
    groups: tuple[tuple[int, ...], ...]
    segments: tuple[int, ...]
    center: Tensor
    radius: Tensor
    hand_over: HandOver | None = None

    @classmethod
    def from_context(cls, context: RoundContext) -> RoundTask:
        """The task of a round that the server has opened."""
        c = context
        return cls(c.round, c.attempt, c.groups, c.segments, c.center, c.radius, c.hand_over)

    def context(self) -> RoundContext:
        """The round's public facts.

        Raises:
            ValueError: If it makes no sense, see `RoundContext`.
        """
        return RoundContext(
            self.round,
            self.groups,
            self.segments,
            self.center,
            self.radius,
            attempt=self.attempt,
            hand_over=self.hand_over,
        )

    def neighbours(self, client: int) -> tuple[int, ...]:
        """Those whose noise a client takes back, and who take back its own: it has a key with each."""
        if self.hand_over is None:
            return ()
        pairs = (*self.hand_over.before, *self.hand_over.after)
        return tuple(dict.fromkeys(other for own, other in pairs if own == client))

    def to_bytes(self) -> bytes:
        """A few numbers as JSON, behind them 4 bytes a client and a group, 24 a segment, 8 a hand-over."""
        fields: dict[str, Any] = {
            "round": self.round,
            "attempt": self.attempt,
            "cohort": sum(map(len, self.groups)),
            "groups": len(self.groups),
            "segments": len(self.segments),
        }
        pairs: list[NDArray[Any]] = []
        if (handed := self.hand_over) is not None:
            fields |= {"since": handed.since, "before": len(handed.before), "after": len(handed.after)}
            pairs = [np.array(part, "<u4") for part in (handed.before, handed.after)]
        head = json.dumps(fields).encode()
        cohort = np.array([client for group in self.groups for client in group], "<u4")
        sizes = np.array([len(group) for group in self.groups], "<u4")
        segments = np.array(self.segments, "<u8")
        reals = torch.stack([self.center, self.radius]).cpu().numpy().astype("<f8")
        body = b"".join(part.tobytes() for part in (cohort, sizes, segments, reals, *pairs))
        return _TASK + _LENGTH.pack(len(head)) + head + body

    @classmethod
    def from_bytes(cls, data: bytes) -> RoundTask:
        """Read `to_bytes`.

        Raises:
            ValueError: If it is no task, or `to_bytes` writes none like it.
        """
        task = cls._read(data)
        if task.to_bytes() != data:
            raise ValueError("no task of a round: a server writes it otherwise; is it of the same version?")
        return task

    @classmethod
    def _read(cls, data: bytes) -> RoundTask:
        try:
            (length,) = _LENGTH.unpack_from(data, 4)
            start = 8 + length
            head = json.loads(data[8:start])
            counts = [head[name] for name in ("cohort", "groups", "segments")]
            kinds, handed = ["<u4", "<u4", "<u8", "<f8"], "since" in head
            counts.append(2 * counts[2])  # center and radius
            if handed:
                kinds += ["<u4", "<u4"]
                counts += [2 * head["before"], 2 * head["after"]]
            parts: list[NDArray[Any]] = []
            for kind, count in zip(kinds, counts, strict=True):
                parts.append(np.frombuffer(data, kind, count, start))
                start += parts[-1].nbytes
            if data[:4] != _TASK or start != len(data) or parts[1].sum() != len(parts[0]):
                raise ValueError(f"{len(data)} bytes in place of {start}")
            round, attempt = int(head["round"]), int(head["attempt"])
            hand_over = None
            if handed:
                first, tried = map(int, head["since"])
                before, after = (tuple((int(a), int(b)) for a, b in p.reshape(-1, 2)) for p in parts[4:])
                hand_over = HandOver((first, tried), before, after)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise ValueError(f"no task of a round: {error}; is the server of the same version?") from error
        cohort, sizes, segments, reals = parts[:4]
        places, members = np.cumsum(sizes)[:-1], [int(client) for client in cohort]
        bounds = [0, *map(int, places), len(members)]
        groups = tuple(tuple(members[a:b]) for a, b in pairwise(bounds))
        center, radius = torch.from_numpy(reals.reshape(2, -1).astype(np.float64))
        return cls(round, attempt, groups, tuple(map(int, segments)), center, radius, hand_over)


def pack_frame(client: int, packed: bytes, context: RoundContext, rand: PublicRandomness) -> bytes:
    """Put a packed message into its frame.

    Args:
        client: Client that sent the message.
        packed: The bits, padded to bytes.
        rand: Randomness of the same attempt at the same round; knows the client's key with the server.
    """
    head = _HEADER.pack(_MAGIC, rand.federation, context.round, context.attempt, client)
    return head + packed + _tag(head + packed, client, rand)


def _tag(data: bytes, client: int, rand: PublicRandomness) -> bytes:
    key = rand.shared_with_server(client, _PURPOSE).words(8).tobytes()
    return hmac.digest(key, data, "sha256")[:_TAG_BYTES]


def open_frame(
    message: bytes, context: RoundContext, rand: PublicRandomness, expected: Collection[int]
) -> tuple[int, bytes]:
    """Return who sends a message, and its packed bits.

    Args:
        message: Bytes made by `pack_frame`, or by anybody.
        expected: Clients that have not answered yet.

    Raises:
        RefusedMessageError: One of its kinds.
    """
    if len(message) < FRAME_BYTES or not message.startswith(_MAGIC):
        raise MalformedMessageError(f"no answer of this protocol: {len(message)} bytes, {message[:4]!r}")
    _, federation, round, attempt, client = _HEADER.unpack_from(message)
    if federation != rand.federation:
        raise ForeignMessageError("the message is of another federation", client)
    if (round, attempt) != (context.round, context.attempt):
        raise LateMessageError(
            f"the message is of round {round}, attempt {attempt}; open is round {context.round}, "
            f"attempt {context.attempt}",
            client,
        )
    if client not in context.members:
        raise UnexpectedMessageError("not in the cohort of this round", client)
    if not hmac.compare_digest(_tag(message[:-_TAG_BYTES], client, rand), message[-_TAG_BYTES:]):
        raise ForgedMessageError("the tag does not verify: corrupted, or not from this client", client)
    if client not in expected:  # behind the tag: a forger is not told who has answered
        raise RepeatedMessageError("has answered already", client)
    return client, message[_HEADER.size : -_TAG_BYTES]
