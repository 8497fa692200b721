"""The filter of `deploy/`, in nginx: what it lets through to a SuperLink, and whom it drops."""

import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from tests.changed import changed
from tests.flower.machines import example

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is a package of the system")
FILTER = Path(__file__).parents[2] / "deploy" / "server" / "fleet_only.conf"


class Behind(BaseHTTPRequestHandler):
    """Answers whatever gets through."""

    def log_message(self, *_):
        """Say nothing."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Port of a running filter, and the certificate."""
    folder = tmp_path_factory.mktemp("nginx")
    folder.chmod(0o755)
    example.write_certificate(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Behind)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    port, text = example.free_port(), FILTER.read_text()
    text = changed(
        text,
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("127.0.0.1:8000", f"127.0.0.1:{server.server_address[1]}"),
        ("client_header_timeout 20s", "client_header_timeout 4s"),
        ("client_body_timeout 60s", "client_body_timeout 1s"),
    )
    (folder / "nginx.conf").write_text("daemon off;\n" + text)
    running = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port, folder / "server.pem"
    finally:
        running.terminate()
        running.wait(20)
        server.shutdown()
        server.server_close()


def asked(outside, path):
    """Status of the answer to a request for exactly this path."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with sending(outside, head.encode()) as one:
        return int(one.recv(4096).split()[1])


@pytest.mark.parametrize("path", ["pull-messages", "activate-node", "push-object", "get-fab"])
def test_sites_get_through(outside, path):
    assert asked(outside, f"/v1/fleet/{path}") == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/control/start-run", "/v1/control/register-node", "/v1/control/list-runs"),
        *("/v1/runtime/acquire-task", "/v1/runtime/get-nodes", "/docs", "/openapi.json", "/health", "/"),
        *("/v1/fleet/register-node", "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run"),
        *("/v1/fleet/..%2fcontrol/start-run", "//v1/control/start-run", "/V1/FLEET/pull-messages"),
        *("/v1/fleet/register-node/", "/v1/fleet/register-node?x=1", "/v1/fleet//register-node/"),
        *("/v1/fleet;/../control/start-run", "/v1/fleet", "/v1/fleet/x/../../control/start-run"),
    ],
)
def test_nobody_else_does(outside: tuple[int, Path], path: str) -> None:
    assert asked(outside, path) in ((301,) if path == "/v1/fleet" else (403, 400))


def sending(outside, head):
    """A connection on which this is sent, and no more."""
    port, certificate = outside
    context = ssl.create_default_context(cafile=str(certificate))
    plain = socket.create_connection(("127.0.0.1", port), 10)
    secure = context.wrap_socket(plain, server_hostname="localhost")
    secure.sendall(head)
    return secure


def test_who_dawdles_is_dropped_while_others_are_served(outside):
    """More than nginx takes by default (512), which shut everybody out for as long as they dawdle."""
    slow = [sending(outside, b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: ") for _ in range(600)]
    assert asked(outside, "/v1/fleet/pull-messages") == 200
    for one in slow:
        one.settimeout(20)
        said = one.recv(100)
        assert said == b"" or b" 408 " in said  # and the connection ends, within its time
        one.close()


def test_who_dawdles_over_a_body_is_dropped(outside):
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nabc"
    slow = [sending(outside, head) for _ in range(20)]
    assert asked(outside, "/v1/fleet/pull-messages") == 200
    for one in slow:
        one.settimeout(20)
        assert one.recv(100)[:12] in (b"", b"HTTP/1.1 408")
        one.close()


def test_bodies_of_256_mib_are_refused_unread(outside):
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with sending(outside, head % (256 << 20)) as one:
        one.settimeout(20)
        assert one.recv(100).split()[1] == b"413"
