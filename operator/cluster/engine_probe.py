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
"""Limit of status lines, headers and chunk framing: that of 2 MiB in chunks of 1 KiB. vLLM's uvicorn needs some 150
bytes. The most costly framing takes some 5 ms of CPU time."""

_PIECE_BYTES: Final = 2**12
"""Interval of the check: the event loop hands over up to 256 KiB."""


class FramingError(aiohttp.ClientPayloadError):
    """A response has more framing than HTTP needs."""


def engine_session(most_bytes: int) -> aiohttp.ClientSession:
    """Return a session for pages of up to ``most_bytes``, without decompression or cookies.

    An engine is reached at its pod address, without a proxy. Its certificate is not verified: it is for the Service's
    name, by an authority that only its Secret has, and Secrets are not read. No secret is sent, and figures of a pod
    deserve no more trust than the pod.
    """
    return aiohttp.ClientSession(
        connector=_Connector(),
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=most_bytes,  # aiohttp pauses a connection at twice as much, which _Answer does not expect
    )


class _Connector(aiohttp.TCPConnector):
    """One connection per request: engines close idle ones before the next scrape."""

    def __init__(self) -> None:
        super().__init__(ssl=False, limit=0, force_close=True)
        # aiohttp has no public hook for received bytes. If it ignores this, tests of endless responses fail.
        answer: type[ResponseHandler] = _Answer
        self._factory = functools.partial(answer, loop=asyncio.get_running_loop())


class _Answer(ResponseHandler):
    """Counts the bytes of one connection.

    The number of small packets is not limited here, but by the timeout. Below TLS asyncio unpacks records of any size.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._came_bytes = 0
        self._page: aiohttp.StreamReader | None = None

    def feed_data(self, data: tuple[RawResponseMessage, aiohttp.StreamReader], size: int = 0) -> None:
        """Handle a response head; interim responses of status 1xx may come before the one with the page."""
        message, page = data
        if self._page is None and message.code >= HTTPStatus.OK:
            self._page = page
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes until the response ends or exceeds the limit."""
        for start in range(0, len(data), _PIECE_BYTES):
            if self.transport is None:
                return
            piece = data[start : start + _PIECE_BYTES]
            super().data_received(piece)
            self._came_bytes += len(piece)
            page_bytes = 0 if self._page is None else self._page.total_bytes
            if self._came_bytes - page_bytes > MOST_FRAMING_BYTES:
                self.abort()
                error = FramingError()
                self.set_exception(error)
                if self._page is not None:
                    self._page.set_exception(error)


_TIMEOUT_S = 5.0
_VERSION_TIMEOUT_S = 1.0
_MOST_BYTES = 2 * 2**20
"""Page of 46 data-parallel ranks: one of vLLM 0.33 takes some 45 kB."""
_MOST_VERSION_BYTES = 2**14
_MOST_VERSIONS = 10_000
_AT_ONCE = 4
"""Engines of one object that are scraped in parallel: with 16 workers, hostile ones take 128 MiB of memory."""


class _NoPageError(Exception):
    """The page could not be read; the message follows its name."""


@dataclass(frozen=True)
class _Question:
    scheme: str
    port: int
    profile: EngineProfile
    turns: asyncio.Semaphore
    looks: SampleBuffer | None


class EngineProbe:
    """Scrapes the metrics of engine pods, and reads the version of each once."""

    def __init__(self) -> None:
        self._versions: dict[Hashable, str | None] = {}  # By start of a pod's containers
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
        """Return a reading of each ready pod, by pod name; ``looks`` gets samples for figures."""
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
            # One timeout for all engines of an object: slow ones must not hold up other objects.
            async with asyncio.timeout(_TIMEOUT_S) as limit, question.turns:
                page = await self._page(f"{place}/metrics", _MOST_BYTES, _TIMEOUT_S)
                limit.reschedule(None)  # it came in time, however long parsing waits for others
                async with self._reads:
                    await asyncio.sleep(0)  # a full page takes 0.1 s to parse: let the loop turn between two
                    reading = _reading(pod, page.decode(errors="replace"), question)
                del page  # frees memory while others are scraped
        except _NoPageError as error:
            return Unreachable(f"/metrics {error}")
        except TimeoutError:
            return Unreachable(f"/metrics did not answer within {_TIMEOUT_S:g} s")
        except (ExpositionError, UnreadableMetricsError) as error:
            return Unreachable(str(error))
        return replace(reading, version=await self._version(pod, f"{place}/version"))

    async def _version(self, pod: Mapping[str, Any], url: str) -> str | None:
        """Return the version of an engine if it answers within 1 s: figures and other engines do not wait for it."""
        # Identifies a start of a pod's containers; None if the kubelet has not reported it.
        containers = [each.get("containerID") for each in objects(mapping(pod, "status"), "containerStatuses")]
        start = (pod["metadata"].get("uid"), *map(str, containers)) if all(containers) and containers else None
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
        if self._session is None:  # a session needs a running loop
            self._session = engine_session(_MOST_BYTES)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(url, allow_redirects=False, timeout=timeout) as response:
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


def _reading(pod: Mapping[str, Any], text: str, question: _Question) -> EngineReading:
    """Parse a page, and add its samples to those for figures."""
    engine, now_s, looks = str(pod["metadata"].get("uid")), time.monotonic(), question.looks
    names = names_read(question.profile)
    due = frozenset() if looks is None else looks.names_due(engine, now_s)
    of_figures: Exposition | None = None
    try:
        page = read_exposition(text, names | due)
        of_figures = page if due else None
    except ExpositionError:  # an engine whose figures are invalid is still read
        page = read_exposition(text, names)
    reading = reading_of(page, question.profile)
    if looks is not None and of_figures is not None:
        looks.hear(engine, of_figures, now_s)
    return reading


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod is ready and not being deleted."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
