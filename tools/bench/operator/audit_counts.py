"""Counts the requests of one user in the API server's audit log."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final

STATUS_WRITE: Final = "patch specdecodedeployments/status"
_LEASES: Final = " leases"
_READS: Final = ("get ", "list ", "watch ")
_COUNTED: Final = frozenset({"ResponseComplete", "Panic"})
"""Stages that count. A watch is logged when it starts and when it ends, and counts when it ends."""


class AuditCounts:
    """Counts of one user's requests, such as ``patch services``. Each read continues after the previous one."""

    def __init__(self, file: Path, user: str) -> None:
        self._file, self._user = file, user
        self._open: BinaryIO | None = None
        self._rest = b""
        self._counts: Counter[str] = Counter()
        self.server_s = 0.0
        """Time that the API server took for the requests, without watches and Leases."""

    def read(self) -> Counter[str]:
        """Return the counts of all requests so far."""
        while self._open is not None or self._file.exists():
            if self._open is None:
                self._open = self._file.open("rb")
            lines = (self._rest + self._open.read()).split(b"\n")
            self._rest = lines.pop()
            for call, took_s in calls(lines, self._user):
                self._counts[call] += 1
                if _LEASES not in call and not call.startswith("watch "):
                    self.server_s += took_s
            if self._file.exists() and self._file.stat().st_ino == _inode(self._open):
                break
            self._open.close()  # the API server rotates the file at 100 MB
            self._open = None
        return self._counts.copy()

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            self._open.close()


def calls(lines: Iterable[bytes], user: str) -> Iterator[tuple[str, float]]:
    """Yield each request of a user in an audit log, and the time that the API server took."""
    mark = f'"username":"{user}"'.encode()
    for line in lines:
        if mark not in line:
            continue
        event = json.loads(line)
        if event["stage"] in _COUNTED and event["user"]["username"] == user and "objectRef" in event:
            about = event["objectRef"]
            subresource = f"/{about['subresource']}" if about.get("subresource") else ""
            began, ended = (
                datetime.fromisoformat(event[key]) for key in ("requestReceivedTimestamp", "stageTimestamp")
            )
            yield f"{event['verb']} {about['resource']}{subresource}", (ended - began).total_seconds()


def about_objects(counts: Counter[str]) -> Counter[str]:
    """Return the calls without those for Leases."""
    return Counter({call: number for call, number in counts.items() if _LEASES not in call})


def writes(counts: Counter[str]) -> int:
    """Return the number of calls that write."""
    return sum(number for call, number in about_objects(counts).items() if not call.startswith(_READS))


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino
