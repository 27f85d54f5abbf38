"""Lines of the published files: written as documented, read back as they were."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from specdecode_operator.capture.files import formats, summary
from specdecode_operator.capture.files.accounting import Accounting, gates
from specdecode_operator.capture.files.formats import EngineCounters
from specdecode_operator.capture.files.totals import StepTotals, TraceTotals
from specdecode_operator.capture.files.trace_rules import broken_rules, decode_record
from specdecode_operator.capture.recorder import segment_format as segment_lines

REFERENCE = Path(__file__).parents[4] / "docs/reference"
PAGES = ("trace-format.md", "capture-checks.md", "capture-manifest.md", "recorder-segments.md")

SECTIONS: dict[str, type[Struct]] = {
    "meta": formats.TraceMeta,
    "Record": formats.TraceRecord,
    "step-stats.jsonl": formats.StepStats,
    "client.jsonl": formats.ClientRecord,
    "aborted.jsonl": formats.AbortedRecord,
    "checks.json": formats.Checks,
    "Greedy answers": formats.GreedyAnswer,
    "Fields": formats.Manifest,
    "Experiment": formats.Experiment,
    "Accounting": formats.AccountingEntry,
    "Engine settings": segment_lines.EngineConfig,
    "Engine counters": formats.EngineCounters,
    "Files": formats.FileEntry,
    "Recorders": formats.SegmentEntry,
    "Live captures": formats.Live,
    "Window": formats.LiveWindow,
    "Pods": formats.LivePod,
    "Engines": formats.LiveEngine,
    "Losses": formats.LiveLoss,
    "Segments of a live capture": formats.LiveSegment,
    "Accounting of a live capture": formats.LiveAccounting,
    "Summary": summary.Summary,
    "Speculation": summary.Speculation,
    "Phases": summary.PhaseSummary,
    "manifest.partial.json": formats.PartialManifest,
    "header": segment_lines.Header,
    "request": segment_lines.Request,
    "step": segment_lines.Step,
    "anchor": segment_lines.Anchor,
    "counters": segment_lines.Counters,
    "tally": segment_lines.Tally,
    "refused": segment_lines.Refused,
    "off": segment_lines.Off,
    "closed": segment_lines.Closed,
}


def documented(title: str) -> list[str]:
    """Return the names in the first column of all tables of a section, its subsections left out."""
    text = "\n".join((REFERENCE / page).read_text(encoding="utf-8") for page in PAGES)
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert match, title
    rows = re.findall(r"^\| ([^|]+?) \|", match.group(1), re.MULTILINE)
    return [row for row in rows if row not in {"field", "gate", "---"}]


class TestDocument:
    @pytest.mark.parametrize(("title", "struct"), SECTIONS.items(), ids=SECTIONS.keys())
    def test_reference_documents_exactly_the_fields(self, title: str, struct: type[Struct]) -> None:
        assert sorted(documented(title)) == sorted(field.encode_name for field in msgspec.structs.fields(struct))

    def test_reference_documents_exactly_the_gates(self) -> None:
        steps = StepTotals(steps=1)
        found = gates(TraceTotals(), steps, Accounting(), [], EngineCounters(generation_tokens=0, drafts=0))
        only_live = ["finished_requests", "generated_tokens"]
        assert sorted(documented("Gates")) == sorted([*found, *only_live, "missing_steps"])


MILLISECONDS = st.floats(min_value=0, max_value=1e9, allow_nan=False)
WORDS = st.integers(min_value=0, max_value=2**32 - 1)
WIDE = st.integers(min_value=0, max_value=2**64 - 1)


@st.composite
def trace_records(draw: st.DrawFn) -> formats.TraceRecord:
    later = draw(st.lists(st.integers(min_value=1, max_value=9), max_size=8))
    first = draw(st.integers(min_value=1, max_value=9))
    gaps = len(later)
    parallel = {"min_size": gaps, "max_size": gaps}
    output_tokens = first + sum(later)
    ids: list[int] | None = draw(st.none() | st.lists(WORDS, min_size=output_tokens, max_size=output_tokens))
    return formats.TraceRecord(
        prompt_tokens=draw(WIDE),
        cached_tokens=draw(WIDE),
        output_tokens=output_tokens,
        ttft_ms=draw(MILLISECONDS),
        itl_ms=draw(st.lists(MILLISECONDS, **parallel)),
        itl_tokens=later,
        concurrency=draw(WIDE),
        arrival_ms=draw(st.none() | MILLISECONDS),
        itl_ctx=formats.ItlContext(
            num_running=draw(st.lists(WORDS, **parallel)), prefill_tokens=draw(st.lists(WORDS, **parallel))
        ),
        block_hashes=draw(st.none() | st.lists(WIDE, max_size=3)),
        output_token_ids=ids,
        finish_reason=draw(st.sampled_from([None, "stop", "length", "abort", "error", "repetition"])),
        request_id=draw(st.text(max_size=20)),
        engine=draw(st.none() | st.integers(min_value=0, max_value=8)),
        phase=draw(st.none() | st.text(max_size=20)),
        temperature=draw(st.none() | MILLISECONDS),
        stop_reason=draw(st.none() | st.integers(min_value=-5, max_value=2**31) | st.text(max_size=9)),
        ended_by=draw(st.sampled_from(["engine", "stop_string", "abort", "unfinished"])),
    )


class TestRecords:
    @given(record=trace_records())
    def test_record_round_trips(self, record: formats.TraceRecord) -> None:
        line = formats.encode(record)
        assert b"\n" not in line
        assert decode_record(msgspec.json.Decoder(formats.TraceRecord), line) == record

    @given(record=trace_records())
    def test_record_passes_reader_rules(self, record: formats.TraceRecord) -> None:
        read = decode_record(msgspec.json.Decoder(formats.Record), formats.encode(record))
        assert list(broken_rules(read)) == []

    @given(record=trace_records())
    def test_chunk_sizes_sum_to_output_tokens(self, record: formats.TraceRecord) -> None:
        sizes = record.chunk_sizes()
        assert sum(sizes) == record.output_tokens
        assert len(sizes) == len(record.itl_ms or ()) + 1

    def test_missing_itl_tokens_default_to_one(self) -> None:
        record = formats.TraceRecord(prompt_tokens=1, output_tokens=5, ttft_ms=1.0, itl_ms=[1.0, 1.0])
        assert record.chunk_sizes() == [3, 1, 1]

    def test_fields_vcr_always_writes_are_always_written(self) -> None:
        """Its tap leaves out what is optional, and neither of these."""
        line = formats.encode(formats.TraceRecord(prompt_tokens=1, output_tokens=1, ttft_ms=1.0, itl_ms=[]))
        assert set(msgspec.json.decode(line)) == {
            "prompt_tokens",
            "cached_tokens",
            "output_tokens",
            "ttft_ms",
            "itl_ms",
            "concurrency",
        }

    @given(
        meta=st.builds(
            formats.TraceMeta,
            model=st.none() | st.text(max_size=9),
            tp=st.none() | WORDS,
            zero_wall_s=st.none() | MILLISECONDS,
        )
    )
    def test_meta_round_trips(self, meta: formats.TraceMeta) -> None:
        document: dict[str, Any] = msgspec.json.decode(formats.encode_meta(meta))
        assert list(document) == ["meta"]
        assert msgspec.convert(document["meta"], formats.TraceMeta) == meta
