"""Read the requests of a capture for an export."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from specdecode_operator.capture.files import formats
from specdecode_operator.capture.trace_reader import (
    RecordedRequest,
    RecordingError,
    find_file,
    no_requests,
    read_requests,
)
from specdecode_operator.problems import printable, some_of

_USUAL_BLOCK_TOKENS: Final = 16  # vLLM's default, for a trace without block_size
_MOST_BLOCK_TOKENS: Final = 2**16


class ExportError(Exception):
    """The capture cannot be exported in this format. The message is one line with the reason and a fix."""


@dataclass
class TraceRequests:
    """Requests of a trace in the file's order, with counts of those that are left out."""

    trace: Path
    phases: frozenset[str] = frozenset()
    meta: formats.TraceMeta = field(default_factory=formats.TraceMeta)
    other_phases: int = 0
    found: set[str] = field(default_factory=set)

    def requests(self) -> Iterator[RecordedRequest]:
        """Yield the requests of the phases. The header is known when the first request is."""
        read = 0
        for line in read_requests(self.trace, _reject):
            if isinstance(line, formats.TraceMeta):
                self.meta = line
                continue
            read += 1
            if line.phase is not None:
                self.found.add(line.phase)
            if self.phases and line.phase not in self.phases:
                self.other_phases += 1
                continue
            yield line
        if not read:
            raise no_requests(self.trace)
        if missing := sorted(self.phases - self.found):
            known = printable(some_of(sorted(self.found)) or "none")
            raise ExportError(
                f"--phase: {printable(missing[0])}: is not a phase of the capture: use one of its phases: {known}"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens in a block that is hashed."""
        size = self.meta.block_size or _USUAL_BLOCK_TOKENS
        if size > _MOST_BLOCK_TOKENS:
            raise ExportError(
                f"{printable(str(self.trace))}: block_size: {size}: exceeds the maximum of {_MOST_BLOCK_TOKENS}: "
                "correct the first line"
            )
        return size

    def left_out(self) -> Counter[str]:
        """Return the number of requests that no format has, by the reason."""
        found = Counter[str]()
        if self.other_phases:
            found["of other phases"] = self.other_phases
        aborted = find_file(self.trace.parent, formats.ABORTED)
        if aborted is not None and self.trace.name.startswith(formats.TRACE):
            with suppress(OSError, formats.NoTrailerError, formats.BrokenGzipError):
                if lines := sum(1 for _ in formats.read_lines(aborted)):
                    found[f"without a token ({formats.ABORTED}): their answers have no length"] = lines
        return found


def notes_of(left_out: Counter[str]) -> list[str]:
    """Return a note for each reason, such as "2 requests of other phases"."""
    return [f"{count(number, 'request')} {why}" for why, number in left_out.items()]


def count(number: int, what: str) -> str:
    """Return a number of things, such as "1 request"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _reject(error: RecordingError) -> NoReturn:
    raise RecordingError(f"{error}: fix it")
