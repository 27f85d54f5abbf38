"""What was in the steps of a recording, and how its requests ended."""

import json
import shutil
from array import array
from pathlib import Path
from typing import Any

from specdecode_operator.capture.trace_reader import RecordedRequest, read_recording
from specdecode_operator.replay.fit import fit, timeline
from specdecode_operator.replay.fit_step_time import MeasuredSteps
from tests.support.traces import META, record, step, write_steps, write_trace

CAPTURES = Path(__file__).parents[3] / "data/captures"


def request(
    arrival_ms: float, *, cached_tokens: int = 0, finish_reason: str = "length", scheduled_ms: float | None = None
) -> RecordedRequest:
    return RecordedRequest(
        arrival_ms=arrival_ms,
        prompt_tokens=100,
        cached_tokens=cached_tokens,
        ttft_ms=30.0,
        chunk_tokens=array("I", [1, 3]),
        gaps_ms=array("d", [10.0]),
        finish_reason=finish_reason,
        scheduled_ms=scheduled_ms,
    )


def line_of(ts_ms: float, index: int, *, running: int = 1, **counts: int) -> dict[str, Any]:
    """Return a line of step statistics of 8 ms, with what vLLM says was in the step."""
    line = step(ts_ms, running=running) | {"duration_ms": 8.0}
    names = ("num_ctx_requests", "num_ctx_tokens", "num_generation_requests", "num_generation_tokens")
    line["scheduler"]["iteration_details"] = {**dict.fromkeys(names, 0), "iteration_index": index, **counts}
    return line


def test_what_was_cached_is_not_computed_in_a_step() -> None:
    found = timeline([request(0.0, cached_tokens=60), request(1000.0)], [])
    assert list(found.end_ms) == [30.0, 40.0, 1030.0, 1040.0]
    assert list(found.prefill_tokens) == [40, 0, 100, 0]


def test_only_what_max_tokens_ended_was_cut() -> None:
    found = timeline([request(0.0), request(1000.0, finish_reason="stop")], [])
    assert list(found.chunk_is_cut) == [False, True, False, False]


def test_of_prompts_that_go_on_in_the_next_step_only_its_own_tokens_count(tmp_path: Path) -> None:
    """One prompt of 224 tokens, of which 160 were cached, ends in a step with 100 tokens of another."""
    ends = {"prompt_tokens": 224, "cached_tokens": 160, "output_tokens": 1, "itl_ms": None, "itl_tokens": None}
    write_trace(tmp_path / "trace.jsonl", [record(**ends)])
    line = line_of(30.0, 1, running=2, num_ctx_requests=2, num_ctx_tokens=164)
    write_steps(tmp_path / "step-stats.jsonl", [line])
    found = MeasuredSteps.of([read_recording(tmp_path)])
    assert (list(found.prefill_tokens), list(found.context_tokens)) == ([164], [224 + 100])
    assert list(found.prefill_pairs) == [64 * 224 + 100 * 100]


def test_who_went_away_says_nothing_of_how_often_a_model_stops(tmp_path: Path) -> None:
    reasons = ["stop", "length", "abort", "abort"] * 5
    records = [record(arrival_ms=100.0 * place, finish_reason=reason) for place, reason in enumerate(reasons)]
    donors = fit([read_recording(write_trace(tmp_path / "trace.jsonl", records))]).donors
    assert donors is not None
    assert (donors.stops.share, donors.stops.output_tokens) == (0.5, [6] * 5)


def test_the_first_burst_after_a_prefill_comes_after_none(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(finish_reason="stop")])
    donors = fit([read_recording(trace)]).donors
    assert donors is not None
    assert set(zip(donors.bursts.before, donors.bursts.tokens, strict=True)) == {(0, 3), (3, 2)}


def test_who_waited_behind_others_says_nothing_of_the_way_to_the_scheduler() -> None:
    found = timeline([request(0.0, scheduled_ms=5.0), request(20.0, scheduled_ms=35.0)], [])
    assert list(found.lead_ms) == [5.0]


def test_a_period_is_between_steps_that_follow_each_other(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [record(arrival_ms=0.0)])
    decode = {"num_generation_requests": 1, "num_generation_tokens": 5}
    moments = ((100.0, 1), (110.0, 2), (200.0, 4))
    write_steps(tmp_path / "step-stats.jsonl", [line_of(ts_ms, index, **decode) for ts_ms, index in moments])
    found = MeasuredSteps.of([read_recording(tmp_path)])
    # What is between two steps, 2 ms, is the host's; where a step is missing it is taken for the same.
    assert list(found.ms) == [10.0, 10.0, 10.0]


def test_the_size_of_a_cache_is_told_by_what_requests_and_their_drafts_take_of_it(tmp_path: Path) -> None:
    steps = [line_of(30.0 + 10 * index, index) for index in range(21)]
    for each in steps:
        each["scheduler"]["kv_cache_usage"] = 0.5
        del each["scheduler"]["iteration_details"]
    write_steps(tmp_path / "step-stats.jsonl", steps)
    drafting = {"block_size": 16, "speculative": {"method": "ngram", "num_speculative_tokens": 16}}
    one = record(prompt_tokens=1600, output_tokens=21, itl_ms=[10.0] * 20, itl_tokens=None)
    write_trace(tmp_path / "trace.jsonl", [one], {**META, **drafting})
    # Half of it are 1610 tokens on average, 16 more for a draft, and half a block that is not full.
    assert fit([read_recording(tmp_path)]).origin.limits.num_gpu_blocks == round(2 * (1626 / 16 + 0.5))


def test_limits_are_those_of_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    shutil.copytree(CAPTURES / "ngram", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["engine_counters"]["num_gpu_blocks"] = 777
    (folder / "manifest.json").write_text(json.dumps(manifest))
    limits = fit([read_recording(folder)]).origin.limits
    assert (limits.num_gpu_blocks, limits.async_scheduling, limits.enable_prefix_caching) == (777, False, True)
    assert (limits.max_num_seqs, limits.max_model_len) == (32, 2048)
