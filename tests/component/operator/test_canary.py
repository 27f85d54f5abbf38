"""A canary on a real API server: the operator reconciles in this process, and the test plays kubelet and engines.

The clock of the comparison is the test's, so a block takes as long as one reconcile.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from kubernetes.aio.config import kube_config

from devcluster.cluster.settings import free_ports
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.cluster.resources import OUR_KINDS, POOL_LABEL, SPECDECODE_DEPLOYMENT
from specdecode_operator.handlers import reconcile_deployment
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.reconcile_deployment import Reconciler
from specdecode_operator.handlers.resync import Relist
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.stats.pool_comparison import BLOCK_S, FEWEST_BLOCKS, Served
from tests.component.operator.test_lifecycle import ENGINES, is_to_run, report
from tests.support.conditions import condition
from tests.support.http_server import Quiet, serving
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import IMAGE, OperatorProcess
from tests.support.pool_traffic import Engine, looks
from tests.support.waiting import DEADLINE_S, POLL_S

STABLE = 2
MAX_S = 3600
RUNNING = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
CRASHING = {
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "RuntimeError: boom"}},
    "restartCount": 3,
}
BLOCK = Served(
    requests=40, first_token_seconds=8.0, prompt_tokens=40_000, tokens=8_000, seconds=80.0, steps=4_000, finished=40,
    answered=40,
)  # fmt: skip
SLOWER = replace(BLOCK, seconds=104.0)
FAILING = replace(BLOCK, answered=38)
DEAD = Served(requests=40, finished=40)
EQUAL = Engine()
OLD, NEW, NEXT = 1024, 512, 768


class Page(Quiet, BaseHTTPRequestHandler):
    """The metrics of an engine."""

    def do_GET(self) -> None:
        """Answer a scrape."""
        server = self.server
        assert isinstance(server, EngineServer)
        body = metrics(server.served).encode() if self.path == "/metrics" else b'{"version": "0.33.0"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class EngineServer(ThreadingHTTPServer):
    """An engine that has served what the test says."""

    served = Served()


def metrics(served: Served) -> str:
    """Return the page of an engine with these counters; requests that fail are rejected with 500."""
    failed = served.finished - served.answered
    firsts = served.requests - failed
    values = {
        "vllm:num_requests_running": 1,
        "vllm:num_requests_waiting": 0,
        "vllm:generation_tokens_total": served.tokens + firsts,
        "vllm:prompt_tokens_total": served.prompt_tokens,
        "vllm:time_to_first_token_seconds_count": firsts,
        "vllm:time_to_first_token_seconds_sum": served.first_token_seconds,
        "vllm:inter_token_latency_seconds_count": served.steps,
        "vllm:spec_decode_num_drafts_total": served.steps,
        "vllm:spec_decode_num_draft_tokens_total": 3 * served.steps,
        "vllm:spec_decode_num_accepted_tokens_total": served.tokens - served.steps,
        "vllm:inter_token_latency_seconds_sum": served.seconds,
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}': served.answered,
        'http_requests_total{handler="/v1/completions",method="POST",status="5xx"}': failed,
        'vllm:request_success_total{finished_reason="stop"}': served.answered,
    }
    return "".join(f"{name} {value}\n" for name, value in values.items())


class OperatorHere:
    """The operator's reconciler, which sees all of the cluster before each look."""

    def __init__(self, cluster: Cluster, key: Key) -> None:
        self._cluster, self._key = cluster, key
        self._probes = list[EngineProbe]()
        self.restart()

    def restart(self) -> None:
        """Let another process take over."""
        cache, probe = Cache(), EngineProbe()
        self._probes.append(probe)
        self._relist = Relist(cache, (), None, lambda _: None)
        self._relist.watched.update(each.kind for each in OUR_KINDS.values())
        settings = Settings(operator_image=IMAGE)
        self._reconciler = Reconciler(self._cluster, cache, probe, OperatorMetrics(cache), settings)

    async def close(self) -> None:
        """Close all connections to engines."""
        for probe in self._probes:
            await probe.close()

    async def look(self, *, only_served: bool = False) -> None:
        """Reconcile the object once. With ``only_served``, skip listing its children."""
        if only_served:
            self._relist.due.add(SPECDECODE_DEPLOYMENT.kind)
            await self._relist.in_round(1, self._cluster)
        else:
            await self._relist.everything(self._cluster)
        await self._reconciler.reconcile(self._key)


@dataclass
class Story:
    """One object with strategy Canary: its operator, its engines and its clock."""

    kubectl: Kubectl
    operator: OperatorHere
    port: int
    stack: ExitStack
    engines: dict[str, EngineServer]
    now_s: float = 0.0
    has_room: bool = True
    """Whether the canary's pods find a node."""
    starts: bool = True
    """Whether the canary's engines start."""
    addresses: int = 1
    reasons: tuple[str, ...] = ()
    """Reasons of the condition Canary, without repetition."""

    def apply(self, max_model_len: int, **fields: Any) -> None:
        """Write the spec."""
        canary = {"maxSeconds": MAX_S, **fields.pop("canary", {})}
        spec = tiny_cpu(
            serving={"maxModelLen": max_model_len, "port": self.port},
            rollout={"strategy": "Canary", "canary": canary},
            **{"replicas": STABLE, **fields},
        )
        body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
        answer = self.kubectl.write(yaml.safe_dump(body | {"spec": spec}))
        assert answer.returncode == 0, answer.stderr

    def pods(self, *, canary: bool) -> list[str]:
        """Return the pods of a pool that are to run."""
        pods = [pod for pod in self.kubectl.objects("pods", ENGINES) if is_to_run(pod)]
        return [pod["metadata"]["name"] for pod in pods if (POOL_LABEL in pod["metadata"]["labels"]) is canary]

    def tend(self) -> None:
        """Do what the kubelet does: start an engine for each new pod."""
        for name in self.pods(canary=False):
            self._start(name)
        for name in self.pods(canary=True):
            if self.has_room and self.starts:
                self._start(name)
            elif self.has_room:
                report(self.kubectl, name, ready=False, state=CRASHING)

    def _start(self, name: str) -> None:
        if name in self.engines:
            return
        self.addresses += 1
        address = f"127.0.0.{self.addresses}"
        self.engines[name] = self.stack.enter_context(serving(EngineServer((address, self.port), Page)))
        report(self.kubectl, name, ready=True, state=RUNNING)
        self.kubectl.patch_pod_status(name, {"podIP": address, "podIPs": [{"ip": address}]})

    async def look(self, *, only_served: bool = False) -> None:
        """Reconcile once. Pass ``only_served`` if only the engines' counters have changed since the last call."""
        if not only_served:
            self.tend()
        await self.operator.look(only_served=only_served)
        reason = self.said()[1]
        if reason != (self.reasons or ("",))[-1]:
            self.reasons = (*self.reasons, reason)

    async def until(self, *reasons: str, kind: str = "Canary") -> None:
        """Reconcile until a condition has one of these reasons."""
        await self.until_true(lambda: self.said(kind)[1] in reasons, f"{kind} is {' or '.join(reasons)}")

    async def until_true(self, reached: Callable[[], bool], what: str) -> None:
        """Reconcile until something holds; the clock of the comparison stands still."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not reached():
                    await self.look()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            seen = {kind: self.said(kind) for kind in ("Ready", "Canary", "Planned", "Accepted")}
            message = f"not within {DEADLINE_S} s: {what} (last: {seen})"
            raise AssertionError(message) from None

    async def scale(self, replicas: int) -> None:
        """Change the number of replicas as an autoscaler does, and reconcile until they serve."""
        self.kubectl.must("scale", "sdd", "tiny", f"--replicas={replicas}")

        def serves() -> bool:
            pods = self.pods(canary=False)
            return len(pods) == replicas and self.engines.keys() >= set(pods)

        await self.until_true(serves, f"{replicas} engines serve")

    async def settle(self) -> None:
        """Reconcile until only engines of one spec are left, and serve."""
        await self.until("Serving", "RolledBack", kind="Ready")
        await self.until_true(lambda: len(self.kubectl.objects("pods", ENGINES)) == STABLE, "other pods are gone")

    async def block(self, canary: Served = BLOCK) -> None:
        """Let both pools serve for a minute, and reconcile."""
        for pool, grown in ((False, BLOCK), (True, canary)):
            for name in self.engines.keys() & self.pods(canary=pool):
                self.engines[name].served += grown
        self.now_s += BLOCK_S
        await self.look()

    async def blocks(self, count: int, *canary: Served) -> None:
        """Let both pools serve for several minutes; the canary serves the given answers in turn."""
        for number in range(count):
            await self.block(canary[number % len(canary)] if canary else BLOCK)

    async def day(self, seed: int, engine: Engine = EQUAL) -> None:
        """Let both pools serve bursty traffic until the canary is judged."""
        stable, (canary,) = self.pods(canary=False), self.pods(canary=True)
        names = dict(zip([f"engine-{each}" for each in range(STABLE + 1)], [*stable, canary], strict=True))
        begun, begun_s = {name: self.engines[name].served for name in names.values()}, self.now_s
        for at_s, *pools in looks(seed, stable=STABLE, engine=engine):
            for name, grown in [each for pool in pools for each in pool.items()]:
                self.engines[names[name]].served = begun[names[name]] + grown
            self.now_s = begun_s + at_s
            await self.look(only_served=True)
            if self.said()[1] != "CanaryComparing":
                return

    def said(self, kind: str = "Canary") -> tuple[str, str, str]:
        """Status, reason and message of a condition of the current spec."""
        return condition(self.kubectl, "tiny", kind)

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.object("sdd", "tiny")["status"]
        return found

    @property
    def lengths(self) -> dict[str, int]:
        """The maximum length of each Deployment's engines."""
        found = {}
        for each in self.kubectl.objects("deployments"):
            (container,) = each["spec"]["template"]["spec"]["containers"]
            command = [*container.get("command", ()), *container.get("args", ())]
            found[each["metadata"]["name"]] = int(command[command.index("--max-model-len") + 1])
        return found


@pytest.fixture
async def cluster(operator_process: OperatorProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """The operator's client with its own rights, while no operator runs elsewhere."""
    assert operator_process.stop() == 0
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(operator_process.kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(operator_process.kubeconfig))
    connected = await Cluster.connect()
    yield connected
    await connected.close()


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def story(
    kubectl: Kubectl, cluster: Cluster, servers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Story]:
    """Two engines that serve, and a changed spec."""
    operator = OperatorHere(cluster, Key(kubectl.namespace, "tiny"))
    found = Story(kubectl, operator, free_ports(1)[0], servers, {})
    clock = Mock(monotonic=lambda: found.now_s, time=time.time)
    monkeypatch.setattr(reconcile_deployment, "time", clock)
    found.apply(OLD)
    await found.until("Serving", kind="Ready")
    found.reasons = ()
    found.apply(NEW)
    yield found
    await operator.close()
    kubectl.remove("sdd")


async def test_a_canary_that_is_not_worse_replaces_the_engines(story: Story) -> None:
    await story.until("CanaryComparing")
    assert story.lengths == {"tiny": OLD, "tiny-canary": NEW}
    assert story.said("Available")[0] == "True"
    await story.blocks(FEWEST_BLOCKS - 1)
    assert story.said()[1] == "CanaryComparing"
    await story.blocks(3)
    assert story.said()[:2] == ("True", "Promoted")
    await story.settle()
    assert story.lengths == {"tiny": NEW}
    assert story.pods(canary=True) == []
    assert story.reasons == ("CanaryStarting", "CanaryComparing", "Promoted")


@pytest.mark.parametrize(
    ("canary", "figure"),
    [(SLOWER, "tpot"), (FAILING, "errors"), (DEAD, "errors")],
    ids=["slower", "a part of requests fails", "all requests fail"],
)
async def test_a_worse_canary_goes_and_the_earlier_engines_stay(story: Story, canary: Served, figure: str) -> None:
    await story.until("CanaryComparing")
    before = story.pods(canary=False)
    await story.blocks(FEWEST_BLOCKS + 2, canary)
    assert story.said()[:2] == ("False", "CanaryFailed")
    await story.settle()
    story.operator.restart()
    await story.look()
    assert story.said("Ready")[:2] == ("False", "RolledBack")
    assert story.lengths == {"tiny": OLD}
    assert sorted(story.pods(canary=False)) == sorted(before)
    assert [each["name"] for each in story.status["canary"]["figures"] if each["verdict"] == "Worse"] == [figure]


async def test_a_canary_that_crashes_is_rolled_back(story: Story) -> None:
    story.starts = False
    await story.until("CanaryFailed")
    await story.settle()
    assert story.said("Ready")[:2] == ("False", "RolledBack")
    assert story.said("Available")[0] == "True"
    assert story.lengths == {"tiny": OLD}


@pytest.mark.parametrize(
    ("on_undecided", "expected"), [("RollBack", ("False", "CanaryFailed")), ("Promote", ("True", "Promoted"))]
)
async def test_an_undecided_canary_ends_as_the_spec_asks(
    story: Story, on_undecided: str, expected: tuple[str, str]
) -> None:
    story.apply(NEW, canary={"onUndecided": on_undecided})
    await story.until("CanaryComparing")
    await story.blocks(FEWEST_BLOCKS + 2, replace(BLOCK, seconds=60.0), replace(BLOCK, seconds=106.0))
    assert story.said()[1] == "CanaryComparing"
    story.now_s += MAX_S
    await story.look()
    assert story.said()[:2] == expected
    await story.settle()
    assert story.lengths == {"tiny": OLD if on_undecided == "RollBack" else NEW}


async def test_a_restart_of_the_operator_starts_the_comparison_again(story: Story) -> None:
    await story.until("CanaryComparing")
    await story.blocks(FEWEST_BLOCKS - 1)
    pods = story.pods(canary=True)
    story.operator.restart()
    await story.look()
    assert story.status["canary"]["blocks"] == 0
    assert story.pods(canary=True) == pods, "the canary serves on"
    await story.blocks(FEWEST_BLOCKS + 2)
    assert story.said()[:2] == ("True", "Promoted")


async def test_a_spec_that_changes_again_gets_its_own_comparison(story: Story) -> None:
    await story.until("CanaryComparing")
    await story.blocks(FEWEST_BLOCKS - 1, SLOWER)
    (before,) = story.pods(canary=True)
    story.apply(NEXT)
    await story.look()
    await story.until_true(lambda: before not in story.pods(canary=True), "the canary of the spec before is gone")
    await story.until("CanaryComparing")
    assert story.status["canary"]["blocks"] == 0
    await story.blocks(FEWEST_BLOCKS + 3)
    assert story.said()[:2] == ("True", "Promoted")
    await story.settle()
    assert story.lengths == {"tiny": NEXT}


async def test_without_room_the_canary_waits_and_starts_when_there_is_some(story: Story) -> None:
    story.has_room = False
    await story.until("CanaryBlocked")
    assert story.said("Available")[0] == "True"
    assert story.lengths["tiny"] == OLD
    budget = partial(story.kubectl.object, "poddisruptionbudget", "tiny")
    await story.until_true(lambda: budget()["status"].get("disruptionsAllowed") == 1, "engines may be drained")
    story.has_room = True
    await story.until("CanaryComparing")


async def test_a_canary_beyond_the_quota_waits(story: Story) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"}}
    answer = story.kubectl.write(yaml.safe_dump(quota | {"spec": {"hard": {"pods": STABLE}}}))
    assert answer.returncode == 0, answer.stderr
    await story.until("CanaryBlocked")
    await story.until_true(lambda: "exceeded quota" in story.said()[2], "the quota is named")
    assert story.lengths["tiny"] == OLD


async def test_suspension_ends_the_canary_and_it_starts_again_afterwards(story: Story) -> None:
    await story.until("CanaryComparing")
    await story.blocks(FEWEST_BLOCKS - 1)
    story.apply(NEW, suspend=True)
    await story.until("CanaryWaits")
    assert story.lengths == {"tiny": OLD}
    await story.until_true(lambda: not story.kubectl.objects("pods", ENGINES), "all engines are gone")
    story.apply(NEW)
    await story.until("CanaryComparing")
    assert story.status["canary"]["blocks"] == 0


async def test_a_scale_of_the_deployment_does_not_start_the_comparison_again(story: Story) -> None:
    await story.until("CanaryComparing")
    await story.blocks(2)
    await story.scale(STABLE + 1)
    await story.blocks(2)
    assert story.status["canary"]["blocks"] == 4
    await story.scale(1)
    await story.blocks(3)
    # If the engine that was drawn for the block has left, the block is dropped.
    assert story.status["canary"]["blocks"] in {5, 7}


async def test_a_day_of_equal_engines_has_no_other_decision_than_promotions(story: Story) -> None:
    for seed, length in enumerate((NEW, NEXT, 256), start=1):
        story.apply(length)
        await story.until("CanaryComparing")
        await story.day(seed)
        await story.settle()
        assert story.lengths == {"tiny": length}
    assert story.reasons == ("CanaryStarting", "CanaryComparing", "Promoted") * 3


async def test_slower_engines_are_rolled_back_under_bursty_traffic(story: Story) -> None:
    await story.until("CanaryComparing")
    await story.day(1, Engine(step_time=1.3))
    assert story.said()[:2] == ("False", "CanaryFailed")
