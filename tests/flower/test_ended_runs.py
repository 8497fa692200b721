"""A run that ends while its messages are sent, at Flower's own SuperNode: the next run's answers are in time.

A server that is killed in mid-sending leaves envelopes whose content never comes. Flower's SuperNode hands
such a task out, and leaves it as it is once it hears that the run is over. Whatever a client answers to it
would lie there, and be sent in place of the next answer, that one in place of the one after it, and so on.
"""

from __future__ import annotations

import hashlib
import threading
import time

import pytest

pytest.importorskip("flwr")
import uvicorn
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.message.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode import start_client_internal as supernode
from flwr.supernode.main import create_app
from flwr.supernode.nodestate.nodestate_factory import NodeStateFactory

from lightning_fedq.flower import runtime, site

NODE, SECRET, KILLED, HONEST = 11, b"s" * 32, 7, 8


class Link:
    """The SuperLink as one node sees it. The honest run sends its next message once the last is answered.

    Args:
        messages: Run and type of each. Those of the killed run have no content, and soon no run.
    """

    def __init__(self, *messages: tuple[int, str]) -> None:
        self.waiting, self.told, self.pulls = list(messages), 0, 0
        self.sent = []
        self.objects = dict[str, bytes]()

    def receive(self):
        if not self.waiting or len(self.sent) < self.told:
            return None
        run, kind = self.waiting.pop(0)
        self.told, self.pulls = self.told + (run == HONEST), 0
        said = Metadata(run, "", 1, NODE, "", "", time.time(), 100.0, kind, 0, 0)
        said.delivered_at = ""
        message = make_message(said, RecordDict({"a": ConfigRecord({"left": len(self.waiting)})}))
        tree = get_object_tree(message)
        self.objects |= {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        message.metadata.__dict__["_message_id"] = message.object_id
        return remove_content_from_message(message), tree

    def pull_object(self, run, name):
        if run == HONEST:
            return self.objects[name]
        self.pulls += 1
        if self.pulls > 3:
            raise RunNotRunningException
        raise ObjectUnavailableError(name)

    def send(self, message, tree, seconds):
        if message.metadata.run_id == KILLED:
            raise RunNotRunningException
        self.sent.append((message.metadata.message_type, message.has_error()))
        return set(), "s"


class Node:
    """Flower's SuperNode: its state, its port, and the loop of `start_client_internal`."""

    def __init__(self, link: Link) -> None:
        self.link, self.over, objects = link, threading.Event(), ObjectStoreFactory()
        states = NodeStateFactory(objects)
        self.state, self.store = states.state(), objects.store()
        self.state.set_node_id(NODE)
        name = self.state.store_fab(Fab(hashlib.sha256(b"an app").hexdigest(), b"an app", {}))
        for run in (KILLED, HONEST):
            one = Run.create_empty(run)
            one.fab_hash = name
            self.state.store_run(one)
        self.state.set_run_series_context(0, Context(KILLED, NODE, {}, RecordDict(), {}))
        made = create_app(states, SECRET)
        # uvicorn's configuration of logging would close the streams of other libraries' handlers
        quiet = uvicorn.Config(made, "127.0.0.1", 0, ws="none", log_level="error", log_config=None)
        self.server = uvicorn.Server(quiet)
        self.served = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self):
        self.served.start()
        while self.served.is_alive() and not self.server.started:
            time.sleep(0.01)
        threading.Thread(target=self._loop, daemon=True).start()
        return f"127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def __exit__(self, *_):
        self.over.set()
        self.server.should_exit = True
        self.served.join()

    def _loop(self):
        while not self.over.is_set():
            run = supernode._pull_and_store_message(
                state=self.state,
                object_store=self.store,
                node_config={},
                receive=self.link.receive,
                get_run=lambda run: pytest.fail("all runs are known"),
                get_fab=lambda name, run: pytest.fail("all apps are known"),
                pull_object=self.link.pull_object,
                confirm_message_received=lambda run, name: None,
                trusted_entities=None,
            )
            if run is None:
                time.sleep(0.05)
                continue
            supernode._push_messages(
                state=self.state,
                object_store=self.store,
                send=self.link.send,
                push_object=lambda run, session, name, content: None,
            )


@pytest.mark.parametrize("kind", ["train", "query.steal"])
def test_the_next_run_is_answered_in_its_own_places(kind, capsys):
    """Whether the message that never comes is of a type that is answered or not."""
    app = ClientApp()
    for register in (app.train(), app.query("register"), app.query("shares")):
        register(lambda message, context: Message(RecordDict(), reply_to=message))
    honest = ["query.register", "train", "query.shares"]
    link = Link((KILLED, kind), *((HONEST, each) for each in honest))
    stop, node = threading.Event(), Node(link)
    with node as address:
        own = site.Site(app, runtime.SuperNode(address, SECRET), {})
        client = threading.Thread(target=site.serve, args=(own, 0.02, stop), daemon=True)
        client.start()
        end = time.monotonic() + 30.0
        while len(link.sent) < len(honest) and time.monotonic() < end:
            time.sleep(0.05)
        stop.set()
        client.join(10.0)
    assert link.sent == [(each, False) for each in honest]
    assert "REFUSED" in capsys.readouterr().out
