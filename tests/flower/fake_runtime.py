"""A SuperNode's runtime port without its SuperNode: hands out tasks, notes what it is asked and given."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flwr.app import Message, RecordDict
from flwr.app.message.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto import message_pb2, runtime_pb2
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.task_pb2 import Task
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

RUN, NODE = 7, 11


@dataclass
class Job:
    """One task, and what came of it."""

    kind: str = "train"
    content: RecordDict | None = None
    type: str = "flwr-clientapp"
    fab: bytes = b"an app that is never looked at"
    fab_hash: str = "aa" * 32
    empty: bool = False
    said_run: int = RUN
    padding: int = 0
    parts: int = 0
    status: int = 200
    late: int = 0
    message: Message = field(init=False)
    reply: Any = None
    ended: str | None = None
    asked: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self):
        content = RecordDict() if self.content is None else self.content
        said = Metadata(self.said_run, "", 1, NODE, "", "", time.time(), 100.0, self.kind, 0, 0)
        said.delivered_at = ""
        self.message = make_message(said, content)
        self.tree = get_object_tree(self.message)
        self.objects = {name: part.deflate() for name, part in get_all_nested_objects(self.message).items()}
        self.tree.children.extend(ObjectTree(object_id="ab" * 32) for _ in range(self.parts))
        self.message.metadata.__dict__["_message_id"] = self.message.object_id
        self.head = message_to_proto(remove_content_from_message(self.message))
        self.head.metadata.run_id = RUN


class FakeRuntime(ThreadingHTTPServer):
    """Serves jobs in their order.

    Args:
        jobs: What it hands out.
        refuses: Status of every answer to `acquire-task`, or 0.

    Attributes:
        lately: Statuses of the first answers to it; 200 has no task.
    """

    daemon_threads = True

    def __init__(self, *jobs: Job, refuses: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.jobs, self.refuses, self.begun, self.requests = list(jobs), refuses, 0, 0
        self.lately: list[int] = []
        self.stop = threading.Event()
        self.address = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeRuntime
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        """Say nothing."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        name = self.path.rpartition("/")[2]
        self.server.requests += 1
        status, answer = self.answer(name, body)
        content = b"" if answer is None else answer.SerializeToString()
        self.send_response_only(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, name, body):
        server = self.server
        if name == "acquire-task":
            if server.lately:
                status = server.lately.pop(0)
                return status, None if status != 200 else runtime_pb2.AcquireTaskResponse()
            if server.refuses:
                return server.refuses, None
            if server.begun == len(server.jobs):
                server.stop.set()
                return 200, runtime_pb2.AcquireTaskResponse()
            job = server.jobs[server.begun]
            server.begun += 1
            task = Task(task_id=server.begun, type=job.type, run_id=RUN, fab_hash=job.fab_hash)
            return 200, runtime_pb2.AcquireTaskResponse(task=task, token=str(server.begun - 1))
        token = next(value for key, value in self.headers.items() if "token" in key)
        job = server.jobs[int(token)]
        job.asked.append(name)
        if job.status != 200:
            return job.status, None
        if name == "pull-task-input":
            found = runtime_pb2.PullTaskInputResponse(task_id=1)
            found.fab.content = job.fab
            return 200, found
        if name == "pull-messages":
            found = runtime_pb2.PullAppMessagesResponse()
            if not job.empty:
                found.messages_list.append(job.head)
                found.message_object_trees.append(job.tree)
            return 200, found
        if name == "pull-object":
            asked = message_pb2.PullObjectRequest.FromString(body)
            job.late -= 1
            if job.late >= 0:
                return 200, message_pb2.PullObjectResponse(object_found=True, object_available=False)
            found = message_pb2.PullObjectResponse(object_found=True, object_available=True)
            found.object_content = job.objects.get(asked.object_id, b"") + b"\0" * job.padding
            return 200, found
        if name == "push-messages":
            job.reply = runtime_pb2.PushAppMessagesRequest.FromString(body).messages_list[0]
            wanted = runtime_pb2.PushAppMessagesResponse(session_id="s")
            wanted.objects_to_push.append(
                runtime_pb2.PushAppMessagesRequest.FromString(body).message_object_trees[0].object_id
            )
            return 200, wanted
        if name == "push-object":
            return 200, message_pb2.PushObjectResponse(stored=True)
        if name == "push-task-output":
            job.ended = runtime_pb2.PushTaskOutputRequest.FromString(body).sub_status
            return 200, runtime_pb2.PushTaskOutputResponse()
        if name == "confirm-message-received":
            return 200, message_pb2.ConfirmMessageReceivedResponse()
        return 200, runtime_pb2.SendTaskHeartbeatResponse(success=True)
