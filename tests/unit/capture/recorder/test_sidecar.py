"""The script that connects recorders and the collector of a live capture."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.recorder.sidecar import BadOrderError, Order, read_order
from specdecode_operator.vllm.plugin_bundle import RECORDER
from tests.support.waiting import DEADLINE_S, eventually

TOKEN = "c0ffee" * 8
ORDER: dict[str, Any] = {
    "capture": "tests/live",
    "uid": "11111111-aaaa",
    "address": "127.0.0.1:8470",
    "token": TOKEN,
    "until_wall_s": 4e9,
}


class Peer:
    """One accepted connection, of the collector or of a recorder."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(DEADLINE_S)
        self._file = connection.makefile("rb")

    def line(self) -> bytes:
        return self._file.readline()

    def hello(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line())
        return found

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    @property
    def is_cut(self) -> bool:
        """Wait for the end, and return whether nothing came before it."""
        try:
            return self.line() == b""
        except ConnectionResetError:
            return True


class Pod:
    """A pod with the sidecar, sockets of recorders, and a collector."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.order_file = root / "order.json"
        self.sockets = root / "sockets"
        self.sockets.mkdir()
        self.log = root / "log"
        self.collector = socket.create_server(("127.0.0.1", 0))
        self.collector.settimeout(DEADLINE_S)
        self.address = f"127.0.0.1:{self.collector.getsockname()[1]}"
        self._recorders: list[socket.socket] = []
        program = root / "recorder.zip"
        program.write_bytes(RECORDER.zipped())
        command = [sys.executable, "-I", str(program), str(root), str(self.sockets)]
        names = {"POD_NAME": "tiny-0", "POD_UID": "22222222", "NODE_NAME": "node-1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=os.environ | names)

    def order(self, **changes: Any) -> None:
        """Write an order as the kubelet does: another file under the same name."""
        (self.root / "new").write_text(json.dumps(ORDER | {"address": self.address} | changes))
        (self.root / "new").replace(self.order_file)

    def recorder(self, name: str) -> socket.socket:
        """Return the listening socket of an engine's process."""
        listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(DEADLINE_S)
        listener.bind(str(self.root / "begun"))
        listener.listen()
        (self.root / "begun").rename(self.sockets / name)
        self._recorders.append(listener)
        return listener

    def called(self) -> Peer:
        """Return the next connection to the collector."""
        return Peer(self.collector.accept()[0])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for each in (self.collector, *self._recorders):
            each.close()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path)
    yield made
    made.end()


def test_sidecar_connects_recorder_with_collector(pod: Pod) -> None:
    listener = pod.recorder("17.sock")
    pod.order()
    collector, recorder = pod.called(), Peer(listener.accept()[0])
    assert collector.hello() == {
        "hello": 1,
        "token": TOKEN,
        "pod": "tiny-0",
        "pod_uid": "22222222",
        "node": "node-1",
        "socket": "17.sock",
        "sockets": 1,
        "note": None,
    }
    collector.send(b'{"arm":\n')
    assert recorder.line() == b'{"arm":\n'
    recorder.send(b"one\ntw")
    assert collector.line() == b"one\n"
    recorder.send(b"o\n" + b"x" * 3_000_000 + b"\n")
    assert collector.line() == b"two\n"
    recorder.close()  # after its last line
    assert collector.line() == b"x" * 3_000_000 + b"\n"
    assert collector.line() == b""
    collector.close()
    assert pod.process.poll() is None
    assert TOKEN not in pod.log.read_text()


def test_each_recorder_has_its_own_connection(pod: Pod) -> None:
    listeners = [pod.recorder(f"{number}.sock") for number in (1, 2)]
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(pod.sockets / "3.sock"))  # of a process that was killed
    pod.order()
    hellos = [pod.called().hello() for _ in listeners]
    assert sorted((hello["socket"], hello["sockets"]) for hello in hellos) == [("1.sock", 2), ("2.sock", 2)]


@pytest.mark.parametrize("left_behind", [True, False])
def test_pod_without_recorder_reports_reason_until_one_appears(pod: Pod, left_behind: bool) -> None:
    if left_behind:
        with socket.socket(socket.AF_UNIX) as ended:
            ended.bind(str(pod.sockets / "1.sock"))
    pod.order()
    without = pod.called()
    hello = without.hello()
    assert (hello["socket"], hello["sockets"]) == (None, 0)
    assert ("1.sock: Connection refused" if left_behind else "no process") in hello["note"]
    pod.recorder("17.sock")
    assert pod.called().hello()["socket"] == "17.sock"
    assert without.is_cut


def test_sidecar_reconnects_after_collector_closes(pod: Pod) -> None:
    listener = pod.recorder("17.sock")
    pod.order()
    for wait_s in (1, 2):
        collector, recorder = pod.called(), Peer(listener.accept()[0])
        assert collector.hello()["socket"] == "17.sock"
        collector.close()
        assert recorder.is_cut  # the lease has ended
        eventually(lambda wait_s=wait_s: f"retrying in {wait_s} s" in pod.log.read_text(), "it backs off")


def test_sidecar_reconnects_after_recorder_closes(pod: Pod) -> None:
    listener = pod.recorder("17.sock")
    pod.order()
    for _ in range(2):
        collector, recorder = pod.called(), Peer(listener.accept()[0])
        assert collector.hello()["socket"] == "17.sock"
        recorder.close()
        assert collector.is_cut
        collector.close()


def test_sidecar_retries_until_collector_listens(pod: Pod) -> None:
    pod.recorder("17.sock")
    port = pod.collector.getsockname()[1]
    pod.collector.close()
    pod.order()
    eventually(lambda: "connection failed" in pod.log.read_text(), "the sidecar has tried")
    pod.collector = socket.create_server(("127.0.0.1", port))
    pod.collector.settimeout(DEADLINE_S)
    assert pod.called().hello()["socket"] == "17.sock"


@pytest.mark.parametrize("has_recorder", [True, False])
def test_sidecar_does_not_reconnect_after_bye(pod: Pod, has_recorder: bool) -> None:
    if has_recorder:
        pod.recorder("17.sock")
    pod.order()
    collector = pod.called()
    collector.hello()
    collector.send(b'{"bye": true}\n')
    assert collector.is_cut
    pod.order(uid="another")
    assert pod.called().hello()["token"] == TOKEN
    tried = [line for line in pod.log.read_text().splitlines() if line.endswith(": connected")]
    assert len(tried) == 2


def test_sidecar_does_not_reconnect_after_bye_to_an_ended_recorder(pod: Pod) -> None:
    listener = pod.recorder("17.sock")
    pod.order()
    collector, recorder = pod.called(), Peer(listener.accept()[0])
    collector.hello()
    recorder.close()
    assert collector.is_cut
    collector.send(b'{"bye": true}\n')
    eventually(lambda: "17.sock: done" in pod.log.read_text(), "it has read the answer")


def test_connections_end_when_order_is_removed(pod: Pod) -> None:
    listener = pod.recorder("17.sock")
    pod.order()
    collector, recorder = pod.called(), Peer(listener.accept()[0])
    collector.hello()
    pod.order_file.unlink()
    assert collector.is_cut
    assert recorder.is_cut
    pod.order(token="0" * 32)
    assert pod.called().hello()["token"] == "0" * 32


def test_expired_and_invalid_orders_are_ignored(pod: Pod) -> None:
    pod.recorder("17.sock")
    pod.order(until_wall_s=time.time() - 1, token="1" * 32)
    eventually(lambda: "until_wall_s has passed" in pod.log.read_text(), "it has seen the order")
    pod.order(capture="Not A Name", token=TOKEN)
    eventually(lambda: "order.json is ignored: capture is invalid" in pod.log.read_text(), "it complains")
    pod.order(token="3" * 32)
    assert pod.called().hello()["token"] == "3" * 32
    assert TOKEN not in pod.log.read_text()


def test_expired_order_ends_connections(pod: Pod) -> None:
    pod.recorder("17.sock")
    pod.order()
    collector = pod.called()
    collector.hello()
    pod.order(until_wall_s=time.time() - 1)
    assert collector.is_cut
    assert "until_wall_s has passed" in pod.log.read_text()


def test_slow_collector_slows_down_the_recorder(pod: Pod) -> None:
    listener = pod.recorder("17.sock")
    pod.order()
    collector, recorder = pod.called(), Peer(listener.accept()[0])
    collector.hello()
    recorder.socket.settimeout(1.0)
    sent = 0
    with suppress(TimeoutError):
        while sent < 100 * 2**20:
            sent += recorder.socket.send(b"x" * 65536)
    assert sent < 100 * 2**20
    status = Path(f"/proc/{pod.process.pid}/status").read_text()
    (resident_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    assert resident_kib < 64 * 1024


@pytest.mark.parametrize("is_connected", [True, False])
def test_sigterm_ends_sidecar_at_once(pod: Pod, is_connected: bool) -> None:
    if is_connected:
        pod.recorder("17.sock")
        pod.order()
        pod.called().hello()
    else:
        pod.order(until_wall_s="x")
        eventually(lambda: "ignored" in pod.log.read_text(), "it runs")
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(DEADLINE_S) == 0


def test_oversized_line_of_collector_ends_connection(pod: Pod) -> None:
    listener = pod.recorder("17.sock")
    pod.order()
    collector, recorder = pod.called(), Peer(listener.accept()[0])
    collector.hello()
    collector.send(b"x" * 200_000)
    assert recorder.is_cut


@pytest.mark.parametrize(
    ("address", "host", "port"), [("10.0.0.7:8470", "10.0.0.7", 8470), ("[fd00::7]:65535", "fd00::7", 65535)]
)
def test_order_address_may_be_ipv4_or_ipv6(tmp_path: Path, address: str, host: str, port: int) -> None:
    path = tmp_path / "order.json"
    path.write_text(json.dumps(ORDER | {"address": address}))
    assert read_order(path) == Order("tests/live", "11111111-aaaa", host, port, TOKEN, 4e9)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "invalid JSON"),
        ("[" * 4000, "invalid JSON"),
        ("[]", "expected the keys"),
        (json.dumps({**ORDER, "more": 1}), "expected the keys"),
        (json.dumps({key: value for key, value in ORDER.items() if key != "uid"}), "expected the keys"),
        (json.dumps(ORDER) + " " * 4096, "more than 4096 bytes"),
        *(
            (json.dumps({**ORDER, key: value}), reason)
            for key, value, reason in [
                ("capture", "live", "capture is invalid"),
                ("capture", "tests/live\n", "capture is invalid"),
                ("capture", 7, "capture is invalid"),
                ("uid", "", "uid is invalid"),
                ("token", "short", "token is invalid"),
                ("token", "XY" * 20, "token is invalid"),
                ("until_wall_s", True, "until_wall_s"),
                ("until_wall_s", float("nan"), "until_wall_s"),
                ("until_wall_s", float("inf"), "until_wall_s"),
                ("until_wall_s", None, "until_wall_s"),
                ("until_wall_s", -1, "until_wall_s"),
                ("until_wall_s", 10**400, "until_wall_s"),  # too large for a float
                ("until_wall_s", 1e300, "until_wall_s"),
                ("address", 7, "address"),
                ("address", "collector.example:8470", "address"),
                ("address", "10.0.0.7", "address"),
                ("address", "10.0.0.7:0", "address"),
                ("address", "10.0.0.7:70000", "address"),
                ("address", "10.0.0.7:+80", "address"),
                ("address", "10.0.0.7:\u0661", "address"),
                ("address", "[10.0.0.7]:80", "address"),
                ("address", "fd00::7:80", "address"),
                ("address", "[fd00::7%eth0]:80", "address"),
                ("address", "169.254.169.254:80", "not that of a pod"),
                ("address", "[::ffff:169.254.169.254]:80", "not that of a pod"),
                ("address", "[fe80::1]:80", "not that of a pod"),
                ("address", "0.0.0.0:8470", "not that of a pod"),
                ("address", "224.0.0.1:8470", "not that of a pod"),
            ]
        ),
    ],
)
def test_invalid_orders_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "order.json"
    path.write_text(text)
    with pytest.raises(BadOrderError, match=reason):
        read_order(path)


def test_missing_order_is_none_and_unreadable_one_is_refused(tmp_path: Path) -> None:
    assert read_order(tmp_path / "order.json") is None
    with pytest.raises(BadOrderError):
        read_order(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadOrderError, match="invalid JSON"):
        read_order(tmp_path / "pipe")
