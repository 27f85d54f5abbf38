"""Decode the objects of kopf's lists and watches, and handle them without kopf.

kopf would decode each event with Python's json module, keep state for each object and start a task for each event.
Here, msgspec decodes objects within limits of size and depth, and kopf gets empty lists, and a bookmark in place of
each event. Objects that the cache already has are skipped: after a restart, nearly all objects of the lists, and later
the events that follow the operator's own writes, which are half of all events while objects are created.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Final

import aiohttp
import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.untrusted import kind_of_list, read_answer, read_event

_logger = logging.getLogger(__name__)

_ERROR: Final = b'{"type":"ERROR"'
_RELIST: Final = b'{"type":"ERROR","object":{"code":410}}'
"""The only error after which kopf lists and watches again. After any other error, kopf ends the operator."""


class WatchedObjects:
    """Passes the objects of some kinds to the operator instead of kopf.

    ``is_listed`` is called with kind and metadata of each object of a list, and returns whether to skip the object.
    ``is_own`` does the same for each ADDED or MODIFIED event. ``handle`` is called with type and object of each
    remaining event, and with None and each remaining object of a list.
    """

    def __init__(
        self,
        kinds: Collection[str],
        is_listed: Callable[[str, Body], bool],
        is_own: Callable[[str, Body], bool],
        handle: Callable[[str | None, Body], None],
    ) -> None:
        self._kinds, self._is_listed, self._is_own, self._handle = kinds, is_listed, is_own, handle
        self._skipped: Body = {}
        """Latest object of an event that was skipped."""

    def response_class(self) -> type[aiohttp.ClientResponse]:
        """Return the class of kopf's responses."""
        read_list, read_line = self._list, self._line

        class Response(aiohttp.ClientResponse):
            async def start(self, connection: Any) -> "Response":
                await super().start(connection)
                self.content = _Lines(self.content, read_line)  # type: ignore[assignment]  # Has what kopf uses
                return self

            async def json(self, **_: Any) -> Any:
                # A proxy may send an error page, even with status 200. kopf reads the text of a failed response after
                # a JSONDecodeError, and lists again after a ClientPayloadError. Other errors would end the operator.
                answer, problem = None, "not a JSON object"
                try:
                    answer = read_list(await self.read())
                except ValueError as error:
                    problem = str(error)
                if isinstance(answer, dict):
                    return answer
                if self.ok:
                    raise aiohttp.ClientPayloadError(f"{self.method} {self.url.path}: {problem}")
                raise json.JSONDecodeError(problem, "", 0)

            async def text(self, encoding: str | None = None, errors: str = "replace") -> str:
                return await super().text(encoding, errors)

        return Response

    def _list(self, text: bytes) -> Any:
        """Return the JSON of a response; a list of a watched kind without its objects."""
        kind = kind_of_list(text)
        if kind not in self._kinds:
            return read_answer(text)
        answer = read_answer(text, lambda body: self._is_listed(kind, body))
        for body in answer.get("items", ()):
            self._handle(None, {**body, "kind": kind, "apiVersion": answer["apiVersion"]})
        return {**answer, "items": []}

    def _line(self, line: bytes) -> bytes:
        """Return a line of a watch for kopf: a bookmark in place of an event of a watched kind."""
        if line.startswith(_ERROR):
            return _RELIST + b"\n"
        try:
            event = read_event(line, self._kinds, self._is_skipped)
        except ValueError as error:
            _logger.warning("A watch sent a line that is not an event. Its objects are listed again: %s", error)
            return _RELIST + b"\n"
        if event is None:
            return _bookmark(self._skipped)
        type_, body = event
        if type_ != "BOOKMARK" and body.get("kind") in self._kinds:
            self._handle(type_, body)
            return _bookmark(body)
        return msgspec.json.encode({"type": type_, "object": body}) + b"\n"

    def _is_skipped(self, kind: str, body: Body) -> bool:
        self._skipped = body
        return self._is_own(kind, body)


def _bookmark(body: Body) -> bytes:
    """Return a bookmark in place of an event. kopf resumes from its version, and knows that the watch is alive."""
    version = {"metadata": {"resourceVersion": body["metadata"].get("resourceVersion")}}
    return msgspec.json.encode({"type": "BOOKMARK", "object": version}) + b"\n"


class _Lines:
    """Stream of watch events, each read by ``read_line``."""

    def __init__(self, content: aiohttp.StreamReader, read_line: Callable[[bytes], bytes]) -> None:
        self._content, self._read_line = content, read_line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield complete lines of any length; drop an incomplete line at the end of a connection."""
        rest = bytearray()
        async for chunk in self._content.iter_chunked(size):
            rest += chunk
            if b"\n" in chunk:
                *lines, tail = bytes(rest).split(b"\n")
                rest = bytearray(tail)
                yield b"".join(map(self._read_line, lines))
