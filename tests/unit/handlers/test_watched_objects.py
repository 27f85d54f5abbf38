"""Objects of kopf's lists and watches, read from a server of the test."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kopf._cogs.clients.errors import (
    APIForbiddenError,
    APINotFoundError,
    APIServerError,
    APITooManyRequestsError,
    APIUnauthorizedError,
    check_response,
)

from specdecode_operator.handlers.watched_objects import WatchedObjects

Body = dict[str, Any]


def service(name: str, version: int = 1, **more: Any) -> Body:
    metadata: Body = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": str(version)}
    metadata["labels"] = {"a": "b"}
    return {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {**metadata, "labels": {"a": "b"}},
        "spec": {"a": 1},
        **more,
    }


def line(kind: str, body: Body) -> bytes:
    return json.dumps({"type": kind, "object": body}, separators=(",", ":")).encode() + b"\n"


@asynccontextmanager
async def served(
    objects: WatchedObjects, text: bytes, status: int = 200, query: str = "", **headers: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Serve an answer, and yield kopf's response."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=text, status=status, headers={"Content-Type": "application/json", **headers})

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        async with (
            aiohttp.ClientSession(response_class=objects.response_class()) as session,
            session.get(f"http://{host}:{port}/{query}") as response,
        ):
            yield response
    finally:
        await runner.cleanup()


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    """Return the events of a watch as kopf sees them."""
    chunks = [chunk async for chunk in response.content.iter_chunked(2**16)]
    return [json.loads(each) for each in b"".join(chunks).splitlines()]


async def answered(objects: WatchedObjects, text: bytes) -> tuple[Any, list[Any]]:
    """Return a response as kopf sees it: as JSON, and as the lines of a watch."""
    async with served(objects, text) as response:
        events = await events_of(response)
    async with served(objects, text) as response:
        document = await response.json() if b"\n" not in text else None
    return document, events


Handled = list[tuple[str | None, Body]]


def watched(handled: Handled, *known: str) -> WatchedObjects:
    """Return a `WatchedObjects` for Services that skips known names."""

    def is_known(_: str, body: Body) -> bool:
        return body["metadata"]["name"] in known

    return WatchedObjects({"Service"}, is_known, is_known, lambda type_, body: handled.append((type_, body)))


RELIST = [{"type": "ERROR", "object": {"code": 410}}]


def bookmark(version: int) -> Body:
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


@pytest.mark.parametrize("type_", ["ADDED", "MODIFIED", "DELETED"])
async def test_kopf_gets_a_bookmark_in_place_of_an_event(type_: str) -> None:
    handled: Handled = []
    first, second = service("llama", 8, spec={"text": "x" * 100_000}), service("qwen", 9)
    _, events = await answered(watched(handled), line(type_, first) + line("ADDED", second))
    assert events == [bookmark(8), bookmark(9)]
    assert handled[-2:] == [(type_, first), ("ADDED", second)]


async def test_event_with_a_known_version_is_skipped() -> None:
    handled: Handled = []
    _, events = await answered(watched(handled, "known"), line("MODIFIED", service("known", 8)))
    assert (events, handled) == ([bookmark(8)], [])


async def test_deletion_of_a_known_object_is_handled() -> None:
    handled: Handled = []
    gone = service("known", 8)
    _, events = await answered(watched(handled, "known"), line("DELETED", gone))
    assert (events, handled[-1]) == ([bookmark(8)], ("DELETED", gone))


async def test_other_kinds_and_bookmarks_reach_kopf_whole() -> None:
    crd = {
        "kind": "CustomResourceDefinition",
        "apiVersion": "apiextensions.k8s.io/v1",
        "metadata": {},
        "spec": {"a": 1},
    }
    mark = {"kind": "Service", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}}
    handled: Handled = []
    _, events = await answered(watched(handled), line("ADDED", crd) + line("BOOKMARK", mark))
    assert [event["object"] for event in events] == [crd, mark]
    assert not handled


@pytest.mark.parametrize("text", ['{"type":"ERROR","object":{"code":500}}', '{"object": null, "type": "ERROR"}'])
async def test_error_in_a_watch_makes_kopf_list_again(text: str, caplog: pytest.LogCaptureFixture) -> None:
    _, events = await answered(watched([]), f"{text}\n".encode())
    assert events == RELIST
    assert not caplog.records


@pytest.mark.parametrize(
    "text",
    [
        "<html>",
        "[]",
        "",
        '{"type":"ADDED"}',
        '{"type":"ADDED","object":[]}',
        '{"type":"DELETED","object":{"kind":"Service"}}',
    ],
)
async def test_line_that_is_not_an_event_makes_kopf_list_again(text: str, caplog: pytest.LogCaptureFixture) -> None:
    handled: Handled = []
    later = line("ADDED", service("b", 8, text="x" * 200_000))  # in other chunks
    lines = line("ADDED", service("a", 7)) + f"{text}\n".encode() * 3 + later
    _, events = await answered(watched(handled), lines)
    assert events == [bookmark(7), *RELIST]
    assert [body["metadata"]["name"] for _, body in handled] == ["a"]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("text", ["", "<html>", '{"kind":"Status"}'])
async def test_watch_without_events_makes_kopf_list_again(text: str) -> None:
    """kopf would otherwise watch again at once."""
    async with served(watched([]), text.encode(), query="?watch=true") as response:
        assert await events_of(response) == RELIST


async def test_version_that_has_expired_makes_kopf_list_again(caplog: pytest.LogCaptureFixture) -> None:
    async with served(watched([]), b"{}", 410, "?watch=true") as response:
        await check_response(response)
        assert await events_of(response) == RELIST
    async with served(watched([]), b"{}", 410, "?limit=100&continue=a") as response:
        await check_response(response)
        with pytest.raises(aiohttp.ClientPayloadError, match="expired"):
            await response.json()
    assert not caplog.records


PAGE = {"Content-Type": "text/html"}
PAGES = {
    "page": b"<html>",
    "Latin-1": b"\xe9",
    "not UTF-8": b'"\xff',
    "list": b"[1]",
    "null": b"null",
    "empty": b"",
    "deep": b"[" * 5000,
    "digits": b'{"code":' + b"1" * 5000 + b"}",
    "large": json.dumps({"kind": "Status", "details": {"causes": [{}] * 60_000}}).encode(),
}


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
async def test_error_page_is_an_error_that_kopf_retries(text: bytes) -> None:
    async with served(watched([]), text, 503, **{"Content-Type": "text/html; charset=hex"}) as response:
        with pytest.raises(APIServerError):
            await check_response(response)


@pytest.mark.parametrize(
    ("status", "query", "headers", "error"),
    [
        (404, "?limit=100", PAGE, APIServerError),
        (400, "?watch=true", PAGE, APIServerError),
        (404, "", PAGE, APINotFoundError),  # of a group that is gone
        (404, "?limit=100", {}, APINotFoundError),  # of the API server
        (401, "?limit=100", PAGE, APIUnauthorizedError),
        (401, "?limit=100", {}, APIUnauthorizedError),
        (403, "?watch=true", {}, APIForbiddenError),
        (429, "", {"Retry-After": "7"}, APITooManyRequestsError),
        (429, "", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, APIServerError),
        (200, "", PAGE, APIServerError),
    ],
)
async def test_status_is_one_that_kopf_can_handle(
    status: int, query: str, headers: dict[str, str], error: type[Exception]
) -> None:
    async with served(watched([]), b"{}", status, query, **headers) as response:
        with pytest.raises(error):
            await check_response(response)


async def test_error_that_breaks_off_is_an_error_that_kopf_retries() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9\r\n\r\n{")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with (
        server,
        aiohttp.ClientSession(response_class=watched([]).response_class()) as session,
        session.get(f"http://{host}:{port}/") as response,
    ):
        with pytest.raises(APIServerError):
            await check_response(response)


@pytest.mark.parametrize("text", ["<html>", "", "[]", '{"metadata":null}', '{"metadata":{},"items":null}'])
async def test_page_in_place_of_a_list_makes_kopf_list_again(text: str) -> None:
    async with served(watched([]), text.encode()) as response:
        with pytest.raises(aiohttp.ClientPayloadError, match="GET /"):
            await response.json()


async def test_list_without_items_is_empty() -> None:
    text = json.dumps({"kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}}).encode()
    document, _ = await answered(watched([]), text)
    assert document["items"] == []


async def test_objects_of_lists_are_handled_unless_they_are_known() -> None:
    items = [
        {key: each for key, each in service(name).items() if key not in {"kind", "apiVersion"}}
        for name in ("known", "new")
    ]
    page = {"resourceVersion": "7", "continue": "c"}
    found = {"kind": "ServiceList", "apiVersion": "v1", "metadata": page, "items": items}
    handled: Handled = []
    document, _ = await answered(watched(handled, "known"), json.dumps(found).encode())
    assert (document["metadata"], document["items"]) == (page, [])
    assert handled == [(None, service("new"))]


@pytest.mark.parametrize(
    "hostile",
    [b'"\\ud800"', b'{"a":' * 3000 + b"1" + b"}" * 3000, json.dumps({"lists": [[]] * 60_000}).encode()],
    ids=["half a surrogate pair", "too deep", "too large"],
)
async def test_hostile_object_does_not_hide_the_others_of_a_list(hostile: bytes) -> None:
    handled: Handled = []
    items = [service("a"), service("b", spec="HOSTILE")]
    found = {"kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": items}
    document, _ = await answered(watched(handled), json.dumps(found).encode().replace(b'"HOSTILE"', hostile))
    assert document["items"] == []
    seen = [(type_, body["kind"], body["metadata"]["name"]) for type_, body in handled[-2:]]
    assert seen == [(None, "Service", "a"), (None, "Service", "b")]
