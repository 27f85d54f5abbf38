"""Requests that the server rejects, and its HTTP."""

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.recorder.block_hashes import block_hashes
from specdecode_operator.replay.recorded_engine import Matching, Unmatched
from specdecode_operator.replay.server import http_transport as wires
from specdecode_operator.replay.server.http_transport import Unread, Wire
from specdecode_operator.vllm.engine_metrics import read_metrics
from specdecode_operator.vllm.profiles import find_profile
from tests.support.replay_server import events, replay_server, texts
from tests.support.traces import record

QUICK = {"ttft_ms": 1.0, "itl_ms": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1, -1]}, 400, "token ids"),
        ({"prompt": [1, True]}, 400, "token ids"),
        ({"prompt": [1, 2**32]}, 400, "token ids"),
        ({"prompt": [[1], [2, "a"]]}, 400, "token ids"),
        ({"prompt": [[1], []]}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"prompt": ["a", 1]}, 400, "prompt"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"n": 0}, 400, "n"),
        ({"n": 5000}, 400, "n"),
        ({"n": 1000, "prompt": ["a", "b"]}, 400, "n"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": 2.5}, 400, "temperature"),
        ({"top_p": 3}, 400, "top_p"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_k": -2}, 400, "top_k"),
        ({"min_p": 1.5}, 400, "min_p"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty"),
        ({"frequency_penalty": -2.5}, 400, "frequency_penalty"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"seed": 2**63}, 400, "seed"),
        ({"seed": "seven"}, 400, "seed"),
        ({"min_tokens": 17}, 400, "less than or equal to max_tokens=16"),
        ({"stop": ["a", ""]}, 400, "stop"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"best_of": 3}, 400, "best_of"),
        ({"logprobs": 3}, 400, "logprobs"),
        ({"echo": True}, 400, "echo"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"stream_options": {"include_usage": True}}, 400, "stream"),
        ({"prompt": "four" * 60, "max_tokens": 5}, 400, "maximum context length is 64 tokens"),
        ({"stop": ["a"] * 1025}, 400, "stop"),
        ({"prompt": "four" * 2**15, "n": 1024, "return_token_ids": True}, 400, "return_token_ids"),
    ],
)
async def test_unsupported_request_is_refused_in_openai_error_format(
    tmp_path: Path, body: dict[str, Any], status: int, names: str
) -> None:
    async with replay_server(tmp_path, [record(**QUICK)], max_model_len=64) as client:
        response = await client.post("/v1/completions", json={"prompt": "a"} | body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status)
    assert names in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_sampling_parameters_at_their_bounds_are_accepted(tmp_path: Path) -> None:
    sampling = {
        "temperature": 2,
        "top_p": 1,
        "top_k": -1,
        "min_p": 1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 0.5,
        "seed": -(2**63),
        "min_tokens": 16,
        "best_of": 1,
        "suffix": "",
    }
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        assert (await client.post("/v1/completions", json={"prompt": "a"} | sampling)).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "a", "n": 2, "best_of": 2})).status_code == 200


@pytest.mark.parametrize(
    ("choice", "status"),
    [(None, 200), ("auto", 200), ("none", 200), ("required", 400), ({"type": "function"}, 400)],
)
async def test_required_tool_choice_is_refused(tmp_path: Path, choice: object, status: int) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice}
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"prompt": 1e400}', b"null", b'{"prompt": "\xff"}']
)
async def test_invalid_body_is_refused(tmp_path: Path, data: bytes) -> None:
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        response = await client.post("/v1/completions", content=data)
        assert response.status_code == 400
        assert response.json()["error"]["message"]
        response = await client.post("/v1/chat/completions", content=data)
        assert response.status_code == 400


async def test_requests_beyond_records_are_refused_with_unmatched_refuse(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)] * 2, unmatched=Unmatched.REFUSE) as client:
        assert texts(await events(client))
        response = await client.post("/v1/completions", json={"prompt": "a", "n": 2})
        assert response.status_code == 409
        assert "--unmatched" in response.json()["error"]["message"]
        page = (await client.get("/metrics")).text
    assert 'num_requests_waiting{engine="0",model_name="tiny"} 0.0' in page, "all of a request is taken, or nothing"


async def test_record_is_matched_by_prompt_prefix(tmp_path: Path) -> None:
    blocks = block_hashes([5] * 16, 16, lambda: None)
    deep = record(**QUICK, arrival_ms=9.0, output_tokens=9, itl_tokens=[4, 4], block_hashes=blocks)
    async with replay_server(tmp_path, [record(**QUICK), deep], matching=Matching.PREFIX) as client:
        answer = (await client.post("/v1/completions", json={"prompt": [5] * 20, "max_tokens": 99})).json()
    assert answer["usage"]["completion_tokens"] == 9


async def test_models_endpoint_requires_api_key(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)], api_keys=["right"]) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer wrong"})).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer right"})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200


async def test_served_model_names_replace_model_of_trace(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)], served_model_names=["one", "two"]) as client:
        models = (await client.get("/v1/models")).json()
        assert [each["id"] for each in models["data"]] == ["one", "two"]
        answer = (await client.post("/v1/completions", json={"prompt": "a", "model": "two"})).json()
        assert answer["model"] == "two"
        assert (await client.post("/v1/completions", json={"prompt": "a", "model": "tiny"})).status_code == 404


async def test_fail_share_answers_some_requests_with_500(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)], fail_share=0.5, seed=3) as client:
        found = [(await client.post("/v1/completions", json={"prompt": "a"})).status_code for _ in range(20)]
        page = (await client.get("/metrics")).text
    assert set(found) == {200, 500}
    assert read_metrics(page, find_profile("0.32")).server_errors == found.count(500)


async def test_recorded_engine_error_is_returned(tmp_path: Path) -> None:
    failed = record(**QUICK, finish_reason="error")
    async with replay_server(tmp_path, [failed] * 2) as client:
        found = await events(client)
        assert found[-1]["error"]["code"] == 500
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 99})
    assert response.status_code == 500


async def test_records_without_arrival_are_used_in_file_order(tmp_path: Path) -> None:
    records = [record(**QUICK, arrival_ms=None, output_tokens=tokens, itl_tokens=[1, 1]) for tokens in (5, 3, 4)]
    async with replay_server(tmp_path, records) as client:
        found = [len("".join(texts(await events(client)))) // 4 for _ in range(3)]
    assert found == [5, 3, 4]


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nHost: a\r\nx: ", b"a" * 2**16),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n", b"x: a\r\n" * 2**14),
        (b"GET /", b"a" * 2**16),
        (b"POST /ping HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 2**16),
    ],
)
async def test_endless_headers_close_the_connection(tmp_path: Path, begin: bytes, piece: bytes) -> None:
    async with replay_server(tmp_path, [record(**QUICK)]) as client, asyncio.timeout(120):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(begin)
        sent = 0
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
        writer.close()
        assert sent < 2**24
        assert (await client.get("/health")).status_code == 200


async def _raw(client: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(client.base_url.host, client.base_url.port)


async def test_connection_over_limit_gets_503_until_others_close(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)], most_connections=2) as client:
        silent = [await _raw(client) for _ in range(2)]
        # The server has accepted both: each answers a request.
        for reader, writer in silent:
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert b"200" in await reader.readline()
        reader, writer = await _raw(client)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in answer
        for _, each in (*silent, (reader, writer)):
            each.close()
            with suppress(OSError):
                await each.wait_closed()
        async with asyncio.timeout(60):
            while (await _status(client)) == 503:
                pass


async def _status(client: Any) -> int:
    return int((await client.get("/health", headers={"connection": "close"})).status_code)


async def test_bodies_in_memory_are_bounded_and_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdecode_operator.replay.server.serve._MOST_HELD_BYTES", 4096)
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        _, writer = await _raw(client)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 3000\r\n\r\n"
        writer.write(head + b'{"prompt": "')
        writer.write(b"a" * 2900)
        body = {"prompt": "b" * 2000, "max_tokens": 1}
        async with asyncio.timeout(60):
            while (refused := await client.post("/v1/completions", json=body)).status_code == 200:
                pass  # until the first body is there
        assert refused.status_code == 503
        assert "bodies" in refused.json()["error"]["message"]
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        async with asyncio.timeout(60):
            while (await client.post("/v1/completions", json=body)).status_code == 503:
                pass


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{", b"GET / HT"])
async def test_incomplete_request_is_closed_after_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("specdecode_operator.replay.server.http_transport._ARRIVES_WITHIN_S", 0.05)
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        reader, writer = await _raw(client)
        writer.write(sent)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        # A busy machine may take longer to send a whole one.
        monkeypatch.setattr("specdecode_operator.replay.server.http_transport._ARRIVES_WITHIN_S", 60.0)
        assert await _status(client) == 200


async def test_text_counts_by_its_size_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python keeps all characters of a text as large as its largest one: four bytes each beside an emoji."""
    monkeypatch.setattr("specdecode_operator.replay.server.serve._MOST_HELD_BYTES", 16_384)
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        for prompt, status in (("a" * 8000, 200), ("\U0001f600" + "a" * 8000, 503), ("a" * 8000, 200)):
            body = {"prompt": prompt, "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == status, prompt[:1]


@pytest.mark.parametrize(("headers", "status"), [(98, b"200"), (200, b"400")])
async def test_number_of_headers_is_limited(tmp_path: Path, headers: int, status: bytes) -> None:
    async with replay_server(tmp_path, [record(**QUICK)]) as client, asyncio.timeout(60):
        reader, writer = await _raw(client)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * headers + b"connection: close\r\n\r\n")
        assert status in await reader.readline()
        writer.close()


SLOW = {"ttft_ms": 1.0, "itl_ms": [3_600_000.0, 1.0]}
STREAM = b'{"prompt": "a", "max_tokens": 6, "stream": true}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(STREAM), STREAM)
GET = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


async def test_pipelined_requests_are_answered(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)]) as client, asyncio.timeout(60):
        reader, writer = await _raw(client)
        writer.write(GET * 8 + GET.replace(b"host: a", b"connection: close"))
        assert (await reader.read()).count(b"HTTP/1.1 200") == 9
        writer.close()


async def test_connection_with_many_pipelined_requests_is_closed(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**SLOW)]) as client, asyncio.timeout(60):
        reader, writer = await _raw(client)
        writer.write(POST + GET * 1000)
        with suppress(ConnectionResetError):
            await reader.read()
        writer.close()
        while await _running(client):
            pass


async def test_client_disconnect_with_pipelined_requests_frees_engine(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**SLOW)]) as client, asyncio.timeout(60):
        _, writer = await _raw(client)
        writer.write(POST + GET)
        while not await _running(client):
            pass
        writer.close()
        while await _running(client):
            pass


async def _running(client: Any) -> bool:
    page = (await client.get("/metrics")).text
    return any(
        line.startswith("vllm:num_requests_running{") and not line.endswith(" 0.0") for line in page.splitlines()
    )


async def test_pipelined_request_does_not_time_out_while_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdecode_operator.replay.server.http_transport._ARRIVES_WITHIN_S", 0.3)
    async with replay_server(tmp_path, [record(ttft_ms=1.0, itl_ms=[500.0, 500.0])]) as client, asyncio.timeout(60):
        reader, writer = await _raw(client)
        second = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"
        writer.write(POST + second + b" " * 900_000)
        assert b"[DONE]" in await reader.readuntil(b"[DONE]")
        writer.close()


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


async def test_slow_reader_gets_all_data_in_order() -> None:
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


async def test_dropped_reader_gets_no_more_data() -> None:
    connection = Connection()
    wire = connection.wire()
    await wire.open([])
    connection.room.clear()
    wire.write(b"never")
    wire.drop()
    await wire.closed()
    assert (connection.messages, connection.ended) == ([], False)


async def test_reader_with_most_unread_bytes_is_abandoned_at_limit(
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


BODY = b'{"prompt": "a", "stream": true, "max_tokens": 1000000}'


async def _started(client: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a long stream, and read none of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port, limit=2**10)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY))
    return reader, writer


def _long(bursts: int) -> Any:
    return record(output_tokens=1 + 5 * bursts, ttft_ms=1.0, itl_ms=[0.0] * bursts, itl_tokens=[5] * bursts)


async def _finished(client: Any, reason: str) -> None:
    line = f'request_success_total{{engine="0",finished_reason="{reason}",model_name="tiny"}} 1.0'
    while line not in (await client.get("/metrics")).text:
        pass


async def test_client_that_never_reads_is_closed_and_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wires, "MOST_UNREAD_BYTES", 2**18)
    async with replay_server(tmp_path, [_long(100_000)]) as client, asyncio.timeout(240):
        _, writer = await _started(client)
        await _finished(client, "abort")
        writer.close()
    assert "A connection was closed because its client left" in capsys.readouterr().err


async def test_a_client_that_reads_late_gets_the_whole_answer(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [_long(30_000)]) as client, asyncio.timeout(240):
        reader, writer = await _started(client)
        await _finished(client, "length")
        data = b""
        while b"[DONE]" not in data[-20:] and (piece := await reader.read(2**16)):
            data += piece
        writer.close()
    assert data.count(b'"object":"text_completion"') == 30_001
