"""A Kubernetes API in memory, served over HTTP to the real clients, kopf's and ours.

Objects have UIDs, versions and generations; writes are server-side apply and merge patch; lists and watches go by
label; requests are authorized where a test says so. It knows no schemas, no admission and no controllers:
tests/component has the real one for these.
"""

import asyncio
import itertools
import json
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from aiohttp import web

from specdecode_operator.cluster.resources import (
    CAPTURE_CHILDREN,
    CHILDREN,
    CUSTOM_RESOURCE_DEFINITION,
    DEVICE_CLASS,
    EVENT,
    LEASE,
    NODE,
    POD,
    RESOURCE_SLICE,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    SPECDECODE_TRAINING,
    STORAGE_CLASS,
    Resource,
)
from tests.support.api_objects import after_apply, after_merge, applied_fields, matches, with_server_fields
from tests.support.objects import Body

CRD = CUSTOM_RESOURCE_DEFINITION
NAMESPACE = Resource("v1", "Namespace", "namespaces")
_RESOURCES = (
    *CHILDREN,
    *CAPTURE_CHILDREN,
    DEVICE_CLASS,
    EVENT,
    LEASE,
    NODE,
    POD,
    RESOURCE_SLICE,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    SPECDECODE_TRAINING,
    STORAGE_CLASS,
    CRD,
    NAMESPACE,
)
_CLUSTER_WIDE = (DEVICE_CLASS, NODE, RESOURCE_SLICE, STORAGE_CLASS, CRD, NAMESPACE)
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
_READING = ("get ", "list ", "watch ")


def _copy(body: Body) -> Body:
    """Return a deep copy, a few times faster than `copy.deepcopy`."""
    copied: Body = pickle.loads(pickle.dumps(body, pickle.HIGHEST_PROTOCOL))
    return copied


class RefusalError(Exception):
    """A request is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Call(NamedTuple):
    """A request, taken apart."""

    verb: str
    resource: Resource
    namespace: str
    name: str
    subresource: str

    @property
    def permission(self) -> str:
        """What RBAC must grant for it, such as ``patch deployments.apps``."""
        return f"{self.verb} {self.resource.qualified_plural}" + (f"/{self.subresource}" if self.subresource else "")


class ApiServer:
    """Objects of one cluster, and what was asked of them."""

    def __init__(self) -> None:
        self.now: Callable[[], datetime] = partial(datetime.now, UTC)
        """By which it says when objects were made."""
        self.requests: list[str] = []
        """What was asked, in order, such as ``patch services llama``."""
        self.granted: frozenset[str] | None = None
        """Rights that there are; None where everything may be done."""
        self.image_volumes = True
        """Whether pods keep image volumes; an API server whose feature gate is off drops them."""
        self.refusals: dict[str, tuple[int, str]] = {}
        """Status and message for all requests that need a right."""
        self.barred: set[str] = set()
        """Namespaces in which nothing may be done."""
        self.before: dict[str, Callable[[], object]] = {}
        """What happens just before the next request that needs a right is answered."""
        self.served = {resource.qualified_plural: resource for resource in _RESOURCES}
        self._objects: dict[tuple[str, str, str], Body] = {}
        self._applied: dict[str, Body] = {}
        """What was last applied of an object, by its UID."""
        self._history: list[tuple[str, Body]] = []
        self._watches: list[asyncio.Queue[tuple[str, Body] | None]] = []
        self._last_words = b""
        self._versions = itertools.count(2)  # as etcd's: no object has version 1
        self._runner: web.AppRunner | None = None
        self._version = 0

    def create(self, resource: Resource, body: Body) -> Body:
        """Make an object as a person or a controller would."""
        now = self.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        uid = f"uid-{len(self._history)}"
        metadata = {"uid": uid, "generation": 1, "creationTimestamp": now, **body["metadata"]}
        return self._store(resource, {**body, "metadata": metadata}, "ADDED")

    def change(self, resource: Resource, name: str, **parts: Any) -> Body:
        """Replace whole parts of an object, such as its status."""
        live = self.find(resource, name)
        assert live is not None
        return self._store(resource, {**live, **parts}, "MODIFIED")

    def remove(self, resource: Resource, name: str) -> None:
        """Delete an object and what it owns."""
        (key,) = [key for key in self._objects if key[0] == resource.qualified_plural and key[2] == name]
        gone = self._objects.pop(key)
        self._version = next(self._versions)
        gone["metadata"]["resourceVersion"] = str(self._version)
        self._tell("DELETED", gone)
        for plural, _, owned in list(self._objects):
            body = self.find(self.served[plural], owned) if plural in self.served else None
            owners = (body or {"metadata": {}})["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                self.remove(self.served[plural], owned)

    def find(self, resource: Resource, name: str) -> Body | None:
        """Return an object; names are unique in these tests, whatever the namespace."""
        wanted = resource.qualified_plural, name
        found = [body for (plural, _, known), body in self._objects.items() if (plural, known) == wanted]
        return _copy(found[0]) if found else None

    def versions(self, resource: Resource) -> dict[str, tuple[str, str]]:
        """Return the UID and the version of each object of a kind, by name."""
        wanted = resource.qualified_plural
        found = ((name, body["metadata"]) for (plural, _, name), body in self._objects.items() if plural == wanted)
        return {name: (metadata["uid"], metadata["resourceVersion"]) for name, metadata in found}

    def names(self, *resources: Resource) -> list[str]:
        """Return the names of all objects of some kinds."""
        plurals = {resource.qualified_plural for resource in resources}
        return sorted(name for plural, _, name in self._objects if plural in plurals)

    def writes(self) -> list[str]:
        """Return what was asked to be written since the last call of this, but for Events."""
        found = [each for each in self.requests if not each.startswith((*_READING, f"create {EVENT.plural}"))]
        self.requests.clear()
        return found

    @asynccontextmanager
    async def serving(self, kubeconfig: Path) -> AsyncIterator[None]:
        """Serve it at an address of this machine, and write a kubeconfig for it."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._serve)
        runner = self._runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://{host}:{port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "current-context": "x",
        }
        kubeconfig.write_text(yaml.safe_dump(config))  # noqa: ASYNC240  a small file, before anything runs
        try:
            yield
        finally:
            self.end_watches()
            await runner.cleanup()

    def end_watches(self, last_words: bytes = b"") -> None:
        """End all watches, after these words; what happens before they start anew is not told of."""
        self._last_words = last_words
        for watch in self._watches:
            watch.put_nowait(None)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if (found := self._discovery(parts)) is not None:
            return web.json_response(found)
        if parts[-1] == "subjectaccessreviews":
            return web.json_response(self._review(await request.json()))
        try:
            call = self._call(request, parts)
            self.requests.append(f"{call.permission} {call.name}".rstrip())
            if act := self.before.pop(call.permission, None):
                act()
            self._authorize(call, call.name or _wanted_name(request))
            if call.verb == "watch":
                return await self._watch(request, call)
            body = json.loads(text) if (text := await request.text()) else {}
            return web.json_response(self._answer(call, request, body))
        except RefusalError as error:
            if error.status == HTTPStatus.OK or str(error).startswith("<"):
                return web.Response(status=error.status, text=str(error))  # a proxy's word, not a server's
            return web.json_response({"kind": "Status", "message": str(error)}, status=error.status)

    def _review(self, question: Body) -> Body:
        asked = question["spec"]["resourceAttributes"]
        allowed = self.granted is None or f"{asked['verb']} {asked['resource']}" in self.granted
        return {**question, "status": {"allowed": allowed}}

    def _answer(self, call: _Call, request: web.Request, body: Body) -> Body:
        if call.verb == "list":
            return self._list(call, request)
        if call.verb == "create" and call.subresource == "eviction":
            self.remove(call.resource, call.name)
            return {}
        if call.verb == "create" and request.query.get("dryRun") == "All":
            kept = [each for each in body["spec"].get("volumes") or [] if self.image_volumes or "image" not in each]
            return {**body, "spec": {**body["spec"], "volumes": kept}}
        if call.verb == "create":
            name = body["metadata"].get("name") or f"{body['metadata']['generateName']}{self._version}"
            if (call.resource.qualified_plural, call.namespace, name) in self._objects:
                raise RefusalError(409, f'{call.resource.plural} "{name}" already exists')
            return self.create(call.resource, {**body, "metadata": {**body["metadata"], "name": name}})
        live = self._objects.get((call.resource.qualified_plural, call.namespace, call.name))
        if live is None and (call.verb != "patch" or call.subresource or "apply" not in request.content_type):
            raise RefusalError(404, f'{call.resource.plural} "{call.name}" not found')
        if call.verb == "patch":
            return self._patch(call, live, body, applies="apply" in request.content_type)
        assert live is not None
        if call.verb == "delete":
            if body.get("preconditions", {}).get("uid") not in (None, live["metadata"]["uid"]):
                raise RefusalError(409, "the UID in the precondition is another")
            self.remove(call.resource, call.name)
        return live

    def _list(self, call: _Call, request: web.Request) -> Body:
        selector = request.query.get("labelSelector", "")
        # A real list leaves out what its kind says already.
        items = [
            {field: value for field, value in each.items() if field not in {"kind", "apiVersion"}}
            for (plural, namespace, _), each in sorted(self._objects.items())
            if plural == call.resource.qualified_plural and call.namespace in ("", namespace)
            if matches(each, selector) and _wanted_name(request) in {"", each["metadata"]["name"]}
        ]
        only_metadata = "PartialObjectMetadata" in request.headers.get("Accept", "")
        if only_metadata:
            items = [{"metadata": each["metadata"]} for each in items]
        begin = int(request.query.get("continue") or 0)
        end = begin + int(request.query.get("limit") or len(items))
        more = {"continue": str(end)} if end < len(items) else {}
        # An empty list of metadata has null, as that of the API server.
        found = None if only_metadata and not items else items[begin:end]
        kind, api_version = call.resource.kind, call.resource.api_version
        if only_metadata:
            kind, api_version = "PartialObjectMetadata", "meta.k8s.io/v1"
        metadata = {"resourceVersion": str(self._version), **more}
        return {"kind": f"{kind}List", "apiVersion": api_version, "metadata": metadata, "items": found}

    def _patch(self, call: _Call, live: Body | None, patch: Body, *, applies: bool) -> Body:
        if live is None:
            if "uid" in patch["metadata"]:
                raise RefusalError(409, "uid mismatch: no existing object was found")
            self._authorize(call._replace(verb="create", subresource=""), call.name)
            made = self.create(call.resource, with_server_fields(patch))
            self._applied[made["metadata"]["uid"]] = applied_fields(patch)
            return made
        uid = live["metadata"]["uid"]
        if patch.get("metadata", {}).get("uid") not in (None, uid):
            raise RefusalError(409, "the UID is another")
        if patch.get("metadata", {}).get("resourceVersion") not in (None, live["metadata"]["resourceVersion"]):
            raise RefusalError(409, "the object has been modified")
        if call.subresource:
            merged = {**live, call.subresource: patch[call.subresource]}
        elif applies:
            merged = after_apply(live, self._applied.get(uid, {}), patch)
            self._applied[uid] = applied_fields(patch)
        else:
            merged = after_merge(live, patch)
        return live if merged == live else self._store(call.resource, merged, "MODIFIED")

    def _store(self, resource: Resource, body: Body, event: str) -> Body:
        key = (resource.qualified_plural, body["metadata"].get("namespace", ""), body["metadata"]["name"])
        earlier = self._objects.get(key)
        self._version = next(self._versions)
        generation = body["metadata"]["generation"]
        if earlier is not None and earlier.get("spec") != body.get("spec"):
            generation += 1
        metadata = {**body["metadata"], "generation": generation, "resourceVersion": str(self._version)}
        typed = {"apiVersion": resource.api_version, "kind": resource.kind}
        stored = _copy({**body, **typed, "metadata": metadata})
        self._objects[key] = stored
        self._tell(event, stored)
        return _copy(stored)

    def _tell(self, event: str, body: Body) -> None:
        told = (event, _copy(body))
        self._history.append(told)
        for watch in self._watches:
            watch.put_nowait(told)

    async def _watch(self, request: web.Request, call: _Call) -> web.StreamResponse:
        since = int(request.query.get("resourceVersion") or 0)
        selector = request.query.get("labelSelector", "")
        queue: asyncio.Queue[tuple[str, Body] | None] = asyncio.Queue()
        for told in self._history:
            queue.put_nowait(told)
        self._watches.append(queue)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            while (told := await queue.get()) is not None:
                event, body = told
                is_new = int(body["metadata"]["resourceVersion"]) > since
                is_here = call.namespace in ("", body["metadata"].get("namespace", ""))
                if is_new and is_here and body["kind"] == call.resource.kind and matches(body, selector):
                    await response.write(json.dumps({"type": event, "object": body}).encode() + b"\n")
            await response.write(self._last_words)
        finally:
            self._watches.remove(queue)
        return response

    def _authorize(self, call: _Call, name: str = "") -> None:
        permission = call.permission
        if call.namespace in self.barred:
            raise RefusalError(403, f'User "operator" may do nothing in the namespace "{call.namespace}"')
        if self.granted is not None and not self.granted & {permission, f"{permission} {name}"}:
            verb, _, resource = permission.partition(" ")
            raise RefusalError(403, f'User "operator" cannot {verb} resource "{resource}"')
        if permission in self.refusals:
            raise RefusalError(*self.refusals[permission])

    def _call(self, request: web.Request, parts: list[str]) -> _Call:
        group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource, *_ = [*rest, "", ""]
        resource = self.served.get(f"{plural}.{group}" if group else plural)
        if resource is None:
            raise RefusalError(404, "the server could not find the requested resource")
        if request.method == "GET":
            verb = "get" if name else "watch" if request.query.get("watch") == "true" else "list"
        else:
            verb = _VERBS[request.method]
        return _Call(verb, resource, namespace, name, subresource)

    def _discovery(self, parts: list[str]) -> Body | None:
        """What is served, as clients ask for it."""
        grouped: dict[str, list[Resource]] = {}
        for resource in self.served.values():
            grouped.setdefault(resource.api_version, []).append(resource)
        match parts:
            case ["version"]:
                return {"gitVersion": "v1.34.1"}
            case ["api"]:
                return {"versions": ["v1"]}
            case ["apis"]:
                versions = [version.split("/") for version in grouped if "/" in version]
                return {
                    "groups": [
                        {
                            "name": group,
                            "versions": [{"version": version}],
                            "preferredVersion": {"version": version},
                        }
                        for group, version in versions
                    ]
                }
            case ["api", "v1"] | ["apis", _, _]:
                return {"resources": [*map(_described, grouped.get("/".join(parts[1:]), ()))]}
        return None


def _wanted_name(request: web.Request) -> str:
    """The name that RBAC sees in a list of one object."""
    return request.query.get("fieldSelector", "").removeprefix("metadata.name=")


def _described(resource: Resource) -> Body:
    return {
        "name": resource.plural,
        "kind": resource.kind,
        "singularName": resource.kind.lower(),
        "namespaced": resource not in _CLUSTER_WIDE,
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    }
