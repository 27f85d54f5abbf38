"""One line of doctor's answer, and what could not be read."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypeVar

_Read = TypeVar("_Read")


class Grade(StrEnum):
    """FAIL: no engine will serve like this. WARN: some will not, or it cannot be told."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the answer: what was looked at, what was found, and what to do about it."""

    grade: Grade
    subject: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Unreadable:
    """Something that could not be read, and why, such as ``you may not list nodes``."""

    why: str


Reading: TypeAlias = _Read | Unreadable
"""What was read of the cluster, or why it was not."""


def ok(subject: str, what: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(Grade.OK, subject, what)


def warn(subject: str, what: str, fix: str) -> Finding:
    """Return a finding with which some engines will not serve."""
    return Finding(Grade.WARN, subject, what, fix)


def fail(subject: str, what: str, fix: str) -> Finding:
    """Return a finding with which no engine will serve."""
    return Finding(Grade.FAIL, subject, what, fix)


def unknown(subject: str, reading: Unreadable) -> Finding:
    """Return a finding for what could not be read."""
    return warn(subject, f"cannot be told: {reading.why}", "run it as somebody who may, or ask them to")


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
