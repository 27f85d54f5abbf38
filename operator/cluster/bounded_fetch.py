"""Fetch a URL with a total deadline and a size limit.

A socket timeout restarts with every byte, and a name lookup has no timeout. Each request therefore runs in a thread
that is abandoned after its deadline.
"""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

import httpx

from specdecode_operator.problems import printable, shown

DEADLINE_S: Final = 15
MOST_BYTES: Final = 4 * 2**20
_USER: Final = re.compile(r"(?<=//)[^/?#]*@")

T = TypeVar("T")


class NoAnswerError(Exception):
    """Nothing usable came; the message says what, and what to do."""


class WrongAnswerError(NoAnswerError):
    """It answered, but not what it was asked: another question may be answered."""


def place_of(url: str) -> str:
    """Return a URL as it may be shown: without a user and a password."""
    return shown(_USER.sub("", url))


def unreachable(url: str, error: BaseException) -> NoAnswerError:
    """Return what is said of a URL where nobody answers."""
    said = printable(_USER.sub("", str(error)))
    return NoAnswerError(f"{place_of(url)}: does not answer: {said}: is it up, and is this its URL?")


def in_time(url: str, ask: Callable[[int], T], deadline_s: int | None = None) -> T:
    """Return what a function returns that is given the seconds it has.

    A timeout of sockets is not enough: it begins anew with each byte, and no look-up of a name has one.

    Raises
    ------
    NoAnswerError
        When it takes longer.
    """
    answer: Future[T] = Future()
    seconds = deadline_s or DEADLINE_S

    def wait() -> None:
        try:
            answer.set_result(ask(seconds))
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            answer.set_exception(error)

    # One that takes longer is left behind, and may not hold up the end of the process.
    threading.Thread(target=wait, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise NoAnswerError(f"{place_of(url)}: does not answer within {seconds} s: is it up, or overloaded?") from error


def fetch(url: str) -> bytes:
    """Return what a URL answers; no redirection is followed, and nothing is unpacked.

    Raises
    ------
    NoAnswerError
        When it does not answer with 200 in time, or with more than it has to say.
    """
    return in_time(url, lambda seconds: _read(url, seconds))


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
