"""Who answers in an engine's place, and never ends."""

import asyncio
from contextlib import suppress

import pytest

from specdecode_operator.capture.load import engine_client, engine_ready
from specdecode_operator.capture.load.engine_client import _UNREADABLE, CompletionStream, UnreadableStreamError
from specdecode_operator.capture.load.engine_ready import EngineMonitor, NoMetrics


@pytest.mark.parametrize("pause_s", [0, 0.05])
async def test_a_page_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    monkeypatch.setattr(engine_ready, "_TIMEOUT_S", 1.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b"#" if pause_s else b"#" * 2**20)
                await writer.drain()
                await asyncio.sleep(pause_s)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(120):
        port = server.sockets[0].getsockname()[1]
        async with EngineMonitor(f"http://127.0.0.1:{port}") as monitor:
            said = await monitor.read()
    assert isinstance(said, NoMetrics)
    assert "/metrics did not answer" in said.reason


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":[{"token_ids":["a"]}]}',
        b'{"choices":[{"token_ids":[-1]}]}',
        b'{"choices":[{"token_ids":{"a":1}}]}',
        b'{"choices":[{"text":5}]}',
        b'{"usage":{"completion_tokens":"many"}}',
        b'{"usage":{"prompt_tokens":1e300}}',
    ],
)
def test_an_answer_of_no_engine_is_unreadable(event: bytes) -> None:
    with pytest.raises(_UNREADABLE):
        CompletionStream(keep_answer=True).feed(b"data: " + event + b"\n\n", 0.0)


def test_an_answer_that_is_kept_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "_LARGEST_KEPT_BYTES", 1000)
    stream = CompletionStream(keep_answer=True)
    with pytest.raises(UnreadableStreamError, match="has no end"):
        stream.feed(b'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\n' * 100, 0.0)
