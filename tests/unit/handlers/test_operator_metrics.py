"""What the operator says of its objects and its own work at /metrics."""

import pytest
from prometheus_client.registry import Collector

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.handlers.metrics import DeploymentCollector, EndedCaptures, ReconcileTimes


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
    assert samples(DeploymentCollector(cache)) == {
        ("specdecode_deployments", "Ready", "True", "Serving"): 2,
        ("specdecode_deployments", "Ready", "False", "Unschedulable"): 1,
        ("specdecode_plans", "Fits"): 0,
        ("specdecode_plans", "Tight"): 3,
        ("specdecode_plans", "DoesNotFit"): 0,
    }


def test_reasons_that_others_write_make_no_more_series_than_a_few() -> None:
    cache = Cache()
    for number in range(1000):
        said = [condition("Ready", "False", f"Reason{number}"), condition("Accepted", "True", "Valid")]
        cache.put_parent(deployment.KIND, saying(f"d{number}", conditions=said))
    said_by_all = samples(DeploymentCollector(cache))
    assert len(said_by_all) < 300
    assert said_by_all["specdecode_deployments", "Accepted", "True", "Valid"] == 1000, "what most say is never left out"


def test_a_capture_is_counted_once_when_it_ends() -> None:
    ended = EndedCaptures()
    assert samples(ended)["specdecode_captures_ended_total", "Failed"] == 0, "from 0, or an increase would not be seen"
    for before, now in (
        (CapturePhase.LOADING, CapturePhase.FAILED),
        (CapturePhase.FAILED, CapturePhase.FAILED),
        (None, CapturePhase.PENDING),
        (CapturePhase.STARTING, CapturePhase.CANCELLED),
    ):
        ended.count(before, now)
    counts = {key[1]: value for key, value in samples(ended).items() if key[0].endswith("_total")}
    assert counts == {"Succeeded": 0, "Failed": 1, "Cancelled": 1}


def test_reconciles_are_measured_by_outcome() -> None:
    times = ReconcileTimes()
    with times.measured(deployment.KIND):
        pass
    with pytest.raises(OSError, match="gone"), times.measured(capture.KIND):
        raise OSError("gone")
    counts = {key[1:]: value for key, value in samples(times).items() if key[0].endswith("_count")}
    assert counts == {
        (deployment.KIND, "done"): 1,
        (deployment.KIND, "failed"): 0,
        (capture.KIND, "done"): 0,
        (capture.KIND, "failed"): 1,
    }
