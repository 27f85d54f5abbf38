"""Detect engines that served and then crash again and again while they speculate: reason CrashLoop.

Kubernetes restarts such engines forever, because the rollback only judges engines that never served. Known causes are
bugs of a drafter with cached prefixes (vllm-project/vllm#40756), and the remedy is to serve without speculation.

Pods report only their last crash and the number of restarts. The history is therefore kept in memory. After an
operator restart, it starts with the last crash of each pod.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.resources import ENGINE_CONTAINER
from specdecode_operator.deployment.rollout.blocked_pods import container_statuses, ended_container
from specdecode_operator.deployment.rollout.engine_errors import error_lines
from specdecode_operator.deployment.rollout.rollout_progress import GROUP_INDEX_LABEL

CRASHES: Final = 3
"""Crashes within WINDOW_S that are a loop. Two crashes may come from one request that a client repeats."""
WINDOW_S: Final = 3600.0
_MEMORY_S: Final = 86_400.0
_ONE_CRASH_S: Final = 120.0  # Crashes of a group's pods within this time count as one
_NODE_RESTARTED: Final = frozenset({"Unknown", "ContainerStatusUnknown"})
# Frames of the drafter in a traceback: vllm/v1/spec_decode and vllm/v1/worker/gpu/spec_decode, and the sampler that
# verifies drafts. The configuration that vLLM dumps also names speculation, but not in a frame.
_DRAFTER: Final = re.compile(r'File "[^"]*(?:/spec_decode/|rejection_sampler|/(?:eagle|medusa|mtp)[^/"]*\.py)')


@dataclass(frozen=True)
class Crash:
    """End of an engine that had served."""

    at_s: float
    engine: str  # Pod, or group of pods
    speculated: bool
    in_drafter: bool  # Whether its termination log has a traceback through the drafter
    message: str


@dataclass(frozen=True)
class CrashHistory:
    """Crashes of the last day, and the number of restarts already counted, by pod UID."""

    crashes: tuple[Crash, ...] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)


NO_CRASHES: Final = CrashHistory()


def update_crashes(
    before: CrashHistory, pods: list[Body], now_s: float, *, served: Callable[[], bool], speculates: bool
) -> CrashHistory:
    """Return the history after observing the pods of the current template at a Unix time.

    ``served`` returns whether engines of this template have served. Crashes before that are start failures.
    """
    found, restarts = [each for each in before.crashes if now_s - each.at_s < _MEMORY_S], dict[str, int]()
    for pod in pods:
        uid, metadata = str(pod["metadata"]["uid"]), pod["metadata"]
        engine = next((each for each in container_statuses(pod) if each["name"] == ENGINE_CONTAINER), {})
        restarts[uid] = count = int(engine.get("restartCount", 0))
        ended = (engine.get("lastState") or {}).get("terminated")
        is_new = count > before.restarts.get(uid, 0) and "deletionTimestamp" not in metadata
        if not (is_new and ended and served()) or ended.get("reason") in _NODE_RESTARTED:
            continue
        at_s = min(now_s, _unix_s(ended.get("finishedAt"), now_s))
        name = (metadata.get("labels") or {}).get(GROUP_INDEX_LABEL) or metadata["name"]
        if any(each.engine == name and abs(each.at_s - at_s) < _ONE_CRASH_S for each in found):
            continue
        in_drafter = bool(_DRAFTER.search("\n".join(error_lines(ended.get("message", "")))))
        found.append(Crash(at_s, name, speculates, in_drafter, ended_container(ENGINE_CONTAINER, ended).message))
    return CrashHistory(tuple(sorted(found, key=lambda each: each.at_s)), restarts)


def crash_loop(history: CrashHistory, now_s: float) -> str | None:
    """Return a message about a crash loop with speculation; None without one.

    Engines that also crashed without speculation in the last day only count if a traceback leads to the drafter.
    """
    recent = [each for each in history.crashes if each.speculated and now_s - each.at_s < WINDOW_S]
    in_drafter = [each for each in recent if each.in_drafter]
    also_without = any(not each.speculated for each in history.crashes)
    if len(recent) < CRASHES or (also_without and not in_drafter):
        return None
    last = (in_drafter or recent)[-1]
    where = " in the drafter" if in_drafter else ""
    engines = len({each.engine for each in recent})
    of_engines = "the engine" if engines == 1 else f"{engines} engines"
    return f"{of_engines} crashed {len(recent)} times within an hour while speculating, last{where}: {last.message}"


def _unix_s(text: object, otherwise: float) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return otherwise
