"""Messages to clients and what comes back in time, over Flower's `Grid`."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from lightning_fedq.flower.records import Fields, from_record, to_record

POLL = 0.2
"""Seconds between two questions whether answers have come."""

_LONGEST = 2_000
"""Characters of a refusal that are shown."""


class Exchange:
    """Messages to nodes, and their answers. Whoever is silent is missing from them.

    Args:
        timeout: Seconds after which an exchange ends with those who have answered.
        warn: Told who refused, or failed, and why.
    """

    def __init__(self, grid: Grid, timeout: float, warn: Callable[[str], None]) -> None:
        self._grid, self.timeout, self._warn = grid, timeout, warn
        self._failed: dict[int, str] = {}
        self._registrations: set[str] = set()

    def online(self) -> list[int]:
        """Nodes that are connected now."""
        return sorted(self._grid.get_node_ids())

    def __call__(self, kind: str, contents: Mapping[int, Fields], group: str) -> dict[int, Fields]:
        """Send each node its fields, and return what came back: a refusal, too, where nothing did.

        Args:
            kind: What is asked: "register", "train" or a stage of the secure aggregation.
            contents: By node.
            group: Names the round, for Flower's log.
        """
        asked = self.push(kind, contents, group)
        answers: dict[int, Fields] = {}
        self._failed.clear()
        end = time.monotonic() + self.timeout
        while asked and time.monotonic() < end:
            answers |= self.pull(asked)
            if asked:
                time.sleep(POLL)
        for node in asked.values():
            self._fail(node, f"no answer to {kind} in {self.timeout:g} s")
        return {**{node: {"refused": words} for node, words in self._failed.items()}, **answers}

    def _fail(self, node: int, text: object) -> None:
        """Keep, and say, why a node has answered nothing."""
        self._failed[node] = _escape_text(text)
        self._warn(f"node {node}: {self._failed[node]}")

    def push(self, kind: str, contents: Mapping[int, Fields], group: str) -> dict[str, int]:
        """Send each node its fields, see `__call__`, and return the node of each message that has left."""
        name = "train" if kind == "train" else f"query.{kind}"
        more: dict[str, Any] = {"message_type": name, "group_id": group, "ttl": self.timeout}
        messages = [Message(to_record(fields), dst_node_id=node, **more) for node, fields in contents.items()]
        numbers = zip(self._grid.push_messages(messages), contents, strict=True)
        asked = {number: node for number, node in numbers if number}
        if kind == "register":
            self._registrations.update(asked)
        return asked

    def pull(self, requests: dict[str, int]) -> dict[int, Fields]:
        """Answers that have come by now, by node. Their messages are taken out of `requests`."""
        answers: dict[int, Fields] = {}
        for reply in self._grid.pull_messages(list(requests)):
            # an error that the SuperLink makes up names no node, so replies are known by what they answer
            number = reply.metadata.reply_to_message_id
            node, new = requests.pop(number), number in self._registrations
            self._registrations.discard(number)
            if (fields := self._read(node, reply, describe_error=not new)) is not None:
                answers[node] = fields
        return answers

    def _read(self, node: int, reply: Message, describe_error: bool = True) -> Fields | None:
        """Answer of one node. None is nothing that can be read, which is warned of.

        Args:
            describe_error: Whether to warn of a refusal; of one to register the roster does.
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
                self._warn(f"node {node} refuses: {words}")
            return {"refused": words, **({"accused": fields["accused"]} if "accused" in fields else {})}
        return fields


def _escape_text(text: object) -> str:
    """Words of somebody else as part of a line of a log, which they can neither end nor make long."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:_LONGEST])
