"""Ports of ours under clients that connect and are silent."""

import socket
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress

import pytest

from devcluster.cluster.settings import free_ports
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.handlers import main
from specdecode_operator.handlers.http_server import BoundedHandler, BoundedServer, Places
from specdecode_operator.handlers.main import OperatorState
from specdecode_operator.handlers.metrics import OperatorMetrics, serve_metrics

MANY = 100


def status(port: int, path: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        return int(response.status)


def is_hung_up_on(connection: socket.socket) -> bool:
    connection.settimeout(60)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # what it has sent was not read yet
        return True


def metrics_port() -> int:
    return serve_metrics(0, OperatorMetrics(Cache()))


def health_port() -> int:
    (port,) = free_ports(1)
    main.serve_health(port, OperatorState())
    return port


@pytest.mark.parametrize(("serve", "path"), [(metrics_port, "/metrics"), (health_port, "/livez")])
def test_silent_clients_are_disconnected_and_block_no_others(serve: Callable[[], int], path: str) -> None:
    threads, port = threading.active_count(), serve()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MANY)]
    for each in silent:
        each.sendall(b"GET / HT")
    assert status(port, path) == 200
    assert is_hung_up_on(silent[0])
    for each in silent[: MANY // 2]:
        assert is_hung_up_on(each)
        each.close()
    assert threading.active_count() < threads + MANY, "a thread and a timer for each of 32"
    for each in silent:
        each.close()


def test_client_with_a_request_is_not_disconnected() -> None:
    has_asked, goes_on = threading.Event(), threading.Event()

    class Slow(BoundedHandler):
        def do_GET(self) -> None:
            self.keep_place()
            has_asked.set()
            goes_on.wait(60)
            self.send_response(200)
            self.end_headers()

    port = BoundedServer(0, Slow).serve("slow").server_port
    asked = socket.create_connection(("127.0.0.1", port))
    asked.sendall(b"GET / HTTP/1.0\r\n\r\n")
    assert has_asked.wait(60)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MANY)]
    assert is_hung_up_on(silent[0])
    goes_on.set()
    asked.settimeout(60)
    assert b" 200 " in asked.recv(100)
    for each in (asked, *silent):
        each.close()


@pytest.mark.parametrize(
    "head", [b"GET /" + b"a" * 20_000, b"GET /metrics HTTP/1.0\r\n" + b"a: %b\r\n" % (b"b" * 1_000) * 90]
)
def test_oversized_request_head_is_rejected(head: bytes) -> None:
    asked = socket.create_connection(("127.0.0.1", metrics_port()), timeout=60)
    with suppress(ConnectionError):
        asked.sendall(head + b"\r\n\r\n")
    with suppress(ConnectionResetError):  # where what was sent is not read
        assert asked.recv(100).split()[1:2] in ([], [b"431"])
    asked.close()


def test_full_server_has_no_place_until_a_client_leaves() -> None:
    (first, _), (second, _) = pairs = [socket.socketpair() for _ in range(2)]
    places = Places(1)
    assert places.take(first)
    places.keep(first)
    assert not places.take(second)
    places.leave(first)
    assert places.take(second)
    for each in (each for pair in pairs for each in pair):
        each.close()
