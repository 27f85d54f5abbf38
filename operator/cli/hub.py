"""Asks the model hub over HTTP: answers are bounded in size and in time, whoever gives them.

HF_ENDPOINT may name any server, so nothing that it says is believed or printed.
"""

import asyncio
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import httpx

from specdecode_operator.resolver.read_model_facts import CheckpointError

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
"""As in huggingface_hub (constants.py), which reads HF_ENDPOINT and HF_TOKEN too."""

_TOKEN: Final = re.compile(r"[!-~]{1,512}")
_MOST_REDIRECTS: Final = 5
_CONNECT_S: Final = 10
_SILENCE_S: Final = 30
_OK: Final = 200
_PARTIAL: Final = 206
_NOT_FOR_YOU: Final = (401, 403, 404)
"""The hub does not tell who may not see a repository whether there is one."""


@dataclass(frozen=True)
class HubSettings:
    """Which hub is asked, and as whom."""

    endpoint: str
    host: str
    token: str = field(repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "HubSettings":
        """Return what the environment says, by the names of huggingface_hub.

        Raises
        ------
        CheckpointError
            When it says what cannot be used; its values may be secret, and are not repeated.
        """
        try:
            url = httpx.URL(environment.get("HF_ENDPOINT", "").strip() or DEFAULT_ENDPOINT)
        except httpx.InvalidURL:
            url = httpx.URL("")
        if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
            raise CheckpointError("HubRefused", f"HF_ENDPOINT must be an address such as {DEFAULT_ENDPOINT}")
        token = environment.get("HF_TOKEN", "").strip()
        if token and not _TOKEN.fullmatch(token):
            raise CheckpointError("HubRefused", "HF_TOKEN holds characters that no token has: set it anew")
        return cls(str(url).rstrip("/"), url.netloc.decode("ascii"), token)


@dataclass
class Allowance:
    """How much may be read of a repository, and until when on the event loop's clock."""

    until_s: float
    left_bytes: int
    left_at_once_bytes: int


class HubClient:
    """One hub. Its requests run on an event loop of their own: nothing else ends a server that drips."""

    def __init__(self, settings: HubSettings) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = httpx.AsyncClient(
            # Compressed answers could grow without bound, and no range of them can be asked for.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {settings.token}"} if settings.token else {}),
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            # httpx sends the token to no other host that a redirect names.
            follow_redirects=True,
            max_redirects=_MOST_REDIRECTS,
            event_hooks={"request": [self._refuse_downgrade]},
        )

    def get(self, path: str, allowance: Allowance, *, start: int, length: int) -> bytes:
        """Return at most so many bytes of what is there, from a start on; the rest is not fetched.

        Raises
        ------
        CheckpointError
            When the hub does not give them, or gives something else.
        """
        answer = self._get(f"{self.settings.endpoint}/{path}", allowance, start, length)
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    async def _get(self, url: str, allowance: Allowance, start: int, length: int) -> bytes:
        host = self.settings.host
        wanted = {"Range": f"bytes={start}-{start + length - 1}"}
        try:
            async with asyncio.timeout_at(allowance.until_s), self._client.stream("GET", url, headers=wanted) as answer:
                _refuse(answer, host, start)
                return await _body(answer, host, allowance, length)
        except TimeoutError:
            raise CheckpointError("HubUnreachable", f"{host} takes too long to answer: try again later") from None
        except httpx.TooManyRedirects:
            raise CheckpointError("HubRefused", f"{host} redirects more than {_MOST_REDIRECTS} times") from None
        except httpx.TimeoutException:
            raise CheckpointError("HubUnreachable", f"{host} does not answer: try again later") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):
            message = f"{host} cannot be reached, or does not speak HTTP: check HF_ENDPOINT and the network"
            raise CheckpointError("HubUnreachable", message) from None

    async def _refuse_downgrade(self, request: httpx.Request) -> None:
        if self.settings.endpoint.startswith("https:") and request.url.scheme != "https":
            raise CheckpointError("HubRefused", f"{self.settings.host} redirects to an address without TLS")


async def _body(answer: httpx.Response, host: str, allowance: Allowance, length: int) -> bytes:
    found = bytearray()
    async for part in answer.aiter_raw():
        found += part
        if len(found) >= length:
            break
        if len(found) > min(allowance.left_at_once_bytes, allowance.left_bytes):
            raise CheckpointError("HubRefused", f"{host} sends more than a model's headers take")
    allowance.left_bytes -= len(found)
    return bytes(found[:length])


def _refuse(answer: httpx.Response, host: str, start: int) -> None:
    """Raise what stands against an answer; its own words are not repeated."""
    code = answer.headers.get("X-Error-Code", "")
    if code == "GatedRepo":
        message = "is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account"
        raise CheckpointError("HubRefused", message)
    if code == "RevisionNotFound":
        raise CheckpointError("HubRefused", "has no such revision on the hub")
    if answer.status_code in _NOT_FOR_YOU:
        message = f"{host} does not have it, or not for everybody: check the id, or set HF_TOKEN"
        raise CheckpointError("HubRefused", message)
    if answer.status_code not in (_OK, _PARTIAL):
        raise CheckpointError("HubUnreachable", f"{host} answers HTTP {answer.status_code}: try again later")
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise CheckpointError("HubRefused", f"{host} compresses what was asked for as it is")
    if start and answer.status_code != _PARTIAL:
        raise CheckpointError("HubRefused", f"{host} does not send parts of files")
