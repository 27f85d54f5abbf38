"""Measures of quality: what tells a recording that can be trusted from one that only parses."""

from collections.abc import Sequence
from typing import Final

from specdecode_operator.capture.files.manifest import EngineCounters, Gate, SegmentEntry
from specdecode_operator.capture.recorder.lines import ORDERED
from specdecode_operator.capture.validation.accounting import Accounting
from specdecode_operator.capture.validation.totals import BY_ENGINE, SHORT_GAP_MS, StepTotals, TraceTotals

SHORT_GAP_SHARE: Final = 0.002
"""Engine stamps have none; stamps on receipt have up to this share (vllm-vcr's own figure for its tap)."""


def gates(
    trace: TraceTotals | None,
    steps: StepTotals | None,
    accounting: Accounting | None,
    segments: Sequence[SegmentEntry] | None,
    counters: EngineCounters | None = None,
) -> dict[str, Gate]:
    """Return every measure that the files at hand allow, by name."""
    found: dict[str, Gate] = {}
    if steps is not None and not steps.steps:
        # Nothing was recorded of the steps, as record.stepStats: false asks for: they can prove nothing.
        steps = None
    if accounting is not None:
        found["accounting"] = _accounting(accounting)
        found["client_tokens"] = _none_of(
            accounting.token_mismatches, "requests of which client and engine counted different numbers of tokens"
        )
    if segments is not None:
        found["dropped"] = _dropped(segments)
    if trace is not None:
        found["short_gap_share"] = _short_gaps(trace)
        found["largest_chunk"] = _largest_chunk(trace, steps)
    if trace is not None or steps is not None:
        found["clock"] = _clock(trace, steps)
    if steps is not None:
        found["per_position"] = _none_of(
            steps.inconsistent, "steps whose acceptance per position does not add up, or rises with the position"
        )
    if trace is not None and steps is not None:
        found["step_counters"] = _step_counters(trace, steps)
    if steps is not None and counters is not None and counters.drafts is not None:
        found["engine_counters"] = _engine_counters(steps, counters)
    return found


def missing_steps(trace: TraceTotals, steps: StepTotals | None) -> Gate:
    """Judge a capture that was to record steps: none at all would pass the measures above, which need some."""
    without = 0 if steps is not None and steps.steps else trace.records
    return _none_of(without, "requests without any step of the engine, though record.stepStats asks for steps")


def _engine_counters(steps: StepTotals, counters: EngineCounters) -> Gate:
    """Both come from the same statistics, on two ways: over every step, and through the API servers' counters."""
    of_steps = (steps.drafts, steps.draft_tokens, steps.accepted)
    of_metrics = (counters.drafts or 0, counters.draft_tokens or 0, counters.accepted_tokens or 0)
    apart = max(abs(here - there) for here, there in zip(of_steps, of_metrics, strict=True))
    why = f"drafts, drafted and accepted tokens: {of_steps} in the steps, {of_metrics} on /metrics"
    return Gate(value=apart, limit=0, passed=apart == 0, why=why)


def _none_of(count: int, what: str) -> Gate:
    return Gate(value=count, limit=0, passed=count == 0, why=f"{count} {what}")


def _accounting(accounting: Accounting) -> Gate:
    named = "; ".join(f"{each.request_id}: {each.what}" for each in accounting.shown)
    rest = accounting.mismatches - len(accounting.shown)
    more = f"; and {rest} more" if rest else ""
    why = f"{accounting.equation}{f': {named}{more}' if named else ''}"
    return Gate(value=accounting.mismatches, limit=0, passed=accounting.holds, why=why)


def _dropped(segments: Sequence[SegmentEntry]) -> Gate:
    """A segment that did not end as it was ordered to has lost nobody knows what."""
    lost = sum(segment.dropped or 0 for segment in segments)
    unended = sum(segment.closed != ORDERED for segment in segments)
    why = f"{lost} lines that the recorder lost, by its own count"
    return Gate(
        value=lost + unended,
        limit=0,
        passed=not lost and not unended,
        why=f"{why}; {unended} of {len(segments)} segments were interrupted" if unended else why,
    )


def _short_gaps(trace: TraceTotals) -> Gate:
    share = trace.short_gaps / trace.gaps if trace.gaps else 0.0
    return Gate(
        value=round(share, 6),
        limit=SHORT_GAP_SHARE,
        passed=share <= SHORT_GAP_SHARE,
        why=f"{trace.short_gaps} of {trace.gaps} gaps are below {SHORT_GAP_MS} ms, which no step is",
    )


def _clock(trace: TraceTotals | None, steps: StepTotals | None) -> Gate:
    backward = (trace.backward if trace else 0) + (steps.backward if steps else 0)
    return _none_of(backward, "gaps, first tokens or steps that lie before what they follow")


def _largest_chunk(trace: TraceTotals, steps: StepTotals | None) -> Gate:
    """A step gives a request K accepted drafts and one token of the target at most; more are merged chunks."""
    k = (steps.num_spec_tokens if steps else 0) or (trace.meta.speculative or {}).get("num_speculative_tokens")
    if not k:
        known = steps is not None and trace.meta.speculative is None
        limit = 1 if known and trace.meta.schema is not None else None
    else:
        limit = int(k) + 1
    passed = limit is None or trace.largest_chunk <= limit
    why = "tokens in the largest chunk; one step gives K + 1 at most" if limit else "K is not known: not judged"
    return Gate(value=trace.largest_chunk, limit=limit, passed=passed, why=why)


def _step_counters(trace: TraceTotals, steps: StepTotals) -> Gate:
    """Drafts are counted as accepted before max_tokens or a stop token cuts the last chunk, so a few are cut."""
    cut = steps.accepted - trace.extra_tokens
    others = sum(count for ended, count in trace.ended_by.items() if ended != BY_ENGINE)
    share = f" ({100 * cut / steps.accepted:.1f} %)" if steps.accepted else ""
    why = (
        f"{steps.accepted} drafts accepted by the engine's counters, {trace.extra_tokens} in the chunks: "
        f"{cut}{share} were cut from last chunks"
    )
    if cut < 0:
        return Gate(value=cut, limit=None, passed=False, why=f"{why}: chunks hold more than was accepted")
    if others:
        why += f"; not judged, as {others} requests were ended by others than the engine, which then drafted on"
        return Gate(value=cut, limit=None, passed=True, why=why)
    limit = steps.num_spec_tokens * trace.records
    return Gate(value=cut, limit=limit, passed=cut <= limit, why=f"{why}; each request can lose K at its end")
