"""Account for every request of a capture, and judge the quality of the recording.

sent = HTTP-rejected + never admitted + engine records / n, by outcome. The lines of client and engine are compared
side by side in the order of their ids, sorted on the volume. The gates tell a trustworthy recording from one that
only parses.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec

from specdecode_operator.capture.files.formats import (
    AccountingEntry,
    ClientRecord,
    EngineCounters,
    Gate,
    Live,
    SegmentEntry,
    read_lines,
)
from specdecode_operator.capture.files.live import live_gates, unjudged_chunks
from specdecode_operator.capture.files.merge import read_client, scratch_database
from specdecode_operator.capture.files.totals import BY_ENGINE, SHORT_GAP_MS, StepTotals, TraceTotals
from specdecode_operator.capture.recorder.segment_format import ORDERED

_SHOWN: Final = 20
_UNADMITTED: Final = frozenset({"disconnected", "timed_out", "cancelled"})
_UNENDED: Final = frozenset({"abort", "unfinished"})


class EngineSide(msgspec.Struct, frozen=True):
    """The fields of a trace or aborted request that accounting needs."""

    request_id: str | None = None
    output_tokens: int = 0
    ended_by: str = BY_ENGINE


@dataclass(frozen=True)
class Mismatch:
    """A request whose client and engine records contradict each other."""

    request_id: str
    what: str


@dataclass
class Accounting:
    """The terms of the equation."""

    # As in the manifest
    sent: int = 0
    http_rejected: int = 0
    never_admitted: int = 0
    engine: Counter[str] = field(default_factory=Counter)
    records: int = 0
    not_sent: int = 0
    warmup: int = 0
    mismatches: int = 0
    shown: list[Mismatch] = field(default_factory=list)  # the first of them
    token_mismatches: int = 0  # requests for which the client and the engine counted different numbers of tokens

    @property
    def holds(self) -> bool:
        """Whether every request is accounted for."""
        return self.mismatches == 0

    @property
    def equation(self) -> str:
        """All terms in one line, with = only if it holds."""
        by_outcome = ", ".join(f"{outcome} {count}" for outcome, count in sorted(self.engine.items()))
        served = f"{sum(self.engine.values())} in the engine{f' ({by_outcome})' if by_outcome else ''}"
        terms = f"{self.http_rejected} HTTP-rejected + {self.never_admitted} never admitted + {served}"
        return f"{self.sent} sent {'=' if self.holds else '!='} {terms}"

    def entry(self) -> AccountingEntry:
        """Return the entry in the manifest."""
        values = {name: getattr(self, name) for name in AccountingEntry.__struct_fields__}
        return AccountingEntry(**values | {"engine": dict(sorted(self.engine.items()))})

    def add(self, key: str, clients: list[ClientRecord], records: list[EngineSide]) -> None:
        """Add all lines of one id."""
        if clients and clients[0].warmup:
            self.warmup += 1
            return
        self.records += len(records)
        if problem := self._take(clients, records):
            self.mismatches += 1
            if len(self.shown) < _SHOWN:
                self.shown.append(Mismatch(key, problem))

    def _take(self, clients: list[ClientRecord], records: list[EngineSide]) -> str | None:
        if not clients:
            return "the engine served it, but no client sent it"
        client = clients[0]
        if client.outcome == "not_sent":
            self.not_sent += 1
            return "the engine served it, but the client recorded it as not sent" if records else None
        self.sent += len(clients)
        if len(clients) > 1:
            return f"{len(clients)} lines of the client have this id"
        if not records:
            rejected = client.outcome == "http_rejected"
            never_admitted = client.outcome in _UNADMITTED and client.first_token_ms is None
            self.http_rejected += rejected
            self.never_admitted += never_admitted
            if rejected or never_admitted:
                return None
            return f"the client has {client.outcome} with {client.chunks} chunks, but the engine has no record"
        self.engine[client.outcome] += 1
        return self._contradiction(client, records)

    def _contradiction(self, client: ClientRecord, records: list[EngineSide]) -> str | None:
        if len(records) != client.n:
            return f"the engine has {len(records)} records for n = {client.n}"
        if client.outcome == "completed":
            ends = [record.ended_by for record in records]
            if unended := next((end for end in ends if end in _UNENDED), None):
                return f"the client received the whole answer, but the engine recorded {unended}"
            produced, reported = sum(record.output_tokens for record in records), client.completion_tokens
            if reported not in (None, produced) and all(end == BY_ENGINE for end in ends):
                self.token_mismatches += 1
        return None


_TABLES: Final = (
    "CREATE TABLE lines (id TEXT, is_engine INTEGER, line BLOB)",
    "CREATE INDEX in_order ON lines (id, is_engine)",
)
_ENGINE_SIDE: Final = msgspec.json.Decoder(EngineSide)
_CLIENT: Final = msgspec.json.Decoder(ClientRecord)


def account(client: Path, trace: Path, aborted: Path | None, scratch: Path) -> Accounting:
    """Return the equation of a capture, from its published files or their ``.part``.

    ``scratch`` is the folder to sort in.
    """
    accounting = Accounting()
    with scratch_database(scratch, "accounting", *_TABLES) as database:
        for found, text in read_client(client):
            database.execute("INSERT INTO lines VALUES (?, 0, ?)", (found.id, text))
        for path in (trace, aborted):
            for line in read_lines(path) if path else ():
                if line.number == 1 and line.text.startswith(b'{"meta"'):
                    continue
                with suppress(msgspec.DecodeError):  # validation reports it
                    side = _ENGINE_SIDE.decode(line.text)
                    row = (side.request_id or "", msgspec.json.encode(side))
                    database.execute("INSERT INTO lines VALUES (?, 1, ?)", row)
        rows = database.execute("SELECT id, is_engine, line FROM lines ORDER BY id, is_engine, rowid")
        for key, of_key in groupby(rows, itemgetter(0)):
            lines = [(is_engine, line) for _, is_engine, line in of_key]
            of_client = [_CLIENT.decode(line) for is_engine, line in lines if not is_engine]
            of_engine = [_ENGINE_SIDE.decode(line) for is_engine, line in lines if is_engine]
            accounting.add(key, of_client, of_engine)
    return accounting


SHORT_GAP_SHARE: Final = 0.002
"""Limit for stamps on receipt (vllm-vcr's own figure for its tap); engine stamps have no short gaps."""


def gates(
    trace: TraceTotals | None,
    steps: StepTotals | None,
    accounting: Accounting | None,
    segments: Sequence[SegmentEntry] | None,
    counters: EngineCounters | None = None,
) -> dict[str, Gate]:
    """Return every gate that the given files allow, by name."""
    found: dict[str, Gate] = {}
    steps = _recorded(steps)
    if accounting is not None:
        named = "; ".join(f"{each.request_id}: {each.what}" for each in accounting.shown)
        rest = accounting.mismatches - len(accounting.shown)
        more = f"; and {rest} more" if rest else ""
        found["accounting"] = _gate(
            accounting.mismatches, f"{accounting.equation}{f': {named}{more}' if named else ''}"
        )
        found["client_tokens"] = _none_of(
            accounting.token_mismatches,
            "requests for which the client and the engine counted different numbers of tokens",
        )
    if segments is not None:
        # The loss of a segment that did not end as ordered is not known.
        lost = sum(segment.dropped or 0 for segment in segments)
        unended = sum(segment.closed != ORDERED for segment in segments)
        interrupted = f"; {unended} of {len(segments)} segments were interrupted" if unended else ""
        why = f"{lost} lines lost, counted by the recorder{interrupted}"
        found["dropped"] = _gate(lost + unended, why)
    found |= _of_files(trace, steps)
    if trace is not None and steps is not None:
        found["step_counters"] = _step_counters(trace, steps)
    if steps is not None and counters is not None and counters.drafts is not None:
        found["engine_counters"] = _engine_counters(steps, counters)
    return found


def gates_of_live(
    trace: TraceTotals | None, steps: StepTotals | None, live: Live, segments: Sequence[SegmentEntry], aborted: int
) -> dict[str, Gate]:
    """Return every gate of a live capture that the given files allow, by name.

    Steps and chunks are compared without an upper limit: the steps also serve requests that were running when the
    window opened, which are not recorded. ``aborted`` is the number of lines in aborted.jsonl.
    """
    steps = _recorded(steps)
    found = live_gates(live, segments, trace, steps, aborted) | _of_files(trace, steps)
    if trace is not None and steps is not None:
        found["step_counters"] = _step_counters(
            trace, steps, unjudged=unjudged_chunks(live, segments), most="steps of older requests count too: no limit"
        )
    return found


def _recorded(steps: StepTotals | None) -> StepTotals | None:
    """Return the steps; None if none were recorded, as with record.stepStats: false, so that they prove nothing."""
    return steps if steps is not None and steps.steps else None


def _of_files(trace: TraceTotals | None, steps: StepTotals | None) -> dict[str, Gate]:
    """Return the gates that need no other source than trace and steps."""
    found: dict[str, Gate] = {}
    if trace is not None:
        found["short_gap_share"] = _short_gaps(trace)
        found["largest_chunk"] = _largest_chunk(trace, steps)
    if trace is not None or steps is not None:
        backward = (trace.backward if trace else 0) + (steps.backward if steps else 0)
        found["clock"] = _none_of(backward, "gaps, first tokens or steps that precede their predecessor")
    if steps is not None:
        found["per_position"] = _none_of(
            steps.inconsistent, "steps whose acceptance per position does not add up, or rises with the position"
        )
    return found


def missing_steps(trace: TraceTotals, steps: StepTotals | None) -> Gate:
    """Judge whether the requested steps were recorded; without any steps, the gates above would pass."""
    without = 0 if steps is not None and steps.steps else trace.records
    return _none_of(without, "requests without engine steps, although record.stepStats is on")


def _gate(value: float, why: str, limit: float | None = 0) -> Gate:
    return Gate(value=value, limit=limit, passed=limit is None or value <= limit, why=why)


def _none_of(count: int, what: str) -> Gate:
    return _gate(count, f"{count} {what}")


def _engine_counters(steps: StepTotals, counters: EngineCounters) -> Gate:
    """Compare the statistics of every step with the counters of the API servers."""
    of_steps = (steps.drafts, steps.draft_tokens, steps.accepted)
    of_metrics = (counters.drafts or 0, counters.draft_tokens or 0, counters.accepted_tokens or 0)
    apart = max(abs(here - there) for here, there in zip(of_steps, of_metrics, strict=True))
    return _gate(apart, f"drafts, drafted and accepted tokens: {of_steps} in the steps, {of_metrics} on /metrics")


def _short_gaps(trace: TraceTotals) -> Gate:
    share = trace.short_gaps / trace.gaps if trace.gaps else 0.0
    why = f"{trace.short_gaps} of {trace.gaps} gaps are below {SHORT_GAP_MS} ms, shorter than any step"
    return Gate(value=round(share, 6), limit=SHORT_GAP_SHARE, passed=share <= SHORT_GAP_SHARE, why=why)


def _largest_chunk(trace: TraceTotals, steps: StepTotals | None) -> Gate:
    """Find merged chunks: a step gives a request at most K accepted drafts and one token of the target."""
    k = (steps.num_spec_tokens if steps else 0) or (trace.meta.speculative or {}).get("num_speculative_tokens")
    without_drafts = steps is not None and trace.meta.speculative is None and trace.meta.schema is not None
    limit = int(k) + 1 if k else 1 if without_drafts else None
    why = "tokens in the largest chunk; one step produces at most K + 1" if limit else "K is not known: not judged"
    return _gate(trace.largest_chunk, why, limit)


def _step_counters(
    trace: TraceTotals, steps: StepTotals, *, unjudged: str | None = None, most: str | None = None
) -> Gate:
    """Compare accepted drafts with the chunks; ``unjudged`` is why they cannot be, and ``most`` why without a limit."""
    # Drafts are counted as accepted before max_tokens or a stop token cuts the last chunk, so a few are missing.
    cut = steps.accepted - trace.extra_tokens
    others = sum(count for ended, count in trace.ended_by.items() if ended != BY_ENGINE)
    share = f" ({100 * cut / steps.accepted:.1f} %)" if steps.accepted else ""
    why = (
        f"{steps.accepted} drafts accepted by the engine's counters, {trace.extra_tokens} in the chunks: "
        f"{cut}{share} were cut from the last chunks"
    )
    if unjudged is not None:
        return _gate(cut, f"{why}; not judged, because {unjudged}", None)
    if cut < 0:
        return Gate(value=cut, limit=None, passed=False, why=f"{why}: chunks contain more tokens than were accepted")
    if others:
        why += f"; not judged, because {others} requests were not ended by the engine, which then kept drafting"
        return _gate(cut, why, None)
    if most is not None:
        return _gate(cut, f"{why}; {most}", None)
    return _gate(cut, f"{why}; each request can lose K at its end", steps.num_spec_tokens * trace.records)
