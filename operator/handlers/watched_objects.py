"""Decode the events of kopf's watches, and handle them without kopf.

kopf would decode each event with Python's json module, keep state for each object and start a task for each event.
Here, msgspec decodes objects within limits of size and depth, and kopf gets a bookmark in place of each event. Events
with a version that the cache already has are skipped. They follow the operator's own writes, and are half of all events
while objects are created.

kopf lists a kind before it watches it. Only the version of that list is used. The operator lists the kind itself,
because for known objects it needs only their metadata.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, Final

import aiohttp
import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.resources import Resource
from specdecode_operator.untrusted import read_answer, read_event

_ERROR: Final = b'{"type":"ERROR"'
_RELIST: Final = b'{"type":"ERROR","object":{"code":410}}'
"""The only error after which kopf lists and watches again. After any other error, kopf ends the operator."""


class WatchedObjects:
    """Passes the events of some kinds to the operator instead of kopf.

    ``begin`` is called before a watch begins, with its resource, namespace and version. The namespace is empty for the
    whole cluster. ``is_own`` is called with kind and metadata of each ADDED or MODIFIED event, and returns whether to
    skip the event. ``handle`` is called with type and object of each remaining event.
    """

    def __init__(
        self,
        resources: Collection[Resource],
        begin: Callable[[Resource, str, int], Awaitable[None]],
        is_own: Callable[[str, Body], bool],
        handle: Callable[[str, Body], None],
    ) -> None:
        self._resources, self._begin, self._is_own, self._handle = resources, begin, is_own, handle
        self._kinds = frozenset(each.kind for each in resources)
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
                return await read_list(self.url.path, await self.read())

        return Response

    async def _list(self, path: str, text: bytes) -> Any:
        """Return the JSON of a response; for a list of a watched kind, an empty list with the version."""
        before, _, after = path.partition("/namespaces/")
        namespace, _, plural = after.partition("/")
        place = f"{before}/{plural}" if plural else path
        # The path of the API server may have a prefix.
        resource = next((each for each in self._resources if place.endswith(each.path())), None)
        if resource is None:
            return read_answer(text)
        answer = read_answer(text, lambda _: True)
        if "items" not in answer:  # an error
            return answer
        version = answer["metadata"]["resourceVersion"]
        await self._begin(resource, namespace if plural else "", int(version))
        return {"metadata": {"resourceVersion": version}, "items": []}

    def _line(self, line: bytes) -> bytes:
        """Return a line of a watch for kopf: a bookmark in place of an event of a watched kind."""
        if line.startswith(_ERROR):
            return _RELIST + b"\n"
        event = read_event(line, self._kinds, self._is_skipped)
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
