"""The arms of a capture: each is planned as if it were deployed, on the place that the deployment has.

What no engine would start is refused here, before a GPU is taken.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Arm, SpecDecodeCaptureSpec
from specdecode_operator.api.crd.admission import broken_rules
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.values import METHODS_WITH_LAYERS, AcceleratorType, Quantization
from specdecode_operator.capture.control.arm_pods import command_of
from specdecode_operator.capture.control.observation import CapturedDeployment
from specdecode_operator.capture.job.places import ARM
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.desired_state import DesiredState, Gated, Launch, NotLaunched, Outcome, RolledBack
from specdecode_operator.deployment.models.jobs import DOWNLOADING, RESOLVING
from specdecode_operator.deployment.pods.readiness import stalled
from specdecode_operator.deployment.spec.model_sources import served_models
from specdecode_operator.deployment.spec.model_storage import downloads_in_pods
from specdecode_operator.deployment.spec.pod_template_merge import merge
from specdecode_operator.deployment.spec.warnings import lossy_answers
from specdecode_operator.sizing.choice.node_placement import place_phrase
from specdecode_operator.sizing.memory.budget import Verdict

_FIELDS: Final[Mapping[str, str]] = {
    "spec.speculation": "speculation",
    "spec.target.quantization": "targetQuantization",
    "spec.serving.kvCacheDtype": "kvCacheDtype",
}
"""Fields of a deployment that an arm has in their place."""

_FETCHING: Final[Mapping[str, tuple[str, str]]] = {
    RESOLVING: (
        "nothing is known of it yet",
        "has read it; or create another capture with the content of its config.json beside its name",
    ),
    DOWNLOADING: ("it is not in the deployment's cache", "has downloaded it to the same claim"),
}
"""What an arm lacks that nobody gets for it, by the reason of a deployment that waits for the same, and what helps."""

REFUSED: Final = "ArmRefused"
DOES_NOT_FIT: Final = "ArmDoesNotFit"
WAITS: Final = "ArmWaits"


@dataclass(frozen=True)
class CapturedArm:
    """An arm, with its plan in force."""

    name: str
    source: CapturedDeployment


def asked_arms(spec: SpecDecodeCaptureSpec) -> list[Arm]:
    """Return the arms that a capture switches between; none where it runs the deployment's own engine, once."""
    return spec.arms or ([Arm(name=ARM)] if spec.starts > 1 else [])


def arm_states(
    spec: SpecDecodeCaptureSpec, body: Body, outcome: Outcome, desired_state_of: Callable[[int, Body], DesiredState]
) -> list[DesiredState]:
    """Return what a deployment would come to with each of a capture's arms; nothing while it has no plan in force.

    ``desired_state_of`` is asked for the object with an arm's settings, by the arm's number.
    """
    launch = _asked_for(outcome)
    if not isinstance(launch, Launch):
        return []
    bodies = [arm_body(arm, body, launch) for arm in asked_arms(spec)]
    return [_refused(changed) or desired_state_of(index, changed) for index, changed in enumerate(bodies)]


def _asked_for(outcome: Outcome) -> Launch | RolledBack | NotLaunched:
    """Return what a spec comes to: what waits at a gate is asked for no more than it would take."""
    return outcome.launch if isinstance(outcome, Gated) else outcome


def _refused(body: Body) -> DesiredState | None:
    """Return that an API server would refuse an object, which none has seen."""
    problems = broken_rules(SpecDecodeDeploymentSpec.parse(body["spec"], newer=True), "spec")
    broken = "; ".join(map(str, problems))
    return DesiredState(NotLaunched(stalled("Invalid", broken)), []) if broken else None


def arm_body(arm: Arm, body: Body, launch: Launch) -> Body:
    """Return a deployment with an arm's settings, where its plan is and at the precisions that this chose."""
    plan, written = launch.plan_status, body["spec"]
    on_gpu = launch.facts.spec.accelerator.type is not AcceleratorType.CPU
    drafting = written.get("speculation") or {}
    quantization = arm.target_quantization or _pinned(written["target"], plan.target_quantization)
    draft_quantization = _pinned(drafting.get("draft") or {}, plan.draft_quantization)
    kv_cache_dtype = arm.kv_cache_dtype
    changed = merge(
        written,
        {
            "suspend": False,
            "replicas": 1,
            "parallelism": {"tensor": plan.tensor},
            **({"accelerator": {"product": [plan.product]}} if on_gpu else {}),
            **({"target": {"quantization": quantization}} if quantization else {}),
            **({"speculation": {"draft": {"quantization": draft_quantization}}} if draft_quantization else {}),
            **({"serving": {"kvCacheDtype": kv_cache_dtype}} if kv_cache_dtype else {}),
        },
    )
    if arm.speculation is not None:
        changed["speculation"] = arm.speculation.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if arm.speculation.method not in METHODS_WITH_LAYERS:
            # It is about a draft that the arm does not have.
            changed["parallelism"].pop("draftTensor", None)
    return {**body, "spec": changed}


def _pinned(model: Body, chosen: str | None) -> str | None:
    """Return what a plan chose for a model where it was free: arms that differ in one thing differ in nothing else."""
    return chosen if model.get("quantization") == Quantization.AUTO else None


def captured_arms(
    spec: SpecDecodeCaptureSpec, source: CapturedDeployment, states: Sequence[DesiredState]
) -> list[CapturedArm] | Blocked:
    """Return the arms of a capture with their plans, or what blocks the first that cannot be started.

    ``states`` is what `arm_states` says of them.
    """
    found = []
    for index, (arm, state) in enumerate(zip(asked_arms(spec), states, strict=True)):
        outcome = _asked_for(state.outcome)
        blocked = _place_blocked(outcome, source) if isinstance(outcome, Launch) else _plan_blocked(outcome, arm)
        if blocked is not None:
            message = f"spec.arms[{index}] ({arm.name}): {_in_arm(blocked.message, index, arm)}"
            return Blocked(blocked.reason, message, blocked.permanent)
        assert isinstance(outcome, Launch)  # noqa: S101  or it were blocked
        found.append(CapturedArm(arm.name, CapturedDeployment(source.key, source.uid, source.generation, outcome)))
    return _models_blocked(found) or found


def _plan_blocked(outcome: RolledBack | NotLaunched, arm: Arm) -> Blocked:
    if isinstance(outcome, RolledBack):
        return Blocked(REFUSED, f"engines of it never served ({outcome.failure}): leave it out", permanent=True)
    readiness = outcome.readiness
    if readiness.reason in _FETCHING:
        lacks, helps = _FETCHING[readiness.reason]
        draft = arm.speculation.draft if arm.speculation else None
        model = f"speculation.draft.model: {draft.model}" if draft else "a checkpoint of the target"
        message = (
            f"{model}: {lacks}; goes on when a SpecDecodeDeployment of this namespace that serves it, or would if it"
            f" were not suspended, {helps}"
        )
        return Blocked(WAITS, message)
    why = f"{readiness.reason}: {readiness.message}"
    if not readiness.stalled:
        return Blocked(WAITS, why)
    return Blocked(DOES_NOT_FIT if readiness.reason == Verdict.DOES_NOT_FIT.value else REFUSED, why, permanent=True)


def _place_blocked(launch: Launch, source: CapturedDeployment) -> Blocked | None:
    """Return that an arm takes another place than the deployment, whose GPUs all arms have one after another."""
    places = [
        place_phrase(plan.gpus, plan.nodes, plan.product) for plan in (launch.plan.chosen, source.launch.plan.chosen)
    ]
    if places[0] == places[1]:
        return None
    message = f"it takes {places[0]}, and the deployment {places[1]}, which all arms share: leave it out"
    return Blocked(REFUSED, message, permanent=True)


def _models_blocked(arms: Sequence[CapturedArm]) -> Blocked | None:
    """Return that two arms would download one model at two revisions, to one folder of their pod."""
    seen: dict[str, tuple[str | None, str]] = {}
    for index, arm in enumerate(arms):
        spec = arm.source.launch.facts.spec
        for model in served_models(spec).values() if downloads_in_pods(spec) else ():
            revision, other = seen.setdefault(model.model, (model.revision, arm.name))
            if revision != model.revision:
                wanted, there = model.revision or "the newest", revision or "the newest"
                message = (
                    f"spec.arms[{index}] ({arm.name}): wants {model.model} at revision {wanted}, and arm {other} at"
                    f" {there}, in the same folder: give the deployment a spec.models.cache, which holds both"
                )
                return Blocked(REFUSED, message, permanent=True)
    return None


def _in_arm(message: str, index: int, arm: Arm) -> str:
    """Return a message about a deployment in words about the arm that the fields come from."""
    given = arm.model_dump(by_alias=True, exclude_none=True)
    for path, field in _FIELDS.items():
        if field in given:
            message = re.sub(rf"\b{re.escape(path)}\b", f"spec.arms[{index}].{field}", message)
    return message


def arm_notes(arms: Sequence[CapturedArm]) -> Iterator[str]:
    """Yield what to know of arms that may be started: two may be one, and answers may be others by intention."""
    engines: dict[tuple[str, ...], str] = {}
    for arm in arms:
        command, facts = command_of(arm.source), arm.source.launch.facts
        earlier = engines.setdefault(command, arm.name)
        if earlier != arm.name:
            yield f"arms {earlier} and {arm.name} start the same engine: an A/A test, which should find no difference"
        if lossy := lossy_answers(facts):
            yield f"arm {arm.name}: {lossy}"
