"""Decode the objects of kopf's lists and watches, and handle them without kopf.

kopf would decode each event with Python's json module, keep state for each object and start a task for each event.
Here, msgspec decodes objects within limits of size and depth, and kopf gets empty lists, and a bookmark in place of
each event. Objects that the cache already has are skipped. After a restart, these are nearly all listed objects. While
objects are created, half of all events follow the operator's own writes and are skipped.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Collection
from http import HTTPStatus
from typing import Any, ClassVar, Final, Self

import aiohttp
import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.untrusted import kind_of_list, read_answer, read_event

_logger = logging.getLogger(__name__)

_RELIST: Final = b'{"type":"ERROR","object":{"code":410}}\n'
"""The only error of a watch after which kopf lists and watches again. After any other error, kopf ends the operator."""


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

        class Response(_Response):
            objects = self

        return Response

    def read_response(self, text: bytes) -> Any:
        """Return the JSON of a response. Pass objects of a watched kind to ``handle``, and remove them from the list.

        Raises ValueError if it is not JSON.
        """
        kind = kind_of_list(text)
        if kind not in self._kinds:
            return read_answer(text)
        answer = read_answer(text, lambda body: self._is_listed(kind, body))
        for body in answer.get("items", ()):
            self._handle(None, {**body, "kind": kind, "apiVersion": answer["apiVersion"]})
        return {**answer, "items": []}

    def read_line(self, line: bytes) -> bytes:
        """Return a line of a watch for kopf: a bookmark in place of an event of a watched kind.

        Raises ValueError if it is not an event.
        """
        event = read_event(line, self._kinds, self._is_skipped)
        if event is None:
            return _bookmark(self._skipped)
        type_, body = event
        if type_ == "ERROR":
            return _RELIST
        if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
            raise ValueError("an event without an object that has metadata")  # noqa: TRY004 - wrong text
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


class _Response(aiohttp.ClientResponse):
    """Response with only errors that kopf can handle. Others would end the operator, even if a proxy sent them.

    kopf tries again after HTTP 503, with a backoff, and lists again after a ClientPayloadError of a list.
    """

    objects: ClassVar[WatchedObjects]
    has_expired = False
    """Whether the version of a list or a watch is too old."""

    async def start(self, connection: Any) -> Self:
        """Read status and headers."""
        await super().start(connection)
        self.content = _Lines(self, self.content)  # type: ignore[assignment]  # Has what kopf uses
        self.has_expired = self._is_list_or_watch and self.status == HTTPStatus.GONE
        if self.has_expired:
            self.status = HTTPStatus.OK
        elif not self._is_handled:
            self.status = HTTPStatus.SERVICE_UNAVAILABLE
        return self

    @property
    def _is_list_or_watch(self) -> bool:
        return not {"limit", "watch"}.isdisjoint(self.url.query)

    @property
    def _is_handled(self) -> bool:
        """Whether kopf can handle the status. A list or a watch with another client error would end the operator."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return self.headers.get("Retry-After", "0").isdecimal()
        if self.content_type == "application/json":
            return True
        if self.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            return True
        return self.status >= HTTPStatus.INTERNAL_SERVER_ERROR or not (self.ok or self._is_list_or_watch)

    async def json(self, **_: Any) -> Any:
        """Return the JSON of the response."""
        answer, problem = None, "the version of the list has expired"
        if not self.has_expired:
            try:
                answer = self.objects.read_response(await self.read())
                problem = "not an object, or a list without metadata or items"
            except (ValueError, aiohttp.ClientPayloadError) as error:
                problem = str(error)
        parts = (("metadata", dict), ("items", list))
        if isinstance(answer, dict) and all(isinstance(answer.get(name, kind()), kind) for name, kind in parts):
            return answer
        if self.ok:
            raise aiohttp.ClientPayloadError(f"{self.method} {self.url.path}: {problem}")
        raise json.JSONDecodeError(problem, "", 0)  # kopf then calls `text`.

    async def text(self, encoding: str | None = None, errors: str = "replace") -> str:  # noqa: ARG002 - of any encoding
        """Return the text of an error."""
        try:
            return (await self.read()).decode(errors=errors)
        except aiohttp.ClientPayloadError:
            return ""


class _Lines:
    """Stream of the events of a watch."""

    def __init__(self, response: _Response, content: aiohttp.StreamReader) -> None:
        self._response, self._content = response, content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield complete lines of any length; drop an incomplete line at the end of a connection.

        If there are no events, or something else, the last line makes kopf list again. Otherwise, kopf would watch
        again without a pause, or end the operator.
        """
        rest = bytearray()
        problem: str | None = "no event"
        async for chunk in self._content.iter_chunked(size):
            rest += chunk
            if b"\n" in chunk:
                *lines, tail = bytes(rest).split(b"\n")
                rest = bytearray(tail)
                events, problem = self._read(lines)
                yield events
                if problem is not None:
                    break
        if problem is not None:
            if not self._response.has_expired:
                _logger.warning("watch of %s: %s; listing again", self._response.url.path, problem)
            yield _RELIST

    def _read(self, lines: list[bytes]) -> tuple[bytes, str | None]:
        """Return events for kopf up to the first invalid line, and what is wrong with it."""
        events = []
        for line in lines:
            try:
                events.append(self._response.objects.read_line(line))
            except ValueError as error:
                return b"".join(events), str(error)
        return b"".join(events), None
