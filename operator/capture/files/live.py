"""Put the segments of a live capture on one clock, number their engines, and account for their requests.

Every segment has times of its own host's CLOCK_MONOTONIC, and every pod calls its first engine 0. The merge needs one
clock and one number per engine. Linux slews CLOCK_MONOTONIC and CLOCK_REALTIME alike (time/timekeeping in the kernel),
so their difference on a host only changes when the wall clock is set. One reading per start of an engine therefore
places all of its times, and leaves the gaps between them exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, Final

import msgspec

from specdecode_operator.capture.files.config_hash import header_hash
from specdecode_operator.capture.files.formats import (
    DraftCounts,
    Gate,
    Live,
    LiveAccounting,
    LiveEngine,
    LiveLoss,
    LivePod,
    LiveSegment,
    LiveWindow,
    SegmentEntry,
)
from specdecode_operator.capture.files.segments import Segment
from specdecode_operator.capture.files.totals import StepTotals, TraceTotals
from specdecode_operator.capture.recorder.segment_format import ORDERED, Counters, Request, SegmentLine, Step, Tally
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

ALL_PERCENT: Final = 100

LONGEST_JUMP_S: Final = 0.1
"""Steps of a wall clock above this are reported."""

_LONGEST_REASON: Final = 300
_LATE_S: Final = 5.0
"""A recorder that starts later than this after the window opened has missed requests."""

_TALLIED: Final = Tally.__struct_fields__
_FINISHED, _TOKENS = "requests_finished", "generation_tokens"
_DRAFTED: Final = DraftCounts.__struct_fields__


@dataclass
class Source:
    """Facts about one segment, which the collector keeps while it writes it.

    ``began_s`` and ``ended_s`` are seconds of the collector's CLOCK_MONOTONIC.
    """

    segment: Segment
    pod: str
    uid: str
    node: str
    began_s: float
    ended_s: float = 0.0
    requests: int = 0
    steps: int = 0
    finished: int = 0  # requests that ended in the engine
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    first: Counters | None = None  # vLLM's own counters when it was armed
    last: Counters | None = None
    tally: Tally | None = None
    off: str | None = None  # why the recorder turned itself off
    interrupted: str | None = None  # why it has no last line
    # Wall clock minus monotonic clock of the host, in seconds: first reading, and the extremes.
    offset_s: float = 0.0
    least_offset_s: float = 0.0
    largest_offset_s: float = 0.0

    @property
    def start(self) -> tuple[str, str]:
        """Identify the start of the engine: all of its processes have the same clock."""
        header = self.segment.header
        return self.pod, header.start or header.boot

    @property
    def process(self) -> tuple[str | None, int]:
        """Identify the process of the API server in its pod: each has its own counters."""
        return self.segment.header.start, self.segment.header.pid

    @property
    def growth(self) -> dict[str, float] | None:
        """Growth of vLLM's own counters while it was recorded; None if a reading is missing."""
        return None if self.first is None or self.last is None else grown(self.first, self.last)

    def entry(self) -> SegmentEntry:
        """Return the entry in the manifest."""
        header, closed = self.segment.header, self.segment.closed
        counts = ("requests", "steps", "dropped", "unfinished")
        return SegmentEntry(
            boot=header.boot,
            client_index=header.client_index,
            closed=closed.reason if closed else None,
            live=LiveSegment(
                pod=self.pod,
                requests=self.requests,
                steps=self.steps,
                counts=DraftCounts(
                    drafts=self.drafts, draft_tokens=self.draft_tokens, accepted_tokens=self.accepted_tokens
                ),
                errors=closed.errors if closed else 0,
                tally=None if self.tally is None else msgspec.structs.asdict(self.tally),
                counters=self.growth,
                interrupted=self.interrupted,
            ),
            **({name: getattr(closed, name) for name in counts} if closed else {}),
        )


def grown(first: Counters, last: Counters) -> dict[str, float]:
    """Return the growth of the counters that both readings have."""
    return {name: last.values[name] - first.values[name] for name in first.values if name in last.values}


@dataclass(frozen=True)
class Placement:
    """Converts the lines of one segment."""

    pod: str
    shift_s: float  # added to a time of its host, gives seconds since the capture's zero
    engines: Mapping[int, int]  # running number of each engine of its pod

    def place(self, line: SegmentLine) -> SegmentLine:
        """Return a line on the capture's clock, with the capture's number of its engine."""
        if isinstance(line, Request):
            return self._request(line)
        if isinstance(line, Step):
            return msgspec.structs.replace(line, engine=self.engines[line.engine], t=line.t + self.shift_s)
        return line

    def _request(self, line: Request) -> Request:
        shift_s = self.shift_s
        return msgspec.structs.replace(
            line,
            engine=None if line.engine is None else self.engines[line.engine],
            arrival_monotonic_s=line.arrival_monotonic_s + shift_s,
            queued_s=None if line.queued_s is None else line.queued_s + shift_s,
            scheduled_s=None if line.scheduled_s is None else line.scheduled_s + shift_s,
            chunk_s=[stamp_s + shift_s for stamp_s in line.chunk_s],
        )


@dataclass
class Recorded:
    """A live capture before its merge."""

    sources: Sequence[Source]
    pods: Sequence[LivePod]
    window: LiveWindow
    sample_percent: int
    zero_s: float  # the window's start on the collector's monotonic clock
    notes: Sequence[str] = ()

    @cached_property
    def engines(self) -> list[LiveEngine]:
        """Return the engines of all pods, in the order of the pods, with a number for each."""
        order = {pod.pod: place for place, pod in enumerate(self.pods)}
        found: dict[tuple[str, int], LiveEngine] = {}
        for source in sorted(self.sources, key=lambda each: (order[each.pod], each.began_s)):
            digest = header_hash(source.segment.header)
            for index in source.segment.header.engines:
                engine = LiveEngine(
                    engine=len(found), pod=source.pod, node=source.node or None, index=index, config_hash=digest
                )
                found.setdefault((source.pod, index), engine)
        return list(found.values())

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Return how to convert the lines of each segment, by the name of its file."""
        firsts = _first_of_starts(self.sources)
        return {
            source.segment.path.name: Placement(
                pod=source.pod,
                shift_s=firsts[source.start].offset_s - self.window.started_wall_s,
                engines={each.index: each.engine for each in self.engines if each.pod == source.pod},
            )
            for source in self.sources
        }

    def entries(self) -> list[SegmentEntry]:
        """Return the entries of all segments in the manifest."""
        return [source.entry() for source in self.sources]

    def live(self, records: int) -> Live:
        """Return the part of the manifest; ``records`` is the number of lines of requests in the files."""
        return Live(
            window=self.window,
            sample_percent=self.sample_percent,
            pods=list(self.pods),
            engines=list(self.engines),
            lost=list(self._lost()),
            accounting=_accounting(self.sources, records),
            clock_uncertainty_ms=self._clock_uncertainty_ms(),
        )

    def _lost(self) -> Iterable[LiveLoss]:
        in_time = sorted(self.sources, key=lambda each: each.began_s)
        known: set[tuple[str, int]] = set()
        for place, source in enumerate(in_time):
            header = source.segment.header
            who: dict[str, Any] = {"pod": source.pod, "client_index": header.client_index}
            late_s = source.began_s - self.zero_s
            if (source.pod, header.client_index) not in known and late_s > _LATE_S:
                yield LiveLoss(**who, reason=f"joined {late_s:.0f} s after the window opened", seconds=round(late_s, 3))
            known.add((source.pod, header.client_index))
            if source.interrupted is not None:
                same = (
                    each
                    for each in in_time[place + 1 :]
                    if (each.pod, each.segment.header.client_index) == (source.pod, header.client_index)
                )
                yield _gap(source, next(same, None), who)
            elif source.off is not None:
                yield LiveLoss(**who, reason=f"the recorder turned itself off: {source.off}")
            elif source.segment.closed is not None and source.segment.closed.reason != ORDERED:
                yield LiveLoss(**who, reason=f"the recorder ended with the reason {source.segment.closed.reason}")
            closed = source.segment.closed
            if source.tally is not None and closed is not None and closed.dropped:
                errors = f", of which {closed.errors} by errors, first {closed.first_error}" if closed.errors else ""
                reason = f"the recorder dropped {closed.dropped} lines of requests and steps{errors}"
                yield LiveLoss(**who, reason=clip(printable(reason), _LONGEST_REASON), requests=source.tally.dropped)

    def _clock_uncertainty_ms(self) -> float | None:
        bounds = [pod.clock_ahead_ms for pod in self.pods if pod.clock_ahead_ms is not None]
        if not bounds:
            return None
        return round(max((abs(one[1] - other[0]) for one, other in permutations(bounds, 2)), default=0.0), 3)

    def all_notes(self, live: Live) -> list[str]:
        """Return what a reader should know: losses, clocks, engines that differ, and pods that are missing."""
        notes = list(self.notes)
        notes += [f"pod {pod.pod} was not recorded: {pod.missing}" for pod in self.pods if pod.missing is not None]
        notes += [loss_text(each) for each in live.lost]
        notes += list(_missing_servers(self.sources))
        notes += list(_jumps(self.sources))
        if len({engine.config_hash for engine in self.engines}) > 1:
            notes.append("the engines have different settings: compare config_hash in live.engines of the manifest")
        if live.window.ended_by == "deadline":
            wanted = f" of {live.window.requests} requests" if live.window.requests else ""
            notes.append(f"the window ended at the deadline, after {live.accounting.recorded}{wanted}")
        if self.sample_percent < ALL_PERCENT:
            notes.append(
                f"{self.sample_percent} % of the requests are recorded: concurrency and prefill_tokens are those that"
                " each API server knows"
            )
        return notes


def loss_text(loss: LiveLoss) -> str:
    """Return a loss in one line."""
    size = "an unknown number of requests" if loss.requests is None else f"{loss.requests} requests"
    tokens = "" if loss.tokens is None else f" with {loss.tokens} tokens"
    gap = "" if loss.seconds is None else f", in {loss.seconds:.0f} s"
    return f"pod {loss.pod}, API server {loss.client_index}: {size}{tokens} not recorded{gap}: {loss.reason}"


def _gap(source: Source, following: Source | None, who: Mapping[str, Any]) -> LiveLoss:
    reason = source.interrupted or ""
    if following is None:
        return LiveLoss(**who, reason=reason)
    seconds = round(following.began_s - source.ended_s, 3)
    if source.first is None or following.first is None:
        return LiveLoss(**who, reason=reason, seconds=seconds)
    growth = grown(source.first, following.first)
    if source.process != following.process or min(growth.values(), default=0) < 0:
        return LiveLoss(**who, reason=f"{reason}; the engine restarted", seconds=seconds)

    def left(name: str, recorded: int) -> int | None:
        return max(0, round(growth[name]) - recorded) if name in growth else None

    return LiveLoss(
        **who,
        reason=reason,
        seconds=seconds,
        requests=left(_FINISHED, source.finished),
        tokens=left(_TOKENS, source.generated_tokens),
    )


def _first_of_starts(sources: Sequence[Source]) -> dict[tuple[str, str], Source]:
    found: dict[tuple[str, str], Source] = {}
    for source in sorted(sources, key=lambda each: each.segment.header.monotonic_s):
        found.setdefault(source.start, source)
    return found


def _jumps(sources: Sequence[Source]) -> Iterable[str]:
    """Yield a note for each start of an engine during which the wall clock of its host was set."""
    for start, first in _first_of_starts(sources).items():
        same = [each for each in sources if each.start == start]
        largest_s = max(
            (apart_s for each in same for apart_s in (each.least_offset_s, each.largest_offset_s)),
            key=lambda offset_s: abs(offset_s - first.offset_s),
        )
        if abs(jump_s := largest_s - first.offset_s) > LONGEST_JUMP_S:
            whose = f"pod {first.pod}{f' (node {first.node})' if first.node else ''}"
            yield f"the clock of {whose} jumped by {jump_s:+.3f} s: its times follow the clock before that"


def _missing_servers(sources: Sequence[Source]) -> Iterable[str]:
    servers: dict[tuple[str, str], set[int]] = {}
    counts: dict[tuple[str, str], int] = {}
    for source in sources:
        servers.setdefault(source.start, set()).add(source.segment.header.client_index)
        counts[source.start] = source.segment.header.client_count
    for start, found in servers.items():
        if len(found) < counts[start]:
            yield f"{len(found)} of {counts[start]} API servers of pod {start[0]} recorded"


def _accounting(sources: Sequence[Source], records: int) -> LiveAccounting:
    tallies = [source.tally for source in sources if source.tally is not None]
    sums = {name: sum(getattr(tally, name) for tally in tallies) for name in _TALLIED}
    holds = sums["admitted"] == sums["recorded"] + sums["sampled_out"] + sums["dropped"]
    terms = f"{sums['recorded']} recorded + {sums['sampled_out']} sampled out + {sums['dropped']} dropped"
    return LiveAccounting(
        **sums, records=records, equation=f"{sums['admitted']} admitted {'=' if holds else '!='} {terms}"
    )


def live_gates(
    live: Live,
    segments: Sequence[SegmentEntry],
    trace: TraceTotals | None,
    steps: StepTotals | None,
    aborted: int,
) -> dict[str, Gate]:
    """Return the gates that hold a live capture against the recorders' tallies and vLLM's own counters.

    ``aborted`` is the number of lines in aborted.jsonl. Interrupted segments have no tally, so only their lines count.
    """
    parts = [each.live for each in segments if each.live is not None]
    problems = list(_unaccounted(live, parts, trace, aborted))
    wrong = sum(count for count, _ in problems)
    named = "; ".join(what for _, what in problems)
    found = {"accounting": _exact(wrong, f"{live.accounting.equation}{f': {named}' if named else ''}")}
    for gate, tallied, counter in (
        ("finished_requests", "finished", _FINISHED),
        ("generated_tokens", "generated_tokens", _TOKENS),
    ):
        pairs = [
            (part.tally[tallied], part.counters[counter], part)
            for part in parts
            # After an error in a hook, the recorder's own counts are not known to be right.
            if part.tally is not None and part.counters is not None and counter in part.counters and not part.errors
        ]
        apart = {part.pod: abs(own - of_vllm) for own, of_vllm, part in pairs if own != of_vllm}
        own, of_vllm = sum(own for own, _, _ in pairs), sum(of_vllm for _, of_vllm, _ in pairs)
        where = f", in pods {', '.join(sorted(apart))}" if apart else ""
        if pairs:
            what = tallied.replace("_", " ")
            found[gate] = _exact(
                sum(apart.values()), f"{what}: {own} by the recorders, {of_vllm:.0f} by vLLM's counters{where}"
            )
    if steps is not None:
        found |= _drafting(segments, steps)
    lost = sum(each.dropped or 0 for each in segments)
    unended = sum(each.closed != ORDERED for each in segments)
    why = f"{lost} lines lost, counted by the recorders; {unended} of {len(segments)} segments were interrupted"
    found["dropped"] = Gate(value=lost + unended, limit=None, passed=True, why=f"{why}: see live.lost of the manifest")
    return found


def _unaccounted(
    live: Live, parts: Sequence[LiveSegment], trace: TraceTotals | None, aborted: int
) -> Iterable[tuple[int, str]]:
    for part in parts:
        if (tally := part.tally) is None:
            continue
        apart = tally["admitted"] - tally["recorded"] - tally["sampled_out"] - tally["dropped"]
        if apart:
            yield abs(apart), f"pod {part.pod} admitted {tally['admitted']} requests, {apart:+d} unaccounted for"
        if tally["recorded"] != part.requests:
            yield (
                abs(tally["recorded"] - part.requests),
                f"pod {part.pod} recorded {tally['recorded']} requests, of which {part.requests} arrived",
            )
    lines = sum(part.requests for part in parts)
    written = live.accounting.records if trace is None else trace.records + aborted
    if lines != written:
        yield abs(lines - written), f"{lines} requests arrived, and {written} are in the files"


def _drafting(segments: Sequence[SegmentEntry], steps: StepTotals) -> dict[str, Gate]:
    """Compare the statistics of the steps with vLLM's counters, in each API server and in the files.

    A recorder that dropped lines is left out, since steps are among them.
    """
    parts = [each.live for each in segments if each.live is not None]
    in_files = (steps.drafts, steps.draft_tokens, steps.accepted)
    names = _DRAFTED
    arrived = tuple(sum(getattr(part.counts, name) for part in parts) for name in names)
    apart = max(abs(here - there) for here, there in zip(in_files, arrived, strict=True))
    whole = [each.live for each in segments if each.live is not None and each.dropped == 0]
    counted = [part for part in whole if part.counters is not None and "drafts" in part.counters]
    for part in counted:
        growth = part.counters or {}
        apart = max(apart, *(abs(getattr(part.counts, name) - round(growth.get(name, 0))) for name in names))
    if not counted:
        return {}
    own = tuple(sum(getattr(part.counts, name) for part in counted) for name in names)
    of_vllm = tuple(round(sum((part.counters or {}).get(name, 0) for part in counted)) for name in names)
    return {
        "engine_counters": _exact(
            apart,
            f"drafts, drafted and accepted tokens: {own} in the steps, {of_vllm} by vLLM's counters of the same API"
            f" servers; {arrived} arrived, and {in_files} are in the files",
        )
    }


def _exact(value: float, why: str) -> Gate:
    return Gate(value=value, limit=0, passed=value == 0, why=why)


def unjudged_chunks(live: Live, segments: Sequence[SegmentEntry]) -> str | None:
    """Return why the steps of a live capture cannot be compared with its chunks; None if they can."""
    if live.sample_percent < ALL_PERCENT:
        return f"only {live.sample_percent} % of the requests are recorded"
    if canaries := live.accounting.sampled_out:
        return f"{canaries} canary prompts of the operator are not recorded"
    if live.lost:
        return "requests were lost"
    if len(segments) > len(live.pods):
        return "API servers that share an engine do not start at the same step"
    return None
