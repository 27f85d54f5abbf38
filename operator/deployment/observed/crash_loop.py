"""Detect engines that crash again and again while they speculate, after they were ready: reason CrashLoop.

Kubernetes restarts such engines forever, and the rollback only judges engines that never became ready. Known causes are
bugs of a drafter with cached prefixes (vllm-project/vllm#40756), and the remedy is to serve without speculation.

A pod reports only its last crash. The history is therefore kept in memory, and starts over when the operator restarts.
"""

import re
from collections.abc import Mapping
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
_NODE_RESTARTED: Final = frozenset({"Unknown", "ContainerStatusUnknown"})
# Frames of the drafter in a traceback: vllm/v1/spec_decode and vllm/v1/worker/gpu/spec_decode, and the sampler that
# verifies drafts. The configuration that vLLM dumps also names speculation, but not in a frame.
_DRAFTER: Final = re.compile(r'File "[^"]*(?:/spec_decode/|rejection_sampler|/(?:eagle|medusa|mtp)[^/"]*\.py)')


@dataclass(frozen=True)
class Crash:
    """End of an engine that had been ready."""

    at_s: float
    spec: str  # Hash of the written spec
    speculated: bool
    in_drafter: bool  # Whether its termination log has a traceback through the drafter
    message: str


@dataclass(frozen=True)
class CrashHistory:
    """Crashes of the last day; and the current pods that were ready, with the end of their last container."""

    crashes: tuple[Crash, ...] = ()
    ready: frozenset[str] = frozenset()  # UIDs
    ended: Mapping[str, str] = field(default_factory=dict)  # Time by UID


NO_CRASHES: Final = CrashHistory()


def update_crashes(
    before: CrashHistory, pods: list[Body], now_s: float, *, spec: str, speculates: bool
) -> CrashHistory:
    """Return the history updated from the pods of the current template, at a Unix time."""
    crashes = [each for each in before.crashes if now_s - each.at_s < _MEMORY_S]
    ready, ended = set[str](), dict[str, str]()
    for pod in pods:
        uid = str(pod["metadata"]["uid"])
        if uid in before.ready or condition_of(pod, "Ready").get("status") == "True":
            ready.add(uid)
        last = _crash_of(pod)
        if last is None:
            continue
        ended[uid] = str(last.get("finishedAt", ""))
        # A container that ended before its pod was first seen may have failed to start.
        if uid not in before.ready or ended[uid] == before.ended.get(uid) or last.get("reason") in _NODE_RESTARTED:
            continue
        at_s = min(now_s, _unix_s(ended[uid], now_s))
        if any(abs(each.at_s - at_s) < _ONE_INCIDENT_S for each in crashes):
            continue
        in_drafter = bool(_DRAFTER.search("\n".join(error_lines(last.get("message", "")))))
        message = ended_container(ENGINE_CONTAINER, last).message
        crashes.append(Crash(at_s, spec, speculates, in_drafter, message))
    return CrashHistory(tuple(sorted(crashes, key=lambda each: each.at_s)), frozenset(ready), ended)


def crash_loop(history: CrashHistory, now_s: float, spec: str) -> str | None:
    """Return a message about a crash loop of a spec with speculation; None without one.

    If engines also crashed that often without speculation in the last day, only tracebacks through the drafter count.
    """
    recent = [
        each for each in history.crashes if each.speculated and each.spec == spec and now_s - each.at_s < WINDOW_S
    ]
    in_drafter = [each for each in recent if each.in_drafter]
    without = sum(not each.speculated for each in history.crashes)
    if len(recent) < CRASHES or (without >= CRASHES and not in_drafter):
        return None
    last = (in_drafter or recent)[-1]
    where = " in the drafter" if in_drafter else ""
    return f"Engines crashed {len(recent)} times within an hour while speculating, last{where}: {last.message}"


def _crash_of(pod: Body) -> Body | None:
    """Return how the engine container ended last; None if it did not end, or because its pod was deleted."""
    metadata = pod["metadata"]
    engine = next((each for each in container_statuses(pod) if each["name"] == ENGINE_CONTAINER), {})
    ended = last_end(engine)
    if ended is None or "deletionTimestamp" not in metadata:
        return ended
    # A group's controller deletes a pod as soon as its engine crashes. The timestamp is at the end of the grace period.
    deleted_s = _unix_s(metadata["deletionTimestamp"], 0.0) - float(metadata.get("deletionGracePeriodSeconds") or 0)
    return ended if _unix_s(ended.get("finishedAt"), deleted_s) < deleted_s else None


def _unix_s(text: object, otherwise: float) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return otherwise
