"""Reads a capture into what its pictures need: sums of a bounded size, however long it ran."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from specdecode_operator.capture.files.formats import CLIENT, MANIFEST, TRACE, ClientRecord, TraceMeta
from specdecode_operator.capture.files.lines import GZIP_SUFFIX, BrokenGzipError, NoTrailerError, read_lines
from specdecode_operator.capture.validation.rules import UnreadableLineError, decode
from specdecode_operator.pictures.seen.client import ClientSums
from specdecode_operator.pictures.seen.identity import Identity, identify
from specdecode_operator.pictures.seen.requests import RequestSums
from specdecode_operator.pictures.seen.steps import StepSums
from specdecode_operator.problems import printable
from specdecode_operator.replay.recording.read import (
    RecordingError,
    find_steps,
    find_trace,
    no_requests,
    read_requests,
    read_steps,
)

_TRACES: Final = (TRACE, f"{TRACE}{GZIP_SUFFIX}")
_CLIENT: Final = msgspec.json.Decoder(ClientRecord)


@dataclass(kw_only=True)
class Capture:
    """What is drawn of one capture."""

    replayed: bool  # a replay of another one
    identity: Identity
    requests: RequestSums
    steps: StepSums | None  # None where there are no step statistics
    client: ClientSums | None  # None where nobody logged it
    warnings: list[str] = field(default_factory=list)

    @property
    def speculates(self) -> bool:
        """Whether anything shows that drafts were made."""
        drafted = self.steps is not None and self.steps.draft_tokens > 0
        return drafted or bool(self.requests.bursts[2:].any())

    @property
    def zero_ms(self) -> float:
        """What moments are shown since: the first arrival, so that captures lie over each other."""
        arrivals = np.asarray(self.requests.arrival_ms)
        known = arrivals[~np.isnan(arrivals)]
        return float(known.min()) if len(known) else 0.0

    @property
    def caption(self) -> str:
        """Its identity in one line."""
        words = self.identity.caption(len(self.requests))
        return f"{words} · replayed" if self.replayed else words


def captures_below(path: Path) -> list[Path]:
    """Return what is drawn as one each: a folder with a trace, the captures in a folder, or a trace of another name.

    Raises
    ------
    RecordingError
        There is none.
    """
    if path.is_file() and path.name in _TRACES:
        return [path.parent]
    if path.is_dir() and not any((path / name).is_file() for name in _TRACES):
        below = sorted(manifest.parent for manifest in path.rglob(MANIFEST))
        if below:
            return below
    return [path if path.is_dir() else find_trace(path)]


def read_capture(path: Path, *, replayed: bool = False) -> Capture:
    """Return a capture's sums; lines that cannot be read are left out, and said in its warnings.

    Raises
    ------
    RecordingError
        It has no trace, or no request that can be read.
    """
    trace, folder = find_trace(path), path if path.is_dir() else None
    bad = _BadLines()
    meta, requests = _requests(trace, bad)
    found = find_steps(trace) if folder else None
    steps = _steps(found, bad) if found else None
    client = _client(folder, bad) if folder else None
    identity, problem = identify(folder, meta, trace.name)
    if problem:
        bad.warnings.append(problem)
    return Capture(
        replayed=replayed,
        identity=identity,
        requests=requests,
        steps=steps,
        client=client,
        warnings=[printable(each) for each in bad.said()],
    )


class _BadLines:
    """Counts lines that break a rule, and keeps what is wrong with the first one."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.first: RecordingError | None = None
        self._count = 0

    def __call__(self, error: RecordingError) -> None:
        """Take one in."""
        self._count += 1
        self.first = self.first or error

    def said(self) -> list[str]:
        """Return the first one, and how many there are."""
        if not self._count:
            return self.warnings
        lines = f"{self._count:,} line{'s' * (self._count > 1)} that cannot be read left out, first {self.first}"
        return [*self.warnings, lines]


def _requests(trace: Path, bad: _BadLines) -> tuple[TraceMeta, RequestSums]:
    meta, requests = TraceMeta(), RequestSums()
    for line in read_requests(trace, bad):
        if isinstance(line, TraceMeta):
            meta = line
        else:
            requests.add(line)
    if not len(requests):
        raise bad.first or no_requests(trace)
    requests.flush()
    return meta, requests


def _steps(path: Path, bad: _BadLines) -> StepSums | None:
    steps = StepSums()
    for line in read_steps(path, bad):
        steps.add(line)
    steps.flush()
    return steps if steps.steps else None


def _client(folder: Path, bad: _BadLines) -> ClientSums | None:
    path = next((path for suffix in ("", GZIP_SUFFIX) if (path := folder / f"{CLIENT}{suffix}").is_file()), None)
    if path is None:
        return None
    client = ClientSums()
    try:
        for line in read_lines(path):
            try:
                client.add(decode(_CLIENT, line.text))
            except UnreadableLineError as error:
                bad(RecordingError(f"{path}: line {line.number}: {error}"))
    except (BrokenGzipError, NoTrailerError) as error:
        bad(RecordingError(f"{path}: {error}"))
    except OSError as error:
        bad(RecordingError(f"{path}: cannot be read: {error.strerror}"))
    return client
