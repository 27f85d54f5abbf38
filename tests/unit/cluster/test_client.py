"""Writes of the API client: retries, rejections, conflicts, proxies and malformed answers."""

import json
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ServerDisconnectedError, web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import kube_config

from specdecode_operator.cluster import client
from specdecode_operator.cluster.client import (
    Cluster,
    ClusterError,
    ConflictError,
    DeniedError,
    ForbiddenError,
    RefusedForNowError,
)
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.resources import SERVICE as SERVICE_KIND

SERVICE_METADATA = {"namespace": "team", "name": "llama"}
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": SERVICE_METADATA}


class RefusingApi:
    """An API server that refuses everything with one message."""

    def __init__(self, message: str) -> None:
        self._message = message

    async def param_serialize(self, *request: Any, **_: Any) -> tuple[Any, ...]:
        return *request, {}

    async def call_api(self, *_: Any, **__: Any) -> Any:
        async def read() -> bytes:
            return json.dumps({"message": self._message}).encode()

        return SimpleNamespace(status=403, headers={}, read=read)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ('services "llama" is forbidden: exceeded quota: small, requested: count/services=1', RefusedForNowError),
        ('services "llama" is forbidden: status unknown for quota: small, resources: pods', RefusedForNowError),
        ("namespace team because it is being terminated", RefusedForNowError),
        ('User "operator" cannot patch resource "services"', ForbiddenError),
        ('admission webhook "policy.example.com" denied the request: no images from there', DeniedError),
    ],
)
async def test_forbidden_answers_are_classified_by_message(message: str, kind: type[ClusterError]) -> None:
    with pytest.raises(ClusterError) as refused:
        await Cluster(cast("ApiClient", RefusingApi(message))).apply(SERVICE)
    assert type(refused.value) is kind
    assert message in str(refused.value)


class WrittenByOthers:
    """An API server with an object into which somebody else has written, and whose controller keeps writing."""

    def __init__(self, uid: str = "1", conflicts: int = 0) -> None:
        self._uid, self._conflicts = uid, conflicts
        self.reads = 0
        self.written: list[Any] = []

    async def param_serialize(self, *request: Any, **_: Any) -> tuple[Any, ...]:
        return *request, {}

    async def call_api(self, method: str, *rest: Any, **_: Any) -> Any:
        status, answer = 200, {}
        if method == "GET":
            self.reads += 1
            theirs = {"manager": "vim", "operation": "Update", "fieldsV1": {"f:spec": {"f:type": {}}}}
            metadata = {"uid": self._uid, "resourceVersion": f"v{self.reads}", "managedFields": [theirs]}
            answer = {**SERVICE, "metadata": {**SERVICE_METADATA, **metadata}}
        elif self._conflicts:
            status, self._conflicts = 409, self._conflicts - 1
        else:
            self.written.append(rest[-1]["metadata"])

        async def read() -> bytes:
            return json.dumps(answer).encode()

        return SimpleNamespace(status=status, headers={}, read=read)


CHILD = {**SERVICE, "metadata": {**SERVICE_METADATA, "uid": "1"}}


async def test_take_over_fields_requires_the_version_that_was_read() -> None:
    api = WrittenByOthers(conflicts=2)
    await Cluster(cast("ApiClient", api)).take_over_fields(CHILD, ())
    (metadata,) = api.written
    assert metadata["resourceVersion"] == "v3", "that of the last reading: another write in between is a conflict"
    assert [each["manager"] for each in metadata["managedFields"]] == ["specdecode-operator"]


async def test_take_over_fields_gives_up_after_repeated_conflicts() -> None:
    api = WrittenByOthers(conflicts=99)
    with pytest.raises(ConflictError):
        await Cluster(cast("ApiClient", api)).take_over_fields(CHILD, ())
    assert api.reads == 5


class Answering:
    """An API server that answers one status or text after another, or breaks the connection; the last one for good."""

    def __init__(
        self, *answers: int | bytes | Exception, retry_after: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self._answers = list(answers)
        self._headers = {**(headers or {}), **({"Retry-After": retry_after} if retry_after else {})}
        self.asked = 0
        self.sent: list[Any] = []

    async def param_serialize(self, *request: Any, **parts: Any) -> tuple[Any, ...]:
        return *request, parts

    async def call_api(self, *request: Any, **_: Any) -> Any:
        self.sent.append(request)
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer

        said = answer if isinstance(answer, bytes) else b'{"message": "too many requests", "metadata": {}}'

        async def read() -> bytes:
            return said

        status = 200 if isinstance(answer, bytes) else answer
        return SimpleNamespace(status=status, headers=self._headers, read=read)


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, which takes no time."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(client.asyncio, "sleep", sleep)
    return found


BROKEN = ServerDisconnectedError()
TORN = b'{"metadata": {"na'


@pytest.mark.parametrize(
    "failure", [429, 500, 503, BROKEN, TORN], ids=["overloaded", "internal", "unavailable", "broken", "torn"]
)
async def test_transient_failures_are_retried(failure: int | bytes | Exception, slept_s: list[float]) -> None:
    api = Answering(failure, failure, 200)
    await Cluster(cast("ApiClient", api)).apply(SERVICE)
    assert api.asked == 3
    assert 0.2 <= slept_s[0] <= 0.3 < slept_s[1]


@pytest.mark.parametrize(
    ("asked_for", "least_s", "most_s"), [("4", 4.0, 6.0), ("3600", 10.0, 15.0), ("soon", 0.2, 0.3)]
)
async def test_retry_after_is_respected_within_bounds(
    asked_for: str, least_s: float, most_s: float, slept_s: list[float]
) -> None:
    api = Answering(429, 200, retry_after=asked_for)
    await Cluster(cast("ApiClient", api)).create(SERVICE)
    assert least_s <= slept_s[0] <= most_s


async def test_persistent_failure_is_raised_after_three_attempts(slept_s: list[float]) -> None:
    api = Answering(503)
    with pytest.raises(ClusterError, match="too many requests"):
        await Cluster(cast("ApiClient", api)).apply(SERVICE)
    assert api.asked == len(slept_s) + 1 == 3


@pytest.mark.parametrize("failure", [503, BROKEN, TORN, b"[]"], ids=["unavailable", "broken", "torn", "a list"])
async def test_creation_that_may_have_succeeded_is_not_retried(
    failure: int | bytes | Exception, slept_s: list[float]
) -> None:
    api = Answering(failure)
    with pytest.raises(ClusterError):
        await Cluster(cast("ApiClient", api)).create(SERVICE)
    assert (api.asked, slept_s) == (1, [])


EVENT = {"metadata": {"namespace": "team"}, "involvedObject": {"kind": "Service", **SERVICE_METADATA}}


async def test_event_waits_while_writes_pause(slept_s: list[float]) -> None:
    api, leads = Answering(200), [True]
    cluster = Cluster(cast("ApiClient", api), lambda: leads[-1] or len(slept_s) == 2)
    cluster.post_event(EVENT)
    leads.append(False)
    await cluster.events_posted()
    assert (api.asked, slept_s) == (1, [1.0, 1.0])


async def test_connections_close_after_the_last_event() -> None:
    class Closing(Answering):
        async def close(self) -> None:
            self.sent.append(("close",))

    api = Closing(200)
    cluster = Cluster(cast("ApiClient", api))
    cluster.post_event(EVENT)
    await cluster.close()
    assert [request[0] for request in api.sent] == ["POST", "close"]


async def test_eviction_refused_by_a_budget_is_not_retried(slept_s: list[float]) -> None:
    api = Answering(429)
    with pytest.raises(ClusterError):
        await Cluster(cast("ApiClient", api)).evict({"metadata": {**SERVICE_METADATA, "uid": "1"}})
    assert (api.asked, slept_s) == (1, [])


async def test_merge_delete_and_evict_send_the_uid() -> None:
    api, body = Answering(b"{}"), {**SERVICE, "metadata": {**SERVICE_METADATA, "uid": "the-first"}}
    cluster = Cluster(cast("ApiClient", api))
    for write in (cluster.merge(body, {"spec": {}}), cluster.delete(body), cluster.evict(body)):
        await write
    assert ["the-first" in str(sent) for sent in api.sent] == [True] * 3


@pytest.mark.parametrize("bypassed", [False, True])
async def test_http_proxy_and_no_proxy_variables_are_respected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, bypassed: bool
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(str(request.url))
        return web.json_response({"message": "not found"}, status=404)

    proxy = TestServer(web.Application())
    proxy.app.router.add_route("*", "/{path:.*}", answer)
    kubeconfig = tmp_path / "kubeconfig"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "http://api.invalid"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    kubeconfig.write_text(json.dumps(config))
    async with proxy:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        monkeypatch.setenv("HTTP_PROXY", str(proxy.make_url("/")))
        monkeypatch.setenv("NO_PROXY", "api.invalid" if bypassed else "")
        cluster = await Cluster.connect()
        try:
            with pytest.raises(ClusterError) if bypassed else nullcontext():
                assert await cluster.get(SERVICE_KIND, "team", "llama") is None
        finally:
            await cluster.close()
    assert asked == [] if bypassed else ["http://api.invalid/api/v1/namespaces/team/services/llama"]


@pytest.mark.parametrize(("status", "learned"), [(200, True), (403, False), (404, False)])
async def test_server_time_is_learned_only_from_successful_answers(status: int, *, learned: bool) -> None:
    """An error may be the answer of a proxy, whose clock is another."""
    api, clock = Answering(status, headers={"Date": "Sat, 21 Nov 2026 12:00:00 GMT"}), ServerTime()
    with nullcontext() if learned else suppress(ClusterError):
        await Cluster(cast("ApiClient", api), clock=clock).apply(SERVICE)
    assert clock.is_known is learned
    assert (clock.now().date().isoformat() == "2026-11-21") is learned


class ListingApi:
    """An API server, or a proxy before it, that answers every list with one text."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer
        self.asked = 0

    async def param_serialize(self, *request: Any, **_: Any) -> tuple[Any, ...]:
        return *request, {}

    async def call_api(self, *_: Any, **__: Any) -> Any:
        self.asked += 1

        async def read() -> bytes:
            return json.dumps(self._answer).encode()

        return SimpleNamespace(status=200, headers={}, read=read)


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        ({}, 1),
        ({"items": []}, 1),
        ({"items": [], "metadata": {"resourceVersion": ""}}, 1),
        ({"metadata": {"resourceVersion": "7"}}, 1),
        ({"items": [], "metadata": {"resourceVersion": "7", "continue": "again"}}, 2),
    ],
)
async def test_malformed_list_is_an_error_and_paging_ends(answer: dict[str, Any], asked: int) -> None:
    api = ListingApi(answer)
    with pytest.raises(ClusterError, match="list services: the response of the API server is not a list"):
        await Cluster(cast("ApiClient", api)).list(SERVICE_KIND)
    assert api.asked == asked
