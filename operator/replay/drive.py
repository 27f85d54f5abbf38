"""What a run gave, beside what was recorded."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from specdecode_operator.capture.files.formats import ClientRecord
from specdecode_operator.capture.files.lines import read_lines
from specdecode_operator.capture.load.engine_ready import NoMetrics
from specdecode_operator.capture.validation.quantiles import Quantiles, quantiles
from specdecode_operator.capture.validation.totals import Latencies
from specdecode_operator.problems import printable
from specdecode_operator.replay.drive.plan import Planned
from specdecode_operator.replay.drive.run import Driven
from specdecode_operator.replay.recording.recording import RecordedRequest

_RECORD: Final = msgspec.json.Decoder(ClientRecord)
_TIMES: Final = ("ttft_ms", "tpot_ms", "latency_ms")
_SHARES: Final = ("p50", "p90", "p99")
_LABEL_WIDTH: Final = 14


class Side(Struct, kw_only=True, frozen=True):
    """Requests with a whole answer in this run, as they were recorded or as they went now."""

    # Milliseconds to the first token, for each further token of a request, and to the last token.
    ttft_ms: Quantiles | None
    tpot_ms: Quantiles | None
    latency_ms: Quantiles | None
    seconds: float  # from the first request to the last answer's end
    output_tokens: int
    output_tokens_per_second: float | None


class Acceptance(Struct, kw_only=True, frozen=True):
    """What drafting achieved during the run, by the server's own counters."""

    draft_tokens: int
    accepted_tokens: int
    acceptance: float  # share of the drafted tokens that was accepted
    mean_acceptance_length: float


class DriveSummary(Struct, kw_only=True, frozen=True):
    """What a run gave."""

    planned: int  # requests to send
    sent: int
    outcomes: dict[str, int]
    stop_reason: str | None  # why it ended before all was sent
    first_failure: str | None
    other_lengths: int  # whole answers with another number of tokens than recorded
    late_ms: Quantiles | None  # how much later requests left than they were due
    waited: int  # later turns that waited longer than recorded for the one before
    waited_ms: Quantiles | None
    recorded: Side
    driven: Side
    acceptance: Acceptance | None  # absent where the server has no such counters


def summarize(plan: Sequence[Planned], driven: Driven) -> DriveSummary:
    """Return the summary of a run."""
    records = _read(driven.client_file)
    outcomes = dict[str, int]()
    for record in records:
        outcomes[record.outcome] = outcomes.get(record.outcome, 0) + 1
    whole = [record for record in records if record.outcome == "completed"]
    failed = next((record for record in records if record.outcome not in ("completed", "cancelled")), None)
    answered = {record.index for record in whole}
    waits_ms = [1000 * wait_s for wait_s in driven.waits_s.values()]
    return DriveSummary(
        planned=len(plan),
        sent=len(records) - outcomes.get("not_sent", 0),
        outcomes=outcomes,
        stop_reason=driven.stop_reason,
        first_failure=None if failed is None else _told(failed),
        other_lengths=sum(
            record.completion_tokens is not None and record.completion_tokens != record.max_tokens for record in whole
        ),
        late_ms=quantiles(record.late_ms for record in records if record.late_ms is not None),
        waited=len(waits_ms),
        waited_ms=quantiles(waits_ms),
        recorded=_recorded([each.request for each in plan if each.place in answered]),
        driven=_driven(whole),
        acceptance=_acceptance(driven),
    )


def _read(path: Path) -> list[ClientRecord]:
    return [_RECORD.decode(line.text) for line in read_lines(path)]


def _told(record: ClientRecord) -> str:
    status = "" if record.http_status is None else f" {record.http_status}"
    return printable(f"{record.id}: {record.outcome.replace('_', ' ')}{status}: {record.error or 'no reason given'}")


def _recorded(requests: Sequence[RecordedRequest]) -> Side:
    latencies = Latencies()
    for request in requests:
        latencies.add(request.ttft_ms, request.ttft_ms + sum(request.gaps_ms), request.output_tokens)
    first_ms = min((request.arrival_ms or 0.0 for request in requests), default=0.0)
    last_ms = max((request.end_ms or 0.0 for request in requests), default=0.0)
    return _side(latencies, last_ms - first_ms, sum(request.output_tokens for request in requests))


def _driven(whole: Iterable[ClientRecord]) -> Side:
    latencies, tokens, sent_ms, ended_ms = Latencies(), 0, list[float](), list[float]()
    for record in whole:
        if record.ttft_ms is None or record.latency_ms is None or record.sent_ms is None:
            continue
        latencies.add(record.ttft_ms, record.latency_ms, record.completion_tokens)
        tokens += record.completion_tokens or 0
        sent_ms.append(record.sent_ms)
        ended_ms.append(record.sent_ms + record.latency_ms)
    return _side(latencies, max(ended_ms, default=0.0) - min(sent_ms, default=0.0), tokens)


def _side(latencies: Latencies, span_ms: float, tokens: int) -> Side:
    return Side(
        ttft_ms=quantiles(latencies.ttft_ms),
        tpot_ms=quantiles(latencies.tpot_ms),
        latency_ms=quantiles(latencies.latency_ms),
        seconds=round(span_ms / 1000, 3),
        output_tokens=tokens,
        output_tokens_per_second=round(1000 * tokens / span_ms, 2) if span_ms > 0 else None,
    )


def _acceptance(driven: Driven) -> Acceptance | None:
    metrics = driven.metrics
    if isinstance(metrics, NoMetrics) or metrics.speculation is None or not metrics.speculation.draft_tokens:
        return None
    found = metrics.speculation
    return Acceptance(
        draft_tokens=found.draft_tokens,
        accepted_tokens=found.accepted_tokens,
        acceptance=round(found.accepted_tokens / found.draft_tokens, 4),
        mean_acceptance_length=round(1 + found.accepted_tokens / max(found.drafts, 1), 3),
    )


def summary_text(summary: DriveSummary) -> str:
    """Return the summary for people."""
    outcomes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary.outcomes.items())
    lines = [_line("requests", f"{summary.sent} of {summary.planned} sent: {outcomes or 'none ended'}")]
    if summary.stop_reason is not None:
        lines.append(_line("stopped", f"{summary.stop_reason}: {summary.planned - summary.sent} never left"))
    if summary.first_failure is not None:
        lines.append(_line("first failure", summary.first_failure))
    if summary.other_lengths:
        lines.append(_line("lengths", f"{summary.other_lengths} answers had another number of tokens than recorded"))
    lines += ["", _line("", "".join(f"{name:<33}" for name in ("recorded", "here"))), _line("", 2 * _heads())]
    for name in _TIMES:
        label = f"{name.removesuffix('_ms').upper() if name != 'latency_ms' else 'latency'} ms"
        sides = (getattr(side, name) for side in (summary.recorded, summary.driven))
        lines.append(_line(label, "".join(map(_cells, sides))))
    rates = (side.output_tokens_per_second for side in (summary.recorded, summary.driven))
    lines.append(_line("tokens/s", "".join(f"{'-' if rate is None else f'{rate:.1f}':>9}{'':24}" for rate in rates)))
    lines += ["", *_how_it_went(summary)]
    return "\n".join(line.rstrip() for line in lines)


def _how_it_went(summary: DriveSummary) -> Iterable[str]:
    if summary.late_ms is not None:
        yield _line("sent late ms", f"P50 {summary.late_ms.p50:.1f}, P99 {summary.late_ms.p99:.1f}")
    if summary.waited_ms is not None:
        yield _line(
            "turns",
            f"{summary.waited} waited longer than recorded for the turn before: P50 {summary.waited_ms.p50:.1f} ms",
        )
    if summary.acceptance is not None:
        found = summary.acceptance
        yield _line(
            "speculation",
            f"{found.acceptance:.1%} of {found.draft_tokens} drafted tokens accepted,"
            f" {found.mean_acceptance_length:.2f} tokens per draft, as the server counts",
        )


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"


def _heads() -> str:
    return "".join(f"{share.upper():>9}" for share in _SHARES) + " " * 6


def _cells(times: Quantiles | None) -> str:
    return "".join(f"{'-' if times is None else f'{getattr(times, share):.1f}':>9}" for share in _SHARES) + " " * 6
