"""Remembers the engines that served last, and puts them back when those of a new spec never do.

What is remembered lies in a ConfigMap beside the other children, so that it
outlives the operator: what started the engines that served, and the attempt
that failed. Nothing is written to the spec, and an attempt that failed is not made
again before the spec or its plan changes.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.objects.workload import serving_template, with_pods_of, workload_name
from specdecode_operator.deployment.pods.group_history import UNSEEN, GroupHistory, as_data, from_data
from specdecode_operator.deployment.pods.rollout import Rollout, template_hash
from specdecode_operator.kube.manifests import owned

_CRASHES_BELIEVED: Final = 3
"""Starts after the first that an engine gets, where its last words do not say that more are in vain."""

_NOT_AN_ATTEMPT: Final = {"replicas", "suspend", "rollout", "captures", "workload"}
"""Fields of the spec that change no engine."""

_STARTER, _FAILURE, _GROUPS = "engines.json", "failure.json", "groups.json"


@dataclass(frozen=True)
class Failure:
    """An attempt whose engines never served.

    Attributes
    ----------
    attempt
        What was tried, as `attempt_of` names it.
    reason, message
        What the engines suffered from.
    """

    attempt: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True)
class Memory:
    """What is known of earlier engines of an object.

    Attributes
    ----------
    workload
        What started the engines that served last.
    failure
        The attempt that was taken back, if the last one was.
    groups
        What was seen of engines on several nodes that crash; None while none does.
    """

    workload: Body
    failure: Failure | None = None
    groups: GroupHistory | None = None


def last_good_name(key: Key) -> str:
    """Return the name of the ConfigMap that holds the memory of an object."""
    return f"{key.name}-last-good"


def read_last_good(config_map: Body | None) -> Memory | None:
    """Return what a ConfigMap holds; None where there is none, or somebody broke it."""
    data = (config_map or {}).get("data") or {}
    try:
        workload, failure = json.loads(data[_STARTER]), json.loads(data.get(_FAILURE, "null"))
        groups = json.loads(data.get(_GROUPS, "null"))
        template = serving_template(workload)
        if not isinstance(template["spec"], dict) or template_hash(template) is None or not workload["apiVersion"]:
            return None
        return Memory(workload, Failure(**failure) if failure else None, from_data(groups) if groups else None)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def render_last_good(key: Key, uid: str, memory: Memory) -> Body:
    """Return the ConfigMap for a memory."""
    data = {_STARTER: json.dumps(memory.workload, indent=2, sort_keys=True)}
    if memory.failure is not None:
        data[_FAILURE] = json.dumps(asdict(memory.failure), indent=2, sort_keys=True)
    if memory.groups is not None:
        data[_GROUPS] = json.dumps(as_data(memory.groups), indent=2, sort_keys=True)
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": last_good_name(key)}, "data": data}
    return owned(body, key, uid)


def attempt_of(spec: dict[str, Any], *place: object) -> str:
    """Name what is tried: a spec, but for what changes no engine, at the place that the plan found for it."""
    engines = {field: value for field, value in spec.items() if field not in _NOT_AN_ATTEMPT}
    text = json.dumps([engines, *map(str, place)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def put_back(key: Key, uid: str, workload: Body, earlier: Body) -> Body:
    """Return what starts the engines of an earlier workload; their number stays."""
    body = with_pods_of(workload, earlier)
    return owned({**body, "metadata": {"name": workload_name(key, body["kind"])}}, key, uid)


def remembered(memory: Memory | None, wanted: Body, attempt: str, rollout: Rollout) -> Memory | None:
    """Return what is to be remembered now that the engines of a workload are where they are.

    ``wanted`` starts the engines of this attempt, not yet taken back.
    """
    if rollout.wanted == 0:
        return memory
    if rollout.complete:
        return Memory({field: wanted[field] for field in ("apiVersion", "kind", "spec")})
    if memory is None or template_hash(serving_template(memory.workload)) == template_hash(serving_template(wanted)):
        return memory
    reason = _why_in_vain(rollout)
    return memory if reason is None else replace(memory, failure=Failure(attempt, *reason))


def with_crashes(memory: Memory | None, groups: GroupHistory) -> Memory | None:
    """Return the memory with the crashes of groups, as far as another one of them would still change something.

    So a group that crashes for days is written down a few times.
    """
    if memory is None:
        return None
    if not groups.crashed:
        return replace(memory, groups=None)
    kept = memory.groups or UNSEEN
    earlier = kept if kept.template == groups.template else UNSEEN
    if earlier.crashed == groups.crashed or earlier.crashes >= _CRASHES_BELIEVED:
        return memory
    # How long was waited is counted anew at each look.
    return replace(memory, groups=replace(groups, waited_s=0.0))


def _why_in_vain(rollout: Rollout) -> tuple[str, str] | None:
    """Why the engines of the current template will not serve; None while they may."""
    trouble = rollout.trouble
    if trouble is not None and (trouble.permanent or (rollout.crashes >= _CRASHES_BELIEVED and not trouble.waits)):
        return trouble.reason, trouble.message
    if not rollout.overdue:
        return None
    if trouble is not None:
        return trouble.reason, trouble.message
    message = f"no engine was ready within the {rollout.deadline_s} s given to it, and none said why: it may hang"
    return "EngineReadyTimeout", message
