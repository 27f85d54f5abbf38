"""Detect engines that crash again and again while they speculate, after they were ready: reason CrashLoop.

Kubernetes restarts such engines forever, and the rollback only judges engines that never became ready. Known causes are
bugs of a drafter with cached prefixes (vllm-project/vllm#40756), and the remedy is to serve without speculation.

A pod reports only its last crash. The history is therefore kept in memory, and starts over when the operator restarts.
A crash counts at the time at which the operator sees it, on a monotonic clock: the clocks of nodes and API server may
be wrong and may step back.

If the engines of the spec do not serve yet, those of an earlier spec do: the spec waits at a gate or for its canary,
was rolled back or rejected, or the rollout is paused. They are watched too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.resources import ENGINE_CONTAINER
from specdecode_operator.deployment.rollout.blocked_pods import (
    condition_of,
    container_statuses,
    ended_container,
    last_end,
)
from specdecode_operator.deployment.rollout.engine_errors import error_lines

CRASHES: Final = 3
"""Crashes within WINDOW_S that are a loop. Two may come from one request that a client repeats."""
WINDOW_S: Final = 3600.0
_MEMORY_S: Final = 86_400.0
# Crashes of several engines at about the same time have one cause, such as a driver reset.
_ONE_INCIDENT_S: Final = 120.0
_STOPPED: Final = frozenset({0, 143})  # Exit codes after SIGTERM
_NODE_RESTARTED: Final = frozenset({"Unknown", "ContainerStatusUnknown"})
# Frames of the drafter in a traceback: vllm/v1/spec_decode and vllm/v1/worker/gpu/spec_decode, and the sampler that
# verifies drafts. The configuration that vLLM dumps also names speculation, but not in a frame.
_DRAFTER: Final = re.compile(r'File "[^"]*(?:/spec_decode/|rejection_sampler|/(?:eagle|medusa|mtp)[^/"]*\.py)')


@dataclass(frozen=True)
class Engines:
    """Pods of one template."""

    pods: Sequence[Body]
    template: str | None  # Hash of the pod template
    spec: str | None  # Hash of the written spec; None if these engines are not of its rollout
    speculate: bool


@dataclass(frozen=True)
class Crash:
    """End of an engine that had been ready."""

    at_s: float  # Monotonic
    pod: str  # UID
    template: str | None
    spec: str | None
    speculated: bool
    in_drafter: bool  # Whether its termination log has a traceback through the drafter
    message: str


@dataclass(frozen=True)
class CrashHistory:
    """Crashes of the last day; and the current pods by UID: were ready, are being deleted, how they ended last."""

    crashes: tuple[Crash, ...] = ()
    ready: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()  # Pods whose engine still ran when they were deleted
    ended: Mapping[str, tuple[str, str]] = field(default_factory=dict)


NO_CRASHES: Final = CrashHistory()


@dataclass(frozen=True)
class CrashLoop:
    """Engines that crash again and again while they speculate."""

    message: str
    of_spec: bool  # Whether they are of the spec's rollout, so that a policy may replace them


def update_crashes(before: CrashHistory, engines: Sequence[Engines], now_s: float) -> CrashHistory:
    """Return the history updated from the pods of these engines, at a monotonic time."""
    crashes = [each for each in before.crashes if now_s - each.at_s < _MEMORY_S]
    ready, leaving, ended = set[str](), set[str](), dict[str, tuple[str, str]]()
    for its, pod in [(each, pod) for each in engines for pod in each.pods]:
        uid = str(pod["metadata"]["uid"])
        if uid in before.ready or condition_of(pod, "Ready").get("status") == "True":
            ready.add(uid)
        engine = next((each for each in container_statuses(pod) if each["name"] == ENGINE_CONTAINER), {})
        last, is_deleted = last_end(engine), "deletionTimestamp" in pod["metadata"]
        if uid in before.leaving or (is_deleted and last is None):
            leaving.add(uid)
            continue
        if last is None:
            continue
        # The time alone may repeat if the node's clock steps back.
        ended[uid] = (str(last.get("finishedAt")), str(last.get("containerID")))
        # A container that ended before its pod was first seen may have failed to start.
        if uid not in before.ready or ended[uid] == before.ended.get(uid) or last.get("reason") in _NODE_RESTARTED:
            continue
        if is_deleted and _was_stopped(pod["metadata"], last):
            continue
        if any(each.pod != uid and now_s - each.at_s < _ONE_INCIDENT_S for each in crashes):
            continue
        in_drafter = bool(_DRAFTER.search("\n".join(error_lines(last.get("message", "")))))
        message = ended_container(ENGINE_CONTAINER, last).message
        crashes.append(Crash(now_s, uid, its.template, its.spec, its.speculate, in_drafter, message))
    return CrashHistory(tuple(crashes), frozenset(ready), frozenset(leaving), ended)


def crash_loop(history: CrashHistory, engines: Sequence[Engines], now_s: float) -> CrashLoop | None:
    """Return a crash loop of engines that speculate, the first of several; None without one.

    If engines also crashed that often without speculation in the last day, only tracebacks through the drafter count.
    """
    without = sum(not each.speculated for each in history.crashes)
    for its in engines:
        recent = [
            each
            for each in history.crashes
            if each.speculated
            and now_s - each.at_s < WINDOW_S
            and (each.template == its.template or (its.spec is not None and each.spec == its.spec))
        ]
        in_drafter = [each for each in recent if each.in_drafter]
        if not its.speculate or len(recent) < CRASHES or (without >= CRASHES and not in_drafter):
            continue
        last = (in_drafter or recent)[-1]
        where = " in the drafter" if in_drafter else ""
        whose = "Engines" if its.spec is not None else "Engines of an earlier rollout, which still serve,"
        message = f"{whose} crashed {len(recent)} times within an hour while speculating, last{where}: {last.message}"
        return CrashLoop(message, of_spec=its.spec is not None)
    return None


def _was_stopped(metadata: Body, last: Body) -> bool:
    """Return whether an engine ended because its pod was deleted, if both were first seen together.

    A group's controller deletes a pod as soon as its engine crashes. The timestamp is at the end of the grace period.
    """
    if last.get("exitCode") in _STOPPED:
        return True
    deleted_s = _unix_s(metadata["deletionTimestamp"], 0.0) - float(metadata.get("deletionGracePeriodSeconds") or 0)
    return _unix_s(last.get("finishedAt"), deleted_s) >= deleted_s


def _unix_s(text: object, otherwise: float) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return otherwise
