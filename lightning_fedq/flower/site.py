"""`fedq flower client`: a client's own process, which runs the app that its site has installed only.

    flower-supernode ... --isolation process --superexec-auth-secret-file SECRET   # user "flower": node's key
    fedq flower client --app my_app.client_app:app --secret SECRET \\               # user "fedq": keys, data
        --supernode 127.0.0.1:9094 --node-config 'partition-id=3 fedq-home="/var/lib/fedq"'

It stands where Flower has `flower-superexec` and `flwr-clientapp`, and hands each message's content to the
local app. A run's code, its configuration and its context are not used. What is left to whoever starts runs,
or is the SuperLink, is what a server that lies can do: send messages.

The server is told one sentence of whatever fails; this process's own log has the reason.
"""

import importlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import FrameType
from typing import Any

import httpx
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from lightning_fedq.flower.runtime import Delivery, Queue, SuperNode
from lightning_fedq.flower.settings import QUESTIONS, RefusedError

KINDS = frozenset({"train", *(f"query.{kind}" for kind in QUESTIONS)})
"""Flower's types of the messages that an app of `client_app` answers."""

REFUSED = "refused by this client; its own log says why"
"""All that the server is told: an exception's words may hold the client's data."""

_CODE = 2
"""Flower's code of a ClientApp that has raised."""

_LONGEST = 500
"""Characters of one line of the log: a server has written some of them."""


class SiteError(RuntimeError):
    """Why this process can't go on. It stops, and an operator has to act."""


class _Stopped(BaseException):
    """The process is asked to end. No `except Exception` of an app holds it up."""


@dataclass(frozen=True)
class Site:
    """All that a site's operator has set. Nothing here comes from a run.

    Args:
        node_config: What the app sees as `context.node_config`.
        apps: SHA-256 of the apps (FAB) whose runs are answered; empty answers all, with the same local app.
    """

    app: ClientApp
    node: SuperNode
    node_config: dict[str, Any]
    apps: frozenset[str] = frozenset()


def print_line(text: str) -> None:
    """A line of the client's own log, which nobody else's words can break or make long."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    print(f"{time.strftime('%H:%M:%S')} {line[:_LONGEST]}", flush=True)


def load(reference: str) -> ClientApp:
    """The app of a package that is installed here, and say which file it is.

    Args:
        reference: `PACKAGE.MODULE:NAME`.

    Raises:
        SiteError: If there is none.
    """
    module, _, name = reference.partition(":")
    cure = "install the app that you have read (pip install ./my_app), and name it as my_app.client_app:app"
    try:
        app = getattr(importlib.import_module(module), name or "app", None)
    except ModuleNotFoundError as error:
        raise SiteError(f"there is no {error.name}, which --app {reference} needs; {cure}") from error
    if not isinstance(app, ClientApp):
        raise SiteError(f"--app {reference} is {type(app).__name__}, a ClientApp is wanted; {cure}")
    print_line(f"app {reference} from {sys.modules[module].__file__}")
    return app


def respond(site: Site, delivery: Delivery) -> None:
    """Answer one message, by the local app or by a refusal."""
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
    except (Exception, _Stopped) as error:  # the site's own log has the reason, the server has not
        reason = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
        print_line(f"REFUSED {delivery.kind!r} of run {delivery.run}, app {delivery.app[:16]!r}: {reason}")
        if not delivery.is_open:
            print_line(
                "it is not answered; where there is a message, its SuperNode does so in about a minute"
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
    """The message, pulled if its envelope is of a kind that is answered here."""
    if not delivery.is_client:
        raise RefusedError(f"a task of type {delivery.type!r}; this site answers for its ClientApp only")
    if delivery.kind not in KINDS:
        raise RefusedError(f"no message of this type is answered; they are {', '.join(sorted(KINDS))}")
    if site.apps and delivery.app not in site.apps:
        raise RefusedError(
            "a run of another app than --fab-hash names; if it is a release, read and install it"
        )
    return delivery.pull()


def serve(site: Site, pause: float = 0.5, stop: threading.Event | None = None) -> None:
    """Answer until stopped. A SuperNode that is away is waited for. Of a task that breaks the rest is lost.

    Args:
        site: What is answered, and where.
        pause: Seconds between two questions whether there is a task.
        stop: Set to end after the task that is worked on.

    Raises:
        SiteError: If the SuperNode refuses this process, or speaks another language.
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
                    print_line(f"{refused or none}; waiting for it")
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
    """Say in the last line but one which trainings have failed, however it ends."""
    try:
        yield
    finally:
        failures = getattr(app, "failures", None)
        if failures and failures.failed:
            print_line(failures.line())


def _check_status(error: httpx.HTTPError, worked: bool) -> str:
    """Why a SuperNode says no. One that is away, or has taken the secret before, may say yes again.

    Raises:
        SiteError: If it will go on saying no.
    """
    if not isinstance(error, httpx.HTTPStatusError) or error.response.status_code >= 500:
        return ""
    status = error.response.status_code
    cure = f"is --secret the file of its --superexec-auth-secret-file, and {_clocks(error.response)}?"
    if status not in (401, 403):
        cure = "does it have --isolation process, and the version of flwr that is installed here?"
    no = f"the SuperNode refuses this process (HTTP {status}); {cure}"
    if worked and status == 401:
        return f"{no} It has been let in before"
    raise SiteError(no) from None


def _clocks(response: httpx.Response) -> str:
    """Question about two clocks, since a request is taken for some seconds of the SuperNode's."""
    try:
        theirs = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return "are both machines' clocks right (timedatectl, NTP)"
    ahead = round(time.time() - theirs)
    apart = "on time with" if abs(ahead) < 2 else f"{abs(ahead)} s {'ahead of' if ahead > 0 else 'behind'}"
    return f"is the clock right (timedatectl, NTP; this machine's is {apart} the SuperNode's)"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End on SIGTERM or SIGINT, at once: a message that is worked on is answered with a refusal first."""

    def end(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)  # once is enough
        print_line(f"{signal.Signals(number).name}: ending")
        raise _Stopped

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)
    try:
        yield
    except _Stopped:
        print_line("ended")
