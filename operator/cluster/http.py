"""One request to the API server, as both clients send it."""

import json
from collections.abc import Mapping

from kubernetes.aio import client

from specdecode_operator.api.base import Body


async def send(  # noqa: PLR0913 (what HTTP has)
    api: client.ApiClient,
    method: str,
    path: str,
    body: Body | None = None,
    query: Mapping[str, str] | None = None,
    *,
    content_type: str = "application/json",
    timeout_s: int,
) -> tuple[int, bytes]:
    """Return status and text of the answer; errors of the connection are aiohttp's own."""
    call = await api.param_serialize(
        method,
        path,
        query_params=list((query or {}).items()),
        header_params={"Accept": "application/json", "Content-Type": content_type},
        body=body,
        auth_settings=["BearerToken"],
    )
    response = await api.call_api(*call, _request_timeout=timeout_s)
    return response.status, await response.read()


def error_message(text: bytes, limit: int) -> str:
    """Return the message of a Status object, cut off at a length; empty where it is none."""
    try:
        return str(json.loads(text).get("message", ""))[:limit]
    except (ValueError, AttributeError):
        return ""
