import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.replay.server import http_transport as wires
from specdecode_operator.replay.server.http_transport import Unread, Wire
from tests.support.replay_server import replay_server
from tests.support.traces import record


class Connection:
    """What a server's ``send`` writes to; full, it lets nobody write."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ended = False
        self.room = asyncio.Event()
        self.room.set()
        self.written = asyncio.Event()
        self.abandoned: list[int] = []

    def wire(self, unread: Unread | None = None) -> Wire:
        return Wire(self.send, unread or Unread(), self.abandoned.append)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self.room.wait()
        if message["type"] == "http.response.body":
            self.messages += [message["body"]] if message["body"] else []
            self.ended = not message["more_body"]
            self.written.set()


async def test_each_write_is_one_message_at_once() -> None:
    connection = Connection()
    wire = connection.wire()
    await wire.open([])
    wire.write(b"one")
    wire.write(b"two")
    assert connection.messages == [b"one", b"two"]
    wire.end()
    await wire.closed()
    assert connection.ended


async def test_what_is_written_before_it_is_open_follows() -> None:
    connection = Connection()
    wire = connection.wire()
    wire.write(b"early")
    wire.end()
    await wire.open([])
    await wire.closed()
    assert (connection.messages, connection.ended) == ([b"early"], True)


async def test_a_slow_reader_gets_everything_in_order() -> None:
    connection = Connection()
    wire = connection.wire()
    await wire.open([])
    connection.room.clear()
    for number in range(5):
        wire.write(b"%d" % number)
    wire.end()
    closing = asyncio.create_task(wire.closed())
    await asyncio.sleep(0)
    assert (connection.messages, closing.done()) == ([], False)
    connection.room.set()
    await closing
    assert connection.messages == [b"0", b"1234"]
    assert connection.ended


async def test_after_a_slow_moment_each_write_is_a_message_again() -> None:
    connection = Connection()
    wire = connection.wire()
    await wire.open([])
    connection.room.clear()
    wire.write(b"late")
    connection.room.set()
    async with asyncio.timeout(120):
        await connection.written.wait()
    await asyncio.sleep(0)
    wire.write(b"one")
    wire.write(b"two")
    assert connection.messages == [b"late", b"one", b"two"]


async def test_a_reader_that_has_gone_is_written_nothing_more() -> None:
    connection = Connection()
    wire = connection.wire()
    await wire.open([])
    connection.room.clear()
    wire.write(b"never")
    wire.drop()
    await wire.closed()
    assert (connection.messages, connection.ended) == ([], False)


async def test_where_all_that_is_unread_is_too_much_who_has_most_to_read_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wires, "MOST_UNREAD_BYTES", 10)
    unread, slow, slower = Unread(), Connection(), Connection()
    first, second = slow.wire(unread), slower.wire(unread)
    for connection, wire in ((slow, first), (slower, second)):
        await wire.open([])
        connection.room.clear()
        wire.write(b"begun")
    second.write(b"1234567")
    first.write(b"abc")
    assert (slow.abandoned, slower.abandoned) == ([], [])
    first.write(b"d")
    assert (slow.abandoned, slower.abandoned) == ([], [7])
    second.write(b"more")
    second.drop()
    await second.closed()
    for _ in range(5):
        first.write(b"e")
    first.end()
    slow.room.set()
    await first.closed()
    assert (slow.messages, slow.ended, slow.abandoned) == ([b"begun", b"abcdeeeee"], True, [])
    third = slow.wire(unread)
    third.write(b"0123456789")
    assert slow.abandoned == [], "what was read or dropped does not count"


async def test_a_client_that_never_reads_is_closed_and_its_request_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wires, "MOST_UNREAD_BYTES", 2**18)
    bursts = 100_000
    long = record(output_tokens=1 + 5 * bursts, ttft_ms=1.0, itl_ms=[0.0] * bursts, itl_tokens=[5] * bursts)
    async with replay_server(tmp_path, [long]) as client, asyncio.timeout(240):
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 10**6}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port, limit=2**10)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        while b'finished_reason="abort",model_name="tiny"} 1.0' not in (await client.get("/metrics")).content:
            pass
        writer.close()
    assert "A connection was closed whose client had" in capsys.readouterr().err


async def test_a_client_that_reads_late_gets_the_whole_answer(tmp_path: Path) -> None:
    bursts = 30_000
    long = record(output_tokens=1 + 5 * bursts, ttft_ms=1.0, itl_ms=[0.0] * bursts, itl_tokens=[5] * bursts)
    async with replay_server(tmp_path, [long]) as client:
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 10**6}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port, limit=2**10)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        data = b""
        async with asyncio.timeout(240):
            # Until all has been generated nothing is read.
            while (
                b'request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0'
                not in (await client.get("/metrics")).content
            ):
                pass
            while b"[DONE]" not in data[-20:] and (piece := await reader.read(2**16)):
                data += piece
        writer.close()
    assert data.count(b'"object":"text_completion"') == bursts + 1
