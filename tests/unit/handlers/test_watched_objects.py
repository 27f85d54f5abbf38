"""Objects of kopf's lists and watches, read from a server of the test."""

import json
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web

from specdecode_operator.cluster.resources import Resource
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


async def answered(objects: WatchedObjects, text: bytes, path: str = "") -> tuple[Any, list[Any]]:
    """Return what kopf gets of a response: JSON for a list at ``path``, or the events of a watch."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=text)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    try:
        async with (
            aiohttp.ClientSession(response_class=objects.response_class()) as session,
            session.get(f"http://{address[0]}:{address[1]}{path}") as response,
        ):
            if path:
                return await response.json(), []
            chunks = [chunk async for chunk in response.content.iter_chunked(2**16)]
            return None, [json.loads(each) for each in b"".join(chunks).splitlines()]
    finally:
        await runner.cleanup()


Handled = list[tuple[str, Body]]
Begun = list[tuple[str, str, int]]
SERVICE: Final = Resource("v1", "Service", "services")


def watched(handled: Handled, *known: str, begun: Begun | None = None) -> WatchedObjects:
    """Return WatchedObjects for Services that skips events of the ``known`` names."""

    def is_known(_: str, body: Body) -> bool:
        return body["metadata"]["name"] in known

    async def begin(resource: Resource, namespace: str, version: int) -> None:
        (begun if begun is not None else []).append((resource.kind, namespace, version))

    return WatchedObjects([SERVICE], begin, is_known, lambda type_, body: handled.append((type_, body)))


def bookmark(version: int) -> Body:
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


@pytest.mark.parametrize("type_", ["ADDED", "MODIFIED", "DELETED"])
async def test_kopf_gets_a_bookmark_in_place_of_an_event(type_: str) -> None:
    handled: Handled = []
    first, second = service("llama", 8, spec={"text": "x" * 100_000}), service("qwen", 9)
    events = await watch(watched(handled), line(type_, first) + line("ADDED", second))
    assert events == [bookmark(8), bookmark(9)]
    assert handled == [(type_, first), ("ADDED", second)]


async def test_event_with_a_known_version_is_skipped() -> None:
    handled: Handled = []
    events = await watch(watched(handled, "known"), line("MODIFIED", service("known", 8)))
    assert (events, handled) == ([bookmark(8)], [])


async def test_deletion_of_a_known_object_is_handled() -> None:
    handled: Handled = []
    gone = service("known", 8)
    events = await watch(watched(handled, "known"), line("DELETED", gone))
    assert (events, handled) == ([bookmark(8)], [("DELETED", gone)])


async def test_other_kinds_and_bookmarks_reach_kopf_whole() -> None:
    crd = {
        "kind": "CustomResourceDefinition",
        "apiVersion": "apiextensions.k8s.io/v1",
        "metadata": {},
        "spec": {"a": 1},
    }
    mark = {"kind": "Service", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}}
    handled: Handled = []
    events = await watch(watched(handled), line("ADDED", crd) + line("BOOKMARK", mark))
    assert [event["object"] for event in events] == [crd, mark]
    assert not handled


async def test_error_in_a_watch_makes_kopf_list_again() -> None:
    events = await watch(watched([]), line("ERROR", {"code": 500, "message": "etcd"}))
    assert events == [{"type": "ERROR", "object": {"code": 410}}]


@pytest.mark.parametrize(
    ("path", "namespace"),
    [
        ("/api/v1/services", ""),
        ("/api/v1/namespaces/team/services", "team"),
        ("/k8s/clusters/c-1/api/v1/services", ""),
        ("/k8s/clusters/c-1/api/v1/namespaces/team/services", "team"),
    ],
)
async def test_kopf_gets_only_the_version_of_a_list(path: str, namespace: str) -> None:
    begun: Begun = []
    document = await get(watched([], begun=begun), page("ServiceList", {"continue": "c"}), path)
    assert document == {"metadata": {"resourceVersion": "7"}, "items": []}
    assert begun == [("Service", namespace, 7)]


@pytest.mark.parametrize("path", ["/apis/serving.knative.dev/v1/services", "/api/v1/namespaces", "/api/v1/pods"])
async def test_lists_of_other_kinds_reach_kopf_whole(path: str) -> None:
    begun: Begun = []
    text = page("AnyList", {"continue": "c"})
    assert await get(watched([], begun=begun), text, path) == json.loads(text)
    assert begun == []


async def test_error_in_place_of_a_list_reaches_kopf() -> None:
    begun: Begun = []
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "code": 403, "message": "no"}
    assert await get(watched([], begun=begun), json.dumps(status).encode(), "/api/v1/services") == status
    assert begun == []


def page(kind: str, more: Body) -> bytes:
    metadata = {"resourceVersion": "7", **more}
    return json.dumps(
        {"kind": kind, "apiVersion": "v1", "metadata": metadata, "items": [service("a"), service("b")]}
    ).encode()


async def get(objects: WatchedObjects, text: bytes, path: str) -> Any:
    """Return the JSON that kopf gets."""
    document, _ = await answered(objects, text, path)
    return document


async def watch(objects: WatchedObjects, text: bytes) -> list[Any]:
    """Return the events that kopf gets."""
    _, events = await answered(objects, text)
    return events
