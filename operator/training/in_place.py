"""Update the trained head of serving engines without a restart, one engine at a time.

The pod template keeps the head that engines start with. The sidecar of each engine finds the order to load another one
in the recorder's ConfigMap (capture/recorder/head_orders.py), and the engine publishes the result. An engine that
starts later gets the same order.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.capture.recorder.head_loader import read_by_vllm
from specdecode_operator.deployment.canaries import not_asked, questions
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.live_recorder import EXTENSION_FLAG, has_extension, live_recorder_blocked
from specdecode_operator.deployment.models.model_locations import DRAFTS_PATH
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.enums import Method, RolloutStrategy
from specdecode_operator.sizing.plan import Plan
from specdecode_operator.training.offers import OfferedHead
from specdecode_operator.untrusted import mapping
from specdecode_operator.vllm.engine_metrics import HEAD_KEPT, HEAD_REVERTED, EngineReading, HeadUpdate, Reading
from specdecode_operator.vllm.versions import release

OLDEST: Final = (0, 32)
"""First vLLM version in which updates without a restart were tested."""
TIME_PER_ENGINE_S: Final = 900.0
"""Time in which one engine must report. The kubelet needs up to two minutes to update the file in a pod; the rest is
for reading the head."""


def why_restart(launch: Launch, start: OfferedHead | None, new: OfferedHead) -> str:
    """Return why engines that started with one head cannot get another without a restart; empty if they can."""
    if start is None:
        return "the engines serve the draft of the spec, which is not a trained head"
    return _of_engines(launch.facts, launch.plan) or _of_heads(start, new)


def _of_engines(facts: Facts, plan: Plan) -> str:
    spec, version = facts.spec, facts.profile.version
    checks = (
        (live_recorder_blocked(spec) is None, str(live_recorder_blocked(spec))),
        (facts.replay is None, "spec.engine.replay: the engine does not run vLLM"),
        (release(version) >= OLDEST, f"vLLM {version} is older than {'.'.join(map(str, OLDEST))}"),
        (facts.takes_pods_of(plan) == 1, "an engine has pods on several nodes"),
        (spec.parallelism.data == 1, "spec.parallelism.data is greater than 1"),
        (not has_extension(spec), f"spec.engine.extraArgs has {EXTENSION_FLAG}"),
        (spec.rollout.gate is None, "spec.rollout.gate can only test new pods"),
        (spec.rollout.strategy is not RolloutStrategy.CANARY, "spec.rollout.strategy: Canary can only test new pods"),
        (not spec.rollout.paused, "spec.rollout.paused is true"),
        (not_asked(facts) is None, f"answers cannot be checked: {not_asked(facts)}"),
    )
    return next((why for holds, why in checks if not holds), "")


def _of_heads(start: OfferedHead, new: OfferedHead) -> str:
    if new == start:
        return ""
    if new.claim != start.claim:
        return f"the head is on claim {new.claim}, and the engines mount claim {start.claim}"
    if new.path == start.path:
        return f"the head overwrote the files of the current one in folder {new.path}"
    first, second = _shape(start.speculation), _shape(new.speculation)
    if first["method"] != Method.EAGLE3 or second["config"].get("speculators_model_type") != Method.EAGLE3.value:
        return "vLLM can replace only EAGLE-3 heads"
    different = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    if different:
        return f"the head differs from the current one in {', '.join(different)}"
    return ""


def _shape(speculation: Body) -> dict[str, Any]:
    """Return the settings of a head and the keys of its config.json that vLLM reads; heads of one shape are equal."""
    config = read_by_vllm(mapping(speculation["draft"], "config"))
    return {**{name: each for name, each in speculation.items() if name != "draft"}, "config": config}


@dataclass(frozen=True)
class Update:
    """State of an update of all engines to one head."""

    head: OfferedHead
    wanted: int
    updated: tuple[str, ...]
    """Pods whose engine serves with the head."""
    waiting: tuple[str, ...]
    pause_s: float
    failed: tuple[str, HeadUpdate] | None
    """Pod whose engine still serves with its earlier head, and the result that it reported."""

    @property
    def is_complete(self) -> bool:
        """Whether all engines serve with the head."""
        return not self.waiting and self.failed is None and 0 < self.wanted <= len(self.updated)

    @property
    def is_wrong(self) -> bool:
        """Whether the answers of an engine with this head were wrong, or it did not speculate."""
        return self.failed is not None and self.failed[1].result == HEAD_REVERTED

    @property
    def failure(self) -> str:
        """Pod, result and reason of an engine that does not serve with the head; empty without one."""
        return f"pod {self.failed[0]}: {self.failed[1].result}: {self.failed[1].reason}" if self.failed else ""

    def __str__(self) -> str:
        told = f"{len(self.updated)} of {max(self.wanted, len(self.updated))} engines serve the head without a restart"
        if self.pause_s:
            told += f"; requests waited {self.pause_s:.2f} s at most"
        # If an engine fails, only the head that engines start with stays in force.
        return f"{told}; {self.failure}; delete the pod to restart its engine" if self.failure else told


def update_of(head: OfferedHead, start: OfferedHead, wanted: int, readings: Mapping[str, Reading]) -> Update:
    """Return the state of an update from the metrics of the engines.

    ``start`` is the head that engines start with.
    """
    updated, waiting, failed, pause_s = list[str](), list[str](), None, 0.0
    for name, reading in sorted(readings.items()):
        seen = reading.head_update if isinstance(reading, EngineReading) else None
        has_begun_with_it = seen is None and head == start and isinstance(reading, EngineReading)
        if has_begun_with_it or (seen is not None and (seen.sha256, seen.result) == (head.sha256, HEAD_KEPT)):
            updated.append(name)
            pause_s = max(pause_s, seen.pause_s if seen else 0.0)
        elif seen is not None and seen.sha256 == head.sha256:
            failed = (name, seen)
        else:
            waiting.append(name)
    return Update(head, wanted, tuple(updated), tuple(waiting), pause_s, failed)


def order(update: Update, facts: Facts, *, everywhere: bool) -> str:
    """Return the content of draft.json: the head for the updated engines and one more.

    With ``everywhere``, it is for all engines, also those that start later.
    """
    pods = None if everywhere else [*update.updated, *update.waiting[:1]]
    head = {
        "root": f"{DRAFTS_PATH}/{update.head.claim}",
        "path": update.head.path,
        "sha256": update.head.sha256,
        "pods": pods,
    }
    return json.dumps({"heads": [head], "canaries": questions(facts)}, ensure_ascii=False, indent=1) + "\n"
