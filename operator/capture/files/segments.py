"""List, read and count the segments that the recorders of a capture wrote.

An engine that restarts writes new segments next to the old ones, so an older segment is interrupted, never
truncated. The segments of one start carry its start id. Without a start id, segments are grouped by API-server
index, which is unique per start.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from specdecode_operator.capture.files.formats import CaptureError, Line, read_lines
from specdecode_operator.capture.recorder.segment_format import Closed, Header, Off, SegmentLine

FOLDER: Final = "segments"
_PATTERN: Final = "segment-*.jsonl"
_TAIL_BYTES: Final = 64 * 1024
_DECODER: Final[msgspec.json.Decoder[SegmentLine]] = msgspec.json.Decoder(SegmentLine)


@dataclass(frozen=True)
class Torn:
    """The end of a segment that was cut off in the middle of a line."""

    path: Path
    line: int
    size_bytes: int  # of the incomplete line, which is left out


@dataclass(frozen=True)
class Segment:
    """One file of segments."""

    path: Path
    header: Header
    closed: Closed | None  # None if it was interrupted


def segment_paths(folder: Path) -> list[Path]:
    """Return the segments in a folder, by name."""
    return sorted(folder.glob(_PATTERN))


def read_segment(path: Path, torn: Callable[[Torn], None] = lambda _: None) -> Iterator[SegmentLine]:
    """Return the lines of one segment; a torn last line is left out and reported to `torn`.

    Raises
    ------
    CaptureError
        For any other line that cannot be read.
    """
    previous: Line | None = None
    for line in read_lines(path):
        if previous is not None:
            yield _decoded(path, previous)
        previous = line
    if previous is None:
        return
    if (last := _decoded_or_none(previous.text)) is None:
        torn(Torn(path, previous.number, len(previous.text)))
    else:
        yield last


def _decoded(path: Path, line: Line) -> SegmentLine:
    try:
        return _DECODER.decode(line.text)
    except msgspec.DecodeError as error:
        raise CaptureError(
            "SegmentUnreadable", f"{path.name}, line {line.number}: {error}: recorder and operator differ in version"
        ) from error


def list_segments(folder: Path) -> list[Segment]:
    """Return the segments that have a header, in order of their start; reads their first and last lines only."""
    found = [
        Segment(path, header, last_closed(path))
        for path in segment_paths(folder)
        if (header := first_header(path)) is not None
    ]
    return sorted(found, key=lambda segment: segment.header.monotonic_s)


def first_header(path: Path) -> Header | None:
    """Return the header of a segment; None until it is complete."""
    first = next(read_lines(path), None)
    if first is None:
        return None
    try:
        header = _DECODER.decode(first.text)
    except msgspec.ValidationError as error:
        raise CaptureError("SegmentUnreadable", f"{path.name}, line 1: {error}") from error
    except msgspec.DecodeError:
        return None
    return header if isinstance(header, Header) else None


def last_closed(path: Path) -> Closed | None:
    """Return the ``closed`` line of a segment, which is its last."""
    lines = [text for text in _tail(path) if text.strip()]
    last = _decoded_or_none(lines[-1]) if lines else None
    return last if isinstance(last, Closed) else None


def off_reason(path: Path) -> str | None:
    """Return why the recorder turned itself off, from the last lines of its segment."""
    found = (_decoded_or_none(text) for text in _tail(path))
    return next((line.reason for line in found if isinstance(line, Off)), None)


def _tail(path: Path) -> list[bytes]:
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return stream.read().split(b"\n")


def _decoded_or_none(text: bytes) -> SegmentLine | None:
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError:
        return None


def starts(segments: list[Segment]) -> list[list[Segment]]:
    """Return the segments by start of the engine, oldest first."""
    in_time = sorted(segments, key=lambda each: each.header.monotonic_s)
    if all(segment.header.start is not None for segment in in_time):
        by_id: dict[str | None, list[Segment]] = {}
        for segment in in_time:
            by_id.setdefault(segment.header.start, []).append(segment)
        return list(by_id.values())
    # A start begins where an index comes again; wrong if a start ended before all of its API servers began.
    found: list[list[Segment]] = []
    for segment in in_time:
        known = {each.header.client_index for each in found[-1]} if found else None
        if known is None or segment.header.client_index in known:
            found.append([])
        found[-1].append(segment)
    return found


def current_start(folder: Path) -> list[Segment]:
    """Return the segments of the engine's newest start; empty before the first one."""
    found = starts(list_segments(folder))
    return found[-1] if found else []


def recorders_closed(folder: Path) -> bool:
    """Whether every API server of the engine's newest start has written its last line."""
    current = current_start(folder)
    return bool(current) and len(current) == current[0].header.client_count and all(each.closed for each in current)


def boots(segments: list[Segment]) -> frozenset[str]:
    """Return the boot ids of segments, which change when the engine restarts."""
    return frozenset(segment.header.boot for segment in segments)


_REQUEST: Final = b'{"k":"request",'
"""How the recorder begins the line of a request: the tag is a line's first field."""

_PIECE_BYTES: Final = 2**20


class RecordedRequestCount:
    """Counts the lines of requests in growing segments, and reads each line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._count = 0

    def count(self) -> int:
        """Return the count; a file that cannot be read now is counted later."""
        with suppress(OSError):
            for path in segment_paths(self._folder):
                with path.open("rb") as stream:
                    stream.seek(self._offsets.get(path, 0))
                    torn = b""
                    # Up to the last line feed: the rest is an incomplete line.
                    while piece := stream.read(_PIECE_BYTES):
                        *lines, torn = (torn + piece).split(b"\n")
                        self._count += sum(line.startswith(_REQUEST) for line in lines)
                        self._offsets[path] = stream.tell() - len(torn)
        return self._count
