"""The server that is driven: its address, its key, and the model that it serves."""

import ssl
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.load.client import Server
from specdecode_operator.capture.load.completion_stream import error_text
from specdecode_operator.problems import printable, shown

_TIMEOUT_S: Final = 10.0
_LARGEST_PAGE_BYTES: Final = 1024 * 1024
_MOST_NAMES: Final = 5
_API: Final = "/v1"
_PORTS: Final = {"http": 80, "https": 443}


class TargetError(Exception):
    """Why a server cannot be driven, and what to do, in one line."""


class _Card(Struct):
    id: Annotated[str, Meta(min_length=1)]


class _Models(Struct):
    data: list[_Card]


_MODELS: Final = msgspec.json.Decoder(_Models)


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    tls: bool
    host: str
    port: int
    path: str  # before /v1

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Return the address in a URL, with /v1 at its end or without.

        Raises
        ------
        TargetError
            It is none.
        """
        wanted = "write one such as http://localhost:8000"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise TargetError(f"--url: {shown(url)}: is no URL: {wanted}") from error
        if parts.scheme not in _PORTS or not host or not url.isascii() or not url.isprintable() or " " in url:
            raise TargetError(f"--url: {shown(url)}: is no URL of HTTP: {wanted}")
        if parts.query or parts.fragment or parts.username is not None:
            raise TargetError(f"--url: {shown(url)}: has more than host, port and path: {wanted}")
        path = parts.path.rstrip("/").removesuffix(_API)
        return cls(parts.scheme == "https", host, port or _PORTS[parts.scheme], path)

    @property
    def root(self) -> str:
        """The URL below which its pages are."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.path}"


async def find_target(address: Address, model: str | None, recorded: str | None, api_key: str | None) -> Server:
    """Ask a server for its models, and return how to send to it.

    Parameters
    ----------
    model
        The name to send, if somebody said it. Without: the recorded one if it is served, else the only one.

    Raises
    ------
    TargetError
        It does not answer, refuses the key, or does not serve the model.
    """
    # Who a certificate may be signed by is what OpenSSL says on this machine, and SSL_CERT_FILE.
    tls = ssl.create_default_context() if address.tls else None
    served = await _served(address, api_key, tls)
    return Server(
        host=address.host,
        port=address.port,
        path=f"{address.path}{_API}",
        model=_chosen(address, model, recorded, served),
        api_key=api_key,
        tls=tls,
    )


def _chosen(address: Address, model: str | None, recorded: str | None, served: list[str] | None) -> str:
    if served is None:
        if model is None:
            raise TargetError(f"--model: {address.root} does not say which models it serves: name one")
        return model
    if model is not None:
        if model not in served:
            raise TargetError(f"--model: {printable(model)}: {address.root} serves {_names(served)}: name one of them")
        return model
    if recorded in served:
        return recorded
    if len(served) != 1:
        raise TargetError(f"--model: {address.root} serves {_names(served)}: say which is meant")
    return served[0]


def _names(served: list[str]) -> str:
    more = f" and {len(served) - _MOST_NAMES} more" if len(served) > _MOST_NAMES else ""
    return (", ".join(map(printable, served[:_MOST_NAMES])) or "no model") + more


async def _served(address: Address, api_key: str | None, tls: ssl.SSLContext | None) -> list[str] | None:
    """Return the names of its models; None where it has no such page."""
    status, page = await _get(f"{address.root}{_API}/models", api_key, tls)
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        given = "refuses the key" if api_key else "wants a key"
        raise TargetError(
            f"{address.root}: {given} ({status}): put the right one into a variable, and name that with"
            " --api-key-variable"
        )
    if status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED, httpx.codes.NOT_IMPLEMENTED):
        return None
    if status != httpx.codes.OK:
        said = printable(error_text(page))
        raise TargetError(f"{address.root}: /v1/models answered {status} ({said}): see the server's log")
    try:
        return [card.id for card in _MODELS.decode(page).data]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TargetError(
            f"{address.root}: /v1/models is no list of models: name an OpenAI-compatible server with --url"
        ) from error


async def _get(url: str, api_key: str | None, tls: ssl.SSLContext | None) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    page = bytearray()
    try:
        async with (
            # Like the requests, which go straight to the server.
            httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=tls or True) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            async for data in response.aiter_bytes():
                page += data
                if len(page) > _LARGEST_PAGE_BYTES:
                    raise TargetError(f"{url}: has more than {_LARGEST_PAGE_BYTES} bytes: name another server")
    except httpx.HTTPError as error:
        why = printable(str(error) or type(error).__name__)
        raise TargetError(f"--url: {url}: does not answer ({why}): start the server, or name another") from error
    return response.status_code, bytes(page)
