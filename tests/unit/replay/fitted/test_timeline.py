"""What was in the steps of a recording, and how its requests ended."""

from array import array
from pathlib import Path

from specdecode_operator.replay.fitted.fit import fit
from specdecode_operator.replay.fitted.measured_steps import MeasuredSteps
from specdecode_operator.replay.fitted.timeline import timeline
from specdecode_operator.replay.recording.read import read_recording
from specdecode_operator.replay.recording.recording import RecordedRequest
from tests.support.traces import record, step, write_steps, write_trace


def request(arrival_ms: float, *, cached_tokens: int = 0, finish_reason: str = "length") -> RecordedRequest:
    return RecordedRequest(
        arrival_ms=arrival_ms,
        prompt_tokens=100,
        cached_tokens=cached_tokens,
        ttft_ms=30.0,
        chunk_tokens=array("I", [1, 3]),
        gaps_ms=array("d", [10.0]),
        finish_reason=finish_reason,
    )


def test_what_was_cached_is_not_computed_in_a_step() -> None:
    found = timeline([request(0.0, cached_tokens=60), request(1000.0)], [], 4)
    assert list(found.end_ms) == [30.0, 40.0, 1030.0, 1040.0]
    assert list(found.prefill_tokens) == [40, 0, 100, 0]


def test_only_what_max_tokens_ended_was_cut() -> None:
    found = timeline([request(0.0), request(1000.0, finish_reason="stop")], [], 4)
    assert list(found.chunk_is_cut) == [False, True, False, False]


def test_of_prompts_that_go_on_in_the_next_step_only_its_own_tokens_count(tmp_path: Path) -> None:
    """One prompt of 224 tokens, of which 160 were cached, ends in a step with 100 tokens of another."""
    ends = {"prompt_tokens": 224, "cached_tokens": 160, "output_tokens": 1, "itl_ms": None, "itl_tokens": None}
    write_trace(tmp_path / "trace.jsonl", [record(**ends)])
    line = step(30.0, running=2) | {"duration_ms": 20.0}
    details = dict.fromkeys(("num_generation_requests", "num_generation_tokens"), 0)
    line["scheduler"]["iteration_details"] = details | {
        "iteration_index": 1, "num_ctx_requests": 2, "num_ctx_tokens": 164, "elapsed_ms": 20.0
    }  # fmt: skip
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
