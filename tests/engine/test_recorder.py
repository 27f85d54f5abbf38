"""The recorder inside a real vLLM, beside an observer that is independent of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.engine_process import Engine
from tests.engine.recorder_checks import (
    SPECULATION,
    assert_as_observed,
    assert_whole,
    chunks_of,
    lines_of,
    requests_by_name,
    speculation,
    speculation_of,
)
from tests.engine.recorder_clients import Question, ask_all, prompt, repetitive
from tests.engine.recorder_server import Server, serving
from tests.support.waiting import eventually


def leave_in_the_middle(server: Server) -> int:
    """Ask, alone and for a long answer, and leave after the first chunk; return how often.

    On a busy machine an engine may have said all before its API server notices that nobody listens: then once more.
    """
    for number in range(20):
        leaver = Question(f"leaver-{number}", prompt(50, number), max_tokens=900, leaves_after=1)
        ask_all(server.url, [leaver], at_once=1)
        record = eventually(lambda name=leaver.name: requests_by_name(server).get(name), f"{leaver.name} is written")
        if record["finish_reason"] == "abort":
            return number + 1
    pytest.fail("the recorder has seen no request end that its client left")


def test_recorder_matches_observer_and_engine_counters(small_cache: Server) -> None:
    server = small_cache
    streams = [repetitive(f"stream-{number}", number, max_tokens=150) for number in range(24)]
    # It may say one word alone, so that it says the string that stops it whatever the batch does to its logits.
    stop = "3" * 40
    odd = [
        repetitive("stopped", max_tokens=400, stop=[stop], include_stop_str_in_output=True, allowed_token_ids=[20]),
        Question("too-long", prompt(2000)),
    ]
    server.wait_until_healthy()
    before = server.counters()
    answers = ask_all(server.url, streams + odd, at_once=8)
    # Two answers need a temperature, with which this engine verifies no draft rightly (EngineProfile,
    # loses_sampling_on_cpu). One token needs no draft.
    answers |= ask_all(server.url, [repetitive("twins", n=2, temperature=0.4, max_tokens=1)], at_once=1)
    leavers = leave_in_the_middle(server)
    eventually(lambda: len(lines_of(server, "request")) == len(streams) + 3 + leavers, "all requests are written")
    eventually(lambda: lines_of(server, "step")[-1]["scheduler"]["num_running_reqs"] == 0, "the engine is idle")
    after = server.counters()
    server.close_recording()
    later = ask_all(server.url, [repetitive("later")], at_once=1)

    records = requests_by_name(server)
    whole = {question.name: records[question.name] for question in streams}
    assert_whole(server)
    assert_as_observed(server, whole)
    assert any(max(record["chunk_tokens"]) > 1 for record in whole.values())
    for name, record in whole.items():
        assert (record["finish_reason"], record["ended_by"]) == ("length", "engine")
        assert sum(record["chunk_tokens"]) == 150
        assert len(record["chunk_s"]) >= answers[name].chunks
        assert record["arrival_monotonic_s"] <= record["queued_s"] <= record["scheduled_s"] < record["chunk_s"][0]
    steps = lines_of(server, "step")
    assert speculation(steps) == speculation_of(after) - speculation_of(before)
    assert any(step["scheduler"]["iteration_details"] for step in steps)
    assert (
        sum(record["preemptions"] for record in lines_of(server, "request")) == after["vllm:num_preemptions_total"] > 0
    )

    left = records[f"leaver-{leavers - 1}"]
    assert (left["finish_reason"], left["ended_by"]) == ("abort", "abort")
    assert chunks_of(left) == server.observed()[left["id"]][: len(left["chunk_s"])]

    stopped = records["stopped"]
    assert answers["stopped"].finish_reasons == ["stop"]
    assert (stopped["finish_reason"], stopped["ended_by"], stopped["stop_reason"]) == (
        "stop",
        "stop_string",
        stop,
    )
    assert chunks_of(stopped) == server.observed()[stopped["id"]][: len(stopped["chunk_s"])]

    twins = [line for line in lines_of(server, "request") if "twins" in line["external_id"]]
    assert sorted(line["id"][:2] for line in twins) == ["0_", "1_"]
    assert [line["temperature"] for line in twins] == [0.4, 0.4]

    assert answers["too-long"].status == 400
    assert "too-long" not in records
    assert later["later"].status == 200
    assert "later" not in records


@pytest.mark.long
@pytest.mark.parametrize("options", [("--api-server-count=2",), ("--data-parallel-size=2",)], ids=["servers", "data"])
def test_segments_of_several_api_servers_together_are_complete(
    engine: Engine, models: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    questions: list[Question] = []
    with serving(engine, models, tmp_path, *options) as server:
        before = server.counters()

        def ask_some_more() -> bool:
            more = [repetitive(f"stream-{number}", number) for number in range(len(questions), len(questions) + 60)]
            questions.extend(more)
            ask_all(server.url, more, at_once=12)
            eventually(lambda: len(lines_of(server, "request")) == len(questions), "all requests are written")
            return all(any(line["k"] == "request" for line in segment) for segment in server.segments())

        # Which server takes a connection is the kernel's choice.
        eventually(ask_some_more, "every server has had requests", 300)
        # The statistics of every step went to one of the servers.
        counted = speculation_of(server.counters()) - speculation_of(before)
        eventually(lambda: speculation(lines_of(server, "step")) == counted, "the steps add up to /metrics")
        assert counted[f"{SPECULATION}accepted_tokens_total"] > 0
        server.close_recording()

        assert_whole(server)
        headers = lines_of(server, "header")
        assert sorted((header["client_index"], header["client_count"]) for header in headers) == [(0, 2), (1, 2)]
        records = requests_by_name(server)
        assert records.keys() == {question.name for question in questions}
        assert_as_observed(server, records)
        engines = {index for header in headers for index in header["engines"]}
        assert {record["engine"] for record in records.values()} == engines


@contextmanager
def busy_machine() -> Iterator[None]:
    """Have more processes compute than there are cores."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@pytest.mark.long
def test_recorder_merges_no_chunks_under_cpu_pressure(engine: Engine, models: Path, tmp_path: Path) -> None:
    questions = [repetitive(f"stream-{number}", number, max_tokens=40) for number in range(600)]
    with serving(engine, models, tmp_path, "--max-num-seqs=256") as server:
        with busy_machine():
            answers = ask_all(server.url, questions, at_once=300)
        eventually(lambda: len(lines_of(server, "request")) == len(questions), "all requests are written")
        server.close_recording()

        records = requests_by_name(server)
        assert_whole(server)
        assert records.keys() == answers.keys()
        assert_as_observed(server, records)
        # What the recorder is for: the client's view had chunks run together.
        assert sum(map(len, (record["chunk_s"] for record in records.values()))) >= sum(
            answer.chunks for answer in answers.values()
        )


@pytest.mark.long
def test_draft_model_recording_is_complete_after_sigterm(engine: Engine, models: Path, tmp_path: Path) -> None:
    drafting = {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": 4}
    questions = [Question(f"stream-{number}", prompt(80, number), max_tokens=80) for number in range(16)]
    with serving(engine, models, tmp_path, speculation=drafting, SPECDECODE_RECORD_TOKEN_IDS="1") as server:
        ask_all(server.url, questions, at_once=8)
        eventually(lambda: len(lines_of(server, "request")) == len(questions), "all requests are written")
        records = requests_by_name(server)
        assert_as_observed(server, records)
        assert all(len(record["token_ids"]) == 80 for record in records.values())
    assert_whole(server, "exit")
    assert speculation(lines_of(server, "step"))[f"{SPECULATION}accepted_tokens_total"] > 0


@pytest.mark.long
def test_killed_engine_leaves_complete_lines(engine: Engine, models: Path, tmp_path: Path) -> None:
    questions = [repetitive(f"stream-{number}", number) for number in range(40)]
    with serving(engine, models, tmp_path) as server:
        ask_all(server.url, questions, at_once=8)
        eventually(lambda: len(lines_of(server, "request")) == len(questions), "all requests are written")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()

        records = requests_by_name(server)
        assert all(path.read_bytes().endswith(b"}\n") for path in server.segments_folder.glob("segment-*.jsonl"))
        assert lines_of(server, "closed") == []
        assert_as_observed(server, records)
