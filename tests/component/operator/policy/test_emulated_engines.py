"""A policy on vLLM's own scheduler and counters, whose acceptance and load go through curves: what comes of each.

Engines are emulated ones with steps of 50 ms, a process for each pod. An emulated request is easy or hard by its
temperature, so the clients decide what is accepted. What is not played is how long a start takes: pods say that they
were ready at once, or each change would wait for twice that (tests/unit/deployment).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from devcluster.cluster.settings import free_ports
from tests.component.operator.test_lifecycle import apply, report
from tests.component.operator.test_policy import RUNNING, capture, done, pods, serves, speculates, status
from tests.engine.emulated_server import Emulated, emulating
from tests.engine.engine_process import Engine, engine_here
from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

DEADLINE_S = 1200
FEW, MANY = 2, 16
EASY, HARD = 0.0, 1.0
SWING_S = 5.0
MODEL = {
    "schema": 1,
    "origin": {"model": "made-up"},
    "step_time": {"curve": [[1, 50.0]], "request_us": 20.0, "ranges": {"requests": [1, MANY]}},
    "acceptance": {
        "num_speculative_tokens": 3,
        "outcomes": [[3, accepted] for accepted in range(4)],
        "classes": [
            {"share": 1, "temperature": EASY, "outcomes": [0.2, 0.2, 0.2, 0.4]},
            {"share": 1, "temperature": HARD, "outcomes": [1, 0, 0, 0]},
        ],
    },
}
"""Of an easy request 60 % of the drafted tokens are accepted, of a hard one none."""


@dataclass
class Load:
    """What clients ask of every engine, for as long as they do."""

    clients: int = 0
    temperature: float = EASY
    swings: bool = False
    hard_at: str = ""
    """The engine that gets nothing but hard requests."""

    tokens: int = 60
    pause_s: float = 0.0
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def ask_on(self, url: str, number: int, gone: threading.Event) -> None:
        """Be one of the clients of an engine until it is gone."""
        with httpx.Client(base_url=url, trust_env=False, timeout=DEADLINE_S) as client:
            while not gone.wait(self.pause_s if number < self.clients else 0.2) and not self.ended.is_set():
                if number >= self.clients:
                    continue
                temperature = HARD if url == self.hard_at else self.temperature_now
                body = {"prompt": [400, 401, 402], "max_tokens": self.tokens, "ignore_eos": True}
                try:
                    answer = client.post("/v1/completions", json=body | {"temperature": temperature})
                except httpx.TransportError as error:
                    if not gone.is_set():
                        self.failures.append(f"{url}: {error!r}")
                    return
                if answer.is_error and not gone.is_set():
                    self.failures.append(answer.text)
                self.answered += 1

    @property
    def temperature_now(self) -> float:
        """What is asked for at this moment."""
        return (EASY, HARD)[int(time.monotonic() / SWING_S) % 2] if self.swings else self.temperature


@dataclass
class Running:
    """An engine of a pod."""

    server: Emulated
    stack: ExitStack
    gone: threading.Event = field(default_factory=threading.Event)
    is_ready: bool = False

    def stop(self) -> None:
        """End it, once its clients know."""
        self.gone.set()
        self.stack.close()


@dataclass
class Kubelet:
    """Runs an emulated engine for each pod, with the speculation that the pod's command has."""

    kubectl: Kubectl
    engine: Engine
    port: int
    folder: Path
    load: Load
    engines: dict[str, Running] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    """Whether each engine speculates that was ever started: on or off."""

    def tend(self) -> None:
        """Do what is to be done now."""
        wanted = {pod["metadata"]["name"]: pod for pod in pods(self.kubectl)}
        for name in self.engines.keys() - wanted.keys():
            self.engines.pop(name).stop()
        for name in wanted.keys() - self.engines.keys():
            self._start(name, wanted[name])
        for name, running in self.engines.items():
            if not running.is_ready and running.server.is_healthy():
                self._tell_ready(name, running)

    def _start(self, name: str, pod: dict[str, Any]) -> None:
        speculating = "num_speculative_tokens" in " ".join(pod["spec"]["containers"][0]["command"])
        written = self.kubectl.object("sdd", "tiny")
        spec = written["spec"] if speculating else {**written["spec"], "speculation": {"method": "none"}}
        self.started.append("on" if speculating else "off")
        place = self.folder / name
        place.mkdir()
        plan = place / "plan.yaml"
        document = {key: written[key] for key in ("apiVersion", "kind")} | {"metadata": {"name": "tiny"}, "spec": spec}
        plan.write_text(yaml.safe_dump(document))
        stack, address = ExitStack(), (f"127.0.0.{len(self.started) + 1}", self.port)
        server = stack.enter_context(emulating(self.engine, place, plan, model=MODEL, address=address))
        self.engines[name] = Running(server, stack)

    def _tell_ready(self, name: str, running: Running) -> None:
        running.is_ready = True
        report(self.kubectl, name, ready=True, state=RUNNING)
        address = httpx.URL(running.server.url).host
        self.kubectl.patch_pod_status(name, {"podIP": address, "podIPs": [{"ip": address}]})
        for number in range(MANY):
            given = (running.server.url, number, running.gone)
            threading.Thread(target=self.load.ask_on, args=given, daemon=True).start()


@pytest.fixture
def kubelet(kubectl: Kubectl, tmp_path: Path) -> Iterator[Kubelet]:
    found = Kubelet(kubectl, engine_here(), free_ports(1)[0], tmp_path, Load())
    yield found
    found.load.ended.set()
    for running in found.engines.values():
        running.stop()


@pytest.mark.usefixtures("operator")
def test_policy_follows_oscillating_dropping_and_recovering_acceptance(kubectl: Kubectl, kubelet: Kubelet) -> None:
    load = kubelet.load
    begin(kubelet, replicas=1)
    until(kubelet, lambda: reason(kubectl) == "Idle", "starved: nothing runs")
    load.clients, load.temperature, load.tokens, load.pause_s = 1, HARD, 5, 2.0
    until(kubelet, lambda: load.answered >= 15, "starved: of some short requests nothing is accepted")
    until(kubelet, lambda: reason(kubectl) in {"Idle", "BestMeasured"}, "too few to decide by")
    assert done(kubectl) == []
    load.clients, load.temperature, load.tokens, load.pause_s = FEW, EASY, 60, 0.0
    until(kubelet, lambda: reason(kubectl) == "BestMeasured", "good acceptance at a small load")

    load.swings, before = True, load.answered
    until(kubelet, lambda: load.answered >= before + 80, "acceptance oscillates for more than two windows")
    until(kubelet, lambda: reason(kubectl) == "BestMeasured", "on the whole it is good enough")
    assert done(kubectl) == []

    load.swings, load.temperature = False, HARD
    until(kubelet, lambda: done(kubectl) == ["TurnOff"], "acceptance drops")
    until(kubelet, lambda: at_rest(kubectl, 1), "speculation stays off")
    assert (done(kubectl), speculates(kubectl)) == (["TurnOff"], False)
    load.temperature = EASY
    until(kubelet, lambda: done(kubectl) == ["TurnOff", "TryAgain"], "it is tried again")
    until(kubelet, lambda: at_rest(kubectl, 1), "acceptance has recovered: speculation stays on")
    assert outcomes(kubectl) == ["Done"] * 2
    assert kubelet.started == ["on", "off", "on"]
    assert load.failures == []


@pytest.mark.usefixtures("operator")
def test_policy_turns_speculation_off_during_a_load_spike(kubectl: Kubectl, kubelet: Kubelet) -> None:
    begin(kubelet, replicas=1)
    kubelet.load.clients = FEW
    until(kubelet, lambda: at_rest(kubectl, 1), "a small load")
    kubelet.load.clients = MANY
    until(kubelet, lambda: done(kubectl) == ["TurnOff"], "load spikes")
    until(kubelet, lambda: at_rest(kubectl, 1), "speculation stays off")
    kubelet.load.clients = FEW
    until(kubelet, lambda: done(kubectl) == ["TurnOff", "TryAgain"], "the spike is over")
    until(kubelet, lambda: at_rest(kubectl, 1), "speculation stays on")
    assert outcomes(kubectl) == ["Done"] * 2
    assert kubelet.started == ["on", "off", "on"]
    assert kubelet.load.failures == []


@pytest.mark.usefixtures("operator")
def test_policy_restarts_the_engine_whose_acceptance_decays(kubectl: Kubectl, kubelet: Kubelet) -> None:
    begin(kubelet, replicas=2)
    kubelet.load.clients = FEW
    until(kubelet, lambda: at_rest(kubectl, 2), "two engines with good acceptance")
    bad, good = sorted(kubelet.engines)
    kubelet.load.hard_at = kubelet.engines[bad].server.url
    until(kubelet, lambda: done(kubectl) == ["Restart"], "one of them decays")
    until(kubelet, lambda: at_rest(kubectl, 2), "another serves in its place")
    assert (bad in kubelet.engines, good in kubelet.engines) == (False, True)
    assert outcomes(kubectl) == ["Done"]
    assert kubelet.started == ["on"] * 3
    assert kubelet.load.failures == []


def begin(kubelet: Kubelet, replicas: int) -> None:
    """Have so many engines serve, of which a capture says that speculation pays for few requests and not for many."""
    limits = {"windowSeconds": 30, "cooldownSeconds": 30, "maxRestartsPerDay": 24}
    serving = {"maxModelLen": 1024, "port": kubelet.port}
    apply(kubelet.kubectl, replicas=replicas, serving=serving, policy={"mode": "Enforce", **limits})
    until(kubelet, lambda: serves(kubelet.kubectl, replicas), "the engines serve")
    written = kubelet.kubectl.object("sdd", "tiny")
    capture(kubelet.kubectl, written, loads=((FEW, 0.5), (MANY, 1.3)), acceptance_percent=60)


def until(kubelet: Kubelet, reached: Callable[[], bool], what: str) -> None:
    """Tend the engines until something is so."""

    def look() -> bool:
        kubelet.tend()
        return reached()

    eventually(look, what, DEADLINE_S)


def reason(kubectl: Kubectl) -> str:
    return str(status(kubectl).get("reason"))


def outcomes(kubectl: Kubectl) -> list[str]:
    """What came of all that was advised or done."""
    return [each["outcome"] for each in status(kubectl)["decisions"]]


def at_rest(kubectl: Kubectl, replicas: int) -> bool:
    """Whether the engines serve, were seen at work for a window, and nothing is better."""
    return serves(kubectl, replicas) and reason(kubectl) == "BestMeasured"
