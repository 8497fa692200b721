"""Wire messages of a round: task, model, a client's answer, and the errors for refused answers.

An answer is one packed message in a frame. The frame names the federation, round, attempt and client (sizes
in bytes or as integer types):

    magic "FQUP" | federation, 16 | round u64 | attempt u32 | client u64 | the packed message | tag, 16

The tag is HMAC-SHA256 under a stream that the client shares with the server. The server uses it to detect
corrupted, forged and replayed answers. With keys from a seed the tag is only a checksum, because anybody can
compute such keys.
"""

from __future__ import annotations

import hmac
import json
import math
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
from lightning_fedq.wire.coding import FixedLength

_HEADER = struct.Struct(">4s16sQIQ")
_MAGIC = b"FQUP"
_TASK = b"FQTK"
_LENGTH = struct.Struct(">I")
_TAG_BYTES = 16
_PURPOSE = "answer tag"
FRAME_BYTES = _HEADER.size + _TAG_BYTES
"""Bytes that the frame adds to a packed message."""


class RefusedMessageError(ValueError):
    """Error for a client's message that the server refuses. The round's state is unchanged.

    Args:
        reason: Expected and received content of the message.
        client: Client that the message names. None if the message is too short to name a client.
    """

    def __init__(self, reason: str, client: int | None = None) -> None:
        self.client = client
        super().__init__(reason if client is None else f"Client {client}: {reason}")


class MalformedMessageError(RefusedMessageError):
    """Error for a message of wrong length, or with symbols that the mechanism never sends."""


class ForeignMessageError(RefusedMessageError):
    """Error for a message of another federation."""


class LateMessageError(RefusedMessageError):
    """Error for a late or replayed message: its round or attempt is not the open one."""


class UnexpectedMessageError(RefusedMessageError):
    """Error for a message of a client that is not in the round's cohort."""


class RepeatedMessageError(RefusedMessageError):
    """Error for a second message of a client that has already answered."""


class ForgedMessageError(RefusedMessageError):
    """Error for a message whose tag does not verify: corrupted, or made without the client's key."""


@dataclass(frozen=True)
class RoundTask:
    """Task of one attempt at a round, which the server sends to the cohort. All fields are public.

    Args:
        round: Round number, from 0.
        attempt: Number of earlier attempts at this round.
        groups: Clients of the cohort in the mechanism's groups.
        segments: Length of each segment of the flat vector.
        center: `(len(segments),)` float64 centre of each segment's quantisation range.
        radius: `(len(segments),)` float64 radius of each segment's quantisation range.
        hand_over: Pairs of clients that share noise across rounds, if the mechanism correlates noise.
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
        """Return the task of a round that the server has opened."""
        c = context
        return cls(c.round, c.attempt, c.groups, c.segments, c.center, c.radius, c.hand_over)

    def context(self) -> RoundContext:
        """Return the public facts of the round.

        Raises:
            ValueError: If `RoundContext` refuses a field.
        """
        facts = self.round, self.groups, self.segments, self.center, self.radius, self.attempt
        return RoundContext(*facts, hand_over=self.hand_over)

    def neighbours(self, client: int) -> tuple[int, ...]:
        """Return the clients with which `client` shares correlated noise, and therefore a key.

        The client cancels the noise of its predecessor, and its successor cancels the noise of the client.
        """
        if self.hand_over is None:
            return ()
        pairs = (*self.hand_over.before, *self.hand_over.after)
        return tuple(dict.fromkeys(other for member, other in pairs if member == client))

    def to_bytes(self) -> bytes:
        """Encode the task: JSON, then 4 bytes per client and group, 24 per segment, 8 per noise pair."""
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
        """Decode the bytes that `to_bytes` wrote.

        Raises:
            ValueError: If the bytes are not a task, or `to_bytes` would encode this task differently.
        """
        task = cls._read(data)
        if task.to_bytes() != data:
            raise ValueError(
                "Not the task of a round: its encoding is not canonical. "
                "Server and client need the same version."
            )
        return task

    @classmethod
    def _read(cls, data: bytes) -> RoundTask:
        """Decode the bytes of a task. Other bytes may decode to the same task."""
        try:
            (length,) = _LENGTH.unpack_from(data, 4)
            start = 8 + length
            head = json.loads(data[8:start])

            def take(kind: str, count: int) -> NDArray[Any]:
                """Return the next numbers of the body, in numpy's notation of types."""
                nonlocal start
                numbers = np.frombuffer(data, kind, count, start)
                start += numbers.nbytes
                return numbers

            cohort, sizes = take("<u4", head["cohort"]), take("<u4", head["groups"])
            segments, reals = take("<u8", head["segments"]), take("<f8", 2 * head["segments"])
            round, attempt, hand_over = int(head["round"]), int(head["attempt"]), None
            if "since" in head:
                first, tried = map(int, head["since"])
                pairs = (take("<u4", 2 * head[name]).reshape(-1, 2) for name in ("before", "after"))
                before, after = (tuple((int(a), int(b)) for a, b in part) for part in pairs)
                hand_over = HandOver((first, tried), before, after)
            if data[:4] != _TASK or start != len(data) or sizes.sum() != len(cohort):
                raise ValueError(f"{len(data)} bytes, expected {start}")
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise ValueError(
                f"Not the task of a round: {error}. Server and client need the same version."
            ) from error
        members = [int(client) for client in cohort]
        ends = [0, *map(int, np.cumsum(sizes)[:-1]), len(members)]
        groups = tuple(tuple(members[a:b]) for a, b in pairwise(ends))
        center, radius = torch.from_numpy(reals.reshape(2, -1).astype(np.float64))
        return cls(round, attempt, groups, tuple(map(int, segments)), center, radius, hand_over)


def pack_frame(client: int, packed: bytes, context: RoundContext, rand: PublicRandomness) -> bytes:
    """Put a packed message into its frame.

    Args:
        client: Client that sends the message.
        packed: Packed bits of the message, padded to bytes.
        context: Public facts of the round.
        rand: Randomness of the same attempt at the round, with the key that client and server share.
    """
    head = _HEADER.pack(_MAGIC, rand.federation, context.round, context.attempt, client)
    return head + packed + _tag(head + packed, client, rand)


def _tag(data: bytes, client: int, rand: PublicRandomness) -> bytes:
    """Compute the authentication tag of a frame under the key that client and server share."""
    key = rand.shared_with_server(client, _PURPOSE).words(8).tobytes()
    return hmac.digest(key, data, "sha256")[:_TAG_BYTES]


def open_frame(
    message: bytes, context: RoundContext, rand: PublicRandomness, expected: Collection[int]
) -> tuple[int, bytes]:
    """Check a framed message, and return its client and its packed bits.

    Args:
        message: Received bytes, which may come from anybody.
        context: Public facts of the open round.
        rand: Randomness of the open attempt, with the keys that the server shares with clients.
        expected: Clients that have not answered yet.

    Raises:
        MalformedMessageError: If the bytes are not a frame.
        ForeignMessageError: If the message is of another federation.
        LateMessageError: If the message is of another round or attempt.
        UnexpectedMessageError: If the client is not in the cohort.
        ForgedMessageError: If the tag does not verify.
        RepeatedMessageError: If the client has answered already.
    """
    if len(message) < FRAME_BYTES or not message.startswith(_MAGIC):
        raise MalformedMessageError(f"Not an answer of this protocol: {len(message)} bytes, {message[:4]!r}")
    _, federation, round, attempt, client = _HEADER.unpack_from(message)
    if federation != rand.federation:
        raise ForeignMessageError("the message is of another federation", client)
    if (round, attempt) != (context.round, context.attempt):
        raise LateMessageError(
            f"the message is of round {round}, attempt {attempt}, but round {context.round}, "
            f"attempt {context.attempt} is open",
            client,
        )
    if client not in context.members:
        raise UnexpectedMessageError("not in the cohort of this round", client)
    if not hmac.compare_digest(_tag(message[:-_TAG_BYTES], client, rand), message[-_TAG_BYTES:]):
        raise ForgedMessageError("the tag does not verify: corrupted, or not from this client", client)
    if client not in expected:  # checked after the tag, so that a forger cannot learn who has answered
        raise RepeatedMessageError("has answered already", client)
    return client, message[_HEADER.size : -_TAG_BYTES]


# ---- downlink ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broadcast:
    """Rounding of the model on the downlink, and its encoding as bytes.

    Every segment is rounded to the nearest of 2^bits levels between its smallest and largest value. The
    server keeps its own model at full precision and adds the mean update to it, so rounding errors do not add
    up over rounds. The server sends the model, not a difference of models, so a client does not need the
    model of the round before. Philippenko and Dieuleveut (NeurIPS 2021) also keep the central model, but
    their clients add up differences.

    Privacy: the rounded model is a function of the server's model, which every adversary is assumed to see.
    Rounding is therefore post-processing, and privacy claims stay the same.

    Args:
        bits: Bits per coordinate, 1 to 16.

    Raises:
        ValueError: If `bits` is not in [1, 16].

    Examples:
        >>> Broadcast(2).rounded(torch.tensor([0.0, 0.4, 3.0, 7.0]), (3, 1))
        tensor([0., 0., 3., 7.])
        >>> Broadcast(2).num_bits((3, 1))
        264
    """

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(
                f"broadcast_bits must be in [1, 16], or None for unrounded floats, got {self.bits}"
            )

    def num_bits(self, segments: tuple[int, ...]) -> int:
        """Return the size of a rounded model in bits: its levels, and two float64 values per segment."""
        return self.bits * sum(segments) + 128 * len(segments)

    def rounded(self, weights: Tensor, segments: tuple[int, ...]) -> Tensor:
        """Return the model `(dim,)` that clients receive."""
        return self._values(*self._levels(weights, segments), segments, weights.dtype).to(weights.device)

    def pack(self, weights: Tensor, segments: tuple[int, ...]) -> bytes:
        """Return the bytes of a model. A model that `rounded` returned is encoded without further error."""
        numbers, lines = self._levels(weights, segments)
        return lines.numpy().astype("<f8").tobytes() + FixedLength(self.bits).pack(numbers)

    def unpack(self, stream: bytes, segments: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode the model `(dim,)` from the bytes that `pack` wrote.

        Raises:
            ValueError: If `pack` cannot have written these bytes.
        """
        head = 16 * len(segments)
        lines = np.frombuffer(stream[:head].ljust(head, b"\0"), "<f8").astype(np.float64).reshape(-1, 2)
        numbers = FixedLength(self.bits).unpack(stream[head:], sum(segments))
        for part, (low, step) in zip(numbers.split_with_sizes(list(segments)), lines.tolist(), strict=True):
            ends = 0, (2**self.bits - 1 if step > 0 else 0)
            is_line = math.isfinite(low) and 0 <= step < math.inf
            if not is_line or (int(part.min()), int(part.max())) != ends:
                raise ValueError(
                    "The levels of a segment must run from its smallest to its largest value, got others"
                )
        return self._values(numbers.long(), torch.from_numpy(lines), segments, dtype)

    def _levels(self, weights: Tensor, segments: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Round each segment of a model to its levels.

        Returns:
            Level of each coordinate, `(dim,)` int64 in [0, 2^bits). Smallest value of each segment and
            distance between its levels, `(segments, 2)` float64.
        """
        numbers, lines, highest = [], [], 2**self.bits - 1
        for part in weights.detach().cpu().double().split_with_sizes(list(segments)):
            low, high = part.aminmax()
            step = (high - low) / highest
            # step 0: all values of the segment are equal
            places = (part - low) / step if step > 0 else torch.zeros_like(part)
            numbers.append(places.round().clamp(0, highest).long())
            lines.append(torch.stack([low, step]))
        return torch.cat(numbers), torch.stack(lines)

    @staticmethod
    def _values(levels: Tensor, lines: Tensor, segments: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Convert level numbers back to model values `(dim,)`."""
        # CPU and float64, product before sum: the server and every client get bit-identical floats
        parts = levels.double().split_with_sizes(list(segments))
        pairs = zip(parts, lines, strict=True)
        return torch.cat([numbers * step + low for numbers, (low, step) in pairs]).to(dtype)
