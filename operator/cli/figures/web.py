"""Pages of engines and answers of a Prometheus, over HTTP: no more and no longer than they should take."""

import asyncio
import re
from collections.abc import Mapping
from typing import Final

import httpx

from specdecode_operator.problems import printable, shown

DEADLINE_S: Final = 15.0
MOST_BYTES: Final = 4 * 2**20
_USER: Final = re.compile(r"(?<=//)[^/?#]*@")


class NoAnswerError(Exception):
    """Nothing usable came; the message says what, and what to do."""


def place_of(url: str) -> str:
    """Return a URL as it may be shown: without a user and a password."""
    return shown(_USER.sub("", url))


def fetch(url: str, query: Mapping[str, str] | None = None, token: str | None = None) -> bytes:
    """Return what a URL answers; no redirection is followed, and nothing is unpacked.

    Raises
    ------
    NoAnswerError
        When it does not answer with 200 in time, or with more than it has to say.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        status, content = asyncio.run(_answer(url, query, headers))
    except (TimeoutError, httpx.TimeoutException) as error:
        raise NoAnswerError(
            f"{place_of(url)}: does not answer within {DEADLINE_S:.0f} s: is it up, or overloaded?"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NoAnswerError(
            f"{place_of(url)}: does not answer: {printable(str(error))}: is it up, and is this its URL?"
        ) from error
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise NoAnswerError(f"{place_of(url)}: refuses with {status}: give --token-file, or one with the right")
    # Prometheus says in a body what is wrong with a query.
    if status != httpx.codes.OK and not content.startswith(b'{"status":"error"'):
        raise NoAnswerError(f"{place_of(url)}: answers with HTTP {status}: is this its URL?")
    return content


async def _answer(url: str, query: Mapping[str, str] | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Return status and body; the time is that of the whole answer, whose head may come letter by letter, too."""
    content = bytearray()
    async with (
        httpx.AsyncClient(timeout=DEADLINE_S) as client,
        asyncio.timeout(DEADLINE_S),
        client.stream("GET", url, params=query, headers=headers) as response,
    ):
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > MOST_BYTES:
                raise NoAnswerError(f"{place_of(url)}: answers with more than {MOST_BYTES} bytes")
    return response.status_code, bytes(content)
