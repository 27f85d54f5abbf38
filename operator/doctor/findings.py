"""What doctor finds, and what it could not see."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypeVar

Seen = TypeVar("Seen")


class Grade(StrEnum):
    """How bad a finding is."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the answer.

    Attributes
    ----------
    grade
        FAIL: no engine will serve like this; WARN: some will not, or it cannot be told.
    subject
        What was looked at, in a word or two.
    what
        What was found.
    fix
        What to do; empty where nothing is to be done.
    """

    grade: Grade
    subject: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Unread:
    """Something that could not be read.

    Attributes
    ----------
    why
        In words, such as ``you may not list nodes``.
    """

    why: str


Reading: TypeAlias = Seen | Unread
"""What was read of the cluster, or why it was not."""


def ok(subject: str, what: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(Grade.OK, subject, what)


def warn(subject: str, what: str, fix: str) -> Finding:
    """Return a finding that may do harm."""
    return Finding(Grade.WARN, subject, what, fix)


def fail(subject: str, what: str, fix: str) -> Finding:
    """Return a finding with which no engine will serve."""
    return Finding(Grade.FAIL, subject, what, fix)


def unseen(subject: str, reading: Unread) -> Finding:
    """Return a finding for what could not be read."""
    return warn(subject, f"cannot be told: {reading.why}", "run it as somebody who may, or ask them to")
