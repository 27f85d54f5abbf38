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
from specdecode_operator.cluster.resources import EVENT, POD, Resource, written_resource
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping, read_answer


class ClusterError(Exception):
    """A call to Kubernetes failed; worth another try later.

    Messages land on objects that users read, so they never hold payloads,
    tokens or whole responses.
    """


class NotFoundError(ClusterError):
    """The object, or its kind, does not exist (any more)."""


class ConflictError(ClusterError):
    """Somebody else changed the object in between."""


class ForbiddenError(ClusterError):
    """The operator lacks a permission; the message names it."""


class DeniedError(ForbiddenError):
    """An admission policy denies a request that the operator may make; ``words`` are the policy's."""

    def __init__(self, message: str, words: str) -> None:
        super().__init__(message)
        self.words = words


class UntriableError(ClusterError):
    """Something in the API server's way does not support dry runs, so nothing can be tried there."""


class InvalidObjectError(ClusterError):
    """The API server refuses the object as it is; another try will not help."""


class RefusedForNowError(ClusterError):
    """Refused for a quota, or a namespace that is being deleted: it may pass without a change of the object."""


class NotLeadingError(ClusterError):
    """Without the Lease by which it may write, this replica does not."""


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


@dataclass
class Wait:
    """Questions to one side, and the time in which at least one was open: some are asked side by side."""

    questions: int = 0
    seconds: float = 0.0
    _open: int = 0
    _since_s: float = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take the block for a question."""
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
    """What a look waits for, and what its tasks do for it."""

    api_server: Wait = field(default_factory=Wait)
    engines: Wait = field(default_factory=Wait)


_current: ContextVar[Waits] = ContextVar("waits")
"""Of the look that the task works for."""

_OF_NO_LOOK = Waits()


@contextmanager
def counted_waits() -> Iterator[Waits]:
    """Count what the block and the tasks that it starts wait for."""
    waits = Waits()
    token = _current.set(waits)
    try:
        yield waits
    finally:
        _current.reset(token)


def for_api_server() -> AbstractContextManager[None]:
    """Return what to put around one question to the API server."""
    return _current.get(_OF_NO_LOOK).api_server.one()


def for_engines() -> AbstractContextManager[None]:
    """Return what to put around the questions to the engines of an object."""
    return _current.get(_OF_NO_LOOK).engines.one()


FIELD_MANAGER = "specdecode-operator"
_REQUEST_TIMEOUT_S = 30
_MESSAGE_LIMIT = 500
_TRIES = 5
_PAGE = 100
"""Objects in a page of a list: of plans, some megabytes."""

_WAITS_S = (0.2, 0.8)
"""Before the second and the third try of what may pass in a moment; after that the queue has the object wait."""

_LONGEST_WAIT_S = 10.0
"""Whatever an API server asks for: a worker waits meanwhile."""

_SPREAD = 1.5
_VERSION_OF_NONE = "1"
"""No object has it: versions are revisions of etcd, whose first write makes the second."""

_MERGE_PATCH = "application/merge-patch+json"
_TYPED_PATCH = "failed to create typed patch object"
_ANOTHER_UID = "metadata.uid: Invalid value"
"""How the API server refuses a merge patch that has the UID of an object that is gone."""
_NO_DRY_RUN = "does not support dry run"
_BY_RBAC = re.compile(r"""User ".*" cannot \w+ """)
"""How the API server says that a right is missing: User "NAME" cannot create resource "pods"."""
_TEMPORARY = ("is being terminated", "exceeded quota", "status unknown for quota")
"""Words of refusals that pass by themselves: of a namespace that goes, of quotas that are full or just made."""

_LOCK_POLL_S: Final = 0.01
_READS_CONFIG: Final = threading.Lock()
"""Held while certificates in a kubeconfig become files: the client names such a file before it has written it."""


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    bodies: Sequence[Body]
    """The objects, but for those that are known."""
    known: Sequence[str]
    """The UIDs of these."""
    version: int
    """Of the list."""


class Cluster:
    """Reads and writes objects; every failure becomes a `ClusterError`."""

    def __init__(
        self, api: client.ApiClient, may_write: Callable[[], bool] = lambda: True, clock: ServerTime | None = None
    ) -> None:
        self._api = api
        self._may_write = may_write
        self._clock = clock or ServerTime()

    @classmethod
    async def connect(cls, may_write: Callable[[], bool] = lambda: True, clock: ServerTime | None = None) -> "Cluster":
        """Connect as the pod's service account, or as KUBECONFIG says outside a cluster.

        ``may_write`` is asked before each write; ``clock`` learns the time from each answer.
        """
        # Without blocking: other coroutines of this event loop may hold the lock, or other threads.
        while not _READS_CONFIG.acquire(blocking=False):  # noqa: ASYNC110
            await asyncio.sleep(_LOCK_POLL_S)
        try:
            if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config()
            else:
                await config.load_kube_config()
            return cls(client.ApiClient(_settings()), may_write, clock)
        finally:
            _READS_CONFIG.release()

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def get(self, resource: Resource, namespace: str, name: str, *, may_be_old: bool = False) -> Body | None:
        """Return the object, or None where there is none.

        Where it ``may_be_old`` the API server says what it has in memory, and does not ask etcd.
        """
        query = {"resourceVersion": "0"} if may_be_old else None
        try:
            return await self._send(_Request("GET", resource, namespace, name), query=query)
        except NotFoundError:
            return None

    async def list(
        self, resource: Resource, label_selector: str | None = None, *, name: str | None = None
    ) -> tuple[list[Body], int]:
        """Return all objects of a kind in the cluster, or those with the labels or of the name, and the version."""
        pages = [page async for page in self.pages(resource, label_selector, name=name)]
        return [body for page in pages for body in page.bodies], min(page.version for page in pages)

    async def pages(
        self,
        resource: Resource,
        label_selector: str | None = None,
        *,
        name: str | None = None,
        namespace: str | None = None,
        is_known: Callable[[Body], bool] | None = None,
    ) -> AsyncIterator[Page]:
        """Yield the same page by page: thousands of objects at once take much memory, as text and as values.

        Of objects of which ``is_known`` says so, asked with their metadata, only the UIDs are read.
        """
        request, query = _Request("GET", resource, namespace), {"limit": str(_PAGE)}
        query |= {"labelSelector": label_selector} if label_selector else {}
        query |= {"fieldSelector": f"metadata.name={name}"} if name else {}
        while True:
            answer = await self._send(request, query=query, is_known=is_known)
            metadata = mapping(answer, "metadata")
            version, more = str(metadata.get("resourceVersion")), metadata.get("continue")
            is_endless = more and more == query.get("continue")
            if not isinstance(answer.get("items"), list) or not version.isdecimal() or is_endless:
                raise ClusterError(f"{request}: the answer of the API server is no list, or one without an end")
            yield Page(answer["items"], answer.get("known", ()), int(version))
            if not more:
                return
            query["continue"] = str(more)

    async def apply(self, body: Body) -> Body:
        """Create or change a child by server-side apply, and take over its fields.

        With a UID in its metadata this very object alone is changed: where it is gone, or another one has its name,
        that is a `ConflictError`.
        """
        return await self._apply(written_resource(body["kind"]), body)

    async def apply_new(self, body: Body) -> Body:
        """Create a child by server-side apply; an object of its name that exists already is a `ConflictError`.

        The API server compares the version that an apply names with that of the object, if there is one.
        """
        anew = {**body, "metadata": {**body["metadata"], "resourceVersion": _VERSION_OF_NONE}}
        return await self._apply(written_resource(body["kind"]), anew)

    async def apply_to(self, resource: Resource, body: Body) -> Body:
        """Create or change an object that is no child by server-side apply."""
        return await self._apply(resource, body)

    async def take_over_fields(self, body: Body, kept_managers: Collection[str]) -> None:
        """Take over what others have written of a child, so that the next apply removes what it does not hold."""
        metadata, left = body["metadata"], _TRIES
        while left:
            live = await self.get(written_resource(body["kind"]), metadata["namespace"], metadata["name"])
            if live is None or live["metadata"]["uid"] != metadata["uid"]:
                return
            version = live["metadata"]["resourceVersion"]
            written = with_fields_taken_over(live, kept_managers)
            try:
                await self.merge(live, {"metadata": {"managedFields": written, "resourceVersion": version}})
            except ConflictError:  # its controller has just written its status
                left -= 1
                if not left:
                    raise
            else:
                return

    async def create(self, body: Body) -> Body:
        """Create an object; one of its name that exists already is a `ConflictError`."""
        request = _Request("POST", written_resource(body["kind"]), body["metadata"]["namespace"])
        # As apply does: what the API server does not know is refused, and not left out.
        return await self._send(request, body, {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"})

    async def try_create(self, resource: Resource, body: Body) -> None:
        """Ask the API server whether it would create an object, with all its admission; nothing is created.

        Raises
        ------
        DeniedError
            When an admission policy denies it.
        UntriableError
            When something does not support dry runs.
        RefusedForNowError
            When a quota has no room.
        ClusterError
            When it cannot be asked, or refuses the object as it is.
        """
        request = _Request("POST", resource, body["metadata"]["namespace"])
        try:
            await self._send(request, body, {"fieldManager": FIELD_MANAGER, "dryRun": "All"})
        except InvalidObjectError as error:
            if _NO_DRY_RUN in str(error):
                raise UntriableError(str(error)) from error
            raise

    async def merge(self, body: Body, patch: Body) -> Body:
        """Apply a merge patch to exactly this object: one that was made anew under its name stays as it is."""
        metadata = body["metadata"]
        if uid := metadata.get("uid"):
            patch = {**patch, "metadata": {**patch.get("metadata", {}), "uid": uid}}
        request = _Request("PATCH", written_resource(body["kind"]), metadata["namespace"], metadata["name"])
        return await self._send(request, patch, {"fieldManager": FIELD_MANAGER}, _MERGE_PATCH)

    async def apply_status(self, resource: Resource, body: Body) -> Body:
        """Write the status subresource by server-side apply."""
        return await self._apply(resource, body, subresource="status")

    async def delete(self, body: Body) -> bool:
        """Delete exactly this object: one that was made anew under its name stays; return whether it was there."""
        metadata = body["metadata"]
        options = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
        request = _Request("DELETE", written_resource(body["kind"]), metadata["namespace"], metadata["name"])
        try:
            await self._send(request, options)
        except (NotFoundError, ConflictError):
            return False
        return True

    async def evict(self, pod: Body) -> None:
        """End exactly this pod, as far as its disruption budget lets it go."""
        metadata = pod["metadata"]
        names = {"name": metadata["name"], "namespace": metadata["namespace"]}
        options = {"preconditions": {"uid": metadata["uid"]}}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": names, "deleteOptions": options}
        await self._send(_Request("POST", POD, metadata["namespace"], metadata["name"], "eviction"), body)

    async def post_event(self, namespace: str, event: Body) -> None:
        """Record an Event."""
        await self._send(_Request("POST", EVENT, namespace), event)

    async def _apply(self, resource: Resource, body: Body, subresource: str | None = None) -> Body:
        metadata = body["metadata"]
        return await self._send(
            _Request("PATCH", resource, metadata.get("namespace"), metadata["name"], subresource),
            body,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            content_type="application/apply-patch+yaml",
        )

    async def _send(
        self,
        request: "_Request",
        body: Body | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        is_known: Callable[[Body], bool] | None = None,
    ) -> Body:
        for wait_s in (*_WAITS_S, None):
            try:
                return _read(request, await self._ask(request, body, query, content_type), is_known)
            except _PassingError as error:
                if wait_s is None:
                    raise error.told from error
                asked_for_s = wait_s if error.retry_after_s is None else min(error.retry_after_s, _LONGEST_WAIT_S)
                # Not all at one moment: what one server turned away would meet there again.
                await asyncio.sleep(asked_for_s * random.uniform(1, _SPREAD))  # noqa: S311  no secret
        raise AssertionError  # the last try returns or raises

    async def _ask(
        self, request: "_Request", body: Body | None, query: Mapping[str, str] | None, content_type: str
    ) -> bytes:
        """Ask once; return what is answered.

        Raises
        ------
        _PassingError
            Another try may help, and does no harm.
        ClusterError
            It would not.
        """
        if request.method != "GET" and not self._may_write():
            raise NotLeadingError(f"{request}: not written, for this replica does not hold the Lease now")
        asked_s = self._clock.steady_s()
        try:
            with for_api_server():
                answer = await send(
                    self._api,
                    request.method,
                    request.path,
                    body,
                    query,
                    content_type=content_type,
                    timeout_s=_REQUEST_TIMEOUT_S,
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            told = ClusterError(f"{request}: the API server cannot be reached ({type(error).__name__})")
            if request.may_repeat and isinstance(error, aiohttp.ClientConnectionError):
                raise _PassingError(told) from error
            raise told from error
        if answer.status < HTTPStatus.BAD_REQUEST:
            self._clock.hear(answer.date, asked_s)  # an error may be a proxy's, with the proxy's time
            return answer.text
        told = _error(request, answer.status, error_message(answer.text, _MESSAGE_LIMIT))
        if request.passes(answer.status) and not isinstance(told, InvalidObjectError):
            raise _PassingError(told, answer.retry_after_s)
        raise told


def _settings() -> client.Configuration:
    """Return how the API server is reached, with the proxy that the environment names for it.

    Left to itself the client asks for the proxy, and in ~/.netrc for a password, in threads before each call.
    """
    settings = client.Configuration.get_default_copy()
    server = urlsplit(settings.host)
    if settings.proxy is None and not proxy_bypass(server.hostname or ""):
        settings.proxy = getproxies().get(server.scheme)
    settings.client_session_kwargs = {"trust_env": False}
    return settings


class _PassingError(Exception):
    """A failure that may be over in a moment."""

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

    @property
    def path(self) -> str:
        return self.resource.path(self.namespace, self.name, self.subresource)

    @property
    def may_repeat(self) -> bool:
        """Whether a request may be sent again that may have been carried out: all but those that make one more."""
        return self.method != "POST"

    def passes(self, status: int) -> bool:
        """Whether another try may help: the API server is overloaded, which is not carried out, or fails for a moment.

        A disruption budget that is used up answers an eviction as an overloaded server does.
        """
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return self.subresource != "eviction"
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR and self.may_repeat

    @property
    def permission(self) -> str:
        """What RBAC must grant for it."""
        verbs = {"GET": "get" if self.name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
        verb = verbs[self.method]
        suffix = f"/{self.subresource}" if self.subresource else ""
        return f"{verb} {self.resource.qualified_plural}{suffix}"

    def __str__(self) -> str:
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.permission} {where}".rstrip()


def _read(request: _Request, text: bytes, is_known: Callable[[Body], bool] | None) -> Body:
    """Return the object of an answer; one that a proxy cut off says nothing, whatever became of the request."""
    try:
        found = read_answer(text, is_known)
    except ValueError as error:
        told = ClusterError(f"{request}: the answer of the API server is no JSON ({error})")
        raise _PassingError(told) if request.may_repeat else told from error
    if not isinstance(found, dict):
        raise ClusterError(f"{request}: the answer of the API server is no object")
    return found


def _error(request: _Request, status: int, message: str) -> ClusterError:
    """Our own error for an HTTP status of the API server."""
    if status == HTTPStatus.FORBIDDEN:
        return _refusal(request, message)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR and _TYPED_PATCH in message:
        # Server-side apply answers so to unknown fields and wrong types.
        return InvalidObjectError(f"{request}: {message}")
    if status == HTTPStatus.UNPROCESSABLE_ENTITY and _ANOTHER_UID in message:
        return ConflictError(f"{request}: there is another of its name")
    kinds: dict[int, type[ClusterError]] = {
        HTTPStatus.BAD_REQUEST: InvalidObjectError,
        HTTPStatus.NOT_FOUND: NotFoundError,
        HTTPStatus.CONFLICT: ConflictError,
        HTTPStatus.UNPROCESSABLE_ENTITY: InvalidObjectError,
    }
    return kinds.get(status, ClusterError)(f"{request}: {message or f'HTTP {status}'}")


def _refusal(request: _Request, message: str) -> ClusterError:
    """Tell a missing permission from what only passes with time."""
    if any(words in message for words in _TEMPORARY):
        return RefusedForNowError(f"{request}: {message}")
    where = f"namespace {request.namespace}" if request.namespace else "the whole cluster"
    told = (
        f"the operator may not {request.permission} in {where}:"
        f" grant it (manifests/operator-role.yaml has the whole list), or see what denied it: {message}"
    )
    return ForbiddenError(told) if _BY_RBAC.search(message) else DeniedError(told, message)
