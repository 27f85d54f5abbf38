"""Summarize the measured start of engines: `status.observed.startup`.

The times of a pod come from its status, and those of an engine from its log, through its metrics. The time at which a
pod became ready is not used: a pod that is overloaded becomes ready again later.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import MeasuredStartup
from specdecode_operator.cluster.resources import ENGINE_CONTAINER
from specdecode_operator.deployment.pod_template_merge import is_download
from specdecode_operator.untrusted import mapping, name_of, objects
from specdecode_operator.vllm.engine_metrics import Reading, answering_engines


def measured_startup(pods: Sequence[Body], readings: Mapping[str, Reading]) -> MeasuredStartup | None:
    """Return the start of the engine that took longest; None if none is known.

    Engines whose container restarted are left out, because the log's times may be of any of its starts.
    """
    engines = answering_engines(readings)
    found = [
        _start_of(pod, engines[pod["metadata"]["name"]].startup_seconds)
        for pod in pods
        if pod["metadata"]["name"] in engines and not _engine_of(pod).get("restartCount")
    ]
    known = [each for each in found if each.model_fields_set > {"pod"}]
    return max(known, key=lambda start: (_length(start), start.pod), default=None)


def _length(start: MeasuredStartup) -> int:
    return (start.preparation_seconds or 0) + (start.engine_seconds or 0)


def _start_of(pod: Body, logged: Mapping[str, float]) -> MeasuredStartup:
    started = _time(mapping(mapping(_engine_of(pod), "state"), "running").get("startedAt"))
    warm_up = logged["init"] - logged.get("compile", 0) - logged.get("graphs", 0) if "init" in logged else None
    seconds = {
        "preparation_seconds": _between(_scheduled(pod), started),
        "download_seconds": _downloads_s(pod),
        "engine_seconds": logged.get("engine"),
        "load_seconds": logged.get("load"),
        "compile_seconds": logged.get("compile"),
        "warm_up_seconds": warm_up,
        "graphs_seconds": logged.get("graphs"),
    }
    known = {name: round(each) for name, each in seconds.items() if each is not None and each >= 0}
    return MeasuredStartup(pod=pod["metadata"]["name"], **known)


def _engine_of(pod: Body) -> Mapping[str, Any]:
    containers = objects(mapping(pod, "status"), "containerStatuses")
    return next((each for each in containers if name_of(each) == ENGINE_CONTAINER), {})


def _scheduled(pod: Body) -> datetime | None:
    conditions = objects(mapping(pod, "status"), "conditions")
    found = (each for each in conditions if (each.get("type"), each.get("status")) == ("PodScheduled", "True"))
    return _time(next(found, {}).get("lastTransitionTime"))


def _downloads_s(pod: Body) -> float | None:
    """Return the time in which the pod downloaded models; None if it downloaded none, or one is unknown."""
    found = [*_each_download_s(pod)]
    return None if not found or None in found else sum(each for each in found if each is not None)


def _each_download_s(pod: Body) -> Iterator[float | None]:
    for container in objects(mapping(pod, "status"), "initContainerStatuses"):
        if is_download(name_of(container)):
            ended = mapping(mapping(container, "state"), "terminated")
            yield _between(_time(ended.get("startedAt")), _time(ended.get("finishedAt")))


def _between(begin: datetime | None, end: datetime | None) -> float | None:
    return None if begin is None or end is None else (end - begin) / timedelta(seconds=1)


def _time(text: object) -> datetime | None:
    """Parse a time of a pod's status with its zone; None if it is not one."""
    try:
        found = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None
