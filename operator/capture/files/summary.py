"""Summarize a capture in a few numbers, for the terminal, the status and the manifest."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from specdecode_operator.capture.files.formats import FileEntry, Live, Outcome
from specdecode_operator.capture.files.totals import (
    BY_ENGINE,
    ClientTotals,
    Latencies,
    PhaseTotals,
    Quantiles,
    StepTotals,
    TraceTotals,
    quantiles,
)
from specdecode_operator.capture.files.validate import Validation

_OUTCOMES: Final[tuple[Outcome, ...]] = Outcome.__args__  # type: ignore[attr-defined]
_MAX_POSITIONS: Final = 32
_WHOLE: Final = (BY_ENGINE, "stop_string")


class Times(Struct, kw_only=True, frozen=True):
    """Quantiles of many requests, in milliseconds: to the first token, per further token, and to the last one."""

    ttft_ms: Quantiles | None
    tpot_ms: Quantiles | None
    latency_ms: Quantiles | None


class Speculation(Struct, kw_only=True, frozen=True):
    """Results of drafting, by the engine's own counters."""

    drafts: int  # verifications of one request's draft
    draft_tokens: int
    accepted_tokens: int
    acceptance: float  # accepted share of the drafted tokens
    mean_acceptance_length: float  # tokens per verification: the accepted ones and one more
    per_position: list[float]  # share of the drafts of which the token at each position was accepted


class PhaseSummary(Struct, kw_only=True, frozen=True):
    """One phase of the workload, as the client saw it."""

    requests: int
    seconds: float  # from its first sending to its last answer
    output_tokens_per_second: float | None  # of whole answers
    late_ms: Quantiles | None  # from due to sent; in a closed phase requests are due when they are sent
    client: Times


class Summary(Struct, kw_only=True, frozen=True):
    """Results of a capture, without warm-up."""

    requests: dict[str, int]  # sent, and by outcome; of a live capture, see `_live_requests`
    records: int
    steps: int
    seconds: float  # from the first arrival to the last token, by the engine's clock
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float | None  # whole answers
    output_tokens_per_second: float | None  # all tokens
    speculation: Speculation | None  # None if nothing was drafted
    client: Times  # over HTTP, of whole answers
    engine: Times  # from arrival at the engine's client, of all records
    late_ms: Quantiles | None  # from due to sent
    phases: dict[str, PhaseSummary]
    bytes: int


def summarize(validation: Validation, size_bytes: int) -> Summary:
    """Return the summary of validated files."""
    trace = validation.trace or TraceTotals()
    steps = validation.steps or StepTotals()
    client = validation.client or ClientTotals()
    seconds = ((trace.last_ms or 0.0) - (trace.first_ms or 0.0)) / 1000
    completed = client.outcomes["completed"]
    requests = {"sent": client.outcomes.total() - client.outcomes["not_sent"]}
    requests |= {outcome: client.outcomes[outcome] for outcome in _OUTCOMES if client.outcomes[outcome]}
    if validation.live is not None:
        requests = _live_requests(validation, validation.live)
        completed = requests["completed"]
    speculation = None
    if steps.draft_tokens:
        speculation = Speculation(
            drafts=steps.drafts,
            draft_tokens=steps.draft_tokens,
            accepted_tokens=steps.accepted,
            acceptance=round(steps.accepted / steps.draft_tokens, 4),
            mean_acceptance_length=round(1 + steps.accepted / steps.drafts, 3),
            per_position=[round(share, 4) for share in steps.per_position],
        )
    return Summary(
        requests=requests,
        records=trace.records,
        steps=steps.steps,
        seconds=round(seconds, 3),
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        output_tokens=trace.output_tokens,
        requests_per_second=_rate(completed, seconds),
        output_tokens_per_second=_rate(trace.output_tokens, seconds),
        speculation=speculation,
        client=_times(client.all.latencies),
        engine=_times(trace.engine),
        late_ms=quantiles(client.all.late_ms),
        phases={name: _phase(phase) for name, phase in client.phases.items()},
        bytes=size_bytes,
    )


def _live_requests(validation: Validation, live: Live) -> dict[str, int]:
    """Return the requests that arrived in the window, and the recorded ones by their end."""
    counts = live.accounting
    ends = validation.aborted + (validation.trace.ended_by if validation.trace else Counter())
    whole = sum(ends[end] for end in _WHOLE)
    return {
        "admitted": counts.admitted,
        "recorded": counts.records,
        "completed": whole,
        "aborted": ends["abort"],
        "unfinished": ends["unfinished"],
        "sampled_out": counts.sampled_out,
        "dropped": counts.dropped,
    }


def _times(latencies: Latencies) -> Times:
    return Times(
        ttft_ms=quantiles(latencies.ttft_ms),
        tpot_ms=quantiles(latencies.tpot_ms),
        latency_ms=quantiles(latencies.latency_ms),
    )


def _phase(phase: PhaseTotals) -> PhaseSummary:
    first_ms, last_ms = phase.span_ms or (0.0, 0.0)
    seconds = (last_ms - first_ms) / 1000
    return PhaseSummary(
        requests=phase.requests,
        seconds=round(seconds, 3),
        output_tokens_per_second=_rate(phase.tokens, seconds),
        late_ms=quantiles(phase.late_ms),
        client=_times(phase.latencies),
    )


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 2) if seconds > 0 else None


def status_summary(
    summary: Summary, files: Mapping[str, FileEntry], path: str, live: Live | None = None
) -> dict[str, Any]:
    """Return ``status.summary`` of a SpecDecodeCapture: decimals are text, as everywhere in that API.

    A live capture has no client, so its times are those of the engine.
    """

    def decimals(times: Quantiles | None) -> dict[str, str] | None:
        names = ("p50", "p90", "p95", "p99")
        return None if times is None else {name: f"{getattr(times, name):.2f}" for name in names}

    rates = (summary.requests_per_second, summary.output_tokens_per_second)
    requests_per_second, tokens_per_second = (None if each is None else f"{each:.2f}" for each in rates)
    names = {"http_rejected": "httpRejected", "timed_out": "timedOut", "not_sent": "notSent"}
    requests, times = summary.requests, summary.client
    if live is not None:
        requests, times = {"sent": requests["admitted"], "completed": requests["completed"]}, summary.engine
    found: dict[str, Any] = {
        "requests": {"completed": 0} | {names.get(name, name): count for name, count in requests.items()},
        "live": None if live is None else _live_status(live),
        "promptTokens": summary.prompt_tokens,
        "outputTokens": summary.output_tokens,
    }
    if (drafting := summary.speculation) is not None:
        found |= {
            "acceptance": f"{drafting.acceptance:.0%}",
            "acceptancePercent": round(100 * drafting.acceptance),
            "meanAcceptanceLength": f"{drafting.mean_acceptance_length:.2f}",
            "perPositionPercent": [round(100 * share) for share in drafting.per_position[:_MAX_POSITIONS]],
        }
    found |= {
        "ttftMs": decimals(times.ttft_ms),
        "tpotMs": decimals(times.tpot_ms),
        "latencyMs": decimals(times.latency_ms),
        "lateMs": decimals(_worst_lateness(summary.phases)[1]),
        "requestsPerSecond": requests_per_second,
        "outputTokensPerSecond": tokens_per_second,
        "bytes": summary.bytes,
        "files": [{"name": name, **msgspec.to_builtins(entry)} for name, entry in files.items()],
        "path": path,
    }
    return {name: value for name, value in found.items() if value is not None}


def _live_status(live: Live) -> dict[str, Any]:
    counts, known = live.accounting, [each.requests for each in live.lost if each.requests is not None]
    found = {
        "samplePercent": live.sample_percent,
        "windowSeconds": f"{live.window.seconds:.1f}",
        "pods": sum(pod.missing is None for pod in live.pods),
        "missingPods": sum(pod.missing is not None for pod in live.pods),
        "recorded": counts.records,
        "sampledOut": counts.sampled_out,
        "gaps": len(live.lost),
        "lostRequests": sum(known) if len(known) == len(live.lost) else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def summary_text(summary: Summary) -> str:
    """Return the summary for people, a few lines."""

    def times_text(name: str, times: Quantiles | None) -> list[str]:
        if times is None:
            return []
        shown = "   ".join(f"P{share} {getattr(times, f'p{share}'):9.1f}" for share in (50, 90, 95, 99))
        return [f"{name:<16}{shown} ms"]

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
            lines += times_text(f"{name.upper()} {side}", getattr(times, f"{name}_ms"))
    worst, late = _worst_lateness(summary.phases)
    lines += [f"{text} in phase {worst}" for text in times_text("sent late", late)]
    return "\n".join((*lines, f"files           {summary.bytes / 2**20:.1f} MiB"))


def _worst_lateness(phases: Mapping[str, PhaseSummary]) -> tuple[str, Quantiles | None]:
    """Return the phase with the largest lateness, which many requests of closed phases would hide."""
    late = {name: phase.late_ms for name, phase in phases.items() if phase.late_ms is not None}
    worst = max(late, key=lambda name: late[name].p99, default="")
    return worst, late.get(worst)
