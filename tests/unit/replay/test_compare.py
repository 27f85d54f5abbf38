"""Comparison of a replay with what was recorded."""

from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.trace_reader import Recording, read_recording
from specdecode_operator.replay.compare import LIMITS, Figure, compare
from specdecode_operator.replay.emulated.engine_model import from_rates
from tests.support.synthetic import Truth
from tests.support.traces import META, record, step, write_steps, write_trace


def recording(folder: Path, *records: dict[str, Any], **meta: Any) -> Recording:
    folder.mkdir()
    return read_recording(write_trace(folder / "trace.jsonl", records, {**META, **meta}))


def figures(first: Recording, second: Recording) -> dict[str, Figure]:
    return {figure.name: figure for figure in compare(first, second).figures}


def test_recording_compared_with_itself_passes(tmp_path: Path) -> None:
    made = Truth().make(tmp_path / "made", "poisson:8", 30).recording
    found = compare(made, made)
    assert found.passed
    assert {figure.difference for figure in found.figures} == {0.0}
    assert {
        "TTFT P50",
        "TPOT mean",
        "gap P99",
        "throughput",
        "bursts of 1",
        "acceptance",
        "acceptance at position 4",
    } <= {figure.name for figure in found.figures}


def test_figures_have_expected_values_and_differences(tmp_path: Path) -> None:
    one = recording(tmp_path / "one", record())
    other = recording(tmp_path / "other", record(ttft_ms=33.0, itl_ms=[10.0, 25.0], itl_tokens=[1, 4]))
    found = figures(one, other)
    assert (found["TTFT mean"].first, found["TTFT mean"].difference) == (30.0, 10.0)
    assert not found["TTFT mean"].passed
    assert found["TPOT mean"].first == 22.5 / 5
    assert found["latency mean"].second == 68.0
    assert (found["throughput"].first, found["throughput"].second) == (round(6 / 0.0525, 4), round(6 / 0.068, 4))
    assert {name: each.difference for name, each in found.items() if name.startswith("bursts")} == {
        "bursts of 1": 50.0,
        "bursts of 2": -50.0,
        "bursts of 3": -50.0,
        "bursts of 4": 50.0,
    }
    # The last chunk may be cut: of the others, 2 of 4 drafted tokens were accepted, and none.
    assert (found["acceptance"].first, found["acceptance"].second) == (50.0, 0.0)
    assert found["acceptance at position 2"].first == 100.0


def test_acceptance_uses_engine_counters_if_both_have_them(tmp_path: Path) -> None:
    truth = Truth(from_rates((0.8, 0.6), drafting=0.5))
    made, same = (truth.make(tmp_path / name, "closed:4", 40) for name in ("made", "same"))
    assert figures(made.recording, same.recording)["acceptance"].first == pytest.approx(70, abs=2)
    (same.folder / "step-stats.jsonl").unlink()
    found = compare(made.recording, same.recording)
    assert any("from the engine's counters in one" in note for note in found.notes)
    # Chunks do not tell a draft of which nothing was accepted from none.
    assert next(each for each in found.figures if each.name == "acceptance").second == pytest.approx(35, abs=3)


def test_acceptance_is_share_of_drafted_tokens_not_of_k(tmp_path: Path) -> None:
    one = recording(tmp_path / "one", record())
    # Two drafts of n-grams of 6 tokens together, where K is 4.
    steps = [step(40.0, running=1, drafts=1, drafted=4, per_position=[1, 1, 0, 0])]
    write_steps(
        tmp_path / "one" / "step-stats.jsonl",
        [*steps, step(52.5, running=1, drafts=1, drafted=2, per_position=[1, 0, 0, 0])],
    )
    found = figures(read_recording(tmp_path / "one"), one)
    assert found["acceptance"].first == 50.0
    assert found["acceptance at position 1"].first == 100.0


def test_figure_fails_beyond_limit_in_either_direction(tmp_path: Path) -> None:
    one, other = recording(tmp_path / "one", record()), recording(tmp_path / "other", record(ttft_ms=60.0))
    slower, faster = figures(one, other)["TTFT mean"], figures(other, one)["TTFT mean"]
    assert (slower.difference, faster.difference) == (100.0, -50.0)
    assert not slower.passed
    assert not faster.passed


def test_p99_is_judged_only_with_enough_requests_in_both(tmp_path: Path) -> None:
    few = recording(tmp_path / "few", record())
    many = recording(tmp_path / "many", *(record() for _ in range(1000)))
    assert figures(few, many)["TTFT P99"].limit is None
    assert figures(many, few)["TTFT P99"].limit is None
    assert figures(many, many)["TTFT P99"].limit == LIMITS["TTFT"]


def test_differences_between_recordings_are_noted(tmp_path: Path) -> None:
    one = recording(tmp_path / "one", record())
    other = recording(
        tmp_path / "other",
        record(arrival_ms=None),
        record(arrival_ms=None),
        model="large",
        speculative={"method": "ngram", "num_speculative_tokens": 2},
    )
    notes = " / ".join(compare(one, other).notes)
    for what in ("K is 4", "tiny", "large", "1 requests", "arrival_ms"):
        assert what in notes


def test_recordings_without_speculation_have_no_acceptance(tmp_path: Path) -> None:
    plain = record(itl_tokens=None, itl_ms=[1.0] * 5)
    one = recording(tmp_path / "one", plain, speculative=None)
    assert not any(name.startswith("acceptance") for name in figures(one, one))
