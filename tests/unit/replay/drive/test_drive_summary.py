"""What is said of a run that was driven."""

from pathlib import Path

from specdecode_operator.capture.files.formats import ClientRecord, Outcome, encode
from specdecode_operator.capture.load.engine_ready import MetricsDelta, NoMetrics
from specdecode_operator.capture.trace_reader import read_recording
from specdecode_operator.replay.drive import Driven, DriveSummary, planned, summarize, summary_text
from specdecode_operator.vllm.engine_metrics import SpeculationReading
from tests.support.traces import record, write_trace


def sent(index: int, outcome: Outcome = "completed") -> ClientRecord:
    return ClientRecord(
        id=f"replay-{index}",
        phase="replay",
        index=index,
        outcome=outcome,
        sent_ms=float(index),
        late_ms=float(index),
        ttft_ms=70.0,
        latency_ms=120.0,
        max_tokens=6,
        completion_tokens=6,
    )


def summary(
    folder: Path, *records: ClientRecord, waits_s: dict[int, float], metrics: MetricsDelta | NoMetrics
) -> DriveSummary:
    trace = write_trace(folder / "trace.jsonl", [record(arrival_ms=float(index)) for index in range(100)])
    log = folder / "client.jsonl"
    log.write_bytes(b"".join(encode(each) + b"\n" for each in records))
    driven = Driven(client_file=log, waits_s=waits_s, stop_reason=None, metrics=metrics)
    return summarize(planned(read_recording(trace), 1.0), driven)


def test_drafting_is_as_the_servers_counters_have_it(tmp_path: Path) -> None:
    reading = SpeculationReading(
        drafts=100, draft_tokens=400, accepted_tokens=250, accepted_per_position=(100, 75, 50, 25)
    )
    found = summary(tmp_path, sent(0), waits_s={}, metrics=MetricsDelta(600, reading))
    assert found.acceptance is not None
    assert (found.acceptance.acceptance, found.acceptance.mean_acceptance_length) == (0.625, 3.5)
    assert "62.5% of 400 drafted tokens accepted, 3.50 tokens per draft" in summary_text(found)


def test_what_never_left_was_not_sent(tmp_path: Path) -> None:
    found = summary(tmp_path, sent(0), sent(1, "not_sent"), waits_s={}, metrics=NoMetrics("none"))
    assert (found.planned, found.sent, found.outcomes) == (100, 1, {"completed": 1, "not_sent": 1})


def test_waits_and_lateness_are_milliseconds_each_with_its_own_quantiles(tmp_path: Path) -> None:
    found = summary(tmp_path, *map(sent, range(100)), waits_s={7: 0.25}, metrics=NoMetrics("none"))
    text = " ".join(summary_text(found).split())
    assert "sent late ms P50 49.5, P99 98.0" in text
    assert "turns 1 waited longer than recorded for the turn before: P50 250.0 ms" in text


def test_the_table_has_what_was_recorded_on_its_left(tmp_path: Path) -> None:
    found = summary(tmp_path, *map(sent, range(100)), waits_s={}, metrics=NoMetrics("none"))
    lines = [line.split() for line in summary_text(found).splitlines()]
    assert ["recorded", "here"] in lines
    assert ["TTFT", "ms", *["30.0"] * 3, *["70.0"] * 3] in lines
    assert ["latency", "ms", *["52.5"] * 3, *["120.0"] * 3] in lines
