"""Bytes on the wire between SuperNodes and the SuperLink, as a proxy on the loopback counts them.

    python benchmarks/deploy.py [--hidden 512] [--rounds 2]

One SuperLink and two SuperNodes, each behind a proxy of its own, without TLS so that requests can be told
from each other. Three apps: CorBin and LDPQ by `client_app`, and Flower's FedAvg with float arrays. A row is
the mean over clients and rounds, of the messages of a round: the packed bits that the mechanism counts, what
this package puts around them, and what Flower puts around that (HTTP headers, one request for each object of
a message). Polling for messages is counted apart: it depends on how long a round takes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.proto.message_pb2 import PushObjectRequest

from lightning_fedq.commands.flower import write_app
from lightning_fedq.rounds.messages import FRAME_BYTES

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("deploy_example", ROOT / "examples" / "deploy.py")
assert _spec is not None and _spec.loader is not None
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)
example.CLIENTS = 2

FLOAT_SERVER = """
import torch
from pathlib import Path
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from {package}.task import module

app = ServerApp()


@app.main()
def main(grid, context):
    home = Path(context.run_config["home"])
    home.mkdir(parents=True)
    start = ArrayRecord(module().state_dict())
    FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=int(context.run_config["rounds"]))
    (home / "done").touch()
"""
FLOAT_CLIENT = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from lightning_fedq._lightning import pl
from {package}.task import data, module

app = ClientApp()


@app.train()
def train(message, context):
    net, own = module(), data(context)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    quiet = {{"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}}
    pl.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(net, datamodule=own)
    content = {{"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({{"num-examples": 1}})}}
    return Message(RecordDict(content), reply_to=message)
"""


@dataclass
class Request:
    """One request of a SuperNode and its reply."""

    path: str
    head: int = 0
    up: int = 0
    down: int = 0
    sent: bytearray = field(default_factory=bytearray)


@dataclass
class Proxy:
    """Counts what one SuperNode and the SuperLink say to each other."""

    target: int
    port: int = field(default_factory=example.free_port)
    requests: list[Request] = field(default_factory=list)

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, limit=1 << 24)
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target, limit=1 << 24)
        except ConnectionError:  # the SuperLink is not there yet; the SuperNode asks again
            writer.close()
            return
        present: list[Request] = []
        replies = asyncio.create_task(self._reply(there, writer, present))
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                request = Request(head.split(b" ", 2)[1].decode(), len(head))
                present[:] = [request]
                self.requests.append(request)
                await self._send(head, request, back)
                async for part in self._body(head, reader):
                    await self._send(part, request, back)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            replies.cancel()
            back.close()
            writer.close()

    @staticmethod
    async def _send(data: bytes, request: Request, back: asyncio.StreamWriter) -> None:
        request.up += len(data)
        if "/push-" in request.path:
            request.sent += data
        back.write(data)
        await back.drain()

    @staticmethod
    async def _body(head: bytes, reader: asyncio.StreamReader) -> Any:
        lines = [line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:] if b":" in line]
        headers = {name.strip(): value.strip() for name, value in lines}
        if length := int(headers.get(b"content-length", b"0")):
            yield await reader.readexactly(length)
        if headers.get(b"transfer-encoding") == b"chunked":
            while True:
                size = await reader.readline()
                chunk = await reader.readexactly(int(size, 16) + 2)
                yield size + chunk
                if int(size, 16) == 0:
                    return

    @staticmethod
    async def _reply(
        there: asyncio.StreamReader, writer: asyncio.StreamWriter, present: list[Request]
    ) -> None:
        while data := await there.read(1 << 16):
            if present:
                present[0].down += len(data)
            writer.write(data)
            await writer.drain()


class CountedMachines(example.Machines):  # type: ignore[misc,name-defined]
    """A SuperLink without TLS, and SuperNodes that reach it through a proxy each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.proxies = [Proxy(self.port) for _ in range(example.CLIENTS)]
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        for proxy in self.proxies:
            asyncio.run_coroutine_threadsafe(proxy.serve(), loop)

    def __enter__(self) -> CountedMachines:
        super().__enter__()
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "demo"\n\n[superlink.demo]\naddress = "{self.address}"\n'
            "insecure = true\n"
        )
        return self

    def start_link(self) -> None:
        link = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        self.start("superlink", [example.tool("flower-superlink"), "--insecure", *link])

    def start_node(self, client: int) -> None:
        own = f'partition-id={client} fedq-home="{self.folder / f"client-{client}"}"'
        address = f"127.0.0.1:{self.proxies[client].port}"
        node = ["--insecure", "--superlink", address, "--port", str(example.free_port())]
        command = [example.tool("flower-supernode"), *node, "--node-config", own]
        self.start(f"client-{client}", command)


def exchanges(requests: Iterable[Request]) -> list[list[Request]]:
    """Requests of one SuperNode, cut into one list a message: what it takes in, and what it answers."""
    found: list[list[Request]] = [[]]
    answered = False
    for request in requests:
        pulls = request.path.endswith("pull-messages")
        if pulls and answered:
            found.append([])
            answered = False
        answered = answered or request.path.endswith("push-messages")
        found[-1].append(request)
    return [one for one in found if any(request.path.endswith("push-messages") for request in one)]


def is_poll(request: Request) -> bool:
    """Asks for messages or says that it is alive, and is told nothing."""
    return request.path.endswith("heartbeat") or (
        request.path.endswith("pull-messages") and request.down < 800
    )


def anatomy(requests: Iterable[Request]) -> list[tuple[str, int, int, int]]:
    """Requests of one answer: what each is about, and its bytes: headers, object, and what is around it."""
    found = []
    for request in requests:
        head, body = bytes(request.sent).split(b"\r\n\r\n", 1)
        if b"transfer-encoding: chunked" in head.lower():
            body = b"".join(_chunks(body))
        about, content = "message", 0
        if request.path.endswith("push-object"):
            pushed = PushObjectRequest.FromString(body)
            about, content = pushed.object_content.split(b" ", 1)[0].decode(), len(pushed.object_content)
        found.append((about, len(head) + 4, content, len(body) - content))
    return found


def _chunks(body: bytes) -> Iterable[bytes]:
    while body:
        size, body = body.split(b"\r\n", 1)
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


def header_sizes(request: Request) -> dict[str, int]:
    """Bytes of each header of a request, its line's end included."""
    lines = bytes(request.sent).split(b"\r\n\r\n", 1)[0].split(b"\r\n")
    return {line.split(b":", 1)[0].decode()[:40]: len(line) + 2 for line in lines}


def measure(machines: CountedMachines, name: str, mechanism: str, hidden: int, rounds: int) -> dict[str, Any]:
    """Bytes of one app, a message."""
    for proxy in machines.proxies:
        proxy.requests.clear()
    app, home = machines.folder / name, machines.folder / f"{name}-home"
    package = write_app(
        app, mechanism or "CorBin(epsilon_per_coordinate=4.0)", 2, seed=5, secure_aggregation=False
    )
    task = app / package / "task.py"
    task.write_text(
        task.read_text()
        .replace("hidden=[32]", f"hidden=[{hidden}]")
        .replace("local_epochs=2", "local_steps=1")
    )
    dim = 64 * hidden + hidden + hidden * 10 + 10
    if not mechanism:
        (app / package / "server_app.py").write_text(FLOAT_SERVER.format(package=package))
        (app / package / "client_app.py").write_text(FLOAT_CLIENT.format(package=package))
    machines.run(app, home, rounds)
    end = home / ("runs/deployed/summary.json" if mechanism else "done")
    machines.wait_for(end.exists, 1500)
    messages = [one for proxy in machines.proxies for one in exchanges(list(proxy.requests))[-rounds:]]
    work = [[request for request in one if not is_poll(request)] for one in messages]
    pushes = [[request for request in one if "/push-" in request.path] for one in work]
    packed = 4 * dim
    if mechanism:
        records = example.checkpoint_of(home)["records"]
        packed = sum(r["uplink_bits"] for r in records) / len(records) / 2 / 8
    up = sum(request.up for one in pushes for request in one) / len(messages)
    if mechanism:
        print(f"one answer of {mechanism}: request, HTTP headers, object, around the object")
        for row in anatomy(pushes[-1]):
            print("  ", *row)
        print("   headers:", header_sizes(pushes[-1][-1]), flush=True)
    return {
        "app": mechanism or "FedAvg, float arrays (Flower's own)",
        "coordinates": dim,
        "payload up": round(packed),
        "answer on the wire": round(up),
        "over the payload": round(up - packed),
        "of it: frame": FRAME_BYTES if mechanism else 0,
        "HTTP headers": round(sum(request.head for one in pushes for request in one) / len(messages)),
        "requests of an answer": round(sum(map(len, pushes)) / len(messages), 1),
        "other requests, up": round(sum(r.up for one in work for r in one) / len(messages) - up),
        "model, down": 4 * dim,
        "down on the wire": round(sum(r.down for one in work for r in one) / len(messages)),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model's hidden layer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--apps", nargs="+", default=["corbin", "ldpq", "floats"], help="of these three")
    chosen = parser.parse_args(arguments)
    known = {
        "corbin": "CorBin(epsilon_per_coordinate=4.0)",
        "ldpq": "LDPQ(epsilon_per_coordinate=4.0)",
        "floats": "",
    }
    apps = {name: known[name] for name in chosen.apps}
    with tempfile.TemporaryDirectory() as folder, CountedMachines(Path(folder)) as machines:
        rows = [measure(machines, name, m, chosen.hidden, chosen.rounds) for name, m in apps.items()]
        for proxy in machines.proxies:
            paths = sorted({request.path for request in proxy.requests})
        print("requests:", ", ".join(paths))
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
