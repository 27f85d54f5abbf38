"""Waiting for conditions, with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.1


def eventually(look: Callable[[], T | None], what: str, deadline_s: float = 30) -> T:
    """Return what ``look`` finds as soon as it finds something; fail with the last sight of it."""
    end = time.monotonic() + deadline_s
    last: object = None
    while time.monotonic() < end:
        try:
            found = look()
        except AssertionError as error:
            last = error
        else:
            if found:
                return found
            last = found
        time.sleep(POLL_S)
    message = f"not within {deadline_s:.0f} s: {what} (last: {last})"
    raise AssertionError(message)
