"""Pages of engines and answers of a Prometheus, over HTTP: no more and no longer than they should take."""

import time
from collections.abc import Mapping
from typing import Final

import httpx

from specdecode_operator.problems import printable, shown

_DEADLINE_S: Final = 15.0
_MOST_BYTES: Final = 4 * 2**20


class NoAnswerError(Exception):
    """Nothing usable came; the message says what, and what to do."""


def fetch(url: str, query: Mapping[str, str] | None = None, token: str | None = None) -> bytes:
    """Return what a URL answers; no redirection is followed, and nothing is unpacked.

    Raises
    ------
    NoAnswerError
        When it does not answer with 200 in time, or with more than it has to say.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    started_s, content = time.monotonic(), bytearray()
    try:
        with httpx.stream("GET", url, params=query, headers=headers, timeout=_DEADLINE_S) as response:
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > _MOST_BYTES:
                    raise NoAnswerError(f"{shown(url)}: answers with more than {_MOST_BYTES} bytes")
                if time.monotonic() - started_s > _DEADLINE_S:
                    raise NoAnswerError(f"{shown(url)}: takes more than {_DEADLINE_S:.0f} s: is it overloaded?")
    except httpx.TimeoutException as error:
        raise NoAnswerError(f"{shown(url)}: does not answer within {_DEADLINE_S:.0f} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NoAnswerError(
            f"{shown(url)}: does not answer: {printable(str(error))}: is it up, and is this its URL?"
        ) from error
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise NoAnswerError(
            f"{shown(url)}: refuses with {response.status_code}: give --token-file, or one with the right"
        )
    # Prometheus says in a body what is wrong with a query.
    if response.status_code != httpx.codes.OK and not bytes(content).startswith(b'{"status":"error"'):
        raise NoAnswerError(f"{shown(url)}: answers with HTTP {response.status_code}: is this its URL?")
    return bytes(content)
