"""Read traces, from captures or other tools, as recordings: arrival, chunks and gaps of each request.

Traces are untrusted input. A line that breaks a rule, or a gap that is negative or longer than an hour, stops the
reader with file, line and fix. A capture of 100,000 requests has tens of millions of gaps, so numbers are stored in
arrays, 8 bytes each.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from specdecode_operator.capture.files import formats, trace_rules
from specdecode_operator.problems import printable

MOST_TOKENS_AT_ONCE: Final = 4096  # largest burst of tokens. Blocks of diffusion models have 256 at most
# An hour, in ms. A longer gap was not one engine step, and would stall a replay client.
LONGEST_GAP_MS: Final = 3_600_000.0
LONGEST_RUN_MS: Final = 1e13  # three hundred years, in ms: the limit of a time relative to a run's zero
_MOST_SUMMED_GAPS: Final = 2**20  # limit of itl_summary.count: a short line must not fill the memory
# Limit of a trace in memory, about 100 million gaps: gzip may compress lines a thousandfold.
MOST_HELD_BYTES: Final = 2**32
MOST_STEPS: Final = 2**25  # limit of a file of step statistics: four days of 10 ms steps
MOST_TOKENS: Final = 2**27  # limit of a prompt or an answer: ten times the largest context
_OBJECT_BYTES: Final = 1024  # memory of a request without its arrays, including replay state

_Decoded = TypeVar("_Decoded")

_RECORD: Final = msgspec.json.Decoder(formats.TraceRecord)


class RecordingError(Exception):
    """A recording that cannot be replayed. The message is one line with file, line, problem and fix."""


OnBadLine = Callable[[RecordingError], None]
"""Handler of a line that breaks a rule. It raises the error, or counts it and returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request with at least one token. Times are in ms since the recording's zero."""

    arrival_ms: float | None  # at the engine's client; None in recordings of a client's log
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    ttft_ms: float  # from arrival to the first chunk
    chunk_tokens: "array[int]"  # tokens of every chunk, the first included
    gaps_ms: "array[float]"  # before each chunk after the first: one fewer than chunks
    # Parallel to the gaps, if recorded: requests that ran after the step that closed the gap, and prompt tokens of the
    # requests whose first token came in that step.
    num_running: "array[int] | None" = None
    prefill_tokens: "array[int] | None" = None
    concurrency: int = 1  # requests in flight at arrival, this one included
    request_id: str | None = None
    engine: int = 0  # data-parallel rank
    phase: str | None = None
    temperature: float | None = None
    scheduled_ms: float | None = None  # when the engine first scheduled it
    preemptions: int = 0
    block_hashes: "array[int] | None" = None  # chained hashes of the prompt's full blocks
    token_ids: "array[int] | None" = None  # of the output, if recorded
    prompt_token_ids: "array[int] | None" = None  # if recorded
    finish_reason: str | None = None

    @property
    def output_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(self.chunk_tokens)

    @property
    def held_bytes(self) -> int:
        """Approximate memory in bytes."""
        arrays = (self.chunk_tokens, self.gaps_ms, self.num_running, self.prefill_tokens, self.block_hashes)
        tokens = (self.token_ids, self.prompt_token_ids)
        held = sum(len(each) * each.itemsize for each in (*arrays, *tokens) if each is not None)
        return held + len(self.request_id or "") + len(self.phase or "") + _OBJECT_BYTES

    @property
    def end_ms(self) -> float | None:
        """Time of the last token."""
        return None if self.arrival_ms is None else self.arrival_ms + self.ttft_ms + sum(self.gaps_ms)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Requests of one trace, in order of arrival; those without arrival come last, in the file's order."""

    trace: Path
    steps: Path | None  # step statistics beside the trace, if there are any
    meta: formats.TraceMeta
    requests: Sequence[RecordedRequest]
    skipped_lines: int = 0

    @cached_property
    def num_speculative_tokens(self) -> int:
        """K from the header, or the largest burst minus the target's own token; 0 without speculation."""
        # Without a header, bursts of one size are the blocks of a diffusion model, which does not draft.
        given = (self.meta.speculative or {}).get("num_speculative_tokens")
        if isinstance(given, int) and 0 < given < MOST_TOKENS_AT_ONCE:
            return given
        if self.meta.schema is not None and self.meta.speculative is None:
            return 0
        sizes = {tokens for each in self.requests for tokens in each.chunk_tokens[:-1]}
        if len(sizes) == 1 and all(each.chunk_tokens[-1] <= max(sizes) for each in self.requests):
            return 0
        # A first chunk also holds the tokens whose chunk sizes are unknown.
        bursts = (max(each.chunk_tokens[1:], default=1) for each in self.requests)
        return min(max(bursts, default=1), MOST_TOKENS_AT_ONCE) - 1


def _reject(error: RecordingError) -> None:
    raise RecordingError(f"{error}: fix it, or skip bad lines")


def read_recording(path: Path, *, skip_bad_lines: bool = False) -> Recording:
    """Read the recording in a capture's folder, or in a trace file; raise RecordingError if it is unusable."""
    trace = find_trace(path)
    meta, found, skipped, held_bytes = formats.TraceMeta(), list[RecordedRequest](), 0, 0

    def skip(error: RecordingError) -> None:
        nonlocal skipped
        if not skip_bad_lines:
            _reject(error)
        skipped += 1

    for line in read_requests(trace, skip):
        if isinstance(line, formats.TraceMeta):
            meta = line
        else:
            found.append(line)
            held_bytes += line.held_bytes
            if held_bytes > MOST_HELD_BYTES:
                raise RecordingError(
                    f"{printable(str(trace))}: more than {MOST_HELD_BYTES >> 20} MiB after {len(found)} requests: "
                    "split it, and use a part"
                )
    if not found:
        raise no_requests(trace)
    found.sort(key=lambda request: float("inf") if request.arrival_ms is None else request.arrival_ms)
    return Recording(trace=trace, steps=find_steps(trace), meta=meta, requests=found, skipped_lines=skipped)


def find_trace(path: Path) -> Path:
    """Return the trace in a capture's folder, or the path itself if it is a file."""
    trace = find_file(path, formats.TRACE) if path.is_dir() else path
    if trace is None or not trace.is_file():
        # In a capture with arms, each repetition is a separate recording.
        below = sorted(each for depth in ("*", "*/*") for each in path.glob(f"{depth}/{formats.TRACE}*"))
        name = f"one of those below it, such as {printable(str(below[0].parent))}" if below else "a capture's folder"
        raise RecordingError(f"{printable(str(path))}: holds no {formats.TRACE}: name {name} or a trace")
    return trace


def find_steps(trace: Path) -> Path | None:
    """Return the step statistics next to a trace, if there are any."""
    return find_file(trace.parent, formats.STEP_STATS)


def no_requests(trace: Path) -> RecordingError:
    """Return the error for a trace without requests."""
    return RecordingError(f"{printable(str(trace))}: has no request: record some load, or name another trace")


def read_requests(trace: Path, bad_line: OnBadLine) -> Iterator[formats.TraceMeta | RecordedRequest]:
    """Yield the header of a trace, if it has one, and its requests."""
    return _decoded(trace, _meta_or_request, bad_line)


def read_steps(path: Path, bad_line: OnBadLine = _reject) -> Iterator[trace_rules.StepLine]:
    """Yield the lines of step statistics. Errors are as in `read_requests`."""

    def step(line: formats.Line) -> trace_rules.StepLine:
        if line.number > MOST_STEPS:
            raise RecordingError(f"{printable(str(path))}: more than {MOST_STEPS} steps: split it, and use a part")
        return trace_rules.decode_step(line.text)

    return _decoded(path, step, bad_line)


def concatenated(recordings: list[Recording]) -> Recording:
    """Return several recordings of one engine as one, each starting a second after the end of the previous one."""
    reject_different(recordings)
    first = recordings[0]
    if len(recordings) == 1:
        return first
    requests, zero_ms = list[RecordedRequest](), 0.0
    for each in recordings:
        requests += [
            replace(
                request,
                arrival_ms=None if request.arrival_ms is None else request.arrival_ms + zero_ms,
                scheduled_ms=None if request.scheduled_ms is None else request.scheduled_ms + zero_ms,
            )
            for request in each.requests
        ]
        zero_ms = max((request.end_ms or 0.0 for request in requests), default=0.0) + 1000
    return replace(first, requests=requests, skipped_lines=sum(each.skipped_lines for each in recordings))


def reject_different(recordings: Sequence[Recording]) -> None:
    """Reject recordings of different engines."""
    first = recordings[0]
    for other in recordings[1:]:
        for name in ("model", "speculative"):
            mine, theirs = getattr(first.meta, name), getattr(other.meta, name)
            if mine != theirs:
                raise RecordingError(
                    f"{printable(str(other.trace))}: {name} is {printable(str(theirs))}, but "
                    f"{printable(str(mine))} in {printable(str(first.trace))}: use the traces separately"
                )
        k, other_k = first.num_speculative_tokens, other.num_speculative_tokens
        if k != other_k:
            raise RecordingError(
                f"{printable(str(other.trace))}: K is {other_k}, "
                f"but {k} in {printable(str(first.trace))}: use the traces separately"
            )


def find_file(folder: Path, name: str) -> Path | None:
    """Return a file of a folder, plain or compressed, if there is one."""
    return next((path for path in (folder / name, folder / f"{name}{formats.GZIP_SUFFIX}") if path.is_file()), None)


def _decoded(path: Path, decode: Callable[[formats.Line], _Decoded], bad_line: OnBadLine) -> Iterator[_Decoded]:
    shown = printable(str(path))
    try:
        for line in formats.read_lines(path):
            try:
                yield decode(line)
            except trace_rules.UnreadableLineError as error:
                bad_line(RecordingError(f"{shown}: line {line.number}: {printable(str(error))}"))
    except formats.NoTrailerError:
        return  # a killed writer left a torn line at the end, which is skipped
    except formats.BrokenGzipError as error:
        raise RecordingError(f"{shown}: {error}: fetch it again") from error
    except OSError as error:
        raise RecordingError(f"{shown}: cannot be read: {error.strerror}") from error


def _meta_or_request(line: formats.Line) -> formats.TraceMeta | RecordedRequest:
    return (
        trace_rules.decode_meta(line.text)
        if line.number == 1 and trace_rules.is_meta(line.text)
        else _request(line.text)
    )


def _request(text: bytes) -> RecordedRequest:
    record = trace_rules.decode_record(_RECORD, text)
    for broken in trace_rules.broken_rules(record):
        raise trace_rules.UnreadableLineError(broken.rule, broken.message)
    summary = record.itl_summary if record.itl_ms is None else None
    if summary is not None and summary.count > min(_MOST_SUMMED_GAPS, record.output_tokens):
        raise trace_rules.UnreadableLineError(
            "chunk-sum", f"itl_summary.count is {summary.count}, for {record.output_tokens} tokens"
        )
    gaps_ms = array("d", record.itl_ms or ())
    if summary is not None:
        gaps_ms = array("d", [summary.mean_ms]) * summary.count
    for value in chain((record.ttft_ms,), gaps_ms):
        if not 0 <= value <= LONGEST_GAP_MS:
            raise trace_rules.UnreadableLineError("time", f"a time of {value:g} ms: it must be between 0 and 1 hour")
    for time_ms in (record.arrival_ms, record.scheduled_ms):
        if time_ms is not None and not abs(time_ms) <= LONGEST_RUN_MS:
            raise trace_rules.UnreadableLineError(
                "time", f"a time stamp of {time_ms:g} ms: it must be within {LONGEST_RUN_MS:g} ms of 0"
            )
    if max(record.prompt_tokens, record.cached_tokens, record.output_tokens) > MOST_TOKENS:
        raise trace_rules.UnreadableLineError("tokens", f"more than {MOST_TOKENS:,} tokens in one request")
    # Without chunk sizes, each gap ends in one token and the first chunk gets the rest.
    sizes = record.itl_tokens if record.itl_tokens is not None else [1] * len(gaps_ms)
    first_chunk = record.output_tokens - sum(sizes)
    if first_chunk < 1:
        message = f"output_tokens is {record.output_tokens}, for {len(gaps_ms)} gaps"
        raise trace_rules.UnreadableLineError("chunk-sum", message)
    context = record.itl_ctx
    return RecordedRequest(
        arrival_ms=record.arrival_ms,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        ttft_ms=record.ttft_ms,
        chunk_tokens=array("I", [first_chunk, *sizes]),
        gaps_ms=gaps_ms,
        num_running=array("I", context.num_running) if context else None,
        prefill_tokens=array("I", context.prefill_tokens) if context else None,
        concurrency=record.concurrency,
        request_id=record.request_id,
        engine=record.engine or 0,
        phase=record.phase,
        temperature=record.temperature,
        scheduled_ms=record.scheduled_ms,
        preemptions=record.preemptions or 0,
        block_hashes=array("Q", record.block_hashes) if record.block_hashes else None,
        token_ids=array("I", record.output_token_ids) if record.output_token_ids else None,
        prompt_token_ids=array("I", record.prompt_token_ids) if record.prompt_token_ids else None,
        finish_reason=record.finish_reason,
    )
