"""Read the answers of two captures of one workload, and cut them into blocks of the same prompts."""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final, Literal

import msgspec

from specdecode_operator.capture.files.formats import (
    GZIP_SUFFIX,
    MANIFEST,
    PART_SUFFIX,
    TRACE,
    BrokenGzipError,
    Line,
    NoTrailerError,
    TraceMeta,
    TraceRecord,
    read_lines,
)
from specdecode_operator.capture.files.trace_rules import (
    UnreadableLineError,
    broken_rules,
    decode_meta,
    decode_record,
    is_meta,
)
from specdecode_operator.problems import printable

MOST_ANSWERS: Final = 100_000
"""Most answers of a record, a kilobyte each; more of them do not narrow an interval noticeably."""

_MOST_TOKENS: Final = 2**26
"""Tokens of all answers together, 4 bytes each: gzip packs a line of a hundred megabytes into some kilobytes."""

_LONGEST_MS: Final = 1e13
_RECORD: Final = msgspec.json.Decoder(TraceRecord)


class NotComparableError(Exception):
    """Two records cannot be compared, or one cannot be read."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """The answer to one request. Times are milliseconds since the record's zero."""

    prompt_tokens: int
    output_tokens: int
    arrival_ms: float
    ttft_ms: float
    end_ms: float
    concurrency: int
    temperature: float | None
    whole: bool
    token_ids: "array[int] | None"
    drafts: int = 0  # steps between its first and its last one, which may be cut short
    accepted: "array[int]" = field(default_factory=lambda: array("I"))  # number of these, by accepted draft position
    # Milliseconds and number of its steps without prefill, by the power of two of requests running.
    steps: dict[int, tuple[float, int]] = field(default_factory=dict)

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first one."""
        decoding_ms = self.end_ms - self.arrival_ms - self.ttft_ms
        return decoding_ms / (self.output_tokens - 1) if self.output_tokens > 1 else None


Request = tuple[int, str, int, int]
"""Repetition, phase, number of the request in the phase, and number of the answer if the request has several."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The answers of a capture, all its repetitions."""

    name: str
    meta: TraceMeta
    answers: dict[Request, Answer]
    is_cut: bool = False  # it has more answers than were read


def read_record(folders: Sequence[Path]) -> Record:
    """Return the answers of a capture: a folder for each repetition."""
    name = printable(str(folders[0]))
    meta: TraceMeta | None = None
    answers: dict[Request, Answer] = {}
    tokens = 0
    for repetition, folder in enumerate(folders):
        for line in _lines(folder):
            if isinstance(line, TraceMeta):
                meta = meta or line
                continue
            number = (line.request_id or "").rpartition("-")[2]
            if line.phase is None or line.arrival_ms is None or not (number.isascii() and number.isdigit()):
                continue  # not sent by the load generator
            answer = _answer(line)
            tokens += len(answer.token_ids or ())
            if len(answers) == MOST_ANSWERS or tokens > _MOST_TOKENS:
                return Record(name=name, meta=meta or TraceMeta(), answers=answers, is_cut=True)
            several = 0
            while (request := (repetition, line.phase, int(number[:9]), several)) in answers:
                several += 1
            answers[request] = answer
    if not answers and meta is not None and meta.block_hash is not None:
        raise NotComparableError(
            f"{name}: is a live capture, whose requests no other capture can repeat: name one that sends a load"
        )
    if not answers:
        raise NotComparableError(f"{name}: has no request of a workload: name the folder of a capture")
    return Record(name=name, meta=meta or TraceMeta(), answers=answers)


def repetitions_of(folder: Path) -> list[Path]:
    """Return the folders of a capture's repetitions: the folder itself, or those below it, of one arm."""
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
                message = f"{shown}: line {line.number}: {printable(str(error))}: record it again"
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


BLOCKS_OF_A_PHASE: Final = 32
_ROUNDS_OF_A_BLOCK: Final = 2
"""Requests per client, so that a block is longer than the effect of one request on the next."""

_OTHER_PROMPTS: Final = 0.02
"""Share of requests that may differ in the length of their prompt: conversations repeat answers."""

Pair = tuple[Answer | None, Answer | None]
Side = Literal[0, 1]
"""Index into a pair: the golden record, or the one that is judged."""


@dataclass(frozen=True)
class Block:
    """A run of requests of one phase, in both records."""

    phase: str
    pairs: Sequence[Pair]
    follows: Sequence[Pair] = ()  # pairs of the next block of the phase

    def answers(self, side: Side) -> list[Answer]:
        """Return the answers of one record."""
        return [answer for pair in self.pairs if (answer := pair[side]) is not None]

    def seconds(self, side: Side) -> float:
        """Return its duration, to the start of the next block."""
        own = self.answers(side)
        if not own:
            return 0.0
        later_ms = [answer.arrival_ms for pair in self.follows if (answer := pair[side]) is not None]
        end_ms = min(later_ms) if later_ms else max(each.end_ms for each in own)
        return max(0.0, end_ms - min(each.arrival_ms for each in own)) / 1000


def paired_blocks(golden: Record, found: Record) -> list[Block]:
    """Return the blocks of two records, of the requests that both came to, in the order of the workload."""
    ends: list[dict[tuple[int, str], int]] = [{}, {}]
    for end, record in zip(ends, (golden, found), strict=True):
        for repetition, phase, index, _ in record.answers:
            end[repetition, phase] = max(index, end.get((repetition, phase), -1))
    asked = sorted(
        request
        for request in golden.answers.keys() | found.answers.keys()
        if request[2] <= min(end.get(request[:2], -1) for end in ends)
    )
    pairs = {each: (golden.answers.get(each), found.answers.get(each)) for each in asked}
    both = [(one.prompt_tokens, other.prompt_tokens) for one, other in pairs.values() if one and other]
    if not both:
        raise NotComparableError(
            f"{golden.name} and {found.name}: have no request in common: take the second with the workload of the first"
        )
    different = sum(one != other for one, other in both)
    if different > max(1, _OTHER_PROMPTS * len(both)):
        raise NotComparableError(
            f"{golden.name} and {found.name}: {different} of {len(both)} prompts have another length: take the second"
            " with the workload and the seed of the first"
        )
    blocks: list[Block] = []
    for (_, phase), requests in groupby(asked, key=lambda request: request[:2]):
        cut = _cut([pairs[each] for each in requests])
        blocks += [Block(phase, own, later) for own, later in zip(cut, [*cut[1:], []], strict=True)]
    return blocks


def _cut(pairs: Sequence[Pair]) -> list[Sequence[Pair]]:
    """Cut a phase by its requests, independent of their answers."""
    at_once = median([max(each.concurrency for each in pair if each) for pair in pairs])
    size = max(math.ceil(_ROUNDS_OF_A_BLOCK * at_once), math.ceil(len(pairs) / BLOCKS_OF_A_PHASE))
    cut = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    if len(cut) > 1 and 2 * len(cut[-1]) < size:
        *cut, before, last = cut
        cut.append([*before, *last])
    return cut


def first_difference(one: "array[int]", other: "array[int]") -> int | None:
    """Return the index at which two answers differ; None if one is a prefix of the other."""
    both = enumerate(zip(one, other, strict=False))
    return next((place for place, (token, another) in both if token != another), None)
