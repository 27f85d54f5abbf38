"""A policy against a real API server: an engine decays, load rises, the operator restarts, a person edits.

Engines are pages on the loopback, and the test is their kubelet. What a policy decides over days is seen in
tests/unit/deployment, on vLLM's own counters in tests/component/operator/policy, and what it reads and writes in
tests/unit/handlers/test_speculation_policy.py.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from tests.component.operator.test_lifecycle import apply, report, template_hash, wanted_hash
from tests.support.conditions import wait_for
from tests.support.http_server import Quiet, serving
from tests.support.kubectl import Kubectl
from tests.support.operator_process import OperatorProcess
from tests.support.policy_field_cases import OFF_ARM, measured_capture
from tests.support.waiting import eventually

NAMES = find_profile(KNOWN_VERSIONS[-1]).metrics
DRAFTS_A_SECOND, K = 200, 3
RUNNING = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}


@dataclass
class Engines:
    """What all engines say, each by its address; every pod gets one of its own."""

    running: int = 8
    decayed: str = ""
    addresses: dict[str, str] = field(default_factory=dict)
    begun_s: float = field(default_factory=time.monotonic)

    def address_of(self, pod: str) -> str:
        """The address of a pod."""
        return self.addresses.setdefault(pod, f"127.0.0.{len(self.addresses) + 2}")

    def page(self, address: str) -> str:
        """What is at /metrics there."""
        drafts = int((time.monotonic() - self.begun_s) * DRAFTS_A_SECOND)
        accepted = int(drafts * K * (0.01 if address == self.decayed else 0.6))
        counted = {
            NAMES.drafts: drafts,
            NAMES.draft_tokens: drafts * K,
            NAMES.accepted_tokens: accepted,
            NAMES.generation_tokens: drafts * 3,
        }
        gauges = {NAMES.requests_running: self.running, NAMES.requests_waiting: 0}
        lines = [f"# TYPE {name.removesuffix('_total')} counter\n{name} {value}" for name, value in counted.items()]
        return "\n".join([*lines, *(f"# TYPE {name} gauge\n{name} {value}" for name, value in gauges.items()), ""])


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def port(engines: Engines) -> Iterator[int]:
    class Pages(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = engines.page(self.connection.getsockname()[0]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with serving(ThreadingHTTPServer(("", 0), Pages)) as server:
        yield server.server_port


def test_policy_restarts_decayed_engine_turns_off_and_yields_to_user_edit(
    kubectl: Kubectl, operator: OperatorProcess, engines: Engines, port: int
) -> None:
    policy = {"mode": "Enforce", "windowSeconds": 30, "cooldownSeconds": 30}
    apply(kubectl, replicas=2, serving={"maxModelLen": 1024, "port": port}, policy=policy)
    until(kubectl, engines, lambda: serves(kubectl), "both engines serve")
    written = kubectl.object("sdd", "tiny")
    capture(kubectl, written)
    bad, good = sorted(engines.addresses)
    engines.decayed = engines.addresses[bad]
    until(kubectl, engines, lambda: done(kubectl) == ["Restart"], "the engine that decayed is started anew")
    until(kubectl, engines, lambda: serves(kubectl), "another serves in its place")
    left = {pod["metadata"]["name"] for pod in pods(kubectl)}
    assert bad not in left
    assert good in left
    engines.running = 64
    until(kubectl, engines, lambda: done(kubectl) == ["Restart", "TurnOff"], "speculation is turned off")
    operator.kill()
    operator.ensure()
    until(kubectl, engines, lambda: not speculates(kubectl) and serves(kubectl), "the next operator goes on with that")
    assert done(kubectl) == ["Restart", "TurnOff"]
    assert kubectl.object("sdd", "tiny")["spec"] == written["spec"]
    speculation = json.dumps({"spec": {"speculation": {"numSpeculativeTokens": 2}}})
    kubectl.must("patch", "sdd", "tiny", "--type=merge", f"--patch={speculation}")
    until(kubectl, engines, lambda: speculates(kubectl) and serves(kubectl), "what a person writes is in force")
    eventually(lambda: "speculation" not in status(kubectl), "the status tells of no other speculation")
    wait_for(kubectl, "tiny", "SpeculationEffective", "EvidenceOutdated")


def until(kubectl: Kubectl, engines: Engines, reached: Callable[[], bool], what: str) -> None:
    """Let every engine that starts become ready until something is so."""

    def look() -> bool:
        for pod in pods(kubectl):
            if not pod.get("status", {}).get("podIP"):
                name = pod["metadata"]["name"]
                address = engines.address_of(name)
                report(kubectl, name, ready=True, state=RUNNING)
                kubectl.patch_pod_status(name, {"podIP": address, "podIPs": [{"ip": address}]})
        return reached()

    eventually(look, what)


def pods(kubectl: Kubectl) -> list[dict[str, Any]]:
    found = kubectl.objects("pods", "--selector=specdecode.io/deployment=tiny")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def serves(kubectl: Kubectl, replicas: int = 2) -> bool:
    """Whether all engines are those of the Deployment; ask first what that is, or it is changed between both looks."""
    hashes = [template_hash(pod) for pod in pods(kubectl) if pod.get("status", {}).get("podIP")]
    conditions = kubectl.object("sdd", "tiny").get("status", {}).get("conditions", [])
    said = {each["type"]: each["reason"] for each in conditions}
    return hashes == [wanted_hash(kubectl)] * replicas and said.get("Ready") in {"Serving", "SpeculationInactive"}


def speculates(kubectl: Kubectl) -> bool:
    template = kubectl.object("deployment", "tiny")["spec"]["template"]
    return "num_speculative_tokens" in " ".join(template["spec"]["containers"][0]["command"])


def status(kubectl: Kubectl) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.object("sdd", "tiny").get("status", {}).get("policy", {})
    return found


def done(kubectl: Kubectl) -> list[str]:
    return [each["action"] for each in reversed(status(kubectl).get("decisions", [])) if each["outcome"] == "Done"]


def capture(
    kubectl: Kubectl,
    deployment: dict[str, Any],
    loads: Sequence[tuple[float, float]] = ((8, 0.7), (64, 1.3)),
    acceptance_percent: int | None = None,
) -> None:
    """A capture that ended: without speculation goodput is lower at few requests, and higher at many."""
    spec = SpecDecodeDeploymentSpec.parse(deployment["spec"])
    plan = PlanStatus.parse(deployment["status"]["plan"])
    body = measured_capture(arms=[{"name": "on"}, OFF_ARM], ratio=1.0, loads=loads)
    body["status"]["comparison"]["baselineAcceptancePercent"] = acceptance_percent
    ended = {"type": "Succeeded", "status": "True", "reason": "Published", "message": "m", "observedGeneration": 1}
    created = {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeCapture",
        "metadata": {"name": "nightly"},
        "spec": {**body["spec"], "deployment": "tiny", "suspend": True},
    }
    answer = kubectl.write(yaml.safe_dump(created))
    assert answer.returncode == 0, answer.stderr
    patch = {
        **body["status"],
        "engine": engine_spec_hash(spec, plan),
        "phase": "Succeeded",
        "conditions": [{**ended, "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    }
    words = json.dumps({"status": patch})
    kubectl.must("patch", "sdc", "nightly", "--subresource=status", "--type=merge", f"--patch={words}")
