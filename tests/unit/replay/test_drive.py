"""Driving recorded or synthetic requests against an engine."""

import asyncio
import json
import ssl
from array import array
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from devcluster.cluster import pki
from specdecode_operator.capture.load.prompts import BlockPrompts, TokenIds
from specdecode_operator.capture.load.shutdown import Stop
from specdecode_operator.capture.trace_reader import RecordedRequest, RecordingError, read_recording
from specdecode_operator.replay import drive as drive_module
from specdecode_operator.replay.drive import (
    Address,
    Drive,
    Driven,
    Planned,
    TargetError,
    earlier_turns,
    find_target,
    planned,
    summarize,
    summary_text,
)
from tests.support.completion_server import (
    CompletionServer,
    Received,
    answer_in_full,
    completion_server,
    never_answer,
    rejection,
)
from tests.support.sequences import common_length
from tests.support.traces import Line, record, write_trace

MODELS = (200, json.dumps({"data": [{"id": "tiny"}]}))


@pytest.fixture
async def server() -> AsyncIterator[CompletionServer]:
    async with completion_server() as state:
        state.pages["/v1/models"] = MODELS
        yield state


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_module, "CONNECT_AHEAD_S", 0.01)


def plan_of(folder: Path, records: Iterable[Line], time_scale: float = 1.0, most: int | None = None) -> list[Planned]:
    return [*planned(read_recording(write_trace(folder / "trace.jsonl", records)), time_scale, most)]


async def drive(
    server: CompletionServer, plan: list[Planned], folder: Path, stop: Stop | None = None
) -> tuple[Driven, list[dict[str, Any]]]:
    """Send a plan; return what became of it, and the lines of its one file."""
    address = Address.parse(server.url)
    target = await find_target(address, None, "tiny", "secret")
    prompts = BlockPrompts(TokenIds(32_000), 16, 0)
    sending = Drive(server=target, monitor_url=address.root, prompts=prompts, timeout_s=30)
    out = folder / "out"
    out.mkdir()
    driven = await sending.run(plan, out, stop or Stop())
    return driven, [json.loads(line) for line in driven.client_file.read_text().splitlines()]


async def test_sent_request_matches_its_record(server: CompletionServer, tmp_path: Path) -> None:
    records = [
        record(arrival_ms=5000.0, request_id="demo-one-7", phase="one", temperature=0.7, prompt_tokens=33),
        record(arrival_ms=5020.0, output_tokens=9, itl_ms=[1.0] * 8, itl_tokens=None),
    ]
    driven, lines = await drive(server, plan_of(tmp_path, records), tmp_path)
    first, second = server.received
    assert len(first.body.pop("prompt")) == 33
    assert first.body == {
        "model": "tiny",
        "max_tokens": 6,
        "temperature": 0.7,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert (first.id, second.id) == ("demo-one-7", "replay-1")
    assert first.headers["authorization"] == "Bearer secret"
    assert "temperature" not in second.body
    assert [(line["id"], line["phase"], line["index"], line["outcome"]) for line in lines] == [
        ("demo-one-7", "one", 0, "completed"),
        ("replay-1", "replay", 1, "completed"),
    ]
    # The first one's moment is the zero, however late in the recording that was.
    assert [line["scheduled_ms"] for line in lines] == [0, 20]
    assert driven.stop_reason is None
    assert driven.waits_s == {}


def test_arrivals_are_scaled_and_limited_to_first_requests(tmp_path: Path) -> None:
    records = [record(arrival_ms=arrival_ms) for arrival_ms in (400.0, 100.0, 200.0)] + [record(arrival_ms=None)]
    assert [each.offset_s for each in plan_of(tmp_path, records, 0.5)] == [0, 0.05, 0.15]
    assert [each.offset_s for each in plan_of(tmp_path, records, 1, 2)] == [0, 0.1]


def test_oversized_recorded_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="100000000 tokens"):
        plan_of(tmp_path, [record(prompt_tokens=10**8)])


@pytest.mark.parametrize("recorded", ["a\r\nX-Other: b", "a b", "ä", "", "x" * 129])
def test_invalid_request_ids_are_replaced(tmp_path: Path, recorded: str) -> None:
    [only] = plan_of(tmp_path, [record(request_id=recorded, phase="warmup")])
    assert only.request_id == "replay-0"
    assert only.phase == "replay"


def conversation(**second: Any) -> list[Line]:
    """Return a turn of 20 tokens answered with 6, and one that goes on from it."""
    return [
        record(prompt_tokens=20, block_hashes=[1]),
        record(**{"prompt_tokens": 40, "block_hashes": [1, 2], "arrival_ms": 60.0, **second}),
    ]


async def test_turn_waits_for_previous_answer_and_contains_it(server: CompletionServer, tmp_path: Path) -> None:
    answered = asyncio.Event()

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id == "replay-0":
            await answered.wait()
        await answer_in_full(request, writer)

    server.answer = answer
    records = [*conversation(), record(arrival_ms=80.0)]
    running = asyncio.create_task(drive(server, plan_of(tmp_path, records), tmp_path))
    # What goes on from nothing does not wait, though it comes later.
    await server.wait_for_requests(2)
    assert [request.id for request in server.received] == ["replay-0", "replay-2"]
    answered.set()
    driven, lines = await running
    first, second = server.request("replay-0").body, server.request("replay-1").body
    assert second["prompt"][:26] == [*first["prompt"], *range(1000, 1006)]
    assert len(second["prompt"]) == 40
    assert [first.get("return_token_ids"), second.get("return_token_ids")] == [True, None]
    assert list(driven.waits_s) == [1]
    [line] = [line for line in lines if line["index"] == 1]
    assert line["scheduled_ms"] == pytest.approx(60 + 1000 * driven.waits_s[1], abs=0.01)


async def test_turn_is_sent_at_recorded_time_if_previous_one_has_ended(
    server: CompletionServer, tmp_path: Path
) -> None:
    driven, lines = await drive(server, plan_of(tmp_path, conversation(arrival_ms=200.0)), tmp_path)
    assert lines[1]["scheduled_ms"] == pytest.approx(200 + 1000 * driven.waits_s.get(1, 0.0), abs=0.01)


@pytest.mark.parametrize("second", [{"prompt_tokens": 40}, {"prompt_tokens": 25, "block_hashes": [1, 2]}])
async def test_turn_is_sent_even_if_previous_one_failed(
    server: CompletionServer, tmp_path: Path, second: dict[str, Any]
) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id == "replay-0":
            writer.write(rejection(503, b"{}"))
        else:
            await answer_in_full(request, writer)

    server.answer = answer
    _, lines = await drive(server, plan_of(tmp_path, conversation(**second)), tmp_path)
    assert [line["outcome"] for line in lines] == ["http_rejected", "completed"]
    bodies = [request.body["prompt"] for request in server.received]
    assert [len(body) for body in bodies] == [20, second["prompt_tokens"]]
    assert common_length(*bodies) == 16


async def test_turn_without_whole_answer_starts_with_recorded_prefix(server: CompletionServer, tmp_path: Path) -> None:
    records = conversation(prompt_tokens=24, block_hashes=[1, 2], arrival_ms=60.0)
    _, lines = await drive(server, plan_of(tmp_path, records), tmp_path)
    one, other = (request.body["prompt"] for request in server.received)
    assert (common_length(one, other), len(other)) == (16, 24)
    assert [line["outcome"] for line in lines] == ["completed", "completed"]


async def test_tls_certificate_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pki.create(tmp_path / "pki", [pki.Identity("server", "server", addresses=("127.0.0.1",))])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "pki" / "server.crt", tmp_path / "pki" / "server.key")
    async with completion_server(context) as server:
        server.pages["/v1/models"] = MODELS
        with pytest.raises(TargetError, match="certificate verify failed"):
            await drive(server, plan_of(tmp_path, [record()]), tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "pki" / "ca.crt"))
        _, [line] = await drive(server, plan_of(tmp_path, [record()]), tmp_path)
        assert line["outcome"] == "completed"
        assert server.served["/metrics"] > 0


async def test_stopped_run_accounts_for_sent_requests(server: CompletionServer, tmp_path: Path) -> None:
    server.answer = never_answer
    stop = Stop()
    records = [*conversation(), *[record(arrival_ms=arrival_ms) for arrival_ms in (61.0, 3_600_000.0)]]
    plan = plan_of(tmp_path, records)
    running = asyncio.create_task(drive(server, plan, tmp_path, stop))
    await server.wait_for_requests(2)
    stop.set("SIGINT received")
    driven, lines = await running
    assert [(line["id"], line["outcome"], line["error"]) for line in lines] == [
        ("replay-0", "cancelled", "SIGINT received"),
        ("replay-2", "cancelled", "SIGINT received"),
    ]
    summary = summarize(plan, driven)
    assert (summary.planned, summary.sent, summary.outcomes) == (4, 2, {"cancelled": 2})
    assert (summary.stop_reason, summary.first_failure) == ("SIGINT received", None)
    assert "SIGINT received: 2 never left" in summary_text(summary)


async def test_summary_has_driven_and_recorded_figures(server: CompletionServer, tmp_path: Path) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.id == "replay-1":
            writer.write(rejection(400, b'{"error": {"message": "token out of vocabulary"}}'))
        else:
            await answer_in_full(request, writer)

    server.answer = answer
    records = [record(arrival_ms=0.0), record(arrival_ms=1.0, ttft_ms=999.0), record(arrival_ms=52.5)]
    plan = plan_of(tmp_path, records)
    driven, _ = await drive(server, plan, tmp_path)
    summary = summarize(plan, driven)
    assert summary.outcomes == {"completed": 2, "http_rejected": 1}
    assert summary.first_failure == "replay-1: http rejected 400: token out of vocabulary"
    # Both are of the same requests: those that were answered.
    assert (summary.recorded.ttft_ms.count, summary.recorded.ttft_ms.p99) == (2, 30)  # type: ignore[union-attr]
    assert summary.recorded.tpot_ms.p50 == 4.5  # type: ignore[union-attr]
    assert summary.recorded.latency_ms.p50 == 52.5  # type: ignore[union-attr]
    assert (summary.recorded.seconds, summary.recorded.output_tokens_per_second) == (0.105, 114.29)
    assert (summary.driven.ttft_ms.count, summary.driven.output_tokens) == (2, 12)  # type: ignore[union-attr]
    assert summary.acceptance is None
    assert "3 of 3 sent: 2 completed, 1 http rejected" in summary_text(summary)


async def test_answers_of_different_length_are_noted(server: CompletionServer, tmp_path: Path) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        request.body["max_tokens"] -= 1
        await answer_in_full(request, writer)

    server.answer = answer
    plan = plan_of(tmp_path, [record()])
    driven, _ = await drive(server, plan, tmp_path)
    assert summarize(plan, driven).other_lengths == 1


# Whom recorded requests are sent to.


def page(*names: str) -> tuple[int, str]:
    return 200, json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", ("localhost", 8000, "", False)),
        ("http://localhost:8000/v1/", ("localhost", 8000, "", False)),
        ("https://api.example.org/llm/v1", ("api.example.org", 443, "/llm", True)),
        ("http://[::1]:80/", ("::1", 80, "", False)),
    ],
)
def test_url_is_parsed_into_host_port_path_and_tls(url: str, expected: tuple[str, int, str, bool]) -> None:
    address = Address.parse(url)
    assert (address.host, address.port, address.path, address.tls) == expected


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http://", "ftp://a", "http://a:port", "http://a:99999", "http://me@a", "http://a?b", "http://a/\r\nb",
     "http://[::1", "http://a b", ""],
)  # fmt: skip
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(TargetError, match="--url"):
        Address.parse(url)


@pytest.mark.parametrize(
    ("served", "model", "recorded", "expected"),
    [
        (["a", "b"], "b", "a", "b"),
        (["a", "b"], None, "a", "a"),
        (["b"], None, "a", "b"),
        (["b"], None, None, "b"),
    ],
)
async def test_model_is_the_given_or_recorded_or_only_served_one(
    server: CompletionServer, served: list[str], model: str | None, recorded: str | None, expected: str
) -> None:
    server.pages["/v1/models"] = page(*served)
    target = await find_target(Address.parse(server.url), model, recorded, None)
    assert (target.model, target.host, target.port, target.path, target.tls) == (
        expected, "127.0.0.1", server.port, "/v1", None
    )  # fmt: skip


async def test_server_without_model_list_needs_model_option(server: CompletionServer) -> None:
    del server.pages["/v1/models"]
    assert (await find_target(Address.parse(server.url), "mine", None, None)).model == "mine"
    with pytest.raises(TargetError, match="--model"):
        await find_target(Address.parse(server.url), None, "recorded", None)


@pytest.mark.parametrize(
    ("answer", "model", "key", "says"),
    [
        (page("a", "b"), "c", None, "--model: c: .* a, b"),
        (page("a", "b"), None, None, "--model: .* a, b"),
        (page(*"abcdefg"), None, None, "e and 2 more"),
        (page(), None, None, "no model"),
        ((401, "{}"), None, None, "requires .*401.*--api-key-variable"),
        ((403, "{}"), None, "k", "rejects .*403"),
        ((500, '{"error": {"message": "no\\u001b[1mmemory"}}'), None, None, r"500 \(no\\x1b\[1mmemory\)"),
        ((200, "<html>"), None, None, "not a list of models"),
        ((200, '{"data": [{"id": 3}]}'), None, None, "not a list of models"),
        ((200, "[" * 100_000), None, None, "not a list of models"),
        ((200, " " * 2_000_000), None, None, "more than 1048576 bytes"),
    ],
)  # fmt: skip
async def test_unusable_server_is_refused_with_reason(
    server: CompletionServer, answer: tuple[int, str], model: str | None, key: str | None, says: str
) -> None:
    server.pages["/v1/models"] = answer
    with pytest.raises(TargetError, match=says) as raised:
        await find_target(Address.parse(server.url), model, "recorded", key)
    assert "\n" not in str(raised.value)
    assert str(raised.value).isprintable()


async def test_unreachable_server_is_refused(server: CompletionServer) -> None:
    closed = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = closed.sockets[0].getsockname()[1]
    closed.close()
    await closed.wait_closed()
    with pytest.raises(TargetError, match="does not answer"):
        await find_target(Address.parse(f"http://127.0.0.1:{port}"), None, None, None)


# Which recorded requests go on from which.


def request(arrival_ms: float | None, *blocks: int, lasts_ms: float = 100) -> RecordedRequest:
    return RecordedRequest(
        arrival_ms=arrival_ms,
        prompt_tokens=16 * len(blocks) + 5,
        cached_tokens=0,
        ttft_ms=lasts_ms,
        chunk_tokens=array("I", [1]),
        gaps_ms=array("d"),
        block_hashes=array("Q", blocks) if blocks else None,
    )


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([request(0, 1), request(200, 1, 2)], [None, 0]),
        ([request(0, 1), request(99.95, 1, 2)], [None, 0]),
        ([request(0, 1), request(99, 1, 2)], [None, None]),
        ([request(0, 1), request(200, 1, 2), request(400, 1, 2, 3)], [None, 0, 1]),
        ([request(0, 1), request(200, 3, 4)], [None, None]),
        ([request(0, 1, 2), request(200, 1, 2)], [None, None]),
        ([request(0, 1, 2), request(200, 1, 3)], [None, None]),
        ([request(0, 1), request(10, 1), request(200, 1, 2)], [None, None, 1]),
        ([request(0, 1), request(200, 1, 2), request(210, 1, 3)], [None, 0, 0]),
        ([request(0), request(200), request(None, 1), request(None, 1, 2)], [None] * 4),
    ],
    ids=[
        "turn",
        "no-thinking",
        "sent before the end of the other",
        "third turn",
        "another conversation",
        "said again",
        "changed",
        "the one that ended last",
        "two go on",
        "no hashes and no moments",
    ],
)
def test_turn_follows_request_whose_blocks_it_extends(requests: list[Any], expected: list[int | None]) -> None:
    assert earlier_turns(requests) == expected
