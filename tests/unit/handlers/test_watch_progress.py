"""A watch that brings nothing although there is news is told from one that is slow, and from one that has no news."""

import kopf
import pytest

from specdecode_operator.api.deployment import KIND
from specdecode_operator.cluster.resources import MANAGED_BY_LABEL, MANAGER, NODE, POD, SPECDECODE_DEPLOYMENT, WATCHED
from specdecode_operator.handlers import main
from specdecode_operator.handlers.operator_state import OperatorState, OperatorStuckError
from specdecode_operator.handlers.resync import STALLED_S, WatchProgress
from tests.support.api_server import ApiServer
from tests.support.objects import Body, tiny_cpu
from tests.unit.handlers.leadership.test_leadership import Clock


def body(version: int, namespace: str = "team") -> Body:
    about = {"namespace": namespace, "name": "llama", "uid": "1", "resourceVersion": str(version)}
    return {"metadata": {**about, "labels": {MANAGED_BY_LABEL: MANAGER}}}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> WatchProgress:
    return WatchProgress(clock=clock)


def test_a_watch_that_does_not_bring_what_is_known_has_stalled(progress: WatchProgress, clock: Clock) -> None:
    progress.brings(KIND, body(5))
    clock.now_s += 10 * STALLED_S
    assert progress.stalled() is None, "there was no news"
    progress.knows(KIND, body(7))
    clock.now_s += STALLED_S
    assert progress.stalled() is None
    progress.knows(KIND, body(9))
    clock.now_s += 1
    assert progress.stalled() == f"the watch of {KIND} has brought nothing for {STALLED_S:.0f} s, though there is news"
    progress.brings(KIND, body(9))
    assert progress.stalled() is None


def test_a_watch_that_is_slow_has_not_stalled(progress: WatchProgress, clock: Clock) -> None:
    progress.brings(KIND, body(1))
    progress.knows(KIND, body(100))
    for version in range(2, 10):
        clock.now_s += STALLED_S - 1
        progress.brings(KIND, body(version))
        assert progress.stalled() is None
    clock.now_s += STALLED_S + 1
    assert progress.stalled()


def test_nothing_is_said_of_a_watch_that_has_never_brought_anything(progress: WatchProgress, clock: Clock) -> None:
    progress.knows(KIND, body(1))
    progress.brings(POD.kind, body(2))
    clock.now_s += STALLED_S + 1
    assert progress.stalled() is None


def test_what_comes_late_is_no_news(progress: WatchProgress, clock: Clock) -> None:
    progress.brings(KIND, body(5))
    progress.knows(KIND, body(4))
    clock.now_s += STALLED_S + 1
    assert progress.stalled() is None


def test_an_old_event_that_comes_again_takes_nothing_back(progress: WatchProgress, clock: Clock) -> None:
    for version in (5, 3):
        progress.brings(KIND, body(version))
    clock.now_s += STALLED_S + 1
    assert progress.stalled() is None


@pytest.mark.parametrize(("by_namespace", "where"), [(True, " in b"), (False, None)])
def test_in_named_namespaces_each_has_a_watch_of_its_own(clock: Clock, by_namespace: bool, where: str | None) -> None:
    progress = WatchProgress(by_namespace=by_namespace, clock=clock)
    for namespace in "ab":
        progress.brings(KIND, body(1, namespace))
    progress.knows(KIND, body(5, "b"))
    clock.now_s += STALLED_S + 1
    progress.brings(KIND, body(6, "a"))
    assert (progress.stalled() is None) == (where is None)
    assert where is None or where in str(progress.stalled())


async def test_what_a_list_finds_and_no_watch_brings_ends_in_a_restart(api: ApiServer, clock: Clock) -> None:
    state = OperatorState()
    state.progress._clock = clock
    metadata = {"namespace": "team", "name": "llama"}
    seen = api.create(SPECDECODE_DEPLOYMENT, {"metadata": metadata, "spec": tiny_cpu(suspend=True)})
    await state.start()
    await main.on_deployment(kopf.RawEvent(type="ADDED", object=seen), state)
    api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(suspend=True, replicas=2))
    await state.stop()
    await state.start()
    clock.now_s += STALLED_S + 1
    with pytest.raises(OperatorStuckError, match="though there is news"):
        state.check()
    await state.stop()


@pytest.mark.parametrize("kind", [NODE.kind, *(resource.kind for resource in WATCHED)])
async def test_each_watch_is_looked_after(kind: str, clock: Clock) -> None:
    state = OperatorState()
    state.progress._clock = clock
    event = kopf.RawEvent(type="ADDED", object=body(5))
    if kind == NODE.kind:
        await main.on_node(event, state)
        state.cache.put_node(body(6))
    else:
        resource = next(each for each in WATCHED if each.kind == kind)
        names = kopf.Resource(group=resource.group, version="v1", plural=resource.plural, kind=kind)
        await main.on_child(event, names, state)
        state.cache.put(kind, body(6))
    clock.now_s += STALLED_S + 1
    with pytest.raises(OperatorStuckError, match=kind):
        state.check()
