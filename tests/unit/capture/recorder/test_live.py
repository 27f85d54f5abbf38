"""Live captures in the engine's process."""

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from specdecode_operator.capture.recorder import hooks, live, writer
from specdecode_operator.capture.recorder.block_hashes import salted_block_hashes
from specdecode_operator.capture.recorder.canary import REQUEST_ID_PREFIX, RIGHT, Verdict, line_of
from specdecode_operator.capture.recorder.collector import TOO_MANY_ERRORS
from specdecode_operator.capture.recorder.live_collector import LiveCollector
from specdecode_operator.capture.recorder.salting import Salt, http_request
from specdecode_operator.capture.recorder.segment_format import LiveSettings, Request, Tally
from specdecode_operator.capture.recorder.vllm_internals import live_problems
from tests.support.engine_standins import (
    FinishReason,
    OlderOutputProcessor,
    OutputProcessor,
    SamplingParams,
    chunk,
    engine_classes,
    last_chunk,
)
from tests.support.live_recorder import SALT, Armed, LiveEngine, arm, disarm, live_engine
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.capture.conftest import BLOCK_SIZE, HEADER

KEY = bytes.fromhex(SALT)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LiveEngine]:
    with live_engine(tmp_path, HEADER) as started:
        yield started


async def until(condition: Any) -> None:
    """Wait for another thread while the event loop goes on."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (of a thread that knows no event loop)
            await asyncio.sleep(0.01)


def kinds(lines: list[Any]) -> list[str]:
    return [line.__struct_config__.tag for line in lines]


def of_kind(lines: list[Any], kind: type) -> list[Any]:
    return [line for line in lines if isinstance(line, kind)]


def pseudonym(identifier: str) -> str:
    return blake2b(identifier.encode(), digest_size=8, key=KEY, person=b"id").hexdigest()


async def ended(armed: Armed) -> tuple[list[Any], Tally]:
    """Disarm, and return the lines with the tally."""
    armed.order(disarm())
    lines = await armed.rest()
    (tally,) = of_kind(lines, Tally)
    return lines, tally


def counted(first: Any, lines: list[Any]) -> tuple[float, float]:
    """Return how many requests and tokens vLLM counted in the window."""
    last = lines[-2].values
    finished, tokens = (last[key] - first.values[key] for key in ("requests_finished", "generation_tokens"))
    return finished, tokens


async def test_live_capture_sends_all_lines_in_order(engine: LiveEngine) -> None:
    server = engine.server
    await server.wait()
    armed, (header, first) = await engine.arm()
    server.add("cmpl-a-0", [7] * 9, sampling_params=SamplingParams(temperature=0.5))
    await server.step(chunk("cmpl-a-0", 2))
    await server.step(last_chunk("cmpl-a-0", 3))
    lines, tally = await ended(armed)
    assert (header.live, header.sample_percent, header.block_hash) == (True, 100, "blake2b-salted")
    assert kinds(lines) == ["step", "step", "request", "anchor", "tally", "counters", "closed"]
    (record,) = of_kind(lines, Request)
    assert (record.id, record.external_id) == (pseudonym("cmpl-a-0"), pseudonym("a"))
    assert (record.chunk_tokens, record.temperature, record.ended_by) == ([2, 3], 0.5, "engine")
    assert tally == Tally(
        admitted=1, recorded=1, sampled_out=0, dropped=0, older=0, after=0, finished=1, generated_tokens=5
    )
    assert counted(first, lines) == (1, 5)
    assert (lines[-1].reason, lines[-1].requests, lines[-1].dropped) == ("ordered", 1, 0)
    await until(lambda: engine.is_asleep)


async def test_recorder_can_be_armed_again(engine: LiveEngine) -> None:
    boots = set()
    await engine.server.wait()
    for number in range(3):
        armed, (header, _) = await engine.arm()
        engine.server.add(f"r{number}")
        await engine.server.step(last_chunk(f"r{number}", 2))
        _, tally = await ended(armed)
        assert (tally.admitted, tally.recorded, tally.finished) == (1, 1, 1)
        boots.add(header.boot)
        await until(lambda: engine.is_asleep)
    assert len(boots) == 3


async def test_sleeping_recorder_keeps_no_collector(engine: LiveEngine) -> None:
    engine.server.add("a")
    await engine.server.step(chunk("a"))
    assert engine.hooks.switch.collector is None
    armed, _ = await engine.arm()
    collector = weakref.ref(engine.hooks.switch.collector)
    await ended(armed)
    await until(lambda: engine.is_asleep)
    gc.collect()
    assert collector() is None


# The tally agrees with vLLM's own counters.


async def test_requests_running_before_arming_are_counted_but_not_recorded(engine: LiveEngine) -> None:
    server = engine.server
    server.add("old-1", [1] * 10)
    server.add("old-2", [1] * 20)
    await server.step(chunk("old-1", 4))
    armed, (_, first) = await engine.arm()
    server.add("new", [1] * 30)
    await server.step(chunk("old-1", 2), chunk("old-2", 1), chunk("new", 1), running=None)
    await server.step(last_chunk("old-1", 2), last_chunk("new", 3))
    server.abort("old-2")
    lines, tally = await ended(armed)
    (record,) = of_kind(lines, Request)
    assert record.id == pseudonym("new")
    # Running and computed counts include requests without a record.
    assert (record.concurrency, record.num_running, record.prefill_tokens) == (3, [3, 1], [50, 0])
    assert (tally.admitted, tally.older, tally.finished, tally.generated_tokens) == (1, 2, 2, 9)
    assert counted(first, lines) == (2, 9)


async def test_more_input_of_an_unrecorded_request_is_not_counted_again(engine: LiveEngine) -> None:
    """As of a streamed prompt."""
    server = engine.server
    server.add("older")
    await server.wait()
    armed, _ = await engine.arm()
    for _ in range(2):
        server.add("canary", external_req_id=f"cmpl-{REQUEST_ID_PREFIX}0123-0")
        server.add("older")
    _, tally = await ended(armed)
    assert (tally.admitted, tally.sampled_out, tally.older) == (1, 1, 1)


@pytest.mark.parametrize("processor", [OlderOutputProcessor, OutputProcessor])
async def test_tally_matches_vllm_for_stop_strings_and_aborts(tmp_path: Path, processor: Any) -> None:
    with live_engine(tmp_path, HEADER, processor=processor) as engine:
        server = engine.server
        await server.wait()
        armed, (_, first) = await engine.arm()
        for name in ("stopped", "left", "whole", "both"):
            server.add(name, sampling_params=SamplingParams(stop=["END"]))
        server.processor.stop_at |= {"stopped": 2, "both": 2}
        await server.step(chunk("stopped", 5), chunk("left", 2), chunk("whole"), last_chunk("both", 3))
        server.abort("left")
        await server.step(chunk("left", 7), chunk("stopped", 5), last_chunk("whole", 2))
        lines, tally = await ended(armed)
        assert (tally.finished, tally.generated_tokens) == (3, 5 + 2 + 1 + 3 + 2)
        assert counted(first, lines) == (3, 13)
        records = {record.id: record for record in of_kind(lines, Request)}
        assert [records[pseudonym(name)].ended_by for name in ("stopped", "left")] == ["stop_string", "abort"]


async def test_tally_matches_vllm_for_abort_between_slices(engine: LiveEngine) -> None:
    server = engine.server
    await server.wait()
    armed, (_, first) = await engine.arm()
    names = [f"r{number}" for number in range(130)]
    for name in names:
        server.add(name)

    async def leave() -> None:
        server.abort("r129")  # whose output is in the second slice

    server.between_slices = leave  # type: ignore[method-assign]
    await server.step(*(last_chunk(name, 3) for name in names))
    lines, tally = await ended(armed)
    assert (tally.admitted, tally.recorded, tally.finished, tally.generated_tokens) == (130, 130, 129, 129 * 3)
    assert counted(first, lines) == (129, 129 * 3)


async def test_rejected_request_is_not_counted_as_finished(engine: LiveEngine) -> None:
    """As in vLLM 0.33, whose paused engine rejects a request without counting it."""
    server = engine.server
    await server.wait()
    armed, _ = await engine.arm()
    server.add("a")
    rejected = last_chunk("a", 0, FinishReason.ERROR)
    rejected.error = SimpleNamespace()  # type: ignore[attr-defined]
    await server.step(rejected)
    _, tally = await ended(armed)
    assert (tally.recorded, tally.finished) == (1, 0)


@pytest.mark.parametrize("arms_first", [True, False])
async def test_arming_and_disarming_wait_for_end_of_message(engine: LiveEngine, arms_first: bool) -> None:
    server = engine.server
    server.add("a")
    server.add("b")
    await server.step(chunk("a"), chunk("b"))
    armed = engine.connect()
    collected: list[Any] = []
    if not arms_first:
        armed.order(arm())
        collected = [await armed.line(), await armed.line()]

    async def in_the_middle() -> None:
        """Order, and give the recorder every chance to follow at once."""
        armed.order(arm() if arms_first else disarm(0.0))
        await until(lambda: engine.hooks.switch._due is not None)
        await asyncio.sleep(0)

    server.between_slices = in_the_middle  # type: ignore[method-assign]
    await server.step(last_chunk("a", 3), last_chunk("b", 4))
    if arms_first:
        collected = [await armed.line(), await armed.line()]
        del server.between_slices
        lines, tally = await ended(armed)
        assert (tally.finished, tally.generated_tokens, tally.older) == (0, 0, 0)
        assert counted(collected[1], lines) == (0, 0)
    else:
        lines = await armed.rest()
        (tally,) = of_kind(lines, Tally)
        assert (tally.finished, tally.generated_tokens, tally.older) == (2, 7, 2)
        assert counted(collected[1], lines) == (2, 7)


# Sampling, and what may leave the pod.


async def test_sample_is_chosen_by_http_request(engine: LiveEngine) -> None:
    server = engine.server
    await server.wait()
    armed, (header, first) = await engine.arm(sample_percent=40)
    external: dict[str, list[str]] = {}
    for number in range(100):
        name = f"cmpl-r{number}-0"
        external[name] = [f"{answer}_{name}-abcd1234" for answer in (0, 1)]
        for request_id in external[name]:
            server.add(request_id, external_req_id=name)
    everything = [each for pair in external.values() for each in pair]
    await server.step(*(last_chunk(each, 2) for each in everything))
    lines, tally = await ended(armed)
    records = of_kind(lines, Request)
    by_request = {record.external_id for record in records}
    assert header.sample_percent == 40
    assert len(records) == 2 * len(by_request) == tally.recorded
    assert 20 < len(by_request) < 60
    assert (tally.admitted, tally.recorded + tally.sampled_out, tally.dropped) == (200, 200, 0)
    assert (tally.finished, tally.generated_tokens) == counted(first, lines) == (200, 400)
    assert {record.concurrency for record in records} <= set(range(1, 201))
    assert {tuple(record.prefill_tokens) for record in records} == {(600,)}


async def test_canary_requests_are_sampled_out_and_verdicts_published(engine: LiveEngine) -> None:
    server = engine.server
    await server.wait()
    armed, _ = await engine.arm()
    server.add("1", external_req_id=f"cmpl-{REQUEST_ID_PREFIX}0123-0")
    server.add("2", external_req_id="cmpl-a-0")
    await server.step(last_chunk("1", 2), last_chunk("2", 3))
    told = engine.connect()
    verdict = line_of("the prompt", Verdict(RIGHT))
    told.order(verdict)
    assert await told.rest() == []
    lines, tally = await ended(armed)
    assert [record.external_id for record in of_kind(lines, Request)] == [pseudonym("a")]
    assert (tally.admitted, tally.recorded, tally.sampled_out) == (2, 1, 1)
    assert (tally.finished, tally.generated_tokens) == (2, 5)
    labels = {"prompt": verdict["canary"]["prompt"], "verdict": "right"}
    assert (REGISTRY.get_sample_value("specdecode:canary_answers_total", labels) or 0) >= 1


def test_sample_has_its_size_and_depends_on_the_salt() -> None:
    names = [f"r{number}" for number in range(4000)]
    chosen = [{name for name in names if Salt(key).selects(name, 25)} for key in (KEY, b"other")]
    assert all(900 < len(each) < 1100 for each in chosen)
    assert chosen[0] != chosen[1]
    assert all(Salt(KEY).selects(name, 100) for name in names)


@pytest.mark.parametrize(
    ("request_id", "external_id", "joined"),
    [
        ("0_cmpl-X-3-abcd1234", "cmpl-X-3", "X"),
        ("cmpl-X-3-abcd1234", "cmpl-X-3", "X"),
        ("chatcmpl-X-1-abcd1234", "chatcmpl-X-1", "X-1"),
        ("resp_9-abcd1234", "resp_9", "resp_9"),
        ("2_unknown", None, "unknown"),
        ("unknown", None, "unknown"),
    ],
)
def test_answers_and_prompts_of_an_http_request_share_its_id(
    request_id: str, external_id: str | None, joined: str
) -> None:
    assert http_request(request_id, external_id) == joined


async def test_text_of_users_does_not_leave_the_pod(tmp_path: Path) -> None:
    with live_engine(tmp_path, HEADER, allowed="answers,prompts") as engine:
        server = engine.server
        await server.wait()
        armed = engine.connect()
        armed.order(arm())
        server_lines = [await armed.line(), await armed.line()]
        for name, stop in (("secret-a", ["SECRET"]), ("secret-b", ["SECRET", "OTHER"]), ("secret-c", [])):
            server.add(name, [424242] * 9, sampling_params=SamplingParams(stop=stop))
        server.processor.stop_at |= {"secret-a": 1, "secret-b": 1}
        by_token = chunk("secret-c", finish_reason=FinishReason.STOP, stop_reason=99)
        await server.step(chunk("secret-a"), chunk("secret-b"), by_token)
        server.add("secret-d", sampling_params=SamplingParams(stop=3))  # type: ignore[arg-type]
        server_lines += (await ended(armed))[0]
        records = {record.id: record for record in of_kind(server_lines, Request)}
        stop_reasons = [records[pseudonym(f"secret-{letter}")].stop_reason for letter in "abc"]
        assert stop_reasons == ["string", None, "token"]
        closed = server_lines[-1]
        assert closed.first_error.startswith("TypeError at collector.py:")
        everything = repr(server_lines)
        assert "ecret" not in everything.lower().replace("'string'", "")
        assert "424242" not in everything
        assert all(record.token_ids is None is record.prompt_token_ids for record in records.values())


async def test_allowed_token_ids_are_recorded(tmp_path: Path) -> None:
    with live_engine(tmp_path, HEADER, allowed="answers, prompts") as engine:
        await engine.server.wait()
        armed, (header, _) = await engine.arm(token_ids=True, prompt_token_ids=True)
        engine.server.add("a", [7, 8, 9, 7, 8])
        await engine.server.step(chunk("a", 3, finish_reason=FinishReason.STOP, stop_reason=99))
        lines, _ = await ended(armed)
        (record,) = of_kind(lines, Request)
        assert (header.token_ids, record.stop_reason) == (True, 99)
        assert (record.token_ids, record.prompt_token_ids) == ([0, 1, 2], [7, 8, 9, 7, 8])


@pytest.mark.parametrize(
    ("allowed", "wanted", "is_refused"),
    [
        ("", {"token_ids": True}, True),
        ("answers", {"token_ids": True}, False),
        ("answers", {"token_ids": True, "prompt_token_ids": True}, True),
        ("prompts", {"prompt_token_ids": True}, False),
        ("prompts", {"token_ids": True}, True),
        ("yes", {"token_ids": True}, True),
    ],
)
async def test_token_ids_are_refused_unless_allowed(
    tmp_path: Path, allowed: str, wanted: dict[str, bool], is_refused: bool
) -> None:
    with live_engine(tmp_path, HEADER, allowed=allowed) as engine:
        await engine.server.wait()
        armed = engine.connect()
        armed.order(arm(**wanted))
        first = await armed.line()
        assert kinds([first]) == ["refused" if is_refused else "header"]
        assert not is_refused or "not allowed" in first.reason
        armed.close()
        await until(lambda: engine.is_asleep)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (BLOCK_SIZE, 1), (3 * BLOCK_SIZE - 1, 2), (40, 10)])
def test_salted_block_hashes_match_reference_implementation(tokens: int, blocks: int) -> None:
    prompt = [position * 70_000 for position in range(tokens)]
    previous, wanted = bytes(8), []
    for start in range(0, blocks * BLOCK_SIZE, BLOCK_SIZE):
        text = b"".join(token.to_bytes(8, "little") for token in prompt[start : start + BLOCK_SIZE])
        previous = blake2b(previous + text, digest_size=8, key=KEY, person=b"block").digest()
        wanted.append(int.from_bytes(previous, "little"))
    assert salted_block_hashes(prompt, BLOCK_SIZE, lambda: None, KEY) == wanted
    assert blocks == 0 or salted_block_hashes(prompt, BLOCK_SIZE, lambda: None, b"other") != wanted


# The end: in order, or not.


async def test_disarmed_recorder_records_running_requests_to_their_end(engine: LiveEngine) -> None:
    server = engine.server
    await server.wait()
    armed, (_, first) = await engine.arm()
    server.add("a")
    await server.step(chunk("a"))
    collector = engine.hooks.switch.collector
    assert isinstance(collector, LiveCollector)
    armed.order(disarm())
    await until(lambda: not collector._is_admitting)
    server.add("later")
    await server.step(chunk("a", 2), chunk("later", 4))
    await server.step(last_chunk("a", 3))
    lines = await armed.rest()
    (record,), (tally,) = of_kind(lines, Request), of_kind(lines, Tally)
    assert (record.chunk_tokens, record.ended_by) == ([1, 2, 3], "engine")
    assert (tally.admitted, tally.after, tally.finished, tally.generated_tokens) == (1, 1, 1, 10)
    assert counted(first, lines) == (1, 10)
    assert lines[-1].unfinished == 0


async def test_requests_that_outlast_the_drain_are_unfinished(engine: LiveEngine) -> None:
    await engine.server.wait()
    armed, _ = await engine.arm()
    engine.server.add("a")
    await engine.server.step(chunk("a"))
    armed.order(disarm(0.0))
    lines = await armed.rest()
    (record,), (tally,) = of_kind(lines, Request), of_kind(lines, Tally)
    assert (record.ended_by, record.chunk_tokens) == ("unfinished", [1])
    assert (lines[-1].unfinished, tally.recorded, tally.dropped) == (1, 1, 0)


async def test_closed_connection_puts_recorder_to_sleep(engine: LiveEngine) -> None:
    await engine.server.wait()
    armed, _ = await engine.arm()
    engine.server.add("a")
    await engine.server.step(chunk("a"))
    armed.close()
    await until(lambda: engine.is_asleep)
    await engine.server.step(last_chunk("a"))
    armed, _ = await engine.arm()
    engine.server.add("b")
    await engine.server.step(last_chunk("b"))
    _, tally = await ended(armed)
    assert (tally.admitted, tally.recorded, tally.older) == (1, 1, 0)


async def test_stalled_collector_ends_recording_without_blocking_engine(tmp_path: Path) -> None:
    """The queue fills, drops and counts; then the recording ends. The event loop never waits."""
    with live_engine(tmp_path, HEADER, stalled_s=0.2) as engine:
        server = engine.server
        await server.wait()
        armed, _ = await engine.arm()
        armed.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for number in range(3000):
            server.add(f"r{number}", [number] * 4000)
            await server.step(last_chunk(f"r{number}"))
        await until(lambda: engine.is_asleep)
        armed.close()
        armed, _ = await engine.arm()
        _, tally = await ended(armed)
        assert (tally.admitted, tally.older) == (0, 0)


async def test_requests_dropped_by_full_queue_are_counted(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "QUEUE_BYTES", 4000)
    await engine.server.wait()
    armed, _ = await engine.arm(steps=False)
    for number in range(20):
        engine.server.add(f"r{number}")
    await engine.server.step(*(last_chunk(f"r{number}") for number in range(20)))
    lines, tally = await ended(armed)
    assert tally.admitted == 20 == tally.recorded + tally.dropped
    assert tally.recorded == len(of_kind(lines, Request))
    assert 0 < tally.dropped == lines[-1].dropped


async def test_line_that_the_collector_rejects_is_dropped(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LONGEST_LINE_BYTES", 4096)
    await engine.server.wait()
    armed, _ = await engine.arm(steps=False)
    engine.server.add("short")
    engine.server.add("long", list(range(10_000)))
    await engine.server.step(last_chunk("long"), last_chunk("short"))
    lines, tally = await ended(armed)
    assert [record.id for record in of_kind(lines, Request)] == [pseudonym("short")]
    assert (tally.admitted, tally.recorded, tally.dropped, lines[-1].dropped) == (2, 1, 1, 1)


async def test_live_recorder_turns_off_after_many_errors(engine: LiveEngine) -> None:
    await engine.server.wait()
    armed, _ = await engine.arm()
    for _ in range(TOO_MANY_ERRORS):
        await engine.server.deliver(SimpleNamespace(outputs=[], timestamp=1.0))
    lines = await armed.rest()
    assert kinds(lines)[-4:] == ["off", "tally", "counters", "closed"]
    assert (lines[-1].reason, lines[-1].errors) == ("unknown_shape", TOO_MANY_ERRORS)
    await until(lambda: engine.is_asleep)


async def test_process_end_closes_recording(engine: LiveEngine) -> None:
    await engine.server.wait()
    armed, _ = await engine.arm()
    engine.server.add("a")
    await engine.server.step(last_chunk("a"))
    ending = asyncio.create_task(asyncio.to_thread(engine.recorder.end))
    lines = await armed.rest()
    await ending
    assert (lines[-1].reason, lines[-1].requests) == ("exit", 1)
    assert not engine.path.exists()


ENDING = """
import asyncio, sys
from tests.support.engine_standins import ApiServer, engine_classes, last_chunk
from tests.unit.capture.conftest import HEADER
from specdecode_operator.capture.recorder import hooks

classes = engine_classes()
server = ApiServer(classes)
hooks.find_classes = lambda: classes
hooks.header = lambda *_: HEADER
hooks.read_counters = lambda: dict(server.counters)
hooks.start(None, [0])

async def main():
    await server.wait()
    await asyncio.to_thread(sys.stdin.readline)
    server.add("a")
    await server.step(last_chunk("a", 3))

asyncio.run(main())
"""


def armed_at(path: Path) -> tuple[Armed, Any] | None:
    """Return an armed connection and the first counters, or None if it is refused."""
    armed = Armed(path)
    armed.order(arm())
    return (armed, armed._line()) if kinds([armed._line()]) == ["header"] else None


def test_process_end_after_event_loop_closes_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDECODE_LIVE_DIR", str(tmp_path))
    command = [sys.executable, "-c", ENDING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[4]) as process:
        path = eventually(lambda: next(tmp_path.glob("*.sock"), None), "the recorder listens")
        # Refused until its event loop runs.
        armed, first = eventually(lambda: armed_at(path), "it is armed")
        process.communicate(b"go on\n", timeout=DEADLINE_S)
    lines = [first]
    while (line := armed._line()) is not None:
        lines.append(line)
    assert kinds(lines[-3:]) == ["tally", "counters", "closed"]
    assert lines[-1].reason == "exit"
    assert counted(first, lines) == (lines[-3].finished, lines[-3].generated_tokens) == (1, 3)
    assert not path.exists()


# Orders, and who may give them.


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (b"nonsense\n", "invalid order"),
        (b"[]\n", "invalid order"),
        (b"{}\n", "one of arm"),
        ({"arm": None}, "one of arm"),
        ({**arm(), **disarm()}, "one of arm"),
        ({**arm(), "more": 1}, "more"),
        (arm(more=1), "more"),
        (arm(salt="5A" * 32), "salt"),
        (arm(salt="5a"), "salt"),
        (arm(sample_percent=0), "sample_percent"),
        (arm(sample_percent=101), "sample_percent"),
        (arm(steps=1), "steps"),
        (disarm(-1.0), "drain_s"),
        (disarm(), "expected arm"),
        ({"canary": {"prompt": "0a1b2c3d", "verdict": "fine", "reason": None}}, "canary.verdict"),
        ({"canary": {"prompt": "0a1b2c3d", "verdict": "right"}}, "reason"),
        ({**arm(), "canary": {"prompt": "0a1b2c3d", "verdict": "right", "reason": None}}, "one of arm"),
        (b"x" * 70_000, "longer than 65536 bytes"),
        (b"\xff\xfe\n", "invalid order"),
    ],
)
async def test_invalid_orders_are_refused(engine: LiveEngine, order: Any, reason: str) -> None:
    await engine.server.wait()
    connection = engine.connect()
    connection.order(order)
    (line,) = await connection.rest()
    assert kinds([line]) == ["refused"]
    assert reason in line.reason
    assert engine.is_asleep


@pytest.mark.parametrize("order", [arm(), b"nonsense\n"])
async def test_invalid_order_ends_running_recording(engine: LiveEngine, order: Any) -> None:
    await engine.server.wait()
    armed, _ = await engine.arm()
    armed.order(order)
    assert kinds(await armed.rest()) == ["refused"]
    await until(lambda: engine.is_asleep)


async def test_one_connection_is_armed_at_a_time(engine: LiveEngine) -> None:
    await engine.server.wait()
    armed, _ = await engine.arm()
    other = engine.connect()
    other.order(arm())
    (line,) = await other.rest()
    assert line.reason == "another connection is armed"
    _, tally = await ended(armed)
    assert tally.admitted == 0


async def test_fifth_connection_is_refused(engine: LiveEngine) -> None:
    connections = [engine.connect() for _ in range(4)]
    (line,) = await engine.connect().rest()
    assert line.reason == "4 connections are open"
    connections[0].close()
    eventually(lambda: engine.recorder.connections.acquire(blocking=False), "room for another")


async def test_arming_before_event_loop_runs_is_refused(engine: LiveEngine) -> None:
    connection = engine.connect()
    connection.order(arm())
    (line,) = await connection.rest()
    assert "event loop" in line.reason
    assert engine.is_asleep


async def test_arming_with_blocked_event_loop_is_refused(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdecode_operator.capture.recorder import live_collector

    monkeypatch.setattr(live_collector, "BOUNDARY_TIMEOUT_S", 0.01)
    await engine.server.wait()
    connection = engine.connect()
    connection.order(arm())
    line = connection._line()  # blocks this loop, which is the engine's
    assert "event loop" in line.reason
    await engine.server.step()
    assert engine.is_asleep  # the order that was given up is not followed later


async def test_arming_with_failing_counters_is_refused(engine: LiveEngine) -> None:
    await engine.server.wait()
    good, engine.server.counters = engine.server.counters, None  # type: ignore[assignment]
    connection = engine.connect()
    connection.order(arm())
    (line,) = await connection.rest()
    assert "TypeError" in line.reason
    await until(lambda: engine.is_asleep)
    engine.server.counters = good
    armed, _ = await engine.arm()
    await ended(armed)


def test_other_users_cannot_connect(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.path.stat().st_mode & 0o777 == 0o600
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    connection = engine.connect()
    assert connection._line() is None


def test_sockets_of_ended_processes_are_removed(tmp_path: Path) -> None:
    dead, served = tmp_path / "1.sock", tmp_path / "2.sock"
    with socket.socket(socket.AF_UNIX) as ended_server:
        ended_server.bind(str(dead))
    own = tmp_path / f"{os.getpid()}.sock"
    own.touch()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(served))
        other.listen()
        with live_engine(tmp_path, HEADER):
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["2.sock", own.name])


# The start, as the environment says.


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An engine in whose process nothing has started yet; ends what does."""
    made: list[live.LiveRecorder] = []
    found = engine_classes()

    class Recorder(live.LiveRecorder):
        def start(self) -> None:
            made.append(self)
            super().start()

    monkeypatch.setenv("SPECDECODE_LIVE_DIR", str(tmp_path))
    monkeypatch.setattr(hooks, "_first", threading.Lock())
    monkeypatch.setattr(hooks, "find_classes", lambda: found)
    monkeypatch.setattr(hooks, "header", lambda *_: HEADER)
    monkeypatch.setattr(hooks, "LiveRecorder", Recorder)
    yield SimpleNamespace(classes=found, made=made)
    for each in made:
        each.end()


def test_start_with_socket_folder_installs_hooks_once(started: Any, tmp_path: Path) -> None:
    hooks.start(None, [0])
    hooks.start(None, [0])  # of an engine that was rebuilt in this process
    assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}.sock"]
    assert hasattr(started.classes.output_processor.add_request, "__wrapped__")
    assert len(started.made) == 1


def test_unusable_socket_folder_leaves_engine_unhooked(
    started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECDECODE_LIVE_DIR", "/proc/nowhere")
    hooks.start(None, [0])
    assert not hasattr(started.classes.output_processor.add_request, "__wrapped__")
    assert "could not start" in caplog.text


def test_record_folder_takes_precedence_over_live_mode(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "segments"
    folder.mkdir()
    monkeypatch.setenv("SPECDECODE_RECORD_DIR", str(folder))
    hooks.start(None, [0])
    assert not started.made
    (folder / "close").touch()
    eventually(lambda: not hasattr(started.classes.output_processor.add_request, "__wrapped__"), "closed")


@pytest.mark.parametrize("what", ["shape", "states", "import"])
def test_unknown_engine_is_not_hooked_and_arming_is_refused(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    class NoStates:
        def __init__(self) -> None:
            self.requests: dict[str, int] = {}

    def fail() -> Any:
        raise ImportError("no AsyncMPClient")

    changed = {
        "shape": lambda: replace(started.classes, finish_reason=["stop"]),
        "states": lambda: replace(
            started.classes, output_processor=type("OutputProcessor", (NoStates, started.classes.output_processor), {})
        ),
        "import": fail,
    }
    reasons = {"shape": "FinishReason is", "states": "has no request_states", "import": "no AsyncMPClient"}
    monkeypatch.setattr(hooks, "find_classes", changed[what])
    hooks.start(None, [0])
    assert not hasattr(started.classes.output_processor.add_request, "__wrapped__")
    connection = Armed(tmp_path / f"{os.getpid()}.sock")
    connection.order(arm())
    line = connection._line()
    assert "not supported" in line.reason
    assert reasons[what] in line.reason


def test_live_settings_come_from_environment() -> None:
    assert LiveSettings.from_environment({}) is None
    assert LiveSettings.from_environment({"SPECDECODE_LIVE_DIR": ""}) is None
    found = LiveSettings.from_environment({"SPECDECODE_LIVE_DIR": "/s", "SPECDECODE_LIVE_TOKEN_IDS": "answers"})
    assert found == LiveSettings(Path("/s"), may_send_answers=True)


COUNTERS = """
import os
from prometheus_client import Counter
from specdecode_operator.capture.recorder.vllm_internals import read_counters

success = Counter("vllm:request_success", "Finished.", ["engine", "finished_reason"])
tokens = Counter("vllm:generation_tokens", "Tokens.", ["engine"])
other = Counter("vllm:generation_tokens_of_another_kind", "Tokens.")
other.inc(99)
for engine in "01":
    tokens.labels(engine).inc(5)
    for reason in ("stop", "length"):
        success.labels(engine, reason).inc()
child = os.fork()
if child == 0:
    tokens.labels("0").inc(1000)
    os._exit(0)
os.waitpid(child, 0)
print(sorted(read_counters().items()))
"""


@pytest.mark.parametrize("shares", [False, True])
def test_counters_are_those_of_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    """Also when several API servers share a folder of counters."""
    if shares:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", COUNTERS], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert done.stdout.strip() == "[('generation_tokens', 10.0), ('requests_finished', 4.0)]"


def test_known_engine_has_no_live_problems() -> None:
    assert live_problems(engine_classes()) == []
