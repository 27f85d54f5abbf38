"""Measures of quality, each seen to fail."""

import copy
import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.files.accounting import gates
from specdecode_operator.capture.files.formats import EngineCounters, Gate, SegmentEntry, TraceMeta
from specdecode_operator.capture.files.merge import merge
from specdecode_operator.capture.files.totals import StepTotals, TraceTotals
from specdecode_operator.capture.files.validate import validate_capture, wants_steps
from tests.support.recordings import ZERO_S, Recording, Scenario, read_lines_of, write_lines


@pytest.fixture(scope="module")
def good_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Recording(Scenario()).write(tmp_path_factory.mktemp("capture"))
    meta = TraceMeta(model="m", schema=1, speculative={"method": "ngram", "num_speculative_tokens": 4})
    merge(folder, meta, ZERO_S)
    return folder


@pytest.fixture
def capture(good_capture: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_capture, tmp_path / "capture"))


def edit(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    lines = copy.deepcopy(read_lines_of(path))
    change(lines)
    write_lines(path, lines)


def gate(folder: Path, name: str, **given: Any) -> Gate:
    found = validate_capture(folder, given.pop("segments", []), **given)
    failed = {name for name, gate in found.gates.items() if not gate.passed}
    assert failed in (set(), {name})
    return found.gates[name]


class TestGates:
    def test_good_capture_passes_all(self, capture: Path) -> None:
        assert validate_capture(capture, []).passed

    def test_short_gaps(self, capture: Path) -> None:
        def split_a_chunk(lines: list[dict[str, Any]]) -> None:
            lines[1]["itl_ms"][1] = 0.003

        edit(capture / "trace.jsonl.part", split_a_chunk)
        found = gate(capture, "short_gap_share")
        assert not found.passed
        assert found.value is not None
        assert 0.002 < found.value < 0.02

    def test_gap_of_exactly_the_limit_is_no_short_one(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1]["itl_ms"].__setitem__(1, 0.2))
        assert gate(capture, "short_gap_share").value == 0

    def test_merged_chunks(self, capture: Path) -> None:
        """Two chunks in one, as a client sees them when the frontend is late."""

        def merge_chunks(lines: list[dict[str, Any]]) -> None:
            record = lines[1]
            tokens = record["itl_tokens"]
            at = max(range(len(tokens) - 1), key=lambda i: tokens[i] + tokens[i + 1])
            assert tokens[at] + tokens[at + 1] > 5
            record["itl_tokens"] = [*tokens[:at], tokens[at] + tokens[at + 1], *tokens[at + 2 :]]
            record["itl_ms"].pop(at)
            for values in record["itl_ctx"].values():
                values.pop(at)

        edit(capture / "trace.jsonl.part", merge_chunks)
        found = gate(capture, "largest_chunk")
        assert (found.passed, found.limit) == (False, 5)

    def test_negative_gap(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1]["itl_ms"].__setitem__(0, -1.0))
        assert gate(capture, "clock").value == 1

    def test_negative_ttft(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1].__setitem__("ttft_ms", -1.0))
        assert not gate(capture, "clock").passed

    def test_steps_out_of_order(self, capture: Path) -> None:
        edit(capture / "step-stats.jsonl.part", lambda lines: lines.reverse())
        assert not gate(capture, "clock").passed

    def test_positions_that_do_not_add_up(self, capture: Path) -> None:
        def lose_a_position(lines: list[dict[str, Any]]) -> None:
            stats = next(
                s for line in lines if (s := line["scheduler"]["spec_decoding_stats"]) and s["num_accepted_tokens"]
            )
            stats["num_accepted_tokens_per_pos"][0] -= 1

        edit(capture / "step-stats.jsonl.part", lose_a_position)
        assert gate(capture, "per_position").value == 1

    def test_positions_that_rise(self, capture: Path) -> None:
        def turn_round(lines: list[dict[str, Any]]) -> None:
            for line in lines:
                if stats := line["scheduler"]["spec_decoding_stats"]:
                    stats["num_accepted_tokens_per_pos"].reverse()

        edit(capture / "step-stats.jsonl.part", turn_round)
        assert not gate(capture, "per_position").passed

    def test_missing_step_statistics(self, capture: Path) -> None:
        """As when one of two API servers' files is lost: chunks then hold more than the counters know."""
        edit(capture / "step-stats.jsonl.part", lambda lines: lines.__delitem__(slice(0, None, 2)))
        found = gate(capture, "step_counters")
        assert not found.passed
        assert "chunks hold more than was accepted" in found.why

    def test_no_step_at_all_where_steps_were_asked_for(self, capture: Path) -> None:
        (capture / "step-stats.jsonl.part").write_bytes(b"")
        found = gate(capture, "missing_steps", steps_wanted=True)
        assert (found.passed, found.value) == (False, 12)
        (capture / "step-stats.jsonl.part").unlink()
        assert not gate(capture, "missing_steps", steps_wanted=True).passed

    def test_steps_are_asked_for_unless_they_are_declined(self) -> None:
        records: list[dict[str, Any]] = [{}, {"stepStats": True}, {"stepStats": False}]
        assert [wants_steps(record) for record in records] == [True, True, False]

    def test_steps_that_were_asked_for_and_are_there(self, capture: Path) -> None:
        assert gate(capture, "missing_steps", steps_wanted=True).passed
        assert "missing_steps" not in validate_capture(capture, []).gates, "of other people's files nobody knows"

    def test_without_step_statistics_nothing_is_held_against_them(self, capture: Path) -> None:
        """As with record.stepStats: false."""
        (capture / "step-stats.jsonl.part").write_bytes(b"")
        found = validate_capture(capture, [], EngineCounters(generation_tokens=1, drafts=5))
        assert found.passed
        assert not {"step_counters", "per_position", "engine_counters"} & set(found.gates)
        assert found.gates["largest_chunk"].limit == 5

    def test_too_many_accepted(self, capture: Path) -> None:
        def twice(lines: list[dict[str, Any]]) -> None:
            last = lines[-1]
            lines += [last | {"ts_ms": last["ts_ms"] + n} for n in range(1, 200)]
            accepting = next(
                s for line in lines if (s := line["scheduler"]["spec_decoding_stats"]) and s["num_accepted_tokens"]
            )
            for line in lines[-100:]:
                line["scheduler"] = last["scheduler"] | {"spec_decoding_stats": accepting}

        edit(capture / "step-stats.jsonl.part", twice)
        assert not gate(capture, "step_counters").passed

    def test_cut_drafts_are_explained(self, capture: Path) -> None:
        found = gate(capture, "step_counters")
        assert found.value is not None
        assert 0 < found.value <= 4 * 12
        assert "were cut from last chunks" in found.why

    def test_drafts_of_aborted_requests_are_not_judged(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1].__setitem__("ended_by", "stop_string"))
        found = gate(capture, "step_counters")
        assert (found.passed, found.limit) == (True, None)

    def test_lines_lost_by_the_recorder(self, capture: Path) -> None:
        lost = SegmentEntry(boot="a", client_index=0, closed="ordered", requests=1, steps=1, dropped=3)
        assert gate(capture, "dropped", segments=[lost]).value == 3

    @pytest.mark.parametrize("ended", [None, "exit"])
    def test_segment_without_its_end(self, capture: Path, ended: str | None) -> None:
        """What it lacks nobody counted."""
        broken = SegmentEntry(boot="a", client_index=0, closed=ended)
        found = gate(capture, "dropped", segments=[broken])
        assert (found.passed, found.value) == (False, 1)
        assert "1 of 1 segments were interrupted" in found.why

    def test_how_many_it_were_is_said(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1]["itl_ms"].__setitem__(0, -1.0))
        assert gate(capture, "clock").why.startswith("1 gaps, first tokens or steps that lie before")

    def test_request_without_record(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines.__delitem__(1))
        found = gate(capture, "accounting")
        assert found.value == 1
        assert "demo-closed-3: the client has completed with 6 chunks, but the engine has no record" in found.why

    def test_client_that_counted_otherwise(self, capture: Path) -> None:
        edit(capture / "client.jsonl.part", lambda lines: lines[5].__setitem__("completion_tokens", 19))
        assert gate(capture, "client_tokens").value == 1

    def test_engine_counters(self, capture: Path) -> None:
        speculation = validate_capture(capture, []).steps
        assert speculation is not None
        counters = {
            "generation_tokens": 240,
            "drafts": speculation.drafts,
            "draft_tokens": speculation.draft_tokens,
            "accepted_tokens": speculation.accepted,
        }
        assert gate(capture, "engine_counters", counters=EngineCounters(**counters)).passed
        counters["accepted_tokens"] += 1
        assert gate(capture, "engine_counters", counters=EngineCounters(**counters)).value == 1


class TestLimits:
    """Measures at their very limits, from totals alone."""

    @pytest.mark.parametrize(("short", "passed"), [(2, True), (3, False)])
    def test_share_of_short_gaps(self, short: int, passed: bool) -> None:
        found = gates(TraceTotals(gaps=1000, short_gaps=short), None, None, None)
        assert found["short_gap_share"].passed is passed

    @pytest.mark.parametrize(("cut", "passed"), [(-1, False), (0, True), (12, True), (13, False)])
    def test_drafts_cut_from_last_chunks(self, cut: int, passed: bool) -> None:
        """Three requests with K = 4."""
        steps = StepTotals(steps=99, accepted=100 + cut, num_spec_tokens=4)
        found = gates(TraceTotals(records=3, extra_tokens=100), steps, None, None)["step_counters"]
        assert (found.value, found.passed) == (cut, passed)

    @pytest.mark.parametrize(
        ("meta", "steps", "limit"),
        [
            (TraceMeta(speculative={"num_speculative_tokens": 4}), None, 5),
            (TraceMeta(speculative={"num_speculative_tokens": 4}), StepTotals(steps=1), 5),
            (TraceMeta(speculative={"num_speculative_tokens": 4}), StepTotals(steps=1, num_spec_tokens=6), 7),
            (TraceMeta(schema=1), StepTotals(steps=1), 1),
            (TraceMeta(schema=1), None, None),
            (TraceMeta(), StepTotals(steps=1), None),
        ],
        ids=["trace", "trace beside steps", "steps first", "no speculation", "no steps", "foreign trace"],
    )
    def test_who_tells_how_large_a_chunk_may_be(
        self, meta: TraceMeta, steps: StepTotals | None, limit: int | None
    ) -> None:
        at_limit, beyond = (
            gates(TraceTotals(meta=meta, largest_chunk=size), steps, None, None)["largest_chunk"]
            for size in (limit or 99, (limit or 99) + 1)
        )
        assert (at_limit.limit, at_limit.passed, beyond.passed) == (limit, True, limit is None)


class TestFolders:
    def test_compressed_files_are_found(self, capture: Path) -> None:
        for path in list(capture.glob("*.part")):
            (capture / f"{path.name.removesuffix('.part')}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        found = validate_capture(capture, [])
        assert found.problems == []
        assert {report.file for report in found.files} == {"trace.jsonl.gz", "step-stats.jsonl.gz", "client.jsonl.gz"}

    def test_without_client_there_is_no_accounting(self, capture: Path) -> None:
        (capture / "client.jsonl.part").unlink()
        assert "accounting" not in validate_capture(capture, []).gates

    def test_with_an_unreadable_file_there_is_none_either(self, capture: Path) -> None:
        (capture / "aborted.jsonl.part").write_bytes(b"{}\n")
        found = validate_capture(capture, [])
        assert [problem.file for problem in found.problems] == ["aborted.jsonl.part"]
        assert found.accounting is None

    def test_unreadable_client_is_a_problem_with_its_line(self, capture: Path) -> None:
        with (capture / "client.jsonl.part").open("ab") as stream:
            stream.write(b"{}\n")
        (problem,) = validate_capture(capture, []).problems
        assert (problem.line, problem.rule) == (15, "missing-field")
