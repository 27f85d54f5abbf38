"""What of a spec makes its engines: two specs that are alike in it start the same ones."""

import hashlib
import json
import re
from typing import Any, Final

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.policy import PolicyStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.api.status.deployment import PlanStatus
from specdecode_operator.api.values import METHODS_WITH_LAYERS
from specdecode_operator.policy.decision import Mode

_CHANGE_NO_ENGINE: Final = {"replicas", "suspend", "rollout", "captures", "workload", "policy"}


def engine_fields(spec: SpecDecodeDeploymentSpec) -> dict[str, Any]:
    """Return the fields that are not left at their defaults, but for those that change no engine."""
    fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {field: value for field, value in fields.items() if field not in _CHANGE_NO_ENGINE}


def engine_word(spec: SpecDecodeDeploymentSpec, plan: PlanStatus | None = None) -> str:
    """Return what tells engines of a spec, at the place of its plan where one is given, from those of another."""
    place = (plan.product, plan.tensor, plan.gpus_per_replica, plan.nodes_per_replica) if plan else ()
    text = json.dumps([engine_fields(spec), *place], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_engine_word(text: object) -> bool:
    """Whether a text that others may have written has the form of such a word."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{16}", text) is not None


def with_policy(spec: SpecDecodeDeploymentSpec, status: PolicyStatus | None) -> SpecDecodeDeploymentSpec:
    """Return the spec that is in force: as it is written, or with the speculation that a policy put in its place.

    Nothing of an earlier spec stays: whoever changes what makes engines gets what is written.
    """
    if status is None or status.speculation is None or not is_by_policy(spec, status):
        return spec
    return speculating(spec, status.speculation)


def is_by_policy(spec: SpecDecodeDeploymentSpec, status: PolicyStatus | None) -> bool:
    """Whether a policy chose what is in force for this spec, which may be what it says."""
    is_enforced = spec.policy is not None and spec.policy.mode is Mode.ENFORCE
    return is_enforced and status is not None and status.since is not None and status.asked == engine_word(spec)


def speculating(spec: SpecDecodeDeploymentSpec, speculation: Speculation) -> SpecDecodeDeploymentSpec:
    """Return a spec with another speculation, and without what is said of a draft that this does not have."""
    parallelism = spec.parallelism
    if speculation.method not in METHODS_WITH_LAYERS:
        parallelism = parallelism.model_copy(update={"draft_tensor": None})
    return spec.model_copy(update={"speculation": speculation, "parallelism": parallelism})
