"""Reader of captures."""

import gzip
import json
from pathlib import Path

import pytest

from specdecode_operator.capture import trace_reader
from specdecode_operator.capture.files import formats
from specdecode_operator.capture.trace_reader import RecordingError, concatenated, read_recording, read_steps
from tests.support.traces import META, record, write_trace

STEP = {
    "ts_ms": 5.0,
    "duration_ms": 4.0,
    "scheduler": {
        "num_running_reqs": 1,
        "num_waiting_reqs": 0,
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": 0.1,
        "prefix_cache_stats": dict.fromkeys(
            (
                "requests", "queries", "hits",
                "preempted_requests", "preempted_queries", "preempted_hits",
            ), 0,
        ) | {"reset": False},
        "kv_cache_eviction_events": [],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_folder_is_read_in_order_of_arrival(tmp_path: Path, name: str) -> None:
    late, early = record(arrival_ms=50.0, request_id="b"), record(arrival_ms=1.0, request_id="a")
    write_trace(tmp_path / name, [late, record(arrival_ms=None, request_id="c"), early])
    (tmp_path / "step-stats.jsonl").write_text(json.dumps(STEP) + "\n")
    recording = read_recording(tmp_path)
    assert [each.request_id for each in recording.requests] == ["a", "b", "c"]
    assert list(recording.requests[0].chunk_tokens) == [1, 3, 2]
    assert list(recording.requests[0].gaps_ms) == [10.0, 12.5]
    assert recording.requests[0].end_ms == 1.0 + 30 + 10 + 12.5
    assert recording.meta.max_num_seqs == 8
    assert recording.steps is not None
    assert [step.duration_ms for step in read_steps(recording.steps)] == [4.0]


def test_k_comes_from_header_or_largest_chunk(tmp_path: Path) -> None:
    told = read_recording(write_trace(tmp_path / "told.jsonl", [record()]))
    assert told.num_speculative_tokens == 4
    untold = read_recording(write_trace(tmp_path / "untold.jsonl", [record()], meta=None))
    assert untold.num_speculative_tokens == 2
    plain = record(output_tokens=3, itl_tokens=None)
    assert read_recording(write_trace(tmp_path / "plain.jsonl", [plain], meta=None)).num_speculative_tokens == 0


def test_gap_summary_replaces_missing_gaps(tmp_path: Path) -> None:
    summary = record(itl_ms=None, itl_tokens=None, itl_summary={"mean_ms": 7.0, "count": 5})
    only = read_recording(write_trace(tmp_path / "t.jsonl", [summary])).requests[0]
    assert list(only.gaps_ms) == [7.0] * 5
    assert list(only.chunk_tokens) == [1] * 6


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"itl_ms": [10.0, -1.0]}, "-1 ms"),
        ({"itl_ms": [10.0, 4e6]}, "4e+06 ms"),
        ({"ttft_ms": -0.5}, "-0.5 ms"),
        ({"itl_tokens": [3, 9]}, "itl_tokens sums to 12"),
        ({"output_tokens": 2, "itl_tokens": None}, "output_tokens is 2, for 2 gaps"),
        ({"prompt_tokens": "many"}, "prompt_tokens"),
    ],
)
def test_invalid_line_is_an_error_or_skipped_and_counted(tmp_path: Path, bad: dict[str, object], said: str) -> None:
    path = write_trace(tmp_path / "t.jsonl", [record(), record(**bad), record()])
    with pytest.raises(RecordingError, match=r"t\.jsonl: line 3: ") as caught:
        read_recording(path)
    assert said in str(caught.value)
    recording = read_recording(path, skip_bad_lines=True)
    assert (len(recording.requests), recording.skipped_lines) == (2, 1)


def test_recording_without_requests_is_refused(tmp_path: Path) -> None:
    for path in (write_trace(tmp_path / "t.jsonl", []), tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(RecordingError):
            read_recording(path)


def test_recordings_of_one_engine_are_concatenated_and_others_refused(tmp_path: Path) -> None:
    one = read_recording(write_trace(tmp_path / "a.jsonl", [record()]))
    two = read_recording(write_trace(tmp_path / "b.jsonl", [record(arrival_ms=5.0, scheduled_ms=7.0, engine=1)]))
    both = concatenated([one, two]).requests
    assert [each.arrival_ms for each in both] == [0.0, 52.5 + 1000 + 5]
    assert [each.scheduled_ms for each in both] == [None, 52.5 + 1000 + 7]
    assert [each.engine for each in both] == [0, 1]
    other = read_recording(write_trace(tmp_path / "c.jsonl", [record()], meta={**META, "model": "large"}))
    with pytest.raises(RecordingError, match=r"c\.jsonl: model is large, but tiny in .*a\.jsonl"):
        concatenated([one, other])


@pytest.mark.parametrize(("count", "output_tokens"), [(10**10, 5), (2**27 - 2, 2**27)])
def test_oversized_gap_summary_is_refused(tmp_path: Path, count: int, output_tokens: int) -> None:
    summary = record(
        itl_ms=None, itl_tokens=None, output_tokens=output_tokens, itl_summary={"mean_ms": 7.0, "count": count}
    )
    with pytest.raises(RecordingError, match=r"line 2: itl_summary\.count"):
        read_recording(write_trace(tmp_path / "t.jsonl", [summary]))


def test_overlong_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LONGEST_LINE_BYTES", 2**20)
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(bytes(2**20 + 1)))
    with pytest.raises(RecordingError, match=r"line 1: has more than 1,048,576 bytes"):
        read_recording(tmp_path)


def test_recording_beyond_memory_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_reader, "MOST_HELD_BYTES", 10 * 2**20)
    summary = record(
        output_tokens=2**19, itl_ms=None, itl_tokens=None, itl_summary={"mean_ms": 7.0, "count": 2**19 - 1}
    )
    path = write_trace(tmp_path / "t.jsonl.gz", [summary] * 9)
    with pytest.raises(RecordingError, match=r"more than 10 MiB after 2 requests: split it") as caught:
        read_recording(path, skip_bad_lines=True)
    assert "\n" not in str(caught.value)
    small = write_trace(tmp_path / "small.jsonl", [record(request_id="a" * 2**20)] * 9)
    assert len(read_recording(small).requests) == 9
    with pytest.raises(RecordingError, match="after 10 requests"):
        read_recording(write_trace(small, [record(request_id="a" * 2**20)] * 11))


def test_too_many_steps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_reader, "MOST_STEPS", 3)
    path = tmp_path / "step-stats.jsonl"
    path.write_text(3 * (json.dumps(STEP) + "\n"))
    assert len(list(read_steps(path))) == 3
    path.write_text(4 * (json.dumps(STEP) + "\n"))
    with pytest.raises(RecordingError, match="more than 3 steps"):
        list(read_steps(path, lambda _: None))
