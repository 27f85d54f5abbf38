"""Prompts of the shapes of an earlier capture's trace: its lengths, its common prefixes and its moments."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.api.capture_workload import CaptureWorkload, Pattern
from specdecode_operator.capture.files.formats import TRACE
from specdecode_operator.capture.files.lines import GZIP_SUFFIX, BrokenGzipError, NoTrailerError, read_lines
from specdecode_operator.capture.load.prompts.blocks import BlockPrompts, Said
from specdecode_operator.capture.load.prompts.datasets import BadDatasetError, Part, inside, parts_of
from specdecode_operator.capture.load.prompts.prompt import Prompt, TokenIds
from specdecode_operator.problems import printable

_USUAL_BLOCK_TOKENS: Final = 16
"""vLLM's, for a trace whose header does not say it."""

_MOST_HELD_BYTES: Final = 2**29
"""Of all shapes: a quarter of the memory that the containers with the operator's image have."""

_SHAPE_BYTES: Final = 256
"""Of one without its hashes."""

_AFTER_ONE_MOMENT_S: Final = 1.0
"""When a trace begins again whose requests all came at once."""

_NOTHING_SAID: Final = Said()

_Tokens = Annotated[int, Meta(ge=1, le=2**24)]
_Moment = Annotated[float, Meta(ge=-1e13, le=1e13)]


class Shape(Struct, frozen=True):
    """What a load takes of a record."""

    prompt_tokens: _Tokens
    output_tokens: _Tokens
    arrival_ms: _Moment | None = None
    block_hashes: Sequence[Annotated[int, Meta(ge=0)]] | None = None


class _Header(Struct):
    block_size: Annotated[int, Meta(ge=1, le=2**16)] | None = None


class _FirstLine(Struct):
    meta: _Header


@dataclass(frozen=True)
class Shapes:
    """Those of one trace, in order of arrival; the ones without a moment last."""

    path: Path
    block_size: int
    requests: Sequence[Shape]


_SHAPE: Final = msgspec.json.Decoder(Shape)
_FIRST_LINE: Final = msgspec.json.Decoder(_FirstLine)


def read_shapes(path: str, mount: Path) -> Shapes:
    """Return the shapes of a trace, or of the one in a capture's folder.

    Raises
    ------
    BadDatasetError
        It is not there, is no trace, or has no request.
    """
    trace = _trace(inside(mount, path))
    try:
        shapes = _read(trace)
    except OSError as error:
        raise BadDatasetError(f"{trace}: cannot be read: {error.strerror or error}") from error
    except (NoTrailerError, BrokenGzipError) as error:
        raise BadDatasetError(f"{trace}: {error}: copy it again") from error
    if not shapes.requests:
        raise BadDatasetError(f"{trace}: has no request: name the trace of another capture")
    return shapes


def _trace(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (TRACE, TRACE + GZIP_SUFFIX):
        if (path / name).is_file():
            return path / name
    raise BadDatasetError(f"{path}: holds no {TRACE}: name a capture's folder, as its status.path says it")


def _read(trace: Path) -> Shapes:
    block_size, held_bytes, found = _USUAL_BLOCK_TOKENS, 0, list[Shape]()
    for line in read_lines(trace):
        if line.number == 1 and (header := _header(line.text)) is not None:
            block_size = header.block_size or block_size
            continue
        try:
            shape = _SHAPE.decode(line.text)
            hashes = None if shape.block_hashes is None else array("Q", shape.block_hashes)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            why = printable(str(error))
            raise BadDatasetError(f"{trace}: line {line.number}: is no record of a trace ({why}): mend it") from error
        held_bytes += _SHAPE_BYTES + (0 if hashes is None else len(hashes) * hashes.itemsize)
        if held_bytes > _MOST_HELD_BYTES:
            raise BadDatasetError(
                f"{trace}: more than {_MOST_HELD_BYTES >> 20} MiB of lengths and hashes after {len(found)} requests:"
                " name a shorter trace"
            )
        found.append(Shape(shape.prompt_tokens, shape.output_tokens, shape.arrival_ms, hashes))
    found.sort(key=lambda each: float("inf") if each.arrival_ms is None else each.arrival_ms)
    return Shapes(trace, block_size, found)


def _header(text: bytes) -> _Header | None:
    try:
        return _FIRST_LINE.decode(text).meta
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class TraceSource:
    """Random tokens in the shapes of a trace, one request after the other.

    Prompts have in common the blocks that they had in common in the trace, within one run through it: a phase, or
    what comes after its end, meets no prompt of an earlier one, which the engine's prefix cache would know.
    """

    def __init__(self, shapes: Mapping[Part, Shapes], workload: CaptureWorkload, ids: TokenIds, seed: int) -> None:
        self._shapes = {phase: shapes[part] for phase, part in parts_of(workload).items()}
        for phase in workload.phases:
            if phase.pattern == Pattern.RECORDED:
                _refuse_without_moments(self._shapes[phase.name])
        self._ids, self._seed = ids, seed
        self._prompts = lru_cache(maxsize=8)(self._of_one_run)

    def first(self, phase: str, index: int) -> Prompt:
        """Return a prompt of the next shape."""
        run, place = divmod(index, len(self._shapes[phase].requests))
        return Prompt(self._prompts(phase, run).make(self._shapes[phase].requests[place], place, _NOTHING_SAID))

    def message(self, phase: str, index: int) -> Prompt:
        """Return a prompt of the next shape; the CRD's rules let no conversation ask."""
        return self.first(phase, index)

    def output_tokens(self, phase: str, index: int) -> int:
        """Return as many as the recorded answer had."""
        requests = self._shapes[phase].requests
        return requests[index % len(requests)].output_tokens

    def recorded_s(self, phase: str) -> Sequence[float]:
        """Return when each came after the first, and at the end when the trace begins again."""
        moments_ms = [each.arrival_ms for each in self._shapes[phase].requests if each.arrival_ms is not None]
        offsets_s = [(moment_ms - moments_ms[0]) / 1000 for moment_ms in moments_ms]
        # After the last one it waits as long as between two others on average.
        last_s, gaps = offsets_s[-1], len(offsets_s) - 1
        return [*offsets_s, last_s + (last_s / gaps if last_s else _AFTER_ONE_MOMENT_S)]

    def _of_one_run(self, phase: str, run: int) -> BlockPrompts:
        return BlockPrompts(self._ids, self._shapes[phase].block_size, f"{self._seed}/{phase}/{run}")


def _refuse_without_moments(shapes: Shapes) -> None:
    if any(each.arrival_ms is None for each in shapes.requests):
        raise BadDatasetError(
            f"{shapes.path}: has requests without arrival_ms, and a phase of pattern Recorded sends at their moments:"
            " name a capture's trace, or take another pattern"
        )
