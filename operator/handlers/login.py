"""How kopf reaches the API server, and reads what it answers."""

import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import kopf

from specdecode_operator.documents.api_answers import bounded_event, read_answer

_ERROR: Final = b'{"type":"ERROR"'
_LIST_ANEW: Final = b'{"type":"ERROR","object":{"code":410}}'
"""The one error after which kopf lists and watches anew; at any other its watch ends, and with it the operator."""


async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
    """Log in as the pod's service account, or as KUBECONFIG says outside a cluster."""
    account = kopf.login_with_service_account(**kwargs)
    if account is None:
        person = kopf.login_with_kubeconfig(**kwargs)
        return None if person is None else _session(person)
    # By address, as every client library does: kopf's name for it needs a cluster DNS.
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return _session(dataclasses.replace(account, server=server))


def _session(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """Return what kopf would make of it, but that it reads objects of any depth and size, at which it would end."""
    return kopf.AiohttpSession(
        server=info.server,
        priority=info.priority,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            response_class=_Answer,
        ),
    )


class _Answer(aiohttp.ClientResponse):
    """An answer of the API server, as kopf reads them: an object or a list at once, and watches line by line."""

    async def start(self, connection: Any) -> "_Answer":
        await super().start(connection)
        self.content = _Lines(self.content)  # type: ignore[assignment]  # as far as kopf uses it
        return self

    async def json(self, **_: Any) -> Any:
        return read_answer(await self.read())


class _Lines:
    """A stream of watch events that anybody can read as JSON."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield whole lines, whatever their length; what a connection that ends leaves of one says nothing."""
        rest = bytearray()
        async for chunk in self._content.iter_chunked(size):
            rest += chunk
            if b"\n" in chunk:
                *lines, tail = bytes(rest).split(b"\n")
                rest = bytearray(tail)
                yield b"".join(_event(line) + b"\n" for line in lines)


def _event(line: bytes) -> bytes:
    return _LIST_ANEW if line.startswith(_ERROR) else bounded_event(line)
