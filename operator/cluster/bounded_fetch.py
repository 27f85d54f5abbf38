"""Fetch a URL with a total deadline and a size limit.

A socket timeout restarts with every byte, and a name lookup has no timeout. Each request therefore runs in a thread
that is abandoned after its deadline.
"""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

import httpx

from specdecode_operator.problems import printable, shown

DEADLINE_S: Final = 15
MOST_BYTES: Final = 4 * 2**20
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


def fetch(url: str) -> bytes:
    """Return the content of a URL, without redirections or decompression, or raise NoAnswerError."""
    return in_time(url, partial(_read, url))


def _read(url: str, seconds: int) -> bytes:
    content = bytearray()
    try:
        with httpx.stream("GET", url, headers={"Accept-Encoding": "identity"}, timeout=seconds) as response:
            if response.status_code != httpx.codes.OK:
                raise NoAnswerError(f"{place_of(url)}: answers with HTTP {response.status_code}: is this its URL?")
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise NoAnswerError(f"{place_of(url)}: answers with more than {MOST_BYTES} bytes")
    except httpx.TimeoutException as error:
        raise TimeoutError from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(url, error) from error
    return bytes(content)
