"""Scrape /metrics and the version of running engines, with bounds on size and HTTP framing.

Engines run untrusted code. aiohttp would read any number of interim responses and small chunks, so the framing of a
page is limited to 16 KiB.
"""

import asyncio
import functools
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage

from specdecode_operator.cluster import client
from specdecode_operator.stats.figures import SampleBuffer
from specdecode_operator.untrusted import mapping, objects
from specdecode_operator.vllm.engine_metrics import (
    EngineReading,
    Exposition,
    ExpositionError,
    Reading,
    Unreachable,
    UnreadableMetricsError,
    names_read,
    read_exposition,
    reading_of,
)
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.versions import read_version

MOST_FRAMING_BYTES: Final = 2**14
"""Of status lines, headers and what is around chunks: that of 2 MiB in chunks of 1 KiB. vLLM's uvicorn needs some 150
bytes. As costly to read as can be, it takes some 5 ms of CPU time."""

_PIECE_BYTES: Final = 2**12
"""After so many it is counted again: the event loop hands over up to 256 KiB."""


class FramingError(aiohttp.ClientPayloadError):
    """An answer has more beside its page than HTTP needs."""


def engine_session(most_bytes: int) -> aiohttp.ClientSession:
    """Return a session for pages of up to so many bytes: nothing is unpacked, or kept as a cookie.

    An engine is reached at its pod address: proxies of the environment do not apply. Its certificate is for the
    Service's name, by an authority that only its Secret knows, and Secrets are not read: so it is not verified.
    Nothing secret is sent, and figures of a pod are no more to be trusted than the pod.
    """
    return aiohttp.ClientSession(
        connector=_Connector(),
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=most_bytes,  # aiohttp holds up a connection at twice as much: never, as _Answer needs it
    )


class _Connector(aiohttp.TCPConnector):
    """Connects for one question: between two looks a connection would be idle for longer than engines keep one."""

    def __init__(self) -> None:
        super().__init__(ssl=False, limit=0, force_close=True)
        # aiohttp offers no other way to see what comes. Where it does not use this, tests of endless answers fail.
        answer: type[ResponseHandler] = _Answer
        self._factory = functools.partial(answer, loop=asyncio.get_running_loop())


class _Answer(ResponseHandler):
    """What comes on one connection, counted as it is read.

    Not counted is how often little comes, which the sender's speed and the time for an answer bound. Beneath TLS
    asyncio unpacks records of whatever size.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._came_bytes = 0
        self._page: aiohttp.StreamReader | None = None

    def feed_data(self, data: tuple[RawResponseMessage, aiohttp.StreamReader], size: int = 0) -> None:
        """Take an answer whose head was read: others, of status 1xx, may come before the one that has the page."""
        message, page = data
        if self._page is None and message.code >= HTTPStatus.OK:
            self._page = page
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Read what came, unless the question is answered meanwhile, or it is too much."""
        for start in range(0, len(data), _PIECE_BYTES):
            if self.transport is None:
                return
            piece = data[start : start + _PIECE_BYTES]
            super().data_received(piece)
            self._came_bytes += len(piece)
            page_bytes = 0 if self._page is None else self._page.total_bytes
            if self._came_bytes - page_bytes > MOST_FRAMING_BYTES:
                self._refuse()

    def _refuse(self) -> None:
        self.abort()
        error = FramingError()
        self.set_exception(error)
        if self._page is not None:
            self._page.set_exception(error)


_TIMEOUT_S = 5.0
_VERSION_TIMEOUT_S = 1.0
_MOST_BYTES = 2 * 2**20
"""That of 46 data-parallel ranks: one of vLLM 0.33 says some 45 kB."""
_MOST_VERSION_BYTES = 2**14
_MOST_VERSIONS = 10_000
_AT_ONCE = 4
"""Engines of one object that are read at the same time: what hostile ones send must fit into the operator's memory.

With 16 objects at work it is 128 MiB.
"""


class _NoPageError(Exception):
    """What came in place of a page, in words that follow the page's name."""


@dataclass(frozen=True)
class _Question:
    """How the engines of one object are asked."""

    scheme: str
    port: int
    profile: EngineProfile
    turns: asyncio.Semaphore
    looks: SampleBuffer | None


class EngineProbe:
    """Reads the metrics of engine pods, and asks each once which version it is."""

    def __init__(self) -> None:
        self._versions: dict[Hashable, str | None] = {}  # What was said, by start of a pod's containers
        self._session: aiohttp.ClientSession | None = None
        self._reads = asyncio.Lock()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def read_all(
        self,
        pods: list[dict[str, Any]],
        port: int,
        profile: EngineProfile,
        looks: SampleBuffer | None = None,
        *,
        tls: bool = False,
    ) -> Mapping[str, Reading]:
        """One reading for each ready pod, by pod name; ``tls`` says whether engines speak HTTPS.

        ``looks`` gets what they say, for figures.
        """
        question = _Question("https" if tls else "http", port, profile, asyncio.Semaphore(_AT_ONCE), looks)
        ready = [pod for pod in pods if is_ready(pod)]
        with client.for_engines():
            readings = await asyncio.gather(*(self._read(pod, question) for pod in ready))
        if looks is not None:
            looks.retain({str(pod["metadata"].get("uid")) for pod in pods})
        return {pod["metadata"]["name"]: reading for pod, reading in zip(ready, readings, strict=True)}

    async def _read(self, pod: dict[str, Any], question: "_Question") -> Reading:
        address = pod["status"].get("podIP", "")
        host = f"[{address}]" if ":" in address else address
        place = f"{question.scheme}://{host}:{question.port}"
        try:
            # The time holds for all of an object's engines together: slow ones must not hold up other objects.
            async with asyncio.timeout(_TIMEOUT_S) as limit, question.turns:
                page = await self._page(f"{place}/metrics", _MOST_BYTES, _TIMEOUT_S)
                limit.reschedule(None)  # it came in time, however many others are to be read
                async with self._reads:
                    await asyncio.sleep(0)  # one that is full takes a tenth of a second: between two the loop turns
                    reading = _reading(pod, page.decode(errors="replace"), question)
                del page  # While others are asked, and this one for its version, it need not take memory
        except _NoPageError as error:
            return Unreachable(f"/metrics {error}")
        except TimeoutError:
            return Unreachable(f"/metrics did not answer within {_TIMEOUT_S:g} s")
        except (ExpositionError, UnreadableMetricsError) as error:
            return Unreachable(str(error))
        return replace(reading, version=await self._version(pod, f"{place}/version"))

    async def _version(self, pod: Mapping[str, Any], url: str) -> str | None:
        """Return the version that an engine says, if it does at once: no figures wait for it, and no other engine."""
        start = _start_of(pod)
        if start in self._versions:
            return self._versions[start]
        try:
            page = await self._page(url, _MOST_VERSION_BYTES, _VERSION_TIMEOUT_S)
        except (_NoPageError, TimeoutError):
            return None
        version = read_version(page.decode(errors="replace"))
        if start is not None:
            self._versions[start] = version
            if len(self._versions) > _MOST_VERSIONS:
                del self._versions[next(iter(self._versions))]
        return version

    async def _page(self, url: str, most_bytes: int, timeout_s: float) -> bytearray:
        """Return a page as it was sent: nothing is unpacked, kept as a cookie, or followed elsewhere."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._connected().get(url, allow_redirects=False, timeout=timeout) as response:
                if response.status != HTTPStatus.OK:
                    raise _NoPageError(f"answered {response.status}")
                page = bytearray()
                async for data in response.content.iter_any():
                    page += data
                    if len(page) > most_bytes:
                        raise _NoPageError(f"is longer than {most_bytes} bytes")
                return page
        except FramingError as error:
            raise _NoPageError(f"has more than {MOST_FRAMING_BYTES} bytes beside its page") from error
        except aiohttp.ClientError as error:
            raise _NoPageError(f"did not answer ({type(error).__name__})") from error

    def _connected(self) -> aiohttp.ClientSession:
        """Return the session, which a loop has to run for."""
        if self._session is None:
            self._session = engine_session(_MOST_BYTES)
        return self._session


def _reading(pod: Mapping[str, Any], text: str, question: _Question) -> EngineReading:
    """Return what a page says, and keep it for figures."""
    engine, now_s, looks = str(pod["metadata"].get("uid")), time.monotonic(), question.looks
    due = frozenset() if looks is None else looks.names_due(engine, now_s)
    page, of_figures = _pages(text, names_read(question.profile), due)
    reading = reading_of(page, question.profile)
    if looks is not None and of_figures is not None:
        looks.hear(engine, of_figures, now_s)
    return reading


def _pages(text: str, names: frozenset[str], due: frozenset[str]) -> tuple[Exposition, Exposition | None]:
    """Return what a page says for a reading, and for figures where they are due and can be read.

    It is read once for both, unless that cannot be: an engine whose figures are broken answers all the same.
    """
    try:
        both = read_exposition(text, names | due)
    except ExpositionError:
        return read_exposition(text, names), None
    return both, both if due else None


def _start_of(pod: Mapping[str, Any]) -> Hashable | None:
    """Return what no other start of a pod's containers has; None where the kubelet does not say."""
    containers = [each.get("containerID") for each in objects(mapping(pod, "status"), "containerStatuses")]
    return (pod["metadata"].get("uid"), *map(str, containers)) if all(containers) and containers else None


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is ready and stays."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
