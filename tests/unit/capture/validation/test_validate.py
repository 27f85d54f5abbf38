"""The reader's rules, each seen to fire; measures of quality, each seen to fail."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.capture.files.validate import Validation, validate_file
from tests.support.recordings import scheduler_stats

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
    def test_bad_record(self, tmp_path: Path, name: str, line: bytes, rule: str) -> None:
        found = validated(tmp_path, name, GOOD_META, GOOD, b"", line, GOOD)
        assert (4, rule) in broken(found)
        assert {number for number, _ in broken(found)} == {4}
        assert found.trace is not None
        assert found.trace.records == 2

    @pytest.mark.parametrize("name", ["step-stats.jsonl", "step-stats.jsonl.gz"])
    @pytest.mark.parametrize(("line", "rule"), REFUSED_STEPS.values(), ids=REFUSED_STEPS.keys())
    def test_bad_step(self, tmp_path: Path, name: str, line: bytes, rule: str) -> None:
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
    def test_bad_meta(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        line = edited({"meta": META["meta"] | changes})
        assert broken(validated(tmp_path, "trace.jsonl", line, GOOD)) == [(1, "type")]

    def test_meta_that_is_null(self, tmp_path: Path) -> None:
        assert broken(validated(tmp_path, "trace.jsonl", b'{"meta": null}')) == [(1, "type")]

    def test_half_a_line_at_the_end(self, tmp_path: Path) -> None:
        found = validated(tmp_path, "trace.jsonl", GOOD_META, GOOD, GOOD[:50], end=b"")
        assert broken(found) == [(3, "torn-line")]

    def test_a_last_line_that_is_whole_but_for_its_end_is_judged_like_others(self, tmp_path: Path) -> None:
        assert validated(tmp_path, "trace.jsonl", GOOD_META, GOOD, end=b"").problems == []
        found = validated(tmp_path, "trace.jsonl", GOOD_META, edited(RECORD, ttft_ms=...), end=b"")
        assert broken(found) == [(2, "missing-field")]

    def test_gzip_without_trailer_is_tolerated_and_said(self, tmp_path: Path) -> None:
        whole = gzip.compress(b"\n".join([GOOD_META, GOOD, GOOD, b""]))
        (tmp_path / "trace.jsonl.gz").write_bytes(whole[:-8])
        found = validate_file(tmp_path / "trace.jsonl.gz")
        assert found.problems == []
        assert "without its trailer" in found.files[0].notes[0]

    def test_damaged_gzip_is_not(self, tmp_path: Path) -> None:
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
    def test_good_record(self, tmp_path: Path, line: bytes) -> None:
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
    def test_good_beginning(self, tmp_path: Path, lines: list[bytes]) -> None:
        assert validated(tmp_path, "trace.jsonl", *lines).problems == []

    def test_good_step(self, tmp_path: Path) -> None:
        none = STEP["scheduler"] | {"spec_decoding_stats": None, "future": 1}
        assert validated(tmp_path, "step-stats.jsonl", edited(STEP), b"", edited(STEP, scheduler=none)).problems == []

    def test_problems_are_counted_but_not_all_shown(self, tmp_path: Path) -> None:
        found = validated(tmp_path, "trace.jsonl", GOOD_META, *[b"{" for _ in range(50)])
        assert (found.files[0].broken, len(found.problems)) == (50, 20)

    @pytest.mark.parametrize(
        ("lines", "note"),
        [([GOOD_META], "holds no record"), ([edited(RECORD, arrival_ms=...)], "no record has arrival_ms")],
    )
    def test_what_cannot_be_replayed_is_noted(self, tmp_path: Path, lines: list[bytes], note: str) -> None:
        found = validated(tmp_path, "trace.jsonl", *lines)
        assert found.passed
        assert note in found.files[0].notes[0]

    def test_nothing_is_said_of_replay_where_no_record_can_be_read(self, tmp_path: Path) -> None:
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
    def test_by_content(self, tmp_path: Path, line: bytes, kind: str) -> None:
        found = validated(tmp_path, "renamed", line)
        assert (found.files[0].kind, found.problems) == (kind, [])

    def test_empty_file_by_name(self, tmp_path: Path) -> None:
        assert validated(tmp_path, "my-trace.jsonl", end=b"").files[0].kind == "trace.jsonl"

    def test_something_else(self, tmp_path: Path) -> None:
        with pytest.raises(CaptureError, match="is no file of a capture"):
            validated(tmp_path, "notes.txt", b"hello")

    def test_client_outcome_must_be_known(self, tmp_path: Path) -> None:
        line = b'{"id": "a", "phase": "p", "index": 0, "outcome": "lost"}'
        assert broken(validated(tmp_path, "client.jsonl", line)) == [(1, "type")]
