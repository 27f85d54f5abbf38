"""Fetch a URL with a total deadline.

A socket timeout restarts with every byte, and a name lookup has no timeout. Each request therefore runs in a thread
that is abandoned after its deadline.
"""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from specdecode_operator.problems import printable, shown

DEADLINE_S: Final = 15
_USER: Final = re.compile(r"(?<=//)[^/?#]*@")

T = TypeVar("T")


class NoAnswerError(Exception):
    """No usable response; the message has the cause and the fix."""


class WrongAnswerError(NoAnswerError):
    """The response cannot be used, but other requests may succeed."""


def place_of(url: str) -> str:
    """Return a URL without user and password."""
    return shown(_USER.sub("", url))


def unreachable(url: str, error: BaseException) -> NoAnswerError:
    """Return the error about a URL that does not answer."""
    said = printable(_USER.sub("", str(error)))
    return NoAnswerError(f"{place_of(url)}: does not answer: {said}: is it up, and is this its URL?")


def in_time(url: str, ask: Callable[[int], T], deadline_s: int | None = None) -> T:
    """Call a function with a deadline in seconds, and return its result; raise NoAnswerError if it takes longer."""
    answer: Future[T] = Future()
    seconds = deadline_s or DEADLINE_S

    def wait() -> None:
        try:
            answer.set_result(ask(seconds))
        except Exception as error:  # noqa: BLE001  raised by the caller
            answer.set_exception(error)

    # A daemon thread that takes longer does not hold up the end of the process.
    threading.Thread(target=wait, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise NoAnswerError(f"{place_of(url)}: does not answer within {seconds} s: is it up, or overloaded?") from error
