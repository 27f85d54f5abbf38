"""Read the requests of an arm from client.jsonl, and its goodput per block of each phase.

Blocks hold the same requests for both arms of a pair.
"""

import math
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.api.capture import Pattern, Phase
from specdecode_operator.capture.comparison.arm_folders import Repetition, not_comparable
from specdecode_operator.capture.comparison.comparison_file import Slo
from specdecode_operator.capture.files.formats import (
    CLIENT,
    TRACE,
    BrokenGzipError,
    NoTrailerError,
    Outcome,
    read_lines,
)
from specdecode_operator.capture.files.validate import find

MOST_REQUESTS: Final = 5_000_000
"""Most requests of one client.jsonl: each takes 24 bytes while its arm is compared."""

_MOST_PHASES: Final = 64
_MOST_NUMBERS: Final = 100_000
"""Beyond it only every second number is kept, then every fourth, and so on: 50,000 give the same quantiles."""
_LONGEST_MS: Final = 1e12

Timestamp = Annotated[float, Meta(ge=-_LONGEST_MS, le=_LONGEST_MS)]
Duration = Annotated[float, Meta(ge=0, le=_LONGEST_MS)]
_Tokens = Annotated[int, Meta(ge=0, le=2**27)]


class _Request(Struct):
    """The needed fields of a line of client.jsonl."""

    phase: Annotated[str, Meta(max_length=64)]
    index: Annotated[int, Meta(ge=0, lt=MOST_REQUESTS)]
    outcome: Outcome
    warmup: bool = False
    sent_ms: Timestamp | None = None
    finished_ms: Timestamp | None = None
    ttft_ms: Duration | None = None
    latency_ms: Duration | None = None
    prompt_tokens: _Tokens | None = None
    max_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    temperature: float | None = None
    n: int = 1
    turn: int | None = None


_DECODER: Final = msgspec.json.Decoder(_Request)
_Line = TypeVar("_Line")


class Numbers:
    """Numbers to take quantiles of: an even sample of bounded size."""

    def __init__(self) -> None:
        self.kept = array("d")
        self._stride = 1
        self._seen = 0

    def add(self, number: float) -> None:
        """Add one."""
        if self._seen % self._stride == 0:
            self.kept.append(number)
            if len(self.kept) >= _MOST_NUMBERS:
                self.kept = self.kept[::2]
                self._stride *= 2
        self._seen += 1


@dataclass
class Sent:
    """Requests of a phase of one repetition, by their index."""

    sent_ms: "array[float]" = field(default_factory=lambda: array("d"))  # NaN if it was not sent
    ended_ms: "array[float]" = field(default_factory=lambda: array("d"))
    good_tokens: "array[int]" = field(default_factory=lambda: array("I"))  # of a whole answer within the SLO
    asked: "array[int]" = field(default_factory=lambda: array("I"))  # checksum of the request; 0 if not known

    def put(self, request: _Request, good_tokens: int) -> None:
        """Add a request; one that depends on earlier answers, or whose prompt was not counted, has no checksum."""
        at, missing = request.index, request.index + 1 - len(self.sent_ms)
        if missing > 0:
            self.sent_ms.extend([math.nan] * missing)
            self.ended_ms.extend([math.nan] * missing)
            self.good_tokens.extend([0] * missing)
            self.asked.extend([0] * missing)
        if request.sent_ms is not None:
            self.sent_ms[at] = request.sent_ms
            self.ended_ms[at] = request.sent_ms if request.finished_ms is None else request.finished_ms
        self.good_tokens[at] = good_tokens
        self.asked[at] = 0
        if not request.turn and request.prompt_tokens is not None:
            words = f"{request.prompt_tokens}/{request.max_tokens}/{request.temperature}/{request.n}"
            self.asked[at] = zlib.crc32(words.encode()) or 1

    def __len__(self) -> int:
        return len(self.sent_ms)


@dataclass
class PhaseSums:
    """A phase of one arm, over all repetitions."""

    outcomes: Counter[str] = field(default_factory=Counter)
    within_slo: int = 0
    output_tokens: int = 0
    good_tokens: int = 0
    seconds: float = 0.0
    latency_sum_ms: float = 0.0
    ttft_ms: Numbers = field(default_factory=Numbers)
    tpot_ms: Numbers = field(default_factory=Numbers)
    latency_ms: Numbers = field(default_factory=Numbers)

    def add(self, request: _Request, slo: Slo) -> int:
        """Add a request; return its tokens of goodput."""
        self.outcomes[request.outcome] += 1
        if request.sent_ms is not None and request.finished_ms is not None:
            self.latency_sum_ms += max(0.0, request.finished_ms - request.sent_ms)
        if request.outcome != "completed" or request.ttft_ms is None or request.latency_ms is None:
            return 0
        tokens = request.completion_tokens or 0
        tpot_ms = (request.latency_ms - request.ttft_ms) / (tokens - 1) if tokens > 1 else None
        self.output_tokens += tokens
        self.ttft_ms.add(request.ttft_ms)
        self.latency_ms.add(request.latency_ms)
        if tpot_ms is not None:
            self.tpot_ms.add(tpot_ms)
        asked = ((slo.ttft_ms, request.ttft_ms), (slo.tpot_ms, tpot_ms), (slo.latency_ms, request.latency_ms))
        if any(limit is not None and took is not None and took > limit for limit, took in asked):
            return 0
        self.within_slo += 1
        self.good_tokens += tokens
        return tokens


Spans = dict[str, tuple[float, float]]
"""Milliseconds of the first sending and the last end, by phase."""


def read_client_side(
    name: str, repetition: Repetition, slo: Slo, sums: dict[str, PhaseSums]
) -> tuple[dict[str, Sent], Spans]:
    """Return the requests of one repetition by phase with their time span, and add them to the sums of their arm."""
    by_phase: dict[str, Sent] = {}
    span_ms: Spans = {}
    room = 0
    for count, request in enumerate(decoded_lines(name, repetition, CLIENT, _DECODER), start=1):
        if count > MOST_REQUESTS:
            where = f"arm {name}, repetition {repetition.number}: {CLIENT}"
            raise not_comparable(f"{where} has more than {MOST_REQUESTS:,} requests: compare shorter captures")
        if request.warmup:
            continue
        if request.phase not in sums and len(sums) >= _MOST_PHASES:
            raise not_comparable(
                f"arm {name}: client.jsonl has more than {_MOST_PHASES} phases: fetch the capture again"
            )
        sent = by_phase.setdefault(request.phase, Sent())
        room += max(0, request.index + 1 - len(sent))
        if room > MOST_REQUESTS:
            raise not_comparable(
                f"arm {name}: client.jsonl has indices beyond {MOST_REQUESTS:,} in total: fetch the capture again"
            )
        sent.put(request, sums.setdefault(request.phase, PhaseSums()).add(request, slo))
        if request.sent_ms is not None and request.finished_ms is not None:
            first, last = span_ms.get(request.phase, (request.sent_ms, request.finished_ms))
            span_ms[request.phase] = (min(first, request.sent_ms), max(last, request.finished_ms))
    for phase, (first, last) in span_ms.items():
        sums[phase].seconds += max(0.0, last - first) / 1000
    return by_phase, span_ms


def decoded_lines(
    arm: str, repetition: Repetition, name: str, decoder: "msgspec.json.Decoder[_Line]"
) -> Iterator[_Line]:
    """Return the lines of a file but a trace's header; their number must be that in the manifest."""
    where = f"arm {arm}, repetition {repetition.number}: {name}"
    path = find(repetition.folder, name)
    if path is None:
        raise not_comparable(f"{where} not found: fetch the capture again")
    count = 0
    try:
        for line in read_lines(path):
            count += 1
            if name == TRACE and line.number == 1 and line.text.startswith(b'{"meta"'):
                continue
            try:
                decoded = decoder.decode(line.text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                message = f"{where}, line {line.number} cannot be read: {error}: fetch the capture again"
                raise not_comparable(message) from error
            yield decoded
    except (BrokenGzipError, NoTrailerError, EOFError) as error:
        raise not_comparable(f"{where} is cut off or damaged: {error}: fetch the capture again") from error
    except OSError as error:
        raise not_comparable(f"{where} cannot be read: {error.strerror}") from error
    entry = repetition.manifest.files.get(name)
    if entry is not None and entry.lines != count:
        raise not_comparable(f"{where} has {count:,} lines instead of {entry.lines:,}: fetch the capture again")


_BLOCKS: Final = 16
"""Approximate number of blocks of a phase in one repetition: two repetitions have three times a verdict's minimum."""

_FEWEST_OPEN: Final = 8
"""Requests of a block in phases that send at a rate."""

Pair = tuple[float, float]
"""Goodput of the baseline and of the candidate in one block, in tokens per second."""


def sends_at_a_rate(phase: Phase) -> bool:
    """Whether the load is independent of the speed of an arm."""
    return phase.pattern not in (Pattern.CLOSED, Pattern.MULTITURN)


def paired_blocks(phase: Phase, baseline: Sent, candidate: Sent) -> list[Pair]:
    """Return the goodput in the blocks of one repetition, over the requests that both arms came to."""
    requests = min(len(baseline), len(candidate))
    # Twice as many as run at once, so that most of a block lies beside no other one.
    fewest = _FEWEST_OPEN if phase.concurrency is None else 2 * phase.concurrency
    length = max(fewest, math.ceil(requests / _BLOCKS))
    starts = list(range(0, requests - length + 1, length)) or [0][: min(1, requests)]
    spans = list(zip(starts, [*starts[1:], requests], strict=True))
    pairs = zip(_goodputs(baseline, spans), _goodputs(candidate, spans), strict=True)
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def _goodputs(sent: Sent, spans: list[tuple[int, int]]) -> Iterator[float | None]:
    """Yield the goodput of each block, None if no request of it was sent. The last block runs to the end."""
    firsts = [
        min((each for each in sent.sent_ms[start:end] if not math.isnan(each)), default=None) for start, end in spans
    ]
    for place, (start, end) in enumerate(spans):
        first = firsts[place]
        until = next((each for each in firsts[place + 1 :] if each is not None), None)
        if until is None:
            until = max((each for each in sent.ended_ms[start:end] if not math.isnan(each)), default=None)
        seconds = 0.0 if first is None or until is None else (until - first) / 1000
        yield sum(sent.good_tokens[start:end]) / seconds if seconds > 0 else None


def differs_at(baseline: Sent, candidate: Sent) -> int | None:
    """Return the index of the first request that differs between two arms, if there is one."""
    both = enumerate(zip(baseline.asked, candidate.asked, strict=False))
    return next((index for index, (one, other) in both if one and other and one != other), None)
