"""Heads reach serving engines without a restart, on a real API server; kubelet and engines are played here."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from devcluster.cluster.settings import free_ports
from specdecode_operator.capture.recorder.head_metrics import FAILED, KEPT, REVERTED
from specdecode_operator.deployment.live_recorder import DRAFT_ENTRY
from specdecode_operator.vllm.engine_metrics import HEAD_UPDATE
from tests.component.operator.test_lifecycle import (
    ENGINES,
    apply,
    engines,
    is_to_run,
    report,
    template_hash,
    wanted_hash,
)
from tests.support.better_trainings import asking, better_training, head
from tests.support.conditions import condition, wait_for
from tests.support.http_server import Quiet, serving
from tests.support.kubectl import Kubectl
from tests.support.objects import Body
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

CLAIM = "heads"
OLD, NEW = ("old", "0a" * 32), ("renewed", "0b" * 32)  # the second one is newer even if it has the same second
REPLICAS = 2
RUNNING = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
FIGURES = {
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "generation_tokens_total": 3000,
    "spec_decode_num_drafts_total": 1000,
    "spec_decode_num_draft_tokens_total": 3000,
    "spec_decode_num_accepted_tokens_total": 2000,
}


class Engine(ThreadingHTTPServer):
    """An engine, and its last update."""

    told = ""


class Page(Quiet, BaseHTTPRequestHandler):
    """The metrics of an engine."""

    def do_GET(self) -> None:
        """Answer a scrape."""
        assert isinstance(self.server, Engine)
        body = "".join(f"vllm:{name} {value}\n" for name, value in FIGURES.items()) + self.server.told
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


class Pool:
    """Two engines of a deployment that asks for heads without a restart."""

    def __init__(self, kubectl: Kubectl, stack: ExitStack) -> None:
        self.kubectl, self._stack = kubectl, stack
        (self._port,) = free_ports(1)
        self._looks = 0
        self.engines: dict[str, Engine] = {}

    def begin(self) -> None:
        """Serve the first trained head, after a rollout."""
        speculation = {**asking()["speculation"], "draftUpdate": "InPlace"}
        apply(self.kubectl, speculation=speculation, replicas=REPLICAS, serving={"port": self._port})
        self.serve()
        wait_for(self.kubectl, "tiny", "Ready", "Serving")
        written = wanted_hash(self.kubectl)
        self.offer(*OLD)
        eventually(lambda: wanted_hash(self.kubectl) != written, "the first head is rolled out")
        self.serve()
        self.wait(OLD, "Promoted")

    def offer(self, name: str, sha256: str) -> None:
        """Create a training that does not run, and write the status of one whose head is better."""
        storage = {"persistentVolumeClaim": {"claimName": CLAIM}}
        body = better_training(name, spec={"deployment": "tiny", "suspend": True, "storage": storage})
        told = body.pop("status")
        body["metadata"] = {"name": name}
        answer = self.kubectl.write(yaml.safe_dump(body))
        assert answer.returncode == 0, answer.stderr
        wait_for(self.kubectl, name, "Ready", "Suspended", kind="sdtr")
        published = head(name, self.kubectl.namespace, sha256=sha256)
        self.kubectl.patch_status(name, {**told, "claim": CLAIM, "head": published}, kind="sdtr")

    def serve(self) -> None:
        """Start an engine for each pod of the wanted template, until there are two."""

        def look() -> bool:
            wanted = wanted_hash(self.kubectl)
            pods = [each for each in self.kubectl.objects("pods", ENGINES) if is_to_run(each)]
            names = [each["metadata"]["name"] for each in pods if template_hash(each) == wanted]
            for name in names:
                self._start(name)
            return len(names) == REPLICAS

        eventually(look, f"{REPLICAS} engines of the wanted template serve")

    def _start(self, name: str) -> None:
        if name not in self.engines:
            address = f"127.0.0.{len(self.engines) + 2}"
            self.engines[name] = self._stack.enter_context(serving(Engine((address, self._port), Page)))
            report(self.kubectl, name, ready=True, state=RUNNING)
            self.kubectl.patch_pod_status(name, {"podIP": address, "podIPs": [{"ip": address}]})

    def look(self) -> None:
        """Let the operator reconcile, which scrapes the engines."""
        self._looks += 1
        self.kubectl.must("annotate", "sdd", "tiny", "--overwrite", f"look={self._looks}")

    def order(self) -> Body:
        """Return the head in draft.json; empty without one."""
        text = (self.kubectl.object("configmap", "tiny-plan").get("data") or {}).get(DRAFT_ENTRY)
        return dict(json.loads(text)["heads"][0]) if text else {}

    def ordered(self, offered: tuple[str, str], count: int | None) -> list[str]:
        """Wait until an order is for a number of pods, or for all; return their names."""

        def look() -> list[str] | None:
            self.look()
            order = self.order()
            assert order.get("sha256") == offered[1], order
            pods = order["pods"]
            assert (None if pods is None else len(pods)) == count, order
            return pods or [*self.engines]

        return eventually(look, f"{offered[0]} is ordered for {count or 'all'} pods")

    def follow(self, name: str, offered: tuple[str, str], result: str) -> None:
        """Play a sidecar and its engine."""
        self.engines[name].told = (
            f"# TYPE {HEAD_UPDATE} gauge\n"
            f'{HEAD_UPDATE}{{sha256="{offered[1]}",result="{result}",reason="it {result}"}} 1\n'
        )

    def wait(self, offered: tuple[str, str], reason: str) -> Body:
        """Wait until the status has a head with a reason; return it."""

        def look() -> Body:
            self.look()
            found: Body = self.kubectl.object("sdd", "tiny")["status"].get("trainedDraft") or {}
            assert (found.get("training"), found.get("reason")) == (offered[0], reason), found
            return found

        return eventually(look, f"{offered[0]} is {reason}")


@pytest.fixture
def pool(kubectl: Kubectl, operator: OperatorProcess) -> Iterator[Pool]:
    with ExitStack() as stack:
        pool = Pool(kubectl, stack)
        pool.begin()
        yield pool


def test_next_head_needs_no_other_pods_and_survives_the_operator(pool: Pool, operator: OperatorProcess) -> None:
    kubectl, template = pool.kubectl, wanted_hash(pool.kubectl)
    pods = engines(kubectl, REPLICAS)
    pool.offer(*NEW)
    (first,) = pool.ordered(NEW, 1)
    assert pool.order()["path"] == f"{kubectl.namespace}/{NEW[0]}/head"
    assert condition(kubectl, NEW[0], "Promoted", kind="sdtr")[:2] == ("Unknown", "RolloutInProgress")
    pool.follow(first, NEW, KEPT)
    assert set(pool.ordered(NEW, REPLICAS)) == set(pods)
    operator.kill()
    operator.start()
    (second,) = {*pods} - {first}
    pool.follow(second, NEW, KEPT)
    told = pool.wait(NEW, "Promoted")
    pool.ordered(NEW, None)
    assert (told["update"], told["startTraining"], told["startSha256"]) == ("InPlace", *OLD)
    wait_for(kubectl, NEW[0], "Promoted", "Promoted", kind="sdtr")
    assert (wanted_hash(kubectl), engines(kubectl, REPLICAS)) == (template, pods)


def test_wrong_answers_return_the_earlier_head_without_a_restart(pool: Pool) -> None:
    kubectl, template = pool.kubectl, wanted_hash(pool.kubectl)
    pool.offer(*NEW)
    (first,) = pool.ordered(NEW, 1)
    pool.follow(first, NEW, REVERTED)
    told = pool.wait(OLD, "RolledBack")
    assert told["failed"]
    wait_for(kubectl, NEW[0], "Promoted", "RolledBack", kind="sdtr")
    pool.ordered(OLD, REPLICAS)
    pool.follow(first, OLD, KEPT)
    pool.wait(OLD, "Promoted")
    assert wanted_hash(kubectl) == template


def test_engine_that_cannot_load_the_head_leads_to_a_rollout(pool: Pool) -> None:
    kubectl, template = pool.kubectl, wanted_hash(pool.kubectl)
    pool.offer(*NEW)
    (first,) = pool.ordered(NEW, 1)
    pool.follow(first, NEW, FAILED)
    eventually(lambda: wanted_hash(kubectl) != template, "the head is rolled out")
    told = pool.wait(NEW, "RolloutInProgress")
    assert told["update"] == "Restart"
    assert "it failed" in told["updateMessage"]
    assert pool.order() == {}
    pool.serve()
    assert pool.wait(NEW, "Promoted")["update"] == "Restart"
