"""Asks running engines what they do, over their own /metrics, and which version they are."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx

from specdecode_operator.engine.image_version import read_version
from specdecode_operator.engine.metrics import Reading, Unreachable, UnreadableMetricsError, read_metrics
from specdecode_operator.engine.profiles import EngineProfile

_TIMEOUT_S = 5.0
_VERSION_TIMEOUT_S = 1.0
_MOST_BYTES = 2 * 2**20
_AT_ONCE = 4
"""Engines of one object that are read at the same time: what hostile ones send must fit into the operator's memory."""


class EngineProbe:
    """Reads the metrics of engine pods."""

    def __init__(self) -> None:
        # An engine is reached at its pod address: proxies of the environment do not apply. Its certificate is for the
        # Service's name, by an authority that only its Secret knows, and Secrets are not read: so it is not verified.
        # Nothing secret is sent, and figures of a pod are no more to be trusted than the pod.
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=False)  # noqa: S501

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def read_all(
        self, pods: list[dict[str, Any]], port: int, profile: EngineProfile, *, tls: bool = False
    ) -> Mapping[str, Reading]:
        """One reading for each ready pod, by pod name; ``tls`` says whether engines speak HTTPS."""
        scheme = "https" if tls else "http"
        ready = [pod for pod in pods if is_ready(pod)]
        turns = asyncio.Semaphore(_AT_ONCE)
        readings = await asyncio.gather(*(self._read(pod, scheme, port, profile, turns) for pod in ready))
        return {pod["metadata"]["name"]: reading for pod, reading in zip(ready, readings, strict=True)}

    async def _read(
        self, pod: dict[str, Any], scheme: str, port: int, profile: EngineProfile, turns: asyncio.Semaphore
    ) -> Reading:
        address = pod["status"].get("podIP", "")
        host = f"[{address}]" if ":" in address else address
        try:
            # The time holds for all of an object's engines together: slow ones must not hold up other objects.
            async with asyncio.timeout(_TIMEOUT_S), turns:
                place = f"{scheme}://{host}:{port}"
                reading = read_metrics(await self._fetch(f"{place}/metrics"), profile)
                return replace(reading, version=await self._version(f"{place}/version"))
        except httpx.HTTPStatusError as error:
            return Unreachable(f"/metrics answered {error.response.status_code}")
        except (httpx.HTTPError, TimeoutError) as error:
            return Unreachable(f"/metrics did not answer ({type(error).__name__})")
        except UnreadableMetricsError as error:
            return Unreachable(str(error))

    async def _version(self, url: str) -> str | None:
        """Return the version that an engine says, if it does at once: the figures must not wait for it."""
        try:
            async with asyncio.timeout(_VERSION_TIMEOUT_S):
                return read_version(await self._fetch(url))
        except (httpx.HTTPError, TimeoutError, UnreadableMetricsError):
            return None

    async def _fetch(self, url: str) -> str:
        """Read a page whole, but no more than an engine would ever say: pods are not to be trusted.

        So nothing is unpacked, either, and no redirection followed.
        """
        content = bytearray()
        async with self._client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response:
            response.raise_for_status()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > _MOST_BYTES:
                    raise UnreadableMetricsError(f"/metrics is longer than {_MOST_BYTES} bytes")
        return content.decode(errors="replace")


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is ready and stays."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
