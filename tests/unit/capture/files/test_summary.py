"""Summary of a capture."""

import statistics
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.capture_status import CaptureSummary
from specdecode_operator.capture.files.formats import ClientRecord, FileEntry, TraceMeta
from specdecode_operator.capture.files.merge import merge
from specdecode_operator.capture.files.summary import Summary, status_summary, summarize, summary_text
from specdecode_operator.capture.files.totals import ClientTotals, quantiles
from specdecode_operator.capture.files.validate import Validation, validate_capture
from tests.support.recordings import ZERO_S, Recording, Scenario

FILES = {name: FileEntry(bytes=10**9, lines=10**6, sha256="f" * 64) for name in ("trace.jsonl", "client.jsonl")}


@pytest.fixture(scope="module")
def recording() -> Recording:
    recording = Recording(Scenario(requests=20))
    recording.clients[-1] |= {"outcome": "timed_out"}
    recording.clients[-2] |= {"outcome": "not_sent"}
    return recording


@pytest.fixture(scope="module")
def validation(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Validation:
    folder: Path = tmp_path_factory.mktemp("capture")
    merge(recording.write(folder), TraceMeta(), ZERO_S)
    return validate_capture(folder, [])


@pytest.fixture(scope="module")
def summary(validation: Validation) -> Summary:
    return summarize(validation, 1234)


class TestNumbers:
    def test_requests_are_counted_by_outcome(self, summary: Summary) -> None:
        assert summary.requests == {"sent": 19, "completed": 18, "timed_out": 1, "not_sent": 1}
        assert (summary.records, summary.bytes) == (20, 1234)

    def test_speculation_matches_engine_statistics(self, summary: Summary, recording: Recording) -> None:
        stats = [
            line["scheduler"]["spec_decoding_stats"]
            for line in recording.segments[0]
            if line["k"] == "step" and line["t"] > ZERO_S + 9 and line["scheduler"]["spec_decoding_stats"]
        ]
        drafts, drafted = sum(s["num_drafts"] for s in stats), sum(s["num_draft_tokens"] for s in stats)
        accepted = sum(s["num_accepted_tokens"] for s in stats)
        found = summary.speculation
        assert found is not None
        assert found.acceptance == pytest.approx(accepted / drafted, abs=1e-4)
        assert found.mean_acceptance_length == pytest.approx(1 + accepted / drafts, abs=1e-3)
        first = sum(s["num_accepted_tokens_per_pos"][0] for s in stats)
        assert found.per_position[0] == pytest.approx(first / drafts, abs=1e-4)
        assert sum(found.per_position) == pytest.approx(found.mean_acceptance_length - 1, abs=1e-2)

    def test_client_times_cover_completed_requests_only(self, summary: Summary, recording: Recording) -> None:
        whole = [line for line in recording.clients if line["outcome"] == "completed" and not line["warmup"]]
        assert summary.client.ttft_ms is not None
        assert summary.client.ttft_ms.count == len(whole)
        ttft = [line["ttft_ms"] for line in whole]
        assert summary.client.ttft_ms.p50 == pytest.approx(statistics.median(ttft), abs=1e-2)
        tpot = [(line["latency_ms"] - line["ttft_ms"]) / (line["completion_tokens"] - 1) for line in whole]
        assert summary.client.tpot_ms is not None
        assert summary.client.tpot_ms.p50 == pytest.approx(statistics.median(tpot), abs=1e-2)

    def test_engine_latency_is_shorter_than_client_latency(self, summary: Summary) -> None:
        assert summary.engine.latency_ms is not None
        assert summary.client.latency_ms is not None
        assert summary.engine.latency_ms.count == 20
        assert summary.engine.latency_ms.p50 < summary.client.latency_ms.p50

    def test_throughput_is_output_tokens_per_second(self, summary: Summary) -> None:
        assert summary.output_tokens == 20 * 20
        assert summary.output_tokens_per_second == pytest.approx(summary.output_tokens / summary.seconds, rel=1e-2)

    def test_phases_have_their_number_of_requests(self, summary: Summary) -> None:
        assert list(summary.phases) == ["closed"]
        assert summary.phases["closed"].requests == 19

    def test_lateness_is_that_of_the_latest_phase(self) -> None:
        client = ClientTotals()
        for phase, late_ms, count in (("closed", 0.0, 990), ("poisson", 80.0, 10)):
            for index in range(count):
                record = ClientRecord(id="x", phase=phase, index=index, outcome="disconnected", late_ms=late_ms)
                client.add(record)
        summary = summarize(Validation(client=client), 0)
        late = {name: phase.late_ms for name, phase in summary.phases.items()}
        assert {name: each and each.p50 for name, each in late.items()} == {"closed": 0.0, "poisson": 80.0}
        (line,) = (line for line in summary_text(summary).splitlines() if line.startswith("sent late"))
        assert "P50      80.0" in line
        assert line.endswith("in phase poisson")
        assert status_summary(summary, {}, "x")["lateMs"]["p50"] == "80.00"


class TestShapes:
    def test_status_matches_api_schema(self, summary: Summary) -> None:
        document = status_summary(summary, FILES, "team/demo/as-deployed/1")
        status = CaptureSummary.model_validate(document)
        assert status.requests.timed_out == 1
        assert status.late_ms is not None
        assert status.path == "team/demo/as-deployed/1"
        assert status.acceptance_percent is not None
        assert status.per_position_percent is not None
        assert len(status.per_position_percent) == 4

    def test_status_of_empty_capture_matches_api_schema(self) -> None:
        CaptureSummary.model_validate(status_summary(summarize(Validation(), 0), {}, "x"))

    def test_summary_round_trips(self, summary: Summary) -> None:
        assert msgspec.convert(msgspec.to_builtins(summary), Summary) == summary

    def test_text_has_counts_in_lines_of_at_most_120_characters(self, summary: Summary) -> None:
        text = summary_text(summary)
        assert "19 sent, 18 completed, 1 timed out, 1 not sent" in text
        assert "tokens per step; by position" in text
        assert max(map(len, text.splitlines())) <= 120


class TestQuantiles:
    @given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=2))
    def test_quantiles_match_standard_library(self, values: list[float]) -> None:
        found = quantiles(values)
        assert found is not None
        expected = statistics.quantiles(values, n=100, method="inclusive")
        for share in (50, 90, 95, 99):
            assert getattr(found, f"p{share}") == pytest.approx(expected[share - 1], rel=1e-9, abs=1e-3)
