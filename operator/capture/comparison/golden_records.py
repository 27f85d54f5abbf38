"""The answers of a published capture, each under its request: two captures of one workload have the same requests."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from specdecode_operator.capture.files.formats import MANIFEST, PART_SUFFIX, TRACE, TraceMeta, TraceRecord
from specdecode_operator.capture.files.lines import GZIP_SUFFIX, BrokenGzipError, Line, NoTrailerError, read_lines
from specdecode_operator.capture.validation.rules import (
    UnreadableLineError,
    broken_rules,
    decode_meta,
    decode_record,
    is_meta,
)
from specdecode_operator.problems import printable

MOST_ANSWERS: Final = 100_000
"""Of a record, a kilobyte each; more of them make no interval narrower that matters."""

_MOST_TOKENS: Final = 2**26
"""Tokens of all answers together, 4 bytes each: gzip packs a line of a hundred megabytes into some kilobytes."""

_LONGEST_MS: Final = 1e13
_RECORD: Final = msgspec.json.Decoder(TraceRecord)


class NotComparableError(Exception):
    """Two records that say nothing of each other, or one that cannot be read: which, why and what to do."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of one request. Moments are milliseconds since the record's zero."""

    prompt_tokens: int
    output_tokens: int
    arrival_ms: float
    ttft_ms: float
    end_ms: float
    concurrency: int
    temperature: float | None
    whole: bool
    token_ids: "array[int] | None"
    drafts: int = 0
    """Steps between its first and its last one, which may be cut short."""

    accepted: "array[int]" = field(default_factory=lambda: array("I"))
    """How many of these gave the token at each position of the draft, too."""

    steps: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Milliseconds and number of its steps without a prompt in them, by the power of two of requests running."""


Request = tuple[int, str, int, int]
"""Repetition, phase, number of the request in it, and number of the answer where it asked for several."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The answers of a capture, all its repetitions."""

    name: str
    meta: TraceMeta
    answers: dict[Request, Answer]
    is_cut: bool = False
    """Whether it has more answers than were read."""


def read_record(folders: Sequence[Path]) -> Record:
    """Return the answers of a capture: a folder for each repetition.

    Raises
    ------
    NotComparableError
        One is not there, or cannot be read.
    """
    meta: TraceMeta | None = None
    answers: dict[Request, Answer] = {}
    tokens = 0
    for repetition, folder in enumerate(folders):
        for line in _lines(folder):
            if isinstance(line, TraceMeta):
                meta = meta or line
            elif (place := _place(line)) is not None:
                answer = _answer(line)
                tokens += len(answer.token_ids or ())
                if len(answers) == MOST_ANSWERS or tokens > _MOST_TOKENS:
                    return Record(name=_name(folders), meta=meta or TraceMeta(), answers=answers, is_cut=True)
                phase, index = place
                several = 0
                while (request := (repetition, phase, index, several)) in answers:
                    several += 1
                answers[request] = answer
    if not answers:
        raise NotComparableError(f"{_name(folders)}: has no request of a workload: name the folder of a capture")
    return Record(name=_name(folders), meta=meta or TraceMeta(), answers=answers)


def repetitions_of(folder: Path) -> list[Path]:
    """Return the folders of a capture's repetitions: the folder itself, or those below it, of one arm.

    Raises
    ------
    NotComparableError
        It holds none, or several arms.
    """
    if _trace(folder) is not None:
        return [folder]
    # An attempt that was killed just before it was published may have a manifest, too.
    found = [each.parent for each in folder.glob(f"**/{MANIFEST}") if PART_SUFFIX not in each.parent.name]
    found = [each for each in found if _trace(each) is not None]
    if not found:
        raise NotComparableError(f"{printable(str(folder))}: holds no capture: name the folder of a published one")
    if len({each.parent for each in found}) > 1:
        arms = ", ".join(printable(each) for each in sorted({each.parent.name for each in found})[:8])
        raise NotComparableError(f"{printable(str(folder))}: holds several arms ({arms}): name the folder of one")
    return sorted(found, key=lambda each: (len(each.name), each.name))


def _trace(folder: Path) -> Path | None:
    return next((each for each in (folder / TRACE, folder / f"{TRACE}{GZIP_SUFFIX}") if each.is_file()), None)


def _name(folders: Sequence[Path]) -> str:
    return printable(str(folders[0]))


def _place(record: TraceRecord) -> tuple[str, int] | None:
    """Return phase and number of a request; None for one that the load generator did not send."""
    number = (record.request_id or "").rpartition("-")[2]
    if record.phase is None or record.arrival_ms is None or not (number.isascii() and number.isdigit()):
        return None
    return record.phase, int(number[:9])


def _lines(folder: Path) -> Iterator[TraceMeta | TraceRecord]:
    path = _trace(folder)
    if path is None:
        raise NotComparableError(f"{printable(str(folder))}: holds no {TRACE}: name the folder of a published capture")
    shown = printable(str(path))
    try:
        for line in read_lines(path):
            try:
                yield _decoded(line)
            except UnreadableLineError as error:
                message = f"{shown}: line {line.number}: {printable(str(error))}: record it anew"
                raise NotComparableError(message) from error
    except (BrokenGzipError, NoTrailerError) as error:
        raise NotComparableError(f"{shown}: {error}: fetch it again") from error
    except OSError as error:
        raise NotComparableError(f"{shown}: cannot be read: {error.strerror}") from error


def _decoded(line: Line) -> TraceMeta | TraceRecord:
    if line.number == 1 and is_meta(line.text):
        return decode_meta(line.text)
    record = decode_record(_RECORD, line.text)
    for broken in broken_rules(record):
        raise UnreadableLineError(broken.rule, broken.message)
    times = (record.arrival_ms or 0.0, record.ttft_ms, *(record.itl_ms or ()))
    if not all(abs(each) <= _LONGEST_MS for each in times):
        raise UnreadableLineError("time", f"has a time beyond {_LONGEST_MS:g} ms")
    return record


def _answer(record: TraceRecord) -> Answer:
    gaps_ms, sizes = record.itl_ms or [], record.chunk_sizes()
    inner = sizes[1:-1]
    deepest = min(max(inner, default=1), 256) - 1
    context = record.itl_ctx
    steps: dict[int, tuple[float, int]] = {}
    for index, gap_ms in enumerate(gaps_ms):
        if context is not None and context.prefill_tokens[index]:
            continue
        running = context.num_running[index].bit_length() if context is not None else 0
        total_ms, count = steps.get(running, (0.0, 0))
        steps[running] = total_ms + gap_ms, count + 1
    arrival_ms = record.arrival_ms or 0.0
    ids = record.output_token_ids
    return Answer(
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        arrival_ms=arrival_ms,
        ttft_ms=record.ttft_ms,
        end_ms=arrival_ms + record.ttft_ms + sum(gaps_ms),
        concurrency=record.concurrency,
        temperature=record.temperature,
        whole=record.finish_reason in {"stop", "length"},
        token_ids=array("I", ids) if ids is not None else None,
        drafts=len(inner),
        accepted=array("I", [sum(size > position for size in inner) for position in range(1, deepest + 1)]),
        steps=steps,
    )
