"""Objects of kopf's lists and watches, read from a server of the test."""

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from specdecode_operator.handlers import watched_objects
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


async def answered(objects: WatchedObjects, text: bytes) -> tuple[Any, list[Any]]:
    """Return what kopf gets of an answer: as JSON, and as the lines of a watch."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=text)

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    try:
        async with aiohttp.ClientSession(response_class=objects.response_class()) as session:
            async with session.get(f"http://{address[0]}:{address[1]}/") as response:
                chunks = [chunk async for chunk in response.content.iter_chunked(2**16)]
            async with session.get(f"http://{address[0]}:{address[1]}/") as response:
                document = await response.json() if b"\n" not in text else None
    finally:
        await runner.cleanup()
    return document, [json.loads(each) for each in b"".join(chunks).splitlines()]


def all_unknown() -> WatchedObjects:
    return WatchedObjects({"Service"}, lambda *_: False)


async def test_kopf_gets_only_the_identity_of_a_watched_object() -> None:
    objects, whole = all_unknown(), service("llama", spec={"text": "x" * 100_000})
    _, (event,) = await answered(objects, line("MODIFIED", whole))
    assert (event["type"], "spec" in event["object"]) == ("MODIFIED", False)
    kept = event["object"]["metadata"]
    assert kept == {name: value for name, value in whole["metadata"].items() if name != "labels"}
    assert objects.take(event) == whole
    assert objects.take(event) is None, "each object is taken once"


async def test_versions_of_one_object_are_kept_apart() -> None:
    objects = all_unknown()
    first, second = service("llama", 1), service("llama", 2, spec={"a": 2})
    _, events = await answered(objects, line("ADDED", first) + line("MODIFIED", second))
    assert [objects.take(event) for event in events] == [first, second]


async def test_other_kinds_and_bookmarks_reach_kopf_whole() -> None:
    crd = {
        "kind": "CustomResourceDefinition",
        "apiVersion": "apiextensions.k8s.io/v1",
        "metadata": {},
        "spec": {"a": 1},
    }
    mark = {"kind": "Service", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}}
    objects = all_unknown()
    _, events = await answered(objects, line("ADDED", crd) + line("BOOKMARK", mark))
    assert [event["object"] for event in events] == [crd, mark]
    assert objects.take(events[0]) == crd


async def test_error_in_a_watch_makes_kopf_list_again() -> None:
    _, events = await answered(all_unknown(), line("ERROR", {"code": 500, "message": "etcd"}))
    assert events == [{"type": "ERROR", "object": {"code": 410}}]


async def test_lists_omit_known_objects() -> None:
    asked: list[str] = []

    def is_known(kind: str, body: Body) -> bool:
        asked.append(f"{kind} {body['metadata']['name']}")
        return bool(body["metadata"]["name"] == "known")

    objects = WatchedObjects({"Service"}, is_known)
    items = [
        {key: each for key, each in service(name).items() if key not in {"kind", "apiVersion"}}
        for name in ("known", "new")
    ]
    found = {
        "kind": "ServiceList",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": "7", "continue": "c"},
        "items": items,
    }
    document, _ = await answered(objects, json.dumps(found).encode())
    assert (document["metadata"], asked[-2:]) == (found["metadata"], ["Service known", "Service new"])
    (item,) = document["items"]
    assert objects.take({"type": None, "object": item}) == service("new")  # type: ignore[typeddict-item]


async def test_kopf_does_not_get_objects_that_the_operator_handles() -> None:
    """kopf would start a task for each."""
    handled: list[tuple[str | None, str]] = []

    def handles(type_: str | None, body: Body) -> bool:
        handled.append((type_, body["metadata"]["name"]))
        return bool(body["metadata"]["name"] == "handled")

    objects = WatchedObjects({"Service"}, lambda *_: False, handles=handles)
    items = [service("handled"), service("other")]
    found = {"kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": items}
    document, _ = await answered(objects, json.dumps(found).encode())
    assert [item["metadata"]["name"] for item in document["items"]] == ["other"]
    assert handled[-2:] == [(None, "handled"), (None, "other")]
    _, events = await answered(objects, line("MODIFIED", service("handled", 8)) + line("ADDED", service("other", 9)))
    assert [event["type"] for event in events] == ["BOOKMARK", "ADDED"]
    assert handled[-2:] == [("MODIFIED", "handled"), ("ADDED", "other")]


async def test_object_that_was_never_taken_is_reported_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_objects, "_MOST_HELD", 1)
    objects = all_unknown()
    _, (first, second) = await answered(objects, line("ADDED", service("a")) + line("ADDED", service("b")))
    assert objects.take(first) is None
    assert objects.take(second) == service("b")
