"""The whole operator against an API server in memory: what it asks for, its start, its health and its end."""

import asyncio
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml

from devcluster.cluster.settings import free_ports
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.manifests import child_labels, owned, owner_reference
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    CAPTURED_DEPLOYMENT_LABEL,
    CHILDREN,
    DEPLOYMENT,
    JOB,
    LEADER_WORKER_SET,
    LEASE,
    NODE,
    OWNED_SELECTOR,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    PUBLISHED_LABEL,
    SCHEDULE_LABEL,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    STORAGE_CLASS,
    WATCHED,
)
from specdecode_operator.cluster.rights import RELEASE, SERVES, Scope, permissions
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.handlers import main
from specdecode_operator.handlers.main import login
from specdecode_operator.handlers.operator_state import IMAGE_VARIABLE, OperatorState, Settings
from tests.support.api_server import ApiServer
from tests.support.captures import capture_spec
from tests.support.embedded_operator import embedded_operator, until
from tests.support.objects import H100, H200, Body, pair_70b, tiny_cpu
from tests.support.rights import role_rights
from tests.unit.deployment.pods.groups import WIDE, spec_at
from tests.unit.deployment.spec.test_model_facts import undescribed

ROOT = Path(__file__).parents[3]
LISTED = frozenset(permissions())
"""What the operator is said to need."""

ELSEWHERE = {
    "create pods/eviction",
    "create leases.coordination.k8s.io",
    *(f"{verb} leases.coordination.k8s.io {name}" for verb in ("get", "patch") for name in (RELEASE, SERVES)),
}
"""Used after a quarter of an hour of watching engines at the earliest: test_policy.py. By several operators:
test_leadership.py."""


def metadata(name: str, namespace: str = "team", **more: Any) -> Body:
    return {"metadata": {"namespace": namespace, "name": name, "creationTimestamp": "2026-01-01T00:00:00Z", **more}}


def add(api: ApiServer, name: str, spec: Body, **more: Any) -> Body:
    return api.create(SPECDECODE_DEPLOYMENT, {**metadata(name), "spec": spec, **more})


def ready(api: ApiServer, name: str) -> Body:
    body = api.find(SPECDECODE_DEPLOYMENT, name) or {}
    return next((each for each in body.get("status", {}).get("conditions", []) if each["type"] == "Ready"), {})


def add_nodes(api: ApiServer) -> None:
    for number in range(2):
        node = {"metadata": {"name": f"n{number}", "labels": {"nvidia.com/gpu.product": H100}}}
        api.create(NODE, {**node, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})


def add_leftovers(api: ApiServer, body: Body) -> None:
    """Let an object own one child of each kind that its spec does not want."""
    owner = parse_deployment(body)
    for resource in CHILDREN:
        child = owned(
            {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": "leftover"}, "spec": {}},
            owner.key,
            owner.uid,
        )
        api.create(resource, child)


def add_scheduled(api: ApiServer, body: Body) -> None:
    """Let a schedule have a capture that runs, and two that succeeded with a claim each."""
    key = parse_deployment(body).key
    for name, phase in (("running", "Loading"), ("older", "Succeeded"), ("newer", "Succeeded")):
        labels = {SCHEDULE_LABEL: "often"}
        meta = metadata(name, labels=labels, ownerReferences=[owner_reference(key, body["metadata"]["uid"])])
        meta["metadata"]["creationTimestamp"] = f"2026-01-0{1 + (name == 'newer')}T00:00:00Z"
        ended = {"type": "Succeeded", "status": "True" if phase == "Succeeded" else "Unknown", "reason": "R"}
        ended |= {"message": "", "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {"phase": phase, "conditions": [ended]}
        api.create(SPECDECODE_CAPTURE, {**meta, "spec": {"deployment": key.name}, "status": status})
        if phase == "Succeeded":
            owner = {**child_labels(key), CAPTURE_LABEL: name, CAPTURED_DEPLOYMENT_LABEL: key.name}
            claim = metadata(f"{name}-capture", labels={**owner, **labels, PUBLISHED_LABEL: "true"})
            claim["metadata"]["creationTimestamp"] = meta["metadata"]["creationTimestamp"]
            api.create(PERSISTENT_VOLUME_CLAIM, claim)


OFTEN = {
    "name": "often",
    "schedule": "* * * * *",
    "concurrencyPolicy": "Replace",
    "successfulHistoryLimit": 1,
    "retention": {"count": 1},
}


def undone(api: ApiServer) -> list[str]:
    """Name what the operator has not done yet."""
    captures, claims, jobs = (api.names(each) for each in (SPECDECODE_CAPTURE, PERSISTENT_VOLUME_CLAIM, JOB))
    phase = (api.find(SPECDECODE_CAPTURE, "asked") or {}).get("status", {}).get("phase")
    done = {
        "engines": {"tiny", "timed"} <= {*api.names(DEPLOYMENT)} and "wide-lws" in api.names(LEADER_WORKER_SET),
        "leftovers": api.names(*CHILDREN).count("leftover") == 1,  # no Service is ever deleted
        "reading": any(name.startswith("unknown-") for name in jobs),
        "capture": "asked-capture" in jobs and "asked-capture" in claims and phase is not None,
        "scheduled capture": any(name.startswith("timed-often-") for name in captures),
        "history": "older" not in captures,
        "retention": "older-capture" not in claims,
        "cancellation": (api.find(SPECDECODE_CAPTURE, "running") or {})["spec"].get("suspend") is True,
        "statuses": all(ready(api, name) for name in ("tiny", "wide", "unknown", "timed")),
        "watches": {each for each in LISTED if each.startswith("watch ")} <= api.used,
    }
    return [what for what, is_done in done.items() if not is_done]


async def test_the_operator_needs_exactly_the_rights_that_are_listed(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does all that it ever does: what it asked for then is what it needs."""
    monkeypatch.delenv(IMAGE_VARIABLE)
    monkeypatch.setenv("POD_NAMESPACE", "specdecode-system")
    monkeypatch.setenv("POD_NAME", "operator-1")
    own = metadata("operator-1", namespace="specdecode-system")
    api.create(POD, {**own, "spec": {"containers": [{"name": "operator", "image": "operator:1"}]}})
    add_nodes(api)
    add_leftovers(api, add(api, "tiny", tiny_cpu(replicas=2)))
    add(api, "wide", spec_at(WIDE))
    add(api, "unknown", undescribed())
    since = {"name": "often", "schedule": "* * * * * UTC", "since": "2026-01-01T00:00:00Z"}
    add_scheduled(api, add(api, "timed", tiny_cpu(captures=[OFTEN]), status={"captures": [since]}))
    for name, count in (("tiny", 2), ("timed", 1)):
        for number in range(count):  # a capture that keeps its engines goes after them
            engine = metadata(f"{name}-{number}", labels=child_labels(Key("team", name)))
            api.create(POD, {**engine, "status": {"phase": "Running"}})
    marked = {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    api.create(STORAGE_CLASS, {"metadata": {"name": "fast", **marked}, "volumeBindingMode": "WaitForFirstConsumer"})
    asked = {**metadata("asked"), "spec": capture_spec(deployment="tiny", deploymentDuringCapture="Suspend")}
    api.create(SPECDECODE_CAPTURE, asked)

    async with embedded_operator(monkeypatch):
        await until(
            lambda: not undone(api) and api.used >= LISTED - ELSEWHERE,
            lambda: f"{undone(api)} are done; rights not used: {LISTED - api.used}",
        )
    assert {"unused": LISTED - api.used - ELSEWHERE, "not listed": api.used - LISTED} == {
        "unused": set(),
        "not listed": set(),
    }


def test_the_roles_grant_exactly_the_rights_that_are_listed() -> None:
    bodies = [*yaml.safe_load_all((ROOT / "manifests/operator-role.yaml").read_text())]
    granted = {body["kind"]: role_rights(body["rules"]) for body in bodies if "rules" in body}
    everywhere, own = permissions(Scope.SERVED, Scope.CLUSTER), permissions(Scope.OWN)
    assert granted == {"ClusterRole": {*everywhere}, "Role": {*own}}


async def test_in_named_namespaces_it_asks_about_nothing_else(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    add_nodes(api)
    api.create(LEASE, metadata(SERVES))  # the chart makes it
    fleet = (NodeFacts("given", H200, 8),)
    add(api, "here", pair_70b())
    elsewhere = {"metadata": {**metadata("elsewhere")["metadata"], "namespace": "others"}}
    api.create(SPECDECODE_DEPLOYMENT, {**elsewhere, "spec": tiny_cpu()})
    async with embedded_operator(monkeypatch, Settings(namespaces=("team",), nodes=fleet)) as operator:
        await until(lambda: "here" in api.names(DEPLOYMENT), lambda: f"its engines: {ready(api, 'here')}")
        add(api, "later", tiny_cpu())
        await until(lambda: "later" in api.names(DEPLOYMENT), lambda: "a watch tells of what comes")
        api.create(SPECDECODE_DEPLOYMENT, {**elsewhere, "metadata": {**elsewhere["metadata"], "name": "too"}})
        assert {key.namespace for key in operator.state.cache.parents()} == {"team"}
    assert api.places == {"team"}
    assert api.used <= {*permissions(Scope.SERVED, Scope.NAMED)}
    assert not ready(api, "elsewhere")


async def test_a_deletion_that_no_watch_told_of_is_seen_in_named_namespaces(api: ApiServer) -> None:
    state = OperatorState(Settings(namespaces=("others", "team")))
    add(api, "llama", tiny_cpu(suspend=True))
    await state.start()
    assert [key.name for key in state.cache.parents()] == ["llama"]
    api.remove(SPECDECODE_DEPLOYMENT, "llama")
    await state.stop()
    await state.start()
    assert not state.cache.parents()
    await state.stop()


def answer(port: int, path: str) -> tuple[int, str]:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}{path}") as found:
        return found.status, found.read().decode()


async def test_what_watches_bring_is_carried_out_also_after_they_broke_off(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with embedded_operator(monkeypatch) as operator:
        add(api, "llama", tiny_cpu(suspend=True))
        await until(lambda: ready(api, "llama"), lambda: "it is seen")
        api.end_watches()
        api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(replicas=0))
        await until(lambda: ready(api, "llama")["reason"] == "ScaledToZero", lambda: "the change is seen")
        api.remove(SPECDECODE_DEPLOYMENT, "llama")
        await until(lambda: not operator.state.cache.parents(), lambda: "its end is seen")
        status, _ = await asyncio.to_thread(answer, operator.health_port, "/healthz")
        assert status == 200
        assert api.connections()
    await until(lambda: not api.connections(), lambda: "all connections are closed at its end")
    assert not [each for each in api.requests if each.startswith("patch specdecodedeployments.specdecode.io ")], (
        "kopf keeps nothing on objects: neither annotations nor finalizers"
    )


async def test_a_start_that_fails_is_tried_again(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_RETRY_S", 0.01)
    api.refusals["list nodes"] = (500, "etcd is slow")
    api.before["list nodes"] = lambda: api.before.update({"list nodes": api.refusals.clear})
    add(api, "llama", tiny_cpu(suspend=True))
    async with embedded_operator(monkeypatch):
        await until(lambda: ready(api, "llama"), lambda: "it works")
    assert [each for each in api.requests if "leases" not in each][:2] == ["list nodes", "list nodes"]


async def test_a_task_that_ended_makes_the_operator_unhealthy(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with embedded_operator(monkeypatch) as operator:
        operator.state._tasks[0].cancel()
        await asyncio.wait(operator.state._tasks[:1])
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(answer, operator.health_port, "/healthz")
    assert refused.value.code == 500


async def test_a_start_that_waits_for_the_api_server_is_alive_and_not_ready(api: ApiServer) -> None:
    (port,) = free_ports(1)
    main.serve_health(port, state := OperatorState())

    async def status(path: str) -> int:
        try:
            return (await asyncio.to_thread(answer, port, path))[0]
        except urllib.error.HTTPError as error:
            return error.code

    assert [await status(path) for path in ("/livez", "/readyz", "/healthz", "/")] == [200, 503, 503, 404]
    await state.start()
    assert [await status(path) for path in ("/livez", "/readyz", "/healthz")] == [200, 200, 200]
    deployment = yaml.safe_load((ROOT / "manifests/deployment.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert [await status(probe["httpGet"]["path"]) for probe in probes.values()] == [200, 200, 200]
    given_s = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert given_s >= 300, "a start took 50 s on a machine with load 15"
    await state.stop()


async def test_a_loop_that_plans_for_long_is_alive(api: ApiServer) -> None:
    """The answer comes from another thread: here the event loop waits for it, and turns for nothing else."""
    (port,) = free_ports(1)
    main.serve_health(port, state := OperatorState())
    await state.start()
    status, _ = answer(port, "/livez")
    assert status == 200
    await state.stop()


def test_kopf_asks_for_belongings_by_our_label_and_keeps_no_state_of_its_own_in_metadata() -> None:
    settings = kopf.OperatorSettings()
    main.configure(settings)
    for each in WATCHED:
        known = kopf.Resource(each.group, "v1", each.plural, kind=each.kind)
        assert [*settings.watching.label_selectors.collect(known)] == [OWNED_SELECTOR]
    ours = kopf.Resource("specdecode.io", "v1alpha1", "specdecodedeployments")
    assert not [*settings.watching.label_selectors.collect(ours)]
    assert not settings.posting.enabled


@pytest.mark.parametrize(
    ("host", "server"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
async def test_in_a_pod_the_api_server_is_reached_by_address(
    monkeypatch: pytest.MonkeyPatch, host: str, server: str
) -> None:
    account = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = await login()
    assert found is not None
    async with found.aiohttp_session as session:
        assert (found.server, session.headers["Authorization"]) == (server, "Bearer t")


async def test_told_to_end_it_ends_its_own_work_before_kopf_does(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with embedded_operator(monkeypatch) as operator:
        signal.raise_signal(signal.SIGTERM)
        await until(operator.state.ended.is_set, lambda: "the work has ended")
        assert not operator.state.has_started
