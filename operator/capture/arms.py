"""Plan the arms of a capture and build the engine pods that run them.

Each arm is planned as if it replaced the deployment. Settings that would prevent an engine from starting are
therefore rejected before a GPU is allocated. The engines of all arms run in one pod.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Arm, Source, SpecDecodeCaptureSpec
from specdecode_operator.api.crd_validation import broken_rules
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.capture.job.pod_files import ARM
from specdecode_operator.capture.observation import CapturedDeployment
from specdecode_operator.cluster.resources import ENGINE_CONTAINER
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.desired_state import (
    DesiredState,
    Gated,
    InCanary,
    Launch,
    NotLaunched,
    Outcome,
    RolledBack,
)
from specdecode_operator.deployment.engine_pod import engine_pod
from specdecode_operator.deployment.models import model_locations
from specdecode_operator.deployment.models.model_jobs import DOWNLOADING, RESOLVING
from specdecode_operator.deployment.pod_template_merge import merge
from specdecode_operator.deployment.rollout.readiness import stalled
from specdecode_operator.deployment.warnings import lossy_answers, lost_sampling
from specdecode_operator.enums import METHODS_WITH_LAYERS, AcceleratorType, Quantization
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.sizing.placement import place_phrase

# Arguments of the script that starts engines with compiled artifacts of earlier ones, and their folders.
_KEPT = (("--folder", model_locations.COMPILED_PATH), ("--cache", model_locations.COMPILE_CACHE_PATH))


def engine_pod_of(source: CapturedDeployment) -> Body:
    """Return the pod of the deployment's engine, without the recorder for live captures: a capture brings its own."""
    return engine_pod(source.key, source.launch.facts, source.launch.plan, live=False)


def engine_container(pod: Body) -> Body:
    """Return the engine's container of a pod."""
    (engine,) = (each for each in pod["spec"]["containers"] if each["name"] == ENGINE_CONTAINER)
    return dict(engine)


def plain_command(pod: Body) -> list[str]:
    """Return an engine's command with Kubernetes' ``$$`` unescaped."""
    return [argument.replace("$$", "$") for argument in engine_container(pod)["command"]]


def common_engine_pod(pods: Sequence[Body]) -> Body:
    """Return the first arm's pod with the volumes and downloads of all, and only the variables common to all."""
    engines = [engine_container(pod) for pod in pods]
    env = [each for each in engines[0]["env"] if all(each in other["env"] for other in engines)]
    mounts = [mount for engine in engines for mount in engine.get("volumeMounts") or []]
    shared = {**engines[0], "env": env, "volumeMounts": _each_once(mounts)}
    first = pods[0]["spec"]
    others = [each for each in first["containers"] if each["name"] != ENGINE_CONTAINER]
    volumes = _each_once([volume for pod in pods for volume in pod["spec"].get("volumes") or []])
    downloads = _each_once([each for pod in pods for each in pod["spec"].get("initContainers") or []])
    names = [each["name"] for each in downloads]
    # Containers that download the drafts of several arms share a name.
    renamed = [
        {**each, "name": f"{name}-{names[:index].count(name) + 1}"} if name in names[:index] else each
        for index, (name, each) in enumerate(zip(names, downloads, strict=True))
    ]
    spec = {**first, "containers": [shared, *others], "volumes": volumes, "initContainers": renamed}
    return {**pods[0], "spec": spec}


def apart(pod: Body, number: int) -> Body:
    """Return an arm's pod with separate folders for compiled artifacts and the start-up plan in them."""
    if number == 0:
        return pod
    own = {path: f"{path}-{number}" for path in (model_locations.COMPILED_PATH, model_locations.COMPILE_CACHE_PATH)}
    flags = {f"{flag}={path}": f"{flag}={own[path]}" for flag, path in _KEPT}
    engine = engine_container(pod)
    mounts = [{**each, "mountPath": own.get(each["mountPath"], each["mountPath"])} for each in engine["volumeMounts"]]
    command = [flags.get(argument, argument) for argument in engine["command"]]
    changed = {**engine, "command": command, "volumeMounts": mounts}
    containers = [changed if each["name"] == ENGINE_CONTAINER else each for each in pod["spec"]["containers"]]
    return {**pod, "spec": {**pod["spec"], "containers": containers}}


def literals(engine: Body, *, beside: Body) -> dict[str, str]:
    """Return the variables of an engine that the container ``beside`` lacks."""
    own = [each for each in engine["env"] if each not in beside["env"]]
    return {each["name"]: each["value"].replace("$$", "$") for each in own}


def _each_once(items: Sequence[Body]) -> list[Body]:
    return [each for index, each in enumerate(items) if each not in items[:index]]


_FIELDS: Final[Mapping[str, str]] = {
    "spec.speculation": "speculation",
    "spec.target.quantization": "targetQuantization",
    "spec.serving.kvCacheDtype": "kvCacheDtype",
}
"""Fields of a deployment that an arm overrides."""

_FETCHING: Final[Mapping[str, tuple[str, str]]] = {
    RESOLVING: (
        "no facts about it yet",
        "has read it; or put its config.json into config, next to model, in a new capture",
    ),
    DOWNLOADING: ("not in the deployment's cache", "has downloaded it to the same claim"),
}
"""Missing model and remedy, by the reason of a deployment that waits for it; captures fetch no models for arms."""

_REJECTED: Final = "ArmRefused"
DOES_NOT_FIT: Final = "ArmDoesNotFit"
WAITS: Final = "ArmWaits"


@dataclass(frozen=True)
class CapturedArm:
    """An arm with its plan in force."""

    name: str
    source: CapturedDeployment


def asked_arms(spec: SpecDecodeCaptureSpec) -> list[Arm]:
    """Return the arms that a capture switches between; empty if it runs the deployment's own engine once."""
    return spec.arms or ([Arm(name=ARM)] if spec.starts > 1 else [])


def arm_states(
    spec: SpecDecodeCaptureSpec, body: Body, outcome: Outcome, desired_state_of: Callable[[int, Body], DesiredState]
) -> list[DesiredState]:
    """Return the desired state of a deployment with each of a capture's arms; empty while it has no plan in force."""
    launch = _ungated(outcome)
    if not isinstance(launch, Launch):
        return []
    states = []
    for index, arm in enumerate(asked_arms(spec)):
        changed = arm_body(arm, body, launch)
        # No API server has validated this object.
        spec_of_arm = SpecDecodeDeploymentSpec.parse(changed["spec"], newer=True)
        if broken := "; ".join(map(str, broken_rules(spec_of_arm, "spec"))):
            states.append(DesiredState(NotLaunched(stalled("Invalid", broken)), []))
        else:
            states.append(desired_state_of(index, changed))
    return states


def _ungated(outcome: Outcome) -> Launch | RolledBack | NotLaunched:
    return outcome.launch if isinstance(outcome, Gated | InCanary) else outcome


def arm_body(arm: Arm, body: Body, launch: Launch) -> Body:
    """Return a deployment with an arm's settings, on the GPUs of its plan and at the precisions that this chose."""
    plan, written = launch.plan_status, body["spec"]
    drafting = written.get("speculation") or {}
    quantization = arm.target_quantization or _pinned(written["target"], plan.target_quantization)
    draft_quantization = _pinned(drafting.get("draft") or {}, plan.draft_quantization)
    changes: Body = {"suspend": False, "replicas": 1, "parallelism": {"tensor": plan.tensor}}
    if launch.facts.spec.accelerator.type is not AcceleratorType.CPU:
        changes["accelerator"] = {"products": [plan.product]}
    if quantization:
        changes["target"] = {"quantization": quantization}
    if draft_quantization:
        changes["speculation"] = {"draft": {"quantization": draft_quantization}}
    if arm.kv_cache_dtype:
        changes["serving"] = {"kvCacheDtype": arm.kv_cache_dtype}
    changed = merge(written, changes)
    if arm.speculation is not None:
        changed["speculation"] = arm.speculation.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if arm.speculation.method not in METHODS_WITH_LAYERS:
            # The arm has no draft model.
            changed["parallelism"].pop("draftTensor", None)
    return {**body, "spec": changed}


def _pinned(model: Body, chosen: str | None) -> str | None:
    """Return the precision that the plan chose for a model that leaves it open: arms differ in one setting only."""
    return chosen if model.get("quantization") == Quantization.AUTO else None


def captured_arms(
    spec: SpecDecodeCaptureSpec, source: CapturedDeployment, states: Sequence[DesiredState]
) -> list[CapturedArm] | Blocked:
    """Return the arms of a capture with their plans, or what blocks the first that cannot be started."""
    found = []
    for index, (arm, state) in enumerate(zip(asked_arms(spec), states, strict=True)):
        outcome = _ungated(state.outcome)
        blocked = _place_blocked(outcome, source) if isinstance(outcome, Launch) else _plan_blocked(outcome, arm)
        if blocked is not None:
            message, given = blocked.message, arm.model_dump(by_alias=True, exclude_none=True)
            for path, field in _FIELDS.items():
                if field in given:  # the arm's field, not the deployment's
                    message = re.sub(rf"\b{re.escape(path)}\b", f"spec.arms[{index}].{field}", message)
            return Blocked(blocked.reason, f"spec.arms[{index}] ({arm.name}): {message}", blocked.permanent)
        assert isinstance(outcome, Launch)  # noqa: S101  or it were blocked
        found.append(CapturedArm(arm.name, CapturedDeployment(source.key, source.uid, source.generation, outcome)))
    return _models_blocked(found) or found


def _plan_blocked(outcome: RolledBack | NotLaunched, arm: Arm) -> Blocked:
    if isinstance(outcome, RolledBack):
        return Blocked(_REJECTED, f"its engines never served ({outcome.failure}): remove the arm", permanent=True)
    readiness = outcome.readiness
    if readiness.reason in _FETCHING:
        lacks, helps = _FETCHING[readiness.reason]
        draft = arm.speculation.draft if arm.speculation else None
        model = f"speculation.draft.model: {draft.model}" if draft else "a checkpoint of the target"
        message = (
            f"{model}: {lacks}; continues when a SpecDecodeDeployment of this namespace that uses this model {helps}"
        )
        return Blocked(WAITS, message)
    why = f"{readiness.reason}: {readiness.message}"
    if not readiness.stalled:
        return Blocked(WAITS, why)
    reason = DOES_NOT_FIT if readiness.reason == Verdict.DOES_NOT_FIT.value else _REJECTED
    return Blocked(reason, why, permanent=True)


def _place_blocked(launch: Launch, source: CapturedDeployment) -> Blocked | None:
    """Reject an arm that needs other GPUs than the deployment, because all arms share them."""
    arm, deployment = (
        place_phrase(plan.gpus, plan.nodes, plan.product) for plan in (launch.plan.chosen, source.launch.plan.chosen)
    )
    message = f"needs {arm}, but all arms share the {deployment} of the deployment: remove the arm"
    return None if arm == deployment else Blocked(_REJECTED, message, permanent=True)


def _models_blocked(arms: Sequence[CapturedArm]) -> Blocked | None:
    """Reject arms that would download two revisions of a model to one folder of their pod."""
    seen: dict[str, tuple[str | None, str]] = {}
    for index, arm in enumerate(arms):
        spec = arm.source.launch.facts.spec
        for model in model_locations.fetched_models(spec).values() if model_locations.downloads_in_pods(spec) else ():
            revision, other = seen.setdefault(model.model, (model.revision, arm.name))
            if revision != model.revision:
                wanted, there = model.revision or "the newest", revision or "the newest"
                message = (
                    f"spec.arms[{index}] ({arm.name}): needs {model.model} at revision {wanted}, but arm {other} puts"
                    f" {there} into the same folder: set spec.models.cache of the deployment, which holds both"
                )
                return Blocked(_REJECTED, message, permanent=True)
    return None


def arm_notes(arms: Sequence[CapturedArm]) -> Iterator[str]:
    """Yield notes on arms that may start: arms with the same engine, and arms whose settings change the answers."""
    engines: dict[tuple[str, ...], str] = {}
    for arm in arms:
        earlier = engines.setdefault(tuple(plain_command(engine_pod_of(arm.source))), arm.name)
        if earlier != arm.name:
            yield f"arms {earlier} and {arm.name} start the same engine: an A/A test, which should find no difference"
        if lossy := lossy_answers(arm.source.launch.facts):
            yield f"arm {arm.name}: {lossy}"


def sampling_warning(
    spec: SpecDecodeCaptureSpec, source: CapturedDeployment, arms: Sequence[CapturedArm] = ()
) -> str | None:
    """Return a warning if a bug of vLLM affects the requests of a capture; ``arms`` is empty if it has none.

    The temperatures of users are unknown before a live capture.
    """
    is_live = spec.source is Source.LIVE
    if not is_live and spec.workload.is_greedy:
        return None
    if arms:
        found = {arm.name: lost for arm in arms if (lost := lost_sampling(arm.source.launch.facts))}
        affected, lost = f"arms {', '.join(found)}: ", next(iter(found.values()), None)
    else:
        affected, lost = "", lost_sampling(source.launch.facts)
    if lost is None:
        return None
    fix = "use acceptance only if all users send temperature 0" if is_live else "use temperature 0.0 or method none"
    return f"{affected}{lost}; {fix}"
