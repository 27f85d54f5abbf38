"""Start, health, watch handlers and memory of the whole operator, against an API server in memory."""

import asyncio
import gc
import json
import os
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import DEVNULL
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import kopf
import pytest
import yaml

from devcluster.cluster.settings import free_ports
from specdecode_operator.api import capture, deployment
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    CHILDREN,
    DEPLOYMENT,
    DEPLOYMENT_LABEL,
    LEASE,
    MANAGED_BY_LABEL,
    MANAGER,
    MODEL_FACTS_LABEL,
    OWNED_SELECTOR,
    POD,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    TEMPLATE_HASH_ANNOTATION,
    WATCHED,
)
from specdecode_operator.cluster.rights import Scope, permissions
from specdecode_operator.deployment.live_recorder import recorder_config_map
from specdecode_operator.handlers import main
from specdecode_operator.handlers.main import OperatorState, configure, login
from specdecode_operator.handlers.queue import WorkQueue
from tests.support.api_server import ApiServer
from tests.support.captures import capture_spec
from tests.support.embedded_operator import embedded_operator, until
from tests.support.objects import Body, tiny_cpu
from tests.support.rights import role_rights
from tests.support.waiting import DEADLINE_S
from tests.unit.handlers.reconciler_world import pod_metadata
from tests.unit.handlers.resync_rounds import add as add_idle
from tests.unit.handlers.resync_rounds import reason
from tests.unit.handlers.test_watched_objects import answered, line

ROOT = Path(__file__).parents[3]


def metadata(name: str, namespace: str = "team", **more: Any) -> Body:
    return {"metadata": {"namespace": namespace, "name": name, "creationTimestamp": "2026-01-01T00:00:00Z", **more}}


def add(api: ApiServer, name: str, spec: Body, **more: Any) -> Body:
    return api.create(SPECDECODE_DEPLOYMENT, {**metadata(name), "spec": spec, **more})


def ready(api: ApiServer, name: str) -> Body:
    body = api.find(SPECDECODE_DEPLOYMENT, name) or {}
    return next((each for each in body.get("status", {}).get("conditions", []) if each["type"] == "Ready"), {})


def test_operator_roles_grant_exactly_the_listed_permissions() -> None:
    bodies = [*yaml.safe_load_all((ROOT / "manifests/operator-role.yaml").read_text())]
    granted = {body["kind"]: role_rights(body["rules"]) for body in bodies if "rules" in body}
    everywhere, own = permissions(Scope.SERVED, Scope.CLUSTER), permissions(Scope.OWN)
    assert granted == {"ClusterRole": {*everywhere}, "Role": {*own}}


def answer(port: int, path: str) -> tuple[int, str]:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}{path}") as found:
        return found.status, found.read().decode()


async def test_failed_start_is_retried(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_RETRY_S", 0.01)
    api.refusals["list nodes"] = (500, "etcd is slow")
    api.before["list nodes"] = lambda: api.before.update({"list nodes": api.refusals.clear})
    add(api, "llama", tiny_cpu(suspend=True))
    async with embedded_operator(monkeypatch):
        await until(lambda: ready(api, "llama"), lambda: "it works")
    assert [each for each in api.requests if "leases" not in each][:2] == ["list nodes", "list nodes"]


async def test_operator_is_alive_and_not_ready_before_start_completes(api: ApiServer) -> None:
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


async def test_liveness_is_answered_while_the_event_loop_is_blocked(api: ApiServer) -> None:
    """The answer comes from another thread: here the event loop waits for it, and turns for nothing else."""
    (port,) = free_ports(1)
    main.serve_health(port, state := OperatorState())
    await state.start()
    status, _ = answer(port, "/livez")
    assert status == 200
    await state.stop()


def test_kopf_watches_children_by_label_and_posts_no_events() -> None:
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
async def test_in_cluster_login_uses_the_api_server_address(
    monkeypatch: pytest.MonkeyPatch, host: str, server: str
) -> None:
    account = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = await login(OperatorState())
    assert found is not None
    async with found.aiohttp_session as session:
        assert (found.server, session.headers["Authorization"]) == (server, "Bearer t")


LLAMA, OTHER = Key("team", "llama"), Key("team", "other")
DEMO = Key("team", "demo", capture.KIND)
LAST = Key("last", "last")


def body(name: str, version: int = 1, *, namespace: str = "team", **parts: Any) -> Body:
    metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, **parts.pop("metadata", {})}, **parts}


def demo(version: int = 1, **spec: Any) -> Body:
    return body("demo", version, spec={"deployment": "llama", **spec})


def labelled(name: str, version: int = 1, **labels: str) -> Body:
    known = {"deployment": DEPLOYMENT_LABEL, "capture": CAPTURE_LABEL, "facts": MODEL_FACTS_LABEL}
    return body(name, version, metadata={"labels": {known[key]: value for key, value in labels.items()}})


@pytest.fixture
async def state() -> OperatorState:
    """An operator that knows two deployments, one in another namespace, and a capture of the first."""
    state = OperatorState()
    for each in (body("llama"), body("other"), body("llama", namespace="elsewhere")):
        state.handle(None, typed(each, deployment.KIND))
    state.handle(None, typed(demo(), capture.KIND))
    assert await looked_at(state) == [LLAMA, OTHER, Key("elsewhere", "llama"), DEMO]
    return state


async def looked_at(state: OperatorState) -> list[Key]:
    """Work the queue off; return what it held: deployments first, those of the team ahead."""
    found: list[Key] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        found.append(key)
        if not state.queue.longest_wait_s():
            done.set()

    state.queue.add(LAST)
    task = asyncio.create_task(state.queue.run(work))
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    state.queue = WorkQueue(gather_s=0)  # without delays for child events
    found.remove(LAST)
    return sorted(found, key=lambda key: (key.kind == capture.KIND, key.namespace != LLAMA.namespace, key.name))


def typed(body: Body, kind: str) -> Body:
    """Return an object with the fields that only objects of watches have."""
    return {"apiVersion": "v1", "kind": kind, **body}


def bookmark(version: str) -> Body:
    """Return the event that kopf gets in place of one that the operator has handled."""
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}


class TestObjects:
    async def test_many_events_queue_a_deployment_and_its_captures_once(self, state: OperatorState) -> None:
        for version in (2, 3, 4):
            state.handle("MODIFIED", typed(body("llama", version), deployment.KIND))
        assert await looked_at(state) == [LLAMA, DEMO]
        assert (state.cache.parent(LLAMA) or {})["metadata"]["resourceVersion"] == "4"

    async def test_event_of_a_known_version_queues_only_captures(self, state: OperatorState) -> None:
        """The operator has written the status itself."""
        state.cache.put_parent(deployment.KIND, body("llama", 5))
        known, new = (typed(body("llama", version), deployment.KIND) for version in (5, 6))
        _, events = await answered(state.objects, line("MODIFIED", known))
        assert (events, await looked_at(state)) == ([bookmark("5")], [DEMO])
        _, events = await answered(state.objects, line("MODIFIED", new))
        assert (events, await looked_at(state)) == ([bookmark("6")], [LLAMA, DEMO])

    async def test_event_of_a_known_child_queues_its_owner(self, state: OperatorState) -> None:
        """The operator has written the child itself, and its next reconcile follows from that."""
        labels = {MANAGED_BY_LABEL: MANAGER, DEPLOYMENT_LABEL: "llama"}
        child = typed(body("llama-1", 5), "Pod")
        child["metadata"]["labels"] = labels
        state.cache.put("Pod", child)
        _, events = await answered(state.objects, line("ADDED", child))
        assert (events, await looked_at(state)) == ([bookmark("5")], [LLAMA, DEMO])

    @pytest.mark.parametrize(("type_", "is_there"), [("ADDED", True), ("MODIFIED", True), ("DELETED", False)])
    async def test_event_of_a_child_is_handled_without_kopf(
        self, state: OperatorState, type_: str, is_there: bool
    ) -> None:
        child = typed(body("llama-1", 5), "Pod")
        child["metadata"]["labels"] = {MANAGED_BY_LABEL: MANAGER, DEPLOYMENT_LABEL: "llama"}
        if not is_there:
            state.cache.put("Pod", child)
        changed = {**child, "metadata": {**child["metadata"], "resourceVersion": "6"}}
        _, events = await answered(state.objects, line(type_, changed))
        assert (events, await looked_at(state)) == ([bookmark("6")], [LLAMA, DEMO])
        assert bool(state.cache.children_of(LLAMA, "Pod")) is is_there

    async def test_changed_children_precede_listed_ones(self, state: OperatorState) -> None:
        order, done = list[Key](), asyncio.Event()

        async def work(key: Key) -> None:
            order.append(key)
            if LLAMA in order:
                done.set()

        state.queue = WorkQueue(workers=1, gather_s=0)
        for type_, name in ((None, "llama"), ("ADDED", "other")):
            state.handle(type_, typed(labelled(f"{name}-1", deployment=name), "Service"))
        task = asyncio.create_task(state.queue.run(work))
        async with asyncio.timeout(DEADLINE_S):
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert order[0] == OTHER

    async def test_failure_with_a_child_is_logged_and_its_kind_is_listed_again(
        self, state: OperatorState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(state.cache, "put", Mock(side_effect=RuntimeError("a bug")))
        child = typed(body("llama-1", 5), "Pod")
        _, events = await answered(state.objects, line("ADDED", child))
        assert events == [bookmark("5")]
        assert "Pod" in state.relist.due
        assert "a bug" in caplog.text

    async def test_deleted_object_of_a_known_version_is_not_left_out(self, state: OperatorState) -> None:
        gone = typed(body("llama", 5), deployment.KIND)
        state.cache.put_parent(deployment.KIND, gone)
        _, events = await answered(state.objects, line("DELETED", gone))
        assert (events, state.cache.parent(LLAMA), await looked_at(state)) == ([bookmark("5")], None, [LLAMA, DEMO])

    async def test_late_events_do_not_restore_old_versions(self, state: OperatorState) -> None:
        state.handle("MODIFIED", typed(body("llama", 9), deployment.KIND))
        state.handle("MODIFIED", typed(body("llama", 8), deployment.KIND))
        assert (state.cache.parent(LLAMA) or {})["metadata"]["resourceVersion"] == "9"
        state.handle("DELETED", typed(body("llama", 10), deployment.KIND))
        state.handle("MODIFIED", typed(body("llama", 9), deployment.KIND))
        assert state.cache.parent(LLAMA) is None


class TestSharedRecorder:
    """Objects of a namespace are queued to repair it, and not for the operator's own writes."""

    async def test_own_write_queues_no_object(self, state: OperatorState) -> None:
        await self.happens(state, "ADDED", {})
        assert await looked_at(state) == []

    async def test_edit_queues_the_deployments_of_the_namespace(self, state: OperatorState) -> None:
        await self.happens(state, "MODIFIED", {"binaryData": {"recorder.zip": "AA=="}})
        assert await looked_at(state) == [LLAMA, OTHER]

    async def test_lost_label_queues_the_deployments_of_the_namespace(self, state: OperatorState) -> None:
        metadata = {
            "namespace": "team",
            "name": "specdecode-recorder",
            "labels": {"app.kubernetes.io/managed-by": "specdecode-operator"},
        }
        await self.happens(state, "MODIFIED", {"metadata": metadata})
        assert await looked_at(state) == [LLAMA, OTHER]

    async def test_deletion_queues_the_deployments_of_the_namespace(self, state: OperatorState) -> None:
        await self.happens(state, "DELETED", {})
        assert await looked_at(state) == [LLAMA, OTHER]

    async def happens(self, state: OperatorState, type_: str, changes: Body) -> None:
        found = {**recorder_config_map("team"), **changes}
        found["metadata"] |= {"uid": "recorder", "resourceVersion": "7"}
        state.handle(type_, found)


_NO_LEADER = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcdserver: no leader"}}


@pytest.mark.parametrize(
    "last_words",
    [
        b"",
        b'{"type":"MODIFIED","object":{"metadata":{"na',
        json.dumps(_NO_LEADER, separators=(",", ":")).encode() + b"\n",
    ],
    ids=["in peace", "in mid-word", "with an error"],
)
async def test_ended_watch_restarts_for_any_cause(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, last_words: bytes
) -> None:
    async with embedded_operator(monkeypatch):
        add_idle(api)
        await until(lambda: reason(api), lambda: "the first is looked at")
        api.end_watches(last_words)
        add_idle(api, "second")
        await until(lambda: reason(api, name="second"), lambda: "the second is looked at")


def test_refused_watches_are_retried_without_limit() -> None:
    """A namespace in which the operator has lost its rights takes it from no other."""
    settings = kopf.OperatorSettings()
    configure(settings)
    backoffs_s = settings.networking.error_backoffs
    for _ in range(2):  # each request begins with the first
        waits_s = [*islice(backoffs_s, 1000)]  # type: ignore[arg-type]  # a number would be one wait
        assert (waits_s[0], len(waits_s), max(waits_s) <= 30) == (1, 1000, True)


async def test_process_exits_if_watches_fail_permanently(api: ApiServer, tmp_path: Path) -> None:
    """Nothing would be done by it, and nobody would start it anew."""
    (port,) = free_ports(1)
    add_idle(api)
    command = [sys.executable, "-m", "specdecode_operator", "operator", f"--health-port={port}", "--metrics-port=0"]
    variables = {"SPECDECODE_OPERATOR_IMAGE": "image:1", "POD_NAMESPACE": "system", "POD_NAME": "operator-0"}
    async with api.serving(tmp_path / "kubeconfig"):
        process = await asyncio.create_subprocess_exec(
            *command,
            "--leader-election=operator",
            cwd=ROOT,
            env={**os.environ, **variables, "KUBECONFIG": str(tmp_path / "kubeconfig")},
            stdout=DEVNULL,
            stderr=DEVNULL,
        )
        try:
            await until(lambda: reason(api), lambda: f"the object is looked at ({process.returncode})")
            missing = (404, "the server could not find the requested resource")
            api.refusals = {"list pods": missing, "watch pods": missing}
            api.end_watches()
            async with asyncio.timeout(60):
                assert await process.wait() != 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert not (api.find(LEASE, "operator") or {})["spec"].get("holderIdentity"), "another may begin at once"


NAMESPACE = "churn"
SPECS: tuple[Body, ...] = (
    tiny_cpu(replicas=2),
    tiny_cpu(suspend=True),
    tiny_cpu(serving={"maxModelLen": 0}),
    tiny_cpu(policy={"windowSeconds": 300, "cooldownSeconds": 600}),
)


def keepers() -> list[object]:
    """Return what holds keys of the objects of this test: whoever remembers one does so by its key."""
    gc.collect()
    keys = [each for each in gc.get_objects() if isinstance(each, Key) and each.namespace == NAMESPACE]
    return [each for each in gc.get_referrers(*keys) if isinstance(each, dict | set | tuple)] if keys else []


def collect_garbage(api: ApiServer) -> None:
    """Remove what was made while its owner went, as Kubernetes does."""
    for resource in CHILDREN:
        for name in api.names(resource):
            api.remove(resource, name)


def churned(name: str) -> Body:
    return {"namespace": NAMESPACE, "name": name}


def start_engine(api: ApiServer, name: str) -> None:
    """Let a Deployment have a pod that serves nobody."""
    workload = api.find(DEPLOYMENT, name)
    if workload is None:
        return
    template = workload["spec"]["template"]["metadata"]
    marks = {TEMPLATE_HASH_ANNOTATION: template["annotations"][TEMPLATE_HASH_ANNOTATION]}
    made = pod_metadata(workload)
    # There are no ReplicaSets here, so the pod goes with its Deployment.
    owner = {"uid": workload["metadata"]["uid"], "kind": "Deployment", "name": name, "apiVersion": "apps/v1"}
    about = {
        **churned(f"{name}-pod"),
        "labels": made["labels"],
        "annotations": marks,
        "ownerReferences": [*made["ownerReferences"], owner],
    }
    ready = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    api.create(POD, {"metadata": about, "status": ready})


async def test_deleted_objects_leave_nothing_in_memory(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with embedded_operator(monkeypatch) as operator:
        for round_ in range(3):
            names = [f"llama-{round_}-{number}" for number in range(len(SPECS))]
            for name, spec in zip(names, SPECS, strict=True):
                api.create(SPECDECODE_DEPLOYMENT, {"metadata": churned(name), "spec": spec})
            capture = {"metadata": churned(f"capture-{round_}"), "spec": capture_spec(deployment=names[0])}
            api.create(SPECDECODE_CAPTURE, capture)

            def told(names: list[str] = names) -> bool:
                return all("status" in (api.find(SPECDECODE_DEPLOYMENT, name) or {}) for name in names)

            await until(told, lambda: "all are looked at")
            for name in names:
                start_engine(api, name)
            assert keepers()
            api.remove(SPECDECODE_CAPTURE, f"capture-{round_}")
            for name in names:
                api.remove(SPECDECODE_DEPLOYMENT, name)
            await until(lambda: not operator.state.cache.parents(), lambda: "their end is seen")

        def is_forgotten() -> bool:
            collect_garbage(api)
            return not keepers()

        await until(is_forgotten, lambda: f"still known: {[str(each)[:300] for each in keepers()]}")


async def test_login_waits_after_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf logs in again at once after HTTP 401."""
    account = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: None)
    monkeypatch.setattr(kopf, "login_with_kubeconfig", lambda **_: account)
    state, waits_s = OperatorState(), list[float]()

    async def wait(seconds: float) -> None:
        waits_s.append(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: 1000.0)
        patch.setattr(asyncio, "sleep", wait)
        sessions = [await login(state) for _ in range(2)]
    assert waits_s == [-1000, 5]
    for found in sessions:
        assert found is not None
        await found.aiohttp_session.close()
