"""Message queue of one SuperNode, over the HTTP API that Flower's `flwr-clientapp` uses.

Flower ships a client's code with each run, and `flwr-clientapp` installs and imports it. This module takes
the message and ignores the code. It unpacks, installs and imports nothing that it receives, and does not load
the part of Flower that could (`flwr.cli.install`).

This module has all imports of private names of flwr, as in flwr 1.41 and 1.42, and is long because no other
module may have them. If a version has moved one of them, the import or `check_flower` fails. The client then
stops before it has asked for a message. Sizes are checked before contents, so a message that is too long is
refused unread.
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

from lightning_fedq.flower.refusals import RefusedError

TRIED = ("1.41.", "1.42.")
"""Versions of flwr that this module was tested with, including tests with hostile apps."""

MOST_BYTES = 128 << 20
"""Default limit in bytes of one message, and of the app that its run brings."""

MOST_OBJECTS = 10_000
"""Largest number of objects of one message, since each object is a request."""

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_SHORT = 4096
"""Number of bytes read from each answer about a refused message. Their contents are ignored."""
_ALIVE = 10.0
"""Seconds between two heartbeats. A SuperNode gives a task up after 60 s without one."""
_FIELDS = (
    (AcquireTaskRequest, {"supported_task_types"}),
    (PushTaskOutputRequest, {"sub_status", "details"}),
    (PushAppMessagesRequest, {"messages_list", "message_object_trees"}),
)


class FlowerChangedError(RuntimeError):
    """A version of flwr that this module does not support."""


class MessageTooLongError(RefusedError):
    """A message with more bytes or objects than the site accepts."""


class RunEndedError(RefusedError):
    """A message whose run ended before the SuperNode had its content, so no answer is expected."""


def check_flower(version: str | None = None) -> None:
    """Check that the parts of flwr that no import checks are as in flwr 1.41 and 1.42.

    Args:
        version: Version of flwr. None takes the installed one.

    Raises:
        FlowerChangedError: If a part is missing, or the version was not tested.
    """
    version = version or importlib.metadata.version("flwr")
    known = {str(kind) for kind in TaskType}
    missing = []
    for kind, names in _FIELDS:
        lacking = names.difference(field.name for field in kind.DESCRIPTOR.fields)
        missing += [f"{kind.__name__}.{name}" for name in lacking]
    missing += [f"TaskType {name}" for name in {"flwr-clientapp", "flwr-agentapp"} - known]
    plain = RuntimeHttpClient("http://127.0.0.1:1")
    missing += [] if isinstance(getattr(plain, "_client", None), httpx.Client) else ["ProtobufClient._client"]
    if missing or not version.startswith(TRIED):
        lack = f" and lacks {', '.join(sorted(missing))}" if missing else ""
        raise FlowerChangedError(
            f"flwr {version} is installed{lack}, which this client does not support. Install a supported "
            "version: pip install 'flwr>=1.41,<1.43'"
        )


def node_config(text: str) -> dict[str, Any]:
    """Read `--node-config` as `flower-supernode` does.

    Args:
        text: Pairs such as `partition-id=3 fedq-home="/var/lib/fedq"`.

    Returns:
        Values by name.

    Raises:
        ValueError: If the text has no pairs of a name and a TOML value.

    Examples:
        >>> node_config('partition-id=3 fedq-home="/var/lib/fedq"')
        {'partition-id': 3, 'fedq-home': '/var/lib/fedq'}
    """
    try:
        values = dict(parse_config_args([text] if text.strip() else None))
    except Exception as error:  # flwr raises errors of click, whose text does not fit here
        raise ValueError(
            f"Not a node configuration: {text!r}. Write 'partition-id=3 fedq-home=\"/a/folder\"'"
        ) from error
    if text.strip() and not values:
        raise ValueError(f"No pair of a name and a value in {text!r}. Write 'partition-id=3'")
    return values


def _array_bytes(contents: Mapping[str, bytes]) -> int:
    """Return the bytes of all arrays after unfolding.

    An array may name the same chunk a million times although it travels once, so the message size is no
    limit.
    """
    size = 0
    for content in contents.values():
        kind, parts, length = get_object_head_values_from_object_content(content)
        if kind == "Array":
            pieces = json.loads(content[len(content) - length :])["arraychunk_ids"]
            size += sum(len(contents[parts[piece]]) for piece in pieces)
    return size


class _AnswerBudget:
    """Budget of bytes for the answers to one task, charged by their headers before any is read.

    Args:
        limit: Number of bytes for all answers of the task.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._remaining, self._lock = limit, limit, threading.Lock()

    def __call__(self, response: httpx.Response) -> None:
        """Charge an answer, and refuse it if it is too long or does not give its length.

        Raises:
            MessageTooLongError: If either is the case.
        """
        length = response.headers.get("content-length", "")
        if not length.isdecimal() or response.headers.get("content-encoding", "identity") != "identity":
            raise MessageTooLongError("An answer of the SuperNode does not give its length")
        with self._lock:
            if int(length) > self._remaining:
                raise MessageTooLongError(
                    f"A message, or its run's app, has more than {self._limit:,} bytes. For a model that "
                    "large, start this client with a larger --max-megabytes."
                )
            self._remaining -= int(length)

    def reset(self, remaining: int | None = None) -> None:
        """Reset the budget, for example after a pull, because answers to pushed objects are short."""
        with self._lock:
            self._remaining = self._limit if remaining is None else remaining


@dataclass(frozen=True)
class SuperNode:
    """Address of a SuperNode, and the secret that proves this site's processes to it.

    Args:
        address: Its `--host` and `--port`, such as `127.0.0.1:9094`.
        secret: Contents of its `--superexec-auth-secret-file`.
        certificates: PEM of the authority that signed `--ssl-certfile`. None connects without TLS.
        most_bytes: Largest number of bytes of one message, and of the app that its run brings.
    """

    address: str
    secret: bytes
    certificates: bytes | None = None
    most_bytes: int = MOST_BYTES

    def connect(self, interceptors: Any, measured: _AnswerBudget) -> RuntimeHttpClient:
        """Return a connection whose requests carry the site's secret or a task's token.

        Args:
            interceptors: Interceptor of flwr that adds the secret or the token.
            measured: Budget that each answer is charged to.
        """
        all_interceptors = [RuntimeVersionHttpInterceptor(component_name="fedq-client"), interceptors]
        secure = self.certificates is not None
        # trusts this authority only, because loading a system's authorities takes 20 ms per message
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.certificates is not None:
            verify.load_verify_locations(cadata=self.certificates.decode("ascii"))
        address = f"{'https' if secure else 'http'}://{self.address}"
        client = RuntimeHttpClient(address, interceptors=all_interceptors, verify=verify)
        client.close()
        # flwr's own client follows redirects, uses a proxy from the environment and decompresses answers
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
    """Queue of a SuperNode's tasks of all kinds, because a task that no process takes blocks it for good.

    Args:
        node: Address and secret of the SuperNode.
    """

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
        """Return the oldest task that waits, or None.

        Raises:
            httpx.HTTPError: If the SuperNode can't be reached, or refuses.
            ValueError: If its answer can't be read.
        """
        with self._lock:
            found, self._following = self._following or self._acquire(), None
        return found

    def _acquire(self) -> Delivery | None:
        """Ask the SuperNode for a task, and return it, or None if there is none."""
        self._measured.reset()
        answer = self._client.AcquireTask(self._everything)
        if not answer.HasField("task") or not answer.token:
            return None
        return Delivery(answer.task, answer.token, self._node, self._has_next_task)

    def _has_next_task(self) -> bool:
        """Return whether another task waits. A SuperNode handles its messages one after the other."""
        with self._lock:
            self._following = self._following or self._acquire()
            return self._following is not None


class Delivery:
    """One task: a message that is pulled in two steps, first its envelope, and the answer to it.

    A SuperNode hands a task out before it has pulled the message. If the message's run ends in between, the
    SuperNode keeps the task and turns to the next message. An answer to the old message would then be sent in
    place of the next answer, and so on, and all of them would be too late.

    Args:
        task: Task as the SuperNode describes it.
        token: Token of the task, with which its message is pulled.
        node: Address of the SuperNode.
        has_next_task: Function that returns whether the SuperNode has another task already.
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
        """Tell the SuperNode that the task has begun, and pull the envelope of the message.

        Raises:
            RefusedError: If the app of its run is too long, or the task does not have exactly one message.
        """
        refused = None
        try:
            # app, configuration and context are left as bytes
            self._client.PullTaskInput(PullTaskInputRequest())
        except MessageTooLongError as error:
            refused = error
        pulled = self._client.PullMessages(PullAppMessagesRequest())
        if not pulled.messages_list:
            self._end(SubStatus.FAILED)
            raise RefusedError("A task without its message")
        if len(pulled.messages_list) != 1 or len(pulled.message_object_trees) != 1:
            raise RefusedError("A task of several messages")
        head = pulled.messages_list[0]
        # the content travels separately, so content in the envelope is dropped
        head.content.CopyFrom(type(head.content)())
        head.ClearField("error")
        self._tree = pulled.message_object_trees[0]
        self._head = self._set_identifier(message_from_proto(head))
        if refused is not None:
            raise refused

    def _set_identifier(self, message: Message) -> Message:
        """Set the identifier of a message, which the message itself does not carry."""
        message.metadata.__dict__["_message_id"] = self._tree.object_id
        return message

    @property
    def is_open(self) -> bool:
        """Whether the envelope is there, so that the message can be answered."""
        return self._head is not None

    @property
    def kind(self) -> str:
        """Flower's type of the message, such as "train" or "query.register". Empty before `open`."""
        return "" if self._head is None else str(self._head.metadata.message_type)

    @property
    def node(self) -> int:
        """Number of this node, as in the message."""
        assert self._head is not None
        return int(self._head.metadata.dst_node_id)

    def pull(self) -> Message:
        """Pull the content of the message.

        Raises:
            RefusedError: If the content is too long, is an error, or differs from its envelope.
            RunEndedError: If the content will not come, because the run has ended.
        """
        parts = sum(1 for _ in iterate_object_tree(self._tree))
        if parts > MOST_OBJECTS:
            raise MessageTooLongError(
                f"A message has {parts:,} objects, but at most {MOST_OBJECTS:,} are accepted"
            )
        pull = make_pull_object_fn_protobuf(self._client.PullObject, Node(node_id=self.node), self.run)

        def pull_or_end(name: str) -> bytes:
            """Pull one object. An object that is not there yet never comes if another task waits."""
            try:
                content: bytes = pull(name)
            except ObjectUnavailableError as error:
                if self._has_next_task():
                    raise ObjectPullError(name, "the SuperNode has gone on to another task") from error
                raise
            return content

        names = list({part.object_id for part in iterate_object_tree(self._tree)})
        try:
            contents = pull_objects(
                names, pull_or_end, max_time=None, max_tries_per_object=None, backoff_cap=2.0
            )
        except ObjectPullError as error:
            raise RunEndedError("The run ended before the message's content came") from error
        self._confirm(self._tree.object_id)
        if (size := _array_bytes(contents)) > self._most_bytes:
            raise MessageTooLongError(
                f"A message unfolds to {size:,} bytes, more than --max-megabytes allows"
            )
        message = inflate_object_from_contents(self._tree.object_id, contents)
        if not isinstance(message, Message):
            raise RefusedError(f"Got {type(message).__name__} in place of a message")
        metadata = message.metadata
        if (metadata.message_type, metadata.run_id, metadata.dst_node_id) != (self.kind, self.run, self.node):
            raise RefusedError("The message differs from its envelope")
        if message.has_error():
            raise RefusedError("Got an error in place of a message")
        return self._set_identifier(message)

    def _confirm(self, name: str) -> None:
        """Tell the SuperNode that it may delete the message, whether refused or not."""
        self._confirmed = True
        node, call = Node(node_id=self.node), self._client.ConfirmMessageReceived
        make_confirm_message_received_fn_protobuf(call, node, self.run)(name)

    def answer(self, reply: Message) -> None:
        """Send the local app's answer."""
        self._measured.reset()
        self._push(reply)
        self._end(SubStatus.COMPLETED)

    def refuse(self, code: int, text: str, immediately: bool = False) -> None:
        """Answer an opened message with an error, if the SuperNode waits for an answer.

        Args:
            code: Flower's code of the error.
            text: Text of the error, which the server reads.
            immediately: Whether to return without an answer if the content has not arrived, instead of
                waiting for it.
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
        """Wait until the SuperNode has the whole message, reading only short answers.

        A message that is confirmed earlier is deleted while the SuperNode pulls it, and the SuperNode loses
        the answer.

        Args:
            immediately: Whether to check once and not wait.

        Returns:
            Whether the message has arrived.
        """
        for name in {part.object_id for part in iterate_object_tree(self._tree)}:
            request = PullObjectRequest(node=Node(node_id=self.node), run_id=self.run, object_id=name)
            while True:
                self._measured.reset(_SHORT)
                try:
                    answer = self._client.PullObject(request)
                except MessageTooLongError:
                    break  # the object has arrived, and is left unread
                if answer.object_available:
                    break
                if immediately or not answer.object_found or self._has_next_task():
                    return False
                time.sleep(0.2)
        self._measured.reset()
        return True

    def _end(self, status: str) -> None:
        """Tell the SuperNode that the task has ended, with a status."""
        self._client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))

    def _push(self, reply: Message) -> None:
        """Send a reply: its envelope, and the objects that the SuperNode does not have."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        envelope = message_to_proto(remove_content_from_message(reply))
        with no_object_id_recompute():
            tree = get_object_tree(reply)
            request = PushAppMessagesRequest(messages_list=[envelope], message_object_trees=[tree])
            wanted = self._client.PushMessages(request)
            known = {"run_id": self.run, "session_id": wanted.session_id}
            push = make_push_object_fn_protobuf(self._client.PushObject, Node(node_id=self.node), **known)
            parts = get_all_nested_objects(reply)
            push_objects(parts, push, object_ids_to_push=set(wanted.objects_to_push))

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Send heartbeats for the task during the context, and close the connection at its end.

        Flower's own heartbeat interrupts its process when the SuperNode has given a task up. A training that
        has used its random stream may as well finish.
        """
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_ALIVE):
                try:
                    self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
                except (httpx.HTTPError, RefusedError, ValueError):
                    continue  # the answer is sent in any case, and then a lost connection shows

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._client.close()
