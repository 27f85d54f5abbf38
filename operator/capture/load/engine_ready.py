"""Wait until the engine is ready or idle, and return the change in its counters over a run."""

import asyncio
import ssl
import time
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import httpx

from specdecode_operator.capture.load.shutdown import Stop
from specdecode_operator.vllm import engine_metrics
from specdecode_operator.vllm.profiles import UnknownEngineVersionError, find_profile
from specdecode_operator.vllm.versions import read_version, version_of_engine

_TIMEOUT_S = 5.0
_LARGEST_PAGE_BYTES = 16 * 2**20
_POLL_S = 0.5
IDLE_DEADLINE_S = 30.0  # time for the engine to report no requests after the last one ended


class EngineNotReadyError(Exception):
    """The engine did not become ready, or does not report its version."""


@dataclass(frozen=True)
class MetricsDelta:
    """Change of the engine's counters from before the first measured request until it was idle again."""

    generation_tokens: int  # over all ranks
    speculation: engine_metrics.SpeculationReading | None  # None for an engine that does not speculate
    # KV cache of the smallest rank; None if the engine does not report it.
    num_gpu_blocks: int | None = None
    kv_cache_tokens: int | None = None


@dataclass(frozen=True)
class NoMetrics:
    """Counters are unknown, and why."""

    reason: str


class EngineMonitor:
    """Client of the engine's health, version and metrics endpoints."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        # The engine is in the same pod, so proxy variables do not apply.
        self._client = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, verify=tls or True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def wait_until_ready(self, deadline_s: float, stop: Stop) -> None:
        """Wait until the engine's /health succeeds."""
        until_s = time.monotonic() + deadline_s
        while True:
            try:
                await self._page("/health")
            except httpx.HTTPStatusError as error:
                problem = f"/health answered {error.response.status_code}"
            except httpx.HTTPError as error:
                problem = f"/health did not answer ({type(error).__name__}: {error})"
            else:
                return
            if time.monotonic() >= until_s:
                raise EngineNotReadyError(f"not ready after {deadline_s:g} s: {problem}; see the engine's own log")
            if not await stop.sleep_until(min(until_s, time.monotonic() + _POLL_S)):
                raise EngineNotReadyError(f"stopped before the engine was ready: {stop.reason}")

    async def wait_until_gone(self) -> None:
        """Wait until the engine's port is closed; a busy engine still accepts connections."""
        url = self._client.base_url
        while True:
            try:
                _, writer = await asyncio.open_connection(url.host, url.port)
            except ConnectionRefusedError:
                return
            except OSError:
                pass  # such as too many open files, which says nothing about the engine
            else:
                writer.close()
            await asyncio.sleep(_POLL_S)

    async def version(self) -> str:
        """Return the engine's version, such as 0.32.0."""
        try:
            page = await self._page("/version")
        except httpx.HTTPError as error:
            raise EngineNotReadyError(f"/version gave no version ({type(error).__name__}: {error})") from error
        version = read_version(page.decode(errors="replace"))
        if version is None:
            raise EngineNotReadyError("/version gave no version")
        return version

    async def read(self) -> engine_metrics.EngineReading | NoMetrics:
        """Return the current counters."""
        try:
            page = await self._page("/metrics")
            version = await self.version()
            profile = find_profile(version_of_engine(version) or version)
            return engine_metrics.read_metrics(page.decode(errors="replace"), profile)
        except httpx.HTTPError as error:
            return NoMetrics(f"/metrics did not answer ({type(error).__name__}: {error})")
        except (engine_metrics.UnreadableMetricsError, UnknownEngineVersionError, EngineNotReadyError) as error:
            return NoMetrics(str(error))

    async def read_when_idle(self, deadline_s: float = IDLE_DEADLINE_S) -> engine_metrics.EngineReading | NoMetrics:
        """Return the counters once no request runs or waits."""
        until_s = time.monotonic() + deadline_s
        while not isinstance(reading := await self.read(), NoMetrics):
            busy = reading.requests_running + reading.requests_waiting
            if not busy:
                break
            if time.monotonic() >= until_s:
                return NoMetrics(f"{busy} requests still ran {deadline_s:g} s after the last one had ended")
            await asyncio.sleep(0.1)
        return reading

    async def _page(self, path: str) -> bytes:
        """Return a page, limited in time and size, because the server is untrusted."""
        page = bytearray()
        asked = self._client.stream("GET", path, headers={"Accept-Encoding": "identity"})
        try:
            async with asyncio.timeout(_TIMEOUT_S), asked as response:
                response.raise_for_status()
                async for data in response.aiter_raw():
                    page += data
                    if len(page) > _LARGEST_PAGE_BYTES:
                        raise httpx.ReadError(f"longer than {_LARGEST_PAGE_BYTES} bytes")
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"not complete after {_TIMEOUT_S:g} s") from error
        return bytes(page)


def metrics_delta(
    before: engine_metrics.EngineReading | NoMetrics, after: engine_metrics.EngineReading | NoMetrics
) -> MetricsDelta | NoMetrics:
    """Return the change of the counters, or why it is unknown."""
    if isinstance(before, NoMetrics):
        return before
    if isinstance(after, NoMetrics):
        return after
    tokens = after.generation_tokens - before.generation_tokens
    speculation, old, new = None, before.speculation, after.speculation
    if old is not None and new is not None:
        positions = zip_longest(old.accepted_per_position, new.accepted_per_position, fillvalue=0)
        speculation = engine_metrics.SpeculationReading(
            drafts=new.drafts - old.drafts,
            draft_tokens=new.draft_tokens - old.draft_tokens,
            accepted_tokens=new.accepted_tokens - old.accepted_tokens,
            accepted_per_position=tuple(later - earlier for earlier, later in positions),
        )
    if tokens < 0 or (speculation is not None and speculation.drafts < 0):
        return NoMetrics("the engine's counters went back: it was restarted during the run")
    return MetricsDelta(tokens, speculation, after.num_gpu_blocks, after.kv_cache_tokens)
