"""One SuperNode's queue of messages, over the HTTP API that Flower's own `flwr-clientapp` speaks.

Flower ships a client's code with each run, and `flwr-clientapp` installs and imports it. What is here
takes the message and leaves the code: nothing received is unpacked, installed or imported, and what could do
so (`flwr.cli.install`) is not even loaded.

All names of flwr that are not public stand in this module: those of flwr 1.41 and 1.42. Where a version has
moved one of them, the import fails, or `check_flower` does: a client stops, and has asked for nothing. Sizes
are seen before contents: a message that is too long is refused unread.
"""

from __future__ import annotations

import importlib.metadata
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.app.message.message import remove_content_from_message
from flwr.common.config import parse_config_args
from flwr.common.constant import SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_head_values_from_object_content,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient

from lightning_fedq.flower.settings import RefusedError

TRIED = ("1.41.", "1.42.")
"""Versions of flwr that this module was tried with, tests with hostile apps included."""

MOST_BYTES = 128 << 20
"""Bytes of one message, and of the app that its run brings, unless a site says otherwise."""

MOST_OBJECTS = 10_000
"""Objects of one message: each is a request."""

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_SHORT = 4096
"""Bytes of an answer that is read of a message that is refused; they are not looked at."""
_ALIVE = 10.0
"""Seconds between two signs of life; a SuperNode gives a task up after 60 without one."""
_FIELDS = (
    (AcquireTaskRequest, {"supported_task_types"}),
    (PushTaskOutputRequest, {"sub_status", "details"}),
    (PushAppMessagesRequest, {"messages_list", "message_object_trees"}),
)


class FlowerChangedError(RuntimeError):
    """A version of flwr that this module does not know."""


class MessageTooLongError(RefusedError):
    """More bytes than the site takes for one message."""


class RunEndedError(RefusedError):
    """A message whose run has ended before the SuperNode had its content. Nobody waits for an answer."""


def check_flower(version: str | None = None) -> None:
    """Compare what no import shows with flwr 1.41 and 1.42.

    Args:
        version: Version of flwr. None is the one that is installed.

    Raises:
        FlowerChangedError: If something is missing, or the version was not tried.
    """
    version = version or importlib.metadata.version("flwr")
    known = {str(kind) for kind in TaskType}
    missing = [
        f"{kind.__name__}.{name}"
        for kind, names in _FIELDS
        for name in names.difference(field.name for field in kind.DESCRIPTOR.fields)
    ]
    missing += [f"TaskType {name}" for name in {"flwr-clientapp", "flwr-agentapp"} - known]
    plain = RuntimeHttpClient("http://127.0.0.1:1")
    missing += [] if isinstance(getattr(plain, "_client", None), httpx.Client) else ["ProtobufClient._client"]
    if missing or not version.startswith(TRIED):
        found = f" and lacks {', '.join(sorted(missing))}" if missing else ""
        raise FlowerChangedError(
            f"flwr {version} is installed{found}; use a version that this client was tried with: "
            "pip install 'flwr>=1.41,<1.43'"
        )


def node_config(text: str) -> dict[str, Any]:
    """Read `--node-config` as `flower-supernode` does.

    Args:
        text: Pairs such as `partition-id=3 fedq-home="/var/lib/fedq"`.

    Raises:
        ValueError: If they are not pairs of a name and a value in TOML.

    Example:
        >>> node_config('partition-id=3 fedq-home="/var/lib/fedq"')
        {'partition-id': 3, 'fedq-home': '/var/lib/fedq'}
    """
    try:
        found = dict(parse_config_args([text] if text.strip() else None))
    except Exception as error:  # flwr's is click's, whose message is not for here
        raise ValueError(
            f"not a node configuration: {text!r}; write 'partition-id=3 fedq-home=\"/a/folder\"'"
        ) from error
    if text.strip() and not found:
        raise ValueError(f"no pair of a name and a value in {text!r}; write 'partition-id=3'")
    return found


def _array_bytes(contents: Mapping[str, bytes]) -> int:
    """Bytes of all arrays: one may name the same piece a million times, which travels once."""
    size = 0
    for content in contents.values():
        kind, parts, length = get_object_head_values_from_object_content(content)
        if kind == "Array":
            pieces = json.loads(content[len(content) - length :])["arraychunk_ids"]
            size += sum(len(contents[parts[piece]]) for piece in pieces)
    return size


class _AnswerBudget:
    """Bytes that answers of one task may still have, counted by their headers, before any of them is read."""

    def __init__(self, limit: int) -> None:
        self._limit, self._remaining, self._lock = limit, limit, threading.Lock()

    def __call__(self, response: httpx.Response) -> None:
        """Refuse an answer that is too long, or does not say how long it is."""
        length = response.headers.get("content-length", "")
        if not length.isdecimal() or response.headers.get("content-encoding", "identity") != "identity":
            raise MessageTooLongError("an answer of the SuperNode does not say how long it is")
        with self._lock:
            if int(length) > self._remaining:
                raise MessageTooLongError(
                    f"a message, or the app of its run, of more than {self._limit:,} bytes; if the model is "
                    "that large, start this client with a larger --max-megabytes"
                )
            self._remaining -= int(length)

    def reset(self, remaining: int | None = None) -> None:
        """Begin again: what is pushed has short answers, whatever was pulled before."""
        with self._lock:
            self._remaining = self._limit if remaining is None else remaining


@dataclass(frozen=True)
class SuperNode:
    """Where a SuperNode is, and what its site's processes prove themselves with.

    Args:
        address: Its `--host` and `--port`, such as `127.0.0.1:9094`.
        secret: Contents of its `--superexec-auth-secret-file`.
        certificates: PEM of the authority of its own certificate (`--ssl-certfile`); None goes without TLS.
        most_bytes: Bytes of one message, and of the app that its run brings.
    """

    address: str
    secret: bytes
    certificates: bytes | None = None
    most_bytes: int = MOST_BYTES

    def connect(self, interceptors: Any, measured: _AnswerBudget) -> RuntimeHttpClient:
        """A connection whose requests carry the secret of the site or the token of a task."""
        ways = [RuntimeVersionHttpInterceptor(component_name="fedq-client"), interceptors]
        secure = self.certificates is not None
        # trusts nobody else: the authorities of a system take 20 ms to read, for each message
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.certificates is not None:
            verify.load_verify_locations(cadata=self.certificates.decode("ascii"))
        address = f"{'https' if secure else 'http'}://{self.address}"
        client = RuntimeHttpClient(address, interceptors=ways, verify=verify)
        client.close()
        # flwr's own follows redirects, takes a proxy from the environment and unpacks what is compressed
        client._client = httpx.Client(
            verify=verify,
            timeout=30.0,
            follow_redirects=False,
            trust_env=False,
            headers={"accept-encoding": "identity"},
            event_hooks={"response": [measured]},
        )
        return client


class Queue:
    """Tasks of a SuperNode, of all kinds: one that nobody takes holds it up for good."""

    def __init__(self, node: SuperNode) -> None:
        proof = SuperExecAuthHttpInterceptor(master_secret=node.secret, protected_methods={_ACQUIRE})
        self._node, self._measured = node, _AnswerBudget(node.most_bytes)
        self._client, self._lock = node.connect(proof, self._measured), threading.Lock()
        self._following: Delivery | None = None
        self._everything = AcquireTaskRequest(supported_task_types=[str(kind) for kind in TaskType])

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def next(self) -> Delivery | None:
        """The oldest task that waits, or None.

        Raises:
            httpx.HTTPError: If the SuperNode can't be reached, or refuses.
            ValueError: If its answer can't be read.
        """
        with self._lock:
            found, self._following = self._following or self._acquire(), None
        return found

    def _acquire(self) -> Delivery | None:
        self._measured.reset()
        got = self._client.AcquireTask(self._everything)
        if not got.HasField("task") or not got.token:
            return None
        return Delivery(got.task, got.token, self._node, self._has_next_task)

    def _has_next_task(self) -> bool:
        """Whether another task waits. A SuperNode deals with one message after the other."""
        with self._lock:
            self._following = self._following or self._acquire()
            return self._following is not None


class Delivery:
    """One task: a message that is pulled in two steps, its envelope first, and the answer to it.

    A SuperNode hands a task out before it has pulled the message. Where its run is ended meanwhile, it leaves
    the task as it is and turns to the next message. An answer to the old one would then be sent in the place
    of the next one's, that one in the place of its successor's, and all of them too late.

    Args:
        token: The task's, with which its message is pulled.
        has_next_task: Says whether the SuperNode has another task already.
    """

    def __init__(self, task: Any, token: str, node: SuperNode, has_next_task: Callable[[], bool]) -> None:
        self._most_bytes, self._measured = node.most_bytes, _AnswerBudget(node.most_bytes)
        self._has_next_task = has_next_task
        self._client = node.connect(RuntimeTokenHttpInterceptor(token), self._measured)
        self._tree: Any = None
        self._confirmed = False
        self._head: Message | None = None
        self.run, self.task, self.app = int(task.run_id), int(task.task_id), str(task.fab_hash)
        self.is_client = task.type == TaskType.CLIENT_APP
        self.type = str(task.type)

    def open(self) -> None:
        """Tell the SuperNode that the task is begun, and pull the message's envelope.

        Raises:
            RefusedError: If the app that its run brings is too long, or there is not one message.
        """
        refused = None
        try:
            self._client.PullTaskInput(PullTaskInputRequest())  # app, configuration and context stay bytes
        except MessageTooLongError as error:
            refused = error
        pulled = self._client.PullMessages(PullAppMessagesRequest())
        if not pulled.messages_list:
            self._end(SubStatus.FAILED)
            raise RefusedError("a task without its message")
        if len(pulled.messages_list) != 1 or len(pulled.message_object_trees) != 1:
            raise RefusedError("a task of several messages")
        head = pulled.messages_list[0]
        head.content.CopyFrom(type(head.content)())  # travels by itself; whoever puts it here is not read
        head.ClearField("error")
        self._tree = pulled.message_object_trees[0]
        self._head = self._set_identifier(message_from_proto(head))
        if refused is not None:
            raise refused

    def _set_identifier(self, message: Message) -> Message:
        """A message does not carry its own identifier."""
        message.metadata.__dict__["_message_id"] = self._tree.object_id
        return message

    @property
    def is_open(self) -> bool:
        """Whether there is an envelope, so that the message can be answered."""
        return self._head is not None

    @property
    def kind(self) -> str:
        """Flower's type of the message, such as "train" or "query.register". Empty before it is opened."""
        return "" if self._head is None else str(self._head.metadata.message_type)

    @property
    def node(self) -> int:
        """Number of this node, as the message has it."""
        assert self._head is not None
        return int(self._head.metadata.dst_node_id)

    def pull(self) -> Message:
        """Pull the content.

        Raises:
            RefusedError: If it is too long, an error, or says something else than its envelope.
            RunEndedError: If it will not come.
        """
        parts = sum(1 for _ in iterate_object_tree(self._tree))
        if parts > MOST_OBJECTS:
            raise MessageTooLongError(f"a message of {parts:,} objects, {MOST_OBJECTS:,} at most are taken")
        pull = make_pull_object_fn_protobuf(self._client.PullObject, Node(node_id=self.node), self.run)

        def waiting(name: str) -> bytes:
            try:
                content: bytes = pull(name)
            except ObjectUnavailableError as error:
                if self._has_next_task():
                    raise ObjectPullError(name, "the SuperNode has gone on") from error
                raise
            return content

        names = list({part.object_id for part in iterate_object_tree(self._tree)})
        try:
            contents = pull_objects(names, waiting, max_time=None, max_tries_per_object=None, backoff_cap=2.0)
        except ObjectPullError as error:
            raise RunEndedError("its run has ended before its content came") from error
        self._confirm(self._tree.object_id)
        if (size := _array_bytes(contents)) > self._most_bytes:
            raise MessageTooLongError(f"a message that unfolds to {size:,} bytes; --max-megabytes is smaller")
        message = inflate_object_from_contents(self._tree.object_id, contents)
        if not isinstance(message, Message):
            raise RefusedError(f"{type(message).__name__} in place of a message")
        said = message.metadata
        if (said.message_type, said.run_id, said.dst_node_id) != (self.kind, self.run, self.node):
            raise RefusedError("a message that says something else than its envelope")
        if message.has_error():
            raise RefusedError("an error in place of a message")
        return self._set_identifier(message)

    def _confirm(self, name: str) -> None:
        """Let the SuperNode forget the message, refused or not."""
        self._confirmed = True
        node, call = Node(node_id=self.node), self._client.ConfirmMessageReceived
        make_confirm_message_received_fn_protobuf(call, node, self.run)(name)

    def answer(self, reply: Message) -> None:
        """Push the local app's answer."""
        self._measured.reset()
        self._push(reply)
        self._end(SubStatus.COMPLETED)

    def refuse(self, code: int, text: str, immediately: bool = False) -> None:
        """Answer a message that was opened with an error, where the SuperNode waits for an answer.

        Args:
            text: For the server.
            immediately: Leave a message whose content is not there to the SuperNode, and wait for nothing.
        """
        assert self._head is not None
        if not self._confirmed:
            if not self._wait_for_arrival(immediately):
                if not immediately:
                    self._end(SubStatus.FAILED)
                return
            self._confirm(self._tree.object_id)
        self._measured.reset()
        self._push(Message(Error(code, text), reply_to=self._head))
        self._end(SubStatus.FAILED)

    def _wait_for_arrival(self, immediately: bool) -> bool:
        """Wait until the SuperNode has the whole message, of which only short answers are read.

        One that is confirmed before is taken from under it, and it loses the answer.
        """
        for name in {part.object_id for part in iterate_object_tree(self._tree)}:
            asked = PullObjectRequest(node=Node(node_id=self.node), run_id=self.run, object_id=name)
            while True:
                self._measured.reset(_SHORT)
                try:
                    found = self._client.PullObject(asked)
                except MessageTooLongError:
                    break  # it is there, and left unread
                if found.object_available:
                    break
                if immediately or not found.object_found or self._has_next_task():
                    return False
                time.sleep(0.2)
        self._measured.reset()
        return True

    def _end(self, status: str) -> None:
        self._client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))

    def _push(self, reply: Message) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        envelope = message_to_proto(remove_content_from_message(reply))
        with no_object_id_recompute():
            tree = get_object_tree(reply)
            wanted = self._client.PushMessages(
                PushAppMessagesRequest(messages_list=[envelope], message_object_trees=[tree])
            )
            push = make_push_object_fn_protobuf(
                self._client.PushObject,
                Node(node_id=self.node),
                run_id=self.run,
                session_id=wanted.session_id,
            )
            parts = get_all_nested_objects(reply)
            push_objects(parts, push, object_ids_to_push=set(wanted.objects_to_push))

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Tell the SuperNode that the task is worked on, and close the connection at the end.

        Flower's own sender of these signs interrupts its process when the SuperNode has given a task up; a
        training that has used its stream may as well end.
        """
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_ALIVE):
                try:
                    self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
                except (httpx.HTTPError, RefusedError, ValueError):
                    continue  # the answer is pushed all the same, and then it shows whether anybody is there

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._client.close()
