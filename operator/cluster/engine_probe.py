"""Asks running engines what they do, over their own /metrics, and which version they are."""

import asyncio
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import aiohttp

from specdecode_operator.cluster import waits
from specdecode_operator.cluster.engine_http import MOST_FRAMING_BYTES, FramingError, engine_session
from specdecode_operator.engine.exposition import Exposition, ExpositionError, read_exposition
from specdecode_operator.engine.image_version import read_version
from specdecode_operator.engine.metrics import (
    EngineReading,
    Reading,
    Unreachable,
    UnreadableMetricsError,
    names_read,
    reading_of,
)
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.kube.untyped import mapping, objects
from specdecode_operator.monitoring.looks import Looks

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
    looks: Looks | None


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
        looks: Looks | None = None,
        *,
        tls: bool = False,
    ) -> Mapping[str, Reading]:
        """One reading for each ready pod, by pod name; ``tls`` says whether engines speak HTTPS.

        ``looks`` gets what they say, for figures.
        """
        question = _Question("https" if tls else "http", port, profile, asyncio.Semaphore(_AT_ONCE), looks)
        ready = [pod for pod in pods if is_ready(pod)]
        with waits.for_engines():
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
