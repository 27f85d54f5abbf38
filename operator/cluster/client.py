"""Client of the Kubernetes API for the operator: requests, errors, and the time spent waiting.

All writes of the operator go through `Cluster`, which checks the Lease before each one. Error messages end up on
objects that users read, so they never contain payloads, tokens or whole responses. `Waits` measures how long one
reconcile waited for the API server and for engines.
"""

import asyncio
import json
import os
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import client, config

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.drift import with_fields_taken_over
from specdecode_operator.cluster.events import EventQueue
from specdecode_operator.cluster.resources import EVENT, POD, Resource, written_resource
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping, read_answer


class ClusterError(Exception):
    """A request to the API server failed; worth a retry later.

    Messages land on objects that users read, so they never hold payloads, tokens or whole responses.
    """


class NotFoundError(ClusterError):
    """The object, or its kind, does not exist (any more)."""


class ConflictError(ClusterError):
    """Another client changed the object in between."""


class ForbiddenError(ClusterError):
    """The operator lacks a permission; the message names it."""


class DeniedError(ForbiddenError):
    """An admission policy denies a request that the operator may make; ``words`` are the policy's."""

    def __init__(self, message: str, words: str) -> None:
        super().__init__(message)
        self.words = words


class UntriableError(ClusterError):
    """A webhook does not support dry runs, so the request cannot be tried."""


class InvalidObjectError(ClusterError):
    """The API server rejects the object; a retry will not help."""


class RefusedForNowError(ClusterError):
    """Rejected because of a quota, or a namespace that is being deleted: it may pass without a change."""


class NotLeadingError(ClusterError):
    """The replica does not hold the Lease, so it must not write."""


REQUEST_TIMEOUT_S: Final = 30
_JSON: Final = "application/json"
_JSON_BOTH_WAYS: Final = {"Accept": _JSON, "Content-Type": _JSON}


async def send(  # noqa: PLR0913 (what HTTP has)
    api: client.ApiClient,
    method: str,
    path: str,
    body: Body | None = None,
    query: Mapping[str, str] | None = None,
    *,
    types: Mapping[str, str] = _JSON_BOTH_WAYS,
    timeout_s: int = REQUEST_TIMEOUT_S,
) -> "Answer":
    """Send a request with headers for the types of its body and of the answer.

    Errors of the connection are aiohttp's own.
    """
    method, url, headers, *_ = await api.param_serialize(
        method,
        path,
        query_params=list((query or {}).items()),
        header_params=dict(types),
        auth_settings=["BearerToken"],
    )
    # A body is JSON already: the client would walk through all of it for dates and models of its own.
    response = await api.call_api(method, url, headers, body, _request_timeout=timeout_s)
    headers = response.headers
    retry_after = headers.get("Retry-After") or ""
    retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else None
    return Answer(response.status, await response.read(), retry_after_s, headers.get("Date"))


@dataclass(frozen=True)
class Answer:
    """Response of the API server."""

    status: int
    text: bytes
    retry_after_s: float | None = None
    date: str | None = None
    """`Date` header, by the server's clock."""


def error_message(text: bytes, limit: int) -> str:
    """Return the message of a Status object, clipped; empty for any other text."""
    try:
        return clip(str(json.loads(text).get("message", "")), limit)
    except (ValueError, AttributeError):
        return ""


@dataclass
class Wait:
    """Number of requests to one side, and the time in which at least one was open: some run in parallel."""

    questions: int = 0
    seconds: float = 0.0
    _open: int = 0
    _since_s: float = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count the block as one request."""
        if not self._open:
            self._since_s = time.perf_counter()
        self.questions, self._open = self.questions + 1, self._open + 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self.seconds += time.perf_counter() - self._since_s


@dataclass(frozen=True)
class Waits:
    """Waits of one reconcile and its tasks."""

    api_server: Wait = field(default_factory=Wait)
    engines: Wait = field(default_factory=Wait)


_current: ContextVar[Waits] = ContextVar("waits")
_UNCOUNTED = Waits()


@contextmanager
def counted_waits() -> Iterator[Waits]:
    """Count the waits of the block and of the tasks that it starts."""
    waits = Waits()
    token = _current.set(waits)
    try:
        yield waits
    finally:
        _current.reset(token)


def for_api_server() -> AbstractContextManager[None]:
    """Return a context manager that counts one request to the API server."""
    return _current.get(_UNCOUNTED).api_server.one()


def for_engines() -> AbstractContextManager[None]:
    """Return a context manager that counts the requests to the engines of an object."""
    return _current.get(_UNCOUNTED).engines.one()


FIELD_MANAGER = "specdecode-operator"
_MESSAGE_LIMIT = 500
_TRIES = 5
_PAGE = 100
"""Objects in a page of a list; some megabytes of plans."""

_WAITS_S = (0.2, 0.8)
"""Before the second and the third try; after that the queue backs off."""

_LONGEST_WAIT_S = 10.0
"""Limit of Retry-After: a worker waits meanwhile."""

_PAUSE_S: Final = 1.0
_SPREAD = 1.5
_VERSION_OF_NONE = "1"
"""No object has it: versions are revisions of etcd, whose first write makes the second."""

_METADATA: Final = f"{_JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_MERGE_PATCH = "application/merge-patch+json"
_TYPED_PATCH = "failed to create typed patch object"
_ANOTHER_UID = "metadata.uid: Invalid value"
"""How the API server rejects a merge patch that has the UID of an object that is gone."""
_NO_DRY_RUN = "does not support dry run"
_BY_RBAC = re.compile(r"""User ".*" cannot \w+ """)
"""How RBAC rejects a request: User "NAME" cannot create resource "pods"."""
_TEMPORARY = ("is being terminated", "exceeded quota", "status unknown for quota")
"""In rejections that pass: of a namespace that is deleted, of quotas that are full or just created."""

_LOCK_POLL_S: Final = 0.01
_READS_CONFIG: Final = threading.Lock()
"""Held while certificates in a kubeconfig become files: the client names such a file before it has written it."""


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    bodies: Sequence[Body]
    """Objects that are not known yet."""
    known: Sequence[str]
    """UIDs of the others."""
    version: int
    """resourceVersion of the list."""


class Cluster:
    """Reads and writes objects; every failure becomes a `ClusterError`."""

    def __init__(
        self, api: client.ApiClient, may_write: Callable[[], bool] = lambda: True, clock: ServerTime | None = None
    ) -> None:
        self._api = api
        self._may_write = may_write
        self.clock = clock or ServerTime()
        self._events = EventQueue(self._post_event)

    @classmethod
    async def connect(cls, may_write: Callable[[], bool] = lambda: True, clock: ServerTime | None = None) -> "Cluster":
        """Connect as the pod's service account, or with KUBECONFIG outside a cluster.

        ``may_write`` is called before each write; ``clock`` learns the time from each answer.
        """
        # Without blocking: other coroutines of this event loop, or other threads, may hold the lock.
        while not _READS_CONFIG.acquire(blocking=False):  # noqa: ASYNC110
            await asyncio.sleep(_LOCK_POLL_S)
        try:
            if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config()
            else:
                await config.load_kube_config()
            api = client.ApiClient(_settings())
            # In a cluster, decompressing lists takes longer than receiving them.
            api.set_default_header("Accept-Encoding", "identity")
            return cls(api, may_write, clock)
        finally:
            _READS_CONFIG.release()

    async def close(self) -> None:
        """Post the waiting Events, and close all connections."""
        await self._events.close()
        await self._api.close()

    async def get(self, resource: Resource, namespace: str, name: str, *, may_be_old: bool = False) -> Body | None:
        """Return an object, or None; with ``may_be_old`` from the API server's cache instead of etcd."""
        query = {"resourceVersion": "0"} if may_be_old else None
        try:
            return await self._send(_Request("GET", resource, namespace, name), query=query)
        except NotFoundError:
            return None

    async def list(
        self, resource: Resource, label_selector: str | None = None, *, name: str | None = None
    ) -> tuple[list[Body], int]:
        """Return all objects of a kind in the cluster, by label or name if given, and the version of the list."""
        pages = [page async for page in self.pages(resource, label_selector, name=name)]
        return [body for page in pages for body in page.bodies], min(page.version for page in pages)

    async def pages(  # noqa: PLR0913  each narrows the list, or makes it cheaper
        self,
        resource: Resource,
        label_selector: str | None = None,
        *,
        name: str | None = None,
        namespace: str | None = None,
        is_known: Callable[[Body], bool] | None = None,
        few_are_new: bool = False,
    ) -> AsyncIterator[Page]:
        """Yield the pages of a list, because one response with thousands of objects takes much memory.

        ``is_known`` is called with each object's metadata. Of known objects only the UID is parsed. With
        ``few_are_new``, the API server sends only metadata, and each of the other objects is requested.
        """
        request = _Request("GET", resource, namespace, accept=_METADATA if few_are_new else _JSON)
        query = {"limit": str(_PAGE)}
        query |= {"labelSelector": label_selector} if label_selector else {}
        query |= {"fieldSelector": f"metadata.name={name}"} if name else {}
        while True:
            answer = await self._send(request, query=query, is_known=is_known)
            metadata = mapping(answer, "metadata")
            version, more = str(metadata.get("resourceVersion")), metadata.get("continue")
            is_endless = more and more == query.get("continue")
            if not isinstance(answer.get("items"), list) or not version.isdecimal() or is_endless:
                raise ClusterError(f"{request}: the response of the API server is not a list, or has no end")
            bodies = answer["items"]
            if few_are_new:
                bodies = [whole for each in bodies async for whole in self._listed(resource, label_selector, each)]
            yield Page(bodies, answer.get("known", ()), int(version))
            if not more:
                return
            query["continue"] = str(more)

    async def _listed(self, resource: Resource, label_selector: str | None, body: Body) -> AsyncIterator[Body]:
        """Yield an object of a list of metadata, unless it is gone. Some kinds may be listed, but not read by name."""
        metadata = body["metadata"]
        async for page in self.pages(
            resource, label_selector, name=metadata["name"], namespace=metadata.get("namespace")
        ):
            for each in page.bodies:
                yield each

    async def apply(self, body: Body, resource: Resource | None = None, subresource: str | None = None) -> Body:
        """Create or change an object by server-side apply, and take over its fields; by default a child.

        With a UID in its metadata only that object is changed. If it is gone, or another one has its name, that is a
        `ConflictError`.
        """
        resource, metadata = resource or written_resource(body["kind"]), body["metadata"]
        request = _Request("PATCH", resource, metadata.get("namespace"), metadata["name"], subresource)
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._send(request, body, query, content_type="application/apply-patch+yaml")

    async def apply_new(self, body: Body) -> Body:
        """Create a child by server-side apply; an object of its name that exists already is a `ConflictError`.

        The API server compares the version that an apply names with that of the object, if there is one.
        """
        return await self.apply({**body, "metadata": {**body["metadata"], "resourceVersion": _VERSION_OF_NONE}})

    async def apply_status(self, resource: Resource, body: Body) -> Body:
        """Write the status subresource by server-side apply."""
        return await self.apply(body, resource, "status")

    async def take_over_fields(self, body: Body, kept_managers: Collection[str]) -> None:
        """Take over the fields of other managers of a child, so that the next apply removes those that it lacks."""
        metadata = body["metadata"]
        for left in reversed(range(_TRIES)):
            live = await self.get(written_resource(body["kind"]), metadata["namespace"], metadata["name"])
            if live is None or live["metadata"]["uid"] != metadata["uid"]:
                return
            version = live["metadata"]["resourceVersion"]
            written = with_fields_taken_over(live, kept_managers)
            try:
                await self.merge(live, {"metadata": {"managedFields": written, "resourceVersion": version}})
            except ConflictError:  # its controller has just written its status
                if not left:
                    raise
            else:
                return

    async def create(self, body: Body) -> Body:
        """Create an object; one of its name that exists already is a `ConflictError`."""
        request = _Request("POST", written_resource(body["kind"]), body["metadata"]["namespace"])
        # As apply does: unknown fields are rejected, and not dropped.
        return await self._send(request, body, {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"})

    async def try_create(self, resource: Resource, body: Body) -> Body:
        """Create an object by a dry run with all admission, and return it as it would be stored.

        Raises as a real request would, or UntriableError.
        """
        request = _Request("POST", resource, body["metadata"]["namespace"])
        try:
            return await self._send(request, body, {"fieldManager": FIELD_MANAGER, "dryRun": "All"})
        except InvalidObjectError as error:
            if _NO_DRY_RUN in str(error):
                raise UntriableError(str(error)) from error
            raise

    async def merge(self, body: Body, patch: Body) -> Body:
        """Apply a merge patch to exactly this object, not to a new one of its name."""
        metadata = body["metadata"]
        if uid := metadata.get("uid"):
            patch = {**patch, "metadata": {**patch.get("metadata", {}), "uid": uid}}
        request = _Request("PATCH", written_resource(body["kind"]), metadata["namespace"], metadata["name"])
        return await self._send(request, patch, {"fieldManager": FIELD_MANAGER}, _MERGE_PATCH)

    async def delete(self, body: Body) -> bool:
        """Delete exactly this object, not a new one of its name; return whether it existed."""
        metadata = body["metadata"]
        options = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
        request = _Request("DELETE", written_resource(body["kind"]), metadata["namespace"], metadata["name"])
        try:
            await self._send(request, options)
        except (NotFoundError, ConflictError):
            return False
        return True

    async def evict(self, pod: Body) -> None:
        """Evict exactly this pod, if its disruption budget allows it."""
        metadata = pod["metadata"]
        names = {"name": metadata["name"], "namespace": metadata["namespace"]}
        options = {"preconditions": {"uid": metadata["uid"]}}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": names, "deleteOptions": options}
        await self._send(_Request("POST", POD, metadata["namespace"], metadata["name"], "eviction"), body)

    def post_event(self, event: Body) -> None:
        """Post an Event in the background; a failure is logged."""
        self._check_leads(_event_request(event))
        self._events.add(event)

    async def events_posted(self) -> None:
        """Wait until all Events are posted."""
        await self._events.join()

    async def _post_event(self, event: Body) -> None:
        while not self._may_write():  # noqa: ASYNC110  Writes pause until the Lease is renewed, or the process ends.
            await asyncio.sleep(_PAUSE_S)
        await self._send(_event_request(event), event)

    def _check_leads(self, request: "_Request") -> None:
        if not self._may_write():
            raise NotLeadingError(f"{request}: write rejected: this replica is not the leader")

    async def _send(
        self,
        request: "_Request",
        body: Body | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = _JSON,
        is_known: Callable[[Body], bool] | None = None,
    ) -> Body:
        for wait_s in (*_WAITS_S, None):
            try:
                return await self._try(request, body, query, content_type, is_known)
            except _PassingError as error:
                if wait_s is None:
                    raise error.told from error
                asked_for_s = wait_s if error.retry_after_s is None else min(error.retry_after_s, _LONGEST_WAIT_S)
                # Spread out: requests that one server turned away would meet there again.
                await asyncio.sleep(asked_for_s * random.uniform(1, _SPREAD))  # noqa: S311  no secret
        raise AssertionError  # the last try returns or raises

    async def _try(
        self,
        request: "_Request",
        body: Body | None,
        query: Mapping[str, str] | None,
        content_type: str,
        is_known: Callable[[Body], bool] | None,
    ) -> Body:
        """Send a request once; raise _PassingError if a retry may help and is safe."""
        if request.method != "GET":
            self._check_leads(request)
        # A POST that may have been carried out would create another object.
        may_repeat, asked_s = request.method != "POST", self.clock.steady_s()
        try:
            with for_api_server():
                types = {"Accept": request.accept, "Content-Type": content_type}
                answer = await send(self._api, request.method, request.path, body, query, types=types)
        except (aiohttp.ClientError, TimeoutError) as error:
            told = ClusterError(f"{request}: the API server cannot be reached ({type(error).__name__})")
            passes = may_repeat and isinstance(error, aiohttp.ClientConnectionError)
            raise _PassingError(told) if passes else told from error
        if answer.status >= HTTPStatus.BAD_REQUEST:
            told = _error(request, answer.status, error_message(answer.text, _MESSAGE_LIMIT))
            if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
                # Not carried out. A disruption budget that is used up answers an eviction with it, too.
                passes = request.subresource != "eviction"
            else:
                passes = answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR and may_repeat
            passes = passes and not isinstance(told, InvalidObjectError)
            raise _PassingError(told, answer.retry_after_s) if passes else told
        self.clock.hear(answer.date, asked_s)  # an error may be a proxy's, with the proxy's time
        try:
            found = read_answer(answer.text, is_known)
        except ValueError as error:  # such as one that a proxy cut off
            told = ClusterError(f"{request}: the response of the API server is not valid JSON ({error})")
            raise _PassingError(told) if may_repeat else told from error
        if not isinstance(found, dict):
            raise ClusterError(f"{request}: the response of the API server is not an object")
        return found


def _event_request(event: Body) -> "_Request":
    return _Request("POST", EVENT, event["metadata"]["namespace"])


def _settings() -> client.Configuration:
    """Return the client's configuration with the proxy of the environment.

    By default the client would look for the proxy, and in ~/.netrc for a password, in threads before each call.
    """
    settings = client.Configuration.get_default_copy()
    server = urlsplit(settings.host)
    if settings.proxy is None and not proxy_bypass(server.hostname or ""):
        settings.proxy = getproxies().get(server.scheme)
    settings.client_session_kwargs = {"trust_env": False}
    return settings


class _PassingError(Exception):
    """A failure that a retry may fix."""

    def __init__(self, told: ClusterError, retry_after_s: float | None = None) -> None:
        super().__init__(str(told))
        self.told = told
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class _Request:
    method: str
    resource: Resource
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None
    accept: str = _JSON

    @property
    def path(self) -> str:
        return self.resource.path(self.namespace, self.name, self.subresource)

    @property
    def permission(self) -> str:
        """Right that RBAC must grant."""
        verbs = {"GET": "get" if self.name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
        verb = verbs[self.method]
        suffix = f"/{self.subresource}" if self.subresource else ""
        return f"{verb} {self.resource.qualified_plural}{suffix}"

    def __str__(self) -> str:
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.permission} {where}".rstrip()


def _error(request: _Request, status: int, message: str) -> ClusterError:
    if status == HTTPStatus.FORBIDDEN:
        if any(words in message for words in _TEMPORARY):
            return RefusedForNowError(f"{request}: {message}")
        where = f"namespace {request.namespace}" if request.namespace else "the whole cluster"
        told = (
            f"the operator may not {request.permission} in {where}:"
            f" grant it (manifests/operator-role.yaml has the whole list), or see what denied it: {message}"
        )
        return ForbiddenError(told) if _BY_RBAC.search(message) else DeniedError(told, message)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR and _TYPED_PATCH in message:
        # The response of server-side apply to unknown fields and wrong types.
        return InvalidObjectError(f"{request}: {message}")
    if status == HTTPStatus.UNPROCESSABLE_ENTITY and _ANOTHER_UID in message:
        return ConflictError(f"{request}: an object of this name exists")
    kinds: dict[int, type[ClusterError]] = {
        HTTPStatus.BAD_REQUEST: InvalidObjectError,
        HTTPStatus.NOT_FOUND: NotFoundError,
        HTTPStatus.CONFLICT: ConflictError,
        HTTPStatus.UNPROCESSABLE_ENTITY: InvalidObjectError,
    }
    return kinds.get(status, ClusterError)(f"{request}: {message or f'HTTP {status}'}")
