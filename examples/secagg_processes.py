"""Secure aggregation between processes: a server, n clients, TCP on the loopback, SIGKILL at each stage.

    python examples/secagg_processes.py                 # nobody dies, then one client dies in every stage
    python examples/secagg_processes.py --active        # the same with signed keys and confirmed survivors
    python examples/secagg_processes.py --clients 8 --dim 10000 --kill 1:mask 4:unmask

Every client is a process of its own with a private vector. The server's process sees frames on sockets and
prints the sum; the parent, which knows all vectors because it dealt them out, checks it. A client that is to
die gets SIGKILL from the parent when it reports that the stage is about to begin. The server gives every
stage a time limit, and whoever has not answered then has dropped out.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import selectors
import signal
import socket
import struct
import sys
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lightning_fedq.secagg import Client, SecAgg, SecAggError, Server, Terms
from lightning_fedq.secagg.layout import sum_layout

STAGES = ("advertise", "share", "mask", "unmask")
ACTIVE_STAGES = ("advertise", "share", "mask", "confirm", "unmask")
MODEL_HASH = bytes(32)
HIGHEST = 15


def send(link: socket.socket, message: bytes) -> None:
    link.sendall(struct.pack(">I", len(message)) + message)


def receive(link: socket.socket) -> bytes:
    """One length-prefixed message.

    Raises:
        ConnectionError: If the other side is gone.
    """
    size = struct.unpack(">I", _exactly(link, 4))[0]
    return _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = link.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the other side is gone")
        parts += part
    return parts


def run_client(
    number: int,
    terms: Terms,
    port: int,
    seed: int,
    identity: bytes | None,
    directory: dict[int, bytes] | None,
    parent: Connection,
) -> None:
    """A client's process: connect, say who it is, answer until the server hangs up."""
    client = Client(
        number,
        terms,
        MODEL_HASH,
        identity=Ed25519PrivateKey.from_private_bytes(identity) if identity else None,
        directory=_public(directory),
    )
    symbols = np.random.default_rng(seed).integers(0, HIGHEST + 1, terms.layout.size)
    with socket.create_connection(("127.0.0.1", port)) as link:
        send(link, struct.pack(">Q", number))
        for stage in ACTIVE_STAGES if terms.active else STAGES:
            try:
                message = receive(link)
                parent.send(stage)
                parent.recv()  # the parent says go on, or kills this process
                send(link, _answer(client, stage, message, symbols))
            except (ConnectionError, BrokenPipeError):
                return  # the server gave the round up
            except SecAggError as error:
                print(f"  client {number} leaves: {error}", flush=True)
                return


def _answer(client: Client, stage: str, message: bytes, symbols: np.ndarray) -> bytes:
    if stage == "mask":
        client.accept_shares(message)
        return client.masked_input(symbols)
    answers = {"advertise": client.advertise, "share": client.share_keys}
    answers |= {"confirm": client.confirm, "unmask": client.unmask}
    return answers[stage](message)


def _public(directory: dict[int, bytes] | None) -> dict[int, Ed25519PublicKey] | None:
    if directory is None:
        return None
    return {client: Ed25519PublicKey.from_public_bytes(raw) for client, raw in directory.items()}


def run_server(
    terms: Terms,
    listener: socket.socket,
    directory: dict[int, bytes] | None,
    limit: float,
    parent: Connection,
) -> None:
    """The server's process: one stage after the other, each with a time limit."""
    server = Server(terms, MODEL_HASH, directory=_public(directory))
    links: dict[int, socket.socket] = {}
    for _ in terms.cohort:
        link, _ = listener.accept()
        links[struct.unpack(">Q", receive(link))[0]] = link
    outgoing = {client: server.invitation(client) for client in links}
    try:
        for _ in ACTIVE_STAGES if terms.active else STAGES:
            for client, message in outgoing.items():
                with contextlib.suppress(OSError):  # it is gone, and will be missed below
                    send(links[client], message)
            _collect(server, {client: links[client] for client in outgoing}, limit)
            outgoing = server.close()
        parent.send((server.survivors, server.total))
    except SecAggError as error:
        parent.send((None, str(error)))
    finally:
        for link in links.values():
            link.close()


def _collect(server: Server, links: dict[int, socket.socket], limit: float) -> None:
    deadline, waiting = time.monotonic() + limit, selectors.DefaultSelector()
    for client, link in links.items():
        waiting.register(link, selectors.EVENT_READ, client)
    while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in waiting.select(left):
            waiting.unregister(key.fileobj)
            try:
                server.receive(receive(links[key.data]))
            except (ConnectionError, SecAggError) as error:
                print(f"  server: client {key.data} dropped out: {error}", flush=True)
    for key in waiting.get_map().values():
        print(f"  server: client {key.data} dropped out: no answer in {limit} s", flush=True)
    waiting.close()


def play(num_clients: int, dim: int, kills: dict[int, str], active: bool, limit: float = 20.0) -> str:
    """Run one round between processes and check its sum; returns one line about the outcome.

    Raises:
        AssertionError: If the sum is not that of the survivors.
    """
    spawn = mp.get_context("spawn" if sys.platform == "darwin" else "fork")
    layout = sum_layout(dim, 0, HIGHEST, num_clients)
    terms = SecAgg(active=active).terms(
        os.urandom(32), 0, 0, range(num_clients), layout, num_clients=num_clients
    )
    secrets = {c: os.urandom(32) for c in terms.cohort} if active else {}
    directory = {
        c: Ed25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()
        for c, key in secrets.items()
    }
    shown = directory if active else None
    layout.unpack(layout.pack(layout.zeros()))  # compile once, before the fork
    with socket.create_server(("127.0.0.1", 0)) as listener:
        from_server, to_parent = spawn.Pipe()
        server = spawn.Process(target=run_server, args=(terms, listener, shown, limit, to_parent))
        server.start()
        clients, pipes = {}, {}
        for number in terms.cohort:
            pipes[number], theirs = spawn.Pipe()
            args = (number, terms, listener.getsockname()[1], number, secrets.get(number), shown, theirs)
            clients[number] = spawn.Process(target=run_client, args=args)
            clients[number].start()
            theirs.close()
        while any(process.is_alive() for process in clients.values()):
            for pipe in wait(list(pipes.values()), 0.1):
                _go_on_or_die(pipe, pipes, clients, kills)
        survivors, result = from_server.recv()
        for process in (server, *clients.values()):
            process.join()
    if survivors is None:
        return f"typed abort: {result}"
    vectors = [np.random.default_rng(number).integers(0, HIGHEST + 1, dim) for number in survivors]
    if not np.array_equal(result, sum(vectors)):
        raise AssertionError("the sum is wrong")
    return f"exact sum over clients {survivors}"


def _go_on_or_die(
    pipe: Connection, pipes: dict[int, Connection], clients: dict[int, BaseProcess], kills: dict[int, str]
) -> None:
    number = next(number for number, own in pipes.items() if own is pipe)
    try:
        if pipe.recv() != kills.get(number):
            pipe.send("go on")
            return
        os.kill(clients[number].pid, signal.SIGKILL)
    except (EOFError, OSError):
        pass  # it has ended by itself
    del pipes[number]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--dim", type=int, default=1000)
    parser.add_argument("--active", action="store_true")
    parser.add_argument(
        "--kill", nargs="*", metavar="CLIENT:STAGE", help=f"stages: {', '.join(ACTIVE_STAGES)}"
    )
    args = parser.parse_args()
    stages = ACTIVE_STAGES if args.active else STAGES
    if args.kill is None:
        plans = [{}, *({1: stage} for stage in stages), {0: "mask", 1: "mask", 2: "unmask"}]
    else:
        plans = [{int(who): stage for who, stage in (item.split(":") for item in args.kill)}]
    for kills in plans:
        print(f"killed: {kills or 'nobody'}", flush=True)
        print(f"  -> {play(args.clients, args.dim, kills, args.active)}", flush=True)


if __name__ == "__main__":
    main()
