"""Validation of captures and its gates."""

import copy
import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.files.accounting import Accounting, Mismatch, gates
from specdecode_operator.capture.files.formats import CaptureError, EngineCounters, Gate, SegmentEntry, TraceMeta
from specdecode_operator.capture.files.merge import merge
from specdecode_operator.capture.files.totals import StepTotals, TraceTotals
from specdecode_operator.capture.files.validate import Validation, validate_capture, validate_file, wants_steps
from tests.support.recordings import ZERO_S, Recording, Scenario, read_lines_of, scheduler_stats, write_lines

META: dict[str, Any] = {"meta": {"model": "m", "gpu": "H200", "tp": 1, "max_num_seqs": 64, "block_size": 16, "x": [1]}}
RECORD: dict[str, Any] = {
    "prompt_tokens": 32,
    "cached_tokens": 16,
    "output_tokens": 6,
    "ttft_ms": 12.5,
    "itl_ms": [10.0, 11.5],
    "itl_tokens": [2, 3],
    "concurrency": 2,
    "arrival_ms": 3.25,
    "itl_ctx": {"num_running": [2, 1], "prefill_tokens": [0, 32]},
    "block_hashes": [18446744073709551615, 1],
    "output_token_ids": [1, 2, 3, 4, 5, 6],
    "finish_reason": "length",
    "unknown": {"to": ["every", "reader"]},
}
STEP: dict[str, Any] = {"ts_ms": 1.5, "scheduler": scheduler_stats(1, [2, 1, 0, 0], 2, 4)}


def edited(line: dict[str, Any], **changes: Any) -> bytes:
    """Return a line with fields changed; ``...`` removes one."""
    changed = {name: value for name, value in (line | changes).items() if value is not ...}
    return json.dumps(changed).encode()


def validated(folder: Path, name: str, *lines: bytes, end: bytes = b"\n") -> Validation:
    path = folder / name
    content = b"\n".join(lines) + end
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return validate_file(path)


def broken(found: Validation) -> list[tuple[int, str]]:
    return [(problem.line, problem.rule) for problem in found.problems]


GOOD_META, GOOD = edited(META), edited(RECORD)

REFUSED: dict[str, tuple[bytes, str]] = {
    "no JSON": (b'{"prompt_tokens": 1,}', "json"),
    "two values": (GOOD + b" " + GOOD, "json"),
    "NaN": (edited(RECORD, ttft_ms=float("nan")), "json"),
    "Infinity": (edited(RECORD, itl_ms=[1.0, float("inf")]), "json"),
    "too large a number": (GOOD.replace(b"12.5", b"1e400"), "type"),
    "no UTF-8": (GOOD.replace(b"every", b"\xff"), "utf-8"),
    "no object": (b"[1, 2]", "type"),
    "no prompt_tokens": (edited(RECORD, prompt_tokens=...), "missing-field"),
    "no output_tokens": (edited(RECORD, output_tokens=...), "missing-field"),
    "no ttft_ms": (edited(RECORD, ttft_ms=...), "missing-field"),
    "float for an integer": (edited(RECORD, prompt_tokens=10.0), "type"),
    "negative integer": (edited(RECORD, output_tokens=-1), "type"),
    "integer beyond 64 bits": (edited(RECORD, prompt_tokens=2**64), "type"),
    "text for a number": (edited(RECORD, ttft_ms="12"), "type"),
    "null for cached_tokens": (edited(RECORD, cached_tokens=None), "type"),
    "null for concurrency": (edited(RECORD, concurrency=None), "type"),
    "null in itl_ms": (edited(RECORD, itl_ms=[1.0, None]), "type"),
    "chunk beyond 32 bits": (edited(RECORD, itl_tokens=[2, 2**32]), "type"),
    "token id beyond 32 bits": (edited(RECORD, output_token_ids=[2**32] * 6), "type"),
    "hash beyond 64 bits": (edited(RECORD, block_hashes=[2**64]), "type"),
    "no gaps": (edited(RECORD, itl_ms=..., itl_tokens=..., itl_ctx=...), "no-gaps"),
    "num_running too short": (edited(RECORD, itl_ctx={"num_running": [2], "prefill_tokens": [0, 0]}), "context-length"),
    "prefill_tokens too long": (
        edited(RECORD, itl_ctx={"num_running": [2, 1], "prefill_tokens": [0, 0, 0]}),
        "context-length",
    ),
    "context without gaps": (
        edited(RECORD, output_tokens=1, itl_ms=..., itl_tokens=..., output_token_ids=...),
        "context-length",
    ),
    "context without a part": (edited(RECORD, itl_ctx={"num_running": [2, 1]}), "missing-field"),
    "too few chunks": (edited(RECORD, itl_tokens=[2]), "chunk-length"),
    "chunks without gaps": (edited(RECORD, itl_ms=[], itl_ctx=...), "chunk-length"),
    "empty chunk": (edited(RECORD, itl_tokens=[0, 3]), "chunk-zero"),
    "nothing left for the first chunk": (edited(RECORD, itl_tokens=[3, 3]), "chunk-sum"),
    "too few token ids": (edited(RECORD, output_token_ids=[1]), "token-ids"),
    "finish reason of OpenAI": (edited(RECORD, finish_reason="tool_calls"), "finish-reason"),
    "finish reason in capitals": (edited(RECORD, finish_reason="Stop"), "finish-reason"),
    "second meta line": (GOOD_META, "second-meta"),
    "field twice": (GOOD[:-1] + b', "ttft_ms": 1.0}', "repeated-field"),
    "field of the batch twice": (
        GOOD.replace(b'"num_running"', b'"num_running": [9], "num_running"'),
        "repeated-field",
    ),
    "field of the summary twice": (
        edited(RECORD, itl_summary={"mean_ms": 1.0, "count": 2}).replace(b'"count"', b'"count": 3, "count"'),
        "repeated-field",
    ),
}

REFUSED_STEPS: dict[str, tuple[bytes, str]] = {
    "no ts_ms": (edited(STEP, ts_ms=...), "missing-field"),
    "no scheduler": (edited(STEP, scheduler=...), "missing-field"),
    "null scheduler": (edited(STEP, scheduler=None), "type"),
    "no JSON": (b"{", "json"),
    **{
        f"no {name}": (
            edited(STEP, scheduler={k: v for k, v in STEP["scheduler"].items() if k != name}),
            "missing-field",
        )
        for name in (
            "num_running_reqs",
            "num_waiting_reqs",
            "step_counter",
            "current_wave",
            "kv_cache_usage",
            "prefix_cache_stats",
            "kv_cache_eviction_events",
        )
    },
    **{
        f"no {part}.{name}": (
            edited(
                STEP,
                scheduler=STEP["scheduler"] | {part: {k: v for k, v in STEP["scheduler"][part].items() if k != name}},
            ),
            "missing-field",
        )
        for part, names in {
            "prefix_cache_stats": (
                "reset",
                "requests",
                "queries",
                "hits",
                "preempted_requests",
                "preempted_queries",
                "preempted_hits",
            ),
            "spec_decoding_stats": (
                "num_spec_tokens",
                "num_drafts",
                "num_draft_tokens",
                "num_accepted_tokens",
                "num_accepted_tokens_per_pos",
            ),
        }.items()
        for name in names
    },
    "counter beyond 64 bits": (edited(STEP, scheduler=STEP["scheduler"] | {"step_counter": 2**64}), "type"),
    "counter of the cache beyond 64 bits": (edited(STEP).replace(b'"hits": 0', b'"hits": %d' % 2**64), "type"),
    "position beyond 64 bits": (edited(STEP).replace(b'_per_pos": [2', b'_per_pos": [%d' % 2**64), "type"),
    "text for a count": (edited(STEP, scheduler=STEP["scheduler"] | {"num_running_reqs": "1"}), "type"),
}


class TestReaderRules:
    @pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
    @pytest.mark.parametrize(("line", "rule"), REFUSED.values(), ids=REFUSED.keys())
    def test_invalid_record_breaks_its_rule(self, tmp_path: Path, name: str, line: bytes, rule: str) -> None:
        found = validated(tmp_path, name, GOOD_META, GOOD, b"", line, GOOD)
        assert (4, rule) in broken(found)
        assert {number for number, _ in broken(found)} == {4}
        assert found.trace is not None
        assert found.trace.records == 2

    @pytest.mark.parametrize("name", ["step-stats.jsonl", "step-stats.jsonl.gz"])
    @pytest.mark.parametrize(("line", "rule"), REFUSED_STEPS.values(), ids=REFUSED_STEPS.keys())
    def test_invalid_step_breaks_its_rule(self, tmp_path: Path, name: str, line: bytes, rule: str) -> None:
        assert broken(validated(tmp_path, name, edited(STEP), line)) == [(2, rule)]

    @pytest.mark.parametrize(
        "changes",
        [
            {"tp": -1},
            {"tp": 2**32},
            {"model": 5},
            {"max_num_seqs": 1.0},
            {"block_size": "16"},
            {"config_hash": []},
        ],
    )
    def test_invalid_meta_breaks_type_rule(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        line = edited({"meta": META["meta"] | changes})
        assert broken(validated(tmp_path, "trace.jsonl", line, GOOD)) == [(1, "type")]

    def test_null_meta_breaks_type_rule(self, tmp_path: Path) -> None:
        assert broken(validated(tmp_path, "trace.jsonl", b'{"meta": null}')) == [(1, "type")]

    def test_half_line_at_end_is_torn(self, tmp_path: Path) -> None:
        found = validated(tmp_path, "trace.jsonl", GOOD_META, GOOD, GOOD[:50], end=b"")
        assert broken(found) == [(3, "torn-line")]

    def test_last_line_without_line_feed_is_validated(self, tmp_path: Path) -> None:
        assert validated(tmp_path, "trace.jsonl", GOOD_META, GOOD, end=b"").problems == []
        found = validated(tmp_path, "trace.jsonl", GOOD_META, edited(RECORD, ttft_ms=...), end=b"")
        assert broken(found) == [(2, "missing-field")]

    def test_gzip_without_trailer_is_accepted_with_note(self, tmp_path: Path) -> None:
        whole = gzip.compress(b"\n".join([GOOD_META, GOOD, GOOD, b""]))
        (tmp_path / "trace.jsonl.gz").write_bytes(whole[:-8])
        found = validate_file(tmp_path / "trace.jsonl.gz")
        assert found.problems == []
        assert "without its trailer" in found.files[0].notes[0]

    def test_damaged_gzip_is_a_problem(self, tmp_path: Path) -> None:
        whole = bytearray(gzip.compress(b"\n".join([GOOD_META, GOOD, b""])))
        whole[-6] ^= 0xFF
        (tmp_path / "trace.jsonl.gz").write_bytes(bytes(whole))
        assert [rule for _, rule in broken(validate_file(tmp_path / "trace.jsonl.gz"))] == ["gzip"]

    @pytest.mark.parametrize(
        "line",
        [
            GOOD,
            edited(RECORD, itl_tokens=..., output_token_ids=...),
            edited(RECORD, itl_ms=..., itl_tokens=..., itl_ctx=..., itl_summary={"mean_ms": 5.0, "count": 5}),
            edited(RECORD, output_tokens=1, itl_ms=..., itl_tokens=..., itl_ctx=..., output_token_ids=[1]),
            edited(RECORD, itl_ms=[], itl_tokens=[], itl_ctx={"num_running": [], "prefill_tokens": []}),
            edited(RECORD, cached_tokens=..., concurrency=..., arrival_ms=None, block_hashes=None, mm_hashes=["a"]),
            edited(RECORD, ttft_ms=12, finish_reason=None),
            # Names that stand twice in the line, but in two objects, or in a value.
            edited(RECORD, unknown={"ttft_ms": 1, "prompt_tokens": "ttft_ms"}),
        ],
    )
    def test_valid_record_has_no_problems(self, tmp_path: Path, line: bytes) -> None:
        assert validated(tmp_path, "trace.jsonl", GOOD_META, line).problems == []

    @pytest.mark.parametrize(
        "lines",
        [
            [GOOD],
            [b'{"meta":{}}', GOOD],
            [b"", b"  ", GOOD_META, b"", GOOD],
            [edited({"meta": {"model": None, "anything": {"else": 1}}, "beside": 1}), GOOD],
            # The first line goes through a map, so the last of two equal fields counts there.
            [GOOD[:-1] + b', "ttft_ms": 1.0}'],
        ],
    )
    def test_valid_first_lines_have_no_problems(self, tmp_path: Path, lines: list[bytes]) -> None:
        assert validated(tmp_path, "trace.jsonl", *lines).problems == []

    def test_valid_step_has_no_problems(self, tmp_path: Path) -> None:
        none = STEP["scheduler"] | {"spec_decoding_stats": None, "future": 1}
        assert validated(tmp_path, "step-stats.jsonl", edited(STEP), b"", edited(STEP, scheduler=none)).problems == []

    def test_all_problems_are_counted_but_only_20_shown(self, tmp_path: Path) -> None:
        found = validated(tmp_path, "trace.jsonl", GOOD_META, *[b"{" for _ in range(50)])
        assert (found.files[0].broken, len(found.problems)) == (50, 20)

    @pytest.mark.parametrize(
        ("lines", "note"),
        [([GOOD_META], "has no records"), ([edited(RECORD, arrival_ms=...)], "no record has arrival_ms")],
    )
    def test_trace_unfit_for_replay_is_noted(self, tmp_path: Path, lines: list[bytes], note: str) -> None:
        found = validated(tmp_path, "trace.jsonl", *lines)
        assert found.passed
        assert note in found.files[0].notes[0]

    def test_replay_note_is_omitted_if_no_record_is_readable(self, tmp_path: Path) -> None:
        found = validated(tmp_path, "trace.jsonl", GOOD_META, edited(RECORD, output_tokens=-1))
        assert (found.passed, found.files[0].notes) == (False, [])


class TestKinds:
    """A file is known by what is in it, whatever its name is."""

    @pytest.mark.parametrize(
        ("line", "kind"),
        [
            (GOOD_META, "trace.jsonl"),
            (GOOD, "trace.jsonl"),
            (edited(STEP), "step-stats.jsonl"),
            (b'{"id": "a", "phase": "p", "index": 0, "outcome": "completed"}', "client.jsonl"),
            (b'{"request_id": "a", "arrival_ms": 1.0, "prompt_tokens": 1, "ended_by": "abort"}', "aborted.jsonl"),
        ],
    )
    def test_kind_is_detected_by_content(self, tmp_path: Path, line: bytes, kind: str) -> None:
        found = validated(tmp_path, "renamed", line)
        assert (found.files[0].kind, found.problems) == (kind, [])

    def test_kind_of_empty_file_is_detected_by_name(self, tmp_path: Path) -> None:
        assert validated(tmp_path, "my-trace.jsonl", end=b"").files[0].kind == "trace.jsonl"

    def test_file_of_unknown_kind_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CaptureError, match="is not a file of a capture"):
            validated(tmp_path, "notes.txt", b"hello")

    def test_unknown_client_outcome_is_a_problem(self, tmp_path: Path) -> None:
        line = b'{"id": "a", "phase": "p", "index": 0, "outcome": "lost"}'
        assert broken(validated(tmp_path, "client.jsonl", line)) == [(1, "type")]


# Measures of quality, each seen to fail.


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
    def test_good_capture_passes_all_gates(self, capture: Path) -> None:
        assert validate_capture(capture, []).passed

    def test_short_gap_fails_short_gap_share(self, capture: Path) -> None:
        def split_a_chunk(lines: list[dict[str, Any]]) -> None:
            lines[1]["itl_ms"][1] = 0.003

        edit(capture / "trace.jsonl.part", split_a_chunk)
        found = gate(capture, "short_gap_share")
        assert not found.passed
        assert found.value is not None
        assert 0.002 < found.value < 0.02

    def test_gap_at_limit_is_not_short(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1]["itl_ms"].__setitem__(1, 0.2))
        assert gate(capture, "short_gap_share").value == 0

    def test_merged_chunks_fail_largest_chunk(self, capture: Path) -> None:
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

    def test_negative_gap_fails_clock(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1]["itl_ms"].__setitem__(0, -1.0))
        assert gate(capture, "clock").value == 1

    def test_negative_ttft_fails_clock(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1].__setitem__("ttft_ms", -1.0))
        assert not gate(capture, "clock").passed

    def test_steps_out_of_order_fail_clock(self, capture: Path) -> None:
        edit(capture / "step-stats.jsonl.part", lambda lines: lines.reverse())
        assert not gate(capture, "clock").passed

    def test_positions_that_do_not_add_up_fail_per_position(self, capture: Path) -> None:
        def lose_a_position(lines: list[dict[str, Any]]) -> None:
            stats = next(
                s for line in lines if (s := line["scheduler"]["spec_decoding_stats"]) and s["num_accepted_tokens"]
            )
            stats["num_accepted_tokens_per_pos"][0] -= 1

        edit(capture / "step-stats.jsonl.part", lose_a_position)
        assert gate(capture, "per_position").value == 1

    def test_rising_positions_fail_per_position(self, capture: Path) -> None:
        def turn_round(lines: list[dict[str, Any]]) -> None:
            for line in lines:
                if stats := line["scheduler"]["spec_decoding_stats"]:
                    stats["num_accepted_tokens_per_pos"].reverse()

        edit(capture / "step-stats.jsonl.part", turn_round)
        assert not gate(capture, "per_position").passed

    def test_missing_step_statistics_fail_step_counters(self, capture: Path) -> None:
        """As when one of two API servers' files is lost: chunks then hold more than the counters know."""
        edit(capture / "step-stats.jsonl.part", lambda lines: lines.__delitem__(slice(0, None, 2)))
        found = gate(capture, "step_counters")
        assert not found.passed
        assert "chunks contain more tokens than were accepted" in found.why

    def test_absent_steps_fail_missing_steps(self, capture: Path) -> None:
        (capture / "step-stats.jsonl.part").write_bytes(b"")
        found = gate(capture, "missing_steps", steps_wanted=True)
        assert (found.passed, found.value) == (False, 12)
        (capture / "step-stats.jsonl.part").unlink()
        assert not gate(capture, "missing_steps", steps_wanted=True).passed

    def test_steps_are_wanted_unless_step_stats_is_false(self) -> None:
        records: list[dict[str, Any]] = [{}, {"stepStats": True}, {"stepStats": False}]
        assert [wants_steps(record) for record in records] == [True, True, False]

    def test_recorded_steps_pass_missing_steps(self, capture: Path) -> None:
        assert gate(capture, "missing_steps", steps_wanted=True).passed
        assert "missing_steps" not in validate_capture(capture, []).gates, "of other people's files nobody knows"

    def test_step_gates_are_omitted_without_step_statistics(self, capture: Path) -> None:
        """As with record.stepStats: false."""
        (capture / "step-stats.jsonl.part").write_bytes(b"")
        found = validate_capture(capture, [], EngineCounters(generation_tokens=1, drafts=5))
        assert found.passed
        assert not {"step_counters", "per_position", "engine_counters"} & set(found.gates)
        assert found.gates["largest_chunk"].limit == 5

    def test_too_many_accepted_drafts_fail_step_counters(self, capture: Path) -> None:
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

    def test_drafts_cut_from_last_chunks_are_explained(self, capture: Path) -> None:
        found = gate(capture, "step_counters")
        assert found.value is not None
        assert 0 < found.value <= 4 * 12
        assert "were cut from the last chunks" in found.why

    def test_step_counters_are_not_judged_after_stop_string(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1].__setitem__("ended_by", "stop_string"))
        found = gate(capture, "step_counters")
        assert (found.passed, found.limit) == (True, None)

    def test_dropped_counts_lines_lost_by_recorder(self, capture: Path) -> None:
        lost = SegmentEntry(boot="a", client_index=0, closed="ordered", requests=1, steps=1, dropped=3)
        assert gate(capture, "dropped", segments=[lost]).value == 3

    @pytest.mark.parametrize("ended", [None, "exit"])
    def test_interrupted_segment_fails_dropped(self, capture: Path, ended: str | None) -> None:
        """What it lacks nobody counted."""
        broken = SegmentEntry(boot="a", client_index=0, closed=ended)
        found = gate(capture, "dropped", segments=[broken])
        assert (found.passed, found.value) == (False, 1)
        assert "1 of 1 segments were interrupted" in found.why

    def test_failed_gate_states_its_count(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines[1]["itl_ms"].__setitem__(0, -1.0))
        assert gate(capture, "clock").why.startswith("1 gaps, first tokens or steps that precede")

    def test_request_without_record_fails_accounting(self, capture: Path) -> None:
        edit(capture / "trace.jsonl.part", lambda lines: lines.__delitem__(1))
        found = gate(capture, "accounting")
        assert found.value == 1
        assert "demo-closed-3: the client has completed with 6 chunks, but the engine has no record" in found.why

    def test_different_client_token_count_fails_client_tokens(self, capture: Path) -> None:
        edit(capture / "client.jsonl.part", lambda lines: lines[5].__setitem__("completion_tokens", 19))
        assert gate(capture, "client_tokens").value == 1

    def test_engine_counters_must_match_steps(self, capture: Path) -> None:
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
    def test_short_gap_share_passes_up_to_its_limit(self, short: int, passed: bool) -> None:
        found = gates(TraceTotals(gaps=1000, short_gaps=short), None, None, None)
        assert found["short_gap_share"].passed is passed

    @pytest.mark.parametrize(("cut", "passed"), [(-1, False), (0, True), (12, True), (13, False)])
    def test_step_counters_allow_k_cut_drafts_per_request(self, cut: int, passed: bool) -> None:
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
    def test_largest_chunk_limit_comes_from_steps_or_trace(
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

    def test_accounting_gate_is_omitted_without_client_file(self, capture: Path) -> None:
        (capture / "client.jsonl.part").unlink()
        assert "accounting" not in validate_capture(capture, []).gates

    def test_accounting_is_omitted_with_unreadable_file(self, capture: Path) -> None:
        (capture / "aborted.jsonl.part").write_bytes(b"{}\n")
        found = validate_capture(capture, [])
        assert [problem.file for problem in found.problems] == ["aborted.jsonl.part"]
        assert found.accounting is None

    def test_invalid_client_line_is_a_problem_with_its_number(self, capture: Path) -> None:
        with (capture / "client.jsonl.part").open("ab") as stream:
            stream.write(b"{}\n")
        (problem,) = validate_capture(capture, []).problems
        assert (problem.line, problem.rule) == (15, "missing-field")


# What the measures say: a person reads it to find out what happened to a capture.


@pytest.mark.parametrize(
    ("mismatches", "told"),
    [(0, ""), (2, ": a: lost; b: twice"), (5, ": a: lost; b: twice; and 3 more")],
    ids=["none", "all are named", "more than are named"],
)
def test_accounting_names_some_mismatches_and_counts_the_rest(mismatches: int, told: str) -> None:
    shown = [Mismatch("a", "lost"), Mismatch("b", "twice")] if mismatches else []
    accounting = Accounting(sent=3, engine=Counter(completed=3), mismatches=mismatches, shown=shown)
    found = gates(None, None, accounting, None)["accounting"]
    assert found == Gate(value=mismatches, limit=0, passed=not mismatches, why=f"{accounting.equation}{told}")


@pytest.mark.parametrize(
    ("accepted", "told"),
    [(400, "40 (10.0 %) were cut from the last chunks"), (0, "0 were cut from the last chunks")],
    ids=["some accepted", "none accepted"],
)
def test_cut_drafts_are_stated_with_their_share(accepted: int, told: str) -> None:
    kept = accepted * 9 // 10
    trace, steps = TraceTotals(records=20, extra_tokens=kept), StepTotals(steps=1, accepted=accepted, num_spec_tokens=4)
    why = (
        f"{accepted} drafts accepted by the engine's counters, {kept} in the chunks: {told};"
        " each request can lose K at its end"
    )
    assert gates(trace, steps, None, None)["step_counters"] == Gate(
        value=accepted - kept, limit=4 * 20, passed=True, why=why
    )


def test_clock_gate_counts_backward_times_of_both_files() -> None:
    found = gates(TraceTotals(backward=2), StepTotals(steps=1, backward=1), None, None)["clock"]
    why = "3 gaps, first tokens or steps that precede their predecessor"
    assert found == Gate(value=3, limit=0, passed=False, why=why)
