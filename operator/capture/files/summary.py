"""Summarize a capture in a few numbers, for the terminal, the status and the manifest."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from specdecode_operator.capture.files.formats import FileEntry, Outcome
from specdecode_operator.capture.files.totals import (
    ClientTotals,
    Latencies,
    Quantiles,
    StepTotals,
    TraceTotals,
    quantiles,
)
from specdecode_operator.capture.files.validate import Validation

MESSAGE_BYTES: Final = 4096
"""Kubernetes keeps no more of a termination message."""

_OUTCOMES: Final[tuple[Outcome, ...]] = Outcome.__args__  # type: ignore[attr-defined]
_MAX_POSITIONS: Final = 32


class Times(Struct, kw_only=True, frozen=True):
    """Quantiles of many requests, in milliseconds."""

    ttft_ms: Quantiles | None  # time to the first token
    tpot_ms: Quantiles | None  # time for each further token of a request
    latency_ms: Quantiles | None  # time to the last token


class Speculation(Struct, kw_only=True, frozen=True):
    """Results of drafting, by the engine's own counters."""

    # Verifications of one request's draft, tokens drafted, and tokens accepted of them.
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    acceptance: float  # share of the drafted tokens that was accepted
    mean_acceptance_length: float  # tokens that a verification gives on average: the accepted and one more
    per_position: list[float]  # share of the drafts of which the token at each position was accepted


class PhaseSummary(Struct, kw_only=True, frozen=True):
    """One phase of the workload, as the client saw it."""

    requests: int
    seconds: float  # from its first sending to its last answer
    output_tokens_per_second: float | None  # tokens of its whole answers in that time
    # How much later its requests were sent than they were due. In a closed phase they are due when they are sent.
    late_ms: Quantiles | None
    client: Times


class Summary(Struct, kw_only=True, frozen=True):
    """Results of a capture, without warm-up."""

    requests: dict[str, int]  # requests sent, and by outcome
    records: int
    steps: int
    seconds: float  # from the first arrival to the last token, by the engine's clock
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    # Whole answers, and all tokens, in that time.
    requests_per_second: float | None
    output_tokens_per_second: float | None
    speculation: Speculation | None  # absent where nothing was drafted
    # Times over HTTP, of whole answers; and times from arrival at the engine's client, of all records.
    client: Times
    engine: Times
    late_ms: Quantiles | None  # how much later requests were sent than they were due
    phases: dict[str, PhaseSummary]
    bytes: int


def summarize(validation: Validation, size_bytes: int) -> Summary:
    """Return the summary of validated files."""
    trace = validation.trace or TraceTotals()
    steps = validation.steps or StepTotals()
    client = validation.client or ClientTotals()
    seconds = ((trace.last_ms or 0.0) - (trace.first_ms or 0.0)) / 1000
    outcomes: dict[str, int] = {outcome: client.outcomes[outcome] for outcome in _OUTCOMES if client.outcomes[outcome]}
    return Summary(
        requests={"sent": client.outcomes.total() - client.outcomes["not_sent"]} | outcomes,
        records=trace.records,
        steps=steps.steps,
        seconds=round(seconds, 3),
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        output_tokens=trace.output_tokens,
        requests_per_second=_rate(client.outcomes["completed"], seconds),
        output_tokens_per_second=_rate(trace.output_tokens, seconds),
        speculation=_speculation(steps),
        client=_times(client.all),
        engine=_times(trace.engine),
        late_ms=quantiles(client.late_ms),
        phases={name: _phase(client, name) for name in client.phase_requests},
        bytes=size_bytes,
    )


def _times(latencies: Latencies) -> Times:
    return Times(
        ttft_ms=quantiles(latencies.ttft_ms),
        tpot_ms=quantiles(latencies.tpot_ms),
        latency_ms=quantiles(latencies.latency_ms),
    )


def _phase(client: ClientTotals, name: str) -> PhaseSummary:
    first_ms, last_ms = client.phase_span_ms.get(name, (0.0, 0.0))
    seconds = (last_ms - first_ms) / 1000
    return PhaseSummary(
        requests=client.phase_requests[name],
        seconds=round(seconds, 3),
        output_tokens_per_second=_rate(client.phase_tokens[name], seconds),
        late_ms=quantiles(client.phase_late_ms[name]),
        client=_times(client.phases[name]),
    )


def _speculation(steps: StepTotals) -> Speculation | None:
    if not steps.draft_tokens:
        return None
    return Speculation(
        drafts=steps.drafts,
        draft_tokens=steps.draft_tokens,
        accepted_tokens=steps.accepted,
        acceptance=round(steps.accepted / steps.draft_tokens, 4),
        mean_acceptance_length=round(1 + steps.accepted / steps.drafts, 3),
        per_position=[round(accepted / steps.drafts, 4) for accepted in steps.accepted_per_pos],
    )


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 2) if seconds > 0 else None


def status_summary(summary: Summary, files: Mapping[str, FileEntry], path: str) -> dict[str, Any]:
    """Return ``status.summary`` of a SpecDecodeCapture: decimals are text, as everywhere in that API."""
    tokens_per_second = summary.output_tokens_per_second
    entries = [{"name": name, **msgspec.to_builtins(entry)} for name, entry in files.items()]
    names = {"http_rejected": "httpRejected", "timed_out": "timedOut", "not_sent": "notSent"}
    found = {
        "requests": {"completed": 0} | {names.get(name, name): count for name, count in summary.requests.items()},
        "outputTokens": summary.output_tokens,
        **(_drafting_status(summary.speculation) if summary.speculation else {}),
        "ttftMs": _decimals(summary.client.ttft_ms),
        "tpotMs": _decimals(summary.client.tpot_ms),
        "latencyMs": _decimals(summary.client.latency_ms),
        "lateMs": _decimals(_worst_lateness(summary.phases)[1]),
        "requestsPerSecond": None if summary.requests_per_second is None else f"{summary.requests_per_second:.2f}",
        "outputTokensPerSecond": None if tokens_per_second is None else f"{tokens_per_second:.2f}",
        "bytes": summary.bytes,
        "files": entries,
        "path": path,
    }
    return {name: value for name, value in found.items() if value is not None}


def _drafting_status(drafting: Speculation) -> dict[str, Any]:
    return {
        "acceptance": f"{drafting.acceptance:.0%}",
        "acceptancePercent": round(100 * drafting.acceptance),
        "meanAcceptanceLength": f"{drafting.mean_acceptance_length:.2f}",
        "perPositionPercent": [round(100 * share) for share in drafting.per_position[:_MAX_POSITIONS]],
    }


def _decimals(times: Quantiles | None) -> dict[str, str] | None:
    if times is None:
        return None
    return {name: f"{getattr(times, name):.2f}" for name in ("p50", "p90", "p95", "p99")}


def summary_text(summary: Summary) -> str:
    """Return the summary for people, a few lines."""
    outcomes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary.requests.items())
    tokens = f"{summary.prompt_tokens} prompt ({summary.cached_tokens} cached), {summary.output_tokens} output"
    if summary.output_tokens_per_second is not None:
        tokens += f", {summary.output_tokens_per_second:.1f} per second"
    drafting, speculation = summary.speculation, "none"
    if drafting is not None:
        speculation = (
            f"{drafting.acceptance:.1%} of {drafting.draft_tokens} drafted tokens accepted, "
            f"{drafting.mean_acceptance_length:.2f} tokens per step; by position "
            f"{' '.join(f'{share:.0%}' for share in drafting.per_position)}"
        )
    lines = [
        f"requests        {outcomes}; {summary.records} records, {summary.steps} steps in {summary.seconds:.1f} s",
        f"tokens          {tokens}",
        f"speculation     {speculation}",
    ]
    for side, times in (("client", summary.client), ("engine", summary.engine)):
        for name in ("ttft", "tpot", "latency"):
            lines += _times_text(f"{name.upper()} {side}", getattr(times, f"{name}_ms"))
    worst, late = _worst_lateness(summary.phases)
    lines += [f"{text} in phase {worst}" for text in _times_text("sent late", late)]
    return "\n".join((*lines, f"files           {summary.bytes / 2**20:.1f} MiB"))


def _worst_lateness(phases: Mapping[str, PhaseSummary]) -> tuple[str, Quantiles | None]:
    """Return the phase with the largest lateness, which many requests of closed phases would hide."""
    late = {name: phase.late_ms for name, phase in phases.items() if phase.late_ms is not None}
    worst = max(late, key=lambda name: late[name].p99, default="")
    return worst, late.get(worst)


def _times_text(name: str, times: Quantiles | None) -> list[str]:
    if times is None:
        return []
    shown = "   ".join(f"P{share} {getattr(times, f'p{share}'):9.1f}" for share in (50, 90, 95, 99))
    return [f"{name:<16}{shown} ms"]
