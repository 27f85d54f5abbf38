"""One request to the API server, as both clients send it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kubernetes.aio import client

from specdecode_operator.api.base import Body
from specdecode_operator.redaction import clip


async def send(  # noqa: PLR0913 (what HTTP has)
    api: client.ApiClient,
    method: str,
    path: str,
    body: Body | None = None,
    query: Mapping[str, str] | None = None,
    *,
    content_type: str = "application/json",
    timeout_s: int,
) -> "Answer":
    """Return the answer; errors of the connection are aiohttp's own."""
    method, url, headers, *_ = await api.param_serialize(
        method,
        path,
        query_params=list((query or {}).items()),
        header_params={"Accept": "application/json", "Content-Type": content_type},
        auth_settings=["BearerToken"],
    )
    # A body is JSON already: the client would walk through all of it for dates and models of its own.
    response = await api.call_api(method, url, headers, body, _request_timeout=timeout_s)
    headers = response.headers
    return Answer(response.status, await response.read(), _seconds(headers.get("Retry-After")), headers.get("Date"))


@dataclass(frozen=True)
class Answer:
    """What the API server answered."""

    status: int
    text: bytes
    retry_after_s: float | None = None
    """After how long it wants to be asked again, where it says so."""

    date: str | None = None
    """When it was written, by the server's clock."""


def _seconds(header: str | None) -> float | None:
    return float(header) if header and header.isascii() and header.isdecimal() else None


def error_message(text: bytes, limit: int) -> str:
    """Return the message of a Status object, cut off at a length; empty where it is none."""
    try:
        return clip(str(json.loads(text).get("message", "")), limit)
    except (ValueError, AttributeError):
        return ""
