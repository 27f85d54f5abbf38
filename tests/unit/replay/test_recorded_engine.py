"""Engines that serve recorded steps."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from specdecode_operator.capture.trace_reader import Recording, read_recording, read_steps
from specdecode_operator.replay.clocks import ScaledClock, VirtualClock
from specdecode_operator.replay.drafting import AcceptanceSchedule, draw_accepted, recorded_drafting
from specdecode_operator.replay.engine import Burst, Incoming, Load, UnmatchedRequestError
from specdecode_operator.replay.recorded_engine import (
    Matching,
    StepsEngine,
    StepsSettings,
    matcher,
    repeating,
)
from tests.support.traces import META, Line, record, step, write_steps, write_trace


class Played:
    """An engine in virtual time, and what it gave: the moment, and the burst."""

    def __init__(self, recording: Recording, matching: Matching = Matching.ARRIVAL, **settings: Any) -> None:
        self.clock = VirtualClock()
        match = matcher(matching, recording.requests)
        self.engine = StepsEngine(recording, self.clock, match, StepsSettings(**settings))

    def submit(self, **fields: Any) -> list[tuple[float, Burst]]:
        usual: dict[str, Any] = {"request_id": "x", "prompt_tokens": 3, "max_tokens": 1000}
        found: list[tuple[float, Burst]] = []
        self.ticket = self.engine.submit(
            Incoming(**usual | fields), lambda burst: found.append((self.clock.now_ms(), burst))
        )
        return found


@pytest.fixture
def recorded(tmp_path: Path) -> Any:
    def read(*records: Line, meta: Line | None = META) -> Recording:
        return read_recording(write_trace(tmp_path / "trace.jsonl", records, meta))

    return read


def tokens(found: list[tuple[float, Burst]]) -> list[int]:
    return [burst.tokens for _, burst in found]


def test_scaled_clock_slows_replay(recorded: Any) -> None:
    clock = VirtualClock()
    recording = recorded(record())
    match = matcher(Matching.ARRIVAL, recording.requests)
    engine = StepsEngine(recording, ScaledClock(clock, 2), match, StepsSettings())
    found: list[float] = []
    engine.submit(Incoming(request_id="x", prompt_tokens=1, max_tokens=99), lambda _: found.append(clock.now_ms()))
    clock.run()
    assert found == [60, 80, 105]


def test_request_gets_recorded_bursts_at_recorded_gaps(recorded: Any) -> None:
    played = Played(recorded(record(cached_tokens=16)))
    played.clock.run(until_ms=1000)
    found = played.submit(prompt_tokens=20)
    played.clock.run()
    assert [(when_ms, burst.tokens) for when_ms, burst in found] == [(1030, 1), (1040, 3), (1052.5, 2)]
    assert [burst.accepted for _, burst in found] == [0, 2, 1]
    assert [burst.drafted for _, burst in found] == [0, 4, 4]
    assert [burst.cached_tokens for _, burst in found] == [16, 0, 0]
    assert [burst.finish_reason for _, burst in found] == [None, None, "length"]


def test_max_tokens_cuts_last_burst(recorded: Any) -> None:
    played = Played(recorded(record(finish_reason="stop")))
    found = played.submit(max_tokens=3)
    played.clock.run()
    assert tokens(found) == [1, 2]
    last = found[-1][1]
    assert (last.finish_reason, last.accepted, last.drafted) == ("length", 2, 4), "vLLM counts what it accepted"


@pytest.mark.parametrize("bursts", [[1, 1, 1], [32, 32, 16]], ids=["tokens", "blocks of a diffusion model"])
def test_an_engine_without_speculation_drafts_nothing(recorded: Any, bursts: list[int]) -> None:
    recording = recorded(record(output_tokens=sum(bursts), itl_tokens=bursts[1:]), meta={"model": "tiny"})
    played = Played(recording)
    found = played.submit()
    played.clock.run()
    assert recording.num_speculative_tokens == 0
    assert [(burst.tokens, burst.drafted, burst.accepted) for _, burst in found] == [(each, 0, 0) for each in bursts]


def test_recorded_token_ids_come_with_their_bursts(recorded: Any) -> None:
    played = Played(recorded(record(output_token_ids=[7, 8, 9, 10, 11, 12])))
    found = played.submit(max_tokens=5)
    played.clock.run()
    assert [list(burst.token_ids) for _, burst in found] == [[7], [8, 9, 10], [11]]


def test_gaps_of_zero_and_of_an_hour_are_played(recorded: Any) -> None:
    played = Played(recorded(record(itl_ms=[0.0, 3_600_000.0])))
    found = played.submit()
    played.clock.run()
    assert [when_ms for when_ms, _ in found] == [30, 30, 3_600_030]


def test_each_record_is_used_once_and_then_refused(recorded: Any) -> None:
    played = Played(recorded(record()))
    played.submit()
    with pytest.raises(UnmatchedRequestError):
        played.submit()


def test_records_repeat_with_repeating_matcher(recorded: Any) -> None:
    recording = recorded(record(), record(arrival_ms=5.0, output_tokens=1, itl_ms=None, itl_tokens=None))
    match = repeating(matcher(Matching.ARRIVAL, recording.requests), recording.requests)
    incoming = Incoming(request_id="x", prompt_tokens=1, max_tokens=9)
    assert [match(incoming) for _ in range(5)] == [0, 1, 0, 1, 0]


def test_fallback_engine_serves_requests_without_record(recorded: Any) -> None:
    other = Played(recorded(record(ttft_ms=99.0)))
    played = Played(recorded(record()), otherwise=other.engine)
    played.submit()
    found = played.submit()
    other.clock.run()
    assert found
    assert found[0][1].tokens == 1


def test_records_are_matched_by_request_id_or_its_index(recorded: Any) -> None:
    recording = recorded(
        record(arrival_ms=0.0, request_id="load-main-7"),
        record(arrival_ms=1.0),
        record(arrival_ms=2.0, request_id="load-main-7"),
        record(arrival_ms=3.0),
    )
    match = matcher(Matching.REQUEST_ID, recording.requests)

    def place(request_id: str) -> int | None:
        return match(Incoming(request_id=request_id, prompt_tokens=1, max_tokens=1))

    assert [place("load-main-7") for _ in range(3)] == [0, 2, None]
    assert [place("replay-3"), place("replay-3"), place("replay-1")] == [3, None, 1]
    assert [place("replay-4"), place("nothing"), place("replay-0")] == [None, None, None]


def test_records_are_matched_by_longest_common_prefix(recorded: Any) -> None:
    recording = recorded(
        record(arrival_ms=0.0, block_hashes=[1, 2]),
        record(arrival_ms=1.0, block_hashes=[1, 2, 3]),
        record(arrival_ms=2.0, block_hashes=[1]),
    )
    match = matcher(Matching.PREFIX, recording.requests)

    def place(*blocks: int) -> int | None:
        return match(Incoming(request_id="x", prompt_tokens=1, max_tokens=1, block_hashes=blocks))

    assert [place(1, 2, 3, 4), place(1, 2, 3, 4), place(1, 9), place(1, 9), place(8)] == [1, 0, 2, None, None]


def test_load_counts_waiting_and_running_until_cancelled(recorded: Any) -> None:
    played = Played(recorded(record(scheduled_ms=20.0, cached_tokens=5, preemptions=2)), kv_cache_tokens=100)
    found = played.submit(prompt_tokens=20)
    assert (played.engine.load(), played.ticket.waited_ms()) == (Load(waiting=1), None)
    played.clock.run(until_ms=45)
    assert played.ticket.waited_ms() == 20.0
    load = played.engine.load()
    assert (load.running, load.waiting, load.kv_cache_usage) == (1, 0, pytest.approx(0.24))
    assert (load.preemptions, load.prefix_cache_queries, load.prefix_cache_hits) == (2, 20, 5)
    played.ticket.cancel()
    played.ticket.cancel()
    played.clock.run()
    assert tokens(found) == [1, 3]
    assert (played.engine.load().running, played.engine.load().kv_cache_usage) == (0, 0)


def test_acceptance_follows_schedule_with_recorded_token_count(recorded: Any) -> None:
    long = record(output_tokens=4001, itl_ms=[10.0] * 800, itl_tokens=[5] * 800)
    schedule = AcceptanceSchedule.parse("0:0.8,5:0.25")
    random = Random(1)
    played = Played(recorded(long), accepted=lambda now_ms: draw_accepted(schedule.at(now_ms), 4, random))
    found = played.submit(max_tokens=9999)
    played.clock.run()
    assert sum(tokens(found)) == 4001
    first = found[0][1]
    assert (first.tokens, first.drafted) == (1, 0), "a first token is no step's"

    def share(begin_ms: float, end_ms: float) -> float:
        drafts = [burst for when_ms, burst in found if burst.drafted and begin_ms <= when_ms < end_ms]
        return sum(burst.accepted for burst in drafts) / sum(burst.drafted for burst in drafts)

    assert share(0, 5000) == pytest.approx(0.8, abs=0.05)
    assert share(5000, 1e9) == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("text", ["x", "1.5", "-0.1", "5:0.5", "0:0.5,0:0.6", "0:0.5,3", "nan", "0:0.1,inf:0.2", ""])
def test_invalid_acceptance_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"share|seconds"):
        AcceptanceSchedule.parse(text)


def test_drafted_tokens_come_from_step_statistics(tmp_path: Path) -> None:
    first = record(arrival_ms=0.0)  # bursts at 30, 40 and 52.5 ms: 1, 3 and 2 tokens
    second = record(arrival_ms=10.0, ttft_ms=20.0, itl_ms=[10.0, 12.5], itl_tokens=[1, 4])
    write_trace(tmp_path / "trace.jsonl", [first, second])
    write_steps(
        tmp_path / "step-stats.jsonl",
        [
            step(30.0, running=2),
            # One of the two had a draft, of three tokens.
            step(40.0, running=2, drafts=1, drafted=3, per_position=[1, 1, 0, 0]),
            # Both had one of four; one token more was accepted than came.
            step(52.5, running=0, drafts=2, drafted=8, per_position=[2, 1, 1, 1]),
        ],
    )
    recording = read_recording(tmp_path)
    assert recording.steps is not None
    found = recorded_drafting(recording, read_steps(recording.steps))
    assert found is not None
    assert [list(each.drafted) for each in found] == [[0, 3, 4], [0, 0, 4]]
    assert [list(each.accepted) for each in found] == [[0, 2, 1], [0, 0, 4]]


def test_step_statistics_of_another_run_are_not_used(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [record(arrival_ms=500.0)])
    write_steps(tmp_path / "step-stats.jsonl", [step(30.0, running=1)])
    recording = read_recording(tmp_path)
    assert recording.steps is not None
    assert recorded_drafting(recording, read_steps(recording.steps)) is None
