"""Measured start-up times in the status."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import MeasuredStartup
from specdecode_operator.deployment.observed.measured_startup import measured_startup
from specdecode_operator.vllm.engine_metrics import EngineReading, Unreachable

LOGGED = {"engine": 113.2, "load": 15.2, "init": 64.5, "compile": 33.0, "graphs": 6.4}
READING = EngineReading(None, None, None, None, None, 0, 0, 0, startup_seconds=LOGGED)


def ended(name: str, begin: str, end: str) -> Body:
    times = {"startedAt": f"2026-01-01T00:{begin}Z", "finishedAt": f"2026-01-01T00:{end}Z"}
    return {"name": name, "state": {"terminated": {"exitCode": 0, **times}}}


def pod(name: str = "chat-0", started: Any = "2026-01-01T00:05:00Z", **status: Any) -> Body:
    engine = {"name": "engine", "restartCount": 0, "state": {"running": {"startedAt": started}}}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:30Z"}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"}
    told = {"containerStatuses": [engine], "conditions": [scheduled, ready], **status}
    return {"metadata": {"name": name}, "status": told}


def test_start_has_the_times_of_pod_and_log() -> None:
    downloads = [
        ended("download-target", "01:00", "03:00"),
        ended("download-draft", "03:05", "03:15"),
        ended("prepare", "03:15", "04:00"),
    ]
    found = measured_startup([pod(initContainerStatuses=downloads)], {"chat-0": READING})
    assert found == MeasuredStartup(
        pod="chat-0",
        preparation_seconds=270,
        download_seconds=130,
        engine_seconds=113,
        load_seconds=15,
        compile_seconds=33,
        warm_up_seconds=25,
        graphs_seconds=6,
    )


def test_slowest_engine_is_shown() -> None:
    faster = replace(READING, startup_seconds={**LOGGED, "engine": 20.0})
    pods = [pod("chat-0"), pod("chat-1"), pod("chat-2")]
    found = measured_startup(pods, {"chat-0": faster, "chat-1": READING, "chat-2": faster})
    assert found is not None
    assert found.pod == "chat-1"
    late = pod("chat-2", started="2026-01-01T00:30:00Z")
    found = measured_startup([*pods[:2], late], {"chat-0": faster, "chat-1": READING, "chat-2": faster})
    assert found is not None
    assert found.pod == "chat-2"


def test_unknown_times_are_absent() -> None:
    silent = replace(READING, startup_seconds={})
    found = measured_startup([pod()], {"chat-0": silent})
    assert found == MeasuredStartup(pod="chat-0", preparation_seconds=270)
    found = measured_startup([pod(started=None)], {"chat-0": replace(READING, startup_seconds={"load": 3.6})})
    assert found == MeasuredStartup(pod="chat-0", load_seconds=4)
    assert measured_startup([pod(started=None)], {"chat-0": silent}) is None


@pytest.mark.parametrize(
    "reading", [Unreachable("/metrics answered 503"), None], ids=["does not answer", "was not asked"]
)
def test_engine_without_a_reading_is_left_out(reading: Unreachable | None) -> None:
    assert measured_startup([pod()], {"chat-0": reading} if reading else {}) is None


def test_restarted_engine_is_left_out() -> None:
    restarted = pod()
    restarted["status"]["containerStatuses"][0]["restartCount"] = 1
    assert measured_startup([restarted], {"chat-0": READING}) is None


@pytest.mark.parametrize(
    "started",
    ["yesterday", "2026-01-01T00:05:00", "2025-12-31T00:00:00Z", 12, {"a": 1}, "9" * 10_000],
    ids=["no time", "no zone", "before it was scheduled", "number", "object", "long"],
)
def test_implausible_start_of_a_container_is_unknown(started: Any) -> None:
    found = measured_startup([pod(started=started)], {"chat-0": READING})
    assert found is not None
    assert found.preparation_seconds is None
    assert found.engine_seconds == 113


def test_pod_without_a_status_gives_only_logged_times() -> None:
    found = measured_startup([{"metadata": {"name": "chat-0"}}], {"chat-0": READING})
    assert found is not None
    assert found.model_fields_set == {
        "pod",
        *("engine_seconds", "load_seconds", "compile_seconds", "warm_up_seconds", "graphs_seconds"),
    }


def test_contradictory_times_of_a_log_give_no_negative_warm_up() -> None:
    wrong = replace(READING, startup_seconds={"init": 10.0, "compile": 33.0})
    found = measured_startup([pod()], {"chat-0": wrong})
    assert found is not None
    assert (found.compile_seconds, found.warm_up_seconds) == (33, None)
