"""The operator's metrics about objects and its own work."""

import asyncio
import logging
import re
from typing import Any, cast

import pytest
from prometheus_client.registry import Collector

from specdecode_operator.api import capture, deployment, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, for_api_server, for_engines
from specdecode_operator.cluster.resources import SPECDECODE_DEPLOYMENT
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers.main import OperatorState
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.reconcile_capture import CaptureReconciler
from specdecode_operator.handlers.reconcile_job import Servings, Shared
from specdecode_operator.handlers.settings import Settings
from tests.support.api_server import ApiServer
from tests.support.captures import JOB_UID, KEY, job
from tests.support.captures import capture as captured
from tests.support.embedded_operator import until
from tests.support.objects import tiny_cpu
from tests.unit.handlers.test_reconcile_capture import OWNER, FakeCluster, labelled


def samples(collector: Collector) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    families = collector.collect()
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def saying(name: str, **status: object) -> Body:
    """An object with a status."""
    return {"metadata": {"namespace": "team", "name": name, "uid": name, "resourceVersion": "1"}, "status": status}


def condition(type_: str, status: str, reason: str) -> dict[str, str]:
    """A condition as it stands in a status."""
    return {"type": type_, "status": status, "reason": reason, "message": "words of their own"}


def test_deployments_are_counted_by_condition_and_verdict() -> None:
    cache = Cache()
    serving, waiting = condition("Ready", "True", "Serving"), condition("Ready", "False", "Unschedulable")
    for name, said in (("a", serving), ("b", serving), ("c", waiting)):
        cache.put_parent(deployment.KIND, saying(name, conditions=[said], plan={"verdict": "Tight"}))
    cache.put_parent(deployment.KIND, {**saying("d"), "status": None})
    names = {"specdecode_deployments", "specdecode_plans"}
    assert {key: value for key, value in samples(OperatorMetrics(cache)).items() if key[0] in names} == {
        ("specdecode_deployments", "Ready", "True", "Serving"): 2,
        ("specdecode_deployments", "Ready", "False", "Unschedulable"): 1,
        ("specdecode_plans", "Fits"): 0,
        ("specdecode_plans", "Tight"): 3,
        ("specdecode_plans", "DoesNotFit"): 0,
    }


def test_number_of_condition_reason_series_is_limited() -> None:
    cache = Cache()
    for number in range(1000):
        said = [condition("Ready", "False", f"Reason{number}"), condition("Accepted", "True", "Valid")]
        cache.put_parent(deployment.KIND, saying(f"d{number}", conditions=said))
    found = samples(OperatorMetrics(cache))
    said_by_all = {key: value for key, value in found.items() if key[0] == "specdecode_deployments"}
    assert len(said_by_all) < 300
    assert said_by_all["specdecode_deployments", "Accepted", "True", "Valid"] == 1000, "what most say is never left out"


def test_ended_capture_is_counted_once() -> None:
    ended = OperatorMetrics(Cache())
    assert samples(ended)["specdecode_captures_ended_total", "Failed"] == 0, "from 0, or an increase would not be seen"
    for before, now in (
        (CapturePhase.LOADING, CapturePhase.FAILED),
        (CapturePhase.FAILED, CapturePhase.FAILED),
        (None, CapturePhase.PENDING),
        (CapturePhase.STARTING, CapturePhase.CANCELLED),
        (CapturePhase.CANCELLED, CapturePhase.SUCCEEDED),
    ):
        ended.count_capture(before, now)
    counts = {key[1]: value for key, value in samples(ended).items() if key[0] == "specdecode_captures_ended_total"}
    assert counts == {"Succeeded": 1, "Failed": 1}, "one that was cancelled may go on"


def counts(collector: Collector, histogram: str) -> dict[tuple[str, ...], float]:
    """Return the number of observations per label set."""
    return {key[1:]: value for key, value in samples(collector).items() if key[0] == f"{histogram}_count"}


def test_reconciles_are_measured_by_outcome() -> None:
    times = OperatorMetrics(Cache())
    with times.measured(Key("team", "llama")):
        pass
    with pytest.raises(OSError, match="gone"), times.measured(Key("team", "night", capture.KIND)):
        raise OSError("gone")
    assert counts(times, "specdecode_reconcile_duration_seconds") == {
        (deployment.KIND, "done"): 1,
        (deployment.KIND, "failed"): 0,
        (capture.KIND, "done"): 0,
        (capture.KIND, "failed"): 1,
        (training.KIND, "done"): 0,
        (training.KIND, "failed"): 0,
    }


async def test_polls_are_measured_by_outcome_and_do_not_count_as_reconciles() -> None:
    times = OperatorMetrics(Cache())

    async def polled(result: Requeue | Exception | None) -> Requeue | None:
        if isinstance(result, Exception):
            raise result
        return result

    assert await times.measured_poll(polled(Requeue())) == Requeue()
    for _ in range(2):
        assert await times.measured_poll(polled(None)) is None
    with pytest.raises(OSError, match="gone"):
        await times.measured_poll(polled(OSError("gone")))
    assert counts(times, "specdecode_poll_duration_seconds") == {("unchanged",): 1, ("changed",): 2, ("failed",): 1}
    assert set(counts(times, "specdecode_reconcile_duration_seconds").values()) == {0}


@pytest.mark.parametrize(("from_s", "lines"), [(None, 0), (0.0, 1), (3600.0, 0)])
async def test_slow_reconcile_is_logged_with_its_wait_times(
    from_s: float | None, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        with for_api_server():
            await asyncio.sleep(0)

    caplog.set_level(logging.INFO)
    with for_api_server(), OperatorMetrics(Cache(), from_s).measured(Key("team", "llama")):
        await asyncio.gather(ask(), ask())
        with for_engines():
            pass
    assert len(caplog.messages) == lines
    for message in caplog.messages:
        assert re.fullmatch(
            r"team/llama: reconcile done in 0\.\d{3} s: 0\.\d{3} s for 2 calls of the API server, "
            r"0\.\d{3} s for engines, 0\.\d{3} s for the rest",
            message,
        )


def test_failed_capture_is_counted_once_over_two_reconciles() -> None:
    cluster, cache, ended = FakeCluster(), Cache(), OperatorMetrics(Cache())
    cache.put_parent(capture.KIND, captured())
    cache.put("Job", labelled(job("Failed"), JOB_UID, ownerReferences=[OWNER]))
    settings = Settings(operator_image="operator:1")
    shared = Shared(cast("Cluster", cluster), cache, cast("Any", None), ended, settings, Servings(cache))
    reconciler = CaptureReconciler(shared)
    for version in ("2", "3"):
        asyncio.run(reconciler.reconcile(KEY))
        cache.put_parent(capture.KIND, captured(status=cluster.status, resourceVersion=version))
    assert cluster.status["phase"] == "Failed"
    assert samples(ended)["specdecode_captures_ended_total", "Failed"] == 1


async def test_running_operator_measures_reconciles(api: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = OperatorState(Settings(reconciles_told_from_s=0.0))
    body = {"metadata": {"namespace": "team", "name": "llama"}, "spec": tiny_cpu(suspend=True)}
    api.create(SPECDECODE_DEPLOYMENT, body)
    try:
        await state.start()
        state.add_all()
        looks = ("specdecode_reconcile_duration_seconds_count", deployment.KIND, "done")
        await until(lambda: samples(state.metrics)[looks] > 0, lambda: "it was looked at")
        await until(lambda: not state.queue.is_pending(Key("team", "llama")), lambda: "nothing is left to do")
        state.queue.add_turn(Key("team", "llama"))
        polls = ("specdecode_poll_duration_seconds_count", "changed")
        await until(
            lambda: samples(state.metrics)[polls] == 1, lambda: "a suspended deployment needs a reconcile, not a poll"
        )
    finally:
        await state.stop()
    assert re.search(r"team/llama: reconcile done in .* for [1-9]\d* calls of the API server", caplog.text)
    named = {family.name for collector in state.collectors() for family in collector.collect()}
    assert {"specdecode_deployments", "specdecode_plans", "specdecode_captures", "specdecode_captures_ended"} <= named
