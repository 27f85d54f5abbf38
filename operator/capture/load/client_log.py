"""Writes client.jsonl: every request as the load generator saw it."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from specdecode_operator.capture.files.formats import CLIENT, PART_SUFFIX, ClientRecord, encode

_SORTED_SUFFIX = ".sorted"


class _Place(NamedTuple):
    """Where a line lies in the file, and which in the order of sending it is."""

    sent_s: float
    offset: int
    length: int


class ClientLog:
    """The attempt's client.jsonl.part.

    A line is written when its request ends, so that no ended request is lost
    with the process. `close` then brings the lines into the order of sending.
    A thread writes, because the volume may be slow and the schedule must not
    wait for it.

    ``on_failure`` is called in the writing thread with the reason if a line cannot be written; nothing is kept from
    then on.
    """

    def __init__(self, folder: Path, on_failure: Callable[[str], None]) -> None:
        self.path = folder / (CLIENT + PART_SUFFIX)
        self._on_failure = on_failure
        self._lines: SimpleQueue[tuple[float, bytes] | None] = SimpleQueue()
        self._places: list[_Place] = []
        self._failure: str | None = None
        self._file = self.path.open("xb", buffering=0)
        self._thread = threading.Thread(target=self._write_all, name="client-log", daemon=True)
        self._thread.start()

    def add(self, sent_s: float, record: ClientRecord) -> None:
        """Write the line of a request that ended."""
        self._lines.put((sent_s, encode(record) + b"\n"))

    async def close(self) -> None:
        """Write what is left, and bring the lines into the order of sending; on disk when it returns.

        Raises
        ------
        OSError
            A line could not be written.
        """
        self._lines.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._failure is not None:
            raise OSError(self._failure)
        await asyncio.to_thread(self._sort)

    def _write_all(self) -> None:
        with self._file:
            while (line := self._lines.get()) is not None:
                if self._failure is None:
                    self._try(partial(self._write, *line))
            if self._failure is None:
                self._try(partial(os.fsync, self._file.fileno()))

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            self._failure = f"{self.path}: {error.strerror}"
            self._on_failure(self._failure)

    def _write(self, sent_s: float, line: bytes) -> None:
        offset = self._file.tell()
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, "the volume took only part of a line")
        self._places.append(_Place(sent_s, offset, len(line)))

    def _sort(self) -> None:
        sorted_path = self.path.with_name(self.path.name + _SORTED_SUFFIX)
        try:
            with self.path.open("rb") as source, sorted_path.open("wb") as target:
                for place in sorted(self._places):
                    source.seek(place.offset)
                    target.write(source.read(place.length))
                target.flush()
                os.fsync(target.fileno())
            sorted_path.replace(self.path)
        finally:
            sorted_path.unlink(missing_ok=True)
