"""Messages to clients, and answers that arrive in time, over Flower's `Grid`."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from lightning_fedq.flower.records import Fields, from_record, to_record

POLL = 0.2
"""Seconds between two checks for answers."""

_LONGEST = 2_000
"""Largest number of characters of a refusal that are shown."""


class Exchange:
    """Connection to nodes: messages to them, and their answers.

    Args:
        grid: Flower's connection to the nodes.
        timeout: Seconds after which an exchange ends without the missing answers.
        warn: Function that is called with a text for each refusal or failure.
    """

    def __init__(self, grid: Grid, timeout: float, warn: Callable[[str], None]) -> None:
        self._grid, self.timeout, self._warn = grid, timeout, warn
        self._failed: dict[int, str] = {}
        self._registrations: set[str] = set()

    def online(self) -> list[int]:
        """Return the nodes that are connected now."""
        return sorted(self._grid.get_node_ids())

    def __call__(self, kind: str, contents: Mapping[int, Fields], group: str) -> dict[int, Fields]:
        """Send each node its fields, and return its answer, or a refusal where there is no answer.

        Args:
            kind: Type of the message: "register", "train" or a stage of secure aggregation.
            contents: Fields of the message, by node.
            group: Name of the round for Flower's log.
        """
        requests = self.push(kind, contents, group)
        answers: dict[int, Fields] = {}
        self._failed.clear()
        end = time.monotonic() + self.timeout
        while requests and time.monotonic() < end:
            answers |= self.pull(requests)
            if requests:
                time.sleep(POLL)
        for node in requests.values():
            self._fail(node, f"no answer to {kind} in {self.timeout:g} s")
        return {**{node: {"refused": words} for node, words in self._failed.items()}, **answers}

    def _fail(self, node: int, text: object) -> None:
        """Note and warn why a node has not answered."""
        self._failed[node] = _escape_text(text)
        self._warn(f"Node {node}: {self._failed[node]}")

    def push(self, kind: str, contents: Mapping[int, Fields], group: str) -> dict[str, int]:
        """Send each node its fields (see `__call__`), and return the node of each message that was sent."""
        name = "train" if kind == "train" else f"query.{kind}"
        more: dict[str, Any] = {"message_type": name, "group_id": group, "ttl": self.timeout}
        messages = [Message(to_record(fields), dst_node_id=node, **more) for node, fields in contents.items()]
        numbers = zip(self._grid.push_messages(messages), contents, strict=True)
        requests = {number: node for number, node in numbers if number}
        if kind == "register":
            self._registrations.update(requests)
        return requests

    def pull(self, requests: dict[str, int]) -> dict[int, Fields]:
        """Return the answers that have arrived, by node, and remove their messages from `requests`."""
        answers: dict[int, Fields] = {}
        for reply in self._grid.pull_messages(list(requests)):
            # the SuperLink's own errors name no node, so the message that a reply answers identifies it
            number = reply.metadata.reply_to_message_id
            node, new = requests.pop(number), number in self._registrations
            self._registrations.discard(number)
            if (fields := self._read(node, reply, describe_error=not new)) is not None:
                answers[node] = fields
        return answers

    def _read(self, node: int, reply: Message, describe_error: bool = True) -> Fields | None:
        """Return the fields of one node's reply, or None after a warning if it can't be read.

        Args:
            node: Number of the node.
            reply: Reply of the node, or an error of the SuperLink.
            describe_error: Whether to warn of a refusal. The roster warns of refused registrations itself.
        """
        if reply.has_error():
            self._fail(node, reply.error.reason or f"error {reply.error.code}")
            return None
        try:
            fields = from_record(reply.content)
        except ValueError as error:
            self._fail(node, error)
            return None
        if "refused" in fields:
            words = _escape_text(fields["refused"])
            if describe_error:
                self._warn(f"Node {node} refuses: {words}")
            return {"refused": words, **({"accused": fields["accused"]} if "accused" in fields else {})}
        return fields


def _escape_text(text: object) -> str:
    """Return text from another party as part of one log line: printable, and cut to `_LONGEST`."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:_LONGEST])
