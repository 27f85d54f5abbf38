"""Sorts lines that memory does not hold: sorted runs of bounded size on the volume, merged as they are read.

Memory is that of one run while lines are added, and of one line and one read buffer a run while they are read.
"""

import heapq
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

Key = float | str
Keyed = tuple[Key, bytes]

RUN_BYTES: Final = 8 * 2**20
_ENTRY_BYTES: Final = 200
"""What Python needs to hold one line beside its bytes."""
_MAX_RUNS: Final = 128
"""Files open at a time; more are first merged into one."""


class Sorter:
    """Takes lines with keys of one type and gives them back by key; equal keys keep their order.

    Parameters
    ----------
    folder
        Where the runs are written.
    name
        Their name, different for each sorter of the folder.
    run_bytes
        Memory for the lines of one run, if not `RUN_BYTES`.
    """

    def __init__(self, folder: Path, name: str, *, run_bytes: int | None = None) -> None:
        self._folder = folder
        self._name = name
        self._run_bytes = RUN_BYTES if run_bytes is None else run_bytes
        self._held: list[Keyed] = []
        self._held_bytes = 0
        self._runs: list[Path] = []
        self._written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, key: Key, line: bytes) -> None:
        """Take one line, without line feed."""
        self._held.append((key, line))
        self._held_bytes += len(line) + _ENTRY_BYTES
        if self._held_bytes >= self._run_bytes:
            self._spill()

    def __iter__(self) -> Iterator[Keyed]:
        """Return all lines by key."""
        self._held.sort(key=itemgetter(0))
        return heapq.merge(*map(_read, self._runs), iter(self._held), key=itemgetter(0))

    def close(self) -> None:
        """Remove the runs."""
        self._held.clear()
        for run in self._runs:
            run.unlink(missing_ok=True)
        self._runs.clear()

    def _spill(self) -> None:
        self._held.sort(key=itemgetter(0))
        run = self._write(iter(self._held))
        self._held.clear()
        self._held_bytes = 0
        self._runs.append(run)
        if len(self._runs) >= _MAX_RUNS:
            merged = self._write(heapq.merge(*map(_read, self._runs), key=itemgetter(0)))
            for old in self._runs:
                old.unlink()
            self._runs = [merged]

    def _write(self, lines: Iterator[Keyed]) -> Path:
        self._written += 1
        run = self._folder / f"{self._name}.run-{self._written}"
        with run.open("wb") as stream:
            for key, line in lines:
                # JSON holds no raw tab, so the first one ends the key.
                stream.write(msgspec.json.encode(key) + b"\t" + line + b"\n")
        return run


def _read(run: Path) -> Iterator[Keyed]:
    with run.open("rb") as stream:
        for text in stream:
            key, _, line = text.rstrip(b"\n").partition(b"\t")
            yield msgspec.json.decode(key, type=float | str), line
