"""`fedq flower client`: a client's own process, which runs only the app that its site has installed.

    flower-supernode ... --isolation process --superexec-auth-secret-file SECRET   # user "flower": node's key
    fedq flower client --app my_app.client_app:app --secret SECRET \\               # user "fedq": keys, data
        --supernode 127.0.0.1:9094 --node-config 'partition-id=3 fedq-home="/var/lib/fedq"'

It replaces Flower's `flower-superexec` and `flwr-clientapp`, and passes each message's content to the local
app. It ignores a run's code, configuration and context. So a party that starts runs, or that controls the
SuperLink, can only do what a lying server can do: send messages.

The server receives one sentence about any failure. The reason is in this process's own log.
"""

import importlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import httpx
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from lightning_fedq.flower.refusals import RefusedError
from lightning_fedq.flower.runtime import Delivery, Queue, SuperNode
from lightning_fedq.flower.settings import QUESTIONS

KINDS = frozenset({"train", *(f"query.{kind}" for kind in QUESTIONS)})
"""Flower's types of the messages that an app of `client_app` answers."""

REFUSED = "refused by this client; its own log says why"
"""Text that the server receives. It has no exception's text, which may hold the client's data."""

_CODE = 2
"""Flower's code of a ClientApp that has raised an error."""

_LONGEST = 500
"""Largest number of characters of one log line, because a server may have written a part of it."""


class SiteError(RuntimeError):
    """Error after which this process stops, because an operator has to act."""


class _Stopped(BaseException):
    """Request to end the process. A `BaseException`, so that no `except Exception` of an app stops it."""


@dataclass(frozen=True)
class Site:
    """Settings of a site's operator. None of them comes from a run.

    Args:
        app: Local app that answers messages.
        node: Address and secret of the SuperNode.
        node_config: Values that the app reads as `context.node_config`.
        apps: SHA-256 of the apps (FAB) whose runs are answered. Empty answers all runs, with the same local
            app.
    """

    app: ClientApp
    node: SuperNode
    node_config: dict[str, Any]
    apps: frozenset[str] = frozenset()


def print_line(text: str) -> None:
    """Print a line of the client's own log, printable and cut, so that no other party can forge lines."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    print(f"{time.strftime('%H:%M:%S')} {line[:_LONGEST]}", flush=True)


def load(reference: str) -> ClientApp:
    """Return the app of an installed package, and log its file.

    Args:
        reference: `PACKAGE.MODULE:NAME`.

    Raises:
        SiteError: If there is no such app.
    """
    module, _, name = reference.partition(":")
    cure = "Install the app that you have read (pip install ./my_app), and name it as my_app.client_app:app"
    try:
        app = getattr(importlib.import_module(module), name or "app", None)
    except ModuleNotFoundError as error:
        raise SiteError(f"There is no {error.name}, which --app {reference} needs. {cure}") from error
    if not isinstance(app, ClientApp):
        raise SiteError(f"--app {reference} is {type(app).__name__}, not a ClientApp. {cure}")
    print_line(f"app {reference} from {sys.modules[module].__file__}")
    return app


def respond(site: Site, delivery: Delivery) -> None:
    """Answer one message, by the local app or by a refusal.

    Args:
        site: Settings of the operator.
        delivery: Task with the message.
    """
    began, failures = time.monotonic(), getattr(site.app, "failures", None)
    failed = failures and failures.failed
    try:
        delivery.open()
        message = _admitted(site, delivery)
        own = Context(
            run_id=delivery.run,
            node_id=delivery.node,
            node_config=dict(site.node_config),
            state=RecordDict(),
            run_config={},
        )
        reply = site.app(message, own)
        if not isinstance(reply, Message):
            raise TypeError(f"the app returned {type(reply).__name__}, not a Message")
    # the site's own log has the reason, which the server does not receive
    except (Exception, _Stopped) as error:
        reason = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
        print_line(f"REFUSED {delivery.kind!r} of run {delivery.run}, app {delivery.app[:16]!r}: {reason}")
        if not delivery.is_open:
            print_line(
                "This task is not answered. If it has a message, its SuperNode answers in about a minute"
            )
        else:
            delivery.refuse(_CODE, REFUSED, immediately=isinstance(error, _Stopped))
        if isinstance(error, _Stopped):
            raise
        return
    delivery.answer(reply)
    print_line(f"answered {delivery.kind} of run {delivery.run} in {time.monotonic() - began:.1f} s")
    if failures and failures.failed != failed:
        print_line(f"FAILED {delivery.kind} of run {delivery.run}: {failures.line()}")


def _admitted(site: Site, delivery: Delivery) -> Message:
    """Return the message, pulled if its envelope is of a kind that this site answers.

    Raises:
        RefusedError: If the task is of another type or kind, or the run's app is not listed.
    """
    if not delivery.is_client:
        raise RefusedError(f"Task type {delivery.type!r} is not answered, only those of the ClientApp")
    if delivery.kind not in KINDS:
        raise RefusedError(
            f"Messages of this type are not answered, expected one of {', '.join(sorted(KINDS))}"
        )
    if site.apps and delivery.app not in site.apps:
        raise RefusedError(
            "This run has another app than --fab-hash names. If it is a release, read and install it."
        )
    return delivery.pull()


def serve(site: Site, pause: float = 0.5, stop: threading.Event | None = None) -> None:
    """Answer messages until stopped. The process waits while the SuperNode is away.

    If a task fails, its answer is lost and the next task is served.

    Args:
        site: Settings of the operator.
        pause: Seconds between two checks for a task.
        stop: Event that ends the loop after the current task. None never ends it.

    Raises:
        SiteError: If the SuperNode refuses this process for good, or its answers can't be read.
    """
    stop = stop or threading.Event()
    print_line(f"waiting for messages at {site.node.address}")
    with closing(Queue(site.node)) as queue, _ends_with_failures(site.app):
        down, worked = False, False
        while not stop.wait(pause):
            try:
                delivery = queue.next()
            except httpx.HTTPError as error:
                refused = _check_status(error, worked)
                if not down:
                    none = f"no SuperNode at {site.node.address} ({type(error).__name__})"
                    print_line(f"{refused or none}. Waiting for it")
                down = True
                stop.wait(2.0)
                continue
            except (ValueError, RefusedError) as error:
                known = f"{site.node.address} does not answer as a SuperNode of flwr 1.41 or 1.42"
                raise SiteError(f"{known}: {error}") from error
            if down:
                print_line("the SuperNode is back")
            down, worked = False, True
            if delivery is None:
                continue
            with delivery.keep_alive():
                try:
                    respond(site, delivery)
                except Exception as error:
                    print_line(f"task {delivery.task} is lost: {type(error).__name__}: {error}")


@contextmanager
def _ends_with_failures(app: ClientApp) -> Iterator[None]:
    """Print a line about failed trainings at the end of the context, however it ends."""
    try:
        yield
    finally:
        failures = getattr(app, "failures", None)
        if failures and failures.failed:
            print_line(failures.line())


def _check_status(error: httpx.HTTPError, worked: bool) -> str:
    """Return why a SuperNode refuses, or "" if it is away, after which it may accept again.

    Args:
        error: Error of the request.
        worked: Whether the SuperNode has accepted the secret before. It may then accept it again.

    Raises:
        SiteError: If it will go on refusing.
    """
    if not isinstance(error, httpx.HTTPStatusError) or error.response.status_code >= 500:
        return ""
    status = error.response.status_code
    cure = "is --secret the file of --superexec-auth-secret-file, and is the clock right (timedatectl, NTP)?"
    if status not in (401, 403):
        cure = "does it have --isolation process, and the version of flwr that is installed here?"
    no = f"The SuperNode refuses this process (HTTP {status}): {cure}"
    if worked and status == 401:
        return f"{no} It has been let in before"
    raise SiteError(no) from None


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End on SIGTERM or SIGINT at once. An open message is answered with a refusal first."""

    def end(number: int, _: FrameType | None) -> None:
        for each_signal in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each_signal, signal.SIG_IGN)  # once is enough
        print_line(f"{signal.Signals(number).name}: ending")
        raise _Stopped

    for each_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each_signal, end)
    try:
        yield
    except _Stopped:
        print_line("ended")
