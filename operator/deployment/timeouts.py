"""Timeouts of an engine pod in seconds: startup probe, progress deadline, drain, grace period."""

from dataclasses import dataclass

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.models.model_locations import downloads_in_pods

PROBE_PERIOD_S = 5
# Slowest storage that a start is given time for: a gp3 volume as it comes, or a link of one gigabit.
# https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html
_SLOW_READ_BYTES_PER_S = 125 * 2**20
# What a start takes beside reading: imports, compilation, warm-up of kernels, CUDA graphs. Whole cold starts of
# 120B-class models were seen to take 545 to 600 s; this is half as much again, as storage has its own time.
_WARM_UP_S = 900
_BEFORE_THE_START_S = 600  # Scheduling, and pulling an engine image of some ten gigabytes
# A pod that is deleted leaves the Service at once, but nodes and gateways learn of it within seconds. The engine
# serves on meanwhile: after TERM it answers new requests with 500 (vllm/v1/engine/core.py, state SHUTTING_DOWN).
_PRE_STOP_S = 10
_SHUTDOWN_TIMEOUT_S = 60  # How long running requests may go on after TERM, where nobody says otherwise
_TEARDOWN_S = 20  # From the last answer to the end of the process; 9 s were seen
SHORTEST_GRACE_S = _PRE_STOP_S + _TEARDOWN_S + 1  # Below this the kubelet would kill an engine that still answers


@dataclass(frozen=True)
class Timeouts:
    """Times of one engine pod in seconds."""

    startup_s: int
    progress_deadline_s: int
    pre_stop_s: int  # How long an engine serves on after its pod left the Service
    shutdown_timeout_s: int
    termination_grace_s: int


def timeouts(
    spec: SpecDecodeDeploymentSpec, weights_bytes: int, measuring_s: int = 0, *, together: bool = False
) -> Timeouts:
    """Return the times of an engine that loads so many bytes of weights in all, and then measures what its steps cost.

    startup = 900 s + bytes / 125 MiB/s + measuring; a download takes as long as the reading once more. Pods that
    start ``together`` wait for each other: one may still pull and download when another is ready to load.
    """
    reading_s = -(-weights_bytes // _SLOW_READ_BYTES_PER_S)
    before_s = _BEFORE_THE_START_S + (reading_s if downloads_in_pods(spec) else 0)
    needed_s = _WARM_UP_S + reading_s + measuring_s + (before_s if together else 0)
    # Whole periods of the probe that watches it.
    startup_s = -(-needed_s // PROBE_PERIOD_S) * PROBE_PERIOD_S
    shutdown_s = shutdown_timeout_s(spec)
    return Timeouts(
        startup_s=startup_s,
        progress_deadline_s=before_s + startup_s,
        pre_stop_s=_PRE_STOP_S,
        shutdown_timeout_s=shutdown_s,
        termination_grace_s=_PRE_STOP_S + shutdown_s + _TEARDOWN_S,
    )


def shutdown_timeout_s(spec: SpecDecodeDeploymentSpec) -> int:
    """Return how long running requests may go on after TERM: what a grace period in podTemplate leaves for them."""
    grace_s = (spec.pod_template.spec or {}).get("terminationGracePeriodSeconds") if spec.pod_template else None
    if not isinstance(grace_s, int) or grace_s < SHORTEST_GRACE_S:
        return _SHUTDOWN_TIMEOUT_S
    return grace_s - _PRE_STOP_S - _TEARDOWN_S
