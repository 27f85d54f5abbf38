"""The operator is killed at a call of an object's life: in the end all is as if it had not been."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import pytest

from devcluster.cluster.cluster import Cluster
from tests.component.operator.faults.conftest import Faulty
from tests.component.operator.test_captures import SUMMARY, captures_pod, finish, write_pod_status
from tests.component.operator.test_captures import capture as create_capture
from tests.component.operator.test_lifecycle import NEXT, apply, be_guarded, refuse, serve, wanted_hash
from tests.support.conditions import wait_for
from tests.support.faults.calls import Call
from tests.support.faults.crash_points import CrashPoint, killed_at, points_of_reads, points_of_writes, words
from tests.support.faults.end_state import CHILD_KINDS, OURS, EndState, differences, end_state
from tests.support.kubectl import Kubectl
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

_logger = logging.getLogger(__name__)

LOOKS = 10
Life = Callable[[Kubectl], Iterator[None]]
"""What a person does and a kubelet answers, step by step; wherever it stops, all comes to rest."""


def launch(kubectl: Kubectl) -> None:
    """Create a deployment whose engines serve."""
    apply(kubectl)
    be_served(kubectl)


def be_served(kubectl: Kubectl) -> None:
    """Let its engines serve, and wait until the operator has drawn its conclusions."""
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    be_guarded(kubectl)


def life_of_a_deployment(kubectl: Kubectl) -> Iterator[None]:
    """Create, change and scale one whose engines serve, and delete it."""
    launch(kubectl)
    yield
    good = wanted_hash(kubectl)
    apply(kubectl, **NEXT)
    eventually(lambda: wanted_hash(kubectl) not in {good, ""}, "the new spec is tried")
    be_served(kubectl)
    yield
    apply(kubectl, **NEXT, replicas=2)
    serve(kubectl, 2)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    yield
    kubectl.remove("sdd")
    eventually(lambda: not kubectl.objects(CHILD_KINDS, OURS), "nothing is left behind")
    yield


def life_of_a_capture(kubectl: Kubectl) -> Iterator[None]:
    """Run one that borrows the GPUs of engines that serve, and delete both."""
    launch(kubectl)
    create_capture(kubectl, deploymentDuringCapture="Suspend")
    captures_pod(kubectl)
    yield
    write_pod_status(kubectl, "Running", {"running": {}})
    wait_for(kubectl, "demo", "Ready", "Loading", kind="sdc")
    yield
    finish(kubectl, 0, SUMMARY)
    wait_for(kubectl, "demo", "Ready", "Captured", kind="sdc")
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    yield
    kubectl.remove("sdc,sdd")
    left = "deployments,services,configmaps,jobs,pods"
    eventually(lambda: not kubectl.objects(left, OURS), "only the claim with what was captured is left behind")
    yield


def life_of_a_rollback(kubectl: Kubectl) -> Iterator[None]:
    """Change one so that its engines refuse to start: those that served are put back."""
    launch(kubectl)
    yield
    good = wanted_hash(kubectl)
    apply(kubectl, **NEXT)
    eventually(lambda: wanted_hash(kubectl) not in {good, ""}, "the new spec is tried")
    eventually(lambda: put_back(kubectl, good), "the template that served is back")
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "RolledBack")
    be_guarded(kubectl)
    yield


def put_back(kubectl: Kubectl, good: str) -> bool:
    """Whether the template that served is back; engines of any other refuse to start."""
    if wanted_hash(kubectl) == good:
        return True
    refuse(kubectl)
    return False


LIVES = {"deployment": life_of_a_deployment, "capture": life_of_a_capture, "rollback": life_of_a_rollback}
TELLING = [
    # The children are made one by one, and what served is written down behind them, before the status vouches for it.
    CrashPoint("patch services tiny", moment="before"),
    CrashPoint("patch deployments.apps tiny"),
    CrashPoint("patch configmaps tiny-last-good"),
    # Engines give their GPUs away and get them back; what was measured is told once.
    CrashPoint("patch jobs.batch demo-capture"),
    CrashPoint("patch jobs.batch demo-capture", 2, "before"),
    CrashPoint("patch specdecodecaptures.specdecode.io/status demo", 6),
]


@dataclass
class Lived:
    """What came of a life that nothing disturbed."""

    states: list[EndState]
    """After each step."""

    made: Counter[str]
    calls: list[Call]
    """About its own namespace, or the whole cluster."""


class Lives:
    """Undisturbed lives, gone through once, and others that must come to the same."""

    def __init__(self, kubectl: Kubectl, faulty: Faulty) -> None:
        self._kubectl, self._faulty = kubectl, faulty
        self._undisturbed: dict[str, Lived] = {}
        self._numbers = itertools.count(1)

    def undisturbed(self, name: str) -> Lived:
        """What comes of a life that nothing disturbs."""
        if name not in self._undisturbed:
            with self._begun(name) as kubectl:
                states = [at_rest(kubectl) for _ in LIVES[name](kubectl)]
                calls = [each for each in self._faulty.proxy.calls if each.namespace in {"", kubectl.namespace}]
                self._undisturbed[name] = Lived(states, made(calls), calls)
        return self._undisturbed[name]

    def disturbed(self, name: str, points: Sequence[CrashPoint]) -> list[str]:
        """Go through a life with crashes, which must come to the same; return the points that never came."""
        wanted = self.undisturbed(name)
        with self._begun(name) as kubectl:
            namespace = str(kubectl.namespace)
            with killed_at(points, self._faulty.proxy, self._faulty.operator, namespace) as left:
                for step, (_, state) in enumerate(zip(LIVES[name](kubectl), wanted.states, strict=True), 1):
                    eventually(partial(is_like, kubectl, state), f"step {step} ends as without crashes")
            calls = [each for each in self._faulty.proxy.calls if each.namespace == namespace]
            assert made(calls) == wanted.made, "nothing is made twice"
            assert self._faulty.operator.runs
        return sorted(map(str, left))

    @contextmanager
    def _begun(self, name: str) -> Iterator[Kubectl]:
        """A namespace of a life, and an operator that starts in it."""
        kubectl = self._kubectl.within(f"life-{name}-{next(self._numbers)}")
        kubectl.create_namespace()
        self._faulty.proxy.calls.clear()
        self._faulty.operator.start()
        try:
            yield kubectl
        finally:
            self._faulty.operator.kill()
            kubectl.remove("sdc,sdd")


@pytest.fixture(scope="module")
def lives(crds: Cluster, faulty: Faulty) -> Lives:
    return Lives(Kubectl(crds.kubeconfig), faulty)


@pytest.fixture(autouse=True)
def _alone(operator_process: OperatorProcess, lives: Lives) -> None:
    assert operator_process.stop() == 0


def at_rest(kubectl: Kubectl) -> EndState:
    """The state that stays."""
    seen: list[EndState] = []

    def look() -> bool:
        seen.append(end_state(kubectl))
        return len(seen) > LOOKS and all(each == seen[-1] for each in seen[-LOOKS:])

    eventually(look, "all is at rest")
    return seen[-1]


def is_like(kubectl: Kubectl, wanted: EndState) -> bool:
    found = differences(end_state(kubectl), wanted)
    assert not found, "\n".join(found)
    return True


def made(calls: Iterable[Call]) -> Counter[str]:
    """How often each object was created, whoever heard of it.

    Of Events one more harms nobody, and a note of what served that no status vouches for is written anew.
    """
    created = [each for each in calls if each.status == HTTPStatus.CREATED and each.name]
    return Counter(words(each) for each in created if not each.name.endswith("-last-good"))


def test_killed_at_the_most_telling_calls_of_one_life(lives: Lives) -> None:
    missed = lives.disturbed("capture", TELLING)
    assert [point for point in missed if "/status" not in point] == [], "of status writes there may be fewer"


@pytest.mark.long
@pytest.mark.parametrize("name", LIVES)
def test_killed_before_and_after_every_write_of_a_life(lives: Lives, name: str) -> None:
    each_alone(lives, name, points_of_writes(lives.undisturbed(name).calls))


@pytest.mark.long
def test_killed_at_every_read_of_a_life(lives: Lives) -> None:
    each_alone(lives, "deployment", points_of_reads(lives.undisturbed("deployment").calls))


def each_alone(lives: Lives, name: str, points: Sequence[CrashPoint]) -> None:
    """Go through one life for each point."""
    failures, missed = [], []
    for point in points:
        try:
            missed += lives.disturbed(name, [point])
        except AssertionError as error:
            failures.append(f"{point}: {error}")
            _logger.warning("%s", failures[-1])
    _logger.warning("%s: killed at %d points; others that did not come: %s", name, len(points) - len(missed), missed)
    assert not failures
    assert len(missed) < len(points) / 4, "a status in between may come or not, as watches tell"
